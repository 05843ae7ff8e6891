//! The threads that touch files, so that a slow disk holds up no call but its own.
//!
//! A call holds a thread for one step only (a block, a batch of names) and none while it waits for its client: any
//! number of streams that nobody reads leaves all threads free.

use std::{
    any::Any,
    collections::VecDeque,
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};

use rustix::io::Errno;
use sandbox_protocol::{limits::LINK_STREAMS, reason::Reason};
use tokio::sync::oneshot;

use super::errno::{About, refuse};
use crate::{
    gate::{InputSeat, Permit},
    refusal::Refusal,
    sys::{AsUser, Ids},
    tasks,
};

/// Threads, at most; they are started when there is something to do.
const THREADS: usize = 8;
/// The stack of each.
const STACK: usize = 256 * 1024;
/// Steps that wait for a thread. A link has so many streams, each with one step and, when it ends, one more that
/// clears up behind it.
const QUEUE: usize = 2 * LINK_STREAMS as usize;
/// How long a stop waits for steps that are under way, which a guest's file system may hold for ever.
const LAST_STEP: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce() + Send>;

/// What one call holds for as long as any part of it lives: a step that is under way counts.
#[derive(Debug)]
pub struct Call {
    /// Whom it acts as; `None`: silkd itself.
    ids: Option<Ids>,
    _permit: Permit,
    _seat: Option<InputSeat>,
}

impl Call {
    /// A call that has passed the gate; with a seat if it takes input of any length.
    #[must_use]
    pub(crate) fn new(permit: Permit, ids: Option<Ids>, seat: Option<InputSeat>) -> Arc<Self> {
        Arc::new(Self {
            ids,
            _permit: permit,
            _seat: seat,
        })
    }

    /// Whom it acts as; silkd itself is root.
    pub(super) fn uid(&self) -> u32 {
        self.ids.as_ref().map_or(0, |ids| ids.uid)
    }

    fn become_user(&self) -> Result<Option<AsUser>, Refusal> {
        let entered = self.ids.as_ref().map(AsUser::enter).transpose();
        entered.map_err(|errno| refuse(errno, About::File, "act as the user on", b"/"))
    }
}

/// Says that nobody waits for a step any more.
#[derive(Debug, Clone, Default)]
pub(super) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// For the blocks of a long step. Nobody reads this refusal.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        if self.is_set() {
            return Err(Refusal::new(Reason::AgentBug, "the call is gone"));
        }
        Ok(())
    }
}

/// The threads; a handle.
#[derive(Debug, Clone, Default)]
pub(super) struct Workers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: Vec<Thread>,
    idle: usize,
    closed: bool,
}

struct Thread {
    handle: thread::JoinHandle<()>,
    over: oneshot::Receiver<()>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        loop {
            let mut queue = self.queue();
            let job = loop {
                if queue.closed {
                    return;
                }
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                queue.idle += 1;
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            };
            drop(queue);
            // The panic was told by the hook, and is to its call what a dropped answer is. Unwind safe: what a step
            // shares with others is behind locks that take a poisoned value as it is.
            drop(catch_unwind(AssertUnwindSafe(job)));
        }
    }
}

impl Workers {
    /// Puts a job into the queue.
    fn push(&self, job: Job) -> Result<(), Refused> {
        let mut queue = self.0.queue();
        if queue.closed {
            let refusal = Refusal::new(Reason::NotReady, "silkd is stopping");
            return Err(Refused { refusal, job });
        }
        if queue.jobs.len() >= QUEUE {
            let refusal = Refusal::new(Reason::StreamLimit, "too many calls wait for files");
            return Err(Refused { refusal, job });
        }
        queue.jobs.push_back(job);
        if queue.jobs.len() > queue.idle && queue.threads.len() < THREADS {
            let started = self.start();
            match started {
                Ok(thread) => queue.threads.push(thread),
                Err(error) if queue.threads.is_empty() => {
                    let refusal = Refusal::new(Reason::ProcessLimit, format!("no thread for files: {error}"));
                    if let Some(job) = queue.jobs.pop_back() {
                        return Err(Refused { refusal, job });
                    }
                }
                // The others do.
                Err(_) => {}
            }
        }
        drop(queue);
        self.0.more.notify_one();
        Ok(())
    }

    fn start(&self) -> std::io::Result<Thread> {
        let (told, over) = oneshot::channel();
        let shared = self.0.clone();
        let handle = tasks::small_thread("files", STACK, move || {
            shared.serve();
            // Nobody waits unless a stop does.
            told.send(()).ok();
        })?;
        Ok(Thread { handle, over })
    }

    /// Runs one step as the call's user. Dropping the answer cancels the step; what it made is dropped on its thread.
    ///
    /// # Errors
    /// `STREAM_LIMIT` when the queue is full, `NOT_READY` when silkd stops, else what `step` says.
    pub(super) fn begin<T: Send + 'static>(
        &self,
        call: &Arc<Call>,
        step: impl FnOnce(&Cancel) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<Pending<T>, Refusal> {
        let (told, answer) = oneshot::channel();
        let cancel = Cancel::default();
        let (open, call, seen) = (call.clone(), call.clone(), cancel.clone());
        let job = move || {
            if !seen.is_set() {
                let outcome = call.become_user().and_then(|user| {
                    let outcome = step(&seen);
                    drop(user);
                    outcome
                });
                drop(told.send(outcome));
            }
            // Behind everything that the step held: until then the call is open.
            drop(call);
        };
        self.push(Box::new(job)).map_err(|refused| refused.refusal)?;
        Ok(Pending {
            answer,
            cancel,
            workers: self.clone(),
            call: open,
        })
    }

    /// [`begin`](Self::begin), and its answer. Cancel safe: dropped, it cancels the step.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        call: &Arc<Call>,
        step: impl FnOnce(&Cancel) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.begin(call, step)?.await
    }

    /// Drops something on a thread: taking leave of a large file takes the kernel its time.
    fn dispose(&self, call: &Arc<Call>, last: Box<dyn Any + Send>) {
        let call = call.clone();
        let job = Box::new(move || {
            drop(last);
            drop(call);
        });
        if let Err(refused) = self.push(job) {
            // At a stop, or in a crowd that no link has: then here.
            (refused.job)();
        }
    }

    /// Ends the threads: waiting steps are dropped, those under way have a second.
    pub(super) async fn stop(&self) {
        let (threads, jobs) = {
            let mut queue = self.0.queue();
            queue.closed = true;
            (
                std::mem::take(&mut queue.threads),
                std::mem::take(&mut queue.jobs),
            )
        };
        self.0.more.notify_all();
        drop(jobs);
        let mut ended = Vec::new();
        let all = async {
            for thread in threads {
                // Told, or ended without telling: over either way.
                drop(thread.over.await);
                ended.push(thread.handle);
            }
        };
        // Who is held by the kernel ends with the process.
        drop(tokio::time::timeout(LAST_STEP, all).await);
        for handle in ended {
            // A panic in it was told when it happened.
            drop(handle.join());
        }
    }
}

struct Refused {
    refusal: Refusal,
    job: Job,
}

/// The answer of a step.
#[derive(Debug)]
pub(super) struct Pending<T: Send + 'static> {
    answer: oneshot::Receiver<Result<T, Refusal>>,
    cancel: Cancel,
    workers: Workers,
    call: Arc<Call>,
}

impl<T: Send + 'static> Future for Pending<T> {
    type Output = Result<T, Refusal>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.answer).poll(cx));
        let lost = |_| Err(Refusal::new(Reason::AgentBug, "a step on files broke off"));
        Poll::Ready(answer.unwrap_or_else(lost))
    }
}

impl<T: Send + 'static> Drop for Pending<T> {
    fn drop(&mut self) {
        self.cancel.set();
        // It came, and nobody took it.
        if let Ok(Ok(answer)) = self.answer.try_recv() {
            self.workers.dispose(&self.call, Box::new(answer));
        }
    }
}

/// State between two steps; dropped, it is cleared up on a thread.
pub(super) struct Parked<T: Send + 'static> {
    state: Option<T>,
    workers: Workers,
    call: Arc<Call>,
}

impl<T: Send + 'static> Parked<T> {
    pub(super) fn new(workers: &Workers, call: &Arc<Call>, state: T) -> Self {
        Self {
            state: Some(state),
            workers: workers.clone(),
            call: call.clone(),
        }
    }

    /// Runs a step on the state. Dropped before its end, and when it fails, the state is cleared up.
    ///
    /// # Errors
    /// What `step` says, and the reasons of [`Workers::begin`].
    pub(super) fn step<U: Send + 'static>(
        mut self,
        step: impl FnOnce(T, &Cancel) -> Result<U, Refusal> + Send + 'static,
    ) -> Result<Pending<U>, Refusal> {
        let lost = || Refusal::new(Reason::AgentBug, "a step without its state");
        let state = self.state.take().ok_or_else(lost)?;
        self.workers.begin(&self.call, move |cancel| step(state, cancel))
    }
}

impl<T: Send + 'static> Drop for Parked<T> {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            self.workers.dispose(&self.call, Box::new(state));
        }
    }
}

/// Does something as silkd itself within a step of a user.
pub(super) fn as_silkd<T>(f: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let _own = AsUser::leave()?;
    f()
}
