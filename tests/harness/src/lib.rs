//! What the tests start and look at: daemons of their own, the command line, processes and what they hold.
//!
//! [`Setup`] says what daemon is wanted, [`Daemon`] is one that serves. A daemon is ready when it says so, dies with its
//! `Daemon`, and takes every sandbox process along; its log is printed when the test fails. Nothing here sleeps: starts,
//! ends and changes are events ([`Daemon::until_pool`], [`Daemon::until_rows`], [`process::Process::gone`]).

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a harness fails its test by panicking, and tells why"
)]

pub mod agent;
mod ctl;
mod daemon;
mod leaks;
pub mod process;
mod programs;
mod setup;
mod terminal;
pub mod tour;
mod watch;
mod world;

use std::time::Duration;

pub use ctl::{Ctl, Ran, sandboxd};
use sandbox_sdk::Reason;

pub use daemon::{Daemon, Refused};
pub use leaks::Leaks;
pub use programs::{image, program};
pub use setup::{Agent, Setup};
pub use terminal::Terminal;
pub use world::{ORIGIN, World, names};

/// Bound for a wait that never lasts unless something is broken: generous, so that a busy machine does not fail a test.
pub const HANG: Duration = Duration::from_secs(60);

/// Awaits under a bound.
///
/// # Panics
/// The time is over.
pub async fn within<T>(limit: Duration, what: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, Box::pin(what)).await {
        Ok(value) => value,
        Err(_elapsed) => panic!("nothing happened within {limit:?}"),
    }
}

/// Expects a refusal with this reason.
///
/// # Panics
/// It is none, or another.
pub fn refused<T: std::fmt::Debug>(
    outcome: Result<T, sandbox_sdk::Error>,
    reason: Reason,
) -> sandbox_sdk::Error {
    match outcome {
        Err(error) if error.is(reason) => error,
        Err(error) => panic!("expected {}, got {error:?}", reason.as_str()),
        Ok(value) => panic!("expected {}, got {value:?}", reason.as_str()),
    }
}

/// Asks again until there is an answer; only for what no event tells (descriptors that another process closes, say).
///
/// # Panics
/// There is none within [`HANG`].
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let mut again = tokio::time::interval(Duration::from_millis(20));
    let asked = tokio::time::timeout(HANG, async {
        loop {
            again.tick().await;
            if let Some(answer) = ask().await {
                return answer;
            }
        }
    });
    match asked.await {
        Ok(answer) => answer,
        Err(_elapsed) => panic!("never came true: {what}"),
    }
}
