//! What a claim is refused for before anything is lost.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use super::rooms::{Rooms, boot, key};
use crate::{
    claim::{Ask, ClaimError, Granted, Wanted},
    config::TenantPools,
    journal::{AppendError, Transition},
    link::fake::within,
    pool::{LeaseBounds, Pool, Source, Spec},
    tasks,
    words::{Name, PoolKey},
};

fn ask(from: Wanted, allowed: TenantPools) -> Ask {
    Ask {
        owner: "tenant".into(),
        from,
        allowed,
        lease_secs: None,
        request: None,
        labels: BTreeMap::new(),
        wait: Duration::from_secs(60),
        warm_only: true,
        env: vec![],
        user: bytes::Bytes::new(),
        layer: None,
        deadline: None,
    }
}

async fn claim(rooms: &Rooms, ask: Ask) -> Result<Granted, ClaimError> {
    within(Box::pin(rooms.claims.claim(ask))).await
}

fn spec(name: &str, key: PoolKey) -> Spec {
    Spec {
        name: name.parse().unwrap(),
        key,
        warm: 0,
        warm_max: 4,
        lease: LeaseBounds::DEFAULT,
        doors: Default::default(),
        source: Source::Applied,
    }
}

async fn stocked(rooms: &Rooms, name: &str) -> Arc<Pool> {
    let pool = rooms.claims.pools.set(spec(name, key()));
    let mut made = boot();
    made.pool = Some(pool.name().clone());
    rooms
        .claims
        .pools
        .put_back(within(rooms.sandboxes().make(made)).await.unwrap());
    assert_eq!(pool.view().warm, 1);
    pool
}

#[tokio::test]
async fn a_journal_that_takes_nothing_costs_no_stock() {
    let rooms = Rooms::new();
    let pool = stocked(&rooms, "one").await;
    // Its folder is gone: the next segment cannot be made, and that is final.
    std::fs::remove_dir_all(rooms.dir.path().join("state")).unwrap();
    let record = Transition::Drain { on: false };
    while rooms.journal.append(None, &record).is_ok() {}
    let from = Wanted::Pool(pool.name().clone());
    let refused = claim(&rooms, ask(from, TenantPools::All)).await;
    assert!(matches!(refused, Err(ClaimError::Journal(AppendError::Failed))));
    assert_eq!(pool.view().warm, 1, "nothing was taken");
}

#[tokio::test]
async fn a_key_means_the_first_pool_that_the_caller_may_use() {
    let rooms = Rooms::new();
    let (theirs, ours) = (stocked(&rooms, "a-theirs").await, stocked(&rooms, "b-ours").await);
    let only = |name: &Name| TenantPools::Named([name.clone()].into());
    let granted = claim(&rooms, ask(Wanted::Key(key()), only(ours.name())))
        .await
        .unwrap();
    assert_eq!(granted.claim.pool.as_ref(), Some(ours.name()));
    assert_eq!((theirs.view().warm, ours.view().warm), (1, 0));

    let by_name = ask(Wanted::Pool(theirs.name().clone()), only(ours.name()));
    assert!(matches!(
        claim(&rooms, by_name).await,
        Err(ClaimError::PoolNotFound(name)) if name == *theirs.name()
    ));
    let none = ask(Wanted::Key(key()), only(&"other".parse().unwrap()));
    assert!(matches!(
        claim(&rooms, none).await,
        Err(ClaimError::NotAllowed(_))
    ));
}

/// A pool that is given another key is another pool of the same name: whoever waits, waits for that.
#[tokio::test]
async fn whoever_waits_goes_along_when_a_pool_is_keyed_anew() {
    let rooms = Rooms::new();
    let mut other = key();
    other.size = "large".parse().unwrap();
    let old = rooms.claims.pools.set(spec("one", other));
    let claims = rooms.claims.clone();
    let from = Wanted::Pool(old.name().clone());
    let waiting = tasks::spawn(
        "claim",
        async move { claims.claim(ask(from, TenantPools::All)).await },
    );
    let mut changes = rooms.claims.pools.changes();
    within(async {
        while old.view().waiting == 0 {
            changes.changed().await.unwrap();
        }
    })
    .await;
    let mut made = boot();
    made.pool = Some(old.name().clone());
    let warm = within(rooms.sandboxes().make(made)).await.unwrap();
    rooms.claims.pools.set(spec("one", key()));
    rooms.claims.pools.put_back(warm);
    let granted = within(waiting).await.unwrap().unwrap();
    assert_eq!(granted.sandbox.key, key());
    assert_eq!(granted.claim.pool.as_ref(), Some(old.name()));
}
