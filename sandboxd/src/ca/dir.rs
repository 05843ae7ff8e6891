//! The folder of a CA, and what the commands do in it.
//!
//! ```text
//! bundle.pem             roots that guests are to trust, newest first: the same on every node
//! root-<8 digits>.key    a root's key, 0600: it belongs elsewhere
//! cross.pem              in a rotation: the new root as the old one vouches for it, the same on every node
//! node.pem               this node's intermediate and its key, 0600
//! ```

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use rcgen::KeyPair;
use rustls_pki_types::{PrivateKeyDer, pem::PemObject as _};
use zeroize::Zeroizing;

use super::{Bundle, CaError, Cert, Fingerprint, Node, cert::Depth, make};
use crate::{clock::WallTime, disk};

const BUNDLE: &str = "bundle.pem";
const NODE: &str = "node.pem";
/// Largest file that is read.
const MOST: u64 = 1024 * 1024;
/// An intermediate that holds for longer than this is not replaced unasked: less than a third of its time is left.
const SOON: std::time::Duration = std::time::Duration::from_secs(30 * 24 * 60 * 60);

/// A CA's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dir(PathBuf);

/// What a command came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// False: it was so before.
    pub changed: bool,
    /// The newest root.
    pub root: Fingerprint,
    /// Where its key was put; none if nothing was made.
    pub key: Option<PathBuf>,
    /// The roots of the bundle.
    pub bundle: Vec<Fingerprint>,
    /// Where the cross-certificate lies; none: no rotation is under way, or none could be made.
    pub cross: Option<PathBuf>,
}

/// What a node was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// False: a good one was there.
    pub changed: bool,
    /// The intermediate.
    pub cert: Cert,
    /// The root that signed it.
    pub root: Fingerprint,
}

impl Dir {
    /// At this path.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The roots' file.
    #[must_use]
    pub fn bundle_file(&self) -> PathBuf {
        self.0.join(BUNDLE)
    }

    /// The intermediate's file.
    #[must_use]
    pub fn node_file(&self) -> PathBuf {
        self.0.join(NODE)
    }

    /// Where a root's key lies unless it was put elsewhere.
    #[must_use]
    pub fn key_file(&self, root: Fingerprint) -> PathBuf {
        self.0.join(format!("root-{}.key", root.short()))
    }

    /// The roots.
    ///
    /// # Errors
    /// [`CaError::NoBundle`], [`CaError::Unread`], [`CaError::Damaged`].
    pub fn bundle(&self) -> Result<Bundle, CaError> {
        let path = self.bundle_file();
        let text = match text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CaError::NoBundle { dir: self.0.clone() });
            }
            Err(source) => return Err(CaError::Unread { path, source }),
        };
        let damaged = |why: String| CaError::Damaged {
            path: path.clone(),
            why,
        };
        let roots = Cert::all(&text).map_err(damaged)?;
        if roots.is_empty() {
            return Err(damaged("it holds no certificate".into()));
        }
        for root in &roots {
            if root.depth().is_none() || !root.is_signed_by(root) {
                return Err(damaged(format!("{} is no root", root.fingerprint().short())));
            }
        }
        Ok(Bundle { roots })
    }

    /// Makes the root, unless there is one; its key goes to `key`, or beside the bundle.
    ///
    /// # Errors
    /// [`CaError`]; a file that is there is never overwritten.
    pub fn init(&self, key: Option<PathBuf>, serial: [u8; 16], now: WallTime) -> Result<Done, CaError> {
        match self.bundle() {
            Ok(bundle) => Ok(unchanged(&bundle)),
            Err(CaError::NoBundle { .. }) => self.add_root(Vec::new(), key, None, serial, now),
            Err(error) => Err(error),
        }
    }

    /// Makes a new root and puts it before the old one, unless both are there already; and has the old one vouch for it,
    /// unless it did. The old root's key is that of `old_key`, or the one beside the bundle; without any, guests that know
    /// the old root alone will not trust what the new one signs.
    ///
    /// # Errors
    /// [`CaError`]; a file that is there is never overwritten, but for the bundle, which grows, and a cross-certificate of
    /// another rotation.
    pub fn rotate(
        &self,
        key: Option<PathBuf>,
        old_key: Option<&Path>,
        serial: [u8; 16],
        now: WallTime,
    ) -> Result<Done, CaError> {
        let bundle = self.bundle()?;
        let (newest, old) = match bundle.roots() {
            [newest, old, ..] => (newest, old),
            [old, ..] => {
                let old_key = self.old_key(old, old_key)?;
                return self.add_root(bundle.roots, key, old_key, serial, now);
            }
            [] => return Err(CaError::NoBundle { dir: self.0.clone() }),
        };
        let mut done = unchanged(&bundle);
        done.cross = self.cross(&bundle, now)?.map(|_cross| self.cross_file());
        if done.cross.is_none()
            && let Some(old_key) = self.old_key(old, old_key)?
        {
            self.write_cross(newest, old, old_key, serial, now)?;
            (done.changed, done.cross) = (true, Some(self.cross_file()));
        }
        Ok(done)
    }

    /// Drops all roots but the newest.
    ///
    /// # Errors
    /// [`CaError::StillUsed`] while the node's intermediate is of another; [`CaError`].
    pub fn finish(&self) -> Result<Done, CaError> {
        let mut bundle = self.bundle()?;
        if bundle.roots.len() < 2 {
            return Ok(unchanged(&bundle));
        }
        if let Some((cert, _)) = self.node_files()? {
            let newest = bundle.roots.first();
            if !newest.is_some_and(|newest| cert.is_signed_by(newest)) {
                return Err(CaError::StillUsed);
            }
        }
        bundle.roots.truncate(1);
        self.write_bundle(&bundle)?;
        self.drop_cross()?;
        Ok(Done {
            changed: true,
            ..unchanged(&bundle)
        })
    }

    fn add_root(
        &self,
        mut roots: Vec<Cert>,
        key: Option<PathBuf>,
        old_key: Option<KeyPair>,
        serial: [u8; 16],
        now: WallTime,
    ) -> Result<Done, CaError> {
        disk::make_dir(&self.0, 0o755).map_err(|source| CaError::Unwritten {
            path: self.0.clone(),
            source,
        })?;
        let made = make::root(serial, now)?;
        let path = key.unwrap_or_else(|| self.key_file(made.cert.fingerprint()));
        if path.symlink_metadata().is_ok() {
            return Err(CaError::Exists { path });
        }
        // The key first: a root whose key is lost would have to be rotated away.
        let text = Zeroizing::new(made.key.serialize_pem());
        write(&path, text.as_bytes(), 0o600)?;
        // Then what nothing looks at without the bundle.
        let mut cross = None;
        if let (Some(old), Some(old_key)) = (roots.first(), old_key) {
            self.write_cross(&made.cert, old, old_key, serial, now)?;
            cross = Some(self.cross_file());
        }
        roots.insert(0, made.cert);
        let bundle = Bundle { roots };
        self.write_bundle(&bundle)?;
        Ok(Done {
            changed: true,
            key: Some(path),
            cross,
            ..unchanged(&bundle)
        })
    }

    fn write_bundle(&self, bundle: &Bundle) -> Result<(), CaError> {
        write(&self.bundle_file(), bundle.pem().as_bytes(), 0o644)
    }

    /// Issues the node's intermediate by the newest root, unless it has one of that root that holds for a while yet.
    ///
    /// # Errors
    /// [`CaError`].
    pub fn issue_node(
        &self,
        key: Option<PathBuf>,
        name: &str,
        renew: bool,
        serial: [u8; 16],
        now: WallTime,
    ) -> Result<Issued, CaError> {
        let bundle = self.bundle()?;
        let [root, ..] = bundle.roots() else {
            return Err(CaError::NoBundle { dir: self.0.clone() });
        };
        let fingerprint = root.fingerprint();
        if let Some((cert, _)) = self.node_files()?
            && !renew
            && cert.is_signed_by(root)
            && cert.not_after() > now.plus(SOON)
        {
            return Ok(Issued {
                changed: false,
                cert,
                root: fingerprint,
            });
        }
        let path = key.unwrap_or_else(|| self.key_file(fingerprint));
        let root_key = read_key(&path, &secret(&path)?)?;
        if !root.is_of_key(root_key.public_key_raw()) {
            return Err(CaError::OtherKey {
                path,
                root: fingerprint,
            });
        }
        let made = make::intermediate(root, root_key, name, serial, now)?;
        // One file, so that one rename changes both.
        let text = Zeroizing::new(format!(
            "{}{}",
            made.cert.pem(),
            &*Zeroizing::new(made.key.serialize_pem())
        ));
        write(&self.node_file(), text.as_bytes(), 0o600)?;
        Ok(Issued {
            changed: true,
            cert: made.cert,
            root: fingerprint,
        })
    }

    /// The node's intermediate and key, as they lie there; none: it has none.
    pub(super) fn node_files(&self) -> Result<Option<(Cert, KeyPair)>, CaError> {
        let path = self.node_file();
        if matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound) {
            return Ok(None);
        }
        let text = secret(&path)?;
        let damaged = |why: String| CaError::Damaged {
            path: path.clone(),
            why,
        };
        let mut certs = Cert::all(&text).map_err(damaged)?;
        let key = read_key(&path, &text)?;
        let (Some(cert), true) = (certs.pop(), certs.is_empty()) else {
            return Err(damaged("it holds not exactly one certificate".into()));
        };
        if cert.depth() != Some(Depth::Most(0)) {
            return Err(damaged(
                "its certificate is no intermediate that signs leaves alone".into(),
            ));
        }
        if !cert.is_of_key(key.public_key_raw()) {
            return Err(damaged("its key is another's".into()));
        }
        Ok(Some((cert, key)))
    }

    /// The node's intermediate, whatever its dates; none: it has none.
    ///
    /// # Errors
    /// [`CaError`].
    pub fn intermediate(&self) -> Result<Option<Cert>, CaError> {
        Ok(self.node_files()?.map(|(cert, _)| cert))
    }

    /// Opens what this node signs leaves with; none: it looks into nothing. Blocks.
    ///
    /// # Errors
    /// [`CaError`] for whatever is there and does not hold.
    pub fn open(&self, now: WallTime) -> Result<Option<Node>, CaError> {
        let Some((cert, key)) = self.node_files()? else {
            return Ok(None);
        };
        let bundle = self.bundle()?;
        let path = self.node_file();
        let signer = bundle.roots.iter().find(|root| cert.is_signed_by(root));
        let Some(root) = signer.map(Cert::fingerprint) else {
            return Err(CaError::Unsigned { path });
        };
        if !cert.holds(now) {
            return Err(CaError::Dates {
                path,
                from: cert.not_before(),
                to: cert.not_after(),
            });
        }
        let issuer = rcgen::Issuer::from_ca_cert_der(cert.der(), key).map_err(CaError::Make)?;
        // It leads from the newest root alone.
        let is_newest = bundle.fingerprints().first() == Some(&root);
        let cross = self.cross(&bundle, now)?.filter(|_| is_newest);
        Ok(Some(Node {
            issuer,
            intermediate: cert,
            root,
            bundle,
            cross,
        }))
    }
}

fn unchanged(bundle: &Bundle) -> Done {
    let prints = bundle.fingerprints();
    Done {
        changed: false,
        root: prints.first().copied().unwrap_or_else(|| Fingerprint::of(&[])),
        key: None,
        bundle: prints,
        cross: None,
    }
}

pub(super) fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), CaError> {
    disk::write_atomic(path, bytes, mode).map_err(|source| CaError::Unwritten {
        path: path.to_owned(),
        source,
    })
}

pub(super) fn text(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a file that holds a key: nobody else may read it, or have put it there.
pub(super) fn secret(path: &Path) -> Result<Zeroizing<Vec<u8>>, CaError> {
    let unread = |source| CaError::Unread {
        path: path.to_owned(),
        source,
    };
    let exposed = |why: &str| CaError::Exposed {
        path: path.to_owned(),
        why: why.to_owned(),
    };
    let file = rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY
            | rustix::fs::OFlags::NOFOLLOW
            | rustix::fs::OFlags::CLOEXEC
            | rustix::fs::OFlags::NONBLOCK,
        rustix::fs::Mode::empty(),
    );
    let mut file = match file {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::LOOP) => return Err(exposed("is a link")),
        Err(errno) => return Err(unread(errno.into())),
    };
    // The descriptor is judged, and not its name: nothing can change between.
    let about: fs::Metadata = file.metadata().map_err(unread)?;
    if !about.is_file() {
        return Err(exposed("is no plain file"));
    }
    let mode = about.mode() & 0o7777;
    if mode & 0o177 != 0 {
        return Err(exposed(&format!("has mode {mode:04o}")));
    }
    if about.uid() != 0 && about.uid() != rustix::process::geteuid().as_raw() {
        return Err(exposed("belongs to another user"));
    }
    if about.len() > MOST {
        return Err(exposed("is larger than 1 MiB"));
    }
    // No second buffer that would not be zeroed.
    let length = usize::try_from(about.len()).unwrap_or(0);
    let mut bytes = Zeroizing::new(vec![0; length]);
    file.read_exact(&mut bytes).map_err(unread)?;
    Ok(bytes)
}

pub(super) fn read_key(path: &Path, pem: &[u8]) -> Result<KeyPair, CaError> {
    let damaged = |why: String| CaError::Damaged {
        path: path.to_owned(),
        why,
    };
    let der = PrivateKeyDer::from_pem_slice(pem).map_err(|error| damaged(error.to_string()))?;
    KeyPair::try_from(&der).map_err(|error| damaged(error.to_string()))
}
