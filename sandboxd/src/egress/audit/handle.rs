//! The audit as the doors have it.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use super::{
    AUDIT, USAGE,
    entry::{After, Entry, Owner},
    ledger::Ledger,
    queue::Queue,
    usage::Meters,
    verify,
    writer::{Shared, Writer},
};
use crate::{
    clock::{Clock, WallTime},
    journal::{HeadRow, Heads, Journal},
    policy::Retention,
    tasks,
    telemetry::metrics::AuditMetrics,
};

/// What the audit works with.
#[derive(Debug)]
pub struct Options {
    /// Holds the folders `audit` and `usage`.
    pub state_dir: PathBuf,
    /// Entries that wait at most.
    pub queue: usize,
    /// Bytes of the disk that are left to others.
    pub spare: u64,
    /// How far the journal knows the files.
    pub heads: Heads,
    /// Where the heads are kept; none: nowhere.
    pub journal: Option<Journal>,
    /// What is counted.
    pub metrics: AuditMetrics,
    /// Time.
    pub clock: Clock,
}

/// The audit; a handle. [`off`](Self::off) takes everything and keeps nothing.
#[derive(Debug, Clone)]
pub struct Audit(pub(super) Option<Arc<Inner>>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    is_required: AtomicBool,
    clock: Clock,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Audit {
    /// None.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// Takes up the files that are there and starts the writer. Files that cannot be had are no failure: see the log and
    /// the metrics.
    ///
    /// # Errors
    /// The kernel's, when no thread can be had.
    pub fn open(options: Options) -> std::io::Result<Self> {
        let Options {
            state_dir,
            queue,
            spare,
            heads,
            journal,
            metrics,
            clock,
        } = options;
        let known = |row: Option<&HeadRow>| row.and_then(verify::head);
        let open = |name, known, spare| Ledger::open(state_dir.join(name), name, known, spare, clock.clone());
        let (audit, found) = open(AUDIT, known(heads.audit.as_ref()), spare);
        // Its lines are few, and somebody pays by them.
        let (usage, billed) = open(USAGE, known(heads.usage.as_ref()), 0);
        let at = clock.wall();
        let mut opening = vec![Entry::Start {
            at,
            after: billed.after,
            torn: billed.torn,
        }];
        if billed.after == After::Cut {
            opening.push(Entry::UsageGap {
                since: billed.last_at,
                at,
            });
        }
        let mut queue = Queue::new(queue, audit.head().seq + 1);
        queue.push(|_seq| {
            (
                Entry::Start {
                    at,
                    after: found.after,
                    torn: found.torn,
                },
                (),
            )
        });
        let shared = Arc::new(Shared::new(queue, metrics));
        let writer = Writer::new(
            Arc::clone(&shared),
            (audit, usage),
            opening,
            clock.clone(),
            journal,
        );
        let thread = tasks::thread("audit", move || writer.run())?;
        Ok(Self(Some(Arc::new(Inner {
            shared,
            is_required: AtomicBool::new(false),
            clock,
            thread: Mutex::new(Some(thread)),
        }))))
    }

    /// Whether doors deny what cannot be audited (`[egress.audit] required`), from now on.
    pub fn require(&self, is_required: bool) {
        if let Some(inner) = &self.0 {
            inner.is_required.store(is_required, Ordering::Relaxed);
        }
    }

    /// How much is kept of both files (`[egress.audit]`, `[egress.usage]`), from now on. Everything, before it is said.
    pub fn keep(&self, retention: Retention) {
        if let Some(inner) = &self.0 {
            inner.shared.keep(retention);
        }
    }

    /// Whether a decision may be an allowance: where it must have a line, there must be room for one.
    pub(in crate::egress) fn takes(&self) -> bool {
        self.0.as_deref().is_none_or(|inner| {
            !inner.is_required.load(Ordering::Relaxed)
                || (!inner.shared.is_failing.load(Ordering::Relaxed) && inner.shared.has_room())
        })
    }

    /// Whether a decision with this number may stand: 0 is in no line.
    pub(in crate::egress) fn allows(&self, seq: u64) -> bool {
        self.0
            .as_deref()
            .is_none_or(|inner| seq > 0 || !inner.is_required.load(Ordering::Relaxed))
    }

    /// Queues what `entry` makes of its number, and gives what it gives beside it. Number 0: it is in no line.
    pub(in crate::egress) fn push<T>(&self, entry: impl FnOnce(u64) -> (Entry, T)) -> T {
        match &self.0 {
            Some(inner) => inner.shared.push(entry),
            None => entry(0).1,
        }
    }

    /// Somebody else changed the packet filter of lane guarded, so many times since this was told.
    pub fn lane_lock_lost(&self, count: u64) {
        if let Some(inner) = &self.0 {
            let at = inner.clock.wall();
            inner.shared.push(|_seq| (Entry::LaneLockLost { at, count }, ()));
        }
    }

    /// A claim begins to use something; once is as often.
    pub(in crate::egress) fn uses(&self, meters: &Arc<Meters>, owner: impl FnOnce() -> Owner) {
        if let Some(inner) = &self.0 {
            inner.shared.joining.join(meters, owner, || inner.clock.wall());
        }
    }

    /// A claim is over; call it once.
    pub(in crate::egress) fn bill(&self, meters: &Arc<Meters>, owner: impl FnOnce() -> Owner) {
        if let Some(inner) = &self.0 {
            inner.shared.joining.over(meters, owner, || inner.clock.wall());
            inner.shared.bill();
        }
    }

    /// Writes all that is queued, and ends the writer. Cancelled: it goes on. Twice is as once.
    pub async fn stop(&self) {
        let Some(inner) = &self.0 else { return };
        let Some(thread) = inner.thread() else { return };
        let at: WallTime = inner.clock.wall();
        // Where there is no room for it, the next start says that it was missing.
        inner.shared.push(|_seq| (Entry::Stop { at }, ()));
        inner.shared.stop();
        // A panic of the thread has been told.
        drop(tasks::blocking("audit stop", move || drop(thread.join())).await);
    }
}

impl Inner {
    fn thread(&self) -> Option<JoinHandle<()>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(thread) = self.thread() {
            // As after a kill: what is queued is written, and no line says that this was the end.
            self.shared.stop();
            drop(thread.join());
        }
    }
}
