//! Makes roots and intermediates.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, SerialNumber, SubjectPublicKeyInfo,
};
use time::OffsetDateTime;

use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{CaError, Cert};
use crate::clock::WallTime;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a root holds.
const ROOT: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Certificates that may stand between a root and a leaf: an intermediate, and in a rotation the cross-certificate above it.
pub(super) const ROOT_DEPTH: u8 = 2;
/// How long an intermediate holds.
pub(super) const INTERMEDIATE: Duration = DAY.saturating_mul(90);
/// How far back a new certificate holds: clocks of guests differ.
pub(super) const BACK: Duration = Duration::from_secs(60 * 60);

/// A certificate and the key that goes with it.
pub(super) struct Made {
    pub(super) cert: Cert,
    pub(super) key: KeyPair,
}

/// A new P-256 key.
pub(super) fn key() -> Result<KeyPair, CaError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CaError::Make)
}

/// What all our certificates have in common.
pub(super) fn params(
    name: &str,
    serial: [u8; 16],
    from: WallTime,
    to: WallTime,
) -> Result<CertificateParams, CaError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(serial_number(serial));
    params.not_before = date(from)?;
    params.not_after = date(to)?;
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Positive, as it has to be.
fn serial_number(mut serial: [u8; 16]) -> SerialNumber {
    let [first, ..] = &mut serial;
    *first = *first & 0x7f | 0x40;
    SerialNumber::from_slice(&serial)
}

fn date(time: WallTime) -> Result<OffsetDateTime, CaError> {
    let seconds = i64::try_from(time.as_micros() / 1_000_000).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(seconds).map_err(|_beyond| CaError::Make(rcgen::Error::Time))
}

/// A moment before another one.
pub(super) fn before(time: WallTime, by: Duration) -> WallTime {
    let by = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
    WallTime::from_micros(time.as_micros().saturating_sub(by))
}

fn sign_certs() -> Vec<KeyUsagePurpose> {
    vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign]
}

fn read(cert: &rcgen::Certificate) -> Result<Cert, CaError> {
    // What was made here can be read here.
    Cert::new(cert.der().clone()).map_err(|_unreadable| CaError::Make(rcgen::Error::CouldNotParseCertificate))
}

/// A root.
pub(super) fn root(serial: [u8; 16], now: WallTime) -> Result<Made, CaError> {
    let key = key()?;
    let [a, b, c, d, ..] = serial;
    // No two roots of a bundle have one name: programs that look an issuer up by name find the right one.
    let name = format!("sandboxd root {a:02x}{b:02x}{c:02x}{d:02x}");
    let mut params = params(&name, serial, before(now, BACK), now.plus(ROOT))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(ROOT_DEPTH));
    params.key_usages = sign_certs();
    let cert = params.self_signed(&key).map_err(CaError::Make)?;
    Ok(Made {
        cert: read(&cert)?,
        key,
    })
}

/// A cross-certificate of a root by another.
pub(super) fn cross(
    root: &Cert,
    issuer: &Issuer<'_, KeyPair>,
    until: WallTime,
    serial: [u8; 16],
    now: WallTime,
) -> Result<Cert, CaError> {
    let unreadable = || CaError::Make(rcgen::Error::CouldNotParseCertificate);
    let (_, x509) = X509Certificate::from_der(root.der()).map_err(|_unreadable| unreadable())?;
    let key = SubjectPublicKeyInfo::from_der(x509.public_key().raw).map_err(CaError::Make)?;
    let mut params = params(root.name(), serial, before(now, BACK), until)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
    params.key_usages = sign_certs();
    read(&params.signed_by(&key, issuer).map_err(CaError::Make)?)
}

/// An intermediate of a node, which signs leaves alone, and ends with its root at the latest.
pub(super) fn intermediate(
    root: &Cert,
    root_key: KeyPair,
    name: &str,
    serial: [u8; 16],
    now: WallTime,
) -> Result<Made, CaError> {
    let key = key()?;
    let to = now.plus(INTERMEDIATE).min(root.not_after());
    let mut params = params(&format!("sandboxd node {name}"), serial, before(now, BACK), to)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = sign_certs();
    let issuer = Issuer::from_ca_cert_der(root.der(), root_key).map_err(CaError::Make)?;
    let cert = params.signed_by(&key, &issuer).map_err(CaError::Make)?;
    Ok(Made {
        cert: read(&cert)?,
        key,
    })
}
