//! The refill driver: one task that looks at all pools when something happened, and a task for each piece it begins.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use sandbox_protocol::reason::Reason;
use tokio::time::timeout;
use tracing::Instrument as _;

use super::{Pools, Turn, monitor::FRESH, monitor::Pool, policy::Policy};
use crate::{
    agent,
    clock::Tick,
    engine::Capture,
    random,
    sandbox::{MakeError, MakeSpec, Source, Warm, Why, WhyKind},
    telemetry::span,
    words::{Name, Tier},
};

/// Runs until the pools stop.
pub(super) async fn drive(pools: Pools) {
    let inner = Arc::clone(&pools.0);
    let mut vacancy = inner.sandboxes.means().admission.vacancy();
    let mut deaths = inner.sandboxes.deaths();
    let mut claims = inner.sandboxes.claims_changed();
    // Nothing was looked at yet.
    let (mut died, mut last) = (true, None);
    loop {
        let wake_at = pass(&pools, std::mem::take(&mut died), &mut last);
        tokio::select! {
            biased;
            () = inner.tasks.stopping() => return,
            () = deaths.changed() => died = true,
            // Before other news: a pass for those would find every pool at rest.
            () = vacancy.appeared() => {
                for pool in pools.list() {
                    pool.with_policy(Policy::has_room);
                }
            }
            // What a pool has claimed is shown, though nothing is to be made for it.
            () = claims.changed() => pools.tell(),
            () = inner.wake.notified() => {}
            () = until(wake_at, &pools) => {}
        }
    }
}

/// Back-off, surplus and falling demand are the only things that end by time alone.
async fn until(at: Option<Tick>, pools: &Pools) {
    match at {
        Some(at) => tokio::time::sleep(at.since(pools.0.sandboxes.means().clock.tick())).await,
        None => std::future::pending().await,
    }
}

/// Looks at every pool; tells when to look again though nothing happened. `died`: something did in stock. `last`: the
/// pool for which a piece was begun last.
fn pass(pools: &Pools, died: bool, last: &mut Option<Name>) -> Option<Tick> {
    let inner = &pools.0;
    let mut wake_at: Option<Tick> = None;
    let used = inner.sandboxes.means().admission.used();
    inner.metrics.node.reserved(used.reserved.0);
    let mut ready = vec![];
    for pool in pools.list() {
        let current = inner.templates.current(&pool.key());
        for warm in pool.outdated(current.as_ref().map(Capture::digest)) {
            warm.end(Why::of(WhyKind::TemplateChanged));
        }
        match current {
            Some(capture) if lacks_root(pools, &pool, &capture) => refuse(pools, &pool, died, &mut wake_at),
            Some(capture) => ready.push((pool, capture)),
            None => prepare(pools, &pool, died, &mut wake_at),
        }
    }
    in_turn(&mut ready, last.as_ref(), |(pool, _)| pool.name());
    // One piece for each pool in turn, so that none starves behind one that wants many.
    let mut died = died;
    loop {
        let mut begun = false;
        for (pool, capture) in &ready {
            let (plan, surplus) = pool.plan(u32::from(pools.has_turn()), died);
            for warm in surplus {
                warm.end(Why::of(WhyKind::Surplus));
            }
            wake_at = [wake_at, plan.wake_at].into_iter().flatten().min();
            if plan.start > 0 {
                begun |= begin(pools, pool, capture, last);
            }
        }
        if !begun {
            return wake_at;
        }
        died = false;
    }
}

/// Brings a list in the order of names into the order of turns: those behind the last one come first.
pub(super) fn in_turn<T>(list: &mut [T], last: Option<&Name>, name: impl Fn(&T) -> &Name) {
    let behind = last.map_or(0, |last| list.partition_point(|one| name(one) <= last));
    list.rotate_left(behind);
}

/// Begins the piece that was planned, unless a claim took the turn meanwhile, which tells refill when it is over.
fn begin(pools: &Pools, pool: &Arc<Pool>, capture: &Capture, last: &mut Option<Name>) -> bool {
    let turn = pools.try_turn();
    let begun = turn.is_some();
    let piece = Piece {
        pool: Arc::clone(pool),
        turn,
        is_counted: true,
    };
    if begun {
        *last = Some(pool.name().clone());
        let making = make_one(pools.clone(), piece, capture.clone());
        let making = making.instrument(span::refill(pool.name().as_str()));
        pools.0.tasks.spawn("making", making);
    }
    begun
}

/// A piece that the pool counts as coming. However its making ends, it is counted out and its turn given back. One that ends
/// without a word (it panicked, or the runtime goes away and drops each task at its start) has failed like any other: begun
/// anew without a pause, it would be begun for ever.
struct Piece {
    pool: Arc<Pool>,
    turn: Option<Turn>,
    is_counted: bool,
}

impl Piece {
    fn over(mut self, made: Result<Warm, ()>, lead: Duration) {
        self.is_counted = false;
        drop(self.turn.take());
        self.pool.made(made, lead);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.is_counted {
            drop(self.turn.take());
            fail(
                &self.pool,
                Reason::TemplateFailed,
                "its making was dropped".to_owned(),
            );
            self.pool.made(Err(()), Duration::ZERO);
        }
    }
}

/// Marks that a task makes sure of a pool's template.
struct Preparing(Arc<Pool>);

impl Drop for Preparing {
    fn drop(&mut self) {
        self.0.end_preparing();
    }
}

/// There is no template to clone from: makes sure that one task sees to it, unless the last one failed of late.
fn prepare(pools: &Pools, pool: &Arc<Pool>, died: bool, wake_at: &mut Option<Tick>) {
    // With nothing to begin from, the plan is asked for its pauses alone.
    let (plan, surplus) = pool.plan(0, died);
    for warm in surplus {
        warm.end(Why::of(WhyKind::Surplus));
    }
    let resting = pool.with_policy(|policy| policy.parked().and_then(|parked| parked.retry_at));
    let now = pools.0.sandboxes.means().clock.tick();
    *wake_at = [*wake_at, plan.wake_at].into_iter().flatten().min();
    if resting.is_some_and(|at| now < at) || !pool.wants() || !pool.begin_preparing() {
        return;
    }
    let (pools, preparing) = (pools.clone(), Preparing(Arc::clone(pool)));
    pools.0.tasks.clone().spawn("preparing", async move {
        let pool = Arc::clone(&preparing.0);
        let key = pool.key();
        let built = tokio::select! {
            biased;
            () = pools.0.tasks.stopping() => return,
            built = pools.0.templates.ensure(&key) => built,
        };
        drop(preparing);
        if let Err(error) = built {
            let (reason, message) = (error.reason(), error.chain());
            tracing::warn!(pool = %pool.name(), reason = reason.as_str(), %message, "no template to refill from");
            fail(&pool, reason, message);
        }
        pools.changed();
    });
}

/// Whether doors would look into this pool's tunnels by a root that guests of the capture do not trust. A node without a
/// root refuses such tunnels at the door.
fn lacks_root(pools: &Pools, pool: &Pool, capture: &Capture) -> bool {
    let inner = &pools.0;
    inner
        .sandboxes
        .means()
        .egress
        .book()
        .pool_looks_inside(pool.name())
        && inner.templates.lacks_root(capture)
}

/// Nothing is made of such a template, and what was made of it is nobody's: claims are told why.
fn refuse(pools: &Pools, pool: &Arc<Pool>, died: bool, wake_at: &mut Option<Tick>) {
    let (plan, surplus) = pool.plan(0, died);
    for warm in surplus.into_iter().chain(pool.take_out()) {
        warm.end(Why::of(WhyKind::TemplateChanged));
    }
    *wake_at = [*wake_at, plan.wake_at].into_iter().flatten().min();
    let resting = pool.with_policy(|policy| policy.parked().and_then(|parked| parked.retry_at));
    let now = pools.0.sandboxes.means().clock.tick();
    if resting.is_some_and(|at| now < at) || !pool.wants() {
        return;
    }
    if let Err(error) = pools.0.templates.may_look_inside(&pool.key()) {
        let (reason, message) = (error.reason(), error.chain());
        tracing::warn!(pool = %pool.name(), reason = reason.as_str(), %message, "a pool that looks into TLS is not refilled");
        fail(pool, reason, message);
        pools.changed();
    }
}

async fn make_one(pools: Pools, piece: Piece, capture: Capture) {
    let inner = &pools.0;
    let pool = Arc::clone(&piece.pool);
    let begun = inner.sandboxes.means().clock.tick();
    // From before the try, so that no room that appears behind it goes unseen.
    let mut vacancy = inner.sandboxes.means().admission.vacancy();
    let (key, digest) = (pool.key(), capture.digest());
    let spec = MakeSpec {
        key: key.clone(),
        pool: Some(pool.name().clone()),
        size: capture.manifest().size,
        tier: Tier::Warm,
        source: Source::Clone(capture),
    };
    let made = tokio::select! {
        biased;
        () = inner.tasks.stopping() => Err(MakeError::Failed(Why::of(WhyKind::Stopped))),
        made = inner.sandboxes.make(spec) => made,
    };
    let now = inner.sandboxes.means().clock.tick();
    let made = made.map_err(|error| match error {
        MakeError::Capacity(full) => {
            pool.with_policy(|policy| policy.no_room(Reason::Capacity, full.to_string(), now));
            // Refill may have heard of that room while the pool was not at rest yet.
            if vacancy.appeared().now_or_never().is_some() {
                pool.with_policy(Policy::has_room);
            }
        }
        // Slots come back, and the packet filter too, without a vacancy that tells of it.
        MakeError::Net(error) => fail(&pool, error.reason(), error.to_string()),
        MakeError::Journal(error) => fail(&pool, error.reason(), error.to_string()),
        // The next pass builds it anew; it counts as failed too, so that captures that never load are not built without
        // a pause.
        MakeError::Capture(why) => {
            fail(&pool, Reason::TemplateFailed, why.clone());
            pools.spoil(&key, digest, why);
        }
        MakeError::Failed(why) if why.kind == WhyKind::Stopped => {}
        // No vacancy tells when the host has room again: it is tried with growing pauses, as after a failure.
        MakeError::Exhausted(why) => {
            tracing::warn!(pool = %pool.name(), %why, "the host has run out of something");
            fail(&pool, Reason::Capacity, why.to_string());
        }
        MakeError::Failed(why) => {
            tracing::warn!(pool = %pool.name(), %why, "refill failed");
            fail(&pool, Reason::TemplateFailed, why.to_string());
        }
    });
    piece.over(made, now.since(begun));
}

fn fail(pool: &Pool, reason: Reason, message: String) {
    let now = pool.now();
    let [byte] = random::bytes();
    let jitter = f64::from(byte) / f64::from(u8::MAX);
    pool.with_policy(|policy| policy.failed(reason, message, now, jitter));
}

/// One short probe of stock that was not heard of late; it goes back where it came from, or it ends.
pub(super) async fn recheck(pools: Pools, pool: Arc<Pool>, warm: Warm) {
    let link = warm.sandbox().link();
    let answered = match link {
        Some(link) => timeout(FRESH, agent::info(&link, &pools.0.sandboxes.means().clock))
            .await
            .is_ok_and(|info| info.is_ok()),
        None => false,
    };
    let kept = if answered {
        Some(warm)
    } else {
        warm.end(Why::with(WhyKind::AgentLost, "no answer to a probe"));
        None
    };
    pool.rechecked(kept);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        claim::tests::rooms::{Rooms, key},
        pool::{LeaseBounds, Spec},
    };

    #[tokio::test]
    async fn a_making_that_is_dropped_has_failed() {
        let rooms = Rooms::new();
        let spec = Spec {
            name: "p".parse().unwrap(),
            key: key(),
            warm: 8,
            warm_max: 8,
            lease: LeaseBounds::DEFAULT,
            doors: Default::default(),
            source: crate::pool::Source::Applied,
        };
        let (pool, _written) = rooms.claims.pools.apply(spec).unwrap();
        let begin = || pool.plan(1, false).0.start;
        // The first failure is tried again at once, the next with a pause.
        for _ in 0..2 {
            assert_eq!(begin(), 1);
            drop(Piece {
                pool: Arc::clone(&pool),
                turn: None,
                is_counted: true,
            });
        }
        assert_eq!(begin(), 0);
        let parked = pool.view().parked.unwrap();
        assert!(parked.retry_at.is_some(), "{parked:?}");
        assert_eq!(pool.view().making, 0);
    }
}
