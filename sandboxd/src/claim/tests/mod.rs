//! Claims over the fake engine.

mod refusals;
pub(crate) mod rooms;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use sandbox_protocol::v1;

use self::rooms::{Rooms, key};
use super::{Ask, ClaimError, Granted, Wanted};
use crate::{
    config::TenantPools,
    engine::tests::fake::{Act, Op},
    journal::SyncMode,
    link::fake::within,
    pool::{LeaseBounds, Pool, Source, Spec},
    sandbox::{Life, Why, WhyKind},
    tasks,
    words::Tier,
};

fn ask(request: Option<&str>) -> Ask {
    Ask {
        owner: "operator".into(),
        allowed: TenantPools::All,
        from: Wanted::Pool("p".parse().unwrap()),
        lease_secs: None,
        request: request.map(|key| (key.into(), "digest".into())),
        labels: BTreeMap::new(),
        wait: Duration::from_secs(60),
        warm_only: false,
        env: vec![],
        user: bytes::Bytes::new(),
        layer: None,
        deadline: None,
    }
}

async fn claim(rooms: &Rooms, request: Option<&str>) -> Result<Granted, ClaimError> {
    within(Box::pin(rooms.claims.claim(ask(request)))).await
}

async fn stocked(rooms: &Rooms, warm: u32) -> Arc<Pool> {
    let pools = &rooms.claims.pools;
    let spec = Spec {
        name: "p".parse().unwrap(),
        key: key(),
        warm,
        warm_max: warm,
        lease: LeaseBounds::DEFAULT,
        doors: Default::default(),
        source: Source::Applied,
    };
    let (pool, _written) = pools.apply(spec).unwrap();
    pools.start();
    let mut changes = pools.changes();
    within(async {
        while pool.view().warm < warm {
            changes.changed().await.unwrap();
        }
    })
    .await;
    pool
}

/// C1: many at once, with stock, in line and refill between them: each gets one of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn c01_a_herd_gets_one_each() {
    let rooms = Rooms::with(64, SyncMode::Auto);
    let _pool = stocked(&rooms, 8).await;
    let herd = (0..40).map(|_| {
        let claims = rooms.claims.clone();
        tasks::spawn("claimer", async move { claims.claim(ask(None)).await })
    });
    let mut given = std::collections::BTreeSet::new();
    for one in herd.collect::<Vec<_>>() {
        let granted = within(one).await.unwrap().unwrap();
        assert!(matches!(granted.sandbox.life(), Life::Claimed(claim) if claim.id == granted.claim.id));
        assert!(given.insert(granted.sandbox.id), "given twice");
    }
    assert_eq!(rooms.sandboxes().count(v1::State::Claimed), 40);
}

/// C2: one request, however often it comes and however it is interleaved, is one claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn c02_one_request_key_is_one_claim() {
    let rooms = Rooms::new();
    let _pool = stocked(&rooms, 2).await;
    let same = (0..16).map(|_| {
        let claims = rooms.claims.clone();
        tasks::spawn("claimer", async move { claims.claim(ask(Some("k"))).await })
    });
    let mut claims = std::collections::BTreeSet::new();
    let mut firsts = 0;
    for one in same.collect::<Vec<_>>() {
        let granted = within(one).await.unwrap().unwrap();
        firsts += u32::from(!granted.is_repetition());
        claims.insert((
            granted.sandbox.id,
            granted.claim.id,
            granted.token.as_str().to_owned(),
        ));
    }
    assert_eq!((claims.len(), firsts), (1, 1));
    assert_eq!(rooms.sandboxes().count(v1::State::Claimed), 1);

    let mut other = ask(Some("k"));
    other.request = Some(("k".into(), "another".into()));
    assert!(matches!(
        rooms.claims.claim(other).await,
        Err(ClaimError::KeyReused)
    ));
    let (sandbox, ..) = claims.first().unwrap();
    let sandbox = rooms.sandboxes().get(*sandbox).unwrap();
    rooms.sandboxes().end(&sandbox, Why::of(WhyKind::Released));
    match rooms.claims.claim(ask(Some("k"))).await {
        Err(ClaimError::Ended(why)) => assert_eq!(why.kind, WhyKind::Released),
        other => panic!("{other:?}"),
    }
}

/// Whoever leaves at an await behind the record leaves no claim and no held key.
#[tokio::test]
async fn c02_a_claimer_who_leaves_leaves_nothing() {
    let rooms = Rooms::with(4, SyncMode::Always);
    let _pool = stocked(&rooms, 1).await;
    let leaving = Box::pin(rooms.claims.claim(ask(Some("k"))));
    // The first await is the one for the disk.
    assert!(leaving.now_or_never().is_none());
    let all = rooms.sandboxes().list(None);
    let left = all
        .iter()
        .find(|sandbox| sandbox.life().claim().is_some())
        .unwrap();
    assert!(left.is_ending());
    assert_eq!(left.life().why().unwrap().kind, WhyKind::ClaimFailed);
    let granted = claim(&rooms, Some("k")).await.unwrap();
    assert!(!granted.is_repetition(), "its key is free again");
    assert_ne!(granted.sandbox.id, left.id);
}

/// C4, C5: what died in stock is passed over, and costs its taker nothing.
#[tokio::test]
async fn c04_dead_stock_is_not_given() {
    let rooms = Rooms::new();
    let _pool = stocked(&rooms, 2).await;
    let slots = rooms.engine.living();
    rooms.engine.set(Op::Clone, Some(Act::Hang));
    let mut deaths = rooms.sandboxes().deaths();
    rooms.engine.die(slots[1]);
    within(deaths.changed()).await;
    let granted = claim(&rooms, None).await.unwrap();
    assert!(!granted.sandbox.is_ending());
    assert_eq!(granted.claim.tier, Tier::Warm);
    assert_eq!(granted.sandbox.slot, slots[0]);
}
