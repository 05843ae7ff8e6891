//! What a claim records.

use std::{fmt, sync::OnceLock, time::Duration};

use super::{
    Book, Histogram, Labels, Series, lap,
    names::{ClaimStep, Label as _, Metric, NO_TIER, Outcome},
};
use crate::{
    clock::{Clock, Tick},
    words::{Name, Tier},
    work,
};

const TIERS: [Option<Tier>; 4] = [None, Some(Tier::Warm), Some(Tier::Clone), Some(Tier::Cold)];
const CLAIM_STEPS: usize = ClaimStep::ALL.len();

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
    by_outcome: [[Lazy<Histogram>; Outcome::ALL.len()]; TIERS.len()],
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

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
