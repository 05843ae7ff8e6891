//! The thread that folds the log into the store, allocates the next segment, and deletes what the store holds for good.
//!
//! It reads what it folds from the segments themselves, so nothing queues between it and the appends, and it keeps no
//! state but the ids of sandboxes gone of late. It is rung, not timed: when a stretch of log has come together, when a
//! segment was taken, when the journal closes.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

use sandbox_protocol::id::SandboxId;
use tokio::sync::watch;

use super::{
    AppendError, Transition,
    fold::{GONE_MAX, State, fold, is_old},
    record::{self, Record},
    segment::{Found, HEADER, scan},
    store::{Barrier, Change, Store, StoreError},
    tail::{Tail, View, lock, path},
};
use crate::{
    clock::{Clock, WallTime},
    faults, tasks,
};

/// Records that are folded at a time: bounds the memory of the fold and the size of a batch.
const BATCH: usize = 512;
/// What the keeper is rung for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// Fold what is there.
    Fold,
    /// Allocate a segment.
    Spare,
    /// Fold all and end.
    Close,
    /// End at once.
    Stop,
}

#[derive(Debug, Default, Clone, Copy)]
struct Wants {
    fold: bool,
    spare: bool,
    close: bool,
    stop: bool,
}

/// Rings the keeper; wishes of a kind melt into one.
#[derive(Debug, Default)]
pub(super) struct Bell {
    wants: Mutex<Wants>,
    rung: Condvar,
    /// Runs after each barrier, before anything is deleted.
    #[cfg(test)]
    pub(super) after_barrier: Mutex<Option<tests::Hook>>,
}

impl Bell {
    pub(super) fn ring(&self, want: Want) {
        let mut wants = lock(&self.wants);
        match want {
            Want::Fold => wants.fold = true,
            Want::Spare => wants.spare = true,
            Want::Close => wants.close = true,
            Want::Stop => wants.stop = true,
        }
        drop(wants);
        self.rung.notify_one();
    }

    fn wait(&self) -> Wants {
        let nothing = |wants: &mut Wants| !(wants.fold || wants.spare || wants.close || wants.stop);
        let mut wants = self
            .rung
            .wait_while(lock(&self.wants), nothing)
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut wants)
    }

    fn is_stopping(&self) -> bool {
        lock(&self.wants).stop
    }
}

/// How far the fold is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Folded {
    through: u64,
    over: bool,
}

/// The keeper's thread, seen from outside.
#[derive(Debug)]
pub(super) struct KeeperHandle {
    pub(super) bell: Arc<Bell>,
    folded: watch::Receiver<Folded>,
    thread: Mutex<Option<thread::JoinHandle<bool>>>,
}

impl KeeperHandle {
    pub(super) fn start(keeper: Keeper, tail: Arc<Tail>, bell: Arc<Bell>) -> io::Result<Self> {
        let (tell, folded) = watch::channel(Folded {
            through: keeper.applied,
            over: false,
        });
        let rung = bell.clone();
        let thread = tasks::thread("journal-keeper", move || {
            // What it does is in no answer's way, and was a claim's tail: it ran on the core where a claim was to go on.
            tasks::step_back();
            let over = Over(tell, tail);
            keeper.run(&over.1, &rung, &over.0)
        })?;
        Ok(Self {
            bell,
            folded,
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(super) async fn folded(&self, tail: &Tail) -> Result<(), AppendError> {
        let through = tail.last_seq();
        self.bell.ring(Want::Fold);
        let mut folded = self.folded.clone();
        match folded.wait_for(|now| now.through >= through || now.over).await {
            Ok(now) if now.through >= through => Ok(()),
            Ok(_) | Err(_) => Err(AppendError::Failed),
        }
    }

    /// Has the keeper fold all and end; says whether it could.
    pub(super) async fn close(&self) -> bool {
        let Some(thread) = lock(&self.thread).take() else {
            return true;
        };
        self.bell.ring(Want::Close);
        // A panic of the thread is no clean end.
        tasks::blocking("journal-close", move || thread.join().unwrap_or(false))
            .await
            .unwrap_or(false)
    }
}

impl Drop for KeeperHandle {
    fn drop(&mut self) {
        if let Some(thread) = lock(&self.thread).take() {
            self.bell.ring(Want::Stop);
            // It ends after the batch at hand; what it says then concerns nobody any more.
            drop(thread.join());
        }
    }
}

/// Tells whoever waits for a fold that none will come, however the thread ends.
#[derive(Debug)]
struct Over(watch::Sender<Folded>, Arc<Tail>);

impl Drop for Over {
    fn drop(&mut self) {
        if thread::panicking() {
            self.1.poison("fold", &io::Error::other("the keeper panicked"));
        }
        self.0.send_modify(|now| now.over = true);
    }
}

/// What the thread owns.
#[derive(Debug)]
pub(super) struct Keeper {
    /// None while the disk was too full for it.
    store: Option<Store>,
    store_dir: PathBuf,
    log_dir: PathBuf,
    /// Segments that are full and not deleted, oldest first.
    segments: VecDeque<Old>,
    /// Bytes of the first unfolded segment (the front one that is not folded, else the current) that are folded.
    offset: u64,
    /// Number of the last record in the store.
    applied: u64,
    /// Sandboxes that are gone, oldest first.
    gone: VecDeque<(WallTime, SandboxId)>,
    /// A write, sync or read failed: nothing is folded or deleted any more.
    broken: bool,
    clock: Clock,
}

/// A full segment.
#[derive(Debug)]
struct Old {
    path: PathBuf,
    /// Absent for one that a damage keeps.
    number: Option<u64>,
    /// This run wrote it, so every byte of it is a record; what an earlier run left was judged by replay.
    ours: bool,
    folded: bool,
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error("cannot fold into the store")]
    Store(#[source] StoreError),
    #[error("cannot read the segment {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the segment {} changed behind our back at byte {offset}", .path.display())]
    Changed { path: PathBuf, offset: u64 },
    #[error("cannot delete folded segments")]
    Delete(#[source] io::Error),
}

/// Segments that replay left, for a keeper to fold.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) path: PathBuf,
    /// Absent for one that is kept for its damage.
    pub(super) number: Option<u64>,
}

impl Keeper {
    pub(super) fn new(
        store: Store,
        dirs: (PathBuf, PathBuf),
        left: Vec<Left>,
        state: &State,
        clock: Clock,
    ) -> Result<Self, StoreError> {
        let applied = store.applied()?;
        // Those that replay found are found again by the fold.
        let stored = state.sandboxes.values().filter(|row| row.seq <= applied);
        let mut gone: Vec<_> = stored
            .filter_map(|row| row.gone_at.map(|at| (at, row.id)))
            .collect();
        gone.sort_unstable();
        let old = |Left { path, number }| Old {
            path,
            number,
            ours: false,
            folded: false,
        };
        Ok(Self {
            applied,
            store: Some(store),
            log_dir: dirs.0,
            store_dir: dirs.1,
            segments: left.into_iter().map(old).collect(),
            offset: 0,
            gone: gone.into(),
            broken: false,
            clock,
        })
    }

    fn run(mut self, tail: &Tail, bell: &Bell, tell: &watch::Sender<Folded>) -> bool {
        loop {
            let wants = bell.wait();
            if wants.stop {
                // The log has all that is not flushed; what matters is that sled lets go of its file.
                drop(self.store.take().map(Store::close));
                return false;
            }
            if wants.spare && !wants.close {
                tail.prepare_spare();
            }
            if wants.fold || wants.close {
                let mut folded = false;
                if !self.broken {
                    match self.pass(tail, bell, wants.close) {
                        Ok(()) => folded = true,
                        Err(error) => self.failed(tail, &error),
                    }
                    tell.send_modify(|now| (now.through, now.over) = (self.applied, self.broken));
                }
                if wants.close {
                    return self.store.take().is_some_and(|store| store.close().is_ok()) && folded;
                }
            }
        }
    }

    /// A fold that met a full disk waits for the next ring; any other failure is final: the disk cannot be trusted.
    fn failed(&mut self, tail: &Tail, error: &PassError) {
        let full = match error {
            PassError::Store(store) => store.is_full(),
            PassError::Read { .. } | PassError::Changed { .. } => false,
            PassError::Delete(source) => super::is_full(source),
        };
        if full {
            tracing::warn!(
                error = error as &(dyn std::error::Error + 'static),
                "the journal grows until there is room to fold it"
            );
            // sled refuses everything after an error: it is opened anew.
            drop(self.store.take().map(Store::close));
        } else {
            self.broken = true;
            tail.poison("fold", error);
        }
    }

    /// Folds all that was appended when it began, then deletes what the store holds for good.
    fn pass(&mut self, tail: &Tail, bell: &Bell, last: bool) -> Result<(), PassError> {
        let View {
            closed,
            current,
            last_seq,
        } = tail.view();
        self.segments.extend(closed.into_iter().map(|number| Old {
            path: path(&self.log_dir, number),
            number: Some(number),
            ours: true,
            folded: false,
        }));
        if self.applied < last_seq {
            self.open_store().map_err(PassError::Store)?;
        }
        while let Some(at) = self.segments.iter().position(|old| !old.folded) {
            let Some(old) = self.segments.get(at) else { break };
            let (file, ours) = (old.path.clone(), old.ours);
            self.fold_file(&file, None, ours, bell)?;
            if bell.is_stopping() {
                return Ok(());
            }
            if let Some(old) = self.segments.get_mut(at) {
                old.folded = true;
            }
            self.offset = 0;
        }
        if let Some((number, end)) = current {
            let file = path(&self.log_dir, number);
            self.fold_file(&file, Some(end), true, bell)?;
            if bell.is_stopping() {
                return Ok(());
            }
            self.offset = end;
            if last {
                self.segments.push_back(Old {
                    path: file,
                    number: Some(number),
                    ours: true,
                    folded: true,
                });
            }
        }
        if let Some(store) = &self.store {
            if self.applied < last_seq {
                // The number of a record that damage took is used up too.
                let state = store.load_some(std::iter::empty()).map_err(PassError::Store)?;
                let none = Change {
                    state: &state,
                    pools: Vec::new(),
                    forget: Vec::new(),
                    applied: last_seq,
                };
                store.apply(&none).map_err(PassError::Store)?;
                self.applied = last_seq;
            }
            if self.segments.iter().any(|old| old.number.is_some()) {
                let barrier = store.barrier().map_err(PassError::Store)?;
                #[cfg(test)]
                tests::run(&bell.after_barrier);
                self.delete(tail, &barrier).map_err(PassError::Delete)?;
            } else {
                store.flush().map_err(PassError::Store)?;
            }
        }
        Ok(())
    }

    fn open_store(&mut self) -> Result<(), StoreError> {
        if self.store.is_none() {
            let store = Store::open(&self.store_dir)?;
            self.applied = store.applied()?;
            self.store = Some(store);
            // What was not flushed may be missing in it: every segment that is left is looked at again.
            self.segments.iter_mut().for_each(|old| old.folded = false);
            self.offset = 0;
        }
        Ok(())
    }

    /// Folds a segment from where the fold stands; to its end, or to `end` where it is still written to.
    fn fold_file(
        &mut self,
        file: &PathBuf,
        end: Option<u64>,
        ours: bool,
        bell: &Bell,
    ) -> Result<(), PassError> {
        let read = |source| PassError::Read {
            path: file.clone(),
            source,
        };
        let from = self.offset.max(HEADER as u64);
        let bytes = read_from(file, from, end).map_err(read)?;
        let found = scan(&bytes, 0);
        let spoiled = found.torn.is_some() || found.found.iter().any(|one| matches!(one, Found::Damaged(_)));
        if spoiled && ours {
            return Err(PassError::Changed {
                path: file.clone(),
                offset: from,
            });
        }
        let mut records: Vec<(u64, &[u8])> = found
            .found
            .iter()
            .filter_map(|one| match one {
                Found::Record { seq, json, .. } => bytes.get(json.clone()).map(|json| (*seq, json)),
                Found::Damaged(_) => None,
            })
            .filter(|(seq, _json)| *seq > self.applied)
            .collect();
        // Replay put them in order too.
        records.sort_by_key(|(seq, _json)| *seq);
        records.dedup_by_key(|(seq, _json)| *seq);
        for batch in records.chunks(BATCH) {
            if bell.is_stopping() {
                return Ok(());
            }
            let decoded: Result<Vec<Record>, _> = batch
                .iter()
                .map(|(seq, json)| record::decode(*seq, json))
                .collect();
            let changed = |_unreadable| PassError::Changed {
                path: file.clone(),
                offset: from,
            };
            self.fold_batch(&decoded.map_err(changed)?)
                .map_err(PassError::Store)?;
        }
        Ok(())
    }

    fn fold_batch(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let (Some(store), Some(last)) = (&self.store, records.last()) else {
            return Ok(());
        };
        let mut state = store.load_some(records.iter().filter_map(|record| record.sandbox))?;
        let mut pools = Vec::new();
        let mut gone = Vec::new();
        for record in records {
            fold(&mut state, record);
            match &record.transition {
                Transition::PoolApplied { spec } => pools.push(spec.name.clone()),
                Transition::PoolDeleted { name } => pools.push(name.clone()),
                Transition::Gone => gone.extend(record.sandbox.map(|id| (record.at, id))),
                Transition::Boot { .. }
                | Transition::Making { .. }
                | Transition::Warmed { .. }
                | Transition::Claimed(_)
                | Transition::Renewed { .. }
                | Transition::Narrowed { .. }
                | Transition::Ending { .. }
                | Transition::Failed { .. }
                | Transition::Quarantined { .. }
                | Transition::Drain { .. }
                | Transition::Audited { .. } => {}
            }
        }
        self.gone.extend(gone);
        let forget = forget(&mut self.gone, self.clock.wall());
        faults::point("journal.fold").map_err(|source| StoreError::Io {
            what: "write",
            dir: self.store_dir.clone(),
            source,
        })?;
        store.apply(&Change {
            state: &state,
            pools,
            forget,
            applied: last.seq,
        })?;
        self.applied = last.seq;
        Ok(())
    }

    /// Deletes the folded segments. What the barrier does not cover stays.
    fn delete(&mut self, tail: &Tail, barrier: &Barrier) -> io::Result<()> {
        if barrier.applied < self.applied {
            return Ok(());
        }
        faults::point("journal.before_delete")?;
        let (mut deleted, mut result) = (Vec::new(), Ok(()));
        self.segments.retain(|old| match old.number {
            Some(number) if old.folded => match fs::remove_file(&old.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    result = Err(error);
                    true
                }
                Ok(()) | Err(_) => {
                    deleted.push(number);
                    false
                }
            },
            Some(_) | None => true,
        });
        tail.forget(deleted.into_iter());
        // There may be room again for a spare that could not be had.
        tail.prepare_spare();
        result
    }
}

/// Takes those out of the list that have been kept long enough, or are too many.
fn forget(gone: &mut VecDeque<(WallTime, SandboxId)>, now: WallTime) -> Vec<SandboxId> {
    let mut ids = Vec::new();
    while gone
        .front()
        .is_some_and(|(at, _id)| gone.len() > GONE_MAX || is_old(*at, now))
    {
        ids.extend(gone.pop_front().map(|(_at, id)| id));
    }
    ids
}

fn read_from(path: &PathBuf, from: u64, end: Option<u64>) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(io::SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    match end {
        Some(end) => file.take(end.saturating_sub(from)).read_to_end(&mut bytes)?,
        None => file.read_to_end(&mut bytes)?,
    };
    Ok(bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fmt, sync::Mutex};

    pub(in crate::journal) struct Hook(pub(in crate::journal) Box<dyn FnMut() + Send>);

    impl fmt::Debug for Hook {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Hook")
        }
    }

    pub(super) fn run(hook: &Mutex<Option<Hook>>) {
        if let Some(Hook(hook)) = &mut *super::lock(hook) {
            hook();
        }
    }
}
