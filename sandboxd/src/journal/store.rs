//! The folded state on disk, in sled. The only file that names sled.
//!
//! Invariant 08: log goes only after the store's own barrier: [`Barrier`] is made by [`Store::barrier`] alone, which
//! syncs sled's files after sled's flush (that flush is `sync_file_range`, no barrier), and deleting a segment takes it.
//!
//! One tree, so that a batch is atomic: the rows that a stretch of log changed and the number of its last record go in
//! together. Keys: `m/..` single values, `p/<name>` pools, `s/<id>` sandboxes; values are JSON.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock, statvfs};
use sandbox_protocol::id::SandboxId;
use serde::{Serialize, de::DeserializeOwned};

use super::fold::{SandboxRow, State};
use crate::{disk, words::Name};

/// Version of the keys and values.
pub(super) const VERSION: u32 = 1;
/// Memory for pages of the store. The fold runs off every path that somebody waits on, so it may read from the page
/// cache. sled evicts late: with this the daemon grows by 1 MiB when it opens and by some 2 KiB per live sandbox, and
/// less than this does not change that.
const CACHE: u64 = 1 << 20;

/// Room on the disk that the store wants before it opens or takes a batch: eight of sled's own segments. It is asked
/// first, since sled that meets a full disk while it opens leaves a file that it cannot read.
pub(super) const ROOM: u64 = 4 << 20;

const KEY_VERSION: &[u8] = b"m/version";
const KEY_APPLIED: &[u8] = b"m/applied";
const KEY_DRAIN: &[u8] = b"m/drain";
const KEY_BOOT: &[u8] = b"m/boot";
const KEY_HEADS: &[u8] = b"m/heads";
const SANDBOXES: &str = "s/";
const POOLS: &str = "p/";

/// An operation of the store that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    /// The file system refused.
    #[error("cannot {what} the store {}", .dir.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// The store.
        dir: PathBuf,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// The store cannot be trusted.
    #[error("the store {} cannot be read while trying to {what} it: {why}", .dir.display())]
    Damaged {
        /// What was being done.
        what: &'static str,
        /// The store.
        dir: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A newer version wrote it.
    #[error("the store {} has version {found}", .dir.display())]
    Newer {
        /// The store.
        dir: PathBuf,
        /// Its version.
        found: u32,
    },
}

impl StoreError {
    /// Whether room on the disk would mend it.
    pub(super) fn is_full(&self) -> bool {
        match self {
            Self::Io { source, .. } => super::is_full(source),
            Self::Damaged { .. } | Self::Newer { .. } => false,
        }
    }
}

/// The store, open. One at a time per directory.
#[derive(Debug)]
pub(super) struct Store {
    db: sled::Db,
    /// Our own handle of sled's file, as old as the store's: a failed write-back since is told to it by the sync.
    file: File,
    dir: PathBuf,
}

/// Everything that the store held when this was made is on the disk.
#[derive(Debug)]
pub(super) struct Barrier {
    /// Number of the last record in it.
    pub(super) applied: u64,
}

/// What a stretch of log changes.
#[derive(Debug)]
pub(super) struct Change<'a> {
    /// The touched sandboxes and pools as they are now, the drain, the boot and the heads.
    pub(super) state: &'a State,
    /// Pools that were touched; absent from the state means deleted.
    pub(super) pools: Vec<Name>,
    /// Sandboxes to forget.
    pub(super) forget: Vec<SandboxId>,
    /// Number of the last record of the stretch.
    pub(super) applied: u64,
}

impl Store {
    /// Opens the store, making it if it is not there.
    pub(super) fn open(dir: &Path) -> Result<Self, StoreError> {
        has_room(dir, "open")?;
        let config = sled::Config::new()
            .path(dir)
            .cache_capacity(CACHE)
            .mode(sled::Mode::LowSpace)
            .flush_every_ms(None);
        let db = guarded("open", dir, || config.open())?;
        let file = File::open(dir.join("db")).map_err(|source| StoreError::Io {
            what: "open",
            dir: dir.to_owned(),
            source,
        })?;
        let store = Self {
            db,
            file,
            dir: dir.to_owned(),
        };
        match store.read::<u32>(KEY_VERSION)? {
            Some(found) if found > VERSION => {
                let dir = store.dir.clone();
                return Err(StoreError::Newer { dir, found });
            }
            Some(_) => {}
            None if store.db.is_empty() => {
                let version = json(&VERSION);
                guarded("write", dir, || store.db.insert(KEY_VERSION, version))?;
            }
            None => return Err(store.damaged("open", "it holds rows and no version")),
        }
        Ok(store)
    }

    /// Number of the last record in the store; 0 when it is new.
    pub(super) fn applied(&self) -> Result<u64, StoreError> {
        Ok(self.read(KEY_APPLIED)?.unwrap_or(0))
    }

    /// All of it.
    pub(super) fn load(&self) -> Result<State, StoreError> {
        let mut state = State {
            drain: self.read(KEY_DRAIN)?.unwrap_or(false),
            boot_id: self.read(KEY_BOOT)?,
            heads: self.read(KEY_HEADS)?.unwrap_or_default(),
            ..State::default()
        };
        let pairs = guarded("read", &self.dir, || {
            self.db.iter().collect::<Result<Vec<_>, sled::Error>>()
        })?;
        for (key, value) in pairs {
            if key.starts_with(SANDBOXES.as_bytes()) {
                let row: SandboxRow = self.parse(&key, &value)?;
                state.sandboxes.insert(row.id, row);
            } else if key.starts_with(POOLS.as_bytes()) {
                let row: super::PoolRow = self.parse(&key, &value)?;
                state.pools.insert(row.name.clone(), row);
            }
        }
        Ok(state)
    }

    /// The drain, the boot, the heads and the rows of these sandboxes.
    pub(super) fn load_some(&self, ids: impl Iterator<Item = SandboxId>) -> Result<State, StoreError> {
        let mut sandboxes = BTreeMap::new();
        for id in ids {
            if sandboxes.contains_key(&id) {
                continue;
            }
            if let Some(row) = self.read(format!("{SANDBOXES}{id}").as_bytes())? {
                sandboxes.insert(id, row);
            }
        }
        Ok(State {
            sandboxes,
            pools: BTreeMap::new(),
            drain: self.read(KEY_DRAIN)?.unwrap_or(false),
            boot_id: self.read(KEY_BOOT)?,
            heads: self.read(KEY_HEADS)?.unwrap_or_default(),
        })
    }

    /// Takes in what a stretch of log changed, all or nothing.
    pub(super) fn apply(&self, change: &Change<'_>) -> Result<(), StoreError> {
        has_room(&self.dir, "write")?;
        let mut batch = sled::Batch::default();
        for (id, row) in &change.state.sandboxes {
            batch.insert(format!("{SANDBOXES}{id}").as_bytes(), json(row));
        }
        for id in &change.forget {
            batch.remove(format!("{SANDBOXES}{id}").as_bytes());
        }
        for name in &change.pools {
            let key = format!("{POOLS}{name}");
            match change.state.pools.get(name) {
                Some(row) => batch.insert(key.as_bytes(), json(row)),
                None => batch.remove(key.as_bytes()),
            }
        }
        batch.insert(KEY_DRAIN, json(&change.state.drain));
        if let Some(boot) = &change.state.boot_id {
            batch.insert(KEY_BOOT, json(boot));
        }
        batch.insert(KEY_HEADS, json(&change.state.heads));
        batch.insert(KEY_APPLIED, json(&change.applied));
        guarded("write", &self.dir, || self.db.apply_batch(batch))
    }

    /// Hands everything to the kernel: it survives the daemon, not the host's power.
    pub(super) fn flush(&self) -> Result<(), StoreError> {
        guarded("flush", &self.dir, || self.db.flush()).map(drop)
    }

    /// Brings everything to the disk.
    pub(super) fn barrier(&self) -> Result<Barrier, StoreError> {
        let applied = self.applied()?;
        self.flush()?;
        self.file
            .sync_data()
            .and_then(|()| sync_tree(&self.dir))
            .map_err(|source| StoreError::Io {
                what: "sync",
                dir: self.dir.clone(),
                source,
            })?;
        Ok(Barrier { applied })
    }

    /// Closes the store and waits until sled's threads have let go of its file, so that it can be opened again.
    pub(super) fn close(self) -> Result<(), StoreError> {
        let flushed = self.flush();
        let Self { db, file: _, dir } = self;
        drop(db);
        let source = match File::open(dir.join("db")) {
            // Blocks until the last handle of sled, which holds this lock, is closed; ours closes at once.
            Ok(file) => flock(&file, FlockOperation::LockExclusive).map_err(io::Error::from),
            Err(error) => Err(error),
        };
        flushed.and(source.map_err(|source| StoreError::Io {
            what: "close",
            dir,
            source,
        }))
    }

    #[cfg(test)]
    pub(super) fn set_version(&self, version: u32) {
        drop(self.db.insert(KEY_VERSION, json(&version)).unwrap());
    }

    fn read<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>, StoreError> {
        let value = guarded("read", &self.dir, || self.db.get(key))?;
        value.map(|value| self.parse(key, &value)).transpose()
    }

    fn parse<T: DeserializeOwned>(&self, key: &[u8], value: &[u8]) -> Result<T, StoreError> {
        serde_json::from_slice(value).map_err(|error| {
            let key = key.escape_ascii();
            self.damaged(
                "read",
                &format!("its value of {key} is not of this version: {error}"),
            )
        })
    }

    fn damaged(&self, what: &'static str, why: &str) -> StoreError {
        StoreError::Damaged {
            what,
            dir: self.dir.clone(),
            why: why.to_owned(),
        }
    }
}

fn has_room(dir: &Path, what: &'static str) -> Result<(), StoreError> {
    let io = |source| StoreError::Io {
        what,
        dir: dir.to_owned(),
        source,
    };
    let fs = statvfs(dir).map_err(|errno| io(errno.into()))?;
    if fs.f_bavail.saturating_mul(fs.f_frsize) < ROOM {
        return Err(io(io::ErrorKind::StorageFull.into()));
    }
    Ok(())
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("rows have text keys and a Vec takes every byte")
}

/// Calls sled, which panics on some kinds of damage where it should report them.
fn guarded<T>(
    what: &'static str,
    dir: &Path,
    call: impl FnOnce() -> Result<T, sled::Error>,
) -> Result<T, StoreError> {
    let damaged = |why: String| StoreError::Damaged {
        what,
        dir: dir.to_owned(),
        why,
    };
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(sled::Error::Io(source))) => Err(StoreError::Io {
            what,
            dir: dir.to_owned(),
            source,
        }),
        Ok(Err(
            error @ (sled::Error::CollectionNotFound(_)
            | sled::Error::Unsupported(_)
            | sled::Error::ReportableBug(_)
            | sled::Error::Corruption { .. }),
        )) => Err(damaged(error.to_string())),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(damaged(format!(
                "sled panicked: {}",
                said.unwrap_or("no message")
            )))
        }
    }
}

/// Syncs every file below a directory, then the directories.
fn sync_tree(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_tree(&entry.path())?;
        } else {
            match File::open(entry.path()) {
                Ok(file) => file.sync_data()?,
                // sled removes a file that it has replaced.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    disk::sync_dir(dir)
}
