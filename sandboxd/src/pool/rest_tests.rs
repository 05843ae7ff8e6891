//! Refill over the fake engine: what it makes, when it rests, and what wakes it.

use std::{sync::Arc, time::Duration};

use sandbox_protocol::{limits, reason::Reason};

use super::{LeaseBounds, Pool, Source, Spec};
use crate::{
    claim::tests::rooms::{Rooms, key},
    engine::tests::fake::{Act, Op},
    journal::SyncMode,
    link::fake::within,
    sandbox::{Why, WhyKind},
};

/// A hang, by real or paused time.
const LONG: Duration = Duration::from_secs(4 * 3600);

fn spec(name: &str, warm: u32) -> Spec {
    Spec {
        name: name.parse().unwrap(),
        key: key(),
        warm,
        warm_max: warm,
        lease: LeaseBounds {
            secs: 60,
            max_secs: limits::LEASE_MAX_SECS,
        },
        doors: Default::default(),
        source: Source::Applied,
    }
}

/// Waits until a pool is as wanted; paused time may pass.
async fn until(rooms: &Rooms, wanted: impl Fn() -> bool) {
    let mut changes = rooms.claims.pools.changes();
    let waiting = async {
        while !wanted() {
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(LONG, waiting).await.expect("it comes to be");
}

fn pool(rooms: &Rooms, warm: u32) -> Arc<Pool> {
    let (pool, _written) = rooms.claims.pools.apply(spec("p", warm)).unwrap();
    rooms.claims.pools.start();
    pool
}

/// Two pools with one key: the template is built once, and both get what they want of it.
#[tokio::test]
async fn one_build_serves_every_pool_that_waits_for_it() {
    let rooms = Rooms::with(8, SyncMode::Auto);
    let (other, _written) = rooms.claims.pools.apply(spec("q", 1)).unwrap();
    let pool = pool(&rooms, 2);
    within(until(&rooms, || {
        pool.view().warm == 2 && other.view().warm == 1 && pool.view().making == 0
    }))
    .await;
    assert_eq!(rooms.engine.begun(Op::Boot), 1);
    // One of them is the build's own check.
    assert_eq!(rooms.engine.begun(Op::Clone), 4);
    assert_eq!(rooms.held(), 3);
}

/// C19: what fails again and again is parked, with its reason and a pause, and comes back by itself. (How its pauses grow
/// is the policy's own test.)
#[tokio::test]
async fn c19_failures_park_a_pool_and_success_clears_it() {
    let rooms = Rooms::new();
    let pool = pool(&rooms, 1);
    until(&rooms, || pool.view().warm == 1).await;
    rooms.engine.set(Op::Clone, Some(Act::Fail));
    let before = rooms.engine.begun(Op::Clone);
    pool.take().unwrap().end(Why::of(WhyKind::Surplus));
    let failing = Reason::TemplateFailed.as_str();
    let is_parked = || {
        let parked = pool.view().parked;
        parked.is_some_and(|parked| parked.reason == failing && parked.retry_at.is_some())
    };
    until(&rooms, is_parked).await;
    within(rooms.engine.until_begun(Op::Clone, before + 3)).await;
    rooms.engine.set(Op::Clone, None);
    until(&rooms, || pool.view().warm == 1 && pool.view().parked.is_none()).await;
    assert_eq!(rooms.engine.living().len(), 1);
}

/// H7: without room a pool rests, however long, until room appears.
#[tokio::test(start_paused = true)]
async fn h07_a_full_node_parks_a_pool_until_room_appears() {
    let rooms = Rooms::with(1, SyncMode::Auto);
    let pool = pool(&rooms, 2);
    until(&rooms, || pool.view().warm == 1 && pool.view().making == 0).await;
    let parked = pool.view().parked.expect("it wants two");
    assert_eq!(parked.reason, Reason::Capacity.as_str());
    assert!(parked.retry_at.is_none(), "only news of room helps");
    let begun = rooms.engine.begun(Op::Clone);
    tokio::time::sleep(LONG).await;
    assert_eq!(
        rooms.engine.begun(Op::Clone),
        begun,
        "and nothing is tried meanwhile"
    );

    pool.take().unwrap().end(Why::of(WhyKind::Surplus));
    until(&rooms, || {
        rooms.engine.begun(Op::Clone) > begun && pool.view().warm == 1
    })
    .await;
    assert_eq!(rooms.held(), 1);
}

/// A build that fails parks the pools that wait for it, and nothing of it is left; later it is tried again.
#[tokio::test]
async fn a_failed_build_parks_and_is_tried_again() {
    let rooms = Rooms::new();
    rooms.engine.set(Op::Hello, Some(Act::Fail));
    let pool = pool(&rooms, 1);
    until(&rooms, || pool.view().parked.is_some()).await;
    assert_eq!(
        pool.view().parked.unwrap().reason,
        Reason::TemplateFailed.as_str()
    );
    rooms.engine.set(Op::Hello, None);
    until(&rooms, || pool.view().warm == 1).await;
    assert!(pool.view().parked.is_none());
    assert_eq!(rooms.engine.living().len(), 1);
}

/// C5: a death in stock is news, not the find of a tick.
#[tokio::test]
async fn c05_a_death_in_stock_is_made_good() {
    let rooms = Rooms::new();
    let pool = pool(&rooms, 2);
    within(until(&rooms, || pool.view().warm == 2 && pool.view().making == 0)).await;
    let begun = rooms.engine.begun(Op::Clone);
    rooms.engine.die(rooms.engine.living()[0]);
    within(until(&rooms, || {
        rooms.engine.begun(Op::Clone) == begun + 1 && pool.view().warm == 2 && pool.view().making == 0
    }))
    .await;
}

/// A pool that is deleted ends its stock, and what was being made for it.
#[tokio::test(start_paused = true)]
async fn a_deleted_pool_leaves_nothing() {
    let rooms = Rooms::new();
    let pool = pool(&rooms, 1);
    until(&rooms, || pool.view().warm == 1).await;
    rooms.engine.set(Op::Hello, Some(Act::Hang));
    let (_pool, _written) = rooms.claims.pools.apply(spec("p", 2)).unwrap();
    until(&rooms, || pool.view().making == 1).await;
    let _written = rooms.claims.pools.delete(pool.name()).unwrap();
    let mut vacancy = rooms.sandboxes().means().admission.vacancy();
    let empty = async {
        while rooms.held() > 0 {
            vacancy.appeared().await;
        }
    };
    tokio::time::timeout(LONG, empty).await.expect("nothing is left");
    assert_eq!(rooms.engine.living(), []);
}
