//! How many connections of programs there are at once: those that have a stream to the host, and those that are told that
//! they have none. Nothing but this is bounded here, and by nothing but this.
//!
//! May call: nothing.
//! Never inside: a byte of a connection.

use std::sync::Arc;

use sandbox_protocol::limits::EGRESS_STREAMS;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Connections that have a stream: one fewer than the link has, so that nothing ever waits for one.
const STREAMS: usize = EGRESS_STREAMS as usize - 1;
/// Connections in all. Those without a stream are answered and let go, so a place comes free soon; as many as have one is
/// room for a burst, and bounds what silkd holds for programs that do not take their answer.
const MOST: usize = 2 * EGRESS_STREAMS as usize;

/// Who may have a connection.
#[derive(Debug)]
pub(super) struct Places {
    all: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    /// How many wait for a place.
    waiting: watch::Sender<usize>,
}

impl Default for Places {
    fn default() -> Self {
        Self::of(MOST, STREAMS)
    }
}

impl Places {
    /// So many places, of which so many have a stream.
    pub(super) fn of(all: usize, streams: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            streams: Arc::new(Semaphore::new(streams)),
            waiting: watch::Sender::new(0),
        }
    }

    /// The next place; waits until there is one, in the order of the calls. Cancel safe.
    pub(super) async fn take(&self) -> Place {
        let all = if let Ok(free) = self.all.clone().try_acquire_owned() {
            free
        } else {
            let _waits = Waits::new(&self.waiting);
            match self.all.clone().acquire_owned().await {
                Ok(free) => free,
                // It is never closed.
                Err(_closed) => std::future::pending().await,
            }
        };
        Place {
            stream: self.streams.clone().try_acquire_owned().ok(),
            waiting: self.waiting.subscribe(),
            _all: all,
        }
    }

    /// How many streams are free.
    #[cfg(test)]
    pub(super) fn streams_left(&self) -> usize {
        self.streams.available_permits()
    }
}

/// A place, free again when dropped.
#[derive(Debug)]
pub(super) struct Place {
    stream: Option<OwnedSemaphorePermit>,
    waiting: watch::Receiver<usize>,
    _all: OwnedSemaphorePermit,
}

impl Place {
    /// Whether it has a stream.
    pub(super) const fn has_stream(&self) -> bool {
        self.stream.is_some()
    }

    /// Resolves when another waits for a place. Cancel safe.
    pub(super) async fn wanted(&self) {
        // Without a sender there is nobody who could wait.
        if self
            .waiting
            .clone()
            .wait_for(|waiting| *waiting > 0)
            .await
            .is_err()
        {
            std::future::pending().await
        }
    }
}

/// One who waits, for as long as it lives.
struct Waits<'a>(&'a watch::Sender<usize>);

impl<'a> Waits<'a> {
    fn new(waiting: &'a watch::Sender<usize>) -> Self {
        waiting.send_modify(|waiting| *waiting += 1);
        Self(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}
