//! Start and stop: what a daemon finds when it opens its state directory, and how it leaves it.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use super::{
    AppendError, Damage, Lock, LockError, Record, State, Torn, Transition, Unknown, fold,
    keeper::{Bell, Keeper, KeeperHandle, Left, Want},
    lock_state_dir,
    replay::{Replay, Segment, replay},
    segment::{FRAME, HEADER},
    store::{Store, StoreError},
    sync::Syncer,
    tail::{Allocated, Start, Tail, allocate, lock, put_by},
};
use crate::{
    clock::{Clock, WallTime},
    disk,
};

/// Length of a segment where nothing else is asked for: some 40,000 claims.
pub const SEGMENT_BYTES: u64 = 16 << 20;

/// Room that is put by so that a start on a full disk can open the store.
const RESERVE: u64 = 2 * super::store::ROOM;

/// When a record counts as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SyncMode {
    /// When it survives the daemon; a VM does not survive the host either.
    #[default]
    Auto,
    /// When it survives the host's power.
    Always,
}

/// How to open a journal.
#[derive(Debug, Clone)]
pub struct Options {
    /// The state directory; `journal/`, `store/` and `lock` in it are the journal's.
    pub dir: PathBuf,
    /// How far a record has to come before [`Journal::settle`](super::Journal::settle) returns.
    pub sync: SyncMode,
    /// Length of a segment, bytes; [`SEGMENT_BYTES`], and less in tests. Below 4 KiB it counts as 4 KiB.
    pub segment_bytes: u64,
    /// Stamps the records.
    pub clock: Clock,
}

/// What the journal held.
#[derive(Debug)]
pub struct Opened {
    /// All that the records say, the pruned left out and damaged sandboxes quarantined.
    pub state: State,
    /// Places that cannot be trusted. A damaged segment stays as `journal/*.damaged`, and is told at each start, until
    /// an operator removes it.
    pub damage: Vec<Damage>,
    /// A last record that was cut.
    pub torn: Option<Torn>,
    /// Records that the store did not hold yet.
    pub replayed: u64,
}

/// A journal that cannot be opened. Nothing was taken for empty and nothing thrown away.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another daemon has the state directory.
    #[error("{} is held by another daemon{}", .dir.display(), .pid.map(|pid| format!(", pid {pid}")).unwrap_or_default())]
    Locked {
        /// The state directory.
        dir: PathBuf,
        /// Who has it, if it said so.
        pid: Option<u32>,
    },
    /// A newer version wrote it: use that one.
    #[error("{} was written by a newer version: {what}", .path.display())]
    Newer {
        /// The segment or the store.
        path: PathBuf,
        /// What this version does not know.
        what: String,
    },
    /// A start would be a guess.
    #[error("{} is damaged: {what}", .path.display())]
    Damaged {
        /// The segment or the store.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file system refused.
    #[error("cannot {what} {}", .path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
}

impl From<LockError> for OpenError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Locked { dir, pid } => Self::Locked { dir, pid },
            LockError::Io { path, source } => Self::Io {
                what: "lock",
                path,
                source,
            },
        }
    }
}

impl From<StoreError> for OpenError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Io { what, dir, source } => Self::Io {
                what,
                path: dir,
                source,
            },
            StoreError::Damaged { what, dir, why } => Self::Damaged {
                path: dir,
                what: format!("cannot {what} it: {why}"),
            },
            StoreError::Newer { dir, found } => {
                let what = format!("its version is {found}, and this is {}", super::store::VERSION);
                Self::Newer { path: dir, what }
            }
        }
    }
}

/// An open journal.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) tail: Arc<Tail>,
    pub(super) syncer: Syncer,
    pub(super) keeper: KeeperHandle,
    pub(super) mode: SyncMode,
    // Last: the directory is free for another only when the keeper has ended.
    lock: Mutex<Option<Lock>>,
}

impl Inner {
    pub(super) async fn close(&self) -> Result<(), AppendError> {
        self.tail.refuse();
        let synced = self.syncer.through(&self.tail, self.tail.last_seq()).await;
        self.syncer.idle().await;
        let folded = self.keeper.close().await;
        drop(lock(&self.lock).take());
        if folded { synced } else { Err(AppendError::Failed) }
    }
}

/// The directories of a state directory that are the journal's: log and store.
pub(super) fn dirs(state_dir: &Path) -> (PathBuf, PathBuf) {
    (state_dir.join("journal"), state_dir.join("store"))
}

/// Reads store and segments, changing neither beyond what sled does when it opens.
pub(super) fn read(state_dir: &Path) -> Result<(Store, Replay), OpenError> {
    let (log_dir, store_dir) = dirs(state_dir);
    let store = Store::open(&store_dir)?;
    let applied = store.applied()?;
    let replayed = replay(&log_dir, store.load()?, applied)?;
    Ok((store, replayed))
}

pub(super) fn open(options: Options) -> Result<(Inner, Opened), OpenError> {
    let (log_dir, store_dir) = dirs(&options.dir);
    for dir in [&options.dir, &log_dir, &store_dir] {
        disk::make_dir(dir, 0o700).map_err(|source| OpenError::Io {
            what: "make",
            path: dir.clone(),
            source,
        })?;
    }
    let held = lock_state_dir(&options.dir)?;
    let store = open_store(&log_dir, &store_dir)?;
    let mut found = replay(&log_dir, store.load()?, store.applied()?)?;
    let segment_bytes = options.segment_bytes.max(4096);
    let next_number = found.segments.last().map_or(1, |last| last.number + 1);
    let (spare, used): (Vec<Segment>, Vec<Segment>) = std::mem::take(&mut found.segments)
        .into_iter()
        .partition(|segment| segment.unused);
    let left = secure(&log_dir, used)?;
    let start = stock(
        &log_dir,
        segment_bytes,
        &left,
        spare,
        (next_number, found.last_seq + 1),
    )?;
    let bell = Arc::new(Bell::default());
    let tail = Arc::new(Tail::new(start, bell.clone(), options.clock.clone()));
    quarantine(&tail, &mut found, &log_dir, options.clock.wall())?;
    let keeper = Keeper::new(
        store,
        (log_dir, store_dir),
        left,
        &found.state,
        options.clock.clone(),
    )?;
    found.state.prune(options.clock.wall());
    let keeper = KeeperHandle::start(keeper, tail.clone(), bell.clone()).map_err(|source| OpenError::Io {
        what: "start a thread for",
        path: options.dir,
        source,
    })?;
    bell.ring(Want::Spare);
    bell.ring(Want::Fold);
    let inner = Inner {
        tail,
        syncer: Syncer::new(found.last_seq),
        keeper,
        mode: options.sync,
        lock: Mutex::new(Some(held)),
    };
    let Replay {
        state,
        damage,
        torn,
        replayed,
        ..
    } = found;
    Ok((
        inner,
        Opened {
            state,
            damage,
            torn,
            replayed,
        },
    ))
}

/// Opens the store, by the room that was put by for it where the disk is full: sled writes when it opens.
fn open_store(log_dir: &Path, store_dir: &Path) -> Result<Store, OpenError> {
    let reserve = log_dir.join("reserve");
    let store = match Store::open(store_dir) {
        Err(error) if error.is_full() && fs::remove_file(&reserve).is_ok() => Store::open(store_dir)?,
        opened => opened?,
    };
    if !reserve.exists()
        && let Err(error) = put_by(&reserve, RESERVE)
    {
        tracing::warn!(path = %reserve.display(), %error, "no room can be put by for a start on a full disk");
    }
    Ok(store)
}

/// Records what damage costs: the daemon acts on these rows, and so does each later start.
fn quarantine(tail: &Tail, found: &mut Replay, log_dir: &Path, at: WallTime) -> Result<(), OpenError> {
    for (id, why) in std::mem::take(&mut found.suspects) {
        let transition = Transition::Quarantined { why };
        let written = tail
            .append(Some(id), &transition)
            .map_err(|refused| OpenError::Io {
                what: "record damage in",
                path: log_dir.to_owned(),
                source: io::Error::other(refused),
            })?;
        let seq = written.seq();
        let record = Record {
            seq,
            at,
            sandbox: Some(id),
            transition,
            unknown: Unknown::new(),
        };
        fold(&mut found.state, &record);
    }
    Ok(())
}

/// Brings the segments of earlier runs to the disk, since a later receipt covers them too, and sets the damaged aside.
fn secure(log_dir: &Path, used: Vec<Segment>) -> Result<Vec<Left>, OpenError> {
    let mut left = Vec::with_capacity(used.len());
    for segment in used {
        let io = |what| {
            let path = segment.path.clone();
            move |source| OpenError::Io { what, path, source }
        };
        File::open(&segment.path)
            .and_then(|file| file.sync_data())
            .map_err(io("sync"))?;
        let mut path = segment.path.clone();
        if segment.damaged && !segment.kept {
            path.set_extension("damaged");
            disk::rename_synced(&segment.path, &path).map_err(io("set aside"))?;
        }
        let kept = segment.damaged || segment.kept;
        left.push(Left {
            path,
            number: (!kept).then_some(segment.number),
        });
    }
    disk::sync_dir(log_dir).map_err(|source| OpenError::Io {
        what: "sync",
        path: log_dir.to_owned(),
        source,
    })?;
    Ok(left)
}

/// Chooses the segments to write to: unused ones of earlier runs, else a new one, or none on a full disk.
fn stock(
    log_dir: &Path,
    segment_bytes: u64,
    left: &[Left],
    spare: Vec<Segment>,
    (mut next_number, next_seq): (u64, u64),
) -> Result<Start, OpenError> {
    // Segments are read in the order of their numbers: only one above all used ones can be written to.
    let used = left
        .iter()
        .filter_map(|left| left.path.file_stem()?.to_str()?.parse::<u64>().ok())
        .max()
        .unwrap_or(0);
    let mut usable = Vec::new();
    for segment in spare {
        let file = OpenOptions::new().write(true).open(&segment.path);
        let fits = |file: &File| file.metadata().is_ok_and(|meta| meta.len() == segment_bytes);
        match file {
            Ok(file) if segment.number > used && usable.len() < 2 && fits(&file) => {
                usable.push(Allocated {
                    number: segment.number,
                    file: Arc::new(file),
                });
            }
            Ok(_) | Err(_) => {
                fs::remove_file(&segment.path).map_err(|source| OpenError::Io {
                    what: "delete the unused",
                    path: segment.path,
                    source,
                })?;
            }
        }
    }
    let mut usable = usable.into_iter();
    let (mut current, spare) = (usable.next(), usable.next());
    if current.is_none() {
        current = match allocate(log_dir, next_number, segment_bytes) {
            Ok(allocated) => Some(allocated),
            Err(error) if super::is_full(&error) => None,
            Err(source) => {
                return Err(OpenError::Io {
                    what: "allocate a segment in",
                    path: log_dir.to_owned(),
                    source,
                });
            }
        };
        next_number += 1;
    }
    // A first record always fits: the format's longest is cut down to the segment by the tail.
    debug_assert!(segment_bytes > (HEADER + FRAME) as u64);
    Ok(Start {
        dir: log_dir.to_owned(),
        segment_bytes,
        next_seq,
        next_number,
        current,
        spare,
    })
}
