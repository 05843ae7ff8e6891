//! A template outlives the daemon, is checked before it is used, and is built anew rather than guessed.

use std::{fs, io::Write as _, os::unix::fs::FileExt as _, path::Path};

use harness::Setup;
use sandbox_sdk::v1::{Pool, Template};

use crate::node::{Node, own_copy, seeded, sh};

async fn template(node: &Node) -> Template {
    node.client().await.templates().get("default").await.unwrap()
}

/// Digest of the one variant on the disk, before a daemon looks at it.
fn manifest(dir: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap()
}

fn is_full(pool: &Pool) -> bool {
    pool.warm == 1 && pool.making == 0
}

#[tokio::test]
async fn a_template_is_used_again_by_the_next_daemon() {
    let mut node = Node::warm(1).await;
    let first = template(&node).await;
    assert_eq!(first.variants.len(), 1);
    assert_eq!(first.variants[0].stale, "");
    node.stop().await;
    node.start_again().await;
    node.until_warm(1).await;
    assert_eq!(template(&node).await, first);
    assert!(!node.log().contains("built in"), "nothing was built");
    assert_eq!(sh(&node.claim().await, "echo clone").await, "clone\n");
}

#[tokio::test]
async fn i09_a_damaged_template_is_built_anew() {
    let state = seeded().await;
    let dir = state.path().join("templates/default/none-small");
    // One bit of the memory in use; lengths and manifest are as they were.
    let ram = dir.join("ram");
    own_copy(&ram);
    let file = fs::File::options().read(true).write(true).open(&ram).unwrap();
    let mut byte = [0];
    let at = 1 << 20;
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    drop(file);
    let before = manifest(&dir);

    let node = Node::on(state, Setup::qemu().warm(1)).await;
    node.until_pool("default", is_full).await;
    assert!(node.log().contains("damaged"), "it is told: {}", node.log());
    let after = manifest(&dir);
    assert_ne!(after["ram"], before["ram"]);
    assert_ne!(after["created_at"], before["created_at"]);
    assert_eq!(template(&node).await.variants[0].stale, "");
    assert_eq!(sh(&node.claim().await, "echo whole").await, "whole\n");
    node.stops_clean().await;
}

#[tokio::test]
async fn i08_a_template_of_another_qemu_is_built_anew() {
    let state = seeded().await;
    let dir = state.path().join("templates/default/none-small");
    let path = dir.join("manifest.json");
    let mut text = manifest(&dir);
    let here = text["facts"]["version"].as_str().unwrap().to_owned();
    text["facts"]["version"] = "6.2.0".into();
    own_copy(&path);
    let mut file = fs::File::options()
        .write(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    file.write_all(text.to_string().as_bytes()).unwrap();
    drop(file);

    let node = Node::on(state, Setup::qemu().warm(1)).await;
    node.until_pool("default", is_full).await;
    let variant = template(&node).await.variants[0].clone();
    assert_eq!((variant.qemu_version, variant.stale), (here, String::new()));
    assert!(node.log().contains("built in"), "{}", node.log());
    assert_eq!(sh(&node.claim().await, "echo new").await, "new\n");
}
