//! How long the steps of a refill take.

use super::{actor::MakeSpec, registry::Means};
use crate::{
    telemetry::metrics::{Outcome, RefillSeries, RefillStep, RefillTimes},
    words::Tier,
};

/// What a refill takes, step by step. What is made on demand is a step of its claim and no refill.
#[derive(Debug)]
pub(super) struct Meter {
    times: RefillTimes,
    series: Option<RefillSeries>,
}

impl Meter {
    pub(super) fn begin(means: &Means, spec: &MakeSpec) -> Self {
        let pool = spec.pool.as_ref().filter(|_| spec.tier == Tier::Warm);
        Self {
            times: RefillTimes::start(means.clock.clone()),
            series: pool.map(|pool| means.metrics.refill.series(pool)),
        }
    }

    pub(super) fn done(&mut self, step: RefillStep) {
        if let Some(series) = &self.series {
            series.done(&mut self.times, step);
        }
    }

    pub(super) fn over(&self, outcome: Outcome) {
        if let Some(series) = &self.series {
            // The pool's own average has its lead time from the same clock.
            let _lead = series.finish(&self.times, outcome);
        }
    }
}
