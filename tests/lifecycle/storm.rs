//! Many at once: nobody gets what another has, and nothing is left behind.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use harness::{Daemon, Setup};
use sandbox_sdk::{Client, Sandbox, v1::State};
use tokio::task::JoinSet;

/// Everything that was ever handed out.
type Seen = Arc<Mutex<BTreeSet<String>>>;

/// Claims and releases `times`, and keeps one more.
async fn round(client: Client, times: usize, seen: Seen) -> Sandbox {
    let claim = || async {
        let claim = client.claim("default").wait(Duration::from_secs(60));
        let sandbox = claim.await.unwrap();
        let new = seen.lock().unwrap().insert(sandbox.id().to_owned());
        assert!(new, "{} was handed out twice", sandbox.id());
        sandbox
    };
    for _ in 0..times {
        assert!(!claim().await.release().await.unwrap().already);
    }
    claim().await
}

/// `workers` at once, each with `times` claims and releases a round; live equals claims after each round.
async fn storm(daemon: &Daemon, workers: usize, rounds: usize, times: usize) -> usize {
    let seen = Seen::default();
    let mut clients = Vec::new();
    for _ in 0..workers.div_ceil(8) {
        clients.push(daemon.client().await);
    }
    for _ in 0..rounds {
        let mut tasks = JoinSet::new();
        for worker in 0..workers {
            let client = clients[worker % clients.len()].clone();
            tasks.spawn(round(client, times, Arc::clone(&seen)));
        }
        let held = tasks.join_all().await;
        let mine: BTreeSet<String> = held.iter().map(|sandbox| sandbox.id().to_owned()).collect();
        let live = daemon.rows(&[State::Claimed]).await;
        let live: BTreeSet<String> = live.into_iter().map(|row| row.sandbox).collect();
        assert_eq!(live, mine, "live equals claims");
        let pools = clients[0].pools().list().await.unwrap();
        assert_eq!(pools[0].claimed as usize, workers);
        for sandbox in held {
            assert!(!sandbox.release().await.unwrap().already);
        }
    }
    let seen = seen.lock().unwrap().len();
    assert_eq!(seen, workers * rounds * (times + 1));
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn c01_sixty_four_at_once_ten_thousand_times_never_share_a_sandbox() {
    let daemon = Setup::stub().in_process().warm(32).log("warn").start().await;
    daemon.until_warm(32).await;
    let before = daemon.holds();
    let claims = storm(&daemon, 64, 4, 39).await;
    assert!(claims >= 10_000, "{claims}");
    let pool = daemon
        .until_pool("default", |pool| pool.making == 0 && pool.claimed == 0)
        .await;
    assert_eq!(pool.waiting, 0);
    daemon.holds_no_more_than(before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn h08_processes_directories_and_descriptors_come_back_to_what_they_were() {
    let daemon = Setup::stub()
        .warm(8)
        .config("pool.default.warm_max = 8")
        .log("warn")
        .start()
        .await;
    daemon.until_warm(8).await;
    let before = daemon.holds();
    storm(&daemon, 8, 2, 7).await;
    let rows = daemon
        .until_rows(|rows| {
            let count = |state| rows.values().filter(|row| row.state() == state).count();
            count(State::Warm) == 8 && count(State::Gone) + 8 == rows.len()
        })
        .await;
    assert!(rows.len() > 8 * 16);
    daemon.holds_no_more_than(before).await;
    assert_eq!(daemon.sandbox_processes().len(), 8);
    assert_eq!(daemon.slot_dirs().len(), 8);
}
