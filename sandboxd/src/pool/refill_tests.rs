//! Refill over the fake engine.

use std::{sync::Arc, time::Duration};

use sandbox_protocol::v1;

use super::{LeaseBounds, Pool, Source, Spec, refill::in_turn};
use crate::{
    claim::tests::rooms::{Rooms, boot, key},
    engine::tests::fake::{Act, Op},
    image::Image,
    link::fake::within,
    sandbox::{Sandbox, Warm, WhyKind},
    words::Name,
};

fn set(rooms: &Rooms, name: &str, warm: u32) -> Arc<Pool> {
    rooms.claims.pools.set(Spec {
        name: name.parse().unwrap(),
        key: key(),
        warm,
        warm_max: warm,
        lease: LeaseBounds::DEFAULT,
        doors: Default::default(),
        source: Source::Applied,
    })
}

/// Booted, so its digest is that of an image and of no capture.
async fn booted(rooms: &Rooms) -> (Warm, Arc<Sandbox>) {
    let warm = within(rooms.sandboxes().make(boot())).await.unwrap();
    let sandbox = Arc::clone(warm.sandbox());
    (warm, sandbox)
}

async fn until_stocked(rooms: &Rooms, pool: &Pool, warm: u32) {
    let mut changes = rooms.claims.pools.changes();
    within(async {
        while pool.view().warm != warm {
            changes.changed().await.unwrap();
        }
    })
    .await;
}

fn why(sandbox: &Sandbox) -> Option<WhyKind> {
    sandbox.with_life(|life| life.why().map(|why| why.kind))
}

#[tokio::test]
async fn nothing_of_another_template_comes_into_the_stock() {
    let rooms = Rooms::new();
    let pool = set(&rooms, "one", 2);
    let capture = within(rooms.claims.templates.ensure(&key())).await.unwrap();
    let (kept, stays) = booted(&rooms).await;
    assert!(pool.outdated(Some(Image::absent().digest())).is_empty());
    pool.put(kept);
    assert_eq!((pool.view().warm, why(&stays)), (1, None));

    // Built anew: what is in stock goes, and so does what comes in late, by whichever way.
    let gone = pool.outdated(Some(capture.digest()));
    assert_eq!(gone.len(), 1);
    drop(gone);
    for way in 0..3 {
        let (late, sandbox) = booted(&rooms).await;
        match way {
            0 => pool.put(late),
            1 => {
                assert_eq!(pool.plan(1, false).0.start, 1);
                pool.made(Ok(late), Duration::ZERO);
            }
            _ => pool.rechecked(Some(late)),
        }
        assert_eq!(why(&sandbox), Some(WhyKind::TemplateChanged), "way {way}");
        let view = pool.view();
        assert_eq!((view.warm, view.making), (0, 0), "way {way}");
    }
    // Without a template nothing is stock at all.
    assert!(pool.outdated(None).is_empty());
    let (late, sandbox) = booted(&rooms).await;
    pool.put(late);
    assert_eq!(why(&sandbox), Some(WhyKind::TemplateChanged));
}

#[tokio::test]
async fn stock_of_a_spoiled_capture_ends_and_is_made_anew() {
    let rooms = Rooms::new();
    let pool = set(&rooms, "one", 1);
    let pools = &rooms.claims.pools;
    pools.start();
    until_stocked(&rooms, &pool, 1).await;
    let old = rooms.sandboxes().list(None);
    let capture = rooms.claims.templates.current(&key()).unwrap();
    let mut feed = rooms.sandboxes().read_feed();
    pools.spoil(&key(), capture.digest(), "bytes of it are others".into());
    within(async {
        while why(&old[0]).is_none() {
            feed.next().await;
        }
    })
    .await;
    assert_eq!(why(&old[0]), Some(WhyKind::TemplateChanged));
    until_stocked(&rooms, &pool, 1).await;
    assert!(rooms.claims.templates.current(&key()).is_some());
    within(pools.stop(true)).await;
}

#[tokio::test]
async fn pools_get_their_pieces_in_turn_and_claims_have_the_same_turns() {
    let rooms = Rooms::new();
    within(rooms.claims.templates.ensure(&key())).await.unwrap();
    let (many, few) = (set(&rooms, "early", 4), set(&rooms, "late", 4));
    rooms.engine.set(Op::Clone, Some(Act::Hang));
    let pools = &rooms.claims.pools;
    pools.start();
    within(rooms.engine.until_begun(Op::Clone, 2)).await;
    assert_eq!((many.view().making, few.view().making), (1, 1));
    assert!(!pools.has_turn());
    within(pools.stop(true)).await;
    drop(within(pools.turn()).await);
}

#[test]
fn the_turn_goes_round() {
    let names: Vec<Name> = ["a", "b", "c"].map(|name| name.parse().unwrap()).into();
    let order = |last: Option<&str>| {
        let last: Option<Name> = last.map(|name| name.parse().unwrap());
        let mut list = names.clone();
        in_turn(&mut list, last.as_ref(), |name| name);
        list.iter().map(Name::as_str).collect::<Vec<_>>().concat()
    };
    for (last, then) in [
        (None, "abc"),
        (Some("a"), "bca"),
        (Some("c"), "abc"),
        (Some("bb"), "cab"),
    ] {
        assert_eq!(order(last), then);
    }
}

#[tokio::test]
async fn a_piece_that_was_out_for_a_probe_goes_back_to_its_own_pool() {
    let rooms = Rooms::new();
    let old = set(&rooms, "one", 1);
    let (warm, sandbox) = booted(&rooms).await;
    rooms.claims.pools.remove(old.name());
    let new = set(&rooms, "one", 1);
    within(super::refill::recheck(rooms.claims.pools.clone(), old, warm)).await;
    assert_eq!(new.view().warm, 0);
    assert_eq!(why(&sandbox), Some(WhyKind::PoolGone));
}

#[tokio::test]
async fn claims_of_pools_that_are_gone_leave_no_count() {
    let rooms = Rooms::new();
    let sandboxes = rooms.sandboxes();
    for name in ["one", "two"] {
        drop(set(&rooms, name, 0));
    }
    assert_eq!(sandboxes.counted_pools(), 2);
    let name = "one".parse().unwrap();
    rooms.claims.pools.remove(&name);
    assert_eq!(sandboxes.counted_pools(), 1);
    assert_eq!(sandboxes.count(v1::State::Claimed), 0);
}
