//! Spawns: the one place that starts a task or a thread, so that each has a name and a joiner.
//!
//! May call: work.
//! Never inside: what a task does.

use std::{future::Future, io, thread};

use futures_util::FutureExt as _;
use tokio::task::JoinHandle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::work;

/// Starts a task; whoever holds the handle joins or aborts it.
#[must_use = "a task needs a joiner"]
#[expect(clippy::disallowed_methods, reason = "the one home of spawns")]
pub fn spawn<F>(name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    work::count(work::Kind::TasksSpawned, 1);
    tokio::spawn(named(name, future))
}

/// Runs blocking work on tokio's blocking threads.
#[must_use = "a task needs a joiner"]
#[expect(clippy::disallowed_methods, reason = "the one home of spawns")]
pub fn blocking<F, T>(name: &'static str, f: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    work::count(work::Kind::TasksSpawned, 1);
    tokio::task::spawn_blocking(move || {
        tracing::trace!(task = name, "blocking work");
        f()
    })
}

/// Starts a named thread.
///
/// # Errors
/// The kernel's, when no thread can be had.
pub fn thread<F, T>(name: &'static str, f: F) -> io::Result<thread::JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    thread::Builder::new().name(name.to_owned()).spawn(f)
}

/// How far a thread that nobody waits for steps back, of 19: where there is no processor for all, it gets a tenth.
const BACKGROUND: i32 = 10;

/// Lets the threads that serve calls go before this one. Where the kernel forbids it, it goes on as before.
pub fn step_back() {
    if let Err(error) = rustix::process::setpriority_process(None, BACKGROUND) {
        tracing::debug!(%error, "a background thread keeps its priority");
    }
}

// A combinator: an async function would hold its argument twice, and each task with it.
fn named<F: Future>(name: &'static str, future: F) -> impl Future<Output = F::Output> {
    future.inspect(move |_output| tracing::trace!(task = name, "task over"))
}

/// Tasks that end together: [`stop`](Self::stop) asks all of them and waits for all of them.
#[derive(Debug, Clone, Default)]
pub struct Group {
    tracker: TaskTracker,
    token: CancellationToken,
}

impl Group {
    /// An empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a task of the group, which its [`stop`](Self::stop) joins.
    #[expect(clippy::disallowed_methods, reason = "the one home of spawns")]
    pub fn spawn<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        work::count(work::Kind::TasksSpawned, 1);
        drop(tokio::spawn(self.tracker.track_future(named(name, future))));
    }

    /// Resolves once the group is asked to stop. Cancel safe.
    pub async fn stopping(&self) {
        self.token.cancelled().await;
    }

    /// Whether the group was asked to stop.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Asks every task to stop and waits until all have ended. Cancel safe; call again to go on waiting.
    pub async fn stop(&self) {
        self.token.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Asks every task to stop, without waiting.
    pub fn ask(&self) {
        self.token.cancel();
    }

    /// Tasks that have not ended.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tracker.len()
    }

    /// Whether no task is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tracker.is_empty()
    }
}
