//! rustls with ring: what the SDK trusts.

use std::{io, path::Path, sync::Arc};

use rustls::{ClientConfig, RootCertStore, crypto::ring};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};

use crate::error::Error;

/// Bundles of the common distributions; the first that exists is read.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Trusts the host's bundle and the certificates of `extra` (PEM).
pub(super) async fn config(extra: &[u8]) -> Result<Arc<ClientConfig>, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(extra) {
        let certificate =
            certificate.map_err(|source| Error::invalid("ca", format!("not PEM certificates: {source}")))?;
        roots
            .add(certificate)
            .map_err(|source| Error::invalid("ca", format!("not a CA certificate: {source}")))?;
    }
    if roots.is_empty() && !extra.is_empty() {
        return Err(Error::invalid("ca", "it holds no PEM certificate".to_owned()));
    }
    if let Some(bundle) = bundle().await {
        // Old bundles hold certificates that webpki refuses; the others still count.
        let (_added, _ignored) =
            roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&bundle).filter_map(Result::ok));
    }
    if roots.is_empty() {
        return Err(Error::invalid(
            "ca",
            "this host has no bundle of CA certificates: pass the CA of the daemon".to_owned(),
        ));
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::invalid("tls", source.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

async fn bundle() -> Option<Vec<u8>> {
    for path in BUNDLES {
        match tokio::fs::read(Path::new(path)).await {
            Ok(bytes) => return Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::debug!(path, %error, "bundle of CA certificates not readable"),
        }
    }
    None
}
