//! The gate: may a program be started?
//!
//! Open in `Ready` alone. `Fresh` (booted) -> `Ready` -> `Quiesced` -> `Renewing` -> `Ready`; only `control` turns it.
//! A call that starts programs holds a [`Permit`] for as long as it lives, so that a template is captured only when
//! none is open.
//!
//! May call: refusal.
//! Never inside: a wait, a system call.
//! Invariant 14: nothing runs in a restored guest before it is renewed: a capture is made in `Quiesced`, and from
//! there only a renewal that went through to its end, or a resumption when nothing was captured, leads to `Ready`.

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
};

use sandbox_protocol::{limits::LINK_INPUT_STREAMS, reason::Reason, v1::AgentState};
use tokio::sync::{Notify, watch};

use crate::refusal::Refusal;

/// Where the guest stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Booted, never renewed.
    Fresh,
    /// Open.
    Ready,
    /// On the way to rest.
    Quiescing,
    /// At rest for a capture.
    Quiesced,
    /// Getting its identity; holds what to fall back to.
    Renewing(Rest),
    /// On the way out; nothing leads back.
    Stopping,
}

/// A state that a renewal starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// See [`State::Fresh`].
    Fresh,
    /// See [`State::Quiesced`].
    Quiesced,
}

/// What turns the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Shuts it for a capture.
    Quiesce,
    /// The guest is at rest.
    Rested,
    /// Nothing was captured, or the rest was not reached: as before.
    Resume,
    /// A new identity begins.
    Renew,
    /// It is complete.
    Renewed,
    /// It failed.
    RenewFailed,
    /// The end.
    Stop,
}

impl State {
    /// The state after a turn, or `None` where the turn does not fit. Pure.
    #[must_use]
    pub const fn after(self, turn: Turn) -> Option<Self> {
        match (self, turn) {
            (_, Turn::Stop) => Some(Self::Stopping),
            (Self::Ready, Turn::Quiesce) => Some(Self::Quiescing),
            (Self::Quiescing, Turn::Rested) => Some(Self::Quiesced),
            (Self::Quiescing | Self::Quiesced, Turn::Resume) => Some(Self::Ready),
            (Self::Fresh, Turn::Renew) => Some(Self::Renewing(Rest::Fresh)),
            (Self::Quiesced, Turn::Renew) => Some(Self::Renewing(Rest::Quiesced)),
            (Self::Renewing(_), Turn::Renewed) => Some(Self::Ready),
            (Self::Renewing(Rest::Fresh), Turn::RenewFailed) => Some(Self::Fresh),
            (Self::Renewing(Rest::Quiesced), Turn::RenewFailed) => Some(Self::Quiesced),
            (
                Self::Fresh
                | Self::Ready
                | Self::Quiescing
                | Self::Quiesced
                | Self::Renewing(_)
                | Self::Stopping,
                Turn::Quiesce | Turn::Rested | Turn::Resume | Turn::Renew | Turn::Renewed | Turn::RenewFailed,
            ) => None,
        }
    }

    /// As the wire has it. What lies between two of its states is `UNSPECIFIED`: ask again.
    #[must_use]
    pub const fn on_the_wire(self) -> AgentState {
        match self {
            Self::Fresh => AgentState::Fresh,
            Self::Ready => AgentState::Ready,
            Self::Quiesced => AgentState::Quiesced,
            Self::Renewing(_) => AgentState::Renewing,
            Self::Quiescing | Self::Stopping => AgentState::Unspecified,
        }
    }

    /// For messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Ready => "ready",
            Self::Quiescing => "quiescing",
            Self::Quiesced => "quiesced",
            Self::Renewing(_) => "renewing",
            Self::Stopping => "stopping",
        }
    }
}

#[derive(Debug)]
struct Shared {
    core: Mutex<Core>,
    /// Grows when open streams have to end for a hibernation.
    hibernations: watch::Sender<u64>,
    /// Told when the last permit is dropped.
    idle: Notify,
}

#[derive(Debug)]
struct Core {
    state: State,
    open: usize,
    inputs: u32,
    streams: BTreeMap<u64, Arc<dyn LetsGo>>,
    /// Streams that ever were.
    listed: u64,
}

/// What an open stream holds.
pub trait LetsGo: fmt::Debug + Send + Sync {
    /// Drops it, though nobody takes what the stream would still say.
    fn let_go(&self);
}

/// The gate's handle.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Shared>);

impl Default for Gate {
    fn default() -> Self {
        Self(Arc::new(Shared {
            core: Mutex::new(Core {
                state: State::Fresh,
                open: 0,
                inputs: 0,
                streams: BTreeMap::new(),
                listed: 0,
            }),
            hibernations: watch::Sender::new(0),
            idle: Notify::new(),
        }))
    }
}

impl Gate {
    /// A gate in state Fresh.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn with<T>(&self, f: impl FnOnce(&mut Core) -> T) -> T {
        f(&mut self.0.core.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where the guest stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.with(|core| core.state)
    }

    /// Lets a call that starts programs in, for as long as it holds the permit.
    ///
    /// # Errors
    /// `NOT_READY` when the gate is shut.
    pub fn permit(&self) -> Result<Permit, Refusal> {
        self.with(|core| match core.state {
            State::Ready => {
                core.open += 1;
                Ok(())
            }
            State::Fresh | State::Quiescing | State::Quiesced | State::Renewing(_) | State::Stopping => {
                Err(not_ready(core.state))
            }
        })?;
        Ok(Permit {
            gate: self.clone(),
            came: *self.0.hibernations.borrow(),
        })
    }

    /// Calls that hold a permit.
    #[must_use]
    pub fn open(&self) -> usize {
        self.with(|core| core.open)
    }

    /// Resolves when no call holds a permit. Cancel safe.
    pub async fn idle(&self) {
        loop {
            // Armed before the look, so that a drop in between is not missed.
            let mut told = std::pin::pin!(self.0.idle.notified());
            told.as_mut().enable();
            if self.open() == 0 {
                return;
            }
            told.await;
        }
    }

    /// Turns the gate; for `control` alone.
    ///
    /// # Errors
    /// `NOT_READY`, naming the state, when the turn does not fit; nothing has changed then.
    pub fn turn(&self, turn: Turn) -> Result<State, Refusal> {
        self.with(|core| {
            let next = core.state.after(turn).ok_or_else(|| not_ready(core.state))?;
            core.state = next;
            Ok(next)
        })
    }

    /// Ends the streams that are open now, for a hibernation; what they hold is for `control` to let go. HTTP/2 does not
    /// ask a stream for more while its client takes nothing, so that they cannot be left to see it themselves.
    pub fn end_streams(&self) -> Vec<Arc<dyn LetsGo>> {
        self.0.hibernations.send_modify(|count| *count += 1);
        self.with(|core| core.streams.values().cloned().collect())
    }

    /// Lists what a stream holds, for as long as it is open.
    pub fn list(&self, held: Arc<dyn LetsGo>) -> Listed {
        let key = self.with(|core| {
            core.listed += 1;
            core.streams.insert(core.listed, held);
            core.listed
        });
        Listed {
            gate: self.clone(),
            key,
        }
    }
}

/// A stream's entry in the list; taken off when dropped.
#[derive(Debug)]
pub struct Listed {
    gate: Gate,
    key: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        // Dropped behind the lock, which a permit that goes with it takes.
        drop(self.gate.with(|core| core.streams.remove(&self.key)));
    }
}

fn not_ready(state: State) -> Refusal {
    Refusal::new(Reason::NotReady, format!("the guest is {}", state.as_str()))
}

/// A call's right to start programs; counts as open until dropped.
#[derive(Debug)]
pub struct Permit {
    gate: Gate,
    /// Hibernations until then.
    came: u64,
}

impl Permit {
    /// A seat for a stream that takes input of any length from a client.
    ///
    /// # Errors
    /// `STREAM_LIMIT` when [`LINK_INPUT_STREAMS`] have one: more could hold the link's whole window and stall it.
    pub fn input(&self) -> Result<InputSeat, Refusal> {
        self.gate.with(|core| {
            if core.inputs >= LINK_INPUT_STREAMS {
                let message = format!("{LINK_INPUT_STREAMS} streams with input are open");
                return Err(Refusal::new(Reason::StreamLimit, message));
            }
            core.inputs += 1;
            Ok(InputSeat(self.gate.clone()))
        })
    }

    /// Whether what the call started is to go on without it: since it came the sandbox went to sleep, or is at rest,
    /// where nobody can know whether its caller is still there.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        let rests = self.gate.state() == State::Quiesced;
        rests || *self.gate.0.hibernations.borrow() != self.came
    }

    /// Resolves when the stream has to end because the sandbox goes to sleep. Cancel safe.
    pub fn hibernated(&self) -> impl Future<Output = Refusal> + Send + use<> {
        let mut news = self.gate.0.hibernations.subscribe();
        async move {
            if news.changed().await.is_err() {
                // The gate is gone, and with it every reason to end this way.
                std::future::pending::<()>().await;
            }
            Refusal::new(Reason::SandboxHibernating, "the sandbox is going to sleep")
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let left = self.gate.with(|core| {
            core.open = core.open.saturating_sub(1);
            core.open
        });
        if left == 0 {
            self.gate.0.idle.notify_waiters();
        }
    }
}

/// A stream with input; counts until dropped.
#[derive(Debug)]
pub struct InputSeat(Gate);

impl Drop for InputSeat {
    fn drop(&mut self) {
        self.0.with(|core| core.inputs = core.inputs.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TURNS: [Turn; 7] = [
        Turn::Quiesce,
        Turn::Rested,
        Turn::Resume,
        Turn::Renew,
        Turn::Renewed,
        Turn::RenewFailed,
        Turn::Stop,
    ];

    #[test]
    fn open_in_ready_alone() {
        let gate = Gate::new();
        assert_eq!(gate.permit().unwrap_err().reason, Reason::NotReady);
        gate.turn(Turn::Renew).unwrap();
        assert!(gate.permit().is_err());
        gate.turn(Turn::Renewed).unwrap();
        let permit = gate.permit().unwrap();
        assert_eq!(gate.open(), 1);
        gate.turn(Turn::Quiesce).unwrap();
        assert!(gate.permit().is_err());
        drop(permit);
        assert_eq!(gate.open(), 0);
        gate.turn(Turn::Rested).unwrap();
        assert!(gate.permit().is_err());
        assert!(gate.turn(Turn::Renewed).is_err());
        gate.turn(Turn::Resume).unwrap();
        assert!(gate.permit().is_ok());
        gate.turn(Turn::Stop).unwrap();
        assert!(gate.permit().is_err());
        assert!(gate.turn(Turn::Renew).is_err());
    }

    #[test]
    fn input_seats_run_out_and_come_back() {
        let gate = Gate::new();
        gate.turn(Turn::Renew).unwrap();
        gate.turn(Turn::Renewed).unwrap();
        let permit = gate.permit().unwrap();
        let mut seats: Vec<_> = (0..LINK_INPUT_STREAMS).map(|_| permit.input().unwrap()).collect();
        assert_eq!(permit.input().unwrap_err().reason, Reason::StreamLimit);
        seats.pop();
        assert!(permit.input().is_ok());
    }

    #[tokio::test]
    async fn hibernation_reaches_those_who_were_open_and_no_later_one() {
        let gate = Gate::new();
        gate.turn(Turn::Renew).unwrap();
        gate.turn(Turn::Renewed).unwrap();
        let early = gate.permit().unwrap().hibernated();
        assert!(gate.end_streams().is_empty());
        let late = gate.permit().unwrap().hibernated();
        assert_eq!(early.await.reason, Reason::SandboxHibernating);
        assert!(futures_util::FutureExt::now_or_never(late).is_none());
    }

    #[test]
    fn what_streams_hold_is_listed_while_they_are_open() {
        #[derive(Debug)]
        struct Holds(Mutex<Option<Permit>>);

        impl LetsGo for Holds {
            fn let_go(&self) {
                drop(self.0.lock().unwrap().take());
            }
        }

        let gate = Gate::new();
        gate.turn(Turn::Renew).unwrap();
        gate.turn(Turn::Renewed).unwrap();
        let holds = || Arc::new(Holds(Mutex::new(Some(gate.permit().unwrap()))));
        let (stays, goes) = (gate.list(holds()), gate.list(holds()));
        assert_eq!(gate.open(), 2);
        // The last to hold it is the list.
        drop(goes);
        assert_eq!(gate.open(), 1);
        for stream in gate.end_streams() {
            stream.let_go();
        }
        assert_eq!(gate.open(), 0);
        drop(stays);
        assert!(gate.end_streams().is_empty());
    }

    proptest! {
        /// Invariant 14, of the pure core: whatever the turns, from a rest it is only a whole renewal or a resumption
        /// that opens.
        #[test]
        fn only_a_whole_renewal_or_a_resumption_opens(turns in proptest::collection::vec(0..TURNS.len(), 0..60)) {
            let mut state = State::Fresh;
            for turn in turns.into_iter().map(|n| TURNS[n]) {
                let Some(next) = state.after(turn) else { continue };
                if next == State::Ready {
                    let whole = matches!((state, turn), (State::Renewing(_), Turn::Renewed));
                    let resumed = matches!((state, turn), (State::Quiescing | State::Quiesced, Turn::Resume));
                    prop_assert!(whole || resumed);
                }
                prop_assert!(state != State::Stopping || next == State::Stopping);
                state = next;
            }
        }
    }
}
