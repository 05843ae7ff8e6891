//! Clones are of one memory, and must not be of one mind.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use futures_util::future;
use sandbox_sdk::{SandboxHandle, v1::State};

use crate::node::{Node, sh};

/// That many claimed clones.
async fn clones(node: &Node, count: usize) -> Vec<SandboxHandle> {
    future::join_all((0..count).map(|_| node.claim())).await
}

/// Runs a script in each.
async fn in_each(clones: &[SandboxHandle], script: &str) -> Vec<String> {
    future::join_all(clones.iter().map(|clone| sh(clone, script))).await
}

/// How many different ones there are.
fn distinct(said: &[String]) -> usize {
    said.iter().collect::<BTreeSet<_>>().len()
}

const EIGHT: usize = 8;

#[tokio::test]
async fn inv_14_clones_differ() {
    let node = Node::warm(8).await;
    let all = clones(&node, EIGHT).await;
    // The first thing that runs in each of them.
    let first_urandom = in_each(&all, "head -c 16 /dev/urandom | od -An -tx1").await;
    assert_eq!(distinct(&first_urandom), EIGHT, "{first_urandom:?}");
    for script in [
        "hostname",
        "cat /proc/sys/kernel/hostname",
        "cat /etc/machine-id",
        "cat /proc/sys/kernel/random/boot_id",
        "cat /run/sandbox/id",
    ] {
        let said = in_each(&all, script).await;
        assert_eq!(distinct(&said), EIGHT, "{script}: {said:?}");
        assert!(
            said.iter().all(|line| !line.trim().is_empty()),
            "{script}: {said:?}"
        );
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
    let ids = in_each(&all, "cat /run/sandbox/id").await;
    for (clone, id) in all.iter().zip(&ids) {
        assert_eq!(clone.id(), id.trim(), "it knows its own name");
    }
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
