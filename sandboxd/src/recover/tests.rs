//! What becomes of rows, over a fake engine that left nothing behind.

use std::sync::Arc;

use sandbox_protocol::{
    id::{ClaimId, SandboxId},
    v1,
};

use super::*;
use crate::{
    access::TokenHash,
    claim::tests::rooms::{Rooms, key},
    clock::{Tick, WallTime},
    engine::Engine,
    engine::tests::fake::Op,
    journal::{ClaimFacts, RowState, SandboxRow, State, WarmFacts},
    link::fake::within,
    names::SlotNumber,
    sandbox::{Why, WhyKind},
    words::{Accel, EngineKind, Tier},
};

fn row(n: u8, slot: u16, state: RowState) -> SandboxRow {
    SandboxRow {
        id: SandboxId::from_random([n; 16]),
        state,
        first_seq: n.into(),
        seq: n.into(),
        slot: SlotNumber(slot),
        key: key(),
        tap: None,
        pool: None,
        tier: Tier::Warm,
        engine: EngineKind::Stub,
        accel: Accel::None,
        template_digest: "d".into(),
        created_at: WallTime::from_micros(n.into()),
        boot_id: Some("boot".into()),
        warmed: Some(WarmFacts {
            pid: Some(1),
            started: 1,
            generation: 1,
            proto: 1,
            agent_version: "0".into(),
            unknown: Default::default(),
        }),
        claim: None,
        why: None,
        gone_at: None,
        unknown: Default::default(),
    }
}

fn facts(key: Option<&str>, claimed_at: u64) -> Box<ClaimFacts> {
    Box::new(ClaimFacts {
        claim: ClaimId::from_random([9; 16]),
        owner: "operator".into(),
        token_sha256: TokenHash::of("t").to_hex(),
        lease_secs: 60,
        expires_tick: Tick::from_nanos(u64::MAX / 2),
        expires_at: WallTime::from_micros(u64::MAX / 2),
        claimed_at: WallTime::from_micros(claimed_at),
        pool: None,
        tier: Tier::Warm,
        labels: Default::default(),
        egress: None,
        request_key: key.map(Into::into),
        request_digest: key.map(|_| "digest".into()),
        unknown: Default::default(),
    })
}

fn state(rows: impl IntoIterator<Item = SandboxRow>) -> State {
    State {
        sandboxes: rows.into_iter().map(|row| (row.id, row)).collect(),
        ..State::default()
    }
}

fn fates(state: &State) -> Vec<(SandboxId, Fate)> {
    let host = Host {
        boot_id: "boot",
        engine: EngineKind::Stub,
        slots: &[],
        digest: |_: &_, digest: &str| digest == "d",
        pool: |_: &_, _: &_| true,
    };
    plan(state, &host).0
}

async fn take_up_all(rooms: &Rooms, state: &State) -> (Summary, Later) {
    within(claimed(&rooms.claims, state, fates(state), "boot")).await
}

async fn until(rooms: &Rooms, n: u8, wanted: v1::State) {
    let sandbox = rooms.sandboxes().get(SandboxId::from_random([n; 16])).unwrap();
    let mut feed = rooms.sandboxes().read_feed();
    within(async {
        while sandbox.life().state() != wanted {
            feed.next().await;
        }
    })
    .await;
}

fn request(rooms: &Rooms, key: &str) -> Option<SandboxId> {
    use crate::claim::Reserved;
    match rooms
        .claims
        .keys
        .reserve(&"operator".into(), key, "digest", |_| true)
    {
        Reserved::Same(sandbox) => Some(sandbox),
        Reserved::New(_) => None,
        other @ (Reserved::Wait(_) | Reserved::Other) => panic!("{other:?}"),
    }
}

/// Two rows with one slot, as damage can leave them: the later made one has it, and the end of the other leaves it be.
#[tokio::test]
async fn c13_the_later_of_two_rows_with_one_slot_has_it() {
    for (earlier, later) in [(1, 2), (2, 1)] {
        let rooms = Rooms::new();
        // Ids in either order: their beginnings decide, whatever was recorded of the earlier one since.
        let mut old = row(earlier, 5, RowState::Ending);
        old.why = Some("released".into());
        (old.first_seq, old.seq) = (1, 9);
        old.created_at = WallTime::from_micros(2);
        let mut new = row(later, 5, RowState::Quarantined);
        (new.first_seq, new.seq) = (2, 2);
        new.created_at = WallTime::from_micros(1);
        let (_summary, later_ones) = take_up_all(&rooms, &state([old, new])).await;
        drop(later_ones);
        until(&rooms, earlier, v1::State::Gone).await;
        until(&rooms, later, v1::State::Quarantined).await;
        assert_eq!(rooms.engine.begun(Op::Reap), 0, "the slot is the other's");
        assert_eq!(rooms.held(), 1);
    }
}

/// Slots are held before anything is taken up, warm ones and strays included: nothing can be made in them meanwhile.
#[tokio::test]
async fn h01_every_slot_is_held_before_the_first_call() {
    let rooms = Rooms::with(8, crate::journal::SyncMode::Auto);
    let mut warm_row = row(1, 0, RowState::Warm);
    warm_row.pool = Some("default".parse().unwrap());
    let mut failed = row(2, 2, RowState::Failed);
    failed.claim = Some(facts(None, 1));
    let mut gone = row(3, 2, RowState::Gone);
    gone.gone_at = Some(WallTime::from_micros(1));
    let held = hold(&rooms.claims, vec![SlotNumber(1)]);
    let (_summary, later) = take_up_all(&rooms, &state([warm_row, failed, gone])).await;
    assert_eq!(later.warm.len(), 1);
    assert_eq!(rooms.held(), 2, "those that are torn down hold none");
    let size = crate::claim::tests::rooms::size();
    let free = rooms.sandboxes().means().admission.try_reserve(size).unwrap();
    assert_eq!(free.slot(), SlotNumber(2));

    // The fake has nothing of it any more: it ends, and gives its slot back.
    within(warm(&rooms.claims, later.warm)).await;
    until(&rooms, 1, v1::State::Gone).await;
    let engine: Arc<dyn Engine> = Arc::new(rooms.engine.clone());
    assert_eq!(within(strays(&engine, held, false)).await, 1);
    assert_eq!(rooms.engine.begun(Op::Reap), 2);
}

/// C14: where records are damaged, what is in none is not ended, and its slot stays out of use.
#[tokio::test]
async fn c14_strays_beside_damage_are_left_alone() {
    let rooms = Rooms::new();
    let engine: Arc<dyn Engine> = Arc::new(rooms.engine.clone());
    let held = hold(&rooms.claims, vec![SlotNumber(0), SlotNumber(3)]);
    assert_eq!(within(strays(&engine, held, true)).await, 2);
    assert_eq!(rooms.engine.begun(Op::Reap), 0);
    assert_eq!(rooms.sandboxes().means().admission.used().quarantined, 2);
}

/// A row that does not say which process it is, or whose claim cannot be read, is given to nobody and left alone.
#[tokio::test]
async fn c13_rows_without_process_or_token_are_quarantined() {
    let rooms = Rooms::new();
    let mut no_process = row(1, 1, RowState::Claimed);
    no_process.claim = Some(facts(Some("k"), 1));
    no_process.warmed = None;
    let mut no_token = row(2, 2, RowState::Claimed);
    no_token.claim = Some(facts(None, 1));
    if let Some(claim) = &mut no_token.claim {
        claim.token_sha256.truncate(7);
    }
    let (summary, _later) = take_up_all(&rooms, &state([no_process, no_token])).await;
    assert_eq!((summary.claimed, summary.ended), (0, 2));
    for n in [1, 2] {
        until(&rooms, n, v1::State::Quarantined).await;
    }
    assert_eq!(rooms.held(), 2);
    assert_eq!(rooms.engine.begun(Op::Reap), 0);
    // An operator ends it.
    let sandbox = rooms.sandboxes().get(SandboxId::from_random([1; 16])).unwrap();
    let why = Why::of(WhyKind::Released);
    assert!(rooms.sandboxes().end(&sandbox, why).is_some());
    until(&rooms, 1, v1::State::Gone).await;
    assert_eq!(rooms.engine.begun(Op::Reap), 1);
}

/// What is claimed and not on the host is told to its claimer, whatever else is slow or missing.
#[tokio::test]
async fn c05_a_claim_without_its_machine_is_told() {
    let rooms = Rooms::new();
    let mut lost = row(1, 1, RowState::Claimed);
    lost.claim = Some(facts(Some("k"), 1));
    let (summary, _later) = take_up_all(&rooms, &state([lost])).await;
    assert_eq!((summary.claimed, summary.ended), (0, 1));
    until(&rooms, 1, v1::State::Failed).await;
    assert_eq!(request(&rooms, "k"), Some(SandboxId::from_random([1; 16])));
}

/// C2: one key may stand in several rows; the live claim has it, whatever the order of ids.
#[tokio::test]
async fn c02_a_request_key_is_that_of_its_live_claim() {
    for live in [1, 2, 3] {
        let rooms = Rooms::new();
        let mut rows = Vec::new();
        for n in 1..=3 {
            let mut row = row(n, n.into(), RowState::Gone);
            row.claim = Some(facts(Some("k"), 10 + u64::from(n)));
            row.gone_at = Some(WallTime::from_micros(5));
            row.why = Some("released".into());
            if n == live {
                row.state = RowState::Claimed;
                row.why = None;
                row.gone_at = None;
            }
            rows.push(row);
        }
        drop(take_up_all(&rooms, &state(rows)).await);
        assert_eq!(request(&rooms, "k"), Some(SandboxId::from_random([live; 16])));
    }
    // A claim that came to nothing left its key free, and so it is after a start.
    let rooms = Rooms::new();
    let mut failed = row(1, 1, RowState::Gone);
    failed.claim = Some(facts(Some("k"), 1));
    failed.why = Some("claim_failed".into());
    drop(take_up_all(&rooms, &state([failed])).await);
    assert_eq!(request(&rooms, "k"), None);
}
