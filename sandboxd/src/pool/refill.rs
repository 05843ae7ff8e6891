//! The refill driver: one task that looks at all pools when something happened, and a task for each piece it begins.

use std::sync::{Arc, atomic::Ordering};

use sandbox_protocol::reason::Reason;
use tokio::time::timeout;

use super::{Pools, monitor::FRESH, monitor::Pool};
use crate::{
    agent,
    clock::Tick,
    engine::Capture,
    random,
    sandbox::{MakeError, MakeSpec, Source, Warm, Why, WhyKind},
    words::{Name, Tier},
};

/// Runs until the pools stop.
pub(super) async fn drive(pools: Pools) {
    let inner = Arc::clone(&pools.0);
    let mut vacancy = inner.sandboxes.means().admission.vacancy();
    let mut deaths = inner.sandboxes.deaths();
    // Nothing was looked at yet.
    let mut died = true;
    loop {
        let wake_at = pass(&pools, std::mem::take(&mut died));
        tokio::select! {
            biased;
            () = inner.tasks.stopping() => return,
            () = deaths.changed() => died = true,
            () = inner.wake.notified() => {}
            () = vacancy.appeared() => {
                for pool in pools.list() {
                    pool.with_policy(super::policy::Policy::has_room);
                }
            }
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

/// Looks at every pool once; tells when to look again though nothing happened. `died`: something did in stock.
fn pass(pools: &Pools, died: bool) -> Option<Tick> {
    let inner = &pools.0;
    let mut wake_at: Option<Tick> = None;
    for pool in pools.list() {
        let Some(capture) = inner.templates.current(&pool.key()) else {
            prepare(pools, &pool, died, &mut wake_at);
            continue;
        };
        for warm in pool.outdated(&capture.digest().to_string()) {
            warm.end(Why::of(WhyKind::TemplateChanged));
        }
        let may_begin = inner
            .in_flight_max
            .saturating_sub(inner.in_flight.load(Ordering::Relaxed));
        let (plan, surplus) = pool.plan(may_begin, died);
        for warm in surplus {
            warm.end(Why::of(WhyKind::Surplus));
        }
        inner.in_flight.fetch_add(plan.start, Ordering::Relaxed);
        for _ in 0..plan.start {
            let making = make_one(pools.clone(), Arc::clone(&pool), capture.clone());
            inner.tasks.spawn("making", making);
        }
        wake_at = [wake_at, plan.wake_at].into_iter().flatten().min();
    }
    wake_at
}

/// There is no template to clone from: makes sure that one task sees to it, unless the last one failed of late.
fn prepare(pools: &Pools, pool: &Arc<Pool>, died: bool, wake_at: &mut Option<Tick>) {
    // With nothing to begin from, the plan is asked for its pauses alone.
    let (plan, surplus) = pool.plan(0, died);
    drop(surplus);
    let resting = pool.with_policy(|policy| policy.parked().and_then(|parked| parked.retry_at));
    let now = pools.0.sandboxes.means().clock.tick();
    *wake_at = [*wake_at, plan.wake_at].into_iter().flatten().min();
    if resting.is_some_and(|at| now < at) || !pool.wants() || !pool.begin_preparing() {
        return;
    }
    let (pools, pool) = (pools.clone(), Arc::clone(pool));
    pools.0.tasks.clone().spawn("preparing", async move {
        let key = pool.key();
        let built = tokio::select! {
            biased;
            () = pools.0.tasks.stopping() => return,
            built = pools.0.templates.ensure(&key) => built,
        };
        pool.end_preparing();
        if let Err(error) = built {
            let (reason, message) = (error.reason(), error.chain());
            tracing::warn!(pool = %pool.name(), reason = reason.as_str(), %message, "no template to refill from");
            fail(&pools, &pool, reason, message);
        }
        pools.changed();
    });
}

async fn make_one(pools: Pools, pool: Arc<Pool>, capture: Capture) {
    let inner = &pools.0;
    let begun = inner.sandboxes.means().clock.tick();
    let spec = MakeSpec {
        key: pool.key(),
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
    inner.in_flight.fetch_sub(1, Ordering::Relaxed);
    let lead = inner.sandboxes.means().clock.tick().since(begun);
    match made {
        Ok(warm) => pool.made(Ok(warm), lead),
        Err(error) => {
            match error {
                MakeError::Capacity(full) => {
                    let now = inner.sandboxes.means().clock.tick();
                    pool.with_policy(|policy| policy.no_room(Reason::Capacity, full.to_string(), now));
                }
                MakeError::Journal(error) => {
                    fail(&pools, &pool, error.reason(), error.to_string());
                }
                MakeError::Failed(why) if why.kind == WhyKind::Stopped => {}
                MakeError::Failed(why) => {
                    tracing::warn!(pool = %pool.name(), %why, "refill failed");
                    fail(&pools, &pool, Reason::TemplateFailed, why.to_string());
                }
            }
            pool.made(Err(()), lead);
        }
    }
}

fn fail(pools: &Pools, pool: &Pool, reason: Reason, message: String) {
    let now = pools.0.sandboxes.means().clock.tick();
    let [byte] = random::bytes();
    let jitter = f64::from(byte) / f64::from(u8::MAX);
    pool.with_policy(|policy| policy.failed(reason, message, now, jitter));
}

/// One short probe of stock that was not heard of late; it goes back, or it ends.
pub(super) async fn recheck(pools: Pools, name: Name, warm: Warm) {
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
    match (pools.get(&name), kept) {
        (Some(pool), kept) => pool.rechecked(kept),
        (None, Some(warm)) => warm.end(Why::of(WhyKind::PoolGone)),
        (None, None) => {}
    }
}
