//! What pools, journal, sandboxes and the node show.

use std::time::Duration;

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

use super::{
    Book, Histogram, Labels, Series,
    names::{DroppedAt, EndedWhy, Label, Metric, SandboxState},
};
use crate::words::{Accel, EngineKind, Name};

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
pub(super) fn every<L: Label, M: Clone + Default, const N: usize>(
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
