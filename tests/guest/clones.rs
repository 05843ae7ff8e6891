//! Clones are of one memory, and must not be of one mind.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use futures_util::future;
use harness::HANG;
use sandbox_sdk::{
    SandboxHandle,
    v1::{State, Tier},
};

use crate::{
    lively::{GENERATION_DEVICES, lively},
    node::{Node, sh},
};

/// That many claimed clones, made as they are wanted where the stock is short.
pub(crate) async fn clones(node: &Node, count: usize) -> Vec<SandboxHandle> {
    let client = node.client().await;
    let claim = || async {
        let claim = client.claim("default").timeout(HANG * 2).await.unwrap();
        assert_ne!(claim.tier(), Tier::Cold, "it is no clone");
        claim.keep()
    };
    future::join_all((0..count).map(|_| claim())).await
}

/// Runs a script in each.
pub(crate) async fn in_each(clones: &[SandboxHandle], script: &str) -> Vec<String> {
    future::join_all(clones.iter().map(|clone| sh(clone, script))).await
}

/// How many different ones there are.
pub(crate) fn distinct(said: &[String]) -> usize {
    said.iter().collect::<BTreeSet<_>>().len()
}

pub(crate) const EIGHT: usize = 8;

/// Runs the scripts in all of them: each says something, and no two the same.
async fn all_differ(all: &[SandboxHandle], scripts: &[&str]) {
    for script in scripts {
        let said = in_each(all, script).await;
        assert_eq!(distinct(&said), all.len(), "{script}: {said:?}");
        assert!(
            said.iter().all(|line| !line.trim().is_empty()),
            "{script}: {said:?}"
        );
    }
}

#[tokio::test]
async fn first_urandom_differs() {
    let node = Node::warm(1).await;
    let all = clones(&node, EIGHT).await;
    // The first thing that runs in each of them.
    all_differ(&all, &["head -c 16 /dev/urandom | od -An -tx1"]).await;
    let devices = in_each(&all[..1], GENERATION_DEVICES).await;
    assert_eq!(devices, ["1\n"], "these machines have a generation device");
    drop((all, node));

    // A machine without one learns of its new life from silkd alone.
    let node = lively().await;
    let all = clones(&node, EIGHT).await;
    let first = in_each(&all, "cat /lively/first").await.concat();
    let first: Vec<_> = first.lines().map(ToOwned::to_owned).collect();
    assert_eq!(first.len(), EIGHT * 256);
    assert_eq!(distinct(&first), first.len(), "no sixteen bytes come twice");
    let drawn_by_silkd = ["cat /etc/machine-id", "cat /proc/sys/kernel/random/boot_id"];
    all_differ(&all, &drawn_by_silkd).await;
    let devices = in_each(&all[..1], GENERATION_DEVICES).await;
    assert_eq!(devices, ["0\n"], "these have none");
}

/// All guests have one address: at their host it is the ports that tell their connections apart.
#[tokio::test]
async fn clones_leave_from_ports_of_their_own() {
    let node = Node::warm(1).await;
    let all = clones(&node, EIGHT).await;
    let ranges = in_each(&all, "cat /proc/sys/net/ipv4/ip_local_port_range").await;
    for range in &ranges {
        let ports: Vec<u16> = range
            .split_whitespace()
            .map(|port| port.parse().unwrap())
            .collect();
        assert!(ports[0] >= 0x8000 && ports[1] - ports[0] == 4_095, "{range}");
    }
    // Two may have drawn the same of some 28,000.
    assert!(distinct(&ranges) > 2, "{ranges:?}");
}

#[tokio::test]
async fn hostname_machine_id_boot_id_distinct() {
    let node = Node::warm(1).await;
    let all = clones(&node, EIGHT).await;
    let names = [
        "hostname",
        "cat /proc/sys/kernel/hostname",
        "cat /etc/machine-id",
        "cat /proc/sys/kernel/random/boot_id",
    ];
    all_differ(&all, &names).await;
    // Whole ones, as programs check them, and the same whoever asks.
    let forms = "grep -cE '^[0-9a-f]{32}$' /etc/machine-id; \
        grep -cE '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' /proc/sys/kernel/random/boot_id; \
        [ $(hostname) = $(cat /proc/sys/kernel/hostname) ] && echo 1";
    let forms = in_each(&all, forms).await;
    assert!(forms.iter().all(|said| said == "1\n1\n1\n"), "{forms:?}");
}

#[tokio::test]
async fn inv_14_clones_differ() {
    let node = Node::warm(1).await;
    let all = clones(&node, EIGHT).await;
    let ids = in_each(&all, "cat /run/sandbox/id").await;
    for (clone, id) in all.iter().zip(&ids) {
        assert_eq!(clone.id(), id.trim(), "it knows its own name");
    }
    let hosts = in_each(
        &all,
        "grep -c \"$(hostname)\" /etc/hosts; cat /run/sandbox/generation",
    )
    .await;
    assert_eq!(
        distinct(&hosts),
        1,
        "named in its own hosts file, of one generation: {hosts:?}"
    );
    assert!(hosts[0].starts_with("1\n"), "{hosts:?}");
}

#[tokio::test]
async fn clock_within_500_ms() {
    let node = Node::warm(2).await;
    // The capture is older than what is allowed, so a clock that went on from there would show.
    let template = node.client().await.templates().get("default").await.unwrap();
    let created = template.variants[0].created_at.unwrap();
    let age = SystemTime::now().duration_since(SystemTime::try_from(created).unwrap());
    assert!(age.unwrap() > Duration::from_millis(600));
    for clone in clones(&node, 2).await {
        let before = SystemTime::now();
        let info = clone.agent().await.unwrap();
        let after = SystemTime::now();
        let told = SystemTime::try_from(info.guest_time.unwrap()).unwrap();
        let off = Duration::from_millis(500);
        assert!(
            told > before - off && told < after + off,
            "guest {told:?}, host {before:?} to {after:?}"
        );
        // Programs see the same clock.
        let (before, seconds) = (SystemTime::now(), sh(&clone, "date +%s").await);
        let told = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.trim().parse().unwrap());
        let second = Duration::from_secs(1);
        assert!(
            told + second + off > before && told < SystemTime::now() + off,
            "{seconds}"
        );
    }
}

#[tokio::test]
async fn nothing_of_one_clone_shows_in_another() {
    let node = Node::warm(2).await;
    let (one, two) = (node.claim().await, node.claim().await);
    sh(
        &one,
        "echo secret > /tmp/mine; echo secret > /etc/mine; touch /root/mine",
    )
    .await;
    let look = "cat /tmp/mine /etc/mine 2>/dev/null; ls /root /tmp";
    assert_eq!(sh(&two, look).await, sh(&two, "ls /root /tmp").await);
    // Nor in one that is made later, in the same slot.
    let slot = node.rows(&[State::Claimed]).await[0].slot;
    assert!(slot.is_some());
    one.release().await.unwrap();
    node.until_state(one.id(), State::Gone).await;
    node.until_warm(2).await;
    for later in clones(&node, 2).await {
        assert!(!sh(&later, look).await.contains("secret"));
    }
}
