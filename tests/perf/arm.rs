//! The times of one arm of a comparison.

use std::{future::Future, time::Duration};

use anyhow::{Context as _, Result};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use tokio::time::Instant;

/// Samples below which a p99 says nothing.
const P99_FROM: u64 = 1_000;
/// Samples below which a p99.9 says nothing.
const P999_FROM: u64 = 10_000;

/// Times, in nanoseconds.
pub(crate) struct Arm {
    all: Histogram<u64>,
    round: Histogram<u64>,
    /// The median of each round.
    medians: Vec<f64>,
}

impl Arm {
    pub(crate) fn new() -> Result<Self> {
        // Up to ten minutes, three digits.
        let empty = Histogram::new_with_bounds(1, 600_000_000_000, 3).context("a histogram's bounds")?;
        Ok(Self {
            round: empty.clone(),
            all: empty,
            medians: Vec::new(),
        })
    }

    pub(crate) fn add(&mut self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.all.saturating_record(nanos);
        self.round.saturating_record(nanos);
    }

    /// A round is over.
    pub(crate) fn round(&mut self) {
        self.medians.push(micros(self.round.value_at_quantile(0.5)));
        self.round.reset();
    }

    pub(crate) fn len(&self) -> u64 {
        self.all.len()
    }

    fn quantile(&self, quantile: f64, from: u64) -> Option<f64> {
        let enough = self.all.len() >= from.max(1);
        enough.then(|| micros(self.all.value_at_quantile(quantile)))
    }

    /// The quantiles in microseconds; null where the samples are too few.
    pub(crate) fn json(&self) -> Value {
        json!({
            "p50": self.quantile(0.5, 1),
            "p90": self.quantile(0.9, 1),
            "p99": self.quantile(0.99, P99_FROM),
            "p999": self.quantile(0.999, P999_FROM),
            "n": self.all.len(),
            "round_p50": self.medians,
        })
    }
}

fn micros(nanos: u64) -> f64 {
    (Duration::from_nanos(nanos).as_secs_f64() * 1e7).round() / 10.0
}

/// Milliseconds with one decimal.
pub(crate) fn millis(took: Duration) -> f64 {
    (took.as_secs_f64() * 1e4).round() / 10.0
}

/// The middle one; of an even number the lower of the two.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len().checked_sub(1)? / 2;
    values.get(middle).copied()
}

/// How long a piece of work takes, and what comes of it.
pub(crate) async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let start = Instant::now();
    let done = work.await;
    (start.elapsed(), done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_need_their_samples() {
        let mut arm = Arm::new().unwrap();
        assert_eq!(arm.json()["p50"], Value::Null);
        for us in 1..=999_u64 {
            arm.add(Duration::from_micros(us));
        }
        arm.round();
        assert_eq!(arm.json()["p99"], Value::Null);
        assert!((arm.json()["round_p50"][0].as_f64().unwrap() - 500.0).abs() < 2.0);
        for us in 1_000..=10_000_u64 {
            arm.add(Duration::from_micros(us));
        }
        let json = arm.json();
        assert!((json["p50"].as_f64().unwrap() - 5_000.0).abs() < 10.0);
        assert!((json["p999"].as_f64().unwrap() - 9_990.0).abs() < 20.0);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![]), None);
    }
}
