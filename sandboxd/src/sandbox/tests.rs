//! One life with each of its steps failing and hanging, over the fake engine.

use std::{sync::Arc, time::Duration};

use sandbox_protocol::{id::ClaimId, v1};

use super::*;
use crate::{
    access::TokenHash,
    claim::tests::rooms::{Rooms, boot, key},
    clock::WallTime,
    engine::tests::fake::{Act, Op},
    journal::{self, Filter, Line},
    link::fake::within,
    names::SlotNumber,
    tasks,
    words::{OPERATOR, Tier},
};

fn claim(rooms: &Rooms, lease: Duration) -> Claim {
    let clock = &rooms.sandboxes().means().clock;
    Claim {
        id: ClaimId::from_random([3; 16]),
        owner: "operator".into(),
        token_hash: TokenHash::of("token"),
        labels: Arc::default(),
        pool: None,
        tier: Tier::Cold,
        claimed_at: WallTime::from_micros(1),
        lease: Lease {
            secs: 1,
            until: clock.tick().plus(lease),
            expires_at: clock.wall().plus(lease),
        },
        layer: None,
        request: None,
    }
}

const HOUR: Duration = Duration::from_secs(3600);

async fn warm(rooms: &Rooms) -> Warm {
    within(rooms.sandboxes().make(boot())).await.unwrap()
}

/// Waits until a sandbox is in a state.
async fn until(rooms: &Rooms, sandbox: &Sandbox, state: v1::State) {
    within(becomes(rooms, sandbox, state)).await;
}

async fn becomes(rooms: &Rooms, sandbox: &Sandbox, state: v1::State) {
    let mut feed = rooms.sandboxes().read_feed();
    while sandbox.life().state() != state {
        feed.next().await;
    }
}

/// Waits until no slot is held.
async fn until_free(rooms: &Rooms) {
    until_held(rooms, 0).await;
}

async fn until_held(rooms: &Rooms, held: u32) {
    let mut vacancy = rooms.sandboxes().means().admission.vacancy();
    within(async {
        while rooms.held() != held {
            vacancy.appeared().await;
        }
    })
    .await;
}

fn only(rooms: &Rooms) -> Arc<Sandbox> {
    let all = rooms.sandboxes().list(None);
    assert_eq!(all.len(), 1);
    Arc::clone(&all[0])
}

/// The names of the transitions in the log, in order.
fn recorded(rooms: &Rooms) -> Vec<String> {
    let log = journal::cat(&rooms.dir.path().join("state"), Filter::default()).unwrap();
    let name = |json: &str| {
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        let transition = &value["do"];
        match transition.as_str() {
            Some(name) => name.to_owned(),
            None => transition.as_object().unwrap().keys().next().unwrap().clone(),
        }
    };
    let mut names = Vec::new();
    for line in log {
        match line.unwrap() {
            Line::Record { json, .. } => names.push(name(&json)),
            damaged @ Line::Damaged { .. } => panic!("{damaged}"),
        }
    }
    names
}

/// Whatever a making hangs in, the wish to end it comes through, and nothing is left.
#[tokio::test(start_paused = true)]
async fn inv_21_each_effect_hangs() {
    for op in [Op::Boot, Op::Hello, Op::Call] {
        let rooms = Rooms::new();
        rooms.engine.set(op, Some(Act::Hang));
        let sandboxes = rooms.sandboxes().clone();
        let making = tasks::spawn("making", async move { sandboxes.make(boot()).await });
        within(rooms.engine.until_begun(op, 1)).await;
        let sandbox = only(&rooms);
        let applied = rooms.sandboxes().end(&sandbox, Why::of(WhyKind::PoolGone));
        assert!(applied.is_some(), "{op:?}");
        assert!(
            rooms
                .sandboxes()
                .end(&sandbox, Why::of(WhyKind::Released))
                .is_none(),
            "{op:?}: the first ender wins"
        );
        match within(making).await.unwrap() {
            Err(MakeError::Failed(why)) => assert_eq!(why.kind, WhyKind::PoolGone, "{op:?}"),
            other => panic!("{op:?}: {other:?}"),
        }
        until(&rooms, &sandbox, v1::State::Gone).await;
        until_free(&rooms).await;
        assert_eq!(rooms.engine.living(), [], "{op:?}");
        assert_eq!(recorded(&rooms), ["making", "ending", "gone"], "{op:?}");
    }
}

/// Nobody ends it: each step has its own limit.
#[tokio::test(start_paused = true)]
async fn inv_21_what_hangs_ends_by_its_limit() {
    for op in [Op::Boot, Op::Hello, Op::Call] {
        let rooms = Rooms::new();
        rooms.engine.set(op, Some(Act::Hang));
        let made = tokio::time::timeout(HOUR, rooms.sandboxes().make(boot())).await;
        match made.expect("it ends by its limit") {
            Err(MakeError::Failed(why)) => assert_eq!(why.kind, WhyKind::MakeFailed, "{op:?}"),
            other => panic!("{op:?}: {other:?}"),
        }
        until_free(&rooms).await;
        assert_eq!(rooms.engine.living(), [], "{op:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_steps_leave_nothing() {
    for op in [Op::Boot, Op::Hello, Op::Call] {
        let rooms = Rooms::new();
        rooms.engine.set(op, Some(Act::Fail));
        assert!(matches!(
            within(rooms.sandboxes().make(boot())).await,
            Err(MakeError::Failed(why)) if why.kind == WhyKind::MakeFailed
        ));
        until_free(&rooms).await;
        assert_eq!(rooms.engine.living(), [], "{op:?}");
        assert_eq!(recorded(&rooms), ["making", "ending", "gone"], "{op:?}");
    }
}

/// A clone whose guest finds no door that refuses, or another's, is none.
#[tokio::test]
async fn door_that_does_not_refuse_makes_no_sandbox() {
    let said = |http: &str, socks5: &'static [u8]| v1::DoorsSaid {
        http: http.to_owned().into(),
        socks5: bytes::Bytes::from_static(socks5),
    };
    for (said, why) in [
        (said("", b""), "the http door does not answer in the guest"),
        (
            said("HTTP/1.1 200 OK", &[5, 0xff]),
            "the http door did not refuse in the guest, but said: HTTP/1.1 200 OK",
        ),
        // It says so, and no connection of its came to this door.
        (
            said("HTTP/1.1 403 not_armed", &[5, 0xff]),
            "the guest's http door is not the host's",
        ),
    ] {
        let rooms = Rooms::new();
        rooms.engine.guests_say(Some(said));
        match within(rooms.sandboxes().make(boot())).await {
            Err(MakeError::Failed(told)) => {
                assert_eq!(told.kind, WhyKind::MakeFailed);
                assert!(told.to_string().ends_with(why), "{told}");
            }
            other => panic!("{other:?}"),
        }
        until_free(&rooms).await;
        assert_eq!(rooms.engine.living(), []);
        assert_eq!(recorded(&rooms), ["making", "ending", "gone"]);
    }
}

/// An agent of an older build does not know the question: the host asks its own end.
#[tokio::test]
async fn doors_of_a_guest_that_cannot_be_asked_are_proved_at_the_host() {
    let rooms = Rooms::new();
    rooms.engine.guests_say(None);
    let warm = warm(&rooms).await;
    assert!(warm.sandbox().door().is_linked());
    assert_eq!(warm.sandbox().door().denials().len(), 0);

    // One that does not refuse makes no sandbox.
    let rooms = Rooms::new();
    rooms.engine.guests_say(None);
    let sandboxes = rooms.sandboxes().clone();
    let making = tasks::spawn("making", async move { sandboxes.make(boot()).await });
    within(rooms.engine.until_begun(Op::Call, 1)).await;
    let means = rooms.sandboxes().means();
    let sides = means.egress.book().sides(None, OPERATOR, None);
    only(&rooms)
        .door()
        .arm(ClaimId::from_random([4; 16]), OPERATOR.into(), None, sides);
    match within(making).await.unwrap() {
        Err(MakeError::Failed(told)) => {
            let why = "the http door does not answer in the guest";
            assert!(told.to_string().ends_with(why), "{told}");
        }
        other => panic!("{other:?}"),
    }
    until_free(&rooms).await;
}

/// A machine that does not end, whether its end fails or hangs, keeps its slot and its state until it does.
#[tokio::test(start_paused = true)]
async fn inv_11_stuck_teardown_keeps_slot() {
    for act in [Act::Fail, Act::Hang] {
        let rooms = Rooms::new();
        let stuck = warm(&rooms).await;
        let sandbox = Arc::clone(stuck.sandbox());
        assert_eq!(sandbox.slot, SlotNumber(0));
        rooms.engine.set(Op::Kill, Some(act));
        stuck.end(Why::of(WhyKind::Surplus));
        let attempts = tokio::time::timeout(4 * HOUR, rooms.engine.until_begun(Op::Kill, 5));
        attempts.await.expect("it is tried again for ever");
        assert_eq!(sandbox.life().state(), v1::State::Ending, "{act:?}");
        assert_eq!(rooms.held(), 1, "{act:?}");
        let other = warm(&rooms).await;
        assert_eq!(other.sandbox().slot, SlotNumber(1), "{act:?}");
        assert!(!recorded(&rooms).contains(&"gone".to_owned()), "{act:?}");

        rooms.engine.set(Op::Kill, None);
        let gone = tokio::time::timeout(4 * HOUR, becomes(&rooms, &sandbox, v1::State::Gone));
        gone.await.expect("the next attempt ends it");
        until_held(&rooms, 1).await;
        assert_eq!(rooms.engine.living(), [SlotNumber(1)], "{act:?}");
        let third = warm(&rooms).await;
        assert_eq!(third.sandbox().slot, SlotNumber(0), "{act:?}");
    }
}

/// C7: several enders at once, one teardown.
#[tokio::test]
async fn c07_several_enders_are_one_teardown() {
    let rooms = Rooms::new();
    let (sandbox, _written) = warm(&rooms).await.claim(claim(&rooms, HOUR)).unwrap();
    let enders = (0..16).map(|_| {
        let (sandboxes, sandbox) = (rooms.sandboxes().clone(), Arc::clone(&sandbox));
        tasks::spawn("ender", async move {
            sandboxes.end(&sandbox, Why::of(WhyKind::Released)).is_some()
        })
    });
    let mut won = 0;
    for ender in enders.collect::<Vec<_>>() {
        won += u32::from(within(ender).await.unwrap());
    }
    assert_eq!(won, 1);
    until(&rooms, &sandbox, v1::State::Gone).await;
    until_free(&rooms).await;
    assert_eq!(rooms.engine.begun(Op::Kill), 1);
    assert_eq!(
        recorded(&rooms),
        ["making", "warmed", "claimed", "ending", "gone"]
    );
    assert!(rooms.sandboxes().means().reaper.is_empty());
}

/// C9, C5: what left the pool is destroyed, and what died in a claimer's hand is not given.
#[tokio::test]
async fn c09_what_left_the_pool_is_claimed_or_destroyed() {
    let rooms = Rooms::new();
    let dropped = warm(&rooms).await;
    let sandbox = Arc::clone(dropped.sandbox());
    drop(dropped);
    until(&rooms, &sandbox, v1::State::Gone).await;
    assert_eq!(sandbox.life().why().unwrap().kind, WhyKind::Abandoned);

    let mut deaths = rooms.sandboxes().deaths();
    let dead = warm(&rooms).await;
    let sandbox = Arc::clone(dead.sandbox());
    rooms.engine.die(sandbox.slot);
    within(deaths.changed()).await;
    assert!(sandbox.is_ending());
    assert!(matches!(
        dead.claim(claim(&rooms, HOUR)),
        Err(ApplyError::Refused)
    ));
    until(&rooms, &sandbox, v1::State::Gone).await;
    assert_eq!(sandbox.life().why().unwrap().kind, WhyKind::VmExited);
    assert!(sandbox.life().claim().is_none());
    until_free(&rooms).await;
}

/// C5: the claimer of what died is told, until it releases or its lease is over.
#[tokio::test]
async fn c05_a_death_is_told_to_its_claimer() {
    let rooms = Rooms::new();
    for by_lease in [false, true] {
        let (sandbox, _written) = warm(&rooms).await.claim(claim(&rooms, HOUR)).unwrap();
        rooms.engine.die(sandbox.slot);
        until(&rooms, &sandbox, v1::State::Failed).await;
        assert_eq!(rooms.engine.living(), []);
        assert!(!rooms.sandboxes().means().reaper.is_empty());
        if by_lease {
            let why = Why::of(WhyKind::LeaseExpired);
            assert!(rooms.sandboxes().end(&sandbox, why).is_some());
        } else {
            let why = Why::of(WhyKind::Released);
            assert!(rooms.sandboxes().end(&sandbox, why).is_some());
        }
        assert_eq!(sandbox.life().state(), v1::State::Gone);
        assert_eq!(sandbox.life().why().unwrap().kind, WhyKind::VmExited);
        assert!(rooms.sandboxes().means().reaper.is_empty());
    }
}

/// C16: no change without its record; endings go on, and say that they are unrecorded.
#[tokio::test]
async fn c16_a_journal_that_takes_nothing_undoes_claims_and_lets_end() {
    let rooms = Rooms::new();
    let (undone, ended, kept) = (warm(&rooms).await, warm(&rooms).await, warm(&rooms).await);
    let (kept, _written) = kept.claim(claim(&rooms, HOUR)).unwrap();
    within(rooms.journal.close()).await.unwrap();

    let sandbox = Arc::clone(undone.sandbox());
    assert!(matches!(
        undone.claim(claim(&rooms, HOUR)),
        Err(ApplyError::Journal(_))
    ));
    until(&rooms, &sandbox, v1::State::Gone).await;
    assert_eq!(sandbox.life().why().unwrap().kind, WhyKind::ClaimFailed);

    let lease = claim(&rooms, HOUR).lease;
    assert!(matches!(
        rooms.sandboxes().renew(&kept, lease),
        Err(ApplyError::Journal(_))
    ));
    assert_eq!(kept.life().state(), v1::State::Claimed, "untouched");
    assert!(matches!(
        rooms.sandboxes().make(boot()).await,
        Err(MakeError::Journal(_))
    ));

    let sandbox = Arc::clone(ended.sandbox());
    ended.end(Why::of(WhyKind::Surplus));
    until(&rooms, &sandbox, v1::State::Gone).await;
    let applied = rooms.sandboxes().end(&kept, Why::of(WhyKind::Released));
    assert!(applied.unwrap().unrecorded);
    until(&rooms, &kept, v1::State::Gone).await;
    until_free(&rooms).await;
    assert_eq!(rooms.engine.living(), []);
}

/// A lease that was set anew in the moment it was due is not over.
#[tokio::test]
async fn a_lease_ends_what_it_is_the_lease_of() {
    let rooms = Rooms::new();
    let (sandbox, _written) = warm(&rooms).await.claim(claim(&rooms, Duration::ZERO)).unwrap();
    rooms
        .sandboxes()
        .renew(&sandbox, claim(&rooms, HOUR).lease)
        .unwrap();
    rooms.sandboxes().lease_due(sandbox.id);
    assert_eq!(sandbox.life().state(), v1::State::Claimed);
    rooms
        .sandboxes()
        .renew(&sandbox, claim(&rooms, Duration::ZERO).lease)
        .unwrap();
    rooms.sandboxes().lease_due(sandbox.id);
    until(&rooms, &sandbox, v1::State::Gone).await;
    assert_eq!(sandbox.life().why().unwrap().kind, WhyKind::LeaseExpired);
    assert_eq!(sandbox.key, key());
}

/// A stop leaves machines to the next daemon, and ends what was being made.
#[tokio::test(start_paused = true)]
async fn a_stop_leaves_what_lives_and_ends_what_is_made() {
    let rooms = Rooms::new();
    let (claimed, _written) = warm(&rooms).await.claim(claim(&rooms, HOUR)).unwrap();
    warm(&rooms).await.leave();
    rooms.engine.set(Op::Boot, Some(Act::Hang));
    let sandboxes = rooms.sandboxes().clone();
    let making = tasks::spawn("making", async move { sandboxes.make(boot()).await });
    within(rooms.engine.until_begun(Op::Boot, 3)).await;
    within(rooms.sandboxes().stop(false)).await;
    assert!(matches!(
        within(making).await.unwrap(),
        Err(MakeError::Failed(why)) if why.kind == WhyKind::Stopped
    ));
    assert_eq!(claimed.life().state(), v1::State::Claimed);
    assert_eq!(rooms.engine.living(), [SlotNumber(0), SlotNumber(1)]);
}
