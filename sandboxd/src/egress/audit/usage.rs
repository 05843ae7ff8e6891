//! What claims use: counters that connections add to without a lock, and what the writer makes of them.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::entry::{Owner, Used};
use crate::clock::WallTime;

/// Claims that the writer has not looked at yet, at most: it looks twenty times a second, unless a disk holds it up.
const JOINED: usize = 65_536;

/// The counters of one claim.
#[derive(Debug, Default)]
pub(in crate::egress) struct Meters {
    pub(in crate::egress) requests: AtomicU64,
    pub(in crate::egress) denials: AtomicU64,
    pub(in crate::egress) connections: AtomicU64,
    /// From the guest.
    pub(in crate::egress) sent: AtomicU64,
    /// To the guest.
    pub(in crate::egress) received: AtomicU64,
    is_tracked: AtomicBool,
    is_over: AtomicBool,
}

/// What they showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::egress) struct Counts {
    pub(in crate::egress) requests: u64,
    pub(in crate::egress) denials: u64,
    pub(in crate::egress) connections: u64,
    pub(in crate::egress) sent: u64,
    pub(in crate::egress) received: u64,
}

impl Counts {
    const fn less(self, before: Self) -> Self {
        Self {
            requests: self.requests.wrapping_sub(before.requests),
            denials: self.denials.wrapping_sub(before.denials),
            connections: self.connections.wrapping_sub(before.connections),
            sent: self.sent.wrapping_sub(before.sent),
            received: self.received.wrapping_sub(before.received),
        }
    }
}

impl Meters {
    fn read(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            requests: read(&self.requests),
            denials: read(&self.denials),
            connections: read(&self.connections),
            sent: read(&self.sent),
            received: read(&self.received),
        }
    }
}

/// Adds one.
pub(in crate::egress) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A claim that gets lines.
#[derive(Debug)]
pub(super) struct Tracked {
    meters: Arc<Meters>,
    owner: Owner,
    /// When its last line was written, or its first connection came.
    since: WallTime,
    /// What its lines have told.
    told: Counts,
}

/// What a look at a claim brought.
#[derive(Debug)]
pub(super) enum Look {
    /// It goes on.
    Stays,
    /// It is over, and connections of it are not gone yet.
    Ending,
    /// It has no later line.
    Over,
}

impl Tracked {
    /// Looks at the counters, and gives what is to be written of them: all that is new where `now` is a time for lines, the
    /// rest where the claim is over and nothing counts any more.
    pub(super) fn look(&mut self, at: WallTime, is_due: bool) -> (Option<Used>, Look) {
        let is_over = self.meters.is_over.load(Ordering::Acquire);
        // Whoever counted last let go of it behind that, and nobody else can count.
        let is_last = is_over && (Arc::get_mut(&mut self.meters).is_some() || is_due);
        let counts = self.meters.read();
        let used = (is_last || (is_due && counts != self.told)).then(|| Used {
            since: self.since,
            at,
            owner: self.owner.clone(),
            counts: counts.less(self.told),
            is_last,
        });
        if used.is_some() {
            (self.told, self.since) = (counts, at);
        }
        let look = match (is_over, is_last) {
            (false, _) => Look::Stays,
            (true, false) => Look::Ending,
            (true, true) => Look::Over,
        };
        (used, look)
    }
}

/// Claims that begin to count, on their way to the writer.
#[derive(Debug, Default)]
pub(super) struct Joining {
    joined: Mutex<Vec<Tracked>>,
    missed: AtomicU64,
}

impl Joining {
    /// The claim of these meters gets lines from now on; once is as often.
    pub(super) fn join(
        &self,
        meters: &Arc<Meters>,
        owner: impl FnOnce() -> Owner,
        now: impl FnOnce() -> WallTime,
    ) {
        if meters.is_tracked.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        if joined.len() >= JOINED {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        joined.push(Tracked {
            meters: Arc::clone(meters),
            owner: owner(),
            since: now(),
            told: Counts::default(),
        });
    }

    /// The claim of these meters is over; call it once.
    pub(super) fn over(
        &self,
        meters: &Arc<Meters>,
        owner: impl FnOnce() -> Owner,
        now: impl FnOnce() -> WallTime,
    ) {
        meters.is_over.store(true, Ordering::Release);
        self.join(meters, owner, now);
    }

    /// Moves who has joined behind `tracked`; gives how many found no room since the last time.
    pub(super) fn take(&self, tracked: &mut Vec<Tracked>) -> u64 {
        tracked.append(&mut self.joined.lock().unwrap_or_else(PoisonError::into_inner));
        self.missed.swap(0, Ordering::Relaxed)
    }
}
