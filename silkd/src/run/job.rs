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

use bytes::Bytes;
use rustix::{process::Signal, time::Timespec};
use sandbox_protocol::v1::{AgentWork, Process, ProcessState};
use tokio::sync::Notify;

use super::{
    Kind, Shared,
    chores::Chore,
    entry::{ARGV_EXITED, Argv, Exited, Facts, Record, micros},
    leaf::{self, Leaf},
    logs::Extent,
    seat::SeatState,
    table::Name,
};
use crate::{
    clock,
    sys::{Dead, How, Usage},
};

/// What is known of a program before it is started.
#[derive(Debug, Clone)]
pub(super) struct Birth {
    pub(super) kind: Kind,
    pub(super) argv: Argv,
    pub(super) uid: u32,
    /// Whether what it started is to outlive its leader's end.
    pub(super) keep: bool,
    /// For how many seconds its entry is kept when it has exited, if it is: it has a log then.
    pub(super) retain: Option<u32>,
}

impl Birth {
    /// Of one whose entry goes with it.
    pub(super) const fn new(kind: Kind, argv: Argv, uid: u32, keep: bool) -> Self {
        Self {
            kind,
            argv,
            uid,
            keep,
            retain: None,
        }
    }
}

/// One program. The reaper, the stream and the janitor share it.
#[derive(Debug)]
pub(crate) struct Job {
    id: u64,
    birth: Birth,
    started: Timespec,
    /// Written by the kernel, before the program's process runs.
    pid: AtomicI32,
    shared: Arc<Shared>,
    state: Mutex<State>,
    /// Told when it has begun, failed to, or ended: for those who do not read its output.
    news: Notify,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) hold: Hold,
    pub(super) pidfd: Option<OwnedFd>,
    /// Before the clone.
    cloned: Option<Duration>,
    /// When `execve` had succeeded.
    begun: Option<Duration>,
    /// The kernel's count of memory kills at the start.
    oom_kills: u64,
    /// Why the whole tree has to end, whatever `keep` says.
    pub(super) doom: Option<Doom>,
    pub(super) timed_out: bool,
    /// It was given a controlling terminal.
    pub(super) terminal: bool,
    /// We sent KILL.
    pub(super) killed_by_us: bool,
    pub(super) descendants_killed: u32,
    /// See [`Birth`].
    retain: Option<u32>,
    /// Its caller has left it.
    detached: bool,
    /// Who gives it input.
    pub(super) seat: SeatState,
    /// The end as it is told, once all output was read.
    record: Option<Record>,
    /// Nobody here reads its output, so nobody is waited for.
    pub(super) unread: bool,
    discarded: u64,
    writes: u64,
    pub(super) waker: Option<Waker>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Doom {
    TimedOut,
    Abandoned,
    /// Its terminal is gone, which it was told: it is abandoned when it had time for that.
    HungUp,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    Starting,
    Running,
    Ended(Ended),
}

/// What holds the tree together.
#[derive(Debug)]
pub(super) enum Hold {
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

/// Whom a signal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The program itself.
    Leader,
    /// Its process group.
    Group,
    /// All that it started, itself included.
    Tree,
}

impl State {
    fn ended_with(&self, said: [u64; 2]) -> Option<Record> {
        match self.phase {
            Phase::Starting | Phase::Running => None,
            Phase::Ended(ended) => Some(Record::new(
                ended.dead,
                Facts {
                    timed_out: self.timed_out,
                    oom_suspected: ended.oom_suspected,
                    wall: self
                        .cloned
                        .map_or(Duration::ZERO, |cloned| ended.at.saturating_sub(cloned)),
                    said,
                    discarded: self.discarded,
                    descendants_killed: self.descendants_killed,
                },
            )),
        }
    }

    fn outcome(&self) -> Option<Record> {
        let alone = self.unread && matches!(self.phase, Phase::Ended(ended) if ended.settled);
        self.record.or_else(|| alone.then(|| self.ended_with([0; 2]))?)
    }
}

impl Job {
    /// An entry for a program that is about to be started, in this leaf.
    pub(super) fn new(shared: Arc<Shared>, id: u64, birth: Birth, leaf: Option<Leaf>) -> Arc<Self> {
        let state = State {
            phase: Phase::Starting,
            hold: leaf.map_or(Hold::Session, Hold::Leaf),
            pidfd: None,
            cloned: None,
            begun: None,
            oom_kills: shared.oom_kills(),
            doom: None,
            timed_out: false,
            terminal: false,
            killed_by_us: false,
            descendants_killed: 0,
            retain: birth.retain,
            detached: false,
            seat: SeatState::Free(None),
            record: None,
            // Those of other rooms are read there, unless they have a log.
            unread: birth.retain.is_none() && matches!(birth.kind, Kind::Session | Kind::Git | Kind::Lsp),
            discarded: 0,
            writes: 0,
            waker: None,
        };
        Arc::new(Self {
            id,
            birth,
            started: clock::wall(),
            pid: AtomicI32::new(0),
            shared,
            state: Mutex::new(state),
            news: Notify::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never reused in the guest's life.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// What it runs for.
    pub(super) fn kind(&self) -> Kind {
        match self.lock().detached {
            true => Kind::Detached,
            false => self.birth.kind,
        }
    }

    /// The beginning of its arguments.
    pub(super) const fn argv(&self) -> &Argv {
        &self.birth.argv
    }

    /// Where the kernel writes the number of the process.
    pub(crate) const fn pid(&self) -> &AtomicI32 {
        &self.pid
    }

    pub(super) fn number(&self) -> i32 {
        self.pid.load(Ordering::Acquire)
    }

    /// The row of it in a list.
    pub(super) fn row(&self, name: Option<&[u8]>, extent: Extent) -> Process {
        let kind = self.kind();
        let state = self.lock();
        let (cloned, phase) = (state.cloned, state.phase);
        let (record, tty) = (state.record, state.terminal);
        drop(state);
        let since = match phase {
            Phase::Starting => None,
            Phase::Running | Phase::Ended(_) => cloned,
        };
        let age = since.map_or(Duration::ZERO, |since| clock::since_boot().saturating_sub(since));
        Process {
            id: self.id,
            pid: self.pid_u32(),
            name: name.map(Bytes::copy_from_slice).unwrap_or_default(),
            kind: kind.on_the_wire().into(),
            argv: self.birth.argv.list(),
            argv_cut: self.birth.argv.is_cut(),
            uid: self.birth.uid,
            state: match phase {
                Phase::Starting | Phase::Running => ProcessState::Running.into(),
                Phase::Ended(_) => ProcessState::Draining.into(),
            },
            started_at: Some(clock::timestamp(self.started)),
            exit: record.map(|record| record.on_the_wire()),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            log_start: extent.start,
            log_end: extent.end,
            readers: extent.readers,
            tty,
        }
    }

    /// What is kept of it.
    pub(super) fn exited(&self, name: Name, key: Name, now: u64) -> Exited {
        let kind = self.kind();
        let state = self.lock();
        let never = Dead {
            how: How::Signal(Signal::KILL.as_raw()),
            usage: Usage::default(),
        };
        let record = state
            .record
            .unwrap_or_else(|| Record::new(never, Facts::default()));
        let retain = u64::from(state.retain.unwrap_or(0)).saturating_mul(1000);
        Exited {
            pid: self.pid_u32(),
            uid: self.birth.uid,
            kind,
            name,
            key,
            argv: self.birth.argv.shrink(ARGV_EXITED),
            started: i64::try_from(clock::nanos(self.started)).unwrap_or(0),
            ended: now,
            until: now.saturating_add(retain),
            record,
            tty: state.terminal,
        }
    }

    /// Whether it has a terminal.
    pub(super) fn is_tty(&self) -> bool {
        self.lock().terminal
    }

    /// Whether its entry is kept.
    pub(super) fn is_kept(&self) -> bool {
        self.lock().retain.is_some()
    }

    /// Its entry goes with it after all.
    pub(super) fn keep_not(&self) {
        self.lock().retain = None;
        self.news.notify_waiters();
    }

    /// Resolves when one that is to be kept has begun, with true, or failed to. Cancel safe.
    pub(super) async fn has_begun(&self) -> bool {
        loop {
            let mut news = std::pin::pin!(self.news.notified());
            news.as_mut().enable();
            let (begun, kept) = {
                let state = self.lock();
                (state.begun.is_some(), state.retain.is_some())
            };
            if begun || !kept {
                return begun;
            }
            news.await;
        }
    }

    /// Its caller has left it: from now on it is kept, for so many seconds if that is new.
    pub(super) fn detach(&self, retain: u32) {
        let mut state = self.lock();
        state.detached = true;
        state.retain.get_or_insert(retain);
    }

    /// The end, if all output was read.
    pub(super) fn record(&self) -> Option<Record> {
        self.lock().record
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
        self.birth.keep
    }

    // ---- The start ----

    /// The cgroup to be born into; `Err`: it must not be started any more.
    pub(super) fn birthplace(&self) -> Result<Option<Arc<OwnedFd>>, ()> {
        let mut state = self.lock();
        state.cloned = Some(clock::since_boot());
        match (&state.doom, &state.hold) {
            (Some(Doom::Abandoned | Doom::TimedOut | Doom::HungUp), _) => Err(()),
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
        drop(state);
        self.news.notify_waiters();
    }

    /// There never was a process. Once, and by whoever had it to start.
    pub(super) fn unborn(&self) {
        let mut state = self.lock();
        let hold = std::mem::replace(&mut state.hold, Hold::Gone);
        drop(state);
        self.shared.one_less();
        self.let_go(hold, false);
    }

    // ---- The end ----

    /// The leader was reaped. What it leaves is ended, unless it is to be kept.
    pub(crate) fn ended(self: &Arc<Self>, dead: Dead) {
        let mut state = self.lock();
        let keep = self.birth.keep && state.doom.is_none();
        let kept = state.retain.is_some();
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
        if populated && !keep && !matches!(state.doom, Some(Doom::HungUp)) {
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
            // The log of one that is kept goes on until nothing is left.
            settled: !populated || (keep && !kept),
        });
        state.pidfd = None;
        let hold = (!populated).then(|| std::mem::replace(&mut state.hold, Hold::Gone));
        let waker = state.waker.take();
        drop(state);
        self.shared.one_less();
        match hold {
            Some(hold) => self.let_go(hold, kept),
            None => self.shared.chores.add(Chore::Empty(self.clone())),
        }
        waker.into_iter().for_each(Waker::wake);
    }

    fn let_go(&self, hold: Hold, kept: bool) {
        match hold {
            Hold::Leaf(leaf) => self.shared.put(leaf),
            Hold::Session | Hold::Gone => {}
        }
        self.shared.gone(self.id, kept);
        self.news.notify_waiters();
    }

    /// Nothing is left of the tree. A leaf of which even that could not be learned is not used again.
    pub(super) fn emptied(&self, sure: bool) {
        let mut state = self.lock();
        let hold = std::mem::replace(&mut state.hold, Hold::Gone);
        let kept = state.retain.is_some();
        drop(state);
        self.settle();
        self.let_go(if sure { hold } else { Hold::Gone }, kept);
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
        self.news.notify_waiters();
    }

    /// Whether the end of its leader ends nothing: what it left goes on, as long as it likes.
    pub(super) fn drains(&self) -> bool {
        let state = self.lock();
        self.birth.keep && state.doom.is_none() && state.retain.is_some()
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

    // ---- What others ask ----

    /// Whether its leader has not ended.
    pub(super) fn runs(&self) -> bool {
        match self.lock().phase {
            Phase::Starting | Phase::Running => true,
            Phase::Ended(_) => false,
        }
    }

    /// Where it stands; `waker` is woken at the next change.
    pub(super) fn look(&self, waker: &Waker) -> Option<Ended> {
        let mut state = self.lock();
        match &mut state.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        match state.phase {
            Phase::Starting | Phase::Running => None,
            Phase::Ended(ended) => Some(ended),
        }
    }

    /// The end, once all output was read: so much of each. `None` before the leader has ended.
    pub(super) fn publish(&self, said: [u64; 2]) -> Option<Record> {
        let mut state = self.lock();
        let record = state.ended_with(said)?;
        state.record = Some(record);
        drop(state);
        self.news.notify_waiters();
        Some(record)
    }

    /// Resolves with its end, once whoever reads its output has read it. Cancel safe.
    pub(super) async fn exit(&self) -> Record {
        loop {
            let mut news = std::pin::pin!(self.news.notified());
            // Armed before the look, so that what happens in between is not missed.
            news.as_mut().enable();
            if let Some(record) = self.lock().outcome() {
                return record;
            }
            news.await;
        }
    }

    /// How long ago its start began.
    pub(super) fn age(&self) -> Duration {
        let cloned = self.lock().cloned;
        cloned.map_or(Duration::ZERO, |cloned| {
            clock::since_boot().saturating_sub(cloned)
        })
    }

    /// What a call has cost that came at `arrived`.
    pub(super) fn work(&self, arrived: Duration, pumped: bool, reads: u64, wall_us: u64) -> AgentWork {
        let state = self.lock();
        let (cloned, begun, writes) = (state.cloned, state.begun.unwrap_or(arrived), state.writes);
        drop(state);
        let ended = cloned.map_or(begun, |cloned| cloned + Duration::from_micros(wall_us));
        let short = |time: Duration| u32::try_from(micros(time)).unwrap_or(u32::MAX);
        AgentWork {
            clones: 1,
            leaves_taken: u32::from(self.shared.contains()),
            tasks_spawned: u32::from(pumped),
            rings_built: u32::from(self.shared.logs.has_ring(self.id)),
            reads,
            writes,
            start_us: short(begun.saturating_sub(arrived)),
            run_us: short(ended.saturating_sub(begun)),
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
