//! The audit's files of a daemon that is real: followed by `sandboxd audit verify`, after kills and on a full disk.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use harness::{Daemon, Setup, World, sandboxd, within};
use serde_json::Value;

use crate::doors::{doors, get};

/// A hang, not a speed.
const LONG: Duration = Duration::from_secs(35);

/// The files of a chain, in their order.
fn files(state: &Path, name: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(state.join(name))
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

/// Whole lines of a chain.
fn lines(state: &Path, name: &str) -> Vec<Value> {
    let mut lines = Vec::new();
    for file in files(state, name) {
        let text = fs::read_to_string(file).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        lines.extend(
            whole
                .lines()
                .map(|line| serde_json::from_str::<Value>(line).unwrap()),
        );
    }
    lines
}

fn kinds<'v>(lines: &'v [Value], kind: &str) -> Vec<&'v Value> {
    lines.iter().filter(|line| line["kind"] == kind).collect()
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    within(LONG, async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert!(is_so(), "{what}");
}

async fn verify(state: &Path) -> (i32, Value, String) {
    let dir = state.to_str().unwrap();
    let json = sandboxd(["--json", "audit", "verify", dir]).await;
    let text = sandboxd(["audit", "verify", dir]).await;
    assert_eq!(json.code, text.code, "{text:?}");
    (json.code, json.value(), text.text())
}

async fn start(world: &World) -> Daemon {
    Setup::stub().warm(2).config(&world.config()).start().await
}

#[tokio::test]
async fn audit_verify_follows_a_daemons_files() {
    let world = World::start().await;
    let mut daemon = start(&world).await;
    let state = daemon.dir();
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let (http, _) = doors(&sandbox).await;
    let allowed = format!("http://allowed.test:{}/a", world.port());
    assert!(get(http, &allowed).await.starts_with("HTTP/1.1 200"));
    let answer = get(http, "http://other.test/").await;
    let body = answer.split("\r\n\r\n").nth(1).unwrap();
    let number = serde_json::from_str::<Value>(body).unwrap()["error"]["audit_seq"]
        .as_u64()
        .unwrap();
    let of_claim = || {
        lines(&state, "audit")
            .into_iter()
            .filter(|line| line["sandbox"] == sandbox.id())
            .collect::<Vec<_>>()
    };
    until("both decisions have a line", || {
        kinds(&of_claim(), "decision").len() == 2 && kinds(&of_claim(), "end").len() == 2
    })
    .await;
    let own = of_claim();
    let decisions = kinds(&own, "decision");
    assert_eq!(
        (&decisions[0]["decision"], &decisions[0]["path"]),
        (&"allow".into(), &"/a".into())
    );
    assert_eq!(
        (&decisions[1]["reason"], &decisions[1]["seq"]),
        (&"host_not_allowed".into(), &number.into())
    );

    // Beside the daemon.
    let (code, report, text) = verify(&state).await;
    assert_eq!((code, &report["ok"]), (0, &true.into()), "{report}");
    assert!(text.ends_with("sound\n"), "{text}");
    // A kill shows, and is no fault.
    daemon.kill9().await;
    daemon.start_again().await;
    until("the next one begins", || {
        kinds(&lines(&state, "audit"), "start").len() == 2
    })
    .await;
    daemon.stop().await;
    let (code, report, text) = verify(&state).await;
    assert_eq!(code, 0, "{text}");
    let chain = report["chains"]
        .as_array()
        .unwrap()
        .iter()
        .find(|chain| chain["chain"] == "audit")
        .unwrap();
    assert_eq!(
        (&chain["unclean"], &chain["lost"]),
        (&1.into(), &0.into()),
        "{chain}"
    );
    let all = lines(&state, "audit");
    assert_eq!(all.last().unwrap()["kind"], "stop");
    assert_eq!(
        chain["journal"],
        all.last().unwrap()["seq"],
        "a stop tells the journal: {report}"
    );

    // What is edited is named; so is what is cut off, since the journal knows of it.
    let file = files(&state, "audit").pop().unwrap();
    let whole = fs::read_to_string(&file).unwrap();
    fs::write(&file, whole.replace("host_not_allowed", "port_not_allowed")).unwrap();
    let (code, report, text) = verify(&state).await;
    assert_eq!((code, &report["ok"]), (1, &false.into()), "{report}");
    let line = 1 + whole
        .lines()
        .position(|line| line.contains("host_not_allowed"))
        .unwrap();
    let expected = format!("{}:{line}: number {number}: edited: ", file.display());
    assert!(
        text.contains(&expected) && text.ends_with("not sound\n"),
        "{expected}: {text}"
    );
    let cut = whole.trim_end().rfind('\n').unwrap() + 1;
    fs::write(&file, &whole.as_bytes()[..cut]).unwrap();
    let (code, _, text) = verify(&state).await;
    assert_eq!(code, 1);
    assert!(
        text.contains("cut tail: the journal knows lines up to number"),
        "{text}"
    );
    // Moved elsewhere, a file stands for itself.
    fs::write(&file, &whole).unwrap();
    let (code, _, text) = verify(&state.join("audit")).await;
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("tails are not compared"), "{text}");
    let nothing = sandboxd(["--json", "audit", "verify", "/nowhere"]).await;
    assert_eq!((nothing.code, &nothing.fault()["place"]), (1, &"/nowhere".into()));
}

#[tokio::test]
async fn usage_survives_noise_and_kill() {
    let world = World::start().await;
    let mut daemon = start(&world).await;
    let state = daemon.dir();
    daemon.until_warm(2).await;
    let client = daemon.client().await;
    let released = client.claim("default").await.unwrap();
    let kept = client.claim("default").await.unwrap();
    let url = format!("http://allowed.test:{}/", world.port());
    let mut doors_of = Vec::new();
    for sandbox in [&released, &kept] {
        let (http, _) = doors(sandbox).await;
        for _ in 0..5 {
            assert!(get(http, &url).await.starts_with("HTTP/1.1 200"));
        }
        assert!(get(http, "http://other.test/").await.starts_with("HTTP/1.1 403"));
        doors_of.push(http);
    }
    let kept = kept.keep();
    let released_id = released.id().to_owned();
    released.release().await.unwrap();
    let of = |id: &str| -> Vec<Value> {
        let all = lines(&state, "usage");
        kinds(&all, "usage")
            .into_iter()
            .filter(|line| line["sandbox"] == id)
            .cloned()
            .collect()
    };
    until("a release has its line", || {
        of(&released_id).iter().any(|line| line["last"] == true)
    })
    .await;
    let sum = |id: &str, key: &str| of(id).iter().map(|line| line[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        ["requests", "denials", "connections"].map(|key| sum(&released_id, key)),
        [6, 1, 6]
    );
    assert!(sum(&released_id, "bytes_sent") > 0 && sum(&released_id, "bytes_received") > 0);

    // What the other used since the last minute nobody knows after a kill, and the next daemon says so.
    assert!(kinds(&lines(&state, "usage"), "usage_gap").is_empty());
    daemon.kill9().await;
    daemon.start_again().await;
    until("the gap is told", || {
        !kinds(&lines(&state, "usage"), "usage_gap").is_empty()
    })
    .await;
    assert!(of(kept.id()).is_empty(), "it was no minute");
    for _ in 0..3 {
        assert!(get(doors_of[1], &url).await.starts_with("HTTP/1.1 200"));
    }
    // A stop bills what goes on, and is no gap.
    daemon.stop().await;
    assert_eq!((sum(kept.id(), "requests"), of(kept.id()).len()), (3, 1));
    assert!(of(kept.id())[0]["last"].is_null());
    daemon.start_again().await;
    let client = daemon.client().await;
    assert!(get(doors_of[1], &url).await.starts_with("HTTP/1.1 200"));
    client
        .sandbox(kept.id(), kept.token().cloned())
        .release()
        .await
        .unwrap();
    until("its release has a line", || {
        of(kept.id()).iter().any(|line| line["last"] == true)
    })
    .await;
    assert_eq!(sum(kept.id(), "requests"), 4);
    assert_eq!(kinds(&lines(&state, "usage"), "usage_gap").len(), 1);
    let (code, _, text) = verify(&state).await;
    assert_eq!(code, 0, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_loss_is_in_band() {
    // A disk of its own, in a namespace of its own: it goes with the daemon, and nothing is to be unmounted.
    let disk = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=160m tmpfs \"$0\" && exec \"$@\"";
    let mut wrapper = vec!["unshare", "--mount"];
    if !rustix::process::geteuid().is_root() {
        wrapper.push("--map-root-user");
    }
    let folder = disk.path().to_str().unwrap();
    wrapper.extend(["sh", "-c", mount, folder]);
    let world = World::start().await;
    let mut daemon = Setup::stub()
        .warm(1)
        .config(&world.config())
        .state_dir(disk.path())
        .socket_outside()
        .wrapped(&wrapper)
        .start()
        .await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let (http, _) = doors(&sandbox).await;
    daemon.until_warm(1).await;
    let url = format!("http://allowed.test:{}/", world.port());
    assert!(get(http, &url).await.starts_with("HTTP/1.1 200"));
    let mut served = 1;

    // Somebody fills the disk: what the journal needs is left to it, and nobody waits for the audit.
    let state = PathBuf::from(format!("/proc/{}/root{folder}", daemon.process().pid));
    let mut fill = fs::File::create(state.join("fill")).unwrap();
    let room = || {
        let disk = rustix::fs::statvfs(&state).unwrap();
        disk.f_bavail * disk.f_frsize
    };
    let block = vec![1; 1 << 20];
    while room() > (24 << 20) {
        fill.write_all(&block).unwrap();
    }
    within(LONG, async {
        while !daemon.log().contains("lines cannot be written") {
            assert!(get(http, &url).await.starts_with("HTTP/1.1 200"));
            served += 1;
        }
    })
    .await;
    assert!(client.claim("default").await.is_ok(), "the journal has its room");

    // Where a line is required there is a denial.
    daemon.configure(&format!("{}egress.audit.required = true\n", world.config()));
    let reply = client.node().reload().await.unwrap();
    assert_eq!(reply.changed, ["egress.audit.required"]);
    let answer = get(http, &url).await;
    assert!(answer.starts_with("HTTP/1.1 503 audit_unavailable"), "{answer}");

    // Room again: it goes on by itself, and all that was decided has its line.
    drop(fill);
    fs::remove_file(state.join("fill")).unwrap();
    within(LONG, async {
        while !get(http, &url).await.starts_with("HTTP/1.1 200") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    served += 1;
    let allowed = || {
        let all = lines(&state, "audit");
        let decisions = kinds(&all, "decision");
        decisions
            .iter()
            .filter(|line| line["decision"] == "allow")
            .count()
    };
    until("every request has its line", || allowed() == served).await;
    assert!(daemon.log().contains("lines are written again"));
    let (code, report, text) = verify(&state).await;
    assert_eq!(code, 0, "{text}");
    for chain in report["chains"].as_array().unwrap() {
        assert_eq!(chain["lost"], 0, "{report}");
    }
}
