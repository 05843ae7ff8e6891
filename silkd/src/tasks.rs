//! Spawns: the one place that starts a task or a thread, so that each has a joiner.
//!
//! May call: nothing.
//! Never inside: what a task does.

use std::{
    future::Future,
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use tokio::task::{JoinHandle, JoinSet};

/// Starts a task; whoever holds the handle joins or aborts it.
#[must_use = "a task needs a joiner"]
#[expect(clippy::disallowed_methods, reason = "the one home of spawns")]
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future)
}

/// Runs work that blocks (a sync, say) on a thread of the runtime.
#[must_use = "a task needs a joiner"]
#[expect(clippy::disallowed_methods, reason = "the one home of spawns")]
pub fn blocking<F, T>(f: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    tokio::task::spawn_blocking(f)
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

/// Starts a named thread with a stack of so many bytes.
///
/// # Errors
/// The kernel's, when no thread can be had.
pub fn small_thread<F, T>(name: &'static str, stack: usize, f: F) -> io::Result<thread::JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    thread::Builder::new()
        .name(name.to_owned())
        .stack_size(stack)
        .spawn(f)
}

/// Tasks that end together: those of one connection, say. Dropping the last handle aborts them.
#[derive(Debug, Clone, Default)]
pub struct Group(Arc<Mutex<JoinSet<()>>>);

impl Group {
    /// An empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a task of the group.
    pub fn spawn<F>(&self, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // What has ended is let go here, so that the set stays as long as the number of its running tasks.
        while set.try_join_next().is_some() {}
        drop(set.spawn(future));
    }

    /// Ends every task where it waits and returns once all are dropped. What is spawned meanwhile is not of this
    /// group any more. Not cancel safe in one way: cut short, it leaves the rest aborted, but not waited for.
    pub async fn stop(&self) {
        let mut set = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        set.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stopping_a_group_drops_what_its_tasks_hold() {
        let group = Group::new();
        let held = Arc::new(());
        for _ in 0..3 {
            let held = held.clone();
            group.spawn(async move {
                std::future::pending::<()>().await;
                drop(held);
            });
        }
        assert_eq!(Arc::strong_count(&held), 4);
        group.stop().await;
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[tokio::test]
    async fn a_panic_in_one_task_leaves_the_others() {
        let group = Group::new();
        let (tx, rx) = tokio::sync::oneshot::channel();
        group.spawn(async { panic!("on purpose") });
        group.spawn(async {
            tx.send(()).unwrap();
        });
        rx.await.unwrap();
        group.stop().await;
    }
}
