//! The stock of warm sandboxes of one key: a monitor around pure numbers, and one refill driver for the node.
//!
//! [`core`] is the stock and the line, [`policy`] says how much stock there should be; both are pure. [`refill`] makes
//! and ends what the policy wants, woken by takes, deaths and news of room, never by a tick.
//!
//! May call: config (what a file says), sandbox, template, agent, engine (what a clone failed by), journal, admission.
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
mod spec;

use std::{
    collections::BTreeMap,
    sync::{Arc, RwLock, atomic::AtomicU32},
};

use tokio::sync::{Notify, watch};

pub use self::{
    core::WAITERS,
    monitor::{Pool, WaitEnd},
    spec::{LeaseBounds, Source, Spec},
};
use crate::{
    journal::AppendError, sandbox::Sandboxes, tasks::Group, telemetry::metrics::Metrics, template::Templates,
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
    /// Pieces that all pools together make at once.
    in_flight_max: u32,
    in_flight: AtomicU32,
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
