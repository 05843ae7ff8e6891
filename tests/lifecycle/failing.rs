//! Guests that die, hang, fail or stay mute.

use std::time::Duration;

use harness::{Daemon, HANG, Setup, process::Process, refused, within};
use rustix::process::Signal;
use sandbox_sdk::{
    ErrorKind, Reason,
    v1::{Sandbox, State, Tier},
};

fn process(row: &Sandbox) -> Process {
    let pid = i32::try_from(row.pid.unwrap()).unwrap();
    Process::look(pid).unwrap()
}

/// A daemon with the template built and these faults from now on, which the next start counts from one.
async fn faulty(warm: u32, faults: &str, config: &str) -> Daemon {
    let mut daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let rows = daemon.rows(&[State::Warm]).await;
    daemon.stop().await;
    // What it left would be taken up and stand in for what is to fail.
    process(&rows[0]).kill_now();
    daemon.change(|setup| setup.warm(warm).stub_faults(faults).config(config));
    daemon.start_again().await;
    daemon
}

#[tokio::test]
async fn c04_a_warm_guest_that_dies_is_replaced_and_never_handed_out() {
    let daemon = Setup::stub().warm(2).start().await;
    daemon.until_warm(2).await;
    let rows = daemon.rows(&[State::Warm]).await;
    let before: Vec<&str> = rows.iter().map(|row| row.sandbox.as_str()).collect();
    for row in &rows {
        process(row).signal(Signal::KILL);
    }
    for row in &rows {
        let gone = daemon.until_state(&row.sandbox, State::Gone).await;
        // Its end and the loss of its link are two pieces of news of one death; the stock may find it dead before both.
        let told = ["vm_exited", "agent_lost"];
        assert!(told.iter().any(|why| gone.why.starts_with(why)), "{}", gone.why);
    }
    daemon.until_warm(2).await;
    let client = daemon.client().await;
    for _ in 0..2 {
        let sandbox = client.claim("default").await.unwrap().keep();
        assert!(!before.contains(&sandbox.id()), "a dead one was handed out");
        assert!(sandbox.exec(["true"]).output().await.unwrap().status.success());
    }
}

/// All stock dies and is asked for in the same instant: the news of the deaths is still on its way.
#[tokio::test]
async fn c04_a_claim_overtakes_the_news_of_a_death() {
    let daemon = Setup::stub().warm(2).start().await;
    let client = daemon.client().await;
    for round in 0..20 {
        daemon.until_warm(2).await;
        let rows = daemon.rows(&[State::Warm]).await;
        let dying: Vec<Process> = rows.iter().map(process).collect();
        dying.iter().for_each(|process| process.signal(Signal::KILL));
        for process in dying {
            process.gone().await;
        }
        let sandbox = client
            .claim("default")
            .wait(Duration::from_secs(30))
            .await
            .unwrap();
        assert!(
            rows.iter().all(|row| row.sandbox != sandbox.id()),
            "a dead one was handed out in round {round}"
        );
        assert!(sandbox.exec(["true"]).output().await.unwrap().status.success());
        for row in &rows {
            daemon.until_state(&row.sandbox, State::Gone).await;
        }
    }
}

#[tokio::test]
async fn c05_a_claimed_guest_that_dies_says_so_on_every_call() {
    let mut daemon = Setup::stub().warm(1).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap().keep();
    let row = daemon.rows(&[State::Claimed]).await.remove(0);
    let mut running = sandbox.exec(["sleep", "1000"]).stream().await.unwrap();
    assert!(within(HANG, running.next()).await.unwrap().is_ok(), "it runs");
    process(&row).signal(Signal::KILL);
    // E7: the open call ends as a fault, not as an exit.
    let ended = within(HANG, running.wait()).await.unwrap_err();
    assert!(
        matches!(ended.kind(), ErrorKind::Refused | ErrorKind::Unfinished),
        "{ended:?}"
    );
    let failed = daemon.until_state(sandbox.id(), State::Failed).await;
    assert!(failed.why.starts_with("vm_exited"), "{}", failed.why);
    let told = |error: sandbox_sdk::Error| {
        assert!(
            error.why().is_some_and(|why| why.starts_with("vm_exited")),
            "{error:?}"
        );
    };
    told(refused(
        sandbox.exec(["true"]).output().await,
        Reason::SandboxFailed,
    ));
    told(refused(sandbox.agent().await, Reason::SandboxFailed));
    told(refused(
        sandbox.renew(Duration::from_secs(60)).await,
        Reason::SandboxFailed,
    ));

    // The news outlives the daemon, until the claimer has heard it.
    daemon.kill9().await;
    daemon.start_again().await;
    let client = daemon.client().await;
    let sandbox = client.sandbox(sandbox.id(), sandbox.token().cloned());
    told(refused(
        sandbox.exec(["true"]).output().await,
        Reason::SandboxFailed,
    ));
    assert!(!sandbox.release().await.unwrap().already);
    daemon.until_state(sandbox.id(), State::Gone).await;
    assert!(sandbox.release().await.unwrap().already);
    daemon.until_warm(1).await;
    assert_eq!(daemon.slot_dirs().len(), 1, "its slot came free");
}

#[tokio::test]
async fn c04_stock_that_does_not_answer_costs_a_claim_one_probe_and_is_ended() {
    let daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let rows = daemon.rows(&[State::Warm]).await;
    process(&rows[0]).signal(Signal::STOP);
    // Two seconds are promised, and only time makes them pass.
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    let client = daemon.client().await;
    let sandbox = client
        .claim("default")
        .wait(Duration::from_secs(30))
        .await
        .unwrap();
    assert_ne!(sandbox.id(), rows[0].sandbox, "a stopped one was handed out");
    assert_eq!(sandbox.tier(), Tier::Warm);
    let gone = daemon.until_state(&rows[0].sandbox, State::Gone).await;
    assert!(gone.why.starts_with("agent_lost"), "{}", gone.why);
    process_is_gone(&rows[0]).await;
}

async fn process_is_gone(row: &Sandbox) {
    let pid = i32::try_from(row.pid.unwrap()).unwrap();
    if let Some(process) = Process::look(pid) {
        process.gone().await;
    }
}

#[tokio::test]
async fn c04_an_agent_that_never_answers_keeps_no_claim_waiting() {
    let mut daemon = faulty(1, "mute 1", "node.clones_in_flight = 2").await;
    daemon.until_pool("default", |pool| pool.making == 1).await;
    let client = daemon.client().await;
    let sandbox = client
        .claim("default")
        .wait(Duration::from_secs(60))
        .await
        .unwrap();
    assert_eq!(sandbox.tier(), Tier::Warm);
    assert!(sandbox.exec(["true"]).output().await.unwrap().status.success());
    let making = daemon.rows(&[State::Making]).await;
    assert!(!making.is_empty(), "the mute one is still being waited for");
    drop(sandbox.keep());
    // Nor does it hold up a stop, which ends what is being made.
    daemon.stop().await;
    let claimed_only = daemon.sandbox_processes();
    assert_eq!(claimed_only.len(), 1, "{claimed_only:?}");
}

#[tokio::test]
async fn c19_a_clone_that_hangs_does_not_stop_the_others() {
    let daemon = faulty(2, "hang clone 1", "node.clones_in_flight = 2").await;
    daemon
        .until_pool("default", |pool| pool.warm == 1 && pool.making == 1)
        .await;
    let client = daemon.client().await;
    for _ in 0..3 {
        let claim = client
            .claim("default")
            .wait(Duration::from_secs(60))
            .await
            .unwrap();
        assert_eq!(claim.tier(), Tier::Warm);
    }
}

#[tokio::test]
async fn c19_clones_that_fail_park_the_pool_with_the_reason_and_room_to_recover() {
    let daemon = faulty(1, "fail clone 1-3", "").await;
    let parked = daemon
        .until_pool("default", |pool| pool.parked.is_some())
        .await
        .parked
        .unwrap();
    assert_eq!(parked.reason, "TEMPLATE_FAILED");
    assert!(parked.message.contains("fail"), "{}", parked.message);
    assert!(parked.since.is_some() && parked.retry_at.is_some(), "{parked:?}");
    let pool = daemon.until_warm(1).await;
    assert_eq!(pool.parked, None, "one that succeeds unparks it");
    assert_eq!(daemon.slot_dirs().len(), 1, "what failed left nothing");
}

#[tokio::test]
async fn c19_a_pool_that_cannot_refill_tells_its_claims_why() {
    let daemon = faulty(1, "fail clone *", "").await;
    daemon.until_pool("default", |pool| pool.parked.is_some()).await;
    let client = daemon.client().await;
    let warm = client
        .claim("default")
        .warm_only()
        .wait(Duration::from_millis(10));
    let error = refused(warm.await, Reason::PoolEmpty);
    assert!(error.message().contains("TEMPLATE_FAILED"), "{error:?}");
    let any = client.claim("default").wait(Duration::from_millis(10));
    let error = any.await.unwrap_err();
    assert!(error.message().contains("fail"), "{error:?}");
    let info = client.node().info().await.unwrap();
    assert!(info.ready, "a pool without stock is no dead daemon");
    assert_eq!(daemon.rows(&[State::Claimed]).await, []);
}

#[tokio::test]
async fn c08_a_guest_that_dies_while_it_is_made_leaves_nothing_and_another_is_made() {
    let daemon = faulty(1, "die 1", "").await;
    daemon.until_warm(1).await;
    let rows = daemon
        .until_rows(|rows| rows.values().any(|row| row.why.starts_with("make_failed")))
        .await;
    assert!(rows.values().filter(|row| row.state() == State::Warm).count() == 1);
    assert_eq!(daemon.slot_dirs().len(), 1);
    assert_eq!(daemon.sandbox_processes().len(), 1);
}

#[tokio::test]
async fn a_template_that_cannot_be_built_is_told_to_pool_and_claim() {
    let daemon = Setup::stub().warm(1).stub_faults("fail boot *").start().await;
    let parked = daemon
        .until_pool("default", |pool| pool.parked.is_some())
        .await
        .parked
        .unwrap();
    assert_eq!(parked.reason, "TEMPLATE_FAILED");
    let client = daemon.client().await;
    let error = client.claim("default").wait(Duration::ZERO).await.unwrap_err();
    assert_ne!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.reason().is_some(), "{error:?}");
    assert_eq!(daemon.slot_dirs(), [] as [String; 0]);
}
