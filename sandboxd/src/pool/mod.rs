//! The stock of warm sandboxes of one key: a monitor around pure numbers, and one refill driver for the node.
//!
//! [`core`] is the stock and the line, [`policy`] says how much stock there should be; both are pure. `refill` makes
//! and ends what the policy wants, woken by takes, deaths and news of room, never by a tick.
//!
//! May call: sandbox, template, agent, egress, net, engine (captures), image (digests), journal, admission, config.
//! Never inside: I/O under the lock; an await under the lock.
//! Invariant 01: one sandbox, at most one claim: stock is moved, never lent.
//! Cancel safety: whoever leaves the line costs nobody else anything.

pub mod core;
pub mod policy;

#[cfg(test)]
mod core_tests;
mod monitor;
#[cfg(test)]
mod policy_tests;
mod pools;
mod refill;
#[cfg(test)]
mod refill_tests;
#[cfg(test)]
mod rest_tests;
mod spec;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, RwLock, atomic::AtomicU64},
};

use tokio::sync::{Notify, Semaphore, watch};

pub use self::{
    core::WAITERS,
    monitor::{Pool, WaitEnd},
    pools::Turn,
    spec::{LeaseBounds, Source, Spec},
};
use crate::{
    journal::{AppendError, Health},
    sandbox::Sandboxes,
    tasks::Group,
    telemetry::metrics::Metrics,
    template::Templates,
    words::Name,
};

/// All pools of this node; cheap to clone.
#[derive(Debug, Clone)]
pub struct Pools(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    all: RwLock<BTreeMap<Name, Arc<Pool>>>,
    sandboxes: Sandboxes,
    templates: Templates,
    metrics: Arc<Metrics>,
    /// Held over each whole change of a pool, record and all, so that the journal has changes in the order in which
    /// they came into force.
    changing: Mutex<()>,
    /// `node.clones_in_flight`: turns to make a piece, for stock and on demand alike. Who waits for one is a claim, and
    /// is served before refill.
    making: Arc<Semaphore>,
    /// Whether the journal takes records.
    health: watch::Receiver<Health>,
    /// When a claim was let through last though the journal was full, in nanoseconds of the clock.
    tried_full: AtomicU64,
    /// Something that refill should look at has changed.
    wake: Notify,
    /// Counts changes of any pool, for watchers.
    changes: watch::Sender<u64>,
    tasks: Group,
}

/// Why a pool was not changed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No such pool.
    #[error("there is no pool {0}")]
    NotFound(Name),
    /// It comes from the configuration file.
    #[error("pool {0} comes from the configuration file")]
    FromFile(Name),
    /// The change could not be recorded.
    #[error("the pool cannot be recorded")]
    Journal(#[source] AppendError),
}
