//! A capture: memory, device state and manifest of one template variant, in one directory. Complete and immutable, or
//! not there.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use super::{Facts, ram};
use crate::{
    ca::Fingerprint,
    clock::WallTime,
    disk,
    image::{self, Digest, Image, Rootfs},
    tasks,
    words::{Lane, Size},
};

const MANIFEST: &str = "manifest.json";
pub(super) const RAM: &str = "ram";
pub(super) const STATE: &str = "state";
/// Largest manifest that is read.
const MANIFEST_MOST: u64 = 64 * 1024;
/// Largest device state that is loaded; 105 KiB for a small guest.
const STATE_MOST: u64 = 64 * 1024 * 1024;

/// Why a capture cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// There is none.
    #[error("{} holds no capture", dir.display())]
    Missing {
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// Its content is not what its manifest says.
    #[error("capture in {} is damaged: {file}: {why}", dir.display())]
    Damaged {
        /// Its directory.
        dir: PathBuf,
        /// The file that is wrong.
        file: &'static str,
        /// In what way.
        why: String,
    },
    /// It was made for another host, emulator or image.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// The host could not read or write it.
    #[error("cannot {what} {}", path.display())]
    Host {
        /// The operation.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

/// What a capture does not have in common with this host: rebuild the template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the capture was made with {what} {then}, here it is {now}")]
pub struct Stale {
    /// In what they differ.
    pub what: &'static str,
    /// The capture's.
    pub then: String,
    /// This host's.
    pub now: String,
}

/// The image that a capture was booted from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRef {
    /// Its name.
    pub name: String,
    /// Its directory: a root disk is read from there.
    pub dir: PathBuf,
    /// Digest of its manifest.
    pub digest: Digest,
    /// Digest of its kernel.
    pub kernel: Digest,
    /// Version of its silkd.
    pub silkd_version: String,
    /// Its root disk.
    pub rootfs: Option<Rootfs>,
}

impl ImageRef {
    /// As a capture notes it.
    #[must_use]
    pub fn of(image: &Image) -> Self {
        let manifest = image.manifest();
        Self {
            name: manifest.name.clone(),
            dir: image.dir().to_owned(),
            digest: image.digest(),
            kernel: manifest.kernel.sha256,
            silkd_version: manifest.silkd_version.clone(),
            rootfs: manifest.rootfs.clone(),
        }
    }
}

/// What a capture says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureManifest {
    /// Always 1.
    pub format: u32,
    /// Engine, emulator, machine, processor.
    pub facts: Facts,
    /// The image it was booted from.
    pub image: ImageRef,
    /// What a clone has of the host.
    pub size: Size,
    /// How a clone reaches out.
    pub lane: Lane,
    /// Lowest agent proto of its silkd.
    pub proto_min: u32,
    /// Highest agent proto of its silkd.
    pub proto_max: u32,
    /// The command that ran in it before the capture.
    pub warmup: Vec<String>,
    /// Roots of the host that its programs trust.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ca: Vec<Fingerprint>,
    /// When it was captured.
    pub created_at: WallTime,
    /// Digest of the memory in use (SHA-256 of the blocks of 64 KiB that are not zero, each behind its number, and of the
    /// length); `None` for the stub.
    pub ram: Option<Digest>,
    /// SHA-256 of the device state; `None` for the stub.
    pub state: Option<Digest>,
}

impl CaptureManifest {
    /// Version of [`format`](Self::format) that this build writes and reads.
    pub const FORMAT: u32 = 1;

    fn digest(&self) -> Digest {
        // A struct of plain values always has a JSON form.
        Digest::of(&serde_json::to_vec(self).unwrap_or_default())
    }
}

/// A complete capture on disk. Cheap to clone; its memory is loaded once, by the first clone, and kept while any clone of
/// this value lives.
#[derive(Debug, Clone)]
pub struct Capture(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    digest: Digest,
    manifest: CaptureManifest,
    loaded: OnceCell<Loaded>,
}

/// Checked content, out of anybody's reach.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) ram: OwnedFd,
    pub(super) state: OwnedFd,
    pub(super) rootfs: Option<OwnedFd>,
}

impl Capture {
    /// Completes a directory into which [`Machine::capture`](super::Machine::capture) wrote: files read-only and synced,
    /// then the manifest, then the directory. Blocks.
    ///
    /// # Errors
    /// [`CaptureError::Host`]; without a manifest the directory is no capture.
    pub fn seal(dir: &Path, manifest: &CaptureManifest) -> Result<Self, CaptureError> {
        let at = |what, path: &Path| {
            let path = path.to_owned();
            move |source| CaptureError::Host { what, path, source }
        };
        for (file, _) in files(manifest) {
            let path = dir.join(file);
            let file = File::open(&path).map_err(at("open", &path))?;
            file.set_permissions(fs::Permissions::from_mode(0o444))
                .map_err(at("make read-only", &path))?;
            file.sync_all().map_err(at("sync", &path))?;
        }
        let path = dir.join(MANIFEST);
        let text = serde_json::to_vec_pretty(manifest).map_err(|error| CaptureError::Host {
            what: "write",
            path: path.clone(),
            source: error.into(),
        })?;
        disk::write_atomic(&path, &text, 0o444).map_err(at("write", &path))?;
        Self::open(dir)
    }

    /// Opens a capture: manifest and lengths are judged now, digests when it is loaded. Blocks shortly.
    ///
    /// # Errors
    /// [`CaptureError`].
    pub fn open(dir: &Path) -> Result<Self, CaptureError> {
        let path = dir.join(MANIFEST);
        let damaged = |file, why| CaptureError::Damaged {
            dir: dir.to_owned(),
            file,
            why,
        };
        let failed = |source: io::Error| {
            if source.kind() == io::ErrorKind::NotFound {
                CaptureError::Missing { dir: dir.to_owned() }
            } else {
                CaptureError::Host {
                    what: "read",
                    path: path.clone(),
                    source,
                }
            }
        };
        let mut text = Vec::new();
        let file = File::open(&path).map_err(failed)?;
        file.take(MANIFEST_MOST).read_to_end(&mut text).map_err(failed)?;
        let manifest: CaptureManifest =
            serde_json::from_slice(&text).map_err(|error| damaged(MANIFEST, error.to_string()))?;
        if manifest.format != CaptureManifest::FORMAT {
            return Err(damaged(MANIFEST, format!("its format is {}", manifest.format)));
        }
        for (file, length) in files(&manifest) {
            let found = fs::metadata(dir.join(file))
                .map_err(|error| damaged(file, error.to_string()))?
                .len();
            if length.map_or(found == 0 || found > STATE_MOST, |length| found != length) {
                return Err(damaged(file, format!("has {found} bytes")));
            }
        }
        Ok(Self(Arc::new(Inner {
            dir: dir.to_owned(),
            digest: manifest.digest(),
            manifest,
            loaded: OnceCell::new(),
        })))
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// Digest of its manifest, hence of all of it.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.0.digest
    }

    /// What it says of itself.
    #[must_use]
    pub fn manifest(&self) -> &CaptureManifest {
        &self.0.manifest
    }

    /// Whether it can run on this engine.
    ///
    /// # Errors
    /// [`Stale`] names the first difference.
    pub fn fits(&self, here: &Facts) -> Result<(), Stale> {
        let then = &self.0.manifest.facts;
        let pairs = [
            ("engine", then.engine.as_str(), here.engine.as_str()),
            ("accelerator", then.accel.as_str(), here.accel.as_str()),
            ("emulator", &then.version, &here.version),
            ("machine", &then.machine, &here.machine),
            ("processor", &then.cpu, &here.cpu),
        ];
        match pairs.into_iter().find(|(_, then, here)| then != here) {
            None => Ok(()),
            Some((what, then, now)) => Err(Stale {
                what,
                then: then.to_owned(),
                now: now.to_owned(),
            }),
        }
    }

    /// Its content in sealed memory, checked on the way there; loaded by the first caller, whom the others wait for.
    /// Cancel safe: the next caller begins anew.
    pub(super) async fn load(&self) -> Result<&Loaded, CaptureError> {
        let load = || async {
            let this = self.clone();
            let loading = tasks::blocking("load a capture", move || this.load_blocking());
            loading.await.unwrap_or_else(|_panicked| {
                Err(CaptureError::Damaged {
                    dir: self.0.dir.clone(),
                    file: RAM,
                    why: "loading it was broken off".to_owned(),
                })
            })
        };
        self.0.loaded.get_or_try_init(load).await
    }

    fn load_blocking(&self) -> Result<Loaded, CaptureError> {
        let Inner { dir, manifest, .. } = &*self.0;
        let host = |what, file: &str| {
            let path = dir.join(file);
            move |source| CaptureError::Host { what, path, source }
        };
        let damaged = |file| CaptureError::Damaged {
            dir: dir.clone(),
            file,
            why: "its digest is not that of the manifest".to_owned(),
        };
        let size = manifest.size.memory.0;
        let source = File::open(dir.join(RAM)).map_err(host("open", RAM))?;
        let memory = ram::memory_file("sandbox template", size).map_err(host("make memory for", RAM))?;
        let memory = File::from(memory);
        let found = ram::copy_used(&source, &memory, size).map_err(host("load", RAM))?;
        if Some(found) != manifest.ram {
            return Err(damaged(RAM));
        }
        ram::seal(&memory).map_err(host("seal", RAM))?;

        let mut bytes = Vec::new();
        File::open(dir.join(STATE))
            .and_then(|file| file.take(STATE_MOST).read_to_end(&mut bytes))
            .map_err(host("load", STATE))?;
        if Some(Digest::of(&bytes)) != manifest.state {
            return Err(damaged(STATE));
        }
        let state = ram::memory_file("sandbox device state", 0).map_err(host("make memory for", STATE))?;
        let mut state = File::from(state);
        state.write_all(&bytes).map_err(host("load", STATE))?;
        ram::seal(&state).map_err(host("seal", STATE))?;
        let rootfs = match &manifest.image.rootfs {
            Some(rootfs) => Some(self.open_rootfs(rootfs)?),
            None => None,
        };
        Ok(Loaded {
            ram: memory.into(),
            state: state.into(),
            rootfs,
        })
    }

    fn open_rootfs(&self, rootfs: &Rootfs) -> Result<OwnedFd, CaptureError> {
        let path = self.0.manifest.image.dir.join(&rootfs.file);
        let failed = |source| CaptureError::Host {
            what: "read the root disk",
            path: path.clone(),
            source,
        };
        let file = File::open(&path).map_err(failed)?;
        let found = image::sha256(&file).map_err(failed)?;
        if found == rootfs.sha256 {
            Ok(file.into())
        } else {
            Err(Stale {
                what: "root disk",
                then: rootfs.sha256.to_string(),
                now: found.to_string(),
            }
            .into())
        }
    }
}

/// The files that a capture has beside its manifest, with their length where that is known.
fn files(manifest: &CaptureManifest) -> Vec<(&'static str, Option<u64>)> {
    let ram = manifest.ram.map(|_| (RAM, Some(manifest.size.memory.0)));
    let state = manifest.state.map(|_| (STATE, None));
    ram.into_iter().chain(state).collect()
}
