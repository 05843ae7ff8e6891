//! Certificate and key of the TCP listener, re-read when their files change.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwap;
use rustls::{ServerConfig, crypto::ring, pki_types::pem::PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::ListenError;

/// Largest PEM file that is read.
const PEM: u64 = 1024 * 1024;

/// Files of a certificate chain and its key, and what was last read of them that works.
#[derive(Debug)]
pub struct Certificates {
    files: Mutex<Files>,
    good: ArcSwap<ServerConfig>,
}

/// Which files, and as what they were seen last.
#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    seen: [Stamp; 2],
}

/// By what a changed file is known: device, inode, size, and time of change in nanoseconds.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

impl Certificates {
    /// Reads both files. Blocks.
    ///
    /// # Errors
    /// [`ListenError::Tls`], which names the file.
    pub fn open(cert: PathBuf, key: PathBuf) -> Result<Self, ListenError> {
        let seen = [stamp(&cert), stamp(&key)];
        let config = read(&cert, &key)?;
        Ok(Self {
            files: Mutex::new(Files { cert, key, seen }),
            good: ArcSwap::from(config),
        })
    }

    /// Takes other files, which were opened just now, in the place of its own. The next connection meets them.
    pub fn replace(&self, other: Self) {
        let Self { files, good } = other;
        let mut mine = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        *mine = files.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.good.store(good.into_inner());
    }

    /// What to meet the next connection with. Costs two looks at files; a change of either is read at once, and one
    /// that does not work is told once and the old kept.
    pub fn now(&self) -> Arc<ServerConfig> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = [stamp(&files.cert), stamp(&files.key)];
        if files.seen == stamps {
            return self.good.load_full();
        }
        files.seen = stamps;
        match read(&files.cert, &files.key) {
            Ok(config) => {
                tracing::info!(cert = %files.cert.display(), "TLS certificate read anew");
                self.good.store(config);
            }
            Err(error) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the new TLS certificate does not work; the old one stays"
            ),
        }
        self.good.load_full()
    }
}

fn stamp(path: &Path) -> Stamp {
    let about = fs::metadata(path).ok()?;
    Some((
        about.dev(),
        about.ino(),
        about.len(),
        about.mtime(),
        about.mtime_nsec(),
    ))
}

fn read(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, ListenError> {
    type Cause = Box<dyn std::error::Error + Send + Sync>;
    let fail = |what: &'static str, path: &Path, source: Cause| ListenError::Tls {
        what,
        path: path.to_owned(),
        source,
    };
    let bytes = |path: &Path| -> Result<Vec<u8>, Cause> {
        if fs::metadata(path)?.len() > PEM {
            return Err("it is larger than 1 MiB".into());
        }
        Ok(fs::read(path)?)
    };
    let pem = bytes(cert).map_err(|source| fail("the certificate", cert, source))?;
    let chain = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| fail("the certificate", cert, source.into()))?;
    let pem = zeroize::Zeroizing::new(bytes(key).map_err(|source| fail("the key", key, source))?);
    let secret = PrivateKeyDer::from_pem_slice(&pem).map_err(|source| fail("the key", key, source.into()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|source| fail("the certificate", cert, source.into()))?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|source| fail("the certificate", cert, source.into()))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::write_atomic;

    #[test]
    fn a_change_is_taken_up_and_a_bad_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        let write = || {
            let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
            write_atomic(&cert, made.cert.pem().as_bytes(), 0o600).unwrap();
            write_atomic(&key, made.signing_key.serialize_pem().as_bytes(), 0o600).unwrap();
        };
        assert!(matches!(
            Certificates::open(cert.clone(), key.clone()),
            Err(ListenError::Tls {
                what: "the certificate",
                ..
            })
        ));
        write();
        let certificates = Certificates::open(cert.clone(), key.clone()).unwrap();
        let first = certificates.now();
        assert!(Arc::ptr_eq(&first, &certificates.now()));
        write();
        let second = certificates.now();
        assert!(!Arc::ptr_eq(&first, &second));
        write_atomic(&cert, b"nonsense", 0o600).unwrap();
        assert!(Arc::ptr_eq(&second, &certificates.now()));
        fs::remove_file(&key).unwrap();
        assert!(Arc::ptr_eq(&second, &certificates.now()));
        write();
        assert!(!Arc::ptr_eq(&second, &certificates.now()));
    }
}
