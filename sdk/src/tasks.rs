//! The only place of the SDK that starts tasks.
//!
//! May call: nothing.
//! Never inside: what a task does. Each task ends with the value that holds its guard, or is joined by [`Tasks`].

use tokio::{
    runtime::Handle,
    task::{AbortHandle, JoinHandle},
};
use tokio_util::task::TaskTracker;

/// Aborts its task when it is dropped.
#[derive(Debug)]
pub(crate) struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts a task that ends by itself once what it serves is gone (a connection without users).
#[expect(clippy::disallowed_methods, reason = "the room that owns spawning")]
pub(crate) fn detached<F: Future<Output = ()> + Send + 'static>(future: F) -> JoinHandle<()> {
    tokio::spawn(future)
}

/// Starts a task that lives as long as the guard.
pub(crate) fn guarded<F: Future<Output = ()> + Send + 'static>(future: F) -> AbortOnDrop {
    AbortOnDrop(detached(future).abort_handle())
}

/// Starts blocking work (local files) on a thread of the runtime's. It ends by itself once whoever feeds it, or reads
/// what it makes, is gone.
#[expect(clippy::disallowed_methods, reason = "the room that owns spawning")]
pub(crate) fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(work)
}

/// Background work that somebody can wait for.
#[derive(Debug)]
pub(crate) struct Tasks {
    tracker: TaskTracker,
    runtime: Handle,
}

impl Tasks {
    /// Work will run on the current runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime; callers are async.
    pub(crate) fn here() -> Self {
        let tracker = TaskTracker::new();
        // A closed tracker still takes work, and waiting for it ends whenever there is none.
        tracker.close();
        Self {
            tracker,
            runtime: Handle::current(),
        }
    }

    /// Starts work from anywhere, also from a `Drop` outside the runtime. On a runtime that has ended, nothing runs.
    pub(crate) fn start<F: Future<Output = ()> + Send + 'static>(&self, future: F) {
        drop(self.tracker.spawn_on(future, &self.runtime));
    }

    /// Waits until nothing that was started runs any more. Cancel safe.
    pub(crate) async fn join(&self) {
        self.tracker.wait().await;
    }
}
