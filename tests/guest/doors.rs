//! Doors of a virtual machine: its programs reach what the policy allows, by the environment that they find.

use harness::{HANG, Setup, World, within};
use sandbox_sdk::v1::egress_watch_reply::Event;

use crate::node::{Node, seeded, sh};

#[tokio::test]
async fn door_client_wget_unaided() {
    let world = World::start().await;
    let config = format!("pool.default.warm = 1\n{}", world.config());
    let setup = Setup::qemu().from_file().config(&config);
    let node = Box::pin(Node::on(seeded().await, setup)).await;
    node.until_warm(1).await;
    let client = node.client().await;
    let mut tail = client.egress().watch("", None).await.unwrap();
    let sandbox = node.claim().await;
    assert_eq!(
        sh(&sandbox, "echo $http_proxy $SANDBOX_SOCKS5").await,
        "http://127.0.0.1:3128 127.0.0.1:1080\n"
    );
    let port = world.port();
    let fetched = sh(&sandbox, &format!("wget -q -O - http://allowed.test:{port}/a")).await;
    assert_eq!(fetched, "hello from /a\n");
    let refused = sh(
        &sandbox,
        &format!("wget -O - http://other.test:{port}/ 2>&1 || true"),
    )
    .await;
    assert!(refused.contains("403 host_not_allowed"), "{refused}");
    // There is no other way out: no card, no route, and the doors' own host is not theirs to give.
    assert_eq!(sh(&sandbox, "ls /sys/class/net").await.trim(), "lo");
    let routes = sh(&sandbox, "cat /proc/net/route").await;
    assert_eq!(routes.lines().count(), 1, "a head and no route: {routes}");
    let mut decided = Vec::new();
    while decided.len() < 2 {
        if let Some(Event::Decision(decision)) = within(HANG, tail.next()).await.unwrap().unwrap().event {
            decided.push((decision.allowed, decision.reason));
        }
    }
    assert_eq!(
        decided,
        [(true, String::new()), (false, "host_not_allowed".to_owned())]
    );
    drop((tail, client));
    sandbox.release().await.unwrap();
}
