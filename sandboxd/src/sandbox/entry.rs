//! One sandbox as the rest of the daemon sees it, and the one place where something happens to it.

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandbox_protocol::{id::SandboxId, v1};
use tokio::sync::Notify;

use super::{
    life::{Claim, Event, Life, Refused, Why, WhyKind, step},
    registry::Sandboxes,
};
use crate::{
    admission::Reservation,
    agent::Condition,
    clock::{Tick, WallTime},
    egress::Door,
    engine::Pulse,
    journal::{AppendError, Written},
    link::Link,
    names::SlotNumber,
    net::Taken,
    policy::Sides,
    words::{Name, PoolKey, Tier},
};

/// What a claim's guest may reach, by the policies that are in force now.
fn sides(sandboxes: &Sandboxes, claim: &Claim) -> Sides {
    let book = sandboxes.means().egress.book();
    book.sides(claim.pool.as_ref(), &claim.owner, claim.layer.as_ref())
}

/// What is known of a sandbox's agent and process once it answered.
#[derive(Debug, Clone)]
pub struct AgentFacts {
    /// Agent protocol in use.
    pub proto: u32,
    /// silkd's version.
    pub version: String,
    /// The VMM's process, where there is one.
    pub pid: Option<u32>,
}

/// One sandbox.
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its place on the host.
    pub slot: SlotNumber,
    /// What it was made from.
    pub key: PoolKey,
    /// The pool that it was made for.
    pub pool: Option<Name>,
    /// How it was made.
    pub made_as: Tier,
    /// Digest of the template it was cloned from, or of the image it was booted from.
    pub digest: Arc<str>,
    /// When its making began.
    pub created_at: WallTime,
    life: Mutex<Life>,
    ending: AtomicBool,
    pub(super) wake: Notify,
    agent: OnceLock<AgentFacts>,
    pulse: OnceLock<Pulse>,
    link: RwLock<Option<Link>>,
    /// Trouble that its agent told of, one of each name at most.
    conditions: Mutex<Vec<Condition>>,
    /// Its doors: armed while it is claimed, and only then.
    door: Door,
    /// Its slot on lane guarded.
    taken: Option<Taken>,
    /// Its part of the node's budget, until it is proved gone. None from the start only for a row of an earlier daemon
    /// whose slot is another's by now: there is nothing of it to tear down.
    place: Mutex<Option<Reservation>>,
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sandbox({} in slot {})", self.id, self.slot)
    }
}

/// An event was applied.
#[derive(Debug)]
pub struct Applied {
    /// The record that came first; none where the journal takes none (endings go on all the same), or has no record for
    /// such a change.
    pub written: Option<Written>,
    /// The change is in no record.
    pub unrecorded: bool,
}

/// An event was not applied; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// There is no such edge from where the sandbox is.
    #[error("the sandbox is in no state for that")]
    Refused,
    /// Its record could not be written.
    #[error("the transition cannot be recorded")]
    Journal(#[source] AppendError),
}

/// What a sandbox is made of, for [`Sandbox::new`].
#[derive(Debug)]
pub(super) struct Birth {
    pub(super) id: SandboxId,
    pub(super) slot: SlotNumber,
    pub(super) key: PoolKey,
    pub(super) pool: Option<Name>,
    pub(super) made_as: Tier,
    pub(super) digest: Arc<str>,
    pub(super) created_at: WallTime,
    pub(super) life: Life,
}

impl Sandbox {
    pub(super) fn new(birth: Birth, taken: Option<Taken>, place: Option<Reservation>, door: Door) -> Self {
        let Birth {
            id,
            slot,
            key,
            pool,
            made_as,
            digest,
            created_at,
            life,
        } = birth;
        Self {
            id,
            slot,
            key,
            pool,
            made_as,
            digest,
            created_at,
            ending: AtomicBool::new(matches!(
                life,
                Life::Ending { .. } | Life::Failed { .. } | Life::Gone { .. }
            )),
            life: Mutex::new(life),
            wake: Notify::new(),
            agent: OnceLock::new(),
            pulse: OnceLock::new(),
            link: RwLock::new(None),
            conditions: Mutex::default(),
            door,
            taken,
            place: Mutex::new(place),
        }
    }

    /// A copy of its life as it is now.
    #[must_use]
    pub fn life(&self) -> Life {
        self.life.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks at its life without copying it. `look` must not call anything that may wait.
    pub fn with_life<T>(&self, look: impl FnOnce(&Life) -> T) -> T {
        look(&self.life.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether its end has begun.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Its doors.
    #[must_use]
    pub const fn door(&self) -> &Door {
        &self.door
    }

    pub(super) const fn taken(&self) -> Option<&Taken> {
        self.taken.as_ref()
    }

    /// Arms its doors for a claim, by the policies that are in force now.
    pub(super) fn arm(&self, sandboxes: &Sandboxes, claim: &Claim) {
        self.door.arm(
            claim.id,
            Arc::clone(&claim.owner),
            claim.pool.clone(),
            sides(sandboxes, claim),
        );
    }

    /// Sets its doors to the policies that are in force now, if it is claimed.
    pub(super) fn rearm(&self, sandboxes: &Sandboxes) {
        self.with_life(|life| {
            if let Life::Claimed(claim) = life {
                self.door.change(sides(sandboxes, claim));
            }
        });
    }

    /// The connection to its agent, if there is one now.
    #[must_use]
    pub fn link(&self) -> Option<Link> {
        self.link.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_link(&self, link: Option<Link>) {
        *self.link.write().unwrap_or_else(PoisonError::into_inner) = link;
    }

    /// What is known of its agent.
    #[must_use]
    pub fn agent(&self) -> Option<&AgentFacts> {
        self.agent.get()
    }

    pub(super) fn set_agent(&self, facts: AgentFacts) {
        // A second greeting of the same life says the same.
        drop(self.agent.set(facts));
    }

    pub(super) fn set_pulse(&self, pulse: Pulse) {
        // One life has one process.
        drop(self.pulse.set(pulse));
    }

    /// Whether its process has ended, though its own task may not have heard of that yet: one system call.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.pulse.get().is_some_and(Pulse::is_over)
    }

    pub(super) fn has_place(&self) -> bool {
        self.place
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    pub(super) fn give_place_back(&self) -> Option<Reservation> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Notes trouble that its agent told of; the newest of a name replaces the one before. True for the first of its name.
    pub(super) fn note(&self, condition: Condition) -> bool {
        let mut conditions = self.conditions.lock().unwrap_or_else(PoisonError::into_inner);
        let before = conditions.len();
        conditions.retain(|known| known.name != condition.name);
        let is_first = conditions.len() == before;
        conditions.push(condition);
        is_first
    }

    /// Whether its agent was heard within `within` before `now`.
    #[must_use]
    pub fn heard_within(&self, within: Duration, now: Tick) -> bool {
        let link = self.link.read().unwrap_or_else(PoisonError::into_inner);
        link.as_ref()
            .is_some_and(|link| now.since(link.heard()) <= within)
    }

    /// Lets something happen: asks the table, records, sets the new life, wakes the owner if it is the end.
    ///
    /// # Errors
    /// [`ApplyError::Refused`] without an edge; [`ApplyError::Journal`] where the record of a change could not be
    /// written. Endings are never refused for the journal's sake: they are applied unrecorded.
    pub(super) fn apply(&self, sandboxes: &Sandboxes, event: Event) -> Result<Applied, ApplyError> {
        let is_change = matches!(
            event,
            Event::Made(_) | Event::Taken(_) | Event::Renewed(_) | Event::Narrowed(_)
        );
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let step = step(&life, event).map_err(|Refused| ApplyError::Refused)?;
        // Invariant 12: the end shuts the doors before anything that may fail.
        if !matches!(step.next, Life::Claimed(_)) {
            self.door.disarm();
        }
        let written = match &step.record {
            Some(record) => match sandboxes.means().record(Some(self.id), record) {
                Ok(written) => Some(written),
                Err(error) if is_change => return Err(ApplyError::Journal(error)),
                Err(_told_by_the_journal) => None,
            },
            None => None,
        };
        let applied = Applied {
            unrecorded: written.is_none(),
            written,
        };
        let before = std::mem::replace(&mut *life, step.next);
        if step.teardown {
            self.ending.store(true, Ordering::Release);
        }
        // And a claim opens them behind its record: one pointer, under the lock, so that no end comes between.
        match (&before, &*life) {
            (Life::Warm, Life::Claimed(claim)) => {
                self.arm(sandboxes, claim);
                if let Some(Err(error)) = self.taken().map(Taken::arm) {
                    tracing::error!(sandbox = %self.id, %error, "its network slot has no doors");
                }
            }
            (Life::Claimed(before), Life::Claimed(claim)) if before.layer != claim.layer => {
                self.door.change(sides(sandboxes, claim));
            }
            (_, _) => {}
        }
        // Counted under the lock, so that no count is ever seen for a life that was never in force.
        sandboxes.changed(self.id, &before, &life);
        drop(life);
        if step.teardown {
            self.wake.notify_one();
        }
        Ok(applied)
    }

    /// As the API shows it.
    #[must_use]
    pub fn view(&self, sandboxes: &Sandboxes, operator: bool) -> v1::Sandbox {
        let life = self.life();
        let agent = self.agent();
        let claim = life.claim();
        let tier = claim.map_or(self.made_as, |claim| claim.tier);
        v1::Sandbox {
            sandbox: self.id.to_string(),
            claim: claim.map(|claim| claim.id.to_string()).unwrap_or_default(),
            pool: claim
                .and_then(|claim| claim.pool.clone())
                .or_else(|| self.pool.clone())
                .map_or(String::new(), String::from),
            template: self.key.template.to_string(),
            lane: self.key.lane.to_proto().into(),
            size: self.key.size.to_string(),
            state: life.state().into(),
            why: life.why().map(ToString::to_string).unwrap_or_default(),
            tier: tier.to_proto().into(),
            owner: claim.map(|claim| claim.owner.to_string()).unwrap_or_default(),
            labels: claim
                .map(|claim| claim.labels.iter().map(|(k, v)| (k.clone(), v.clone())).collect())
                .unwrap_or_default(),
            created_at: Some(self.created_at.to_proto()),
            claimed_at: claim.map(|claim| claim.claimed_at.to_proto()),
            expires_at: claim.map(|claim| claim.lease.expires_at.to_proto()),
            engine: sandboxes.means().engine.kind().to_proto().into(),
            accel: sandboxes.means().engine.accel().to_proto().into(),
            proto: agent.map_or(0, |agent| agent.proto),
            agent_version: agent.map(|agent| agent.version.clone()).unwrap_or_default(),
            conditions: self
                .conditions
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
                .map(Condition::to_proto)
                .collect(),
            slot: operator.then_some(u32::from(self.slot.0)),
            pid: agent.and_then(|agent| agent.pid).filter(|_| operator),
        }
    }
}

/// A sandbox in stock: nobody's, and to be given to one claim. Whoever drops it ends it, so that what left the pool
/// unclaimed is destroyed though nobody remembers to.
#[derive(Debug)]
pub struct Warm {
    held: Option<(Arc<Sandbox>, Sandboxes)>,
}

impl Warm {
    pub(super) const fn new(sandbox: Arc<Sandbox>, sandboxes: Sandboxes) -> Self {
        Self {
            held: Some((sandbox, sandboxes)),
        }
    }

    /// The sandbox.
    #[must_use]
    pub fn sandbox(&self) -> &Arc<Sandbox> {
        let (sandbox, _) = self.held.as_ref().expect("only what consumes a Warm empties it");
        sandbox
    }

    /// Makes it somebody's: the record, then the lease. A failure ends it (it has left the pool).
    ///
    /// # Errors
    /// [`ApplyError::Refused`] where it has died meanwhile: take the next; [`ApplyError::Journal`] where the claim
    /// cannot be recorded.
    pub fn claim(mut self, claim: Claim) -> Result<(Arc<Sandbox>, Written), ApplyError> {
        let (sandbox, sandboxes) = self.held.take().expect("only what consumes a Warm empties it");
        let until = claim.lease.until;
        let taken = sandbox.apply(&sandboxes, Event::Taken(Box::new(claim)));
        let written = match taken {
            Ok(Applied {
                written: Some(written),
                ..
            }) => written,
            Ok(Applied { written: None, .. }) => return Err(ApplyError::Refused),
            Err(error) => {
                sandboxes.end(&sandbox, Why::of(WhyKind::ClaimFailed));
                return Err(error);
            }
        };
        if let Some(link) = sandbox.link() {
            link.pace(sandboxes.means().paces.claimed);
        }
        sandboxes.means().reaper.set(sandbox.id, None, until);
        Ok((sandbox, written))
    }

    /// Ends it, and says why.
    pub fn end(mut self, why: Why) {
        if let Some((sandbox, sandboxes)) = self.held.take() {
            sandboxes.end(&sandbox, why);
        }
    }

    /// Lets go of it without ending it: the daemon stops and the next one takes it up.
    pub fn leave(mut self) {
        self.held = None;
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        if let Some((sandbox, sandboxes)) = self.held.take() {
            sandboxes.end(&sandbox, Why::of(WhyKind::Abandoned));
        }
    }
}
