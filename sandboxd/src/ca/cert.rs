//! A certificate, as far as it matters here.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::Fingerprint;
use crate::clock::WallTime;

/// A certificate of a CA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cert {
    der: CertificateDer<'static>,
    name: String,
    not_before: WallTime,
    not_after: WallTime,
    /// How many of its kind may follow below it; none: it signs nothing.
    depth: Option<Depth>,
}

/// How long a chain below a CA may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    /// As long as it likes.
    Any,
    /// That many intermediates.
    Most(u32),
}

impl Cert {
    /// Reads all certificates of a PEM text; why not, in words.
    pub(super) fn all(pem: &[u8]) -> Result<Vec<Self>, String> {
        CertificateDer::pem_slice_iter(pem)
            .map(|der| Self::new(der.map_err(|error| error.to_string())?))
            .collect()
    }

    pub(super) fn new(der: CertificateDer<'static>) -> Result<Self, String> {
        let (rest, x509) = X509Certificate::from_der(&der).map_err(|error| error.to_string())?;
        if !rest.is_empty() {
            return Err("there are bytes behind the certificate".into());
        }
        let time = |time: x509_parser::time::ASN1Time| {
            let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
            WallTime::from_micros(seconds.saturating_mul(1_000_000))
        };
        let constraints = x509.basic_constraints().map_err(|error| error.to_string())?;
        let depth = constraints.filter(|found| found.value.ca).map(|found| {
            let most = found.value.path_len_constraint;
            most.map_or(Depth::Any, Depth::Most)
        });
        let name = x509.subject().iter_common_name().next();
        let name = name.and_then(|name| name.as_str().ok()).unwrap_or_default();
        Ok(Self {
            name: name.to_owned(),
            not_before: time(x509.validity().not_before),
            not_after: time(x509.validity().not_after),
            depth,
            der,
        })
    }

    /// Its bytes.
    #[must_use]
    pub const fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Whom it is of.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// From when it holds.
    #[must_use]
    pub const fn not_before(&self) -> WallTime {
        self.not_before
    }

    /// Until when it holds.
    #[must_use]
    pub const fn not_after(&self) -> WallTime {
        self.not_after
    }

    /// Whether it holds at this time.
    #[must_use]
    pub fn holds(&self, now: WallTime) -> bool {
        (self.not_before..=self.not_after).contains(&now)
    }

    /// Its fingerprint.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.der)
    }

    pub(super) const fn depth(&self) -> Option<Depth> {
        self.depth
    }

    /// Whether the other one signed it.
    pub(super) fn is_signed_by(&self, other: &Self) -> bool {
        let mine = X509Certificate::from_der(&self.der);
        let others = X509Certificate::from_der(&other.der);
        let (Ok((_, mine)), Ok((_, others))) = (mine, others) else {
            return false;
        };
        mine.issuer() == others.subject() && mine.verify_signature(Some(others.public_key())).is_ok()
    }

    /// Whether both are of one CA: its name and its key, whoever signed them.
    pub(super) fn is_same_ca(&self, other: &Self) -> bool {
        let mine = X509Certificate::from_der(&self.der);
        let others = X509Certificate::from_der(&other.der);
        let (Ok((_, mine)), Ok((_, others))) = (mine, others) else {
            return false;
        };
        self.depth.is_some()
            && mine.subject() == others.subject()
            && mine.public_key().raw == others.public_key().raw
    }

    /// Whether this is the public half of a key (the bytes of the point).
    pub(super) fn is_of_key(&self, public: &[u8]) -> bool {
        X509Certificate::from_der(&self.der)
            .is_ok_and(|(_, x509)| *x509.public_key().subject_public_key.data == *public)
    }

    /// As text.
    #[must_use]
    pub fn pem(&self) -> String {
        let text = STANDARD.encode(&self.der);
        let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
        for line in text.as_bytes().chunks(64) {
            pem.push_str(&String::from_utf8_lossy(line));
            pem.push('\n');
        }
        pem.push_str("-----END CERTIFICATE-----\n");
        pem
    }
}
