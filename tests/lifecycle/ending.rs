//! Ends that meet: releases, leases, makings, lost links, stops.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use harness::{Daemon, HANG, Setup, refused, sandboxd, within};
use rustix::process::Signal;
use sandbox_sdk::{Client, Error, ErrorKind, Reason, v1::State};

/// What the journal holds of a sandbox, kind by kind in order.
async fn records(daemon: &Daemon, sandbox: &str) -> Vec<String> {
    let dir = daemon.dir();
    let cat = sandboxd([
        "journal",
        "cat",
        "--sandbox",
        sandbox,
        "--state-dir",
        dir.to_str().unwrap(),
    ])
    .await;
    assert_eq!(cat.code, 0, "{}", cat.stderr);
    let text = cat.text();
    let kinds = [
        "making",
        "warmed",
        "claimed",
        "renewed",
        "ending",
        "failed",
        "gone",
        "quarantined",
    ];
    let kind = |line: &str| {
        let found = kinds.iter().find(|kind| line.contains(&format!("\"{kind}\"")));
        (*found.unwrap_or_else(|| panic!("{line}"))).to_owned()
    };
    text.lines().map(kind).collect()
}

#[tokio::test]
async fn c07_many_releases_at_once_are_one_teardown() {
    let daemon = Setup::stub().warm(1).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap().keep();
    let releases = join_all((0..32).map(|_| sandbox.release())).await;
    let first = releases
        .into_iter()
        .filter(|released| !released.as_ref().unwrap().already)
        .count();
    assert_eq!(first, 1, "exactly one ended it");
    daemon.until_state(sandbox.id(), State::Gone).await;
    assert_eq!(
        records(&daemon, sandbox.id()).await,
        ["making", "warmed", "claimed", "ending", "gone"]
    );
    refused(sandbox.exec(["true"]).output().await, Reason::SandboxEnded);
    refused(sandbox.renew(Duration::from_secs(60)).await, Reason::SandboxEnded);
    daemon.until_warm(1).await;
    assert_eq!(daemon.slot_dirs().len(), 1);
}

#[tokio::test]
async fn c07_a_release_that_meets_the_end_of_the_lease_is_one_teardown() {
    let daemon = Setup::stub().in_process().warm(16).start().await;
    daemon.until_warm(16).await;
    let client = daemon.client().await;
    let mut claims = Vec::new();
    for _ in 0..16 {
        let claim = client.claim("default").lease(Duration::from_secs(1)).warm_only();
        claims.push(claim.await.unwrap());
    }
    let released = claims.into_iter().map(|claim| async move {
        let over = claim.expires_at().unwrap();
        let left = over
            .duration_since(std::time::SystemTime::now())
            .unwrap_or_default();
        // The race is the point: both want it in the same moment.
        tokio::time::sleep(left).await;
        let claim = claim.keep();
        let outcome = claim.release().await;
        (claim.id().to_owned(), outcome.unwrap().already)
    });
    let released = join_all(released).await;
    daemon
        .until_rows(|rows| {
            rows.values()
                .all(|row| matches!(row.state(), State::Gone | State::Warm))
        })
        .await;
    for (id, already) in released {
        let all = records(&daemon, &id).await;
        assert_eq!(all, ["making", "warmed", "claimed", "ending", "gone"], "{id}");
        let row = daemon.until_state(&id, State::Gone).await;
        let why = if already { "lease_expired" } else { "released" };
        assert_eq!(row.why, why, "{id}: who ended it was told so");
    }
    let pool = daemon
        .until_pool("default", |pool| pool.claimed == 0 && pool.making == 0)
        .await;
    assert!(pool.warm >= 16);
}

#[tokio::test]
async fn c06_a_release_while_it_is_made_wins() {
    let mut daemon = Setup::stub().warm(0).start().await;
    let client = daemon.client().await;
    drop(client.claim("default").await.unwrap());
    daemon
        .until_rows(|rows| !rows.is_empty() && rows.values().all(|row| row.state() == State::Gone))
        .await;
    daemon.change(|setup| setup.warm(1).stub_faults("hang clone 1"));
    daemon.stop().await;
    daemon.start_again().await;
    let making = |row: &sandbox_sdk::v1::Sandbox| row.state() == State::Making;
    let rows = daemon.until_rows(|rows| rows.values().any(making)).await;
    let id = rows.values().find(|row| making(row)).unwrap().sandbox.clone();
    let client = daemon.client().await;
    assert!(!client.sandbox(id.clone(), None).release().await.unwrap().already);
    daemon.until_state(&id, State::Gone).await;
    daemon.until_warm(1).await;
    assert_eq!(records(&daemon, &id).await, ["making", "ending", "gone"]);
}

/// Where a slot's agent listens.
fn agent_socket(daemon: &Daemon, slot: u32) -> PathBuf {
    daemon.dir().join(format!("run/{slot:04x}/agent.sock"))
}

/// Takes the agent's port over, as a host that connects anew does: the daemon's link breaks, and the guest lives.
async fn break_link(socket: &Path) {
    drop(tokio::net::UnixStream::connect(socket).await.unwrap());
}

#[tokio::test]
async fn c06_a_link_that_breaks_comes_back_and_the_claim_lives() {
    let daemon = Setup::stub().warm(1).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let row = daemon.rows(&[State::Claimed]).await.remove(0);
    let running = sandbox.exec(["sleep", "1000"]).stream().await.unwrap();
    break_link(&agent_socket(&daemon, row.slot.unwrap())).await;
    let error = within(HANG, running.wait()).await.unwrap_err();
    assert!(
        error.is(Reason::AgentLost) || error.kind() == ErrorKind::Unfinished,
        "{error:?}"
    );
    harness::eventually("the link is back", || async {
        sandbox
            .exec(["true"])
            .output()
            .await
            .ok()
            .filter(|output| output.status.success())
    })
    .await;
    assert_eq!(sandbox.get().await.unwrap().state(), State::Claimed);
    assert_eq!(daemon.rows(&[State::Claimed]).await[0].pid, row.pid);
}

#[tokio::test]
async fn c06_a_release_while_the_link_is_being_made_anew_wins_at_once() {
    let daemon = Setup::stub().warm(1).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap().keep();
    let row = daemon.rows(&[State::Claimed]).await.remove(0);
    let process = harness::process::Process::look(i32::try_from(row.pid.unwrap()).unwrap()).unwrap();
    let running = sandbox.exec(["sleep", "1000"]).stream().await.unwrap();
    // Who connects anew comes to one that never greets.
    let socket = agent_socket(&daemon, row.slot.unwrap());
    let aside = socket.with_extension("aside");
    std::fs::rename(&socket, &aside).unwrap();
    let mute = tokio::net::UnixListener::bind(&socket).unwrap();
    break_link(&aside).await;
    let (_anew, _peer) = within(HANG, mute.accept()).await.unwrap();
    drop(within(HANG, running.wait()).await);
    assert!(!sandbox.release().await.unwrap().already);
    // The greeting that nobody answers may take 30 s; who waited for its end would be seen here.
    let at_once = Duration::from_secs(20);
    within(at_once, daemon.until_state(sandbox.id(), State::Gone)).await;
    process.gone().await;
    assert_eq!(
        records(&daemon, sandbox.id()).await,
        ["making", "warmed", "claimed", "ending", "gone"]
    );
    assert!(sandbox.release().await.unwrap().already);
    daemon.until_warm(1).await;
}

#[tokio::test]
async fn h05_a_guest_that_does_not_answer_is_released_all_the_same() {
    let daemon = Setup::stub().warm(1).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap().keep();
    let row = daemon.rows(&[State::Claimed]).await.remove(0);
    let process = harness::process::Process::look(i32::try_from(row.pid.unwrap()).unwrap()).unwrap();
    process.signal(Signal::STOP);
    assert!(!sandbox.release().await.unwrap().already);
    process.gone().await;
    daemon.until_state(sandbox.id(), State::Gone).await;
    daemon.until_warm(1).await;
    assert_eq!(daemon.slot_dirs().len(), 1);
}

/// Claims, runs and releases until it is told that the daemon stops; every claim that was answered and not released is
/// in `held`.
async fn traffic(client: Client, over: Arc<AtomicBool>, held: Arc<Mutex<BTreeSet<String>>>) -> Option<Error> {
    loop {
        let claim = client.claim("default").timeout(Duration::from_secs(5));
        let sandbox = match claim.await {
            Ok(sandbox) => sandbox.keep(),
            Err(error) => return Some(error),
        };
        held.lock().unwrap().insert(sandbox.id().to_owned());
        if let Err(error) = sandbox.exec(["true"]).output().await {
            return Some(error);
        }
        if over.load(Ordering::Relaxed) {
            return None;
        }
        match sandbox.release().await {
            Ok(_) => held.lock().unwrap().remove(sandbox.id()),
            Err(error) => return Some(error),
        };
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn o04_a_stop_under_traffic_refuses_new_claims_and_forgets_none() {
    let mut daemon = Setup::stub().warm(8).start().await;
    daemon.until_warm(8).await;
    let (over, held) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let client = daemon.client().await;
        tasks.spawn(traffic(client, Arc::clone(&over), Arc::clone(&held)));
    }
    daemon
        .until_rows(|rows| rows.values().filter(|row| row.state() == State::Gone).count() > 16)
        .await;
    daemon.process().signal(Signal::TERM);
    daemon.says("STOPPING=1").await;
    let status = daemon.ends().await;
    assert!(status.success(), "{status}");
    over.store(true, Ordering::Relaxed);
    for error in within(HANG, tasks.join_all()).await.into_iter().flatten() {
        let gone = matches!(
            error.kind(),
            ErrorKind::Unreachable | ErrorKind::Broken | ErrorKind::Unfinished | ErrorKind::TimedOut
        );
        assert!(
            gone || error.is(Reason::Draining) || error.is(Reason::AgentLost),
            "{error:?}"
        );
    }
    daemon.start_again().await;
    let live: BTreeSet<String> = daemon
        .rows(&[State::Claimed])
        .await
        .into_iter()
        .map(|row| row.sandbox)
        .collect();
    let held = std::mem::take(&mut *held.lock().unwrap());
    // A release may have been recorded and its answer lost with the connection; a claim may not be lost.
    assert!(live.is_subset(&held), "{live:?} live, {held:?} are known");
    let client = daemon.client().await;
    for id in held.difference(&live) {
        let row = client.sandbox(id.clone(), None).get().await.unwrap();
        assert_eq!(row.why, "released", "{id} was lost");
    }
    for id in &live {
        let output = client
            .sandbox(id.clone(), None)
            .exec(["true"])
            .output()
            .await
            .unwrap();
        assert!(output.status.success());
    }
}

#[tokio::test]
async fn o04_health_tells_serving_and_a_stop_ends_watches() {
    let mut daemon = Setup::dev().warm(1).start().await;
    let client = daemon.client().await;
    let mut watch = client.claims().watch(&Default::default()).await.unwrap();
    let mut pools = client.pools().watch(Vec::new()).await.unwrap();
    daemon.process().signal(Signal::TERM);
    let drained = async {
        while let Some(Ok(_)) = watch.next().await {}
        while let Some(Ok(_)) = pools.next().await {}
    };
    within(HANG, drained).await;
    assert!(daemon.ends().await.success());
    assert_eq!(daemon.sandbox_processes(), []);
}
