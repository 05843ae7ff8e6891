//! Disks that are full, journals that were cut or written over, templates that were touched.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    time::Duration,
};

use futures_util::future::join_all;
use harness::{Daemon, Setup, refused, sandboxd};
use sandbox_sdk::{Reason, SandboxHandle, v1::State};

/// The segment with the newest records.
fn segment(daemon: &Daemon) -> PathBuf {
    let entries = fs::read_dir(daemon.dir().join("journal")).unwrap();
    let used = |path: &PathBuf| fs::read(path).unwrap().iter().take(8).any(|byte| *byte != 0);
    let segments = entries.map(|entry| entry.unwrap().path()).filter(used);
    segments.max().unwrap()
}

/// Where the last record of a segment ends: zeros follow.
fn end(path: &PathBuf) -> u64 {
    let bytes = fs::read(path).unwrap();
    let last = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    u64::try_from(last).unwrap() + 1
}

async fn two_claims(daemon: &Daemon) -> [SandboxHandle; 2] {
    daemon.until_warm(2).await;
    let client = daemon.client().await;
    let one = client.claim("default").await.unwrap().keep();
    let two = client.claim("default").await.unwrap().keep();
    daemon.until_warm(2).await;
    [one, two]
}

async fn check(daemon: &Daemon) -> (i32, serde_json::Value) {
    let dir = daemon.dir();
    let ran = sandboxd(["--json", "journal", "check", "--state-dir", dir.to_str().unwrap()]).await;
    (ran.code, ran.value())
}

#[tokio::test]
async fn c12_a_torn_end_costs_at_most_what_nobody_was_told() {
    for torn in ["cut", "garbage", "half a record"] {
        let mut daemon = Setup::stub().warm(2).start().await;
        let claims = two_claims(&daemon).await;
        daemon.kill9().await;
        let path = segment(&daemon);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let end = end(&path);
        match torn {
            // The last record is that of a warm sandbox, which the next start makes sure of.
            "cut" => file.write_all_at(&[0; 8], end - 8).unwrap(),
            "garbage" => file.write_all_at(&[0xA5; 100], end).unwrap(),
            _ => {
                let mut frame = 5_000_u32.to_le_bytes().to_vec();
                frame.extend([7; 12]);
                frame.extend(b"{\"half\":");
                file.write_all_at(&frame, end).unwrap();
            }
        }
        let (code, report) = check(&daemon).await;
        // Bytes that no torn write leaves are told as damage, which is nobody's record.
        let told = if torn == "garbage" { "damage" } else { "torn" };
        assert_eq!(code, i32::from(told == "damage"), "{torn}: {report}");
        assert!(report["torn"].is_string() == (told == "torn"), "{torn}: {report}");
        daemon.start_again().await;
        assert!(daemon.log().contains(told), "{torn}");
        let rows = daemon.rows(&[State::Claimed]).await;
        assert_eq!(rows.len(), 2, "{torn}");
        let client = daemon.client().await;
        for claim in &claims {
            let again = client.sandbox(claim.id(), claim.token().cloned());
            assert!(
                again.exec(["true"]).output().await.unwrap().status.success(),
                "{torn}"
            );
        }
        daemon.until_warm(2).await;
        // Of what was cut off nothing is left. What damage may have been the claims of is given to nobody.
        let quarantined = daemon.rows(&[State::Quarantined]).await.len();
        assert_eq!(quarantined, if told == "damage" { 2 } else { 0 }, "{torn}");
        assert_eq!(daemon.slot_dirs().len(), 4 + quarantined, "{torn}");
    }
}

#[tokio::test]
async fn c13_a_damaged_record_costs_its_sandbox_only_and_is_named() {
    let mut daemon = Setup::stub().warm(2).start().await;
    let [hurt, sound] = two_claims(&daemon).await;
    let before = daemon.sandbox_processes();
    daemon.kill9().await;
    let path = segment(&daemon);
    let mut bytes = fs::read(&path).unwrap();
    let id = hurt.id().as_bytes();
    let hits: Vec<usize> = bytes
        .windows(id.len())
        .enumerate()
        .filter_map(|(at, window)| (window == id).then_some(at))
        .collect();
    // Of its last record, the claim: a byte of what stands behind the id.
    let at = hits.last().unwrap() + id.len() + 20;
    bytes[at] ^= 0x20;
    fs::write(&path, &bytes).unwrap();

    let (code, report) = check(&daemon).await;
    assert_eq!(code, 1, "{report}");
    let damage = &report["damage"][0];
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(damage["file"].as_str().unwrap().ends_with(name), "{report}");
    let offset = usize::try_from(damage["offset"].as_u64().unwrap()).unwrap();
    assert!(offset <= at && at - offset < 1000, "{report}");

    daemon.start_again().await;
    let client = daemon.client().await;
    let again = client.sandbox(sound.id(), sound.token().cloned());
    assert!(again.exec(["true"]).output().await.unwrap().status.success());
    // Nobody gets the other, not even with the token; an operator sees it, with its process, and may end it.
    let claimer = daemon.client_as(hurt.token().unwrap().expose()).await;
    refused(
        claimer.sandbox(hurt.id(), None).exec(["true"]).output().await,
        Reason::SandboxNotFound,
    );
    let rows = daemon.rows(&[State::Quarantined]).await;
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert_eq!(rows[0].sandbox, hurt.id());
    assert!(
        before.iter().all(|process| process.lives()),
        "nothing is ended on the word of a damaged record"
    );
    assert!(!client.sandbox(hurt.id(), None).release().await.unwrap().already);
    daemon.until_state(hurt.id(), State::Gone).await;
    daemon.until_warm(2).await;
    assert_eq!(daemon.slot_dirs().len(), 3);
}

#[tokio::test]
async fn c14_a_journal_of_nonsense_is_kept_and_nothing_is_ended_on_its_word() {
    let mut daemon = Setup::stub().warm(2).start().await;
    two_claims(&daemon).await;
    let before = daemon.sandbox_processes();
    daemon.kill9().await;
    let path = segment(&daemon);
    let length = fs::metadata(&path).unwrap().len();
    let nonsense = vec![0x5A; usize::try_from(length).unwrap()];
    fs::write(&path, &nonsense).unwrap();
    let (code, _report) = check(&daemon).await;
    assert_eq!(code, 1);
    daemon.start_again().await;
    assert!(daemon.log().contains("damaged"), "{}", daemon.log());
    assert!(before.iter().all(|process| process.lives()));
    let kept = fs::read(path.with_extension("damaged"));
    assert_eq!(kept.unwrap(), nonsense, "the bytes are kept");
    // It serves, in places that nothing lies in.
    daemon.until_warm(2).await;
    let sandbox = daemon.client().await.claim("default").await.unwrap();
    assert!(sandbox.exec(["true"]).output().await.unwrap().status.success());
}

#[tokio::test]
async fn o03_a_journal_of_a_newer_version_is_refused_by_name() {
    let mut daemon = Setup::stub().in_process().warm(1).start().await;
    daemon.until_warm(1).await;
    daemon.kill9().await;
    let path = segment(&daemon);
    let mut bytes = fs::read(&path).unwrap();
    // The version stands behind the magic; behind 24 bytes of both and more stands their checksum.
    bytes[8..12].copy_from_slice(&99_u32.to_le_bytes());
    let sum = crc32c::crc32c(&bytes[..24]);
    bytes[24..28].copy_from_slice(&sum.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let before = fs::read(&path).unwrap();
    let refused = daemon.refuses_again().await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stderr.contains("STATE_NEWER"), "{}", refused.stderr);
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn i09_a_template_that_is_missing_damaged_or_another_versions_is_built_anew() {
    for change in ["missing", "cut", "not JSON", "another version"] {
        let mut daemon = Setup::stub().warm(1).start().await;
        daemon.until_warm(1).await;
        let claim = daemon.client().await.claim("default").await.unwrap().keep();
        daemon.until_warm(1).await;
        let stock = daemon.rows(&[State::Warm]).await.remove(0).sandbox;
        daemon.kill9().await;
        let variant = daemon.dir().join("templates/default/none-small");
        let manifest = fs::read_dir(&variant)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.extension().is_some_and(|extension| extension == "json"))
            .unwrap();
        let text = fs::read_to_string(&manifest).unwrap();
        match change {
            "missing" => fs::remove_dir_all(&variant).unwrap(),
            "cut" => replace(&manifest, text.split_at(text.len() / 2).0),
            "not JSON" => replace(&manifest, "nonsense"),
            _ => {
                let version = format!("\"version\":\"{}\"", env!("CARGO_PKG_VERSION"));
                let spaced = version.replacen(':', ": ", 1);
                let other = text
                    .replace(&version, "\"version\":\"0.0.1\"")
                    .replace(&spaced, "\"version\": \"0.0.1\"");
                assert_ne!(other, text);
                replace(&manifest, &other);
            }
        }
        daemon.start_again().await;
        daemon.until_warm(1).await;
        let old = daemon.until_state(&stock, State::Gone).await;
        assert!(old.why.starts_with("template_changed"), "{change}: {}", old.why);
        let client = daemon.client().await;
        let again = client.sandbox(claim.id(), claim.token().cloned());
        assert!(
            again.exec(["true"]).output().await.unwrap().status.success(),
            "{change}: a claim lives on"
        );
        assert!(client.claim("default").await.is_ok(), "{change}");
        let template = client.templates().get("default").await.unwrap();
        assert_eq!(template.variants.len(), 1, "{change}");
        assert_eq!(template.variants[0].stale, "", "{change}");
    }
}

/// Writes a file anew that its owner had made read-only.
fn replace(path: &PathBuf, text: &str) {
    fs::remove_file(path).unwrap();
    fs::write(path, text).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn c16_a_full_disk_refuses_claims_by_name_lets_releases_through_and_recovers() {
    // A disk of its own, in a namespace of its own: it goes with the daemon, and nothing is to be unmounted.
    let disk = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=64m tmpfs \"$0\" && exec \"$@\"";
    let mut wrapper = vec!["unshare", "--mount"];
    if !rustix::process::geteuid().is_root() {
        wrapper.push("--map-root-user");
    }
    let folder = disk.path().to_str().unwrap();
    wrapper.extend(["sh", "-c", mount, folder]);
    let daemon = Setup::stub()
        .in_process()
        .warm(8)
        .config("pool.default.warm_max = 8")
        .state_dir(disk.path())
        .socket_outside()
        .wrapped(&wrapper)
        .log("warn")
        .start()
        .await;
    daemon.until_warm(8).await;
    let client = daemon.client().await;
    let kept = client.claim("default").await.unwrap();

    let inside = PathBuf::from(format!("/proc/{}/root{folder}/fill", daemon.process().pid));
    let mut fill = fs::File::create(&inside).unwrap();
    let mut block = vec![1; 1 << 20];
    while !block.is_empty() {
        if fill.write_all(&block).is_err() {
            block.truncate(block.len() / 2);
        }
    }
    // What was allocated ahead is used up first; records of a claim are made as long as they may be.
    let mut full = None;
    while full.is_none() {
        let claims = (0..8).map(|_| {
            let labels = (0..16).map(|n| (n.to_string(), "\u{1}".repeat(255))).collect();
            let claim = client
                .claim("default")
                .labels(labels)
                .wait(Duration::from_secs(2));
            claim.timeout(Duration::from_secs(3)).into_future()
        });
        for claim in join_all(claims).await {
            match claim {
                Ok(claim) => drop(claim.release().await.unwrap()),
                Err(error) => full = Some(error),
            }
        }
    }
    let error = full.unwrap();
    assert!(
        error.is(Reason::JournalFull) || error.is(Reason::PoolEmpty),
        "{error:?}"
    );
    assert!(error.retry_after().is_some(), "{error:?}");
    daemon
        .until_rows(|rows| rows.values().filter(|row| row.state() == State::Claimed).count() == 1)
        .await;
    let short = || {
        client
            .claim("default")
            .wait(Duration::ZERO)
            .timeout(Duration::from_secs(1))
    };
    refused(short().await, Reason::JournalFull);
    refused(
        client
            .pools()
            .apply(sandbox_sdk::v1::PoolSpec {
                name: "more".to_owned(),
                key: Some(sandbox_sdk::v1::PoolKey {
                    template: "default".to_owned(),
                    ..Default::default()
                }),
                ..Default::default()
            })
            .await,
        Reason::JournalFull,
    );
    assert_eq!(kept.get().await.unwrap().state(), State::Claimed);
    let released = kept.release().await.unwrap();
    assert!(!released.already, "an end works on a full disk");

    drop(fill);
    fs::remove_file(&inside).unwrap();
    let patient = client.claim("default").wait(Duration::from_secs(30));
    let sandbox = patient.await.unwrap();
    assert_eq!(daemon.rows(&[State::Claimed]).await.len(), 1);
    sandbox.release().await.unwrap();
}
