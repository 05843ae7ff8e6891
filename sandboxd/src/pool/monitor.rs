//! One pool: the lock around its numbers.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandbox_protocol::v1;
use tokio::time::timeout;

use super::{
    Pools,
    core::{Core, InLine, LineError, Placed, Served, Stock, Turn, Usable},
    policy::{Facts, Plan, Policy},
    refill,
    spec::{LeaseBounds, Source, Spec},
};
use crate::{
    clock::Tick,
    image::Digest,
    sandbox::{Warm, Why, WhyKind},
    telemetry::metrics::{ClaimSeries, PoolGauges, PoolNumbers},
    words::{Name, PoolKey},
};

/// A claim never receives a sandbox whose agent has not answered for longer.
pub(super) const FRESH: Duration = Duration::from_secs(2);

impl Stock for Warm {
    fn usable(&self, now: Tick) -> Usable {
        let sandbox = self.sandbox();
        if sandbox.is_ending() {
            Usable::Ending
        } else if !sandbox.heard_within(FRESH, now) {
            Usable::Stale
        } else if sandbox.is_dead() {
            Usable::Ending
        } else {
            Usable::Yes
        }
    }
}

/// Lets go of what is ending. Of one that died just now its own task is about to hear, and knows better than we why.
fn let_die(ending: Vec<Warm>) {
    ending.into_iter().for_each(Warm::leave);
}

/// One pool.
#[derive(Debug)]
pub struct Pool {
    name: Name,
    state: Mutex<State>,
    pools: Pools,
    gauges: PoolGauges,
    claims: ClaimSeries,
}

#[derive(Debug)]
struct State {
    spec: Spec,
    core: Core<Warm>,
    policy: Policy,
    /// A task makes sure of the template.
    preparing: bool,
    template: Template,
    /// What watchers were last woken for.
    shown: PoolNumbers,
}

/// The template that all stock is of.
#[derive(Debug)]
enum Template {
    /// Refill has not looked yet: what a restart takes up was compared by the plan of the restart.
    Unseen,
    /// None can be used.
    Missing,
    /// The one of this digest, and its text as sandboxes bear it.
    Is(Digest, Box<str>),
}

impl Template {
    fn of(current: Option<Digest>) -> Self {
        current.map_or(Self::Missing, |digest| {
            Self::Is(digest, digest.to_string().into())
        })
    }

    fn is(&self, current: Option<Digest>) -> bool {
        match (self, current) {
            (Self::Is(digest, _), Some(current)) => *digest == current,
            (Self::Missing, None) => true,
            (Self::Unseen | Self::Missing, Some(_)) | (Self::Unseen | Self::Is(..), None) => false,
        }
    }

    /// Whether a piece is of another one.
    fn is_other(&self, warm: &Warm) -> bool {
        match self {
            Self::Unseen => false,
            Self::Missing => true,
            Self::Is(_, text) => *warm.sandbox().digest != **text,
        }
    }
}

/// Why a wait in line brought nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitEnd {
    /// The time is over; what keeps refill, in words.
    Over(String),
    /// The line is full.
    Full,
    /// The pool was deleted.
    Closed,
}

/// A place in line, left when it is dropped.
struct Place<'a> {
    pool: &'a Pool,
    turn: Turn,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.pool.lock().core.leave(self.turn);
        self.pool.pools.changed();
    }
}

impl Pool {
    pub(super) fn new(spec: Spec, pools: Pools) -> Self {
        let now = pools.0.sandboxes.means().clock.tick();
        let expected = usize::try_from(spec.warm_max).unwrap_or(0);
        Self {
            name: spec.name.clone(),
            gauges: pools.0.metrics.pool.gauges(&spec.name),
            claims: pools.0.metrics.claim.series(Some(&spec.name)),
            state: Mutex::new(State {
                core: Core::new(expected),
                policy: Policy::new(spec.bounds(), now),
                spec,
                preparing: false,
                template: Template::Unseen,
                shown: PoolNumbers::default(),
            }),
            pools,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Tick {
        self.pools.0.sandboxes.means().clock.tick()
    }

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &Name {
        &self.name
    }

    /// What its sandboxes have in common.
    #[must_use]
    pub fn key(&self) -> PoolKey {
        self.lock().spec.key.clone()
    }

    /// What it is to be.
    #[must_use]
    pub fn spec(&self) -> Spec {
        self.lock().spec.clone()
    }

    /// Bounds of its claims' leases.
    #[must_use]
    pub fn lease(&self) -> LeaseBounds {
        self.lock().spec.lease
    }

    /// Where its claims are counted.
    #[must_use]
    pub const fn claim_metrics(&self) -> &ClaimSeries {
        &self.claims
    }

    pub(super) fn set_spec(&self, spec: Spec) {
        let mut state = self.lock();
        state.policy.set_bounds(spec.bounds());
        state.spec = spec;
    }

    /// Takes the newest that answered of late. Never waits.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<Warm> {
        let now = self.now();
        let mut state = self.lock();
        state.policy.arrived(now);
        let taken = state.core.take(now);
        let counts = state.core.counts();
        let have = counts
            .warm
            .saturating_add(counts.making)
            .saturating_add(counts.checking);
        let is_short = state.policy.target(now).saturating_add(counts.waiting) > have;
        state.shown.warm = counts.warm;
        let numbers = state.shown;
        drop(state);
        self.gauges.show(numbers);
        self.let_go(taken.stale, taken.ending);
        self.pools.taken(is_short);
        taken.got
    }

    /// What lay in a taker's way: a dead one ends by its own task, a stale one gets one short probe.
    fn let_go(self: &Arc<Self>, stale: Vec<Warm>, ending: Vec<Warm>) {
        let_die(ending);
        for stale in stale {
            let recheck = refill::recheck(self.pools.clone(), Arc::clone(self), stale);
            self.pools.0.tasks.spawn("recheck", recheck);
        }
    }

    /// Stands in line for at most `wait`.
    ///
    /// Cancel safe: whoever leaves makes room for the next; a sandbox that was on its way to them ends.
    ///
    /// # Errors
    /// [`WaitEnd`].
    pub async fn wait(self: &Arc<Self>, wait: Duration) -> Result<Warm, WaitEnd> {
        let taken = self.lock().core.take_or_join(self.now());
        self.let_go(taken.stale, taken.ending);
        let InLine { turn, mut arrives } = match taken.got {
            Served::Piece(warm) => return Ok(warm),
            Served::Refused(LineError::Full) => return Err(WaitEnd::Full),
            Served::Refused(LineError::Closed) => return Err(WaitEnd::Closed),
            Served::InLine(place) => place,
        };
        let place = Place { pool: self, turn };
        self.pools.changed();
        match timeout(wait, &mut arrives).await {
            Ok(Ok(warm)) => Ok(warm),
            Ok(Err(_closed)) => Err(WaitEnd::Closed),
            Err(_elapsed) => {
                drop(place);
                // It may have come in the last moment.
                arrives
                    .try_recv()
                    .map_err(|_empty| WaitEnd::Over(self.hindrance()))
            }
        }
    }

    /// What keeps refill, in words.
    fn hindrance(&self) -> String {
        let state = self.lock();
        match state.policy.parked() {
            Some(parked) => format!("{}: {}", parked.reason.as_str(), parked.message),
            None if state.preparing => "its template is being built".into(),
            None => format!("{} are being made", state.core.counts().making),
        }
    }

    /// Puts one in that was not begun here.
    pub(super) fn put(&self, warm: Warm) {
        let mut state = self.lock();
        if state.template.is_other(&warm) {
            drop(state);
            return self.outdone(warm);
        }
        let placed = state.core.put(warm, self.now());
        drop(state);
        self.placed(placed);
    }

    pub(super) fn made(&self, made: Result<Warm, ()>, lead: Duration) {
        let now = self.now();
        let mut state = self.lock();
        match made {
            Ok(warm) if state.template.is_other(&warm) => {
                state.core.failed();
                drop(state);
                self.outdone(warm);
            }
            Ok(warm) => {
                state.policy.succeeded(lead);
                let placed = state.core.made(warm, now);
                drop(state);
                self.placed(placed);
            }
            Err(()) => {
                state.core.failed();
                drop(state);
                self.pools.changed();
            }
        }
    }

    pub(super) fn rechecked(&self, warm: Option<Warm>) {
        let mut state = self.lock();
        let (kept, other) = match warm {
            Some(warm) if state.template.is_other(&warm) => (None, Some(warm)),
            kept => (kept, None),
        };
        let placed = state.core.rechecked(kept, self.now());
        drop(state);
        match (placed, other) {
            (Some(placed), _) => self.placed(placed),
            (None, Some(warm)) => self.outdone(warm),
            (None, None) => self.pools.changed(),
        }
    }

    /// Its template was built anew while it was being made or was out for a probe.
    fn outdone(&self, warm: Warm) {
        warm.end(Why::of(WhyKind::TemplateChanged));
        self.pools.changed();
    }

    fn placed(&self, placed: Placed<Warm>) {
        match placed {
            Placed::Handed | Placed::Stocked => {}
            Placed::Refused(warm) if self.pools.0.tasks.is_stopping() || warm.sandbox().is_dead() => {
                warm.leave();
            }
            Placed::Refused(warm) => warm.end(Why::of(WhyKind::PoolGone)),
        }
        self.pools.changed();
    }

    /// Asks the policy, and counts what it wants begun. `died`: there was news of a death in stock, so all of it is
    /// looked through; without, a pass costs the same whatever the stock holds.
    pub(super) fn plan(&self, may_begin: u32, died: bool) -> (Plan, Vec<Warm>) {
        let now = self.now();
        let claimed = self.pools.0.sandboxes.claimed_from(&self.name);
        let mut state = self.lock();
        let dead = if died { state.core.sweep(now) } else { vec![] };
        let counts = state.core.counts();
        let facts = Facts {
            warm: counts.warm,
            coming: counts.making.saturating_add(counts.checking),
            waiting: counts.waiting,
            may_begin,
        };
        let plan = state.policy.plan(facts, now);
        state.core.begin(plan.start);
        let surplus = state.core.shrink(plan.shrink);
        let counts = state.core.counts();
        let numbers = PoolNumbers {
            warm: counts.warm,
            target: state.policy.target(now),
            making: counts.making,
            waiting: counts.waiting,
            claimed,
            parked: state.policy.parked().is_some(),
        };
        let news = std::mem::replace(&mut state.shown, numbers) != numbers;
        drop(state);
        self.gauges.show(numbers);
        if news {
            // What was begun here, or has changed by time alone, nobody else tells.
            self.pools.tell();
        }
        let_die(dead);
        (plan, surplus)
    }

    /// Says of which template stock is from now on, if of any, and takes out what is of another. A look at all of it, but
    /// only when the template has changed.
    pub(super) fn outdated(&self, current: Option<Digest>) -> Vec<Warm> {
        let mut state = self.lock();
        if state.template.is(current) {
            return vec![];
        }
        let State { core, template, .. } = &mut *state;
        *template = Template::of(current);
        core.take_out(|warm| template.is_other(warm))
    }

    /// Takes out all stock.
    pub(super) fn take_out(&self) -> Vec<Warm> {
        self.lock().core.take_out(|_any| true)
    }

    /// Changes its policy under the lock.
    pub(super) fn with_policy<T>(&self, change: impl FnOnce(&mut Policy) -> T) -> T {
        change(&mut self.lock().policy)
    }

    /// Marks that a task makes sure of the template; false if one does already.
    pub(super) fn begin_preparing(&self) -> bool {
        !std::mem::replace(&mut self.lock().preparing, true)
    }

    pub(super) fn end_preparing(&self) {
        self.lock().preparing = false;
    }

    /// What its stock aims at, and how many of its sandboxes are claimed.
    pub(super) fn target_and_claims(&self) -> (u32, u32) {
        let now = self.now();
        let claimed = self.pools.0.sandboxes.claimed_from(&self.name);
        (self.lock().policy.target(now), claimed)
    }

    /// Whether it wants stock at all, now.
    pub(super) fn wants(&self) -> bool {
        let now = self.now();
        let state = self.lock();
        let counts = state.core.counts();
        counts.waiting > 0 || counts.warm + counts.making < state.policy.target(now)
    }

    /// Takes everything out, and nothing in any more.
    pub(super) fn close(&self) -> Vec<Warm> {
        self.lock().core.close()
    }

    /// As the API shows it.
    #[must_use]
    pub fn view(&self) -> v1::Pool {
        let means = self.pools.0.sandboxes.means();
        let (now, wall) = (means.clock.tick(), means.clock.wall());
        let state = self.lock();
        let counts = state.core.counts();
        // Ticks are shown as wall time by their distance from now.
        let past = |at: Tick| {
            let ago = u64::try_from(now.since(at).as_micros()).unwrap_or(0);
            crate::clock::WallTime::from_micros(wall.as_micros().saturating_sub(ago)).to_proto()
        };
        let parked = state.policy.parked().map(|parked| v1::Parked {
            reason: parked.reason.as_str().into(),
            since: Some(past(parked.since)),
            retry_at: parked.retry_at.map(|at| wall.plus(at.since(now)).to_proto()),
            message: parked.message.clone(),
        });
        v1::Pool {
            spec: Some(state.spec.to_proto()),
            source: match state.spec.source {
                Source::File => v1::Source::File.into(),
                Source::Applied => v1::Source::Applied.into(),
            },
            target: state.policy.target(now),
            warm: counts.warm,
            making: counts.making,
            claimed: self.pools.0.sandboxes.claimed_from(&self.name),
            waiting: counts.waiting,
            arrivals_per_min: state.policy.arrivals_per_min(now),
            lead_ms: u32::try_from(state.policy.lead().as_millis()).unwrap_or(u32::MAX),
            parked,
        }
    }
}
