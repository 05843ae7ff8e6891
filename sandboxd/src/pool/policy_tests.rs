use std::time::Duration;

use proptest::prelude::*;
use sandbox_protocol::reason::Reason;

use super::policy::{Bounds, Facts, PAUSE_MAX, Plan, Policy, Room, SURPLUS};
use crate::clock::Tick;

const START: Tick = Tick::from_nanos(1_000_000_000_000);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn policy(warm: u32, warm_max: u32) -> Policy {
    Policy::new(Bounds::new(warm, warm_max), START)
}

fn facts(warm: u32, coming: u32, waiting: u32) -> Facts {
    Facts {
        warm,
        coming,
        waiting,
        may_begin: 100,
    }
}

fn fail(policy: &mut Policy, now: Tick) {
    policy.failed(Reason::TemplateFailed, "it broke".to_owned(), now, 1.0);
}

#[test]
fn an_idle_pool_keeps_its_floor_and_sleeps() {
    let mut policy = policy(4, 8);
    assert_eq!(policy.plan(facts(0, 0, 0), START).start, 4);
    assert_eq!(policy.plan(facts(2, 2, 0), START), Plan::default());
    let limited = Facts {
        may_begin: 1,
        ..facts(0, 1, 0)
    };
    assert_eq!(policy.plan(limited, START).start, 1);
}

#[test]
fn who_waits_is_made_for_beyond_the_target() {
    let mut policy = policy(2, 2);
    assert_eq!(policy.plan(facts(0, 2, 5), START).start, 5);
    assert_eq!(policy.plan(facts(0, 7, 5), START).start, 0);
    let mut none = Policy::new(Bounds::new(0, 0), START);
    assert_eq!(none.plan(facts(0, 0, 1), START).start, 1);
}

#[test]
fn the_target_covers_the_arrivals_of_one_lead_time() {
    let mut policy = policy(1, 100);
    policy.succeeded(secs(2));
    let mut now = START;
    // 5 a second for five minutes: 10 in a lead time, and 2 sqrt(10) = 6.3 to be safe.
    for _ in 0..1_500 {
        now = now.plus(Duration::from_millis(200));
        policy.arrived(now);
    }
    assert!((policy.arrivals_per_min(now) - 300.0).abs() < 10.0);
    let target = policy.target(now);
    assert!((16..=18).contains(&target), "{target}");
    // It comes down with time alone, and the plan says when to look.
    let mut at = now;
    let mut last = target;
    while last > 1 {
        let wake = policy
            .plan(facts(last, 0, 0), at)
            .wake_at
            .expect("a raised target falls");
        assert!(wake > at);
        at = wake;
        let target = policy.target(at);
        assert!(target <= last);
        last = target;
    }
    assert!(at.since(now) < secs(600));
    assert_eq!(policy.plan(facts(1, 0, 0), at), Plan::default());
}

#[test]
fn one_instant_does_not_set_the_target() {
    let mut policy = policy(2, 64);
    policy.succeeded(Duration::from_millis(100));
    for _ in 0..64 {
        policy.arrived(START);
    }
    assert!(policy.target(START) <= 2, "{}", policy.target(START));
}

#[test]
fn surplus_goes_after_a_minute_and_not_before() {
    let mut policy = policy(2, 8);
    let first = policy.plan(facts(6, 0, 0), START);
    assert_eq!((first.shrink, first.wake_at), (0, Some(START.plus(SURPLUS))));
    // The least surplus of the minute counts: at one time only one was too many.
    assert_eq!(policy.plan(facts(3, 0, 0), START.plus(secs(30))).shrink, 0);
    let plan = policy.plan(facts(6, 0, 0), START.plus(secs(60)));
    assert_eq!((plan.shrink, plan.wake_at), (1, Some(START.plus(secs(120)))));
    assert_eq!(policy.plan(facts(5, 0, 0), START.plus(secs(119))).shrink, 0);
    assert_eq!(policy.plan(facts(5, 0, 0), START.plus(secs(120))).shrink, 3);
    // A minute without surplus in between begins anew.
    assert_eq!(policy.plan(facts(2, 0, 0), START.plus(secs(121))).shrink, 0);
    assert_eq!(policy.plan(facts(4, 0, 0), START.plus(secs(122))).shrink, 0);
    assert_eq!(policy.plan(facts(4, 0, 0), START.plus(secs(181))).shrink, 0);
    assert_eq!(policy.plan(facts(4, 0, 0), START.plus(secs(182))).shrink, 2);
}

#[test]
fn the_first_failure_is_free_and_the_next_pause_longer_and_longer() {
    let mut policy = policy(4, 4);
    fail(&mut policy, START);
    assert!(policy.parked().is_none());
    assert_eq!(policy.plan(facts(0, 0, 0), START).start, 4);

    let mut now = START;
    let mut last = Duration::ZERO;
    for _ in 0..12 {
        fail(&mut policy, now);
        let parked = policy.parked().expect("parked").clone();
        assert_eq!((parked.reason, parked.since), (Reason::TemplateFailed, START));
        let retry_at = parked.retry_at.expect("a time");
        let pause = retry_at.since(now);
        assert!(pause >= last && pause <= PAUSE_MAX);
        last = pause;
        // Its fellows' failures do not make it longer.
        fail(&mut policy, now.plus(Duration::from_millis(1)));
        assert_eq!(policy.parked().and_then(|parked| parked.retry_at), Some(retry_at));
        let waits = policy.plan(facts(0, 0, 3), now);
        assert_eq!((waits.start, waits.wake_at), (0, Some(retry_at)));
        now = retry_at;
        // Then one by one.
        assert_eq!(policy.plan(facts(0, 0, 3), now).start, 1);
        assert_eq!(policy.plan(facts(0, 1, 3), now).start, 0);
    }
    assert_eq!(last, PAUSE_MAX);
    policy.succeeded(secs(1));
    assert!(policy.parked().is_none());
    assert_eq!(policy.plan(facts(1, 0, 3), now).start, 6);
    fail(&mut policy, now);
    assert!(policy.parked().is_none(), "the count began anew");
}

#[test]
fn a_full_node_parks_refill_until_there_is_room() {
    let mut policy = policy(4, 4);
    policy.no_room(Room::Node, Reason::Capacity, "no memory".to_owned(), START);
    let later = START.plus(secs(3_600));
    policy.no_room(Room::Node, Reason::Capacity, "no memory".to_owned(), later);
    let parked = policy.parked().expect("parked");
    assert_eq!((parked.since, parked.retry_at), (START, None));
    assert_eq!(policy.plan(facts(0, 0, 9), later), Plan::default());
    policy.has_room(Room::Node);
    assert_eq!(policy.plan(facts(0, 0, 0), later).start, 4);
}

/// A piece that finds no slot gives its place on the node back: that is no room for the next.
#[test]
fn news_of_room_elsewhere_leave_refill_at_rest() {
    for (lacks, other) in [(Room::Lane, Room::Node), (Room::Node, Room::Lane)] {
        let mut policy = policy(4, 4);
        policy.no_room(lacks, Reason::Capacity, "none".to_owned(), START);
        policy.has_room(other);
        assert!(policy.parked().is_some(), "{lacks:?}");
        assert_eq!(policy.plan(facts(0, 0, 9), START), Plan::default());
        policy.has_room(lacks);
        assert_eq!(policy.plan(facts(0, 0, 0), START).start, 4);
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Wait(u64),
    Arrive,
    Success(u64),
    Failure,
    NoRoom,
    HasRoom,
    Bounds(u32, u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0u64..100_000).prop_map(Step::Wait),
        6 => Just(Step::Arrive),
        2 => (0u64..20_000).prop_map(Step::Success),
        2 => Just(Step::Failure),
        1 => Just(Step::NoRoom),
        1 => Just(Step::HasRoom),
        1 => (0u32..20, 0u32..40).prop_map(|(warm, max)| Step::Bounds(warm, max)),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn the_target_stays_in_bounds_and_starts_in_proportion(
        steps in steps(),
        (warm, coming, waiting, may_begin) in (0u32..50, 0u32..10, 0u32..50, 0u32..10),
        jitter in 0.0f64..=1.0,
    ) {
        let (mut low, mut high) = (2, 10);
        let mut policy = policy(low, high);
        let mut now = START;
        for step in steps {
            match step {
                Step::Wait(ms) => now = now.plus(Duration::from_millis(ms)),
                Step::Arrive => policy.arrived(now),
                Step::Success(ms) => policy.succeeded(Duration::from_millis(ms)),
                Step::Failure => policy.failed(Reason::Bug, String::new(), now, jitter),
                Step::NoRoom => policy.no_room(Room::Node, Reason::Capacity, String::new(), now),
                Step::HasRoom => policy.has_room(Room::Node),
                Step::Bounds(warm, max) => {
                    (low, high) = (warm, max.max(warm));
                    policy.set_bounds(Bounds::new(warm, max));
                }
            }
            let target = policy.target(now);
            prop_assert!((low..=high).contains(&target));
            let facts = Facts { warm, coming, waiting, may_begin };
            let plan = policy.plan(facts, now);
            prop_assert!(plan.start <= may_begin);
            prop_assert!(plan.start + warm + coming <= (target + waiting).max(warm + coming));
            prop_assert!(plan.shrink == 0 || plan.start == 0);
            prop_assert!(warm - plan.shrink >= target.min(warm));
            prop_assert!(plan.wake_at.is_none_or(|at| at > now));
        }
    }
}
