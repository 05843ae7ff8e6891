//! What a daemon that comes back still knows.

use std::collections::BTreeMap;

use harness::{Daemon, Setup};
use sandbox_sdk::{How, Token, v1::State};
use serde_json::Value;

/// Slots and pids by sandbox, as `list` tells them.
fn places(rows: &Value) -> BTreeMap<String, (u64, u64)> {
    let rows = rows["sandboxes"].as_array().unwrap();
    let place = |row: &Value| {
        let id = row["sandbox"].as_str().unwrap().to_owned();
        (id, (row["slot"].as_u64().unwrap(), row["pid"].as_u64().unwrap()))
    };
    rows.iter().map(place).collect()
}

async fn warm_stock(daemon: &Daemon) -> BTreeMap<String, (u64, u64)> {
    places(&daemon.ctl().json(["list", "--state", "warm"]).await)
}

#[tokio::test]
async fn c10_claims_and_warm_stock_outlive_a_daemon_that_is_killed() {
    let mut daemon = Setup::dev().warm(32).start().await;
    let ready = daemon.line().await;
    assert!(
        ready.starts_with(&format!("ready: {} engine=stub", daemon.address())),
        "{ready}"
    );
    let wait = ["wait-ready", "--pool", "default", "--warm", "32"];
    assert!(daemon.ctl().json(wait).await["warm"].as_u64() >= Some(32));

    let mut claims = BTreeMap::new();
    for _ in 0..20 {
        let claim = daemon.ctl().json(["claim", "--pool", "default"]).await;
        assert_eq!(claim["tier"], "warm");
        assert_eq!(claim["pool"], "default");
        assert!(claim["expires_at"].as_str().unwrap().ends_with('Z'));
        let (id, token) = (claim["sandbox"].as_str(), claim["token"].as_str());
        claims.insert(id.unwrap().to_owned(), token.unwrap().to_owned());
    }
    assert_eq!(claims.len(), 20, "twenty different sandboxes");
    daemon.until_warm(32).await;
    let (claimed, warm) = (
        places(&daemon.ctl().json(["list"]).await),
        warm_stock(&daemon).await,
    );
    assert_eq!(warm.len(), 32);

    daemon.kill9().await;
    daemon.start_again().await;
    // Claims are there before the first call is served; the warm stock follows at once.
    assert_eq!(places(&daemon.ctl().json(["list"]).await), claimed);
    daemon.until_warm(32).await;
    assert_eq!(warm_stock(&daemon).await, warm, "the same slots and pids");

    for (id, token) in &claims {
        let ran = daemon
            .ctl()
            .token(token)
            .run(["exec", id, "--", "sh", "-c", "echo hi"])
            .await;
        assert_eq!((ran.code, ran.text().as_str()), (0, "hi\n"), "{}", ran.stderr);
    }
    let client = daemon.client().await;
    let (id, token) = claims.pop_first().unwrap();
    let sandbox = client.sandbox(id, Some(Token::new(&token).unwrap()));
    assert!(!sandbox.release().await.unwrap().already);
    let left = daemon.ctl().json(["list", "--state", "claimed"]).await;
    assert_eq!(places(&left).len(), 19);
    daemon.stop().await;
    assert_eq!(
        daemon.sandbox_processes(),
        [],
        "a clean stop of dev mode leaves nothing"
    );
    assert_eq!(daemon.slot_dirs(), [] as [String; 0]);
}

#[tokio::test]
async fn a_clean_stop_with_keep_leaves_sandboxes_to_the_next_daemon() {
    let mut daemon = Setup::dev().warm(2).keep().start().await;
    let sandbox = daemon.client().await.claim("default").await.unwrap().keep();
    daemon.until_warm(2).await;
    let before = daemon.sandbox_processes();
    daemon.stop().await;
    assert_eq!(daemon.sandbox_processes(), before);
    daemon.start_again().await;
    daemon.until_warm(2).await;
    assert_eq!(daemon.sandbox_processes(), before);
    let client = daemon.client().await;
    let again = client.sandbox(sandbox.id(), sandbox.token().cloned());
    let output = again.exec(["sh", "-c", "exit 3"]).output().await.unwrap();
    assert_eq!(output.status.how, How::Code(3));
    assert_eq!(daemon.rows(&[State::Claimed]).await.len(), 1);
}

#[tokio::test]
async fn h02_a_stop_without_dev_mode_leaves_guests_alive() {
    let mut daemon = Setup::stub().warm(2).start().await;
    daemon.until_warm(2).await;
    let before = daemon.sandbox_processes();
    assert_eq!(before.len(), 2);
    daemon.stop().await;
    assert_eq!(daemon.sandbox_processes(), before);
    daemon.start_again().await;
    daemon.until_warm(2).await;
    assert_eq!(daemon.sandbox_processes(), before);
}

#[tokio::test]
async fn h04_a_second_daemon_is_refused_with_the_pid_of_the_first() {
    let daemon = Setup::stub().warm(1).start().await;
    let refused = Setup::stub().warm(1).state_dir(&daemon.dir()).refused().await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused.stderr.contains("error[STATE_LOCKED]"),
        "{}",
        refused.stderr
    );
    let pid = daemon.process().pid.to_string();
    assert!(refused.stderr.contains(&pid), "{}", refused.stderr);
    // And the first has not noticed.
    daemon.until_warm(1).await;
    drop(daemon.client().await.claim("default").await.unwrap());
}
