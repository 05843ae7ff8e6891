//! Time: the one home of clocks, so that tests own it.
//!
//! [`Tick`] is elapsed time since the host booted, suspend included: leases, freshness and averages use it, and a
//! step of the wall clock cannot move it. [`WallTime`] stands only in records and replies.
//!
//! May call: nothing.
//! Never inside: a decision.
//! Invariant 20: every claim has a lease, in elapsed time.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds since the host booted (`CLOCK_BOOTTIME`). Comparable across restarts of the daemon, not across boots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tick(u64);

impl Tick {
    /// A tick of that many nanoseconds.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since boot.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time from `earlier` to this tick; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This tick and `after` more; stops at the end of time.
    #[must_use]
    pub fn plus(self, after: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// Microseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WallTime(u64);

impl WallTime {
    /// A time of that many microseconds since 1970.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since 1970.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// This time and `after` more.
    #[must_use]
    pub fn plus(self, after: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(after.as_micros()).unwrap_or(u64::MAX)),
        )
    }

    /// As the API has it.
    #[must_use]
    pub fn to_proto(self) -> prost_types::Timestamp {
        prost_types::Timestamp {
            seconds: i64::try_from(self.0 / 1_000_000).unwrap_or(i64::MAX),
            nanos: i32::try_from(self.0 % 1_000_000 * 1_000).unwrap_or(0),
        }
    }
}

impl fmt::Display for WallTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = std::time::UNIX_EPOCH + Duration::from_micros(self.0);
        write!(f, "{}", humantime::format_rfc3339_micros(time))
    }
}

impl fmt::Debug for WallTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where time comes from: the host, or a test.
#[derive(Debug, Clone, Default)]
pub struct Clock(Option<Arc<Manual>>);

#[derive(Debug)]
struct Manual {
    tick: AtomicU64,
    wall: AtomicU64,
}

impl Clock {
    /// The host's clocks.
    #[must_use]
    pub const fn host() -> Self {
        Self(None)
    }

    /// A clock that stands still until [`advance`](Self::advance); for tests.
    #[must_use]
    pub fn manual(tick: Tick, wall: WallTime) -> Self {
        Self(Some(Arc::new(Manual {
            tick: AtomicU64::new(tick.0),
            wall: AtomicU64::new(wall.0),
        })))
    }

    /// Moves a manual clock; the host's cannot be moved and ignores it.
    pub fn advance(&self, by: Duration) {
        if let Some(manual) = &self.0 {
            manual.tick.fetch_add(Tick(0).plus(by).0, Ordering::Relaxed);
            manual.wall.fetch_add(WallTime(0).plus(by).0, Ordering::Relaxed);
        }
    }

    /// Elapsed time now.
    #[must_use]
    pub fn tick(&self) -> Tick {
        match &self.0 {
            Some(manual) => Tick(manual.tick.load(Ordering::Relaxed)),
            None => {
                let now = clock_gettime(ClockId::Boottime);
                let secs = u64::try_from(now.tv_sec).unwrap_or(0);
                Tick(
                    secs.saturating_mul(1_000_000_000)
                        .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0)),
                )
            }
        }
    }

    /// Wall time now.
    #[must_use]
    pub fn wall(&self) -> WallTime {
        match &self.0 {
            Some(manual) => WallTime(manual.wall.load(Ordering::Relaxed)),
            None => {
                let now = clock_gettime(ClockId::Realtime);
                let secs = u64::try_from(now.tv_sec).unwrap_or(0);
                WallTime(
                    secs.saturating_mul(1_000_000)
                        .saturating_add(u64::try_from(now.tv_nsec / 1_000).unwrap_or(0)),
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inv_20_clock_steps() {
        let clock = Clock::manual(Tick::from_nanos(5), WallTime::from_micros(1_000_000));
        let start = clock.tick();
        clock.advance(Duration::from_secs(2));
        assert_eq!(clock.tick().since(start), Duration::from_secs(2));
        assert_eq!(start.since(clock.tick()), Duration::ZERO);
        assert_eq!(clock.wall().to_string(), "1970-01-01T00:00:03.000000Z");
        assert_eq!(
            Tick::from_nanos(u64::MAX).plus(Duration::MAX),
            Tick::from_nanos(u64::MAX)
        );
        let host = Clock::host();
        assert!(host.tick() <= host.tick());
    }
}
