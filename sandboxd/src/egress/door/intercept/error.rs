//! Why a node cannot look into TLS.

use std::path::PathBuf;

use crate::ca::CaError;

/// Why a node cannot look into TLS.
#[derive(Debug, thiserror::Error)]
pub enum InterceptionError {
    /// Its own certificates.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// TLS itself.
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
    /// A file of `egress.tls.extra_roots`.
    #[error("egress.tls.extra_roots: {}: {why}", path.display())]
    Extra {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Nothing that origins could be verified by.
    #[error(
        "no root certificate of this host, nor of egress.tls.extra_roots, can be used: no origin could be verified"
    )]
    NoRoots,
}
