//! The making of templates: steps, warm-up, hooks, failures; and claims that come before a template is there.

use std::{fs, os::unix::fs::FileExt as _};

use bytes::Bytes;
use harness::{HANG, Setup, image, within};
use sandbox_sdk::{
    Client, Error, Reason, SandboxHandle,
    v1::{Lane, PoolKey, Template, TemplatesBuildRequest, Tier, build_step::Kind, templates_build_reply},
};

use crate::node::{Node, sh, state_dir};

fn key(template: &str) -> PoolKey {
    PoolKey {
        template: template.to_owned(),
        lane: Lane::None.into(),
        size: "small".to_owned(),
    }
}

fn request(name: &str, warmup: &[&str]) -> TemplatesBuildRequest {
    TemplatesBuildRequest {
        name: name.to_owned(),
        image: image("busybox").to_str().unwrap().to_owned(),
        lane: Lane::None.into(),
        size: "small".to_owned(),
        warmup: warmup
            .iter()
            .map(|arg| Bytes::copy_from_slice(arg.as_bytes()))
            .collect(),
        ..TemplatesBuildRequest::default()
    }
}

async fn build(client: &Client, name: &str, warmup: &[&str]) -> (Vec<Kind>, Result<Template, Error>) {
    let mut steps = Vec::new();
    // What is refused at once is refused by the call, the rest by its stream.
    let template = match client.templates().build(request(name, warmup)).await {
        Ok(build) => within(HANG * 2, build.finish(|step| steps.push(step.kind()))).await,
        Err(error) => Err(error),
    };
    (steps, template)
}

async fn claim(client: &Client, template: &str) -> (Tier, SandboxHandle) {
    let claim = client.claim_key(key(template)).timeout(HANG * 2).await.unwrap();
    (claim.tier(), claim.keep())
}

/// No pool, hence no template that somebody else builds.
async fn bare() -> Node {
    Node::on(
        state_dir(),
        Setup::qemu().from_file().config("log.filter = \"info\""),
    )
    .await
}

/// What the warm-up puts into the template: a file, and a hook that notes each renewal.
const WARMUP: &str = "echo warm > /etc/warmed; mkdir -p /etc/sandbox/renew.d; \
    printf '#!/bin/sh\\necho $SANDBOX_RENEWAL $SANDBOX_ID $SANDBOX_GENERATION >> /etc/renewals\\n' \
    > /etc/sandbox/renew.d/10-note; chmod +x /etc/sandbox/renew.d/10-note";

#[tokio::test]
async fn a_template_is_built_step_by_step_and_claims_before_it_are_cold() {
    let node = bare().await;
    let client = node.client().await;
    let mut building = client
        .templates()
        .build(request("made", &["sh", "-c", WARMUP]))
        .await
        .unwrap();
    let first = building.next().await.unwrap().unwrap();
    assert!(
        matches!(first.event, Some(templates_build_reply::Event::Step(_))),
        "{first:?}"
    );
    // There is a spec only once it is built; the file's own template is what a key can name before.
    let refused = client.claim_key(key("made")).warm_only().await.unwrap_err();
    assert!(
        refused.is(Reason::TemplateNotFound) || refused.is(Reason::TemplateBuilding),
        "{refused}"
    );
    let ((tier, cold), (steps, template)) = tokio::join!(claim(&client, "default"), async {
        let mut steps = vec![Kind::Boot];
        let finished = within(HANG * 2, building.finish(|step| steps.push(step.kind()))).await;
        (steps, finished.unwrap())
    });
    assert_eq!(tier, Tier::Cold, "no template, hence a boot");
    assert_eq!(sh(&cold, "cat /run/sandbox/id").await.trim(), cold.id());
    assert_eq!(
        steps,
        [
            Kind::Boot,
            Kind::Agent,
            Kind::Warmup,
            Kind::Quiesce,
            Kind::Capture,
            Kind::Check
        ]
    );
    let variant = &template.variants[0];
    assert_eq!(
        (variant.ram_mib, variant.machine.as_str(), variant.stale.as_str()),
        (256, "pc", "")
    );
    assert!(variant.state_bytes > 0 && !variant.qemu_version.is_empty());

    let (tier, clone) = claim(&client, "made").await;
    assert_eq!(tier, Tier::Clone, "no pool has it, hence a clone on demand");
    assert_eq!(sh(&clone, "cat /etc/warmed").await, "warm\n");
    let renewals = sh(&clone, "cat /etc/renewals; cat /run/sandbox/generation").await;
    let lines: Vec<&str> = renewals.lines().collect();
    let [note, generation] = lines[..] else {
        panic!("one renewal, of this clone alone: {renewals}");
    };
    assert_eq!(note, format!("clone {} {generation}", clone.id()));
    let (_, again) = build(&client, "made", &[]).await;
    let again = again.unwrap_err();
    assert!(again.is(Reason::TemplateExists), "{again}");
    drop((cold, clone, client));
    node.until_rows(|rows| rows.len() == 2).await;
}

#[tokio::test]
async fn what_fails_in_a_build_fails_it_with_what_was_said() {
    let node = bare().await;
    let client = node.client().await;
    let hook = "mkdir -p /etc/sandbox/renew.d; printf '#!/bin/sh\\necho no luck; exit 4\\n' \
        > /etc/sandbox/renew.d/50-bad; chmod +x /etc/sandbox/renew.d/50-bad";
    let warmup = ["sh", "-c", "echo out; echo 'oo\x1b[31mps' >&2; exit 3"];
    let hook = ["sh", "-c", hook];
    let ((_, warmup), (steps, hook)) = tokio::join!(
        build(&client, "bad-warmup", &warmup),
        build(&client, "bad-hook", &hook)
    );
    let error = warmup.unwrap_err();
    assert!(error.is(Reason::TemplateFailed), "{error}");
    for part in ["exit code 3", "out", "oo\\u{1b}[31mps"] {
        assert!(error.message().contains(part), "{part} in {}", error.message());
    }
    assert!(!error.message().contains('\x1b'), "escaped");
    let error = hook.unwrap_err();
    assert!(error.is(Reason::TemplateFailed), "{error}");
    assert!(error.message().contains("50-bad"), "{}", error.message());
    assert_eq!(steps.last(), Some(&Kind::Check), "the hook first runs in a clone");
    nothing_is_left(&node);
    assert!(client.templates().get("bad-hook").await.is_err());
}

#[tokio::test]
async fn a_build_that_nobody_waits_for_leaves_nothing() {
    let node = bare().await;
    let client = node.client().await;
    let mut building = client.templates().build(request("unwanted", &[])).await.unwrap();
    building.next().await.unwrap().unwrap();
    let started = harness::eventually("the machine of the build runs", || async {
        node.sandbox_processes().first().copied()
    });
    let machine = started.await;
    drop(building);
    machine.gone().await;
    harness::eventually("its folders are gone", || async {
        let gone = node.slot_dirs().is_empty() && template_dirs(&node).is_empty();
        gone.then_some(())
    })
    .await;
    assert!(client.templates().get("unwanted").await.is_err());
}

#[tokio::test]
async fn a_missing_or_damaged_image_is_refused_by_name() {
    let node = bare().await;
    let client = node.client().await;
    let damaged = node.home().join("damaged");
    fs::create_dir(&damaged).unwrap();
    for entry in fs::read_dir(image("busybox")).unwrap() {
        let from = entry.unwrap().path();
        fs::copy(&from, damaged.join(from.file_name().unwrap())).unwrap();
    }
    let initrd = fs::File::options()
        .write(true)
        .open(damaged.join("initrd"))
        .unwrap();
    let length = initrd.metadata().unwrap().len();
    initrd.write_all_at(b"x", length / 2).unwrap();
    for (image, reason) in [
        (node.home().join("nowhere"), Reason::ImageNotFound),
        (damaged, Reason::ImageDamaged),
    ] {
        let request = TemplatesBuildRequest {
            image: image.to_str().unwrap().to_owned(),
            ..request("refused", &[])
        };
        let refused = match client.templates().build(request).await {
            Ok(build) => within(HANG, build.finish(|_step| {})).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(refused.is(reason), "{refused}");
    }
    nothing_is_left(&node);
}

#[tokio::test]
async fn a_missing_qemu_is_refused_by_name() {
    let setup = Setup::qemu().from_file();
    let refused = setup.config("engine.qemu = \"/nowhere/qemu\"").refused().await;
    assert_eq!(refused.status.code(), Some(1));
    for part in ["error[ENGINE_MISSING]", "/nowhere/qemu"] {
        assert!(refused.stderr.contains(part), "{}", refused.stderr);
    }
}

fn template_dirs(node: &Node) -> Vec<String> {
    let found = fs::read_dir(node.dir().join("templates")).unwrap();
    found
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

fn nothing_is_left(node: &Node) {
    assert_eq!(node.sandbox_processes(), []);
    assert_eq!(node.slot_dirs(), [] as [String; 0]);
    assert_eq!(template_dirs(node), [] as [String; 0]);
}
