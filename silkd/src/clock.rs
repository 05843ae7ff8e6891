//! Time: the one place that asks the kernel for it.
//!
//! May call: nothing.
//! Never inside: a wait.

use std::time::Duration;

use prost_types::Timestamp;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Time since the machine booted, time in suspension included; never steps.
#[must_use]
pub fn since_boot() -> Duration {
    let at = clock_gettime(ClockId::Boottime);
    // A clock that counts from boot shows nothing negative.
    Duration::new(at.tv_sec.unsigned_abs(), at.tv_nsec.try_into().unwrap_or(0))
}

/// Wall time; steps whenever the host says so.
#[must_use]
pub fn wall() -> Timespec {
    clock_gettime(ClockId::Realtime)
}

/// Nanoseconds since 1970.
#[must_use]
pub fn nanos(at: Timespec) -> i128 {
    i128::from(at.tv_sec) * 1_000_000_000 + i128::from(at.tv_nsec)
}

/// The time of so many nanoseconds since 1970; what no clock can show becomes 1970.
#[must_use]
pub fn from_nanos(nanos: i128) -> Timespec {
    let second = 1_000_000_000;
    let tv_sec = i64::try_from(nanos.div_euclid(second)).unwrap_or(0);
    let tv_nsec = i64::try_from(nanos.rem_euclid(second)).unwrap_or(0);
    Timespec { tv_sec, tv_nsec }
}

/// As messages have it.
#[must_use]
pub fn timestamp(at: Timespec) -> Timestamp {
    Timestamp {
        seconds: at.tv_sec,
        nanos: i32::try_from(at.tv_nsec).unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_there_and_back() {
        for nanos_in in [0, 1, -1, 1_999_999_999, 1_700_000_000_123_456_789] {
            assert_eq!(nanos(from_nanos(nanos_in)), nanos_in);
        }
        assert_eq!(timestamp(from_nanos(-1)).nanos, 999_999_999);
    }
}
