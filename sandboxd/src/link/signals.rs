//! What a link's task, its port and its callers tell each other: a few atomics, one wake-up, one end.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use sandbox_protocol::limits::{LINK_STREAMS, WIDE_STREAMS};
use tokio::sync::{Notify, SetOnce};

use super::{LostWhy, PACE_WARM, PATIENCE};
use crate::clock::{Clock, Tick};

/// Streams down to which windows stay narrow once they are: those that open and close at the brink cost no change each.
const WIDEN_AT: u32 = WIDE_STREAMS / 2;
/// Shortest pace and patience.
const SHORTEST: Duration = Duration::from_millis(10);
/// Longest pace and patience.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

pub(super) struct Signals {
    pub(super) clock: Clock,
    heard: AtomicU64,
    pace_ms: AtomicU64,
    patience_ms: AtomicU64,
    closing: AtomicBool,
    /// Wakes the link's task: a shorter pace, another patience, another width, or the close.
    pub(super) wake: Notify,
    /// What the port saw that HTTP/2 would report less exactly.
    pub(super) cause: OnceLock<LostWhy>,
    pub(super) lost: SetOnce<LostWhy>,
    streams: AtomicU32,
    /// Calls ever sent; each allows the guest its header blocks.
    requests: AtomicU64,
    /// Pings ever sent; each allows the guest some more frames.
    pings: AtomicU64,
}

impl Signals {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            heard: AtomicU64::new(clock.tick().as_nanos()),
            clock,
            pace_ms: AtomicU64::new(millis(PACE_WARM)),
            patience_ms: AtomicU64::new(millis(PATIENCE)),
            closing: AtomicBool::new(false),
            wake: Notify::new(),
            cause: OnceLock::new(),
            lost: SetOnce::new(),
            streams: AtomicU32::new(0),
            requests: AtomicU64::new(0),
            pings: AtomicU64::new(0),
        }
    }

    pub(super) fn heard(&self) -> Tick {
        Tick::from_nanos(self.heard.load(Ordering::Relaxed))
    }

    pub(super) fn hear(&self) {
        self.heard
            .fetch_max(self.clock.tick().as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn pace(&self) -> Duration {
        Duration::from_millis(self.pace_ms.load(Ordering::Relaxed))
    }

    /// Only a shorter pace wakes the task: the longer one of a claim must cost the claim nothing.
    pub(super) fn set_pace(&self, pace: Duration) {
        let old = self.pace_ms.swap(millis(pace), Ordering::Relaxed);
        if millis(pace) < old {
            self.wake.notify_one();
        }
    }

    pub(super) fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms.load(Ordering::Relaxed))
    }

    pub(super) fn set_patience(&self, patience: Duration) {
        self.patience_ms.store(millis(patience), Ordering::Relaxed);
        self.wake.notify_one();
    }

    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(super) fn lose(&self, why: LostWhy) {
        // Whoever came first told the cause.
        drop(self.lost.set(why));
    }

    pub(super) fn blame(&self, why: LostWhy) {
        // The first cause stands; what follows from it is no news.
        self.cause.get_or_init(|| why);
    }

    pub(super) fn pinged(&self) {
        self.pings.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn pings(&self) -> u64 {
        self.pings.load(Ordering::Relaxed)
    }

    pub(super) fn requested(&self) {
        self.requests.fetch_add(1, Ordering::Release);
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Acquire)
    }

    /// Whether streams are to have the wide window, having it or not now.
    pub(super) fn is_wide(&self, now: bool) -> bool {
        self.streams() <= if now { WIDE_STREAMS } else { WIDEN_AT }
    }

    pub(super) fn streams(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }
}

/// Within what a timer can take: a pace of nothing would be a flood of our own, one of ever overflows.
fn millis(duration: Duration) -> u64 {
    let within = duration.clamp(SHORTEST, LONGEST);
    u64::try_from(within.as_millis()).unwrap_or(u64::MAX)
}

/// A call's place among those that a link may carry; free again when dropped.
pub(super) struct Place(Arc<Signals>);

impl Place {
    pub(super) fn take(signals: &Arc<Signals>) -> Option<Self> {
        let place = Self(Arc::clone(signals));
        let before = signals.streams.fetch_add(1, Ordering::Relaxed);
        if before == WIDE_STREAMS {
            signals.wake.notify_one();
        }
        (before < LINK_STREAMS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let before = self.0.streams.fetch_sub(1, Ordering::Relaxed);
        if before == WIDEN_AT + 1 {
            self.0.wake.notify_one();
        }
    }
}
