//! A histogram of times without a lock: an observation is three relaxed additions. (The library's takes a write lock,
//! which on the claim path 64 callers would queue for.)

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric},
};

/// Upper bounds of the buckets in microseconds, 5 us to 60 s: a warm claim is some 100 us, a boot some seconds.
const BOUNDS: [u64; 24] = [
    5, 10, 20, 35, 50, 75, 100, 150, 200, 350, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
    200_000, 500_000, 1_000_000, 5_000_000, 20_000_000, 60_000_000,
];

/// A distribution of times; clones share it.
#[derive(Clone, Default)]
pub struct Histogram(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// One for each bound, and one for what is longer.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanos: AtomicU64,
}

impl Histogram {
    /// Adds one time. Never waits.
    pub fn observe(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let index = BOUNDS.partition_point(|bound| bound.saturating_mul(1_000) < nanos);
        if let Some(bucket) = self.0.buckets.get(index) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        // 584 years of observed time fit.
        self.0.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// How many times there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0
            .buckets
            .iter()
            .map(|bucket| bucket.load(Ordering::Relaxed))
            .sum()
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histogram")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = BOUNDS
            .iter()
            .map(|micros| Duration::from_micros(*micros).as_secs_f64())
            .chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds
            .zip(&self.0.buckets)
            .map(|(bound, bucket)| (bound, bucket.load(Ordering::Relaxed)))
            .collect();
        // From the same reading, so that count and buckets agree.
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = Duration::from_nanos(self.0.nanos.load(Ordering::Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}
