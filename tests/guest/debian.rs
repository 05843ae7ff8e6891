//! A guest with a distribution in it: a disk that is read-only below and written above, and all that a claimer may call.

use std::path::PathBuf;

use harness::{image, tour::Tour};
use sandbox_sdk::{How, v1::State};
use sandboxd::image::Image;

use crate::node::{Node, sh};

#[tokio::test(flavor = "multi_thread")]
async fn every_rpc_in_a_debian_guest() {
    let node = Node::debian(1).await;
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

/// The disk's file, if the image still is what its manifest says.
fn disk() -> (PathBuf, std::time::SystemTime) {
    let image = Image::open(&image("debian")).expect("whole, digest by digest");
    let path = image.dir().join(&image.manifest().rootfs.as_ref().unwrap().file);
    let changed = path.metadata().unwrap().modified().unwrap();
    (path, changed)
}

/// Says what is there of what the edits below are about.
const LOOK: &str = "cat /etc/os-release; sha256sum /usr/bin/wget; stat -c '%n %a %U %s' /usr/bin/git /etc/shells; \
    ls /etc/alternatives /etc/moved /opt /usr/local/bin 2>&1; cat /usr/share/base-files/motd; ls /var/lib/dpkg";

/// Changes of every kind: to what is in a file, to what is known of it, gone, new, renamed with all that is in it, in
/// the place of another kind of file.
const EDITS: &str = "set -e; echo EDITED=1 >> /etc/os-release; : > /etc/shells; rm /usr/bin/wget; \
    chown user /usr/bin/git; chmod 700 /usr/bin/git; echo new > /opt/new; mv /etc/alternatives /etc/moved; \
    mkdir /etc/alternatives; echo inside > /etc/moved/more; rm -r /var/lib/dpkg; echo a file > /var/lib/dpkg; \
    rm /usr/share/base-files/motd; ln -s /opt/new /usr/share/base-files/motd; \
    printf '#!/bin/sh\\necho ran\\n' > /usr/local/bin/tool; chmod +x /usr/local/bin/tool; tool";

#[tokio::test]
async fn erofs_root_is_writable_and_lower_unchanged() {
    let before = disk();
    let node = Node::debian(2).await;
    let (one, beside) = (node.claim().await, node.claim().await);
    let fresh = sh(&one, LOOK).await;
    assert_eq!(sh(&one, EDITS).await, "ran\n");
    let edited = sh(&one, LOOK).await;
    for part in [
        "EDITED=1\n",
        "/usr/bin/git 700 user ",
        "/etc/shells 644 root 0\n",
        "more\n",
        "/opt:\nnew\n",
        "tool\n",
    ] {
        assert!(
            edited.contains(part) && !fresh.contains(part),
            "{part} in {edited}"
        );
    }
    assert!(!edited.contains("/usr/bin/wget"), "{edited}");
    let gone = sh(&one, "readlink /usr/share/base-files/motd; cat /var/lib/dpkg").await;
    assert_eq!(gone, "/opt/new\na file\n");
    // Below, nothing can be written, whoever tries.
    let through = "test $(cat /sys/block/vda/serial) = silkd-root && cat /sys/block/vda/ro && \
        ! dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=fsync 2>/dev/null && echo refused";
    assert_eq!(sh(&one, through).await, "1\nrefused\n");

    // No other guest has them, neither one that lives beside it nor one that comes after.
    assert_eq!(sh(&beside, LOOK).await, fresh);
    one.release().await.unwrap();
    node.until_state(one.id(), State::Gone).await;
    node.until_warm(2).await;
    let after = node.claim().await;
    assert_eq!(sh(&after, LOOK).await, fresh);
    let tool = after.exec(["sh", "-c", "tool"]).output().await.unwrap();
    assert_eq!(tool.status.how, How::Code(127));
    drop((beside, after));
    node.stops_clean().await;
    assert_eq!(disk(), before);
}
