//! The services over rooms with the fake engine: bounds, who sees what, how streams end.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use arc_swap::ArcSwap;
use futures_util::StreamExt as _;
use sandbox_protocol::{reason::Reason, v1};
use tonic::{Request, Status};
use tonic_types::StatusExt as _;

use super::{
    claims::ClaimsService,
    desk::{Changing, Desk, Host, Inner, Reloaded},
    node::NodeService,
    pools::PoolsService,
};
use crate::{
    access::{Access, Grant, Role, TokenHash},
    claim::tests::rooms::{Rooms, key},
    clock::WallTime,
    config::TenantPools,
    doctor::Check,
    engine::Engine,
    journal::SyncMode,
    link::fake::within,
    pool::{LeaseBounds, Source, Spec},
    telemetry::admin::{Phase, Readiness},
    words::MemBytes,
};
use v1::{claims_server::Claims as _, node_server::Node as _, pools_server::Pools as _};

#[derive(Debug)]
struct NoHost;

impl Host for NoHost {
    fn reload(&self) -> Result<Reloaded, String> {
        Err("nothing to read".into())
    }

    fn doctor(&self) -> Vec<Check> {
        vec![]
    }

    fn name(&self) -> String {
        "host".into()
    }

    fn memory_budget(&self) -> MemBytes {
        MemBytes::from_mib(4096)
    }

    fn started_at(&self) -> WallTime {
        WallTime::from_micros(1)
    }
}

/// A desk that serves. `sba_op` is an operator's token, `sba_acme` that of a tenant who may claim from these pools; none:
/// from all.
pub(super) fn desk(rooms: &Rooms, acme: &[&str]) -> Desk {
    let grant = |text: &str, role| Grant {
        name: "it".parse().unwrap(),
        hash: TokenHash::of(text),
        role,
    };
    let access = Access {
        grants: vec![
            grant("sba_op", Role::Operator),
            grant("sba_acme", Role::Tenant("acme".parse().unwrap())),
        ],
        operator_gid: None,
        daemon_uid: u32::MAX,
    };
    let named: BTreeSet<_> = acme.iter().map(|name| name.parse().unwrap()).collect();
    let tenants = if named.is_empty() {
        BTreeMap::new()
    } else {
        BTreeMap::from([("acme".parse().unwrap(), TenantPools::Named(named))])
    };
    let readiness = Readiness::new();
    readiness.advance(Phase::Ready);
    Desk::new(Inner {
        claims: rooms.claims.clone(),
        access: Arc::new(ArcSwap::from_pointee(access)),
        tenants: Arc::new(ArcSwap::from_pointee(tenants)),
        changing: Changing::default(),
        readiness,
        host: Arc::new(NoHost),
        engine: Arc::new(rooms.engine.clone()) as Arc<dyn Engine>,
    })
}

fn from<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {token}").parse().unwrap();
    request.metadata_mut().insert("authorization", value);
    request
}

fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    details.error_info().unwrap().reason.clone()
}

fn by_key() -> v1::ClaimsClaimRequest {
    v1::ClaimsClaimRequest {
        source: Some(v1::claims_claim_request::Source::Key(key().to_proto())),
        wait_ms: Some(0),
        ..v1::ClaimsClaimRequest::default()
    }
}

async fn claim(desk: &Desk, token: &str) -> v1::ClaimsClaimReply {
    let request = from(token, by_key());
    within(ClaimsService(desk.clone()).claim(request))
        .await
        .unwrap()
        .into_inner()
}

fn add_pools(rooms: &Rooms, names: &[&str]) {
    for name in names {
        let spec = Spec {
            name: name.parse().unwrap(),
            key: key(),
            warm: 0,
            warm_max: 0,
            lease: LeaseBounds::DEFAULT,
            doors: Default::default(),
            source: Source::File,
        };
        drop(rooms.claims.pools.set(spec));
    }
}

#[tokio::test]
async fn filters_have_bounds() {
    let rooms = Rooms::new();
    let desk = desk(&rooms, &[]);
    let list = v1::ClaimsListRequest::default;
    let label = |n: usize| (format!("k{n}"), String::new());
    let bad = [
        v1::ClaimsListRequest {
            states: vec![0],
            ..list()
        },
        v1::ClaimsListRequest {
            states: vec![99],
            ..list()
        },
        v1::ClaimsListRequest {
            pools: vec!["p".into(); 65],
            ..list()
        },
        v1::ClaimsListRequest {
            pools: vec!["No Name".into()],
            ..list()
        },
        v1::ClaimsListRequest {
            labels: (0..17).map(label).collect(),
            ..list()
        },
        v1::ClaimsListRequest {
            owner: Some("o".repeat(33)),
            ..list()
        },
    ];
    let service = ClaimsService(desk.clone());
    for wanted in bad {
        let watch = v1::ClaimsWatchRequest {
            states: wanted.states.clone(),
            pools: wanted.pools.clone(),
            labels: wanted.labels.clone(),
            owner: wanted.owner.clone(),
        };
        let refused = service.list(from("sba_op", wanted)).await.unwrap_err();
        assert_eq!(reason(&refused), Reason::FieldInvalid.as_str());
        let refused = service.watch(from("sba_op", watch)).await.err().unwrap();
        assert_eq!(reason(&refused), Reason::FieldInvalid.as_str());
    }
    let names = v1::PoolsWatchRequest {
        pools: vec!["p".into(); 65],
    };
    let refused = PoolsService(desk).watch(from("sba_op", names)).await;
    assert_eq!(reason(&refused.err().unwrap()), Reason::FieldInvalid.as_str());
    // A state that is named often is one state.
    let often = v1::ClaimsListRequest {
        states: vec![v1::State::Warm.into(); 10_000],
        ..list()
    };
    assert!(service.list(from("sba_op", often)).await.is_ok());
}

#[tokio::test]
async fn what_the_guest_would_refuse_costs_no_sandbox() {
    let rooms = Rooms::new();
    let service = ClaimsService(desk(&rooms, &[]));
    let var = |key: &'static str, value: &'static str| v1::EnvVar {
        key: key.into(),
        value: value.into(),
    };
    let env = |env| v1::ClaimsClaimRequest { env, ..by_key() };
    let user = |user: &str| v1::ClaimsClaimRequest {
        user: user.to_owned().into(),
        ..by_key()
    };
    for bad in [
        env(vec![var("", "x")]),
        env(vec![var("a=b", "x")]),
        env(vec![var("a\0", "x")]),
        env(vec![var("a", "x\0")]),
        env(vec![var("a", ""); 1025]),
        user("a\0"),
        user(&"u".repeat(129)),
    ] {
        let refused = service.claim(from("sba_op", bad)).await.unwrap_err();
        assert_eq!(reason(&refused), Reason::FieldInvalid.as_str());
    }
    assert!(rooms.sandboxes().list(None).is_empty());
}

#[tokio::test]
async fn a_claimer_is_shown_its_own_sandbox() {
    let rooms = Rooms::new();
    let desk = desk(&rooms, &[]);
    let (mine, other) = (claim(&desk, "sba_op").await, claim(&desk, "sba_op").await);
    let service = ClaimsService(desk.clone());
    let all = v1::ClaimsListRequest::default;
    let listed = service.list(from(&mine.token, all())).await.unwrap().into_inner();
    let ids: Vec<_> = listed.sandboxes.iter().map(|row| &row.sandbox).collect();
    assert_eq!((ids, listed.next_page_token.as_str()), (vec![&mine.sandbox], ""));
    let behind = v1::ClaimsListRequest {
        page_token: mine.sandbox.clone(),
        ..all()
    };
    let listed = service.list(from(&mine.token, behind)).await.unwrap();
    assert!(listed.into_inner().sandboxes.is_empty());

    let request = from(&mine.token, v1::ClaimsWatchRequest::default());
    let mut events = service.watch(request).await.unwrap().into_inner();
    for id in [&other.sandbox, &mine.sandbox] {
        let request = v1::ClaimsReleaseRequest { sandbox: id.clone() };
        let released = service
            .release(from("sba_op", request))
            .await
            .unwrap()
            .into_inner();
        assert!(released.recorded && !released.already);
    }
    // The other one's end was told before this one's, to those who may know of it.
    let mut states = vec![];
    while states.last() != Some(&v1::State::Gone) {
        let reply = within(events.next()).await.unwrap().unwrap();
        if let Some(v1::claims_watch_reply::Event::Sandbox(row)) = reply.event {
            assert_eq!(row.sandbox, mine.sandbox);
            states.push(row.state());
        }
    }
    assert!(states.len() > 1, "{states:?}");
}

#[tokio::test]
async fn a_drain_ends_streams_with_a_reason() {
    let rooms = Rooms::new();
    let desk = desk(&rooms, &[]);
    let request = from("sba_op", v1::ClaimsWatchRequest::default());
    let mut claims = ClaimsService(desk.clone())
        .watch(request)
        .await
        .unwrap()
        .into_inner();
    let request = from("sba_op", v1::PoolsWatchRequest::default());
    let mut pools = PoolsService(desk.clone())
        .watch(request)
        .await
        .unwrap()
        .into_inner();
    assert!(within(claims.next()).await.unwrap().is_ok());
    assert!(within(pools.next()).await.unwrap().is_ok());
    desk.readiness.advance(Phase::Draining);
    for last in [
        within(claims.next()).await.unwrap().unwrap_err(),
        within(pools.next()).await.unwrap().unwrap_err(),
    ] {
        assert_eq!(reason(&last), Reason::Draining.as_str());
    }
    assert!(within(claims.next()).await.is_none() && within(pools.next()).await.is_none());
}

#[tokio::test]
async fn a_tenant_sees_and_gets_its_own_pools() {
    let rooms = Rooms::new();
    let desk = desk(&rooms, &["b"]);
    add_pools(&rooms, &["a", "b"]);
    let pools = PoolsService(desk.clone());
    for (token, names) in [("sba_op", vec!["a", "b"]), ("sba_acme", vec!["b"])] {
        let listed = pools.list(from(token, v1::PoolsListRequest {})).await.unwrap();
        let listed = listed.into_inner().pools.into_iter();
        let shown: Vec<_> = listed.map(|pool| pool.spec.unwrap().name).collect();
        assert_eq!(shown, names, "{token}");
    }
    // Both pools have the key; the operator gets the first, the tenant its own.
    assert_eq!(claim(&desk, "sba_op").await.pool, "a");
    assert_eq!(claim(&desk, "sba_acme").await.pool, "b");
    let service = ClaimsService(desk.clone());
    let by_name = v1::ClaimsClaimRequest {
        source: Some(v1::claims_claim_request::Source::Pool("a".into())),
        ..by_key()
    };
    let refused = service.claim(from("sba_acme", by_name)).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::PoolNotFound.as_str());
    rooms.claims.pools.remove(&"b".parse().unwrap());
    let refused = service.claim(from("sba_acme", by_key())).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::NotAllowed.as_str());

    let node = NodeService(desk);
    let info = |token| node.info(from(token, v1::NodeInfoRequest {}));
    let (operator, tenant) = (info("sba_op").await.unwrap(), info("sba_acme").await.unwrap());
    assert_eq!(operator.get_ref().memory_budget_mib, 4096);
    assert_eq!(tenant.get_ref().memory_budget_mib, 0);
    assert_eq!(tenant.get_ref().accel_why, "");
}

#[tokio::test]
async fn changes_wait_for_the_disk_where_they_are_to() {
    let rooms = Rooms::with(4, SyncMode::Always);
    let desk = desk(&rooms, &[]);
    let syncs = || {
        let all = rooms.sandboxes().means().metrics.render();
        let line = all
            .lines()
            .find(|line| line.contains("journal_sync_seconds_count"));
        line.unwrap().rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let claimed = claim(&desk, "sba_op").await;
    let before = syncs();
    let request = v1::ClaimsReleaseRequest {
        sandbox: claimed.sandbox,
    };
    let released = ClaimsService(desk.clone()).release(from("sba_op", request)).await;
    assert!(released.unwrap().into_inner().recorded);
    assert_eq!(syncs(), before + 1);
    let pools = PoolsService(desk);
    let spec = v1::PoolSpec {
        name: "p".into(),
        key: Some(key().to_proto()),
        ..v1::PoolSpec::default()
    };
    let request = v1::PoolsApplyRequest { spec: Some(spec) };
    assert!(pools.apply(from("sba_op", request)).await.is_ok());
    assert_eq!(syncs(), before + 2);
    let request = v1::PoolsDeleteRequest { name: "p".into() };
    assert!(pools.delete(from("sba_op", request)).await.is_ok());
    assert_eq!(syncs(), before + 3);
}
