//! The daemon itself: info, doctor, reload, metrics, health, counts of work.

use std::time::Duration;

use futures_util::future::join_all;
use harness::{Daemon, HANG, Setup, refused, within};
use rustix::process::Signal;
use sandbox_sdk::{
    Reason,
    v1::{Accel, Engine, State, Tier, Verdict, Work},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

async fn get(port: u16, path: &str) -> String {
    within(HANG, async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    })
    .await
}

/// A shell's 1,024 descriptors were once enough for 177 sandboxes.
#[tokio::test]
async fn h07_the_daemon_takes_all_descriptors_that_it_may_have() {
    let daemon = Setup::stub().start().await;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.process().pid)).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    let words: Vec<&str> = line.unwrap().split_whitespace().collect();
    let (soft, hard) = (words[3], words[4]);
    assert_eq!(soft, hard, "{limits}");
}

#[tokio::test]
async fn node_info_and_doctor_say_what_runs() {
    let daemon = Setup::stub()
        .warm(2)
        .config("node.name = \"box-7\"")
        .start()
        .await;
    daemon.until_warm(2).await;
    let client = daemon.client().await;
    let claim = client.claim("default").await.unwrap();
    daemon.until_warm(2).await;
    let info = client.node().info().await.unwrap();
    assert_eq!(
        (info.name.as_str(), info.engine(), info.accel()),
        ("box-7", Engine::Stub, Accel::None)
    );
    assert_eq!(
        (info.sandboxes["warm"], info.sandboxes["claimed"]),
        (2, 1),
        "{info:?}"
    );
    assert!(info.ready && info.started_at.is_some() && !info.accel_why.is_empty());
    let doctor = client.node().doctor().await.unwrap();
    assert!(
        doctor
            .checks
            .iter()
            .any(|check| check.name == "state_dir" && check.verdict() == Verdict::Ok),
        "{doctor:?}"
    );
    let wrong = doctor
        .checks
        .iter()
        .filter(|check| check.verdict() != Verdict::Ok && check.remedy.is_empty());
    assert_eq!(wrong.count(), 0, "what is wrong has a remedy: {doctor:?}");
    let json = daemon.ctl().json(["node", "info"]).await;
    assert_eq!(
        (&json["engine"], &json["sandboxes"]["claimed"]),
        (&"stub".into(), &1.into())
    );
    drop(claim);
}

#[tokio::test]
async fn o02_a_reload_is_all_or_nothing_by_call_and_by_signal() {
    let mut daemon = Setup::stub()
        .in_process()
        .config("pool.default.warm = 1")
        .start()
        .await;
    let client = daemon.client().await;
    let claim = client.claim("default").await.unwrap();
    daemon.configure("pool.default.warm = 3\npool.web.warm = 0\nnode.name = \"renamed\"\n");
    let reply = client.node().reload().await.unwrap();
    assert_eq!(reply.changed, ["pool.default", "pool.web"]);
    assert_eq!(reply.needs_restart, ["node.name"]);
    daemon.until_warm(3).await;
    // What waits for a restart goes on waiting, and is not shown as if it were in force.
    assert_eq!(client.node().reload().await.unwrap().needs_restart, ["node.name"]);
    assert_ne!(client.node().info().await.unwrap().name, "renamed");

    for broken in [
        "pool.default.warm = 5\nnonsense = 1\n",
        "pool.default.warm = \n",
        "pool.default.warm = 5000\n",
    ] {
        daemon.configure(broken);
        let error = refused(client.node().reload().await, Reason::ReloadRefused);
        assert!(error.message().contains("sandboxd.toml"), "{error:?}");
        let pools = client.pools().list().await.unwrap();
        assert_eq!(pools.len(), 2);
        assert_eq!(
            pools[0].spec.as_ref().unwrap().warm,
            3,
            "the old one stays in force"
        );
    }
    assert_eq!(
        daemon.ctl().error(["node", "reload"]).await["reason"],
        "RELOAD_REFUSED"
    );

    daemon.configure("pool.default.warm = 2\n");
    daemon.process().signal(Signal::HUP);
    daemon.says("READY=1").await;
    let pools = client.pools().list().await.unwrap();
    assert_eq!(pools.len(), 1, "a pool that left the file is gone");
    assert_eq!(pools[0].spec.as_ref().unwrap().warm, 2);
    // Neither cost the claim anything.
    assert_eq!(claim.get().await.unwrap().state(), State::Claimed);
    daemon.process().signal(Signal::HUP);
    daemon.says("READY=1").await;
}

#[tokio::test]
async fn dev_mode_has_nothing_to_reload() {
    let daemon = Setup::dev().in_process().warm(1).start().await;
    let client = daemon.client().await;
    refused(client.node().reload().await, Reason::ReloadRefused);
    daemon.process().signal(Signal::HUP);
    daemon.says("READY=1").await;
    assert!(client.node().info().await.unwrap().ready);
}

#[tokio::test]
async fn o07_metrics_have_distributions_by_tier_and_every_state() {
    let mut daemon = Setup::stub()
        .in_process()
        .warm(2)
        .config("listen.metrics = \"127.0.0.1:0\"")
        .start()
        .await;
    daemon.until_warm(2).await;
    let port = daemon.process().listening_ports()[0];
    let client = daemon.client().await;
    let mut kept = Vec::new();
    for _ in 0..3 {
        kept.push(client.claim("default").wait(HANG).warm_only().await.unwrap());
    }
    refused(
        client
            .claim("default")
            .warm_only()
            .wait(Duration::ZERO)
            .lease(Duration::ZERO)
            .await,
        Reason::LeaseOutOfRange,
    );
    daemon.until_warm(2).await;
    let text = get(port, "/metrics").await;
    let value = |name: &str, labels: &[&str]| -> f64 {
        let fits = |line: &&str| line.starts_with(name) && labels.iter().all(|label| line.contains(label));
        let line = text
            .lines()
            .find(fits)
            .unwrap_or_else(|| panic!("no {name} {labels:?} in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let warm = &["tier=\"warm\"", "pool=\"default\""];
    assert_eq!(
        value(
            "sandboxd_claim_seconds_count",
            &[warm[0], warm[1], "outcome=\"ok\""]
        ),
        3.0
    );
    assert!(text.contains("sandboxd_claim_seconds_bucket"));
    assert!(value("sandboxd_claim_step_seconds_count", &[warm[0], "step=\"record\""]) >= 3.0);
    assert_eq!(value("sandboxd_pool_warm", &["pool=\"default\""]), 2.0);
    assert_eq!(value("sandboxd_pool_claimed", &["pool=\"default\""]), 3.0);
    assert_eq!(value("sandboxd_sandboxes", &["state=\"claimed\""]), 3.0);
    for step in ["start", "link", "renew", "all"] {
        let step = format!("step=\"{step}\"");
        let count = value("sandboxd_refill_seconds_count", &["pool=\"default\"", &step]);
        assert_eq!(count, 5.0, "{step}");
    }
    assert_eq!(
        value("sandboxd_refills_total", &["pool=\"default\"", "outcome=\"ok\""]),
        5.0
    );
    assert!(value("sandboxd_journal_bytes", &[]) > 0.0);
    assert_eq!(value("sandboxd_ready", &[]), 1.0);
    assert!(get(port, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(get(port, "/readyz").await.starts_with("HTTP/1.1 200"));
    assert!(get(port, "/nothing").await.starts_with("HTTP/1.1 404"));
    drop(kept);
    daemon.stop().await;
}

/// Every counter but the bytes, which depend on the width of numbers.
fn counters(work: &Work) -> [u64; 8] {
    let Work {
        journal_records,
        writes,
        syncs,
        netlink_messages,
        binds,
        qmp_commands,
        guest_round_trips,
        tasks_spawned,
        ..
    } = *work;
    [
        journal_records,
        writes,
        syncs,
        netlink_messages,
        binds,
        qmp_commands,
        guest_round_trips,
        tasks_spawned,
    ]
}

async fn traced(daemon: &Daemon) -> Work {
    let client = daemon.client().await;
    let claim = client
        .claim("default")
        .trace()
        .warm_only()
        .wait(HANG)
        .await
        .unwrap();
    assert_eq!(claim.tier(), Tier::Warm);
    let work = claim.work().unwrap().clone();
    claim.release().await.unwrap();
    work
}

#[tokio::test(flavor = "multi_thread")]
async fn c18_a_warm_claim_is_one_record_and_one_write_however_many_live() {
    const LIVE: usize = 5_000;
    let daemon = Setup::stub()
        .in_process()
        .warm(64)
        .config("node.max_sandboxes = 65535\npool.default.warm_max = 512")
        .log("warn")
        .start()
        .await;
    daemon.until_pool("default", |pool| pool.warm >= 64).await;
    let few = traced(&daemon).await;
    assert_eq!(counters(&few), [1, 1, 0, 0, 0, 0, 0, 0], "{few:?}");

    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(daemon.client().await);
    }
    for _ in 0..LIVE / 100 {
        let claims = (0..100).map(|n| {
            let claim = clients[n % 4].claim("default").wait(HANG);
            async { drop(claim.await.unwrap().keep()) }
        });
        join_all(claims).await;
    }
    let info = clients[0].node().info().await.unwrap();
    assert_eq!(info.sandboxes["claimed"] as usize, LIVE);
    daemon
        .until_pool("default", |pool| pool.warm > 0 && pool.making == 0)
        .await;
    let many = traced(&daemon).await;
    assert_eq!(counters(&many), counters(&few), "{many:?}");
    let wider = many.journal_bytes.abs_diff(few.journal_bytes);
    assert!(
        wider < 32,
        "{} bytes with one live, {} with {LIVE}",
        few.journal_bytes,
        many.journal_bytes
    );
}

#[tokio::test]
async fn sandboxctl_trace_names_every_counter() {
    let daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let ctl = daemon.ctl();
    let traced = ctl.json(["trace", "claim"]).await;
    let work = &traced["work"];
    for (key, count) in [
        ("journal_records", 1),
        ("writes", 1),
        ("netlink_messages", 0),
        ("binds", 0),
        ("qmp_commands", 0),
        ("guest_round_trips", 0),
        ("tasks_spawned", 0),
    ] {
        assert_eq!(work[key], count, "{key}: {traced}");
    }
    let steps = traced["steps_us"].as_object().unwrap();
    assert!(steps.contains_key("record"), "{traced}");
    let claim = ctl.json(["claim"]).await;
    let id = claim["sandbox"].as_str().unwrap();
    let traced = ctl.json(["trace", "exec", id, "--", "true"]).await;
    assert_eq!(traced["work"]["journal_records"], 0, "{traced}");
}
