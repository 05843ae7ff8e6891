//! The thread that writes: nobody waits for it, and it waits for nobody but the disk.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    chain::Head,
    entry::Entry,
    keep::Outlived,
    ledger::Ledger,
    queue::Queue,
    usage::{Joining, Look, Tracked},
};
use crate::{
    clock::{Clock, Tick},
    journal::{HeadRow, Journal, Transition},
    policy::{Keep, Retention},
    telemetry::{
        chain,
        metrics::{AuditMetrics, LedgerFile},
    },
};

/// How long lines are gathered, from the first.
const GATHER: Duration = Duration::from_millis(50);
/// As many are some 256 KiB, for which nobody gathers any longer.
const MANY: usize = 512;
/// From the first unsynced line to its sync, and from one try to the next where a file cannot be written.
const SECOND: Duration = Duration::from_secs(1);
/// From one line of a claim's usage to the next, and of the heads in the journal.
const MINUTE: Duration = Duration::from_secs(60);
/// Lines of usage that wait for a disk with room.
const BILLS: usize = 65_536;

/// What the writer and the doors share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    rung: Condvar,
    pub(super) joining: Joining,
    /// Lines cannot be written just now.
    pub(super) is_failing: AtomicBool,
    pub(super) metrics: AuditMetrics,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    retention: Retention,
    /// A claim is over.
    bill: bool,
    stop: bool,
}

impl Shared {
    pub(super) fn new(queue: Queue, metrics: AuditMetrics) -> Self {
        Self {
            state: Mutex::new(State {
                queue,
                retention: Retention::ALL,
                bill: false,
                stop: false,
            }),
            rung: Condvar::new(),
            joining: Joining::default(),
            is_failing: AtomicBool::new(false),
            metrics,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues what `entry` makes of its number, and gives what it gives beside it. Number 0: there is no room, which is
    /// counted.
    pub(super) fn push<T>(&self, entry: impl FnOnce(u64) -> (Entry, T)) -> T {
        let mut state = self.state();
        let is_full = state.queue.is_full();
        let beside = state.queue.push(entry);
        let waiting = state.queue.len();
        drop(state);
        if is_full {
            self.metrics.lost(LedgerFile::Audit, 1);
        } else if waiting == 1 || waiting == MANY {
            self.rung.notify_one();
        }
        beside
    }

    /// Whether an entry would find room now.
    pub(super) fn has_room(&self) -> bool {
        !self.state().queue.is_full()
    }

    /// A claim is over.
    pub(super) fn bill(&self) {
        // Who is called already is not woken again for each claim that ends.
        if !std::mem::replace(&mut self.state().bill, true) {
            self.rung.notify_one();
        }
    }

    /// So much is kept from now on.
    pub(super) fn keep(&self, retention: Retention) {
        self.state().retention = retention;
    }

    /// Has the writer write what is queued, and end.
    pub(super) fn stop(&self) {
        self.state().stop = true;
        self.rung.notify_one();
    }

    /// Waits for work, or for so long; then moves what is queued. `heeds`: lines are reason enough to begin.
    fn wait(&self, pause: Duration, heeds: bool, into: &mut VecDeque<(u64, Entry)>) -> Wake {
        let rests = |state: &mut State| !state.stop && !state.bill && (!heeds || state.queue.is_empty());
        let state = self.state();
        let woken = self.rung.wait_timeout_while(state, pause, rests);
        let (state, slept) = woken.unwrap_or_else(PoisonError::into_inner);
        let mut state = if slept.timed_out() {
            state
        } else {
            let gathers = |state: &mut State| !state.stop && state.queue.len() < MANY;
            let gathered = self.rung.wait_timeout_while(state, GATHER, gathers);
            gathered.unwrap_or_else(PoisonError::into_inner).0
        };
        // What cannot be written stays where it has a bound.
        if heeds || into.is_empty() || state.stop {
            state.queue.take(into);
        }
        Wake {
            bill: std::mem::take(&mut state.bill),
            stop: state.stop,
            retention: state.retention,
        }
    }
}

struct Wake {
    bill: bool,
    stop: bool,
    retention: Retention,
}

/// Says that nothing is written any more, however the thread ends.
struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.is_failing.store(true, Ordering::Relaxed);
        if thread::panicking() {
            tracing::error!(
                "the audit's writer panicked: nothing is written until the daemon is started again"
            );
        }
    }
}

/// One of the two files, and what waits for it.
#[derive(Debug)]
struct Output {
    file: LedgerFile,
    ledger: Ledger,
    waiting: VecDeque<(u64, Entry)>,
    is_failing: bool,
    /// When the oldest unsynced line was written.
    dirty: Option<Tick>,
    /// What the journal knows of it.
    journaled: Head,
    /// Files that go once the line that says so, of this number, is on the disk.
    going: Option<(u64, Outlived)>,
}

impl Output {
    fn new(file: LedgerFile, ledger: Ledger) -> Self {
        Self {
            file,
            journaled: ledger.synced(),
            ledger,
            waiting: VecDeque::new(),
            is_failing: false,
            dirty: None,
            going: None,
        }
    }

    /// Files that have outlived what is kept, unless some are on their way out, or it is not clear what the disk has.
    fn outlived(&self, keep: Keep) -> Option<Outlived> {
        if self.is_failing || self.going.is_some() {
            return None;
        }
        self.ledger.outlived(keep).unwrap_or_else(|error| {
            tracing::warn!(file = self.file.as_str(), error = %chain(&error), "old files cannot be told: none is deleted");
            None
        })
    }

    /// Deletes what goes, if the disk has the line that says so.
    fn go(&mut self) {
        let synced = self.ledger.synced().seq;
        let Some((_, outlived)) = self.going.take_if(|(seq, _)| *seq <= synced) else {
            return;
        };
        let (file, files) = (self.file.as_str(), outlived.files.len());
        let (from, to) = (outlived.from, outlived.to);
        match self.ledger.delete(&outlived) {
            Ok(()) => tracing::info!(
                file,
                files,
                from,
                to,
                "files that have outlived what is kept are deleted"
            ),
            Err(error) => {
                tracing::warn!(file, from, to, error = %chain(&error), "files that have outlived what is kept cannot be deleted");
            }
        }
    }

    /// Writes what waits. After an error some of it still does.
    fn write(&mut self, now: Tick, metrics: &AuditMetrics) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let before = self.waiting.len();
            self.ledger.append(&mut self.waiting)?;
            metrics.written(self.file, before - self.waiting.len());
            self.dirty.get_or_insert(now);
        }
        Ok(())
    }
}

/// What the thread owns.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    audit: Output,
    usage: Output,
    /// Numbers lines of usage, and bounds them.
    bills: Queue,
    tracked: Vec<Tracked>,
    /// Claims that are over, and connections of them are not.
    ending: bool,
    /// When claims get their lines, and the journal its heads.
    due: Tick,
    clock: Clock,
    /// None: nobody keeps the heads.
    journal: Option<Journal>,
}

impl Writer {
    pub(super) fn new(
        shared: Arc<Shared>,
        (audit, usage): (Ledger, Ledger),
        opening: Vec<Entry>,
        clock: Clock,
        journal: Option<Journal>,
    ) -> Self {
        let mut bills = Queue::new(BILLS, usage.head().seq + 1);
        for entry in opening {
            bills.push(|_seq| (entry, ()));
        }
        Self {
            shared,
            audit: Output::new(LedgerFile::Audit, audit),
            usage: Output::new(LedgerFile::Usage, usage),
            bills,
            tracked: Vec::new(),
            ending: false,
            due: clock.tick().plus(MINUTE),
            clock,
            journal,
        }
    }

    /// Writes until it is told to stop and all is written, or cannot be.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _over = Over(Arc::clone(&shared));
        let mut is_first = true;
        loop {
            let pause = if is_first { Duration::ZERO } else { self.pause() };
            let wake = shared.wait(pause, !self.audit.is_failing, &mut self.audit.waiting);
            self.turn(&wake);
            is_first = false;
            if wake.stop {
                return;
            }
        }
    }

    /// How long there is nothing to do, unless something comes.
    fn pause(&self) -> Duration {
        if !self.bills.is_empty() && !self.usage.is_failing {
            return Duration::ZERO;
        }
        let now = self.clock.tick();
        let mut pause = self.due.since(now);
        for output in [&self.audit, &self.usage] {
            if let Some(dirty) = output.dirty {
                pause = pause.min(dirty.plus(SECOND).since(now));
            }
            if output.is_failing {
                pause = pause.min(SECOND);
            }
        }
        if self.ending {
            pause = pause.min(SECOND);
        }
        pause
    }

    fn turn(&mut self, wake: &Wake) {
        let (is_over, is_stop) = (wake.bill, wake.stop);
        let now = self.clock.tick();
        let is_due = now >= self.due || is_stop;
        if is_due {
            self.due = now.plus(MINUTE);
        }
        if is_due || is_over || self.ending {
            self.bill(is_due);
        }
        if is_stop {
            let at = self.clock.wall();
            self.bills.push(|_seq| (Entry::Stop { at }, ()));
        }
        // What cannot be written stays where it has a bound.
        if !self.usage.is_failing || self.usage.waiting.is_empty() || is_stop {
            self.bills.take(&mut self.usage.waiting);
        }
        let mut turned = false;
        for output in [&mut self.audit, &mut self.usage] {
            let mut unsynced = None;
            if output.ledger.is_full() && !output.waiting.is_empty() {
                turned = true;
                unsynced = settle(output, &self.shared.metrics);
            }
            let written = output.write(now, &self.shared.metrics);
            heed(output, written, &self.shared);
            let is_late = output.dirty.is_some_and(|dirty| now.since(dirty) >= SECOND);
            if is_late || is_due || turned {
                unsynced = settle(output, &self.shared.metrics).or(unsynced);
            }
            let Some((from, to)) = unsynced else { continue };
            let at = self.clock.wall();
            let entry = |_seq| (Entry::Unsynced { at, from, to }, ());
            match output.file {
                LedgerFile::Audit => self.shared.push(entry),
                LedgerFile::Usage => self.bills.push(entry),
            };
        }
        if is_due || turned {
            self.journal();
        }
        if is_stop {
            self.leave();
        } else if is_due || turned {
            self.retire(wake.retention);
        }
    }

    /// Has files go that have outlived what is kept: first a line says so, and when that is on the disk, they do.
    fn retire(&mut self, retention: Retention) {
        let at = self.clock.wall();
        for (output, keep) in [
            (&mut self.audit, retention.audit),
            (&mut self.usage, retention.usage),
        ] {
            let Some(outlived) = output.outlived(keep) else {
                continue;
            };
            let entry = |seq| {
                let entry = Entry::Deleted {
                    at,
                    files: u64::try_from(outlived.files.len()).unwrap_or(u64::MAX),
                    from: outlived.from,
                    to: outlived.to,
                };
                (entry, seq)
            };
            let seq = match output.file {
                LedgerFile::Audit => self.shared.push(entry),
                LedgerFile::Usage => self.bills.push(entry),
            };
            // Without room for a line they stay, and the next minute tries again.
            output.going = (seq > 0).then_some((seq, outlived));
        }
    }

    /// Makes lines of what claims have used.
    fn bill(&mut self, is_due: bool) {
        let at = self.clock.wall();
        let missed = self.shared.joining.take(&mut self.tracked);
        if missed > 0 {
            self.bills.lose(missed);
            self.shared.metrics.lost(LedgerFile::Usage, missed);
        }
        self.ending = false;
        let (bills, metrics) = (&mut self.bills, &self.shared.metrics);
        let mut ending = false;
        self.tracked.retain_mut(|tracked| {
            let (used, look) = tracked.look(at, is_due);
            if let Some(used) = used {
                let seq = bills.push(|seq| (Entry::Usage(Box::new(used)), seq));
                metrics.lost(LedgerFile::Usage, u64::from(seq == 0));
            }
            match look {
                Look::Stays => true,
                Look::Ending => {
                    ending = true;
                    true
                }
                Look::Over => false,
            }
        });
        self.ending = ending;
    }

    /// Tells the journal how far the disk has both, so that a tail that is cut off shows.
    fn journal(&mut self) {
        let Some(journal) = &self.journal else { return };
        let news = |output: &Output| {
            (output.ledger.synced() != output.journaled).then(|| row(output.ledger.synced()))
        };
        let (audit, usage) = (news(&self.audit), news(&self.usage));
        if audit.is_none() && usage.is_none() {
            return;
        }
        // A journal that takes none says so itself, and the next minute tries again.
        if journal
            .append(None, &Transition::Audited { audit, usage })
            .is_ok()
        {
            for output in [&mut self.audit, &mut self.usage] {
                output.journaled = output.ledger.synced();
            }
        }
    }

    /// What cannot be written before the end is lost.
    fn leave(&self) {
        for output in [&self.audit, &self.usage] {
            let left = output.waiting.len();
            if left > 0 {
                self.shared
                    .metrics
                    .lost(output.file, u64::try_from(left).unwrap_or(u64::MAX));
                tracing::error!(
                    file = output.file.as_str(),
                    lines = left,
                    "lines are lost: they could not be written"
                );
            }
        }
    }
}

fn row(head: Head) -> HeadRow {
    HeadRow {
        seq: head.seq,
        hash: head.hash.to_string(),
    }
}

/// Notes how a write went; a change of it is told.
fn heed(output: &mut Output, written: io::Result<()>, shared: &Shared) {
    let was_failing = std::mem::replace(&mut output.is_failing, written.is_err());
    let file = output.file.as_str();
    match written {
        Err(error) if !was_failing => {
            tracing::error!(file, error = %chain(&error), "lines cannot be written: they wait, and what finds no room is counted");
        }
        Ok(()) if was_failing => tracing::info!(file, "lines are written again"),
        Ok(()) | Err(_) => {}
    }
    if was_failing != output.is_failing {
        shared.metrics.failing(output.file, output.is_failing);
        if output.file == LedgerFile::Audit {
            shared.is_failing.store(output.is_failing, Ordering::Relaxed);
        }
    }
}

/// Brings a file to the disk; gives the numbers that may not be there, of which the next file tells.
fn settle(output: &mut Output, metrics: &AuditMetrics) -> Option<(u64, u64)> {
    output.dirty = None;
    let Err(error) = output.ledger.sync() else {
        output.go();
        return None;
    };
    // Nobody knows what the disk has.
    output.going = None;
    tracing::error!(file = output.file.as_str(), error = %chain(&error), "a sync failed: another file is begun");
    let (from, to) = (error.from, output.ledger.head().seq);
    metrics.lost(output.file, to.saturating_sub(from) + 1);
    Some((from, to))
}
