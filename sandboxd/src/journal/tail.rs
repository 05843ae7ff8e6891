//! The writing end: one seat, from which whoever sits there appends for all who wait.
//!
//! Invariant 06: records have one order; a failed write or sync is final. Numbers are given under the seat's lock in
//! the order of the file; after a failure nothing more is put on any file.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use sandbox_protocol::id::SandboxId;
use tokio::sync::watch;

use super::{
    AppendError, Health, Transition, Written, is_full,
    keeper::{Bell, Want},
    record,
    segment::{FRAME, HEADER, RECORD_MAX, frame, header},
};
use crate::{clock::Clock, disk, faults, work};

/// A segment that was allocated ahead: zeros, on the disk, with its name.
#[derive(Debug)]
pub(super) struct Allocated {
    pub(super) number: u64,
    pub(super) file: Arc<File>,
}

#[derive(Debug)]
struct Current {
    number: u64,
    file: Arc<File>,
    /// Bytes written. The header goes in with the first record.
    offset: u64,
}

/// One record on its way, with the place where its caller finds the outcome.
#[derive(Debug)]
struct Waiting {
    json: Vec<u8>,
    ending: bool,
    outcome: Outcome,
}

/// Where the caller of a record finds its number.
type Outcome = Arc<OnceLock<Result<u64, AppendError>>>;

#[derive(Debug)]
struct Seat {
    current: Option<Current>,
    spare: Option<Allocated>,
    /// Numbers of segments that are full, for the keeper.
    closed: Vec<u64>,
    /// Full segments that may not be on the disk; out of it when synced or deleted.
    unsynced: BTreeMap<u64, Arc<File>>,
    next_number: u64,
    next_seq: u64,
    /// Bytes appended since the keeper last looked.
    unseen: u64,
    full: bool,
    refuses: bool,
}

/// Where the log stands, for the keeper.
#[derive(Debug)]
pub(super) struct View {
    /// Segments that became full since the last look.
    pub(super) closed: Vec<u64>,
    /// The segment being written, and how much of it is.
    pub(super) current: Option<(u64, u64)>,
    /// Number of the last record.
    pub(super) last_seq: u64,
}

/// What a sync has to bring to the disk.
#[derive(Debug)]
pub(super) struct Dirty {
    /// Segments that are full, with their numbers.
    pub(super) closed: Vec<(u64, Arc<File>)>,
    /// The one being written. It may be full when the sync is over, with more in it than was synced.
    pub(super) current: Option<Arc<File>>,
    /// Number of the last record in them.
    pub(super) through: u64,
}

/// What the tail starts from.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) dir: PathBuf,
    pub(super) segment_bytes: u64,
    pub(super) next_seq: u64,
    pub(super) next_number: u64,
    pub(super) current: Option<Allocated>,
    pub(super) spare: Option<Allocated>,
}

/// The writing end of the log.
#[derive(Debug)]
pub(super) struct Tail {
    seat: Mutex<Seat>,
    /// Records whose callers wait for the seat: at most one per thread, since each caller blocks.
    waiting: Mutex<Vec<Waiting>>,
    health: watch::Sender<Health>,
    bell: Arc<Bell>,
    dir: PathBuf,
    segment_bytes: u64,
    /// Bytes after which the keeper is rung: a restart replays at most this and what came while it folded.
    fold_bytes: u64,
    clock: Clock,
}

impl Tail {
    pub(super) fn new(start: Start, bell: Arc<Bell>, clock: Clock) -> Self {
        let full = start.current.is_none();
        let current = start.current.map(|Allocated { number, file }| Current {
            number,
            file,
            offset: 0,
        });
        Self {
            seat: Mutex::new(Seat {
                current,
                spare: start.spare,
                closed: Vec::new(),
                unsynced: BTreeMap::new(),
                next_number: start.next_number,
                next_seq: start.next_seq,
                unseen: 0,
                full,
                refuses: false,
            }),
            waiting: Mutex::new(Vec::new()),
            health: watch::Sender::new(if full { Health::Full } else { Health::Ok }),
            bell,
            dir: start.dir,
            segment_bytes: start.segment_bytes,
            fold_bytes: start.segment_bytes / 16,
            clock,
        }
    }

    pub(super) fn append(
        &self,
        sandbox: Option<SandboxId>,
        transition: &Transition,
    ) -> Result<Written, AppendError> {
        let json = record::encode(self.clock.wall(), sandbox, transition);
        let bytes = json.len();
        if bytes > self.record_max() {
            return Err(AppendError::TooLong { bytes });
        }
        let outcome = Arc::new(OnceLock::new());
        let waiting = Waiting {
            json,
            ending: transition.is_ending(),
            outcome: outcome.clone(),
        };
        lock(&self.waiting).push(waiting);
        let mut seat = self.seat();
        if outcome.get().is_none() {
            // Nobody wrote it while we waited for the seat: it is still in line, and we write for all of them.
            let batch = std::mem::take(&mut *lock(&self.waiting));
            let writes = self.write_all(&mut seat, batch);
            work::count(work::Kind::Writes, writes);
        }
        drop(seat);
        let seq = outcome.get().copied().unwrap_or(Err(AppendError::Failed))?;
        work::count(work::Kind::JournalRecords, 1);
        let bytes = u64::try_from(FRAME + bytes).unwrap_or(u64::MAX);
        work::count(work::Kind::JournalBytes, bytes);
        Ok(Written { seq, bytes })
    }

    pub(super) fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    /// Longest JSON that fits a segment, and the format.
    fn record_max(&self) -> usize {
        let room = usize::try_from(self.segment_bytes).unwrap_or(usize::MAX);
        RECORD_MAX.min(room.saturating_sub(HEADER + FRAME))
    }

    /// The seat. A caller that panicked in it left the log in doubt, which [`Seat::refuses`] says.
    fn seat(&self) -> MutexGuard<'_, Seat> {
        self.seat.lock().unwrap_or_else(|poisoned| {
            let mut seat = poisoned.into_inner();
            seat.refuses = true;
            self.health.send_replace(Health::Failed);
            seat
        })
    }

    /// Writes a batch, by one write per segment that it touches; says how many. Every outcome is set.
    fn write_all(&self, seat: &mut Seat, batch: Vec<Waiting>) -> u64 {
        let mut writes = 0;
        let mut bytes = Vec::with_capacity(batch.iter().map(|one| one.json.len() + FRAME).sum());
        let mut placed = Vec::with_capacity(batch.len());
        for one in batch {
            let len = u64::try_from(one.json.len() + FRAME).unwrap_or(u64::MAX);
            let pending = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            if !seat.refuses && !seat.fits(pending, len, self.segment_bytes) {
                writes += self.write(seat, &mut bytes, &mut placed);
            }
            if let Err(error) = self.admit(seat, len, one.ending) {
                settle(&one.outcome, Err(error));
                continue;
            }
            if bytes.is_empty() && seat.current.as_ref().is_some_and(|current| current.offset == 0) {
                bytes.extend_from_slice(&header(seat.next_seq));
            }
            frame(seat.next_seq, &one.json, &mut bytes);
            placed.push((one.outcome, seat.next_seq));
            seat.next_seq += 1;
        }
        writes + self.write(seat, &mut bytes, &mut placed)
    }

    /// Whether a record may be put behind what is pending; makes room for it if need be.
    fn admit(&self, seat: &mut Seat, len: u64, ending: bool) -> Result<(), AppendError> {
        if seat.refuses {
            return Err(AppendError::Failed);
        }
        if seat.full && !ending {
            // Perhaps there is room by now; and the keeper may make some.
            self.bell.ring(Want::Fold);
            self.allocate_spare(seat)?;
        }
        // What is pending fits already, or was written before this call.
        if seat.fits(0, len, self.segment_bytes) {
            Ok(())
        } else {
            self.rotate(seat)
        }
    }

    fn rotate(&self, seat: &mut Seat) -> Result<(), AppendError> {
        if let Err(error) = faults::point("journal.rotate") {
            return Err(self.poison_seat(seat, "change the segment", &error));
        }
        if seat.spare.is_none() {
            self.allocate_spare(seat)?;
        }
        let Some(Allocated { number, file }) = seat.spare.take() else {
            return Err(AppendError::Full);
        };
        if let Some(old) = seat.current.replace(Current {
            number,
            file,
            offset: 0,
        }) {
            seat.closed.push(old.number);
            seat.unsynced.insert(old.number, old.file);
        }
        self.bell.ring(Want::Spare);
        Ok(())
    }

    /// Allocates the next segment on this thread: only when the keeper's did not come in time, or found no room.
    fn allocate_spare(&self, seat: &mut Seat) -> Result<(), AppendError> {
        let number = seat.next_number;
        match allocate(&self.dir, number, self.segment_bytes) {
            Ok(spare) => {
                seat.next_number = number + 1;
                seat.spare = Some(spare);
                self.set_full(seat, false);
                Ok(())
            }
            Err(error) if is_full(&error) => {
                self.set_full(seat, true);
                Err(AppendError::Full)
            }
            Err(error) => Err(self.poison_seat(seat, "allocate a segment", &error)),
        }
    }

    fn write(&self, seat: &mut Seat, bytes: &mut Vec<u8>, placed: &mut Vec<(Outcome, u64)>) -> u64 {
        if bytes.is_empty() {
            return 0;
        }
        let done = match &mut seat.current {
            Some(current) if !seat.refuses => put(current, bytes),
            Some(_) | None => Err(Errno::BADF.into()),
        };
        match done {
            Ok(len) => {
                seat.unseen += len;
                if seat.unseen >= self.fold_bytes {
                    seat.unseen = 0;
                    self.bell.ring(Want::Fold);
                }
                for (outcome, seq) in placed.drain(..) {
                    settle(&outcome, Ok(seq));
                }
            }
            Err(error) => {
                let failed = self.poison_seat(seat, "write", &error);
                for (outcome, _seq) in placed.drain(..) {
                    settle(&outcome, Err(failed));
                }
            }
        }
        bytes.clear();
        1
    }

    fn set_full(&self, seat: &mut Seat, full: bool) {
        if seat.full != full && !seat.refuses {
            if full {
                tracing::warn!(dir = %self.dir.display(), "no room for the next segment: changes are refused");
            } else {
                tracing::info!(dir = %self.dir.display(), "there is room again: changes are taken");
            }
            self.health
                .send_replace(if full { Health::Full } else { Health::Ok });
        }
        seat.full = full;
    }

    fn poison_seat(
        &self,
        seat: &mut Seat,
        what: &'static str,
        error: &(dyn std::error::Error + 'static),
    ) -> AppendError {
        if !seat.refuses {
            tracing::error!(dir = %self.dir.display(), what, error, "the journal failed and takes no more records");
        }
        seat.refuses = true;
        self.health.send_replace(Health::Failed);
        AppendError::Failed
    }

    /// Ends the journal's service: something failed.
    pub(super) fn poison(&self, what: &'static str, error: &(dyn std::error::Error + 'static)) {
        self.poison_seat(&mut self.seat(), what, error);
    }

    /// Takes no more records.
    pub(super) fn refuse(&self) {
        self.seat().refuses = true;
    }

    /// What to sync.
    pub(super) fn dirty(&self) -> Dirty {
        let seat = self.seat();
        Dirty {
            closed: seat
                .unsynced
                .iter()
                .map(|(number, file)| (*number, file.clone()))
                .collect(),
            current: seat.current.as_ref().map(|current| current.file.clone()),
            through: seat.next_seq - 1,
        }
    }

    /// These full segments are on the disk, or gone.
    pub(super) fn forget(&self, numbers: impl Iterator<Item = u64>) {
        let mut seat = self.seat();
        for number in numbers {
            seat.unsynced.remove(&number);
        }
    }

    /// Number of the last record.
    pub(super) fn last_seq(&self) -> u64 {
        self.seat().next_seq - 1
    }

    /// Where the log stands.
    pub(super) fn view(&self) -> View {
        let mut seat = self.seat();
        seat.unseen = 0;
        View {
            closed: std::mem::take(&mut seat.closed),
            current: seat
                .current
                .as_ref()
                .map(|current| (current.number, current.offset)),
            last_seq: seat.next_seq - 1,
        }
    }

    /// Allocates the next segment ahead, on the keeper's thread; the seat is free meanwhile.
    pub(super) fn prepare_spare(&self) {
        loop {
            let number = {
                let mut seat = self.seat();
                if seat.spare.is_some() || seat.refuses {
                    return;
                }
                seat.next_number += 1;
                seat.next_number - 1
            };
            let made = allocate(&self.dir, number, self.segment_bytes);
            let mut seat = self.seat();
            match made {
                Ok(spare) => {
                    self.set_full(&mut seat, false);
                    let later = seat
                        .current
                        .as_ref()
                        .is_some_and(|current| current.number > number);
                    if !later && seat.spare.is_none() {
                        seat.spare = Some(spare);
                        return;
                    }
                    // An append was faster: segments are read in the order of their numbers, so this one is too late.
                    drop(seat);
                    // A segment of zeros that stays does no harm.
                    drop(fs::remove_file(path(&self.dir, number)));
                }
                Err(error) if is_full(&error) => return self.set_full(&mut seat, true),
                Err(error) => {
                    self.poison_seat(&mut seat, "allocate a segment", &error);
                    return;
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn replace_file(&self, file: File) {
        self.seat().current.as_mut().unwrap().file = Arc::new(file);
    }
}

impl Seat {
    /// Whether `len` more bytes fit behind `pending` ones in the current segment.
    fn fits(&self, pending: u64, len: u64, segment_bytes: u64) -> bool {
        self.current.as_ref().is_some_and(|current| {
            // Where the header is still to come it is either pending or counted here.
            let header = if current.offset == 0 && pending == 0 {
                HEADER as u64
            } else {
                0
            };
            current.offset + header + pending + len <= segment_bytes
        })
    }
}

/// Everything in one write. A short one counts as failed: the rest would be a second write on a file that just refused.
fn put(current: &mut Current, bytes: &[u8]) -> io::Result<u64> {
    faults::point("journal.before_append")?;
    let len = loop {
        match rustix::io::pwrite(&current.file, bytes, current.offset) {
            Err(Errno::INTR) => {}
            done => break done?,
        }
    };
    if len != bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    let len = u64::try_from(len).unwrap_or(u64::MAX);
    current.offset += len;
    faults::point("journal.after_append")?;
    Ok(len)
}

fn settle(outcome: &OnceLock<Result<u64, AppendError>>, result: Result<u64, AppendError>) {
    // Each record leaves the line once, so its outcome is set once.
    outcome.set(result).unwrap_or(());
}

/// Locks; what these locks guard is whole at every instant, so a panic elsewhere does not spoil it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a segment lies.
pub(super) fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number:012}.seg"))
}

/// Makes a segment of zeros, file and name on the disk. Where it fails nothing is left.
pub(super) fn allocate(dir: &Path, number: u64, bytes: u64) -> io::Result<Allocated> {
    let file = put_by(&path(dir, number), bytes)?;
    Ok(Allocated {
        number,
        file: Arc::new(file),
    })
}

/// Makes a file of zeros that has its room on the disk. Where it fails nothing is left.
pub(super) fn put_by(path: &Path, bytes: u64) -> io::Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let dir = path.parent().unwrap_or(path);
    let filled = fill(&file, bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| disk::sync_dir(dir));
    match filled {
        Ok(()) => Ok(file),
        Err(error) => {
            // The first error is the one to tell; zeros that stay do no harm.
            drop(fs::remove_file(path));
            Err(error)
        }
    }
}

fn fill(file: &File, bytes: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;

    const ZEROS: [u8; 4096] = [0; 4096];
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            let mut at = 0;
            while at < bytes {
                let len = usize::try_from(bytes - at).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
                file.write_all_at(ZEROS.get(..len).unwrap_or(&ZEROS), at)?;
                at += u64::try_from(len).unwrap_or(u64::MAX);
            }
            Ok(())
        }
        Err(errno) => Err(errno.into()),
    }
}
