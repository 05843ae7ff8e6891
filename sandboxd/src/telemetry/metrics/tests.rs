use std::{collections::HashSet, time::Duration};

use sandbox_protocol::door::DoorReason;

use super::*;
use crate::{
    clock::{Clock, Tick, WallTime},
    words::{Accel, EngineKind, Lane, Tier},
};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn clock() -> Clock {
    Clock::manual(Tick::from_nanos(0), WallTime::from_micros(0))
}

/// The value of one line.
fn value(text: &str, series: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
        .map(|value| value.parse().unwrap())
}

#[test]
fn names_are_distinct_and_end_in_a_unit_or_a_noun() {
    let names: HashSet<_> = Metric::ALL.iter().map(|metric| metric.as_str()).collect();
    assert_eq!(names.len(), Metric::ALL.len());
    let text = Metrics::new().render();
    for metric in Metric::ALL {
        let name = metric.as_str();
        assert!(
            name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "{name}"
        );
        let described = text.contains(&format!("# HELP sandboxd_{name} "));
        // A family without a series is not shown yet.
        let by_pool = ["claim", "pool", "refill", "build", "door", "net", "lane"]
            .iter()
            .any(|noun| name.starts_with(noun));
        assert!(described || by_pool, "{name} is not registered");
    }
    assert!(text.ends_with("# EOF\n"));
    assert!(value(&text, "process_open_fds").unwrap() > 0.0);
    assert!(value(&text, "process_resident_memory_bytes").unwrap() > 0.0);
}

#[test]
fn a_claim_shows_its_steps_by_tier_and_pool() {
    let metrics = Metrics::new();
    let series = metrics.claim.series(Some(&name("web")));
    let clock = clock();
    let mut times = ClaimTimes::start(clock.clone());
    clock.advance(Duration::from_micros(30));
    times.done(ClaimStep::Take);
    clock.advance(Duration::from_micros(70));
    times.done(ClaimStep::Record);
    series.finish(&times, Some(Tier::Warm), Outcome::Ok);
    series.finish(&ClaimTimes::start(clock), None, Outcome::Refused);

    let text = metrics.render();
    let claim = "sandboxd_claim_seconds_count{tier=\"warm\",pool=\"web\",outcome=\"ok\"}";
    assert_eq!(value(&text, claim), Some(1.0), "{text}");
    let sum = "sandboxd_claim_seconds_sum{tier=\"warm\",pool=\"web\",outcome=\"ok\"}";
    assert_eq!(value(&text, sum), Some(0.0001));
    let refused = "sandboxd_claim_seconds_count{tier=\"none\",pool=\"web\",outcome=\"refused\"}";
    assert_eq!(value(&text, refused), Some(1.0));
    let step = |le: &str| {
        let series = "sandboxd_claim_step_seconds_bucket{le=\"LE\",step=\"take\",tier=\"warm\",pool=\"web\"}";
        value(&text, &series.replace("LE", le))
    };
    assert_eq!(
        (step("0.00002"), step("0.000035")),
        (Some(0.0), Some(1.0)),
        "{text}"
    );
    assert!(
        !text.contains("step=\"setup\""),
        "what did not happen is not shown"
    );

    metrics.forget_pool(&name("web"));
    assert!(!metrics.render().contains("pool=\"web\""));
}

#[tokio::test]
async fn a_traced_claim_gets_the_same_steps() {
    let clock = clock();
    let ((), counts) = crate::work::traced(async {
        let mut times = ClaimTimes::start(clock.clone());
        clock.advance(Duration::from_micros(12));
        times.done(ClaimStep::Take);
    })
    .await;
    assert_eq!(counts.to_proto().steps_us.get("take"), Some(&12));
}

#[test]
fn refills_pools_and_states_are_counted() {
    let metrics = Metrics::new();
    let pool = name("web");
    let clock = clock();
    let series = metrics.refill.series(&pool);
    let mut times = RefillTimes::start(clock.clone());
    clock.advance(Duration::from_millis(20));
    series.done(&mut times, RefillStep::Start);
    clock.advance(Duration::from_millis(30));
    assert_eq!(series.finish(&times, Outcome::Ok), Duration::from_millis(50));
    metrics.pool.gauges(&pool).show(PoolNumbers {
        warm: 3,
        target: 4,
        parked: true,
        ..PoolNumbers::default()
    });
    metrics.sandbox.moved(None, Some(SandboxState::Warm));
    metrics
        .sandbox
        .moved(Some(SandboxState::Warm), Some(SandboxState::Claimed));
    metrics.sandbox.ended(EndedWhy::LeaseOver);
    metrics.sandbox.dropped(DroppedAt::Log, 4);
    metrics.sandbox.stuck(true);
    metrics.journal.appended(100, Duration::from_micros(9));
    metrics.node.build(EngineKind::Stub, Accel::None);
    metrics.node.budget(1 << 30, 12);

    let text = metrics.render();
    for (series, expected) in [
        ("refill_seconds_sum{step=\"start\",pool=\"web\"}", 0.02),
        ("refill_seconds_sum{step=\"all\",pool=\"web\"}", 0.05),
        ("refills_total{outcome=\"ok\",pool=\"web\"}", 1.0),
        ("pool_warm{pool=\"web\"}", 3.0),
        ("pool_target{pool=\"web\"}", 4.0),
        ("pool_parked{pool=\"web\"}", 1.0),
        ("sandboxes{state=\"warm\"}", 0.0),
        ("sandboxes{state=\"claimed\"}", 1.0),
        ("ended_total{why=\"lease_over\"}", 1.0),
        ("dropped_total{where=\"log\"}", 4.0),
        ("ending_stuck", 1.0),
        ("journal_append_seconds_count", 1.0),
        ("journal_bytes_total", 100.0),
        ("memory_budget_bytes", f64::from(1 << 30)),
    ] {
        let full = format!("sandboxd_{series}");
        assert_eq!(value(&text, &full), Some(expected), "{full}\n{text}");
    }
    assert!(text.contains("engine=\"stub\",accel=\"none\"} 1"));
}

#[test]
fn doors_lanes_and_the_audit_are_counted_by_closed_labels() {
    let metrics = Metrics::new();
    let (door, lane) = (&metrics.door, Lane::Guarded);
    door.decided("http", lane, Some(DoorReason::HostNotAllowed), false);
    door.decided("http", Lane::None, None, true);
    door.opened("socks5", lane);
    door.opened("socks5", lane);
    door.closed("socks5", lane);
    door.bytes(lane).sent(5);
    door.bytes(lane).received(7);
    door.dialled(false, Duration::from_millis(3));
    metrics.audit.lost(LedgerFile::Audit, 3);
    metrics.audit.failing(LedgerFile::Usage, true);
    assert!(!metrics.render().contains("net_slots"), "there is no lane");
    let is_there = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let there = std::sync::Arc::clone(&is_there);
    metrics.net.ask(move || {
        there
            .load(std::sync::atomic::Ordering::Relaxed)
            .then(|| NetNumbers {
                slots: vec![("free", 4), ("armed", 2)],
                lock_lost: 9,
            })
    });
    let text = metrics.render();
    for (series, expected) in [
        (
            "door_decisions_total{door=\"http\",lane=\"guarded\",verdict=\"deny\",reason=\"host_not_allowed\"}",
            1.0,
        ),
        (
            "door_decisions_total{door=\"http\",lane=\"none\",verdict=\"would_deny\",reason=\"\"}",
            1.0,
        ),
        ("door_connections_total{door=\"socks5\",lane=\"guarded\"}", 2.0),
        ("door_open{door=\"socks5\",lane=\"guarded\"}", 1.0),
        ("door_bytes_total{lane=\"guarded\",direction=\"sent\"}", 5.0),
        ("door_bytes_total{lane=\"guarded\",direction=\"received\"}", 7.0),
        ("door_dial_seconds_count{outcome=\"failed\"}", 1.0),
        ("audit_lost_total{file=\"audit\"}", 3.0),
        ("audit_lost_total{file=\"usage\"}", 0.0),
        ("audit_failing{file=\"usage\"}", 1.0),
        ("net_slots{state=\"free\"}", 4.0),
        ("net_slots{state=\"armed\"}", 2.0),
        ("lane_lock_lost_total", 9.0),
    ] {
        let full = format!("sandboxd_{series}");
        assert_eq!(value(&text, &full), Some(expected), "{full}\n{text}");
    }
    is_there.store(false, std::sync::atomic::Ordering::Relaxed);
    assert!(!metrics.render().contains("net_slots"), "it is gone");
}

#[test]
fn a_histogram_counts_every_observation_from_every_thread() {
    let histogram = Histogram::default();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let histogram = &histogram;
            scope.spawn(move || {
                for n in 0..1_000u64 {
                    histogram.observe(Duration::from_micros(n * n * thread));
                }
            });
        }
    });
    histogram.observe(Duration::MAX);
    assert_eq!(histogram.count(), 4_001);
}
