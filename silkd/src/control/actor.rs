//! The one who turns the gate: quiesce, resume, renew and the claim's defaults, one order after the other.
//!
//! An order that was begun is carried out whether or not its caller is still there: half a renewal is of no use, and
//! a host that lost the link learns from HELLO and Adopt how things stand.
//!
//! May call: control/*, door, events, gate, places, refusal, run, sys, tasks.
//! Never inside: decoding.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandbox_protocol::reason::Reason;
use tokio::sync::{mpsc, oneshot};

use super::{
    machine::Machine,
    order::{Renewal, Rest},
};
use crate::{
    door::{Probe, Said},
    events::Events,
    gate::{Gate, State, Turn},
    places::Places,
    refusal::{Refusal, chain},
    run::{ClaimDefaults, Runner},
    sys, tasks,
};

/// Programs that a refusal lists.
const LISTED: usize = 16;

/// What is known of the guest, for whoever asks; changed by the actor alone.
#[derive(Debug, Clone, Default)]
pub struct Facts(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    generation: u64,
    sandbox: Arc<str>,
    claim: Arc<ClaimDefaults>,
    claimed: bool,
}

impl Facts {
    fn with<T>(&self, f: impl FnOnce(&mut Known) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Grows with every renewal; 0: never renewed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.with(|known| known.generation)
    }

    /// Whose guest this is; empty for a template.
    #[must_use]
    pub fn sandbox(&self) -> Arc<str> {
        self.with(|known| known.sandbox.clone())
    }

    /// What the claim brought.
    #[must_use]
    pub fn claim(&self) -> Arc<ClaimDefaults> {
        self.with(|known| known.claim.clone())
    }

    /// A new generation, and with a new identity no claim.
    pub(super) fn renewed(&self, sandbox: &str, new_identity: bool) -> u64 {
        self.with(|known| {
            known.generation += 1;
            if new_identity {
                known.sandbox = sandbox.into();
                forget(known);
            }
            known.generation
        })
    }
}

fn forget(known: &mut Known) {
    known.claim = Arc::default();
    known.claimed = false;
}

/// An order, and where its answer goes. Nobody waiting for the answer is no reason not to carry it out.
#[derive(Debug)]
pub(super) enum Order {
    Quiesce(Rest, Duration, oneshot::Sender<Result<(), Refusal>>),
    Resume(oneshot::Sender<Result<(), Refusal>>),
    Renew(Box<Renewal>, oneshot::Sender<Result<Renewed, Refusal>>),
    SetClaim(ClaimDefaults, oneshot::Sender<Result<(), Refusal>>),
}

/// What came of a renewal.
#[derive(Debug, Clone)]
pub(super) struct Renewed {
    pub(super) generation: u64,
    /// What the doors said, if they were to be asked and there are any.
    pub(super) doors: Option<Said>,
}

/// The actor; [`run`](Self::run) is its life.
#[derive(Debug)]
pub struct Actor {
    pub(super) orders: mpsc::Receiver<Order>,
    pub(super) gate: Gate,
    pub(super) runner: Runner,
    pub(super) facts: Facts,
    pub(super) machine: Machine,
    pub(super) places: Places,
    pub(super) events: Events,
    pub(super) doors: Option<Probe>,
    /// The last renewal that went through.
    pub(super) renewed: Option<(String, Renewed)>,
    /// Which kind of rest this is.
    pub(super) rest: Option<Rest>,
}

impl Actor {
    /// Carries out orders until nobody is left who could give one. Not cancel safe: an order may be cut short.
    pub async fn run(mut self) {
        while let Some(order) = self.orders.recv().await {
            // A caller that is gone does not want the answer.
            match order {
                Order::Quiesce(mode, deadline, answer) => {
                    drop(answer.send(self.quiesce(mode, deadline).await));
                }
                Order::Resume(answer) => drop(answer.send(self.resume().await)),
                Order::Renew(renewal, answer) => {
                    drop(answer.send(Box::pin(self.renew(*renewal)).await));
                }
                Order::SetClaim(claim, answer) => drop(answer.send(self.set_claim(claim))),
            }
        }
    }

    async fn quiesce(&mut self, mode: Rest, deadline: Duration) -> Result<(), Refusal> {
        if self.gate.state() == State::Quiesced && self.rest == Some(mode) {
            return Ok(());
        }
        self.gate.turn(Turn::Quiesce)?;
        let rested = tokio::time::timeout(deadline, self.come_to_rest(mode)).await;
        let refusal = match rested {
            Ok(Ok(())) => {
                self.gate.turn(Turn::Rested)?;
                self.rest = Some(mode);
                return Ok(());
            }
            Ok(Err(refusal)) => refusal,
            Err(_elapsed) => Refusal::new(
                Reason::Deadline,
                format!("not at rest within {} ms", deadline.as_millis()),
            ),
        };
        // As before: thawed, and the gate open.
        if let Err(error) = self.runner.thaw().await {
            self.events.log(&format!("undoing a quiesce: {}", chain(&error)));
        }
        self.gate.turn(Turn::Resume)?;
        Err(refusal)
    }

    async fn come_to_rest(&self, mode: Rest) -> Result<(), Refusal> {
        match mode {
            Rest::Template => {
                let open = self.runner.open();
                if self.gate.open() > 0 || !open.is_empty() {
                    return Err(busy(self.gate.open(), &open));
                }
            }
            Rest::Hibernate => {
                for stream in self.gate.end_streams() {
                    stream.let_go();
                }
                self.gate.idle().await;
            }
            Rest::Checkpoint => {}
        }
        self.runner.freeze().await.map_err(|error| {
            Refusal::new(
                Reason::AgentBug,
                format!("programs cannot be frozen: {}", chain(&error)),
            )
        })?;
        let machine = self.machine.clone();
        let synced = tasks::blocking(move || machine.sync()).await;
        match synced {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(Refusal::new(Reason::AgentBug, format!("sync: {error}"))),
            Err(error) => return Err(Refusal::new(Reason::AgentBug, format!("sync: {error}"))),
        }
        // Last, since it cannot be undone.
        if mode == Rest::Template {
            self.runner.forget_exited();
            self.facts.with(forget);
        }
        sys::trim();
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), Refusal> {
        if self.gate.state() == State::Ready {
            return Ok(());
        }
        if self.gate.state() != State::Quiesced {
            return self.gate.turn(Turn::Resume).map(|_state| ());
        }
        self.runner.thaw().await.map_err(|error| {
            Refusal::new(
                Reason::AgentBug,
                format!("programs cannot be thawed: {}", chain(&error)),
            )
        })?;
        self.rest = None;
        self.gate.turn(Turn::Resume).map(|_state| ())
    }

    fn set_claim(&self, claim: ClaimDefaults) -> Result<(), Refusal> {
        // Any other state has no claim, and a renewal would drop it.
        drop(self.gate.permit()?);
        self.facts.with(|known| {
            if known.claimed && !same(&known.claim, &claim) {
                let message = "environment and user of this claim are set already";
                return Err(Refusal::new(Reason::FieldInvalid, message));
            }
            known.claimed = true;
            known.claim = Arc::new(claim);
            Ok(())
        })
    }
}

fn same(a: &ClaimDefaults, b: &ClaimDefaults) -> bool {
    a.env == b.env && a.user == b.user
}

fn busy(calls: usize, open: &[String]) -> Refusal {
    let mut message = format!("{calls} calls are open");
    for (place, what) in open.iter().enumerate() {
        if place >= LISTED {
            message.push_str(", ...");
            break;
        }
        message.push_str(if place == 0 { ": " } else { ", " });
        message.push_str(what);
    }
    Refusal::new(Reason::QuiesceBusy, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_listed_and_bounded() {
        assert_eq!(
            busy(1, &["sleep".into(), "sh".into()]).message,
            "1 calls are open: sleep, sh"
        );
        let many = vec!["x".repeat(20); 1000];
        assert!(busy(1000, &many).message.len() < 500);
    }

    #[test]
    fn a_new_identity_has_no_claim_and_the_same_keeps_it() {
        let facts = Facts::default();
        let claim = ClaimDefaults {
            user: "u".into(),
            ..ClaimDefaults::default()
        };
        assert_eq!(facts.renewed("sb_1", true), 1);
        facts.with(|known| known.claim = Arc::new(claim.clone()));
        assert_eq!(facts.renewed("ignored", false), 2);
        assert_eq!(&*facts.sandbox(), "sb_1");
        assert!(same(&facts.claim(), &claim));
        assert_eq!(facts.renewed("sb_2", true), 3);
        assert!(same(&facts.claim(), &ClaimDefaults::default()));
    }
}
