//! The sole waiter: whatever ends below this process is reaped here, and its status goes to whom it belongs.
//!
//! On SIGCHLD every child that has ended is looked at, found in the list of those that were started, and only then
//! reaped, all under one lock: until then its number cannot mean anybody else. What nobody started here (orphans that
//! came to PID 1) is reaped and dropped. A process has one list of children, so the list belongs to the process and
//! not to a value.
//!
//! May call: run (the entry of a child), sys.
//! Never inside: what an end means.
//! Cancel safety: `serve` may be dropped anywhere; what has ended stays until somebody serves again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use rustix::process::Pid;
use tokio::signal::unix::Signal;

use crate::{run::Job, sys};

/// Children reaped in one go, before others get their turn.
const BATCH: usize = 128;

struct Children {
    /// By number, from the start's success to the reaping.
    known: BTreeMap<i32, Arc<Job>>,
    /// Being started. The kernel writes a child's number into its entry before the child runs, so even one that ends
    /// before the start has returned is found. As many as there are spawn threads.
    starting: Vec<Arc<Job>>,
}

static CHILDREN: Mutex<Children> = Mutex::new(Children {
    known: BTreeMap::new(),
    starting: Vec::new(),
});

fn children() -> MutexGuard<'static, Children> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes up a child that is about to be started.
pub(crate) fn expect(job: Arc<Job>) {
    children().starting.push(job);
}

/// The start has returned; if a child came of it, it is known from now on.
pub(crate) fn started(job: &Arc<Job>) {
    let mut children = children();
    let place = children.starting.iter().position(|other| Arc::ptr_eq(other, job));
    // Not there any more: it has ended already.
    if let Some(place) = place {
        let job = children.starting.swap_remove(place);
        let pid = job.pid().load(Ordering::Acquire);
        if pid > 0 {
            children.known.insert(pid, job);
        }
    }
}

/// Calls `f` with the child's number if it has not been reaped, which cannot happen meanwhile: the number is its own.
pub(crate) fn unreaped(job: &Arc<Job>, f: impl FnOnce(Pid)) {
    let children = children();
    let number = job.pid().load(Ordering::Acquire);
    let known = children
        .known
        .get(&number)
        .is_some_and(|other| Arc::ptr_eq(other, job));
    if let Some(pid) = Pid::from_raw(number).filter(|_| known) {
        f(pid);
    }
}

fn next() -> Option<(Option<Arc<Job>>, sys::Dead)> {
    let mut children = children();
    let pid = sys::peek_dead()?;
    let job = children.known.remove(&pid).or_else(|| {
        let starting = &mut children.starting;
        let place = starting
            .iter()
            .position(|job| job.pid().load(Ordering::Acquire) == pid)?;
        Some(starting.swap_remove(place))
    });
    sys::reap(pid).map(|dead| (job, dead))
}

/// Reaps what has ended, [`BATCH`] at most; gives whether there may be more.
fn collect() -> bool {
    for _child in 0..BATCH {
        match next() {
            Some((Some(job), dead)) => job.ended(dead),
            Some((None, _orphan)) => {}
            None => return false,
        }
    }
    true
}

/// Reaps until dropped; `signals` are those of SIGCHLD.
pub(crate) async fn serve(mut signals: Signal) {
    loop {
        while collect() {
            tokio::task::yield_now().await;
        }
        if signals.recv().await.is_none() {
            return;
        }
    }
}
