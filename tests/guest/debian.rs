//! A guest with a distribution in it: a disk that is read-only below and written above, and all that a claimer may call.

use harness::{Setup, tour::Tour};

use crate::node::{Node, sh, state_dir};

#[tokio::test(flavor = "multi_thread")]
async fn every_rpc_in_a_debian_guest() {
    let node = Node::on(state_dir(), Setup::qemu_of("debian").warm(1)).await;
    node.until_warm(1).await;
    let sandbox = node.claim().await;
    let token = sandbox.token().unwrap().expose().to_owned();
    let calls = Box::pin(node.calls(sandbox.id(), &token, &[])).await;
    let tour = Tour::new(calls, "/root/tour".to_owned(), "/etc/silkd/lsp.d".to_owned());
    Box::pin(tour.walk()).await;
    // On the disk's root, over which all of that was written.
    let root = sh(&sandbox, "stat -f -c %T /; . /etc/os-release; echo $ID").await;
    assert_eq!(root, "overlayfs\ndebian\n");
    node.stops_clean().await;
}
