//! The handle.

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use rustix::fs::{Mode, OFlags};
use sandbox_protocol::{
    limits::PROCESSES,
    v1::{Command, EnvVar, ExecIn, ExecStart},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tonic::Streaming;

use super::{
    Child, ChildEnds, ExecCtx, ExecStream, HookOutcome, Kind, RunConfig, RunError, Shared, exec, hook,
    leaf::Work,
    logs::Logs,
    spawn::{self, Manner},
};
use crate::{reap, refusal::Refusal, sys, tasks};

/// Bytes that all logs take at most.
const LOGS: u64 = 64 * 1024 * 1024;
/// How long a stop waits for the spawn thread, which a guest's file system may hold for ever.
const LAST_START: Duration = Duration::from_secs(1);

/// Runs programs. Cheap to clone; [`stop`](Self::stop) ends all that it started.
#[derive(Debug, Clone)]
pub struct Runner {
    pub(super) shared: Arc<Shared>,
    /// Taken by the stop.
    own: Arc<Mutex<Option<Own>>>,
}

/// What runs on behalf of the runner itself.
#[derive(Debug)]
struct Own {
    reaper: JoinHandle<()>,
    janitor: JoinHandle<()>,
    thread: thread::JoinHandle<()>,
    thread_over: oneshot::Receiver<()>,
}

/// Bytes of all logs together: a sixteenth of the memory, and no more than [`LOGS`].
fn budget() -> u64 {
    let system = rustix::system::sysinfo();
    let unit = u64::from(system.mem_unit.max(1));
    LOGS.min(system.totalram.saturating_mul(unit) / 16)
}

impl Runner {
    /// Sets up the leaves, and starts the reaper, the janitor and the spawn thread. Within a runtime.
    ///
    /// # Errors
    /// [`RunError::Cgroup`] and [`RunError::Setup`], with the step that failed.
    pub fn start(config: &RunConfig) -> Result<Self, RunError> {
        Self::start_with(config, budget())
    }

    /// As [`start`](Self::start), with so many bytes for all logs.
    pub(super) fn start_with(config: &RunConfig, budget: u64) -> Result<Self, RunError> {
        let setup = |step| move |source: io::Error| RunError::Setup { step, source };
        let kernel = |step| {
            move |errno: rustix::io::Errno| RunError::Setup {
                step,
                source: errno.into(),
            }
        };
        if !config.pid1 {
            let me = Some(rustix::process::getpid());
            rustix::process::set_child_subreaper(me).map_err(kernel("become a subreaper"))?;
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let null = rustix::fs::open(c"/dev/null", flags, Mode::empty()).map_err(kernel("open /dev/null"))?;
        let stack = sys::Stack::new().map_err(kernel("map a stack"))?;
        let signals = signal(SignalKind::child()).map_err(setup("listen for SIGCHLD"))?;
        let work = config.cgroup_root.as_deref().map(Work::open).transpose()?;
        // As many as may run: whoever orders has been admitted as one of them.
        let (orders, ordered) = mpsc::channel(PROCESSES);
        let manner = Manner {
            plain: config.pid1,
            ignored: sys::ignored_signals(),
        };
        let (over, thread_over) = oneshot::channel();
        let thread = tasks::thread("spawn", move || {
            spawn::serve(ordered, stack, manner);
            // Nobody waits unless a stop does.
            over.send(()).ok();
        });
        let thread = thread.map_err(setup("start the spawn thread"))?;
        let logs = Logs::new(budget).map_err(kernel("map the logs"))?;
        let shared = Arc::new(Shared::new(work, logs, null, orders));
        let own = Own {
            reaper: tasks::spawn(reap::serve(signals)),
            janitor: tasks::spawn(shared.chores().clone().serve()),
            thread,
            thread_over,
        };
        Ok(Self {
            shared,
            own: Arc::new(Mutex::new(Some(own))),
        })
    }

    /// Runs one program for a client, whose first message is `first`; resolves once it has begun. Cancel safe.
    ///
    /// # Errors
    /// Why it did not start, or what this version does not do.
    pub fn exec(
        &self,
        ctx: ExecCtx,
        first: ExecStart,
        input: Streaming<ExecIn>,
    ) -> impl Future<Output = Result<ExecStream, Refusal>> + Send + use<> {
        exec::exec(self.shared.clone(), ctx, first, input)
    }

    /// Starts a program for another room, which reads its pipes; resolves once it has begun. Cancel safe.
    ///
    /// # Errors
    /// Why it did not start.
    pub async fn child(
        &self,
        ctx: &ExecCtx,
        command: &Command,
        kind: Kind,
        ends: ChildEnds,
    ) -> Result<Child, Refusal> {
        Child::start(&self.shared, ctx, command, kind, ends).await
    }

    /// Runs an executable as silkd itself, to its end or the timeout, which ends its tree. Cancel safe: dropped, it
    /// ends the tree too.
    ///
    /// # Errors
    /// [`RunError::Hook`] when it did not start.
    pub async fn run_hook(
        &self,
        path: &Path,
        env: &[EnvVar],
        timeout: Duration,
    ) -> Result<HookOutcome, RunError> {
        Box::pin(hook::run(&self.shared, path, env, timeout)).await
    }

    /// Whom `spec` (a name or number, then perhaps `:` and a group) means; `None`: nobody was asked for, so silkd
    /// itself.
    ///
    /// # Errors
    /// `USER_NOT_FOUND`.
    pub(crate) fn ids_of(&self, spec: &[u8]) -> Result<Option<sys::Ids>, Refusal> {
        Ok(self.shared.users().resolve(spec)?.ids)
    }

    /// The programs that calls wait for, each as `<kind> <id> <argv[0]>`.
    #[must_use]
    pub fn open(&self) -> Vec<String> {
        self.shared.open()
    }

    /// How many run.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.shared.running()
    }

    /// Whether whole trees can be held. If not, a program that makes a session of its own escapes.
    #[must_use]
    pub fn contains(&self) -> bool {
        self.shared.contains()
    }

    /// Stops every process of every program, and resolves when the kernel has. Nothing starts until
    /// [`thaw`](Self::thaw). Cancel safe: what was begun takes effect; thaw undoes it.
    ///
    /// # Errors
    /// [`RunError::Freeze`].
    pub async fn freeze(&self) -> Result<(), RunError> {
        self.shared.rest(true).await
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// [`RunError::Freeze`].
    pub async fn thaw(&self) -> Result<(), RunError> {
        self.shared.rest(false).await
    }

    /// Lets go all that is kept of programs that have ended, what others have said so far, and what was read of the
    /// guest's files. Ends the sessions.
    pub fn forget_exited(&self) {
        self.shared.forget_exited();
    }

    /// Bytes that logs take, and how many they may.
    #[must_use]
    pub fn log_usage(&self) -> (u64, u64) {
        self.shared.logs.usage()
    }

    /// Wake-up lists of logs that were ever made: one for each log that somebody followed.
    #[must_use]
    pub fn rings_built(&self) -> u64 {
        self.shared.logs.rings_built()
    }

    /// Ends everything: TERM, after `grace` KILL, then the runner's own tasks and thread. Later calls of
    /// [`exec`](Self::exec) are refused. Repeating it is harmless.
    pub async fn stop(&self, grace: Duration) {
        self.shared.end_all(grace).await;
        self.shared.sessions().stop().await;
        let own = self.own.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(own) = own {
            own.reaper.abort();
            own.janitor.abort();
            // Aborted, both say so when joined.
            drop(own.reaper.await);
            drop(own.janitor.await);
            if tokio::time::timeout(LAST_START, own.thread_over).await.is_ok() {
                // It has nothing left to do; a panic in it was told when it happened.
                drop(own.thread.join());
            }
        }
        if let Some(work) = &self.shared.work {
            work.remove();
        }
    }
}
