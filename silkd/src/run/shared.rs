//! What all programs of a runner have in common.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use sandbox_protocol::{limits::PROCESSES, reason::Reason, v1::Process};
use tokio::sync::{Notify, mpsc};

use super::{
    RunError,
    chores::Chores,
    job::{Birth, Job, Scope},
    leaf::{self, Work},
    pty::Seats,
    spawn::Order,
    users::Users,
};
use crate::refusal::{Escaped, Refusal};

/// How long a stop waits for the kernel after KILL.
const KILLED: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) work: Option<Work>,
    pub(super) chores: Arc<Chores>,
    users: Users,
    memory_events: Option<OwnedFd>,
    null: OwnedFd,
    ttys: Seats,
    orders: Mutex<Option<mpsc::Sender<Order>>>,
    jobs: Mutex<Jobs>,
    /// Leaders that have not ended.
    running: AtomicU32,
    /// At rest or stopping: a child that is born frozen would hold up the spawn thread.
    closed: AtomicBool,
    /// The last job is gone.
    idle: Notify,
}

#[derive(Debug, Default)]
struct Jobs {
    last_id: u64,
    /// Until nothing is left of their trees.
    all: BTreeMap<u64, Arc<Job>>,
}

impl Shared {
    pub(super) fn new(work: Option<Work>, null: OwnedFd, orders: mpsc::Sender<Order>) -> Self {
        Self {
            memory_events: work.as_ref().and_then(Work::memory_events),
            work,
            chores: Arc::default(),
            users: Users::default(),
            null,
            ttys: Seats::default(),
            orders: Mutex::new(Some(orders)),
            jobs: Mutex::default(),
            running: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            idle: Notify::new(),
        }
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the entry of a program that is about to be started.
    pub(super) fn admit(self: &Arc<Self>, birth: Birth) -> Result<Arc<Job>, Refusal> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Refusal::new(Reason::NotReady, "programs are at rest"));
        }
        let limit = u32::try_from(PROCESSES).unwrap_or(u32::MAX);
        if self.running.load(Ordering::Acquire) >= limit {
            let message = format!("{PROCESSES} programs run");
            return Err(Refusal::new(Reason::ProcessLimit, message));
        }
        let leaf = self.work.as_ref().map(Work::take).transpose().map_err(|errno| {
            let message = format!("no cgroup could be made: {errno}");
            Refusal::new(Reason::ProcessLimit, message).with_errno(errno.raw_os_error())
        })?;
        let mut jobs = self.jobs();
        jobs.last_id += 1;
        let id = jobs.last_id;
        let job = Job::new(self.clone(), id, birth, leaf);
        jobs.all.insert(id, job.clone());
        self.running.fetch_add(1, Ordering::AcqRel);
        Ok(job)
    }

    pub(super) const fn users(&self) -> &Users {
        &self.users
    }

    pub(super) const fn null(&self) -> &OwnedFd {
        &self.null
    }

    pub(super) const fn ttys(&self) -> &Seats {
        &self.ttys
    }

    pub(super) const fn chores(&self) -> &Arc<Chores> {
        &self.chores
    }

    pub(super) const fn contains(&self) -> bool {
        self.work.is_some()
    }

    pub(super) fn oom_kills(&self) -> u64 {
        self.memory_events.as_ref().map_or(0, leaf::oom_kills)
    }

    pub(super) fn running(&self) -> u32 {
        self.running.load(Ordering::Acquire)
    }

    pub(super) fn open(&self) -> Vec<String> {
        let jobs = self.jobs();
        let running = jobs
            .all
            .values()
            .filter(|job| job.kind().is_foreground() && job.runs());
        running
            .map(|job| {
                let name = Escaped(job.argv().first(), 64).to_string();
                format!("{} {} `{name}`", job.kind().as_str(), job.id())
            })
            .collect()
    }

    /// Rows of those that are there, in order of their ids; `running`: only those whose leaders are.
    pub(super) fn list(&self, running: bool) -> Vec<Process> {
        let jobs = self.jobs();
        let wanted = jobs.all.values().filter(|job| !running || job.runs());
        wanted.map(|job| job.row()).collect()
    }

    /// Hands a start to the spawn thread. The queue holds as many as are admitted, so it is never full.
    pub(super) fn order(&self, order: Order) -> Result<(), Refusal> {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let stopping = || Refusal::new(Reason::NotReady, "silkd is stopping");
        let orders = orders.as_ref().ok_or_else(stopping)?;
        orders.try_send(order).map_err(|_refused| lost())
    }

    pub(super) fn put(&self, leaf: leaf::Leaf) {
        if let Some(work) = &self.work {
            work.put(leaf);
        }
    }

    /// A leader has ended.
    pub(super) fn one_less(&self) {
        self.running.fetch_sub(1, Ordering::AcqRel);
    }

    /// Nothing is left of a job.
    pub(super) fn gone(&self, id: u64) {
        let mut jobs = self.jobs();
        jobs.all.remove(&id);
        let idle = jobs.all.is_empty();
        drop(jobs);
        if idle {
            self.idle.notify_waiters();
        }
    }

    /// Stops every process of every program, or lets them go on.
    pub(super) async fn rest(&self, rest: bool) -> Result<(), RunError> {
        if rest {
            self.closed.store(true, Ordering::Release);
        }
        match &self.work {
            Some(work) => work
                .freeze(rest)
                .await
                .map_err(|source| RunError::Freeze { source })?,
            None => self.signal_all(if rest { Signal::STOP } else { Signal::CONT }),
        }
        if !rest {
            self.closed.store(false, Ordering::Release);
        }
        Ok(())
    }

    fn signal_all(&self, signal: Signal) {
        let jobs: Vec<Arc<Job>> = self.jobs().all.values().cloned().collect();
        for job in jobs {
            job.signal(signal, Scope::Tree);
        }
    }

    /// TERM, and after the grace KILL, to all there is; takes no more.
    pub(super) async fn end_all(&self, grace: Duration) {
        self.closed.store(true, Ordering::Release);
        let jobs: Vec<Arc<Job>> = self.jobs().all.values().cloned().collect();
        jobs.iter().for_each(|job| job.terminate());
        // Whoever has not ended by then is killed, so there is nothing to do about the outcome.
        drop(tokio::time::timeout(grace, self.emptied()).await);
        jobs.iter().for_each(|job| job.abandon());
        if let Some(work) = &self.work {
            // Fails only where the directory is gone, and with it the processes.
            work.kill().ok();
        }
        // What the kernel cannot end does not hold up the stop.
        drop(tokio::time::timeout(KILLED, self.emptied()).await);
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    async fn emptied(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.jobs().all.is_empty() {
                return;
            }
            idle.await;
        }
    }
}

/// The spawn thread ends by itself only in a panic.
pub(super) fn lost() -> Refusal {
    Refusal::new(Reason::AgentBug, "the spawn thread is gone")
}
