//! Why the host key could not be had.

use std::{io, path::PathBuf};

/// What this room could not do.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The host key cannot be read.
    #[error("the host key cannot be read from {path}")]
    KeyUnread {
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The host key cannot be made.
    #[error("the host key cannot be written to {path}")]
    KeyUnwritten {
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file does not hold 32 bytes.
    #[error("{path} is no host key; with another one, tokens of living claims stop working")]
    KeyDamaged {
        /// Its file.
        path: PathBuf,
    },
    /// Others than the owner may read the file.
    #[error("{path} may be read by others (mode {mode:o}); set it to 600")]
    KeyExposed {
        /// Its file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}
