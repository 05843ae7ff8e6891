//! The entry of one program, from before its birth until nothing is left of what it started.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
    task::Waker,
    time::Duration,
};

use rustix::process::Signal;

use super::{
    Shared,
    chores::Chore,
    leaf::{self, Leaf},
};
use crate::{
    clock, reap,
    refusal::Refusal,
    sys::{Dead, How},
};

/// One program. The reaper, the stream and the janitor share it.
#[derive(Debug)]
pub(crate) struct Job {
    id: u64,
    name: Box<[u8]>,
    keep: bool,
    /// Written by the kernel, before the program's process runs.
    pid: AtomicI32,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    hold: Hold,
    pidfd: Option<OwnedFd>,
    /// Before the clone.
    cloned: Option<Duration>,
    /// When `execve` had succeeded.
    begun: Option<Duration>,
    /// The kernel's count of memory kills at the start.
    oom_kills: u64,
    /// Why the whole tree has to end, whatever `keep` says.
    doom: Option<Doom>,
    timed_out: bool,
    /// We sent KILL.
    killed_by_us: bool,
    descendants_killed: u32,
    failed: Option<Refusal>,
    discarded: u64,
    writes: u64,
    waker: Option<Waker>,
}

#[derive(Debug, Clone, Copy)]
enum Doom {
    TimedOut,
    Abandoned,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Starting,
    Running,
    Ended(Ended),
}

/// What holds the tree together.
#[derive(Debug)]
enum Hold {
    Leaf(Leaf),
    /// No cgroups here: the session that the leader made.
    Session,
    /// Nothing is left.
    Gone,
}

/// The end of a leader.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) dead: Dead,
    pub(super) at: Duration,
    pub(super) oom_suspected: bool,
    /// Nothing that may still write belongs to it: what is in its pipes is all there will be.
    pub(super) settled: bool,
}

/// What a stream tells at the end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Account {
    pub(super) timed_out: bool,
    pub(super) cloned: Option<Duration>,
    pub(super) begun: Option<Duration>,
    pub(super) descendants_killed: u32,
    pub(super) discarded: u64,
    pub(super) writes: u64,
}

/// Whom a signal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Leader,
    Group,
    Tree,
}

impl Job {
    /// An entry for a program that is about to be started, in this leaf.
    pub(super) fn new(
        shared: Arc<Shared>,
        id: u64,
        name: Box<[u8]>,
        keep: bool,
        leaf: Option<Leaf>,
    ) -> Arc<Self> {
        let state = State {
            phase: Phase::Starting,
            hold: leaf.map_or(Hold::Session, Hold::Leaf),
            pidfd: None,
            cloned: None,
            begun: None,
            oom_kills: shared.oom_kills(),
            doom: None,
            timed_out: false,
            killed_by_us: false,
            descendants_killed: 0,
            failed: None,
            discarded: 0,
            writes: 0,
            waker: None,
        };
        Arc::new(Self {
            id,
            name,
            keep,
            pid: AtomicI32::new(0),
            shared,
            state: Mutex::new(state),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never reused in the guest's life.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// The beginning of its `argv[0]`.
    pub(super) const fn name(&self) -> &[u8] {
        &self.name
    }

    /// Where the kernel writes the number of the process.
    pub(crate) const fn pid(&self) -> &AtomicI32 {
        &self.pid
    }

    fn number(&self) -> i32 {
        self.pid.load(Ordering::Acquire)
    }

    /// The number of the process as messages have it.
    pub(super) fn pid_u32(&self) -> u32 {
        self.number().unsigned_abs()
    }

    /// The runner that it belongs to.
    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether it is to outlive its leader's end.
    pub(super) const fn keeps(&self) -> bool {
        self.keep
    }

    // ---- The start ----

    /// The cgroup to be born into; `Err`: it must not be started any more.
    pub(super) fn birthplace(&self) -> Result<Option<Arc<OwnedFd>>, ()> {
        let mut state = self.lock();
        state.cloned = Some(clock::since_boot());
        match (&state.doom, &state.hold) {
            (Some(Doom::Abandoned | Doom::TimedOut), _) => Err(()),
            (None, Hold::Leaf(leaf)) => Ok(Some(leaf.dir())),
            (None, Hold::Session | Hold::Gone) => Ok(None),
        }
    }

    /// It runs.
    pub(super) fn begun(&self, pidfd: OwnedFd) {
        let mut state = self.lock();
        state.begun = Some(clock::since_boot());
        if let Phase::Starting = state.phase {
            state.phase = Phase::Running;
            state.pidfd = Some(pidfd);
        }
        // Whoever gave it up while it was being started found nobody to kill.
        if state.doom.is_some() {
            self.kill_tree(&mut state);
        }
    }

    /// There never was a process. Once, and by whoever had it to start.
    pub(super) fn unborn(&self) {
        let mut state = self.lock();
        let hold = std::mem::replace(&mut state.hold, Hold::Gone);
        drop(state);
        self.shared.one_less();
        self.let_go(hold);
    }

    // ---- The end ----

    /// The leader was reaped. What it leaves is ended, unless it is to be kept.
    pub(crate) fn ended(self: &Arc<Self>, dead: Dead) {
        let mut state = self.lock();
        let keep = self.keep && state.doom.is_none();
        let (members, populated) = match &state.hold {
            Hold::Leaf(leaf) if leaf.populated() => (leaf.members().len(), true),
            Hold::Leaf(_) | Hold::Gone => (0, false),
            // Nothing can wait for those that are kept, so nothing holds them.
            Hold::Session if keep => (0, false),
            Hold::Session => {
                let members = leaf::session(self.number()).len();
                (members, members > 0)
            }
        };
        if populated && !keep {
            if !state.killed_by_us {
                state.descendants_killed = u32::try_from(members).unwrap_or(u32::MAX);
            }
            self.kill_tree(&mut state);
        }
        let by_kill = dead.how == How::Signal(Signal::KILL.as_raw());
        state.phase = Phase::Ended(Ended {
            dead,
            at: clock::since_boot(),
            oom_suspected: by_kill && !state.killed_by_us && self.shared.oom_kills() > state.oom_kills,
            settled: keep || !populated,
        });
        state.pidfd = None;
        let hold = (!populated).then(|| std::mem::replace(&mut state.hold, Hold::Gone));
        let waker = state.waker.take();
        drop(state);
        self.shared.one_less();
        match hold {
            Some(hold) => self.let_go(hold),
            None => self.shared.chores.add(Chore::Empty(self.clone())),
        }
        waker.into_iter().for_each(Waker::wake);
    }

    fn let_go(&self, hold: Hold) {
        match hold {
            Hold::Leaf(leaf) => self.shared.put(leaf),
            Hold::Session | Hold::Gone => {}
        }
        self.shared.gone(self.id);
    }

    /// Nothing is left of the tree. A leaf of which even that could not be learned is not used again.
    pub(super) fn emptied(&self, sure: bool) {
        let mut state = self.lock();
        let hold = std::mem::replace(&mut state.hold, Hold::Gone);
        drop(state);
        self.settle();
        self.let_go(if sure { hold } else { Hold::Gone });
    }

    /// Nothing more is waited for.
    pub(super) fn settle(&self) {
        let mut state = self.lock();
        if let Phase::Ended(ended) = &mut state.phase {
            ended.settled = true;
        }
        let waker = state.waker.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Resolves when nothing is left of the tree of an ended leader; gives whether that is sure.
    pub(super) async fn until_empty(&self) -> bool {
        let leaf = match &self.lock().hold {
            Hold::Leaf(leaf) => Ok(leaf.emptied()),
            Hold::Session => Err(true),
            Hold::Gone => Err(false),
        };
        match leaf {
            Ok(emptied) => emptied.await.is_ok(),
            Err(true) => leaf::end_session(self.number()).await.is_ok(),
            Err(false) => true,
        }
    }

    // ---- Signals ----

    /// Asks the whole tree to end, also what outlived its leader.
    pub(super) fn terminate(&self) {
        self.signal_tree(&mut self.lock(), Signal::TERM);
    }

    fn kill_tree(&self, state: &mut State) {
        state.killed_by_us = true;
        match &state.hold {
            Hold::Leaf(leaf) => {
                // `cgroup.kill` fails only where the directory is gone, and with it the processes.
                leaf.kill().ok();
            }
            Hold::Session => self.signal_session(state, Signal::KILL),
            Hold::Gone => {}
        }
    }

    fn signal_session(&self, state: &State, signal: Signal) {
        if let Some(leader) = &state.pidfd {
            // It may have ended meanwhile.
            rustix::process::pidfd_send_signal(leader, signal).ok();
        }
        leaf::signal_session(self.number(), signal);
    }

    /// Ends the whole tree at once, started or not: whoever wanted it is gone.
    pub(super) fn abandon(&self) {
        let mut state = self.lock();
        state.doom = Some(Doom::Abandoned);
        self.kill_tree(&mut state);
    }

    /// As [`abandon`](Self::abandon), and the stream ends with this.
    pub(super) fn fail(&self, refusal: Refusal) {
        let mut state = self.lock();
        state.doom = Some(Doom::Abandoned);
        state.failed = Some(refusal);
        self.kill_tree(&mut state);
        let waker = state.waker.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Its time is over: the signal goes to the whole tree. Nothing happens after its end.
    pub(super) fn time_out(&self, signal: Signal) {
        let mut state = self.lock();
        match state.phase {
            Phase::Ended(_) => {}
            Phase::Starting | Phase::Running => {
                state.doom = Some(Doom::TimedOut);
                state.timed_out = true;
                self.signal_tree(&mut state, signal);
            }
        }
    }

    fn signal_tree(&self, state: &mut State, signal: Signal) {
        if signal == Signal::KILL {
            let Hold::Leaf(leaf) = &state.hold else {
                return self.kill_tree(state);
            };
            if !state.killed_by_us {
                let leader = self.number();
                let others = leaf.members().into_iter().filter(|pid| *pid != leader).count();
                state.descendants_killed = u32::try_from(others).unwrap_or(u32::MAX);
            }
            return self.kill_tree(state);
        }
        match &state.hold {
            Hold::Leaf(leaf) => leaf.signal(signal),
            Hold::Session => self.signal_session(state, signal),
            Hold::Gone => {}
        }
    }

    /// Sends a signal; after the leader's end it is a no-op.
    pub(super) fn signal(self: &Arc<Self>, signal: Signal, scope: Scope) {
        match scope {
            // The group has the leader's number, which is its own until it is reaped. A group that is gone needs no
            // signal.
            Scope::Group => reap::unreaped(self, |pid| {
                rustix::process::kill_process_group(pid, signal).ok();
            }),
            Scope::Leader => {
                let state = self.lock();
                if let Some(pidfd) = &state.pidfd {
                    // It may have ended meanwhile.
                    rustix::process::pidfd_send_signal(pidfd, signal).ok();
                }
            }
            Scope::Tree => {
                let mut state = self.lock();
                match state.phase {
                    Phase::Ended(_) => {}
                    Phase::Starting | Phase::Running => self.signal_tree(&mut state, signal),
                }
            }
        }
    }

    // ---- What others ask ----

    /// Whether its leader has not ended.
    pub(super) fn runs(&self) -> bool {
        match self.lock().phase {
            Phase::Starting | Phase::Running => true,
            Phase::Ended(_) => false,
        }
    }

    /// Where it stands; `waker` is woken at the next change.
    pub(super) fn look(&self, waker: &Waker) -> Result<Option<Ended>, Refusal> {
        let mut state = self.lock();
        match &mut state.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        if let Some(refusal) = state.failed.take() {
            return Err(refusal);
        }
        match state.phase {
            Phase::Starting | Phase::Running => Ok(None),
            Phase::Ended(ended) => Ok(Some(ended)),
        }
    }

    /// For the exit message.
    pub(super) fn account(&self) -> Account {
        let state = self.lock();
        Account {
            timed_out: state.timed_out,
            cloned: state.cloned,
            begun: state.begun,
            descendants_killed: state.descendants_killed,
            discarded: state.discarded,
            writes: state.writes,
        }
    }

    /// Input that the program did not take.
    pub(super) fn discard(&self, bytes: usize) {
        let mut state = self.lock();
        state.discarded = state
            .discarded
            .saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// One write to the program.
    pub(super) fn wrote(&self) {
        let mut state = self.lock();
        state.writes = state.writes.saturating_add(1);
    }
}
