//! `sandboxd net`, the daemon's own start and stop, and the doctor.

use std::process::Command;

use harness::{Setup, program, sandboxd};
use sandboxd::net::{self, PREFIX};
use serde_json::json;

use crate::bench::{Space, namespace};

#[tokio::test]
async fn a_namespace_is_prepared_held_and_purged() {
    let name = namespace();
    let prepare = async || sandboxd(["--json", "net", "prepare", "--namespace", name.as_str()]).await;
    let purge = async || sandboxd(["--json", "net", "purge", "--namespace", name.as_str()]).await;
    let prepared = |made: bool, held: bool, taps: usize| json!({ "namespace": name, "off": false, "made": made, "held": held, "taps": taps });
    assert_eq!(prepare().await.value(), prepared(true, false, 0));
    let space = Space::at(&net::pin(&name));
    assert!(space.command("nft list ruleset").contains("table inet sandboxd"));
    let set = |name: &str| {
        space
            .command(&format!("cat /proc/sys/net/{name}"))
            .trim()
            .to_owned()
    };
    assert_eq!(
        (set("ipv4/ip_forward"), set("ipv4/tcp_max_tw_buckets")),
        ("0".into(), "0".into())
    );
    // Again, over what somebody did to it.
    space.command("nft flush ruleset");
    assert_eq!(prepare().await.value(), prepared(false, false, 0));
    assert!(space.command("nft list ruleset").contains("table inet sandboxd"));

    // A daemon has it: nobody else gets it, and it cannot be dropped under its feet.
    let lane = crate::bench::open(&name, 2).await;
    lane.lay(2).await.unwrap();
    assert_eq!(prepare().await.value(), prepared(false, true, 2));
    assert_eq!(purge().await.fault()["reason"], "NET_HELD");
    let options = net::Options {
        namespace: name.clone(),
        slots: 1,
        held: Default::default(),
        clock: sandboxd::clock::Clock::host(),
    };
    let second = net::Lane::open(options).await.map(drop);
    assert!(matches!(second, Err(net::NetError::Held { .. })), "{second:?}");
    lane.stop().await;
    drop(space);
    assert_eq!(
        purge().await.value(),
        json!({ "namespace": name, "dropped": true })
    );
    assert_eq!(
        purge().await.value(),
        json!({ "namespace": name, "dropped": false })
    );
    assert!(!net::pin(&name).exists());
}

#[tokio::test]
async fn a_namespace_that_leads_somewhere_is_refused() {
    let name = namespace();
    net::prepare(&name).unwrap();
    let space = Space::at(&net::pin(&name));
    space.command("ip tuntap add dev uplink mode tap");
    // Down it leads nowhere.
    net::prepare(&name).unwrap();
    space.command("ip link set uplink up");
    let refused = sandboxd(["--json", "net", "prepare", "--namespace", name.as_str()]).await;
    assert_eq!(refused.code, 1);
    let fault = refused.fault();
    assert_eq!(fault["reason"], "NET_UNAVAILABLE");
    assert!(fault["message"].as_str().unwrap().contains("uplink"), "{fault}");
    drop(space);
    assert!(net::purge(&name).unwrap());
}

#[tokio::test]
async fn without_root_it_says_so_and_without_the_lane_it_does_nothing() {
    let name = namespace();
    let weak = |arguments: &[&str]| {
        let output = Command::new("setpriv")
            .args(["--bounding-set=-all", "--inh-caps=-all"])
            .arg(program("sandboxd-faults"))
            .args(arguments)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, told) = weak(&["--json", "net", "prepare", "--namespace", name.as_str()]);
    assert_eq!(code, Some(1), "{told}");
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["error"]["reason"], "NEEDS_ROOT", "{told}");
    assert!(!net::pin(&name).exists());

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sandboxd.toml");
    std::fs::write(&file, format!("net.namespace = \"{name}\"\n")).unwrap();
    let off = sandboxd(["--json", "net", "prepare", "--config", file.to_str().unwrap()]).await;
    assert_eq!(off.value(), json!({ "namespace": name, "off": true }));
    assert!(!net::pin(&name).exists());
}

#[tokio::test]
async fn a_daemon_makes_what_is_missing_only_where_the_lane_is_on() {
    let name = namespace();
    let pin = net::pin(&name);
    let off = Setup::stub()
        .warm(0)
        .config(&format!("net.namespace = \"{name}\""));
    let mut off = off.start().await;
    off.stop().await;
    assert!(!pin.exists());

    let on = Setup::stub()
        .warm(0)
        .config(&format!("net = {{ namespace = \"{name}\", slots = 4 }}"));
    let mut daemon = on.start().await;
    let space = Space::at(&pin);
    assert!(space.command("nft list ruleset").contains("table inet sandboxd"));
    let doctor = daemon.ctl().json(["node", "doctor"]).await;
    let checks = doctor["checks"].as_array().unwrap();
    for check in ["net", "tun"] {
        let found = checks.iter().find(|found| found["name"] == check);
        assert_eq!(found.unwrap()["verdict"], "ok", "{doctor}");
    }
    // It watches.
    space.command("nft flush ruleset");
    let undone = || async {
        let back = space.command("nft list ruleset").contains("table inet sandboxd");
        (back && daemon.log().contains("lane_lock_lost")).then_some(())
    };
    harness::eventually("the table is back, and it is told", undone).await;
    let audit = daemon.dir().join("audit");
    let in_audit = || async {
        let files = std::fs::read_dir(&audit).unwrap();
        let lines = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        let lines = lines.collect::<String>();
        let mut lines = lines.lines().filter(|line| line.contains("\"lane_lock_lost\""));
        lines
            .next()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
    };
    let line = harness::eventually("the audit has it", in_audit).await;
    assert_eq!(line["kind"], "lane_lock_lost");
    assert!(line["count"].as_u64().unwrap() >= 1, "{line}");
    // No card is made ahead while no pool can use one.
    assert!(!space.command("ip link show").contains(PREFIX));
    // However it ends, the table stays, and the next daemon takes it over.
    daemon.kill9().await;
    assert!(space.command("nft list ruleset").contains("table inet sandboxd"));
    daemon.start_again().await;
    let refused = Setup::stub()
        .warm(0)
        .config(&format!("net = {{ namespace = \"{name}\", slots = 4 }}"))
        .refused()
        .await;
    assert!(format!("{refused:?}").contains("NET_HELD"), "{refused:?}");
    daemon.stop().await;
    assert!(space.command("nft list ruleset").contains("table inet sandboxd"));
    drop(space);
    assert!(net::purge(&name).unwrap());
}
