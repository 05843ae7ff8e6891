//! What all programs of a runner have in common.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use sandbox_protocol::{
    limits::{EXITED_KEPT, PROCESSES},
    reason::Reason,
};
use tokio::sync::{Notify, mpsc};

use super::{
    RunError,
    chores::Chores,
    gather::Buffers,
    job::{Birth, Job, Scope},
    leaf::{self, Work},
    logs::Logs,
    pty::Seats,
    session,
    spawn::Order,
    table::{Name, Table, Taken},
    users::Users,
};
use crate::{
    clock,
    refusal::{Escaped, Refusal},
};

/// Entries of programs that live: those that run, and as many whose leaders have left something running.
const LIVING: usize = 4 * PROCESSES;
/// How long a stop waits for the kernel after KILL.
const KILLED: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) work: Option<Work>,
    pub(super) chores: Arc<Chores>,
    pub(super) logs: Arc<Logs>,
    pub(super) buffers: Buffers,
    users: Users,
    memory_events: Option<OwnedFd>,
    null: OwnedFd,
    ttys: Seats,
    sessions: session::Table,
    orders: Mutex<Option<mpsc::Sender<Order>>>,
    jobs: Mutex<Jobs>,
    /// Added to the time since the boot by tests, which do not wait for what is kept to expire.
    skew_ms: AtomicU64,
    /// Leaders that have not ended.
    running: AtomicU32,
    /// At rest or stopping: a child that is born frozen would hold up the spawn thread.
    closed: AtomicBool,
    /// The last job is gone.
    idle: Notify,
}

#[derive(Debug)]
pub(super) struct Jobs {
    pub(super) table: Table<Arc<Job>>,
    /// Trees of which something may be left.
    trees: usize,
}

impl Shared {
    pub(super) fn new(work: Option<Work>, logs: Logs, null: OwnedFd, orders: mpsc::Sender<Order>) -> Self {
        Self {
            memory_events: work.as_ref().and_then(Work::memory_events),
            work,
            chores: Arc::default(),
            logs: Arc::new(logs),
            buffers: Buffers::default(),
            users: Users::default(),
            null,
            ttys: Seats::default(),
            sessions: session::Table::default(),
            orders: Mutex::new(Some(orders)),
            jobs: Mutex::new(Jobs {
                table: Table::new(EXITED_KEPT),
                trees: 0,
            }),
            skew_ms: AtomicU64::new(0),
            running: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            idle: Notify::new(),
        }
    }

    /// The table, without what is kept no longer.
    pub(super) fn jobs(&self) -> MutexGuard<'_, Jobs> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        for id in jobs.table.expire(self.now_ms()) {
            self.logs.remove(id);
        }
        jobs
    }

    /// Since the boot.
    pub(super) fn now_ms(&self) -> u64 {
        let now = u64::try_from(clock::since_boot().as_millis()).unwrap_or(u64::MAX);
        now.saturating_add(self.skew_ms.load(Ordering::Relaxed))
    }

    /// Makes it later for what is kept.
    #[cfg(test)]
    pub(super) fn pass(&self, time: Duration) {
        let ms = u64::try_from(time.as_millis()).unwrap();
        self.skew_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// Makes the entry of a program that is about to be started.
    ///
    /// # Errors
    /// `NOT_READY`, `PROCESS_LIMIT`.
    pub(super) fn admit(self: &Arc<Self>, birth: Birth) -> Result<Arc<Job>, Refusal> {
        self.admit_as(birth, None, None).map_err(|refused| match refused {
            Refused::Known(id) => Refusal::new(Reason::AgentBug, format!("process {id} has no key")),
            Refused::Because(refusal) => refusal,
        })
    }

    /// As [`admit`](Self::admit), by a name and for a request's key.
    pub(super) fn admit_as(
        self: &Arc<Self>,
        birth: Birth,
        name: Name,
        key: Name,
    ) -> Result<Arc<Job>, Refused> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Refusal::new(Reason::NotReady, "programs are at rest").into());
        }
        let mut jobs = self.jobs();
        jobs.table.vacant(&name, &key).map_err(|taken| match taken {
            Taken::Key(id) => Refused::Known(id),
            Taken::Name(id) => {
                let name = Escaped(name.as_deref().unwrap_or_default(), 64).to_string();
                Refusal::new(Reason::NameTaken, format!("process {id} has the name {name}")).into()
            }
        })?;
        let limit = u32::try_from(PROCESSES).unwrap_or(u32::MAX);
        if self.running.load(Ordering::Acquire) >= limit || jobs.table.count() >= LIVING {
            let message = format!("{PROCESSES} programs run");
            return Err(Refusal::new(Reason::ProcessLimit, message).into());
        }
        let leaf = self.work.as_ref().map(Work::take).transpose().map_err(|errno| {
            let message = format!("no cgroup could be made: {errno}");
            Refusal::new(Reason::ProcessLimit, message).with_errno(errno.raw_os_error())
        })?;
        jobs.trees += 1;
        self.running.fetch_add(1, Ordering::AcqRel);
        let make = |id| Job::new(self.clone(), id, birth, leaf);
        Ok(jobs.table.add(name, key, make).clone())
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

    pub(super) const fn sessions(&self) -> &session::Table {
        &self.sessions
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
            .table
            .living(0)
            .map(|(_, job)| job)
            .filter(|job| job.kind().is_foreground() && job.runs());
        running
            .map(|job| {
                let name = Escaped(job.argv().first(), 64).to_string();
                format!("{} {} `{name}`", job.kind().as_str(), job.id())
            })
            .collect()
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

    /// Nothing is left of a tree. Its entry goes with it, unless it is to be kept.
    pub(super) fn gone(&self, id: u64, kept: bool) {
        let mut jobs = self.jobs();
        if !kept {
            jobs.table.remove(id);
        }
        jobs.trees = jobs.trees.saturating_sub(1);
        let idle = jobs.trees == 0;
        drop(jobs);
        if idle {
            self.idle.notify_waiters();
        }
    }

    /// The program of a call that is gone is kept after all.
    pub(super) fn put_back(&self, job: &Arc<Job>) {
        self.jobs().table.put_back(job.id(), job.clone());
    }

    /// Whoever would have kept an entry is gone, or it never began.
    pub(super) fn disown(&self, job: &Job) {
        job.keep_not();
        self.jobs().table.remove(job.id());
        self.logs.remove(job.id());
    }

    /// A program has exited and all it said was read: only what is to be kept of it stays.
    pub(super) fn retire(&self, job: &Job) {
        let now = self.now_ms();
        let gone = self
            .jobs()
            .table
            .retire(job.id(), |name, key| job.exited(name, key, now));
        gone.into_iter().for_each(|id| self.logs.remove(id));
        self.logs.end(job.id());
    }

    /// Drops all that is kept of programs that have exited, and what others have said.
    pub(super) fn forget_exited(&self) {
        let gone = self.jobs().table.forget_all();
        gone.into_iter().for_each(|id| self.logs.remove(id));
        self.logs.clear();
        self.users.forget();
        self.sessions.forget();
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

    fn all(&self) -> Vec<Arc<Job>> {
        self.jobs().table.living(0).map(|(_, job)| job.clone()).collect()
    }

    fn signal_all(&self, signal: Signal) {
        let jobs = self.all();
        for job in jobs {
            job.signal(signal, Scope::Tree);
        }
    }

    /// TERM, and after the grace KILL, to all there is; takes no more.
    pub(super) async fn end_all(&self, grace: Duration) {
        self.closed.store(true, Ordering::Release);
        let jobs = self.all();
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
            if self.jobs().trees == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// Why there is no entry.
#[derive(Debug)]
pub(super) enum Refused {
    /// The request was made before; this is its program.
    Known(u64),
    Because(Refusal),
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self::Because(refusal)
    }
}

/// The spawn thread ends by itself only in a panic.
pub(super) fn lost() -> Refusal {
    Refusal::new(Reason::AgentBug, "the spawn thread is gone")
}
