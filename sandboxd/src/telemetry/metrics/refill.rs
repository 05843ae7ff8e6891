//! What a refill records.

use std::{fmt, time::Duration};

use prometheus_client::metrics::counter::Counter;

use super::{
    Book, Histogram, Labels, Series, lap,
    names::{Label as _, Metric, Outcome, RefillStep},
};
use crate::{
    clock::{Clock, Tick},
    words::Name,
};

/// Of refill.
#[derive(Debug)]
pub struct RefillMetrics {
    steps: Series<2, Histogram>,
    refills: Series<2, Counter>,
}

/// Refills of one pool.
pub struct RefillSeries {
    by_step: [Histogram; RefillStep::ALL.len()],
    by_outcome: [Counter; Outcome::ALL.len()],
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
