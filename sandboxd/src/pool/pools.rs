//! The node's pools: made, changed, deleted, started, stopped.

use std::sync::{Arc, PoisonError, RwLock, atomic::AtomicU32};

use tokio::sync::{Notify, watch};

use super::{Inner, Pool, PoolError, Pools, Source, Spec, refill};
use crate::{
    faults,
    journal::{Transition, Written},
    sandbox::{Sandboxes, Warm, Why, WhyKind},
    tasks::Group,
    telemetry::metrics::Metrics,
    template::Templates,
    words::{Name, PoolKey},
};

impl Pools {
    /// No pools yet, and no refill until [`start`](Self::start).
    #[must_use]
    pub fn new(
        sandboxes: Sandboxes,
        templates: Templates,
        metrics: Arc<Metrics>,
        in_flight_max: u32,
    ) -> Self {
        Self(Arc::new(Inner {
            all: RwLock::default(),
            sandboxes,
            templates,
            metrics,
            in_flight_max: in_flight_max.max(1),
            in_flight: AtomicU32::new(0),
            wake: Notify::new(),
            changes: watch::Sender::new(0),
            tasks: Group::new(),
        }))
    }

    /// The pool of this name.
    #[must_use]
    pub fn get(&self, name: &Name) -> Option<Arc<Pool>> {
        self.0
            .all
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    /// The first pool by name with this key whose name passes.
    #[must_use]
    pub fn with_key_if(&self, key: &PoolKey, passes: impl Fn(&Name) -> bool) -> Option<Arc<Pool>> {
        let all = self.0.all.read().unwrap_or_else(PoisonError::into_inner);
        all.values()
            .find(|pool| passes(pool.name()) && pool.key() == *key)
            .cloned()
    }

    /// All pools, by name.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Pool>> {
        self.0
            .all
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }

    /// Changes of any pool, from now on. The value has no meaning but that it differs.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Makes or changes a pool that the API asked for, and records it.
    ///
    /// # Errors
    /// [`PoolError::FromFile`], [`PoolError::Journal`].
    pub fn apply(&self, spec: Spec) -> Result<(Arc<Pool>, Written), PoolError> {
        if self
            .get(&spec.name)
            .is_some_and(|pool| pool.spec().source == Source::File)
        {
            return Err(PoolError::FromFile(spec.name));
        }
        let record = Transition::PoolApplied { spec: spec.to_row() };
        let means = self.0.sandboxes.means();
        let written = means.record(None, &record).map_err(PoolError::Journal)?;
        faults::passage("pool.applied");
        Ok((self.set(spec), written))
    }

    /// Ends a pool that the API made: its warm stock ends, its claims live on.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn delete(&self, name: &Name) -> Result<Written, PoolError> {
        let pool = self.get(name).ok_or_else(|| PoolError::NotFound(name.clone()))?;
        if pool.spec().source == Source::File {
            return Err(PoolError::FromFile(name.clone()));
        }
        let record = Transition::PoolDeleted { name: name.clone() };
        let means = self.0.sandboxes.means();
        let written = means.record(None, &record).map_err(PoolError::Journal)?;
        faults::passage("pool.deleted");
        self.remove(name);
        Ok(written)
    }

    /// Puts a pool in place without recording it: from the configuration file, or from a record.
    pub fn set(&self, spec: Spec) -> Arc<Pool> {
        let name = spec.name.clone();
        let changed_key = self.get(&name).filter(|pool| pool.key() != spec.key);
        if changed_key.is_some() {
            // What it holds was made from something else.
            self.remove(&name);
        }
        let pool = match self.get(&name) {
            Some(pool) => {
                pool.set_spec(spec);
                pool
            }
            None => {
                let pool = Arc::new(Pool::new(spec, self.clone()));
                let mut all = self.0.all.write().unwrap_or_else(PoisonError::into_inner);
                all.insert(name, Arc::clone(&pool));
                pool
            }
        };
        self.changed();
        pool
    }

    /// Takes a pool out and ends its stock; harmless if there is none.
    pub fn remove(&self, name: &Name) {
        let removed = self
            .0
            .all
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
        if let Some(pool) = removed {
            for warm in pool.close() {
                warm.end(Why::of(WhyKind::PoolGone));
                faults::passage("pool.stock_ended");
            }
            self.0.metrics.forget_pool(name);
        }
        self.changed();
    }

    /// Puts a sandbox that was taken up after a restart into its pool; without a pool it ends.
    pub fn put_back(&self, warm: Warm) {
        let pool = warm.sandbox().pool.as_ref().and_then(|name| self.get(name));
        match pool {
            Some(pool) if pool.key() == warm.sandbox().key => pool.put(warm),
            Some(_) | None => warm.end(Why::of(WhyKind::PoolGone)),
        }
    }

    /// Whether refill was asked to stop.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.0.tasks.is_stopping()
    }

    /// Starts refill.
    pub fn start(&self) {
        self.0.tasks.spawn("refill", refill::drive(self.clone()));
    }

    /// Stops refill and empties every pool. With `end`, stock ends; else it is left to the next daemon.
    pub async fn stop(&self, end: bool) {
        self.0.tasks.ask();
        for pool in self.list() {
            for warm in pool.close() {
                if end {
                    warm.end(Why::of(WhyKind::Stopped))
                } else {
                    warm.leave()
                }
            }
        }
        self.0.tasks.stop().await;
    }

    /// Something that refill or a watcher should look at has changed.
    pub(super) fn changed(&self) {
        self.0.wake.notify_one();
        self.tell();
    }

    /// Something that a watcher should look at has changed, which refill knows.
    pub(super) fn tell(&self) {
        self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}
