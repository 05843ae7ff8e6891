//! Lossy fan-out of events: nobody waits for a reader, and a reader that falls behind is told how much it lost.
//!
//! May call: nothing.
//! Never inside: state. Whoever reads a feed reads the state anew after a loss.

use tokio::sync::broadcast;

/// Events that a reader may be behind before it loses some (docs/api.md section 3: Watch).
pub const BEHIND: usize = 1024;

/// The writing end.
#[derive(Debug, Clone)]
pub struct Feed<T>(broadcast::Sender<T>);

/// One reader.
#[derive(Debug)]
pub struct Reader<T>(broadcast::Receiver<T>);

/// What a reader gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News<T> {
    /// The next event.
    Event(T),
    /// That many events were lost.
    Lost(u64),
    /// There will be no more.
    Closed,
}

impl<T: Clone> Default for Feed<T> {
    fn default() -> Self {
        Self(broadcast::channel(BEHIND).0)
    }
}

impl<T: Clone> Feed<T> {
    /// Tells every reader; without readers it costs nothing.
    pub fn tell(&self, event: impl FnOnce() -> T) {
        if self.0.receiver_count() > 0 {
            // The last reader may have left just now, which is no loss.
            drop(self.0.send(event()));
        }
    }

    /// A reader of all events from now on.
    #[must_use]
    pub fn read(&self) -> Reader<T> {
        Reader(self.0.subscribe())
    }
}

impl<T: Clone> Reader<T> {
    /// Waits for news. Cancel safe.
    pub async fn next(&mut self) -> News<T> {
        match self.0.recv().await {
            Ok(event) => News::Event(event),
            Err(broadcast::error::RecvError::Lagged(count)) => News::Lost(count),
            Err(broadcast::error::RecvError::Closed) => News::Closed,
        }
    }
}
