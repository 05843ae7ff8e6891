//! The node's pools: made, changed, deleted, started, stopped.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

use super::{Inner, Pool, PoolError, Pools, Source, Spec, refill};
use crate::{
    clock::Tick,
    faults,
    image::Digest,
    journal::{AppendError, Health, Transition, Written},
    sandbox::{Sandboxes, Warm, Why, WhyKind},
    tasks::Group,
    telemetry::metrics::Metrics,
    template::Templates,
    words::{Name, PoolKey},
};

/// How often a claim is let through to see whether a full journal takes records again: one sandbox is lost each time
/// that it does not.
const TRY_FULL_EVERY: Duration = Duration::from_secs(5);

/// The right to make one piece, until it is dropped.
#[derive(Debug)]
#[must_use = "the turn is over when this is dropped"]
pub struct Turn {
    permit: Option<OwnedSemaphorePermit>,
    pools: Pools,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // First given back, then told of.
        drop(self.permit.take());
        self.pools.0.wake.notify_one();
    }
}

impl Pools {
    /// No pools yet, and no refill until [`start`](Self::start).
    #[must_use]
    pub fn new(
        sandboxes: Sandboxes,
        templates: Templates,
        metrics: Arc<Metrics>,
        in_flight_max: u32,
    ) -> Self {
        // A pool that made nothing would be none.
        let in_flight = usize::try_from(in_flight_max.max(1)).unwrap_or(Semaphore::MAX_PERMITS);
        Self(Arc::new(Inner {
            all: RwLock::default(),
            changing: Mutex::default(),
            making: Arc::new(Semaphore::new(in_flight.min(Semaphore::MAX_PERMITS))),
            health: sandboxes.means().journal.health(),
            tried_full: AtomicU64::new(0),
            sandboxes,
            templates,
            metrics,
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

    /// The first pool by name with this key, among those that `may` allows.
    #[must_use]
    pub fn with_key_if(&self, key: &PoolKey, may: impl Fn(&Name) -> bool) -> Option<Arc<Pool>> {
        let all = self.0.all.read().unwrap_or_else(PoisonError::into_inner);
        all.values()
            .find(|pool| may(pool.name()) && pool.key() == *key)
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

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.0.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes or changes a pool that the API asked for, and records it. Whoever promised durability settles the receipt.
    ///
    /// # Errors
    /// [`PoolError::FromFile`], [`PoolError::Journal`].
    pub fn apply(&self, spec: Spec) -> Result<(Arc<Pool>, Written), PoolError> {
        let _changing = self.changing();
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
        Ok((self.put_in_place(spec), written))
    }

    /// Ends a pool that the API made: its warm stock ends, its claims live on. Whoever promised durability settles the
    /// receipt.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn delete(&self, name: &Name) -> Result<Written, PoolError> {
        let _changing = self.changing();
        let pool = self.get(name).ok_or_else(|| PoolError::NotFound(name.clone()))?;
        if pool.spec().source == Source::File {
            return Err(PoolError::FromFile(name.clone()));
        }
        let record = Transition::PoolDeleted { name: name.clone() };
        let means = self.0.sandboxes.means();
        let written = means.record(None, &record).map_err(PoolError::Journal)?;
        faults::passage("pool.deleted");
        self.take_away(name);
        Ok(written)
    }

    /// Puts a pool in place without recording it: from the configuration file, or from a record.
    pub fn set(&self, spec: Spec) -> Arc<Pool> {
        let _changing = self.changing();
        self.put_in_place(spec)
    }

    fn put_in_place(&self, spec: Spec) -> Arc<Pool> {
        let name = spec.name.clone();
        self.0.sandboxes.count_for(&name);
        let book = self.0.sandboxes.means().egress.book();
        book.set_pool(&name, spec.doors.clone());
        let pool = match self.get(&name) {
            Some(pool) if pool.key() == spec.key => {
                pool.set_spec(spec);
                pool
            }
            other => {
                let pool = Arc::new(Pool::new(spec, self.clone()));
                let mut all = self.0.all.write().unwrap_or_else(PoisonError::into_inner);
                all.insert(name, Arc::clone(&pool));
                drop(all);
                if let Some(other) = other {
                    // What it holds was made from something else. Only now, so that who waits in its line finds the new.
                    end_stock(&other);
                }
                pool
            }
        };
        self.changed();
        pool
    }

    /// Takes a pool out and ends its stock; harmless if there is none.
    pub fn remove(&self, name: &Name) {
        let _changing = self.changing();
        self.take_away(name);
    }

    fn take_away(&self, name: &Name) {
        let removed = self
            .0
            .all
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
        if let Some(pool) = removed {
            end_stock(&pool);
            self.0.metrics.forget_pool(name);
            self.0.sandboxes.count_no_more(name);
            self.0.sandboxes.means().egress.book().forget_pool(name);
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

    /// Waits for a turn to make a sandbox. Cancel safe.
    ///
    /// # Panics
    /// Never: the turns are never closed.
    pub async fn turn(&self) -> Turn {
        let permit = Arc::clone(&self.0.making).acquire_owned().await;
        Turn {
            permit: Some(permit.expect("nobody closes it")),
            pools: self.clone(),
        }
    }

    /// A turn, if one is free now.
    pub(super) fn try_turn(&self) -> Option<Turn> {
        let permit = Arc::clone(&self.0.making).try_acquire_owned().ok()?;
        Some(Turn {
            permit: Some(permit),
            pools: self.clone(),
        })
    }

    /// Whether a turn is free now.
    pub(super) fn has_turn(&self) -> bool {
        self.0.making.available_permits() > 0
    }

    /// Whether stock may be taken: what a journal without room cannot record would be lost, one sandbox per try. While
    /// it is full one claim in `TRY_FULL_EVERY` is let through, to see.
    ///
    /// # Errors
    /// What the record of a claim would meet.
    pub fn may_take(&self, now: Tick) -> Result<(), AppendError> {
        match *self.0.health.borrow() {
            Health::Ok => Ok(()),
            Health::Failed => Err(AppendError::Failed),
            Health::Full => {
                if is_first_try(&self.0.tried_full, now) {
                    Ok(())
                } else {
                    Err(AppendError::Full)
                }
            }
        }
    }

    /// The capture of this digest cannot be loaded: it is not used any more, and refill builds it anew.
    pub fn spoil(&self, key: &PoolKey, digest: Digest, why: String) {
        tracing::warn!(template = %key.template, %digest, %why, "a capture cannot be used: it is built anew");
        self.0.templates.spoil(key, digest, why);
        self.changed();
    }

    /// Something that refill or a watcher should look at has changed.
    pub(super) fn changed(&self) {
        self.0.wake.notify_one();
        self.tell();
    }

    /// Stock was taken. Refill is not woken where the pool has as many as it should, which is what waking another thread
    /// is too dear for, nor while no turn is free: each that ends wakes it, and until then it would find the same.
    pub(super) fn taken(&self, is_short: bool) {
        if is_short && self.has_turn() {
            self.0.wake.notify_one();
        }
        self.tell();
    }

    /// Something that a watcher should look at has changed.
    pub(super) fn tell(&self) {
        self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// Closes a pool, and ends what it holds.
fn end_stock(pool: &Pool) {
    for warm in pool.close() {
        warm.end(Why::of(WhyKind::PoolGone));
        faults::passage("pool.stock_ended");
    }
}

/// Whether this is the one try of its [`TRY_FULL_EVERY`].
fn is_first_try(tried: &AtomicU64, now: Tick) -> bool {
    let last = tried.load(Ordering::Relaxed);
    let is_due = now.since(Tick::from_nanos(last)) >= TRY_FULL_EVERY;
    // Of several that see the same, one is first.
    is_due
        && tried
            .compare_exchange(last, now.as_nanos(), Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_claim_in_a_while_tries_a_full_journal() {
        let tried = AtomicU64::new(0);
        let at = |millis: u64| Tick::from_nanos(60_000_000_000).plus(Duration::from_millis(millis));
        let through: Vec<u64> = (0..20_000)
            .step_by(500)
            .filter(|millis| is_first_try(&tried, at(*millis)))
            .collect();
        assert_eq!(through, [0, 5_000, 10_000, 15_000]);
    }
}
