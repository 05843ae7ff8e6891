//! The task of one session: it owns the shell, and looks after it also when no client does.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use rustix::time::Timespec;
use sandbox_protocol::{
    reason::Reason,
    v1::{Exit, Session, SessionExit, SessionStarted, exit, session_exit::How, session_run_out::M},
};
use tokio::sync::{mpsc, oneshot};

use super::{
    Names,
    script::{self, Left, Nonce},
    shell::{Cut, Outcome, Shell},
    sink::{Late, Sink},
    tree::Tree,
};
use crate::{
    clock,
    refusal::Refusal,
    run::{entry::micros, job::Job},
};

/// How long a shell may take to say its first word.
const OPENING: Duration = Duration::from_secs(30);

/// What everybody may know of a session.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) job: Arc<Job>,
    opened: Timespec,
    /// `None`: never ended for being idle.
    idle: Option<Duration>,
    /// One command at a time: the actor takes it from here.
    orders: mpsc::Sender<Order>,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct State {
    phase: Phase,
    commands: u64,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Since then, on the clock that counts from boot.
    Idle(Duration),
    Busy,
    /// It takes no more commands.
    Over,
}

/// One command.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) text: Bytes,
    pub(super) timeout: Option<Duration>,
    pub(super) tree: Arc<Tree>,
    pub(super) events: mpsc::Sender<M>,
}

impl Entry {
    /// The entry of a session, and where its orders come.
    pub(super) fn new(name: String, job: Arc<Job>, idle_secs: u32) -> (Arc<Self>, mpsc::Receiver<Order>) {
        // One is admitted at a time, and the next only when the actor is done with it.
        let (orders, ordered) = mpsc::channel(1);
        let entry = Self {
            name,
            job,
            opened: clock::wall(),
            idle: (idle_secs > 0).then(|| Duration::from_secs(idle_secs.into())),
            orders,
            state: Mutex::new(State {
                phase: Phase::Busy,
                commands: 0,
            }),
        };
        (Arc::new(entry), ordered)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the shell a command; `order` is called once nothing stands in its way.
    ///
    /// # Errors
    /// `SESSION_BUSY`, `SESSION_ENDED`.
    pub(super) fn order(&self, order: impl FnOnce() -> Order) -> Result<(), Refusal> {
        let ended = || {
            Refusal::new(
                Reason::SessionEnded,
                format!("the shell of `{}` has ended", self.name),
            )
        };
        let mut state = self.lock();
        match state.phase {
            Phase::Idle(_) => {}
            Phase::Busy => {
                let message = format!("a command runs in `{}`", self.name);
                return Err(Refusal::new(Reason::SessionBusy, message));
            }
            Phase::Over => return Err(ended()),
        }
        self.orders
            .try_send(order())
            .map_err(|_its_task_is_gone| ended())?;
        state.phase = Phase::Busy;
        state.commands += 1;
        Ok(())
    }

    fn number(&self) -> u64 {
        self.lock().commands
    }

    fn is_idle(&self) {
        self.lock().phase = Phase::Idle(clock::since_boot());
    }

    /// Takes no more commands; false: one came just now.
    fn shut(&self) -> bool {
        let mut state = self.lock();
        match state.phase {
            Phase::Busy => false,
            Phase::Idle(_) | Phase::Over => {
                state.phase = Phase::Over;
                true
            }
        }
    }

    /// Strikes it out if its task is over.
    pub(super) fn look(self: &Arc<Self>, names: &Names) {
        if self.orders.is_closed() {
            names.with(|core| core.ended(&self.name, self));
        }
    }

    /// As it is listed.
    pub(super) fn row(&self) -> Session {
        let State { phase, commands } = *self.lock();
        let idle = match phase {
            Phase::Idle(since) => clock::since_boot().saturating_sub(since),
            Phase::Busy | Phase::Over => Duration::ZERO,
        };
        let idle_secs = self.idle.map_or(0, |idle| idle.as_secs());
        Session {
            session: self.name.clone(),
            process: self.job.id(),
            pid: self.job.pid_u32(),
            busy: matches!(phase, Phase::Busy),
            commands,
            opened_at: Some(clock::timestamp(self.opened)),
            idle_ms: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
            idle_secs: u32::try_from(idle_secs).unwrap_or(u32::MAX),
        }
    }
}

/// See the module. Dropped, it ends the shell with all that runs in it.
pub(super) struct Actor {
    pub(super) shell: Shell,
    pub(super) entry: Arc<Entry>,
    pub(super) orders: mpsc::Receiver<Order>,
    pub(super) names: Names,
    pub(super) late: Late,
    pub(super) left: Left,
    pub(super) cwd: Vec<u8>,
}

impl Actor {
    /// Until the shell has ended; `opened` learns whether it works.
    pub(super) async fn run(mut self, opened: oneshot::Sender<Result<(), Refusal>>) {
        let works = self.open().await;
        let alive = works.is_ok();
        if alive {
            self.entry.is_idle();
        }
        // Whoever gave up waiting has ended the shell.
        drop(opened.send(works));
        if alive {
            while let Some(order) = self.idle().await {
                if !self.command(order).await {
                    break;
                }
            }
        }
    }

    /// The shell's first word.
    async fn open(&mut self) -> Result<(), Refusal> {
        let nonce = fresh()?;
        let tree = Tree::begin(&self.entry.job);
        let mut sink = Sink::Late(&mut self.late);
        let pieces = [script::opening(nonce)];
        let (outcome, cut) = self
            .shell
            .drive(pieces, nonce, (&tree, Some(OPENING)), &mut sink)
            .await;
        self.shell.flush(&mut sink).await;
        match outcome {
            Outcome::Reported(report) => {
                self.left = report.left();
                self.cwd = report.cwd;
                Ok(())
            }
            Outcome::Ended(exit) => {
                let how = match (cut, exit.how) {
                    (Some(Cut::TimedOut), _) => format!("said nothing within {OPENING:?}"),
                    (_, Some(exit::How::Code(code))) => format!("ended with {code} before its first command"),
                    (_, Some(exit::How::Signal(signal))) => format!("was ended by signal {signal}"),
                    (_, None) => "ended".to_owned(),
                };
                let message = format!("bash {how}: sessions need 4.4 or newer");
                Err(Refusal::new(Reason::ProgramNotFound, message))
            }
        }
    }

    /// Waits for a command; `None`: the session is over.
    async fn idle(&mut self) -> Option<Order> {
        let over = async {
            match self.entry.idle {
                Some(idle) => tokio::time::sleep(idle).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(over);
        loop {
            tokio::select! {
                biased;
                order = self.orders.recv() => return order,
                () = &mut over => match self.entry.shut() {
                    true => return None,
                    false => return self.orders.recv().await,
                },
                news = self.shell.news() => match news {
                    Some((place, bytes)) => self.late.push(place, bytes),
                    None => return None,
                },
            }
        }
    }

    /// Runs one command; false: the shell has ended.
    async fn command(&mut self, order: Order) -> bool {
        let begun = clock::since_boot();
        let Order {
            text,
            timeout,
            tree,
            events,
        } = order;
        let started = M::Started(SessionStarted {
            number: self.entry.number(),
        });
        let first = std::iter::once(started).chain(self.late.take());
        let mut sink = Sink::Client {
            events,
            queue: first.collect(),
        };
        let Ok(nonce) = fresh() else {
            // The kernel has no random bits: nothing of this session can be trusted to report.
            self.entry.job.abandon();
            return false;
        };
        let pieces = script::command(text, self.left, nonce);
        let (outcome, cut) = self.shell.drive(pieces, nonce, (&tree, timeout), &mut sink).await;
        self.shell.flush(&mut sink).await;
        let alive = matches!(outcome, Outcome::Reported(_));
        let exit = self.exit(outcome, cut, clock::since_boot().saturating_sub(begun));
        // Who reads the end may give the next command at once.
        let place = match &sink {
            Sink::Client { events, .. } => events.reserve().await.ok(),
            Sink::Late(_) | Sink::Nobody => None,
        };
        match alive {
            true => self.entry.is_idle(),
            false => self.strike(),
        }
        if let Some(place) = place {
            place.send(M::Exit(exit));
        }
        alive
    }

    /// The session has ended by itself.
    fn strike(&mut self) {
        self.orders.close();
        self.names.with(|core| core.ended(&self.entry.name, &self.entry));
    }

    fn exit(&mut self, outcome: Outcome, cut: Option<Cut>, wall: Duration) -> SessionExit {
        let (how, session_ended) = match outcome {
            Outcome::Reported(report) => {
                self.left = report.left();
                let how = How::Code(report.status.into());
                self.cwd = report.cwd;
                (Some(how), false)
            }
            Outcome::Ended(exit) => (how(&exit), true),
        };
        SessionExit {
            how,
            cwd: self.cwd.clone().into(),
            session_ended,
            timed_out: cut == Some(Cut::TimedOut),
            cancelled: cut == Some(Cut::Cancelled),
            wall_us: micros(wall),
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.strike();
    }
}

fn how(exit: &Exit) -> Option<How> {
    exit.how.map(|how| match how {
        exit::How::Code(code) => How::Code(code),
        exit::How::Signal(signal) => How::Signal(signal),
    })
}

/// A nonce that nobody can know.
fn fresh() -> Result<Nonce, Refusal> {
    let mut bits = [0; 16];
    match rustix::rand::getrandom(&mut bits, rustix::rand::GetRandomFlags::empty()) {
        Ok(n) if n == bits.len() => Ok(script::nonce(u128::from_ne_bytes(bits))),
        Ok(_) | Err(_) => Err(Refusal::new(Reason::AgentBug, "the kernel has no random bits")),
    }
}
