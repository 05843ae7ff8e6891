//! Virtual machines of lane guarded: a network card that reaches the sandbox's doors and nothing else.

use std::time::Duration;

use harness::{HANG, Setup, World, within};
use sandbox_sdk::{SandboxHandle, v1::State};
use sandboxd::{net, words::Name};

use tempfile::TempDir;

use crate::{
    doors::{NO_LOOPBACK, unproved},
    node::{Node, seeded, sh, state_dir},
};

/// Drops the namespace behind the daemon that had it.
struct Purge(Name);

impl Drop for Purge {
    fn drop(&mut self) {
        // A test that fails is not told of this too.
        drop(net::purge(&self.0));
    }
}

/// A daemon whose pool `default` is of lane guarded, in a namespace of the test's own.
async fn guarded(world: &World, name: &str) -> (Node, Purge) {
    let config = world.config();
    Box::pin(guarded_on(seeded().await, &config, name)).await
}

async fn guarded_on(state: TempDir, more: &str, name: &str) -> (Node, Purge) {
    assert!(
        rustix::process::geteuid().is_root(),
        "lane guarded needs root: it makes a network namespace"
    );
    let namespace: Name = format!("sbt-{}-{name}", std::process::id()).parse().unwrap();
    let config = format!(
        "net.namespace = \"{namespace}\"\nnet.slots = 4\npool.default.lane = \"guarded\"\npool.default.warm = 1\n{more}"
    );
    let setup = Setup::qemu().from_file().config(&config);
    let node = Box::pin(Node::on(state, setup)).await;
    (node, Purge(namespace))
}

/// What a program that must fail says, at once: against a hang it has a bound of its own.
async fn fails(sandbox: &SandboxHandle, script: &str) -> String {
    let ran = sandbox
        .exec(["sh", "-c", script])
        .timeout(Duration::from_secs(20));
    let output = within(HANG, ran.output()).await.unwrap();
    let said = format!("{}{}", output.stdout_text(), output.stderr_text());
    assert_ne!(
        output.status.how,
        sandbox_sdk::How::Code(0),
        "{script} succeeded: {said}"
    );
    said
}

#[tokio::test]
async fn lane_guarded_guest_reaches_its_doors_and_nothing_else() {
    let world = World::start().await;
    let (mut node, _purge) = guarded(&world, "doors").await;
    node.until_warm(1).await;
    let sandbox = node.claim().await;
    let port = world.port();
    let doors = "echo $http_proxy $SANDBOX_SOCKS5";
    assert_eq!(
        sh(&sandbox, doors).await,
        "http://127.0.0.1:3128 127.0.0.1:1080\n"
    );
    let fetch = format!("wget -q -O - http://allowed.test:{port}/a");
    assert_eq!(sh(&sandbox, &fetch).await, "hello from /a\n");
    let denied = fails(&sandbox, &format!("wget -O - http://other.test:{port}/")).await;
    assert!(denied.contains("403 host_not_allowed"), "{denied}");
    // A card, the one address behind it, and no way anywhere else.
    let cards = sh(&sandbox, "ls /sys/class/net").await;
    assert_eq!(cards.split_whitespace().collect::<Vec<_>>(), ["eth0", "lo"]);
    let routes = sh(&sandbox, "cat /proc/net/route").await;
    let ways: Vec<Vec<&str>> = routes
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().take(2).collect())
        .collect();
    assert_eq!(ways, [["eth0", "0101FEA9"]], "169.254.1.1 and no default route");
    assert_eq!(
        sh(&sandbox, "cat /etc/resolv.conf").await,
        "nameserver 169.254.1.1\n"
    );
    // Its host: the doors by the card too, and no other port.
    let by_card = format!("http_proxy=http://169.254.1.1:3128 {fetch}");
    assert_eq!(sh(&sandbox, &by_card).await, "hello from /a\n");
    for closed in [22, 80, 8_080] {
        fails(&sandbox, &format!("nc -w 2 169.254.1.1 {closed} < /dev/null")).await;
    }
    // Names: those that the policy allows, and no other.
    let told = sh(&sandbox, "nslookup allowed.test").await;
    assert!(
        told.contains("Address: 127.0.0.2") || told.contains("Address 1: 127.0.0.2"),
        "{told}"
    );
    let denied = fails(&sandbox, "nslookup other.test").await;
    assert!(!denied.contains("127.0.0.2"), "{denied}");
    assert!(!world.asked().iter().any(|name| name.starts_with("other")));
    // The daemon dies and comes back, and the guest's way is there again, with the same policy.
    node.kill9().await;
    node.start_again().await;
    assert_eq!(sh(&sandbox, &fetch).await, "hello from /a\n");
    let denied = fails(&sandbox, &format!("wget -O - http://other.test:{port}/")).await;
    assert!(denied.contains("403 host_not_allowed"), "{denied}");
    let id = sandbox.id().to_owned();
    sandbox.release().await.unwrap();
    node.until_state(&id, State::Gone).await;
}

#[tokio::test]
async fn door_that_does_not_answer_in_a_guarded_guest_makes_no_clone() {
    let (node, _purge) = guarded_on(state_dir(), NO_LOOPBACK, "proof").await;
    let why = unproved(&node).await;
    assert!(
        why.contains("the http door does not answer in the guest"),
        "{why}"
    );
}

#[tokio::test]
async fn lane_direct_dial_fails_fast() {
    let world = World::start().await;
    let (node, _purge) = guarded(&world, "dial").await;
    node.until_warm(1).await;
    let sandbox = node.claim().await;
    for dial in [
        "http_proxy= wget -O - http://192.0.2.7/",
        "http_proxy= wget -O - http://169.254.169.254/",
        "nc -w 10 198.51.100.7 443 < /dev/null",
    ] {
        let said = fails(&sandbox, dial).await;
        assert!(said.contains("Network is unreachable"), "{dial}: {said}");
    }
    sandbox.release().await.unwrap();
}
