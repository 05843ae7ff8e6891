//! A program's time, and what is sent when it is over.

use std::pin::Pin;

use rustix::process::Signal;
use tokio::time::Sleep;

use super::command::Timeout;
use crate::sys;

/// See the module.
#[derive(Debug)]
pub(super) struct Time {
    next: Option<(Pin<Box<Sleep>>, Signal)>,
    timeout: Option<Timeout>,
}

impl Time {
    /// Begins to run.
    pub(super) fn new(timeout: Option<Timeout>) -> Self {
        let after = |timeout: Timeout| {
            let signal = sys::signal(timeout.signal)?;
            Some((Box::pin(tokio::time::sleep(timeout.after)), signal))
        };
        Self {
            next: timeout.and_then(after),
            timeout,
        }
    }

    /// Resolves with the signal that is due; never, if none is.
    pub(super) async fn due(&mut self) -> Signal {
        match &mut self.next {
            Some((sleep, signal)) => {
                sleep.await;
                *signal
            }
            None => std::future::pending().await,
        }
    }

    /// That signal was sent: KILL comes after the grace, and nothing after KILL.
    pub(super) fn sent(&mut self, signal: Signal) {
        let grace = self.timeout.map(|timeout| timeout.grace);
        self.next = grace
            .filter(|_| signal != Signal::KILL)
            .map(|grace| (Box::pin(tokio::time::sleep(grace)), Signal::KILL));
    }

    /// Whether nothing will ever be due.
    pub(super) const fn is_over(&self) -> bool {
        self.next.is_none()
    }
}
