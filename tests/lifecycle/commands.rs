//! Commands of `sandboxd` that need no daemon, or stand beside one.

use std::fs;

use harness::{Setup, sandboxd};
use sandbox_sdk::v1::State;

#[tokio::test]
async fn o01_check_config_tells_every_mistake_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sandboxd.toml");
    let path = file.to_str().unwrap();
    let check = async |text: &str| {
        fs::write(&file, text).unwrap();
        (
            sandboxd(["check-config", path]).await,
            sandboxd(["--json", "check-config", path]).await,
        )
    };
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/sandboxd.toml");
    assert_eq!(
        sandboxd(["check-config", shipped]).await.code,
        0,
        "the one that is shipped"
    );
    let (text, json) = check("pool.default.warm = 3\n").await;
    assert_eq!((text.code, json.code), (0, 0), "{}", text.stderr);
    assert_eq!(json.value()["ok"], true);

    let (text, json) =
        check("[pool.default]\nwarm = 9\nwarm_max = 3\nnonsense = 1\n[node]\nmemory = \"x\"\n").await;
    assert_eq!((text.code, json.code), (1, 1));
    for place in [":3:", ":4:", ":6:"] {
        assert!(text.stderr.contains(place), "{place} in {}", text.stderr);
    }
    let fault = json.fault();
    assert_eq!(fault["reason"], "CONFIG_INVALID");
    assert_eq!(fault["mistakes"].as_array().unwrap().len(), 3, "{fault}");
    let missing = sandboxd(["--json", "check-config", "/nowhere/sandboxd.toml"]).await;
    assert_eq!(
        (missing.code, &missing.fault()["reason"]),
        (1, &"CONFIG_INVALID".into())
    );

    // And a daemon with that file does not start at all.
    let refused = Setup::stub().config("nonsense = 1").refused().await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stderr.contains("nonsense"), "{}", refused.stderr);
}

#[tokio::test]
async fn a_new_token_is_printed_once_and_only_its_hash_goes_into_the_file() {
    let made = sandboxd(["--json", "token", "new", "--name", "ci"]).await.value();
    let token = made["token"].as_str().unwrap();
    assert!(token.starts_with("sba_") && token.len() == 47, "{token}");
    assert_eq!(made["role"], "operator");
    let again = sandboxd(["--json", "token", "new", "--name", "ci"]).await.value();
    assert_ne!(again["token"], made["token"]);
    let text = sandboxd([
        "token", "new", "--name", "ci", "--role", "tenant", "--tenant", "acme",
    ])
    .await;
    assert_eq!(text.code, 0);
    let out = text.text();
    assert!(
        out.contains("[[access.token]]") && out.contains("tenant = \"acme\""),
        "{out}"
    );
    let token = out.lines().next().unwrap();
    assert_eq!(
        out.matches(token).count(),
        1,
        "the token itself stands there once"
    );
    assert_eq!(
        sandboxd(["token", "new", "--name", "ci", "--role", "tenant"])
            .await
            .code,
        2
    );
    assert_eq!(sandboxd(["token", "new", "--name", "Not A Name"]).await.code, 2);
}

#[tokio::test]
async fn journal_cat_and_check_read_beside_a_daemon_and_after_it() {
    let mut daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let client = daemon.client().await;
    let label = "\u{1b}[31mred";
    let sandbox = client.claim("default").label("colour", label).await.unwrap();
    let id = sandbox.id().to_owned();
    let dir = daemon.dir().to_str().unwrap().to_owned();
    let cat = ["journal", "cat", "--state-dir", &dir, "--sandbox", &id];
    let lines = sandboxd(cat).await;
    assert_eq!(lines.code, 0, "{}", lines.stderr);
    let values: Vec<serde_json::Value> = lines
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(values.len(), 3, "made, warm, claimed");
    assert!(
        !lines.stdout.contains(&0x1b),
        "what a claimer wrote colours no terminal"
    );
    assert!(lines.text().contains("colour"));
    let token = sandbox.token().unwrap().expose();
    assert!(
        !sandboxd(["journal", "cat", "--state-dir", &dir])
            .await
            .text()
            .contains(token)
    );
    sandbox.release().await.unwrap();
    daemon.until_state(&id, State::Gone).await;
    assert_eq!(sandboxd(cat).await.text().lines().count(), 5);

    daemon.kill9().await;
    let check = sandboxd(["--json", "journal", "check", "--state-dir", &dir]).await;
    assert_eq!(check.code, 0, "{}", check.stderr);
    let report = check.value();
    assert_eq!(
        (&report["ok"], &report["damage"]),
        (&true.into(), &serde_json::json!([]))
    );
    assert!(report["last_seq"].as_u64() > Some(5), "{report}");
    assert!(
        sandboxd(["journal", "check", "--state-dir", &dir])
            .await
            .text()
            .contains("sound")
    );
    // They change nothing: the next daemon finds what it would have found.
    daemon.start_again().await;
    daemon.until_warm(1).await;
    assert_eq!(
        sandboxd(["journal", "cat", "--state-dir", "/nowhere"]).await.code,
        1
    );
    let bad = ["journal", "cat", "--state-dir", &dir, "--sandbox", "not-an-id"];
    assert_eq!(sandboxd(bad).await.code, 1);
}

#[tokio::test]
async fn o08_doctor_judges_a_host_and_exits_by_its_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sandboxd.toml");
    let state = dir.path().join("state");
    fs::create_dir(&state).unwrap();
    let write = |qemu: &str| {
        let text = format!(
            "node.state_dir = {state:?}\nnode.run_dir = {state:?}\nlisten.metrics = \"\"\nlisten.unix = {:?}\n{qemu}",
            state.join("api.sock")
        );
        fs::write(&file, text).unwrap();
    };
    let config = file.to_str().unwrap();
    write("engine.kind = \"stub\"\nengine.isolates_nothing = true\n");
    let good = sandboxd(["--json", "doctor", "--config", config]).await;
    let checks = good.value();
    let fails = |value: &serde_json::Value| {
        let checks = value["checks"].as_array().unwrap();
        checks
            .iter()
            .filter(|check| check["verdict"] == "fail")
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!((good.code, fails(&checks)), (0, vec![]));
    write("engine.qemu = \"/nowhere/qemu\"\n");
    let bad = sandboxd(["--json", "doctor", "--config", config]).await;
    assert_eq!(bad.code, 1);
    let failing = fails(&bad.value());
    assert!(failing.iter().any(|check| check["name"] == "qemu"), "{failing:?}");
    assert!(
        failing
            .iter()
            .all(|check| check["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()))
    );
    let table = sandboxd(["doctor", "--config", config]).await;
    assert!(
        table.text().contains("fail") && table.text().contains("->"),
        "{}",
        table.text()
    );
    write("nonsense = 1\n");
    assert_eq!(sandboxd(["doctor", "--config", config]).await.code, 1);
}

#[tokio::test]
async fn the_daemon_refuses_a_host_without_its_engine_or_image_by_name() {
    let refused = Setup::stub().config("engine.stub.nothing = 1").refused().await;
    assert!(
        refused.stderr.contains("engine.stub.nothing"),
        "{}",
        refused.stderr
    );
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().to_str().unwrap();
    let image = [
        "serve",
        "--dev",
        "--engine",
        "qemu",
        "--image",
        "/nowhere",
        "--state-dir",
        state,
    ];
    let refused = sandboxd(image).await;
    assert_eq!(refused.code, 1);
    assert!(
        refused.stderr.contains("IMAGE_NOT_FOUND") && refused.stderr.contains("make image"),
        "{}",
        refused.stderr
    );
    assert_eq!(sandboxd(["serve", "--dev", "--warm", "5000"]).await.code, 2);
    assert_eq!(sandboxd(["--version"]).await.code, 0);
}
