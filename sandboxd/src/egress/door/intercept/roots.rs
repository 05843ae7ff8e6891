//! Opens what a node looks into TLS with: its certificates, and the roots that it verifies origins by.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use rustls_pki_types::{CertificateDer, pem::PemObject as _};

use super::{Interception, InterceptionError};
use crate::{ca::Dir, clock::Clock};

/// Largest file of roots that is read.
const PEM: u64 = 16 * 1024 * 1024;

impl Interception {
    /// By the files of a CA's folder; none where that holds no intermediate. Origins are verified by the host's own roots
    /// and those of `extra`. Blocks.
    ///
    /// # Errors
    /// [`InterceptionError`] for whatever is there and does not hold.
    pub fn open(ca: &Dir, extra: &[PathBuf], clock: Clock) -> Result<Option<Self>, InterceptionError> {
        let Some(node) = ca.open(clock.wall())? else {
            return Ok(None);
        };
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "a root of this host cannot be read");
        }
        let mut roots = found.certs;
        for path in extra {
            roots.extend(read(path)?);
        }
        Self::new(node, roots, clock).map(Some)
    }
}

fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, InterceptionError> {
    let fail = |why: String| InterceptionError::Extra {
        path: path.to_owned(),
        why,
    };
    let mut pem = Vec::new();
    File::open(path)
        .and_then(|file| file.take(PEM).read_to_end(&mut pem))
        .map_err(|error| fail(error.to_string()))?;
    let roots: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let roots = roots.map_err(|error| fail(error.to_string()))?;
    if roots.is_empty() {
        return Err(fail("it holds no certificate".to_owned()));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk;

    #[test]
    fn a_node_without_an_intermediate_has_none_and_roots_that_cannot_be_read_are_told() {
        let temp = tempfile::tempdir().unwrap();
        let (ca, clock) = (Dir::new(temp.path().join("ca")), Clock::host());
        assert!(Interception::open(&ca, &[], clock.clone()).unwrap().is_none());
        ca.init(None, [1; 16], clock.wall()).unwrap();
        assert!(Interception::open(&ca, &[], clock.clone()).unwrap().is_none());
        ca.issue_node(None, "n", false, [2; 16], clock.wall()).unwrap();
        let extra = [ca.bundle_file()];
        assert!(Interception::open(&ca, &extra, clock.clone()).unwrap().is_some());
        for text in ["", "nonsense"] {
            let path = temp.path().join("extra.pem");
            disk::write_atomic(&path, text.as_bytes(), 0o644).unwrap();
            let opened = Interception::open(&ca, &[path], clock.clone());
            assert!(matches!(opened, Err(InterceptionError::Extra { .. })), "{text}");
        }
        disk::write_atomic(&ca.node_file(), b"nonsense", 0o600).unwrap();
        assert!(matches!(
            Interception::open(&ca, &extra, clock),
            Err(InterceptionError::Ca(_))
        ));
    }
}
