//! The only place that repeats a call.
//!
//! May call: error.
//! Never inside: what a call says. A call is repeated if the host itself said so (`sandbox-origin: host` with
//! RetryInfo), or if the connection broke before an answer and repeating it cannot do it twice; at most
//! [`REPEATS`] times, within the deadline. A guest's word never makes a call go again.
//! Cancel safety: dropping [`call`] drops the attempt that runs.

use std::time::Duration;

use sandbox_protocol::reason::Reason;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Status;

use crate::error::{Error, ErrorKind, Origin};

/// How often one call is repeated at most.
pub(crate) const REPEATS: u32 = 5;
/// Pause before the first repeat on a new connection; it doubles. Five of them outlast the restart of a daemon.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// When a call may be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Only on the host's word.
    OnWord,
    /// Also when the connection broke before an answer: the call reads, or doing it twice is doing it once.
    Harmless,
    /// A claim with a request key. Harmless, and POOL_EMPTY and CAPACITY are its answer: they come after the time
    /// in line that the caller asked for, which repeating would multiply.
    Claim,
}

/// Decides: the pause before the next attempt, or that this error is the answer. `jitter` is 0 ..= 255.
fn pause(error: &Error, repeat: Repeat, done: u32, left: Duration, jitter: u8) -> Option<Duration> {
    if done >= REPEATS {
        return None;
    }
    let harmless = match repeat {
        Repeat::OnWord => false,
        Repeat::Harmless | Repeat::Claim => true,
    };
    let answered = repeat == Repeat::Claim && (error.is(Reason::PoolEmpty) || error.is(Reason::Capacity));
    let base = match error.kind() {
        ErrorKind::Refused if error.origin() == Origin::Host && !answered => error.retry_after()?,
        ErrorKind::Broken | ErrorKind::Unreachable if harmless => FIRST_PAUSE.checked_mul(1 << done)?,
        ErrorKind::Refused
        | ErrorKind::Broken
        | ErrorKind::Unreachable
        | ErrorKind::TimedOut
        | ErrorKind::Unfinished
        | ErrorKind::Invalid
        | ErrorKind::Local => return None,
    };
    // Up to a quarter more, so that those who were refused together do not come back together.
    let pause = base.checked_add(base.checked_mul(u32::from(jitter))? / 1024)?;
    (pause < left).then_some(pause)
}

fn jitter() -> u8 {
    let mut byte = [0];
    match getrandom::fill(&mut byte) {
        Ok(()) => u8::from_ne_bytes(byte),
        // Without randomness there is no jitter; the call goes on all the same.
        Err(_unavailable) => 0,
    }
}

/// Makes a call and repeats it as `repeat` allows, all within `limit`. An attempt is told how much time is left.
pub(crate) async fn call<T, A, F>(repeat: Repeat, limit: Option<Duration>, mut attempt: A) -> Result<T, Error>
where
    A: FnMut(Option<Duration>) -> F,
    F: Future<Output = Result<T, Status>>,
{
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    for done in 0.. {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let outcome = match deadline {
            Some(deadline) => timeout_at(deadline, attempt(left)).await,
            None => Ok(attempt(None).await),
        };
        let error = match outcome {
            Ok(Ok(reply)) => return Ok(reply),
            Ok(Err(status)) => Error::from_status(status),
            Err(_elapsed) => return Err(Error::timed_out()),
        };
        let left = deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        let Some(wait) = pause(&error, repeat, done, left, jitter()) else {
            return Err(error);
        };
        tracing::debug!(%error, ?wait, "the call is repeated");
        sleep(wait).await;
    }
    Err(Error::timed_out())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use sandbox_protocol::{metadata, reason::DOMAIN};
    use tonic::{Code, metadata::MetadataMap};
    use tonic_types::{ErrorDetails, StatusExt as _};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn refused(reason: &str, origin: Option<&'static str>, retry: Option<Duration>) -> Error {
        let mut details = ErrorDetails::new();
        details.set_error_info(reason, DOMAIN, HashMap::new());
        if retry.is_some() {
            details.set_retry_info(retry);
        }
        let mut map = MetadataMap::new();
        if let Some(origin) = origin {
            map.insert(metadata::SANDBOX_ORIGIN, origin.parse().unwrap());
        }
        Error::from_status(Status::with_error_details_and_metadata(
            Code::Unavailable,
            "no",
            details,
            map,
        ))
    }

    #[test]
    fn only_the_host_s_word_repeats() {
        let second = Some(Duration::from_secs(1));
        for repeat in [Repeat::OnWord, Repeat::Harmless, Repeat::Claim] {
            assert!(pause(&refused("STARTING", Some("host"), second), repeat, 0, HOUR, 0).is_some());
            for (origin, retry) in [(Some("host"), None), (Some("guest"), second), (None, second)] {
                assert_eq!(
                    pause(&refused("STARTING", origin, retry), repeat, 0, HOUR, 0),
                    None
                );
            }
            let empty = refused("POOL_EMPTY", Some("host"), second);
            assert_eq!(
                pause(&empty, repeat, 0, HOUR, 0).is_some(),
                repeat != Repeat::Claim
            );
        }
        assert_eq!(pause(&Error::timed_out(), Repeat::Harmless, 0, HOUR, 0), None);
        assert_eq!(pause(&Error::unfinished("x"), Repeat::Harmless, 0, HOUR, 0), None);
    }

    proptest! {
        #[test]
        fn bounded_in_number_and_time(
            done in 0_u32..10,
            left_ms in 0_u64..10_000,
            wait_ms in 0_u64..u64::MAX,
            jitter: u8,
        ) {
            let left = Duration::from_millis(left_ms);
            let wait = Duration::from_millis(wait_ms.min(1 << 40));
            let error = refused("BUSY", Some("host"), Some(wait));
            match pause(&error, Repeat::Harmless, done, left, jitter) {
                Some(pause) => {
                    prop_assert!(done < REPEATS && pause < left);
                    prop_assert!(pause >= wait && pause <= wait + wait / 4);
                }
                None => prop_assert!(done >= REPEATS || wait + wait / 4 >= left),
            }
        }
    }
}
