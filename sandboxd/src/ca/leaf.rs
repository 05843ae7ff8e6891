//! Leaves: certificates of the hosts that a rule looks into.

use std::time::Duration;

use rcgen::{ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, SanType};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::{CaError, Node, make};
use crate::{clock::WallTime, policy::Host};

/// How long a leaf holds.
const LEAF: Duration = Duration::from_secs(24 * 60 * 60);

/// The key of all leaves of this process. It is on no disk.
pub struct LeafKey(KeyPair);

impl std::fmt::Debug for LeafKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LeafKey(..)")
    }
}

impl LeafKey {
    /// A new one.
    ///
    /// # Errors
    /// [`CaError::Make`].
    pub fn new() -> Result<Self, CaError> {
        make::key().map(Self)
    }

    /// For whoever signs handshakes with it.
    #[must_use]
    pub fn der(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.0.serialize_der()).into()
    }
}

/// A certificate of one host.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// It, the intermediate that signed it, and in a rotation the cross-certificate above that.
    pub chain: Vec<CertificateDer<'static>>,
    /// From when another one is to be made.
    pub renew_at: WallTime,
}

impl Node {
    /// Makes a leaf for this host and no other, which ends with the intermediate at the latest.
    ///
    /// # Errors
    /// [`CaError::Make`].
    pub fn leaf(&self, host: &Host, key: &LeafKey, serial: [u8; 16], now: WallTime) -> Result<Leaf, CaError> {
        let to = now.plus(LEAF).min(self.not_after());
        let mut params = make::params("sandboxd leaf", serial, make::before(now, make::BACK), to)?;
        params.subject_alt_names = vec![match host {
            Host::Name(name) => SanType::DnsName(name.as_str().try_into().map_err(CaError::Make)?),
            Host::Address(address) => SanType::IpAddress(*address),
        }];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key.0, &self.issuer).map_err(CaError::Make)?;
        let left = to.as_micros().saturating_sub(now.as_micros());
        Ok(Leaf {
            chain: std::iter::once(leaf.der().clone()).chain(self.above()).collect(),
            renew_at: now.plus(Duration::from_micros(left / 2)),
        })
    }
}
