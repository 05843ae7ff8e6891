//! What lane guarded shows: asked for when somebody looks, so that no slot counts for it.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

use super::names::Metric;

/// How the lane is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetNumbers {
    /// Slots by state.
    pub slots: Vec<(&'static str, usize)>,
    /// Times that somebody else changed the packet filter.
    pub lock_lost: u64,
}

type Source = Box<dyn Fn() -> Option<NetNumbers> + Send + Sync>;

/// Of lane guarded; a handle. Shows nothing until it has a source.
#[derive(Clone, Default)]
pub struct NetMetrics(Arc<OnceLock<Source>>);

impl NetMetrics {
    /// Where numbers come from; none: there is no lane any more.
    pub fn ask(&self, source: impl Fn() -> Option<NetNumbers> + Send + Sync + 'static) {
        // There is one lane.
        drop(self.0.set(Box::new(source)));
    }
}

impl fmt::Debug for NetMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetMetrics").finish_non_exhaustive()
    }
}

impl Collector for NetMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(NetNumbers { slots, lock_lost }) = self.0.get().and_then(|source| source()) else {
            return Ok(());
        };
        let gauge = ConstGauge::new(0_i64);
        let (name, help) = (Metric::NetSlots.as_str(), Metric::NetSlots.help());
        let mut family = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
        for (state, count) in slots {
            let gauge = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(&[("state", state)])?)?;
        }
        let counter = ConstCounter::new(lock_lost);
        let (name, help) = (Metric::LaneLockLost.as_str(), Metric::LaneLockLost.help());
        counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)
    }
}
