//! The structs that rooms keep, and the handles per pool.

use std::{fmt, sync::OnceLock, time::Duration};

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

use super::{
    Book, Histogram, Labels, Series,
    names::{ClaimStep, DroppedAt, EndedWhy, Label, Metric, NO_TIER, Outcome, RefillStep, SandboxState},
};
use crate::{
    clock::{Clock, Tick},
    words::{Accel, EngineKind, Name, Tier},
    work,
};

const TIERS: [Option<Tier>; 4] = [None, Some(Tier::Warm), Some(Tier::Clone), Some(Tier::Cold)];
const CLAIM_STEPS: usize = ClaimStep::ALL.len();
const REFILL_STEPS: usize = RefillStep::ALL.len();
const OUTCOMES: usize = Outcome::ALL.len();

fn tier_index(tier: Option<Tier>) -> usize {
    match tier {
        None => 0,
        Some(Tier::Warm) => 1,
        Some(Tier::Clone) => 2,
        Some(Tier::Cold) => 3,
    }
}

fn tier_text(tier: Option<Tier>) -> String {
    tier.map_or(NO_TIER, Tier::as_str).to_owned()
}

/// A series that appears with its first value, so that what never happens fills no page.
struct Lazy<M>(OnceLock<M>);

impl<M> Default for Lazy<M> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<M: Clone + Default> Lazy<M> {
    fn get<const N: usize>(&self, family: &Series<N, M>, labels: impl FnOnce() -> Labels<N>) -> &M {
        self.0.get_or_init(|| family.get_or_create_owned(&labels()))
    }
}

/// Of the claim.
#[derive(Debug)]
pub struct ClaimMetrics {
    claims: Series<3, Histogram>,
    steps: Series<3, Histogram>,
}

/// Claims of one pool.
pub struct ClaimSeries {
    pool: String,
    claims: Series<3, Histogram>,
    steps: Series<3, Histogram>,
    by_outcome: [[Lazy<Histogram>; OUTCOMES]; TIERS.len()],
    by_step: [[Lazy<Histogram>; CLAIM_STEPS]; TIERS.len()],
}

impl ClaimMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            claims: book.register(Metric::ClaimSeconds),
            steps: book.register(Metric::ClaimStepSeconds),
        }
    }

    /// The handle for a pool, or for claims that no pool serves. Keep it: getting it costs, using it does not.
    #[must_use]
    pub fn series(&self, pool: Option<&Name>) -> ClaimSeries {
        ClaimSeries {
            pool: pool.map(Name::to_string).unwrap_or_default(),
            claims: self.claims.clone(),
            steps: self.steps.clone(),
            by_outcome: Default::default(),
            by_step: Default::default(),
        }
    }

    pub(super) fn forget(&self, pool: &Name) {
        let pool = pool.as_str();
        for tier in TIERS {
            for outcome in Outcome::ALL {
                self.claims.remove(&claim_labels(tier, pool, *outcome));
            }
            for step in ClaimStep::ALL {
                self.steps.remove(&step_labels(*step, tier, pool));
            }
        }
    }
}

fn claim_labels(tier: Option<Tier>, pool: &str, outcome: Outcome) -> Labels<3> {
    [
        ("tier", tier_text(tier)),
        ("pool", pool.to_owned()),
        ("outcome", outcome.text().to_owned()),
    ]
}

fn step_labels(step: ClaimStep, tier: Option<Tier>, pool: &str) -> Labels<3> {
    [
        ("step", step.text().to_owned()),
        ("tier", tier_text(tier)),
        ("pool", pool.to_owned()),
    ]
}

impl ClaimSeries {
    /// Records a claim that is over, with its steps. `tier`: which served it, if one did.
    pub fn finish(&self, times: &ClaimTimes, tier: Option<Tier>, outcome: Outcome) {
        let index = tier_index(tier);
        let cell = self
            .by_outcome
            .get(index)
            .and_then(|cells| cells.get(outcome.index()));
        if let Some(cell) = cell {
            let labels = || claim_labels(tier, &self.pool, outcome);
            cell.get(&self.claims, labels)
                .observe(times.last.since(times.start));
        }
        let cells = self.by_step.get(index).into_iter().flatten();
        for ((step, cell), taken) in ClaimStep::ALL.iter().zip(cells).zip(&times.steps) {
            if let Some(time) = taken {
                let labels = || step_labels(*step, tier, &self.pool);
                cell.get(&self.steps, labels).observe(*time);
            }
        }
    }
}

impl fmt::Debug for ClaimSeries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimSeries")
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// What the steps of one claim take; one reading of the clock each.
#[derive(Debug, Clone)]
pub struct ClaimTimes {
    clock: Clock,
    start: Tick,
    last: Tick,
    steps: [Option<Duration>; CLAIM_STEPS],
}

impl ClaimTimes {
    /// Begins.
    #[must_use]
    pub fn start(clock: Clock) -> Self {
        let now = clock.tick();
        Self {
            clock,
            start: now,
            last: now,
            steps: [None; CLAIM_STEPS],
        }
    }

    /// A step is over; it began where the one before ended. A step that is done twice counts both. Traced calls get
    /// it too.
    pub fn done(&mut self, step: ClaimStep) {
        let time = lap(&self.clock, &mut self.last);
        work::step(step.as_str(), micros(time));
        if let Some(cell) = self.steps.get_mut(step.index()) {
            *cell = Some(cell.unwrap_or_default() + time);
        }
    }
}

fn lap(clock: &Clock, last: &mut Tick) -> Duration {
    let now = clock.tick();
    let time = now.since(*last);
    *last = now;
    time
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// Of refill.
#[derive(Debug)]
pub struct RefillMetrics {
    steps: Series<2, Histogram>,
    refills: Series<2, Counter>,
}

/// Refills of one pool.
pub struct RefillSeries {
    by_step: [Histogram; REFILL_STEPS],
    by_outcome: [Counter; OUTCOMES],
}

/// What the steps of one refill take.
#[derive(Debug, Clone)]
pub struct RefillTimes {
    clock: Clock,
    start: Tick,
    last: Tick,
}

impl RefillMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            steps: book.register(Metric::RefillSeconds),
            refills: book.register(Metric::Refills),
        }
    }

    /// The handle for a pool.
    #[must_use]
    pub fn series(&self, pool: &Name) -> RefillSeries {
        let step = |index| {
            let step = RefillStep::ALL.get(index).copied().unwrap_or(RefillStep::All);
            self.steps
                .get_or_create_owned(&refill_labels("step", step.text(), pool))
        };
        let outcome = |index| {
            let outcome = Outcome::ALL.get(index).copied().unwrap_or(Outcome::Failed);
            self.refills
                .get_or_create_owned(&refill_labels("outcome", outcome.text(), pool))
        };
        RefillSeries {
            by_step: std::array::from_fn(step),
            by_outcome: std::array::from_fn(outcome),
        }
    }

    pub(super) fn forget(&self, pool: &Name) {
        for step in RefillStep::ALL {
            self.steps.remove(&refill_labels("step", step.text(), pool));
        }
        for outcome in Outcome::ALL {
            self.refills
                .remove(&refill_labels("outcome", outcome.text(), pool));
        }
    }
}

fn refill_labels(key: &'static str, value: &str, pool: &Name) -> Labels<2> {
    [(key, value.to_owned()), ("pool", pool.to_string())]
}

impl RefillSeries {
    /// A step is over; it began where the one before ended.
    pub fn done(&self, times: &mut RefillTimes, step: RefillStep) {
        let time = lap(&times.clock, &mut times.last);
        if let Some(histogram) = self.by_step.get(step.index()) {
            histogram.observe(time);
        }
    }

    /// The refill is over; gives its lead time.
    pub fn finish(&self, times: &RefillTimes, outcome: Outcome) -> Duration {
        let lead = times.clock.tick().since(times.start);
        if let Some(counter) = self.by_outcome.get(outcome.index()) {
            counter.inc();
        }
        if outcome == Outcome::Ok
            && let Some(histogram) = self.by_step.get(RefillStep::All.index())
        {
            histogram.observe(lead);
        }
        lead
    }
}

impl fmt::Debug for RefillSeries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefillSeries").finish_non_exhaustive()
    }
}

impl RefillTimes {
    /// Begins.
    #[must_use]
    pub fn start(clock: Clock) -> Self {
        let now = clock.tick();
        Self {
            clock,
            start: now,
            last: now,
        }
    }
}

/// Of the pools.
#[derive(Debug)]
pub struct PoolMetrics {
    gauges: [Series<1, Gauge>; 6],
}

const POOL_GAUGES: [Metric; 6] = [
    Metric::PoolWarm,
    Metric::PoolTarget,
    Metric::PoolMaking,
    Metric::PoolWaiting,
    Metric::PoolClaimed,
    Metric::PoolParked,
];

/// Gauges of one pool.
#[derive(Debug)]
pub struct PoolGauges([Gauge; 6]);

/// What a pool's gauges show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolNumbers {
    /// In stock.
    pub warm: u32,
    /// What refill aims at.
    pub target: u32,
    /// On their way into the stock.
    pub making: u32,
    /// Claims in line.
    pub waiting: u32,
    /// Somebody's.
    pub claimed: u32,
    /// Whether refill rests.
    pub parked: bool,
}

impl PoolMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            gauges: POOL_GAUGES.map(|metric| book.register(metric)),
        }
    }

    /// The handle for a pool.
    #[must_use]
    pub fn gauges(&self, pool: &Name) -> PoolGauges {
        PoolGauges(
            self.gauges
                .each_ref()
                .map(|family| family.get_or_create_owned(&pool_labels(pool))),
        )
    }

    pub(super) fn forget(&self, pool: &Name) {
        for family in &self.gauges {
            family.remove(&pool_labels(pool));
        }
    }
}

fn pool_labels(pool: &Name) -> Labels<1> {
    [("pool", pool.to_string())]
}

impl PoolGauges {
    /// Shows these numbers.
    pub fn show(&self, numbers: PoolNumbers) {
        let PoolNumbers {
            warm,
            target,
            making,
            waiting,
            claimed,
            parked,
        } = numbers;
        let values = [warm, target, making, waiting, claimed, u32::from(parked)];
        for (gauge, value) in self.0.iter().zip(values) {
            gauge.set(i64::from(value));
        }
    }
}

/// Of the journal.
#[derive(Debug)]
pub struct JournalMetrics {
    /// Appends.
    pub append: Histogram,
    /// Syncs.
    pub sync: Histogram,
    bytes: Counter,
    failed: Gauge,
}

impl JournalMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            append: book.register(Metric::JournalAppendSeconds),
            sync: book.register(Metric::JournalSyncSeconds),
            bytes: book.register(Metric::JournalBytes),
            failed: book.register(Metric::JournalFailed),
        }
    }

    /// An append of that many bytes is over.
    pub fn appended(&self, bytes: u64, time: Duration) {
        self.append.observe(time);
        self.bytes.inc_by(bytes);
    }

    /// A write or sync failed, which is final.
    pub fn failed(&self) {
        self.failed.set(1);
    }
}

/// Of the sandboxes.
#[derive(Debug)]
pub struct SandboxMetrics {
    states: [Gauge; SandboxState::ALL.len()],
    ended: [Counter; EndedWhy::ALL.len()],
    stuck: Gauge,
    dropped: [Counter; DroppedAt::ALL.len()],
}

impl SandboxMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            states: every(&book.register(Metric::Sandboxes), "state", SandboxState::ALL),
            ended: every(&book.register(Metric::Ended), "why", EndedWhy::ALL),
            stuck: book.register(Metric::EndingStuck),
            dropped: every(&book.register(Metric::Dropped), "where", DroppedAt::ALL),
        }
    }

    /// A sandbox changed its state; `None`: it comes, or is gone.
    pub fn moved(&self, from: Option<SandboxState>, to: Option<SandboxState>) {
        let gauge = |state: Option<SandboxState>| state.and_then(|state| self.states.get(state.index()));
        if let Some(gauge) = gauge(from) {
            gauge.dec();
        }
        if let Some(gauge) = gauge(to) {
            gauge.inc();
        }
    }

    /// A sandbox began to end.
    pub fn ended(&self, why: EndedWhy) {
        if let Some(counter) = self.ended.get(why.index()) {
            counter.inc();
        }
    }

    /// An end failed for the first time (`true`), or came through after all.
    pub fn stuck(&self, stuck: bool) {
        if stuck {
            self.stuck.inc();
        } else {
            self.stuck.dec();
        }
    }

    /// Something was dropped.
    pub fn dropped(&self, at: DroppedAt, count: u64) {
        if let Some(counter) = self.dropped.get(at.index()) {
            counter.inc_by(count);
        }
    }
}

/// A series for each value of a label, from the start: a zero is news too.
fn every<L: Label, M: Clone + Default, const N: usize>(
    family: &Series<1, M>,
    key: &'static str,
    values: &[L],
) -> [M; N] {
    std::array::from_fn(|index| match values.get(index) {
        Some(value) => family.get_or_create_owned(&[(key, value.text().to_owned())]),
        None => M::default(),
    })
}

/// Of the node.
#[derive(Debug)]
pub struct NodeMetrics {
    build: Series<3, Gauge>,
    budget: Gauge,
    reserved: Gauge,
    places: Gauge,
    ready: Gauge,
}

impl NodeMetrics {
    pub(super) fn register(book: &mut Book<'_>) -> Self {
        Self {
            build: book.register(Metric::BuildInfo),
            budget: book.register(Metric::MemoryBudget),
            reserved: book.register(Metric::MemoryReserved),
            places: book.register(Metric::SandboxesMax),
            ready: book.register(Metric::Ready),
        }
    }

    /// What runs the guests; said once, when it is proved.
    pub fn build(&self, engine: EngineKind, accel: Accel) {
        let labels = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("engine", engine.to_string()),
            ("accel", accel.to_string()),
        ];
        self.build.get_or_create(&labels).set(1);
    }

    /// The node's budget in bytes, and its places.
    pub fn budget(&self, bytes: u64, places: u32) {
        self.budget.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        self.places.set(i64::from(places));
    }

    /// Bytes of it that are reserved.
    pub fn reserved(&self, bytes: u64) {
        self.reserved.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Whether claims are taken.
    pub fn ready(&self, ready: bool) {
        self.ready.set(i64::from(ready));
    }
}
