//! Every metric there is: names and labels as enums, series resolved before they are needed.
//!
//! [`Metrics::new`] registers all of them. A room keeps the struct that is its own, and per pool a handle that it got
//! once: recording is then a few atomic additions, without a lock, a hash or an allocation.

mod audit;
mod claim;
mod door;
mod histogram;
mod names;
mod net;
mod process;
mod refill;
mod series;
#[cfg(test)]
mod tests;

use std::{fmt, time::Duration};

use prometheus_client::{
    encoding::text,
    metrics::family::Family,
    registry::{Metric as Registrable, Registry},
};

use self::names::Metric;
pub use self::{
    audit::AuditMetrics,
    claim::{ClaimMetrics, ClaimSeries, ClaimTimes},
    door::{DoorBytes, DoorMetrics},
    histogram::Histogram,
    names::{ClaimStep, DroppedAt, EndedWhy, LedgerFile, Outcome, RefillStep, SandboxState},
    net::{NetMetrics, NetNumbers},
    refill::{RefillMetrics, RefillSeries, RefillTimes},
    series::{JournalMetrics, NodeMetrics, PoolGauges, PoolMetrics, PoolNumbers, SandboxMetrics},
};
use crate::{
    clock::{Clock, Tick},
    words::Name,
};

/// All metrics of the daemon.
pub struct Metrics {
    registry: Registry,
    /// Of the claim.
    pub claim: ClaimMetrics,
    /// Of the pools.
    pub pool: PoolMetrics,
    /// Of refill.
    pub refill: RefillMetrics,
    /// Of the journal.
    pub journal: JournalMetrics,
    /// Of the sandboxes.
    pub sandbox: SandboxMetrics,
    /// Of the doors.
    pub door: DoorMetrics,
    /// Of the audit.
    pub audit: AuditMetrics,
    /// Of lane guarded.
    pub net: NetMetrics,
    /// Of the node.
    pub node: NodeMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers all metrics.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(process::Process));
        let net = NetMetrics::default();
        let ours = registry.sub_registry_with_prefix("sandboxd");
        ours.register_collector(Box::new(net.clone()));
        let mut book = Book(ours);
        Self {
            claim: ClaimMetrics::register(&mut book),
            pool: PoolMetrics::register(&mut book),
            refill: RefillMetrics::register(&mut book),
            journal: JournalMetrics::register(&mut book),
            sandbox: SandboxMetrics::register(&mut book),
            door: DoorMetrics::register(&mut book),
            audit: AuditMetrics::register(&mut book),
            net,
            node: NodeMetrics::register(&mut book),
            registry,
        }
    }

    /// Everything in OpenMetrics text.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        text::encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }

    /// Ends the series of a pool that is no more. Handles to them go on counting, unseen.
    pub fn forget_pool(&self, pool: &Name) {
        self.claim.forget(pool);
        self.pool.forget(pool);
        self.refill.forget(pool);
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Labels of a series.
type Labels<const N: usize> = [(&'static str, String); N];
/// Series of one name.
type Series<const N: usize, M> = Family<Labels<N>, M>;

/// Where metrics are registered, by nothing but a [`Metric`].
struct Book<'r>(&'r mut Registry);

impl Book<'_> {
    fn register<M: Registrable + Clone + Default>(&mut self, metric: Metric) -> M {
        let instance = M::default();
        self.0.register(metric.as_str(), metric.help(), instance.clone());
        instance
    }
}

/// Time since `last`, which becomes now.
fn lap(clock: &Clock, last: &mut Tick) -> Duration {
    let now = clock.tick();
    let time = now.since(*last);
    *last = now;
    time
}
