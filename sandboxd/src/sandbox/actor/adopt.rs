//! Sandboxes that an earlier daemon left: admitted, and taken up or wound up.

use std::sync::Arc;

use sandbox_protocol::id::SandboxId;
use tokio::sync::oneshot;

use super::{
    Actor,
    steps::{StepError, open_link, within},
};
use crate::{
    admission::Reservation,
    agent::{self, Condition},
    engine::{EngineError, Identity, Place},
    faults,
    journal::SandboxRow,
    sandbox::{
        entry::{AgentFacts, Warm},
        life::{Event, Life, Why, WhyKind},
        registry::Sandboxes,
        row::{self, Adoptable},
    },
    telemetry::chain,
    words::Size,
};

impl Sandboxes {
    /// Puts a sandbox that an earlier daemon left in the registry, lease and all; nothing is done to it yet.
    pub fn admit(&self, row: Adoptable, reservation: Reservation) -> Admitted {
        let id = row.birth.id;
        let taken = self.held(id, row.tap);
        let actor = self.enter(row.birth, taken, Some(reservation));
        actor.sandbox.set_agent(row.agent);
        if let Life::Claimed(claim) = actor.sandbox.life() {
            actor.sandbox.arm(self, &claim);
            self.means().reaper.set(id, None, claim.lease.until);
        }
        Admitted {
            actor,
            identity: row.identity,
        }
    }

    /// Takes over a row whose life cannot go on: records why (`event`: it died, or is not to be trusted), and tears down
    /// what may be left of it. `rebooted`: the row is of an earlier boot of the host. Without a reservation its slot is
    /// another's by now, and is not touched.
    pub fn wind_up(
        &self,
        id: SandboxId,
        row: &SandboxRow,
        event: Option<Event>,
        reservation: Option<Reservation>,
        rebooted: bool,
    ) {
        let birth = row::birth(id, row, rebooted.then_some(&self.means().clock));
        let taken = self.held(id, row.holds_tap());
        let actor = self.enter(birth, taken, reservation);
        let sandbox = Arc::clone(&actor.sandbox);
        if let Some(event) = event {
            // A row that is ending or gone already needs no second reason.
            drop(sandbox.apply(self, event));
        }
        let life = sandbox.life();
        match life {
            Life::Ending { .. } => self.own(&sandbox, actor.end()),
            Life::Failed { claim, .. } => self.means().reaper.set(id, None, claim.lease.until),
            Life::Gone { .. } => self.retire_if_gone(&sandbox),
            Life::Making | Life::Warm | Life::Claimed(_) => {}
            Life::Quarantined { .. } => self.own(&sandbox, actor.guard()),
        }
    }
}

/// A sandbox of an earlier daemon, in the registry and not taken up yet. Dropping it leaves it to the next daemon.
#[derive(Debug)]
#[must_use = "it is nobody's care until it is taken up"]
pub struct Admitted {
    actor: Actor,
    identity: Identity,
}

impl Admitted {
    /// Takes it up: proves its process, greets its agent. A warm one comes back as [`Warm`]. What cannot be taken up
    /// ends. Cancel safe: the taking up goes on; a warm one that nobody waits for any more ends.
    ///
    /// # Errors
    /// Why it could not be taken up.
    pub async fn take_up(self, size: Size) -> Result<Option<Warm>, Why> {
        let Self { actor, identity } = self;
        let (answer, adopted) = oneshot::channel();
        let (sandbox, sandboxes) = (Arc::clone(&actor.sandbox), actor.sandboxes.clone());
        sandboxes.own_from(&sandbox, actor.adopt(identity, size, answer));
        adopted
            .await
            .unwrap_or_else(|_panicked| Err(Why::of(WhyKind::LostOnRestart)))
    }
}

impl Actor {
    async fn adopt(
        mut self,
        identity: Identity,
        size: Size,
        answer: oneshot::Sender<Result<Option<Warm>, Why>>,
    ) -> Option<Self> {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        let taken = tokio::select! {
            biased;
            () = sandbox.wake.notified() => Err(Why::of(WhyKind::Released)),
            () = owners.stopping() => return None,
            taken = Box::pin(self.take_up(identity, size)) => taken.map_err(|error| match &error {
                StepError::Engine(EngineError::Gone { .. }) | StepError::Exited(_) => Why::with(WhyKind::LostOnRestart, chain(&error)),
                StepError::Late { .. } | StepError::Engine(_) | StepError::Net(_) | StepError::Serve(_)
                | StepError::Unproved(_) | StepError::Link(_) | StepError::Agent(_)
                | StepError::NotReady(_) | StepError::Foreign => {
                    Why::with(WhyKind::AgentLost, chain(&error))
                }
            }),
        };
        match taken {
            Ok(()) => {
                let is_warm = self.sandbox.with_life(|life| matches!(life, Life::Warm));
                let warm = is_warm.then(|| Warm::new(Arc::clone(&self.sandbox), self.sandboxes.clone()));
                drop(answer.send(Ok(warm)));
                Some(self)
            }
            Err(why) => {
                drop(self.sandbox.apply(&self.sandboxes, Event::Died(why.clone())));
                drop(answer.send(Err(why)));
                Box::pin(self.end()).await;
                None
            }
        }
    }

    async fn take_up(&mut self, identity: Identity, size: Size) -> Result<(), StepError> {
        let means = self.sandboxes.means();
        let limits = means.deadlines;
        let place = Place {
            slot: self.sandbox.slot,
            size,
            lane: self.sandbox.key.lane,
        };
        let is_warm = self.sandbox.with_life(|life| matches!(life, Life::Warm));
        let limit = if is_warm { limits.hello } else { limits.adopt };
        let attach = means.engine.attach(place, identity);
        let machine = within("attach", limits.attach, StepError::Engine, attach).await?;
        let machine = Arc::clone(self.machine.insert(Arc::from(machine)));
        if let Err(error) = Box::pin(self.bind_doors()).await {
            if is_warm {
                return Err(error);
            }
            // It reaches nothing, which is no reason to end somebody's work.
            tracing::error!(sandbox = %self.sandbox.id, error = %chain(&error), "its doors cannot be opened again");
            let lost = Condition::doors_lost(means.clock.wall());
            self.sandboxes.noted(&self.sandbox, lost);
        }
        let opened = Box::pin(open_link(machine.as_ref(), &self.sandboxes, limit)).await?;
        // Its doors deny, or serve the claim of its record, already; a guest that does not come to them is served without.
        let opening = Box::pin(self.open_doors(&machine));
        if let Err(error) = within("doors", limits.hello, StepError::Engine, opening).await {
            tracing::warn!(sandbox = %self.sandbox.id, error = %chain(&error), "the guest has not connected for its doors yet");
        }
        let asking = agent::adopt(&opened.link);
        let adopted = within("adopt", limit, StepError::Agent, asking).await?;
        faults::passage("recover.greeted");
        if adopted.state != agent::State::Ready {
            return Err(StepError::NotReady(adopted.state));
        }
        if adopted.sandbox != Some(self.sandbox.id) {
            return Err(StepError::Foreign);
        }
        let stepping = agent::clock(&opened.link, &means.clock);
        within("clock", limit, StepError::Agent, stepping).await?;
        opened.link.pace(if is_warm {
            means.paces.warm
        } else {
            means.paces.claimed
        });
        let pid = machine.identity().pid;
        self.sandbox.set_pulse(machine.pulse());
        self.sandbox.set_agent(AgentFacts {
            proto: opened.proto,
            version: opened.hello.version,
            pid,
        });
        self.sandbox.set_link(Some(opened.link));
        Ok(())
    }
}
