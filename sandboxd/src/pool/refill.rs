//! The refill driver: one task that looks at all pools when something happened, and a task for each piece it begins.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use sandbox_protocol::reason::Reason;
use tokio::{sync::watch, time::timeout};
use tracing::Instrument as _;

use super::{Pools, Turn, monitor::FRESH, monitor::Pool, policy::Room};
use crate::{
    admission::Vacancy,
    agent,
    clock::Tick,
    engine::Capture,
    net::NetError,
    random,
    sandbox::{MakeError, MakeSpec, Means, Source, Warm, Why, WhyKind},
    telemetry::span,
    words::{Lane, Name, Tier},
};

/// Runs until the pools stop.
pub(super) async fn drive(pools: Pools) {
    let inner = Arc::clone(&pools.0);
    let mut vacancies = Vacancies::of(inner.sandboxes.means());
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
            room = vacancies.appeared() => {
                for pool in pools.list() {
                    pool.with_policy(|policy| policy.has_room(room));
                }
            }
            // What a pool has claimed is shown, though nothing is to be made for it.
            () = claims.changed() => pools.tell(),
            () = inner.wake.notified() => {}
            () = until(wake_at, &pools) => {}
        }
    }
}

/// News of room for one more: on the node, and on lane guarded where the host has it.
struct Vacancies {
    node: Vacancy,
    lane: Option<watch::Receiver<u64>>,
}

impl Vacancies {
    fn of(means: &Means) -> Self {
        Self {
            node: means.admission.vacancy(),
            lane: means.net.as_ref().map(|lane| lane.freed()),
        }
    }

    /// Resolves once there was some since this was made or last resolved. Cancel safe.
    async fn appeared(&mut self) -> Room {
        let lane = async {
            let freed = match &mut self.lane {
                Some(lane) => lane.changed().await.is_ok(),
                None => false,
            };
            // A lane that has ended has no more.
            if !freed {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = self.node.appeared() => Room::Node,
            () = lane => Room::Lane,
        }
    }
}

/// Slots of lane guarded that a pool is to have: for its stock and its claims, and a tenth of the stock more, so that what is
/// made while others drain finds one ready. Pure.
const fn slots(target: u32, claimed: u32) -> u32 {
    target.saturating_add(target.div_ceil(10)).saturating_add(claimed)
}

/// Has the slots made ahead that the pools' targets call for.
fn lay_ahead(pools: &Pools, all: &[Arc<Pool>]) {
    let Some(lane) = &pools.0.sandboxes.means().net else {
        return;
    };
    let guarded = all.iter().filter(|pool| pool.key().lane == Lane::Guarded);
    let wanted = guarded.map(|pool| {
        let (target, claimed) = pool.target_and_claims();
        usize::try_from(slots(target, claimed)).unwrap_or(usize::MAX)
    });
    lane.lay_ahead(wanted.fold(0, usize::saturating_add));
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
    let all = pools.list();
    lay_ahead(pools, &all);
    for pool in all {
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
    let mut vacancies = Vacancies::of(inner.sandboxes.means());
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
            let why = (Reason::Capacity, full.to_string());
            rest(&pool, Room::Node, why, &mut vacancies);
        }
        MakeError::Net(error @ (NetError::NoSlot { .. } | NetError::Unlocked)) => {
            rest(
                &pool,
                Room::Lane,
                (error.reason(), error.to_string()),
                &mut vacancies,
            );
        }
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

/// Refill of the pool rests until there is room.
fn rest(pool: &Pool, room: Room, (reason, message): (Reason, String), vacancies: &mut Vacancies) {
    let now = pool.now();
    pool.with_policy(|policy| policy.no_room(room, reason, message, now));
    // Refill may have heard of that room while the pool was not at rest yet.
    while let Some(room) = vacancies.appeared().now_or_never() {
        pool.with_policy(|policy| policy.has_room(room));
    }
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

    #[test]
    fn slots_are_for_stock_claims_and_a_tenth() {
        for (target, claimed, wanted) in [(0, 0, 0), (1, 0, 2), (10, 0, 11), (11, 3, 16), (100, 500, 610)] {
            assert_eq!(slots(target, claimed), wanted);
        }
        assert_eq!(slots(u32::MAX, 1), u32::MAX);
    }

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
