//! All sandboxes of this daemon, what they work with, and the rows of those that are gone.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use sandbox_protocol::{id::SandboxId, v1};
use tokio::sync::watch;

use super::{
    entry::{Applied, Sandbox},
    life::{Claim, Event, Lease, Life, Why, WhyKind},
    reap::Reaper,
};
use crate::{
    admission::Admission,
    agent::Condition,
    clock::{Clock, Tick},
    egress::Egress,
    engine::Engine,
    faults,
    feed::{Feed, Reader},
    journal::{AppendError, Journal, Transition, Written},
    net::{self, NetError},
    policy::Layer,
    tasks::Group,
    telemetry::metrics::{Metrics, SandboxState},
    words::{Lane, Name},
};

/// How long the row of a gone sandbox can be asked for (docs/api.md section 3).
const ROW_KEPT: Duration = Duration::from_secs(600);
/// Rows of gone sandboxes that are kept, at most.
const ROWS_KEPT: usize = 4096;

/// How often a guest's agent is pinged on the kept connection.
#[derive(Debug, Clone, Copy)]
pub struct Paces {
    /// In stock: a claim never receives one that has not answered within two seconds.
    pub warm: Duration,
    /// Claimed: its own calls show that it lives, and an idle guest is not to be woken each second.
    pub claimed: Duration,
}

/// How long the steps of a life may take.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// A clone, from its process to its loaded state.
    pub clone: Duration,
    /// A cold boot, up to the agent's HELLO.
    pub boot: Duration,
    /// HELLO of a clone or of a warm guest that a restart takes up, and each of its answers then.
    pub hello: Duration,
    /// Finding the machine of an earlier daemon: longer than its emulator may take for one command (10 s).
    pub attach: Duration,
    /// HELLO of a claimed guest that a restart takes up, and each of its answers then. Long: it is somebody's work, and
    /// a busy host is no reason to end it.
    pub adopt: Duration,
    /// Renewal, hooks included (docs/agent.md section 3: 10 s for all of them).
    pub renew: Duration,
    /// A lost link of a claimed guest, until it must be back.
    pub relink: Duration,
    /// One attempt at the proved end of a machine; it is tried again for ever.
    pub kill: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            clone: Duration::from_secs(20),
            boot: Duration::from_secs(120),
            hello: Duration::from_secs(10),
            attach: Duration::from_secs(30),
            adopt: Duration::from_secs(30),
            renew: Duration::from_secs(15),
            relink: Duration::from_secs(30),
            kill: Duration::from_secs(60),
        }
    }
}

/// What sandboxes work with.
#[derive(Debug)]
pub struct Means {
    /// Time.
    pub clock: Clock,
    /// Facts.
    pub journal: Journal,
    /// Machines.
    pub engine: Arc<dyn Engine>,
    /// Room on the node.
    pub admission: Admission,
    /// Leases.
    pub reaper: Reaper,
    /// Ping intervals.
    pub paces: Paces,
    /// Step limits.
    pub deadlines: Deadlines,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What doors work with.
    pub egress: Egress,
    /// Lane guarded, where the host has it.
    pub net: Option<Arc<net::Lane>>,
}

impl Means {
    /// Whether a claim may be served on this lane now.
    ///
    /// # Errors
    /// The host does not have it, or its packet filter is not in force.
    pub fn may_use(&self, lane: Lane) -> Result<(), NetError> {
        match (lane, &self.net) {
            (Lane::None, _) => Ok(()),
            (Lane::Guarded, None) => Err(NetError::Off),
            (Lane::Guarded, Some(net)) if net.is_locked() => Ok(()),
            (Lane::Guarded, Some(_)) => Err(NetError::Unlocked),
        }
    }

    /// Appends a record, and measures it.
    ///
    /// # Errors
    /// The journal's.
    pub fn record(
        &self,
        sandbox: Option<SandboxId>,
        transition: &Transition,
    ) -> Result<Written, AppendError> {
        let begun = self.clock.tick();
        let written = self.journal.append(sandbox, transition)?;
        self.metrics
            .journal
            .appended(written.bytes(), self.clock.tick().since(begun));
        Ok(written)
    }

    /// Waits for the disk if the configuration wants records to, and measures that.
    ///
    /// # Errors
    /// The journal's.
    pub async fn settle(&self, written: Written) -> Result<Written, AppendError> {
        if !self.journal.waits_for_disk() {
            return Ok(written);
        }
        let begun = self.clock.tick();
        let settled = Box::pin(self.journal.settle(written)).await?;
        self.metrics.journal.sync.observe(self.clock.tick().since(begun));
        Ok(settled)
    }
}

/// The registry; cheap to clone.
#[derive(Clone)]
pub struct Sandboxes(Arc<Inner>);

struct Inner {
    means: Means,
    all: RwLock<BTreeMap<SandboxId, Arc<Sandbox>>>,
    /// Gone ones, oldest first, with when they went.
    past: Mutex<VecDeque<(Tick, SandboxId)>>,
    counts: [AtomicI64; 8],
    /// Claims that live, by the pool that served them.
    by_pool: RwLock<HashMap<Name, PoolCount>>,
    feed: Feed<SandboxId>,
    /// Counts deaths in stock.
    deaths: watch::Sender<u64>,
    /// Counts lives that left Claimed.
    claims_over: watch::Sender<u64>,
    owners: Group,
}

/// Claims of one pool.
#[derive(Debug, Default)]
struct PoolCount {
    claims: AtomicI64,
    /// The pool is there. The entry of one that is not goes with its last claim.
    is_kept: AtomicBool,
}

impl fmt::Debug for Sandboxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sandboxes({:?})", self.0.counts)
    }
}

impl Sandboxes {
    /// An empty registry.
    #[must_use]
    pub fn new(means: Means) -> Self {
        Self(Arc::new(Inner {
            means,
            all: RwLock::default(),
            past: Mutex::default(),
            counts: Default::default(),
            by_pool: RwLock::default(),
            feed: Feed::default(),
            deaths: watch::Sender::new(0),
            claims_over: watch::Sender::new(0),
            owners: Group::new(),
        }))
    }

    /// What sandboxes work with.
    #[must_use]
    pub fn means(&self) -> &Means {
        &self.0.means
    }

    pub(super) fn owners(&self) -> &Group {
        &self.0.owners
    }

    /// The sandbox of this id, gone ones included while their row is kept.
    #[must_use]
    pub fn get(&self, id: SandboxId) -> Option<Arc<Sandbox>> {
        self.0
            .all
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&id)
            .cloned()
    }

    /// Sandboxes with an id behind `after`, in the order of their ids.
    #[must_use]
    pub fn list(&self, after: Option<SandboxId>) -> Vec<Arc<Sandbox>> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let all = self.0.all.read().unwrap_or_else(PoisonError::into_inner);
        all.range((from, Unbounded))
            .map(|(_, sandbox)| Arc::clone(sandbox))
            .collect()
    }

    /// How many are in each state.
    #[must_use]
    pub fn counts(&self) -> Vec<(v1::State, u32)> {
        STATES.iter().map(|state| (*state, self.count(*state))).collect()
    }

    /// How many are in this state.
    #[must_use]
    pub fn count(&self, state: v1::State) -> u32 {
        let count = self
            .0
            .counts
            .get(state as usize)
            .map_or(0, |count| count.load(Ordering::Relaxed));
        u32::try_from(count).unwrap_or(0)
    }

    /// Ids of sandboxes that have changed, from now on.
    #[must_use]
    pub fn read_feed(&self) -> Reader<SandboxId> {
        self.0.feed.read()
    }

    /// News of sandboxes that died in stock, from now on.
    #[must_use]
    pub fn deaths(&self) -> Deaths {
        Deaths(self.0.deaths.subscribe())
    }

    /// News of claims that are over, however, from now on.
    #[must_use]
    pub fn claims_changed(&self) -> Deaths {
        Deaths(self.0.claims_over.subscribe())
    }

    /// Ends a sandbox, whatever it is doing; harmless if it has ended.
    pub fn end(&self, sandbox: &Sandbox, why: Why) -> Option<Applied> {
        let lease = sandbox.with_life(|life| life.claim().map(|claim| claim.lease.until));
        let applied = sandbox.apply(self, Event::End(why)).ok();
        if applied.is_some() {
            faults::passage("sandbox.end_recorded");
            if let Some(until) = lease {
                self.means().reaper.clear(sandbox.id, until);
            }
            self.retire_if_gone(sandbox);
        }
        applied
    }

    /// Sets a lease anew.
    ///
    /// # Errors
    /// See [`super::ApplyError`].
    pub fn renew(&self, sandbox: &Sandbox, lease: Lease) -> Result<Applied, super::ApplyError> {
        let before = sandbox.with_life(|life| life.claim().map(|claim| claim.lease.until));
        let applied = sandbox.apply(self, Event::Renewed(lease))?;
        faults::passage("sandbox.renewed");
        self.means().reaper.set(sandbox.id, before, lease.until);
        Ok(applied)
    }

    /// Sets what a claim narrows anew: recorded, then in force, then tunnels that it forbids are cut.
    ///
    /// # Errors
    /// See [`super::ApplyError`].
    pub fn narrow(&self, sandbox: &Sandbox, layer: Option<Arc<Layer>>) -> Result<Applied, super::ApplyError> {
        sandbox.apply(self, Event::Narrowed(layer))
    }

    /// Sets the doors of all claims to the policies that are in force now.
    pub fn rearm(&self) {
        for sandbox in self.list(None) {
            sandbox.rearm(self);
        }
    }

    /// A lease's deadline has come: ends its sandbox, unless the lease was set anew meanwhile.
    pub fn lease_due(&self, id: SandboxId) {
        let Some(sandbox) = self.get(id) else { return };
        let now = self.means().clock.tick();
        let lease = |life: &Life| match life {
            Life::Claimed(claim) | Life::Failed { claim, .. } => Some(claim.lease.until),
            Life::Making
            | Life::Warm
            | Life::Ending { .. }
            | Life::Quarantined { .. }
            | Life::Gone { .. } => None,
        };
        let Some(until) = sandbox.with_life(lease) else {
            return;
        };
        if until <= now {
            faults::passage("sandbox.lease_due");
            // Decided under the life's own lock: it may have been renewed, or ended, in this moment.
            if sandbox.apply(self, Event::Expired(now)).is_ok() {
                faults::passage("sandbox.end_recorded");
                self.means().reaper.clear(id, until);
                self.retire_if_gone(&sandbox);
                return;
            }
        }
        if let Some(until) = sandbox.with_life(lease) {
            self.means().reaper.set(id, None, until);
        }
    }

    pub(super) fn insert(&self, sandbox: Arc<Sandbox>) {
        let (id, life) = (sandbox.id, sandbox.life());
        self.count_move(None, Some(&life));
        self.0
            .all
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, sandbox);
        self.0.feed.tell(|| id);
    }

    pub(super) fn changed(&self, id: SandboxId, before: &Life, after: &Life) {
        self.count_move(Some(before), Some(after));
        if matches!((before, after), (Life::Warm, Life::Ending { .. })) {
            self.0.deaths.send_modify(|count| *count = count.wrapping_add(1));
        }
        if matches!(before, Life::Claimed(_)) && !matches!(after, Life::Claimed(_)) {
            self.0
                .claims_over
                .send_modify(|count| *count = count.wrapping_add(1));
        }
        self.0.feed.tell(|| id);
    }

    /// Notes trouble that a guest told of. Who watches is told of the first of each kind: how many of one there are is the
    /// guest's to say, as often as it likes, and stands in the row for whoever asks.
    pub(super) fn noted(&self, sandbox: &Sandbox, condition: Condition) {
        let name = condition.name;
        if sandbox.note(condition) {
            tracing::info!(condition = name.as_str(), "trouble in the guest");
            self.0.feed.tell(|| sandbox.id);
        }
    }

    fn count_move(&self, before: Option<&Life>, after: Option<&Life>) {
        for (life, n) in [(before, -1), (after, 1)] {
            let Some(life) = life else { continue };
            if let Some(count) = self.0.counts.get(life.state() as usize) {
                count.fetch_add(n, Ordering::Relaxed);
            }
            if let Life::Claimed(Claim { pool: Some(pool), .. }) = life {
                self.count_claim(pool, n);
            }
        }
        let shown = |life: Option<&Life>| life.and_then(shown_state);
        if shown(before) != shown(after) {
            self.0.means.metrics.sandbox.moved(shown(before), shown(after));
        }
    }

    fn count_claim(&self, pool: &Name, n: i64) {
        let by_pool = self.0.by_pool.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = by_pool.get(pool) {
            let left = count.claims.fetch_add(n, Ordering::AcqRel) + n;
            if left != 0 || count.is_kept.load(Ordering::Acquire) {
                return;
            }
            drop(by_pool);
            return self.forget_unused(pool);
        }
        drop(by_pool);
        let mut by_pool = self.0.by_pool.write().unwrap_or_else(PoisonError::into_inner);
        let count = by_pool.entry(pool.clone()).or_default();
        count.claims.fetch_add(n, Ordering::AcqRel);
    }

    /// Counts claims of a pool that is there, from its first one on without a new entry.
    pub fn count_for(&self, pool: &Name) {
        let mut by_pool = self.0.by_pool.write().unwrap_or_else(PoisonError::into_inner);
        let count = by_pool.entry(pool.clone()).or_default();
        count.is_kept.store(true, Ordering::Release);
    }

    /// The pool is no more: its count is forgotten with the last of its claims.
    pub fn count_no_more(&self, pool: &Name) {
        let by_pool = self.0.by_pool.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = by_pool.get(pool) {
            count.is_kept.store(false, Ordering::Release);
        }
        drop(by_pool);
        self.forget_unused(pool);
    }

    fn forget_unused(&self, pool: &Name) {
        let mut by_pool = self.0.by_pool.write().unwrap_or_else(PoisonError::into_inner);
        let is_unused = |count: &PoolCount| {
            !count.is_kept.load(Ordering::Acquire) && count.claims.load(Ordering::Acquire) == 0
        };
        if by_pool.get(pool).is_some_and(is_unused) {
            by_pool.remove(pool);
        }
    }

    /// Claims that live and were served by this pool.
    #[must_use]
    pub fn claimed_from(&self, pool: &Name) -> u32 {
        let by_pool = self.0.by_pool.read().unwrap_or_else(PoisonError::into_inner);
        by_pool.get(pool).map_or(0, |count| {
            u32::try_from(count.claims.load(Ordering::Relaxed)).unwrap_or(0)
        })
    }

    /// Pools whose claims are counted.
    #[cfg(test)]
    pub(crate) fn counted_pools(&self) -> usize {
        self.0.by_pool.read().unwrap().len()
    }

    /// Keeps the row of one that is gone for a while, and forgets those whose time is over.
    pub(super) fn retire_if_gone(&self, sandbox: &Sandbox) {
        if !sandbox.with_life(|life| matches!(life, Life::Gone { .. })) {
            return;
        }
        let now = self.means().clock.tick();
        let forgotten: Vec<SandboxId> = {
            let mut past = self.0.past.lock().unwrap_or_else(PoisonError::into_inner);
            past.push_back((now, sandbox.id));
            let over = past.len().saturating_sub(ROWS_KEPT);
            let old = past
                .iter()
                .take_while(|(at, _)| now.since(*at) > ROW_KEPT)
                .count();
            past.drain(..old.max(over)).map(|(_, id)| id).collect()
        };
        let mut all = self.0.all.write().unwrap_or_else(PoisonError::into_inner);
        for id in forgotten {
            if let Some(sandbox) = all.remove(&id) {
                self.count_move(Some(&sandbox.life()), None);
            }
        }
    }

    /// Stops the tasks that own sandboxes. With `end`, every sandbox is ended first; else their machines are left
    /// running for the next daemon. Resolves when all owners are through.
    pub async fn stop(&self, end: bool) {
        if end {
            for sandbox in self.list(None) {
                self.end(&sandbox, Why::of(WhyKind::Stopped));
            }
        }
        self.0.owners.stop().await;
    }
}

/// The states that the metrics count; rows of what is gone are none.
const fn shown_state(life: &Life) -> Option<SandboxState> {
    match life {
        Life::Making => Some(SandboxState::Making),
        Life::Warm => Some(SandboxState::Warm),
        Life::Claimed(_) => Some(SandboxState::Claimed),
        Life::Ending { .. } => Some(SandboxState::Ending),
        Life::Failed { .. } => Some(SandboxState::Failed),
        Life::Quarantined { .. } => Some(SandboxState::Quarantined),
        Life::Gone { .. } => None,
    }
}

const STATES: [v1::State; 7] = [
    v1::State::Making,
    v1::State::Warm,
    v1::State::Claimed,
    v1::State::Ending,
    v1::State::Failed,
    v1::State::Quarantined,
    v1::State::Gone,
];

/// News of lives that left a state: of deaths in stock, or of claims that are over.
#[derive(Debug)]
pub struct Deaths(watch::Receiver<u64>);

impl Deaths {
    /// Resolves once that happened since this was made or last resolved. Cancel safe.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
