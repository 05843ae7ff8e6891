use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use sandbox_protocol::{
    door::DoorReason,
    id::{ClaimId, SandboxId},
};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    super::{ledger, *},
    clock, of_kind, options, put, values,
};
use crate::{
    clock::Clock,
    egress::{
        Door, DoorKind, Egress, Visit,
        tests::{Bench, pool, socks5, tunnel, within},
    },
    journal::Heads,
    telemetry::metrics::{LedgerFile, Metrics},
    words::OPERATOR,
};

/// A folder that cannot be made: a file has its name.
fn block(dir: &Path) -> PathBuf {
    let path = dir.join(AUDIT);
    put(&path, b"");
    path
}

pub(super) async fn until(what: impl Fn() -> bool) {
    let waiting = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .expect("nothing hangs");
}

#[tokio::test]
async fn audit_loss_is_in_band() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let blocked = block(dir);
    let audit = Audit::open(options(dir, 64)).unwrap();
    let bench = Bench::audited(audit.clone()).await;
    bench.arm();
    let failing = || {
        audit
            .0
            .as_ref()
            .unwrap()
            .shared
            .is_failing
            .load(Ordering::Relaxed)
    };
    until(failing).await;
    // Nobody waits for the disk.
    for _ in 0..100 {
        let answer = bench.get(&bench.url("/")).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }
    let denied = bench.get("http://other.test/").await;
    assert!(denied.contains("\"audit_seq\":0"), "it has no line: {denied}");

    // Where a line is required there is a denial instead, and nothing leaves.
    audit.require(true);
    let seen = bench.origin.text().len();
    let denied = bench.get(&bench.url("/")).await;
    assert!(denied.starts_with("HTTP/1.1 503 audit_unavailable"), "{denied}");
    let mut io = bench.connect(DoorKind::Socks5);
    assert_eq!(socks5(&mut io, "allowed.test", bench.origin.port()).await, 1);
    drop(io);
    assert_eq!(bench.origin.text().len(), seen);
    bench.quiet().await;

    // There is room again.
    fs::remove_file(blocked).unwrap();
    until(|| !failing()).await;
    until(|| audit.takes()).await;
    let answer = bench.get(&bench.url("/last")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let denied = bench.get("http://other.test/").await;
    assert!(!denied.contains("\"audit_seq\":0"), "{denied}");
    bench.quiet().await;
    audit.stop().await;

    // Start and stop; 100 + 4 + 1 decisions with an end each.
    let expected = 2 + 2 * (100 + 1 + 2 + 2);
    let chain = verify(dir, &Heads::default()).unwrap().remove(0);
    assert_eq!((chain.faults, chain.numbers), (0, (1, expected)), "{chain:?}");
    let lines = values(dir, AUDIT);
    let lost = of_kind(&lines, "lost");
    let told: u64 = lost.iter().map(|line| line["count"].as_u64().unwrap()).sum();
    assert_eq!(lost.len(), 1, "{lost:?}");
    assert_eq!((told, chain.lost), (expected - 64 - 6, told), "{chain:?}");
    let numbered = lines
        .iter()
        .filter(|line| !["open", "lost"].contains(&line["kind"].as_str().unwrap()));
    assert_eq!(numbered.count() as u64 + told, expected);
    let metrics = &audit.0.as_ref().unwrap().shared.metrics;
    assert_eq!(metrics.counts(LedgerFile::Audit), (expected - told + 1, told));
    assert_eq!(lines.last().unwrap()["kind"], "stop");
}

/// What lines of usage add up to, by claim: requests, denials, bytes sent, bytes received; and how many are the last ones.
fn billed(dir: &Path) -> (BTreeMap<String, [u64; 4]>, usize) {
    let lines = values(dir, USAGE);
    let mut sums: BTreeMap<String, [u64; 4]> = BTreeMap::new();
    let usage = of_kind(&lines, "usage");
    for line in &usage {
        let sum = sums
            .entry(line["claim"].as_str().unwrap().to_owned())
            .or_default();
        let keys = ["requests", "denials", "bytes_sent", "bytes_received"];
        for (sum, key) in sum.iter_mut().zip(keys) {
            *sum += line[key].as_u64().unwrap();
        }
    }
    let last = usage.iter().filter(|line| line["last"] == true).count();
    (sums, last)
}

fn arm(egress: &Egress, door: &Door, claim: ClaimId) {
    let sides = egress.book().sides(Some(&pool()), OPERATOR, None);
    door.arm(claim, OPERATOR.into(), Some(pool()), sides);
}

/// A connection that nobody speaks on.
fn visit(door: &Door) -> Visit {
    let seat = door.seat(DoorKind::Http).unwrap();
    Visit::new(door.clone(), DoorKind::Http, door.armed().unwrap(), seat)
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
async fn usage_survives_noise_and_kill() {
    const CLAIMS: u8 = 40;
    const REQUESTS: u64 = 2_500;
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    // Nothing of the audit can be written, and its queue overflows.
    let blocked = block(dir);
    let audit = Audit::open(options(dir, 64)).unwrap();
    let egress = Egress::audited(
        Default::default(),
        Metrics::new().door,
        Clock::host(),
        audit.clone(),
    );
    let claim = |n: u8| ClaimId::from_random([n; 16]);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let egress = &egress;
            scope.spawn(move || {
                for n in (thread..CLAIMS).step_by(4) {
                    let door = egress.door(SandboxId::from_random([n; 16]));
                    arm(egress, &door, claim(n));
                    let visit = visit(&door);
                    for at in 0..REQUESTS {
                        drop(visit.refuse(DoorReason::BadTarget, "x.test"));
                        if at == REQUESTS / 2 {
                            // What was counted by then may be in a line of its own.
                            egress.audit().0.as_ref().unwrap().shared.bill();
                        }
                    }
                    drop(visit);
                    // One in two is released, and the others go on when the daemon dies.
                    if n % 2 == 0 {
                        door.disarm();
                        door.disarm();
                    }
                }
            });
        }
    });
    let released = usize::from(CLAIMS) / 2;
    until(|| billed(dir).1 == released).await;
    let (sums, _) = billed(dir);
    assert_eq!(sums.len(), released, "of the others the minute is not over");
    for (claim, sum) in &sums {
        assert_eq!(*sum, [REQUESTS, REQUESTS, 0, 0], "{claim}");
    }

    // A claim that used nothing has its line too; one that ends twice has one.
    let idle = egress.door(SandboxId::from_random([99; 16]));
    arm(&egress, &idle, claim(99));
    idle.disarm();
    until(|| billed(dir).1 == released + 1).await;
    assert_eq!(billed(dir).0[&claim(99).to_string()], [0; 4]);

    // The daemon is killed: its last lines are those that lie on the disk.
    let lines = values(dir, USAGE);
    let killed = tempfile::tempdir().unwrap();
    let copy = killed.path().join(USAGE);
    fs::create_dir(&copy).unwrap();
    for path in ledger::files(&dir.join(USAGE), USAGE).unwrap() {
        fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    let next = Audit::open(options(killed.path(), 64)).unwrap();
    next.stop().await;
    let after = values(killed.path(), USAGE);
    let gap = of_kind(&after, "usage_gap");
    assert_eq!(gap.len(), 1, "{after:?}");
    assert_eq!(gap[0]["since"], lines.last().unwrap()["time"]);
    assert!(of_kind(&lines, "usage_gap").is_empty());
    let chains = verify(killed.path(), &Heads::default()).unwrap();
    assert!(chains.iter().all(|chain| chain.faults == 0), "{chains:?}");

    // One that stops leaves none: what goes on is billed up to there, and no line of it is the last.
    audit.stop().await;
    let (sums, last) = billed(dir);
    assert_eq!((sums.len(), last), (usize::from(CLAIMS) + 1, released + 1));
    let all: u64 = sums.values().map(|sum| sum[0]).sum();
    assert_eq!(
        all,
        u64::from(CLAIMS) * REQUESTS,
        "none is lost, though the audit lost nearly all"
    );
    let (_, lost) = audit.0.as_ref().unwrap().shared.metrics.counts(LedgerFile::Audit);
    assert!(lost > u64::from(CLAIMS) * REQUESTS / 2, "{lost}");
    fs::remove_file(blocked).unwrap();
    let again = Audit::open(options(dir, 64)).unwrap();
    again.stop().await;
    assert!(of_kind(&values(dir, USAGE), "usage_gap").is_empty());
}

#[tokio::test]
async fn a_minute_has_a_line_and_only_of_what_is_new() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let clock = clock();
    let audit = Audit::open(Options {
        clock: clock.clone(),
        ..options(dir, 64)
    })
    .unwrap();
    let egress = Egress::audited(
        Default::default(),
        Metrics::new().door,
        clock.clone(),
        audit.clone(),
    );
    let door = egress.door(SandboxId::from_random([1; 16]));
    arm(&egress, &door, ClaimId::from_random([1; 16]));
    let silent = visit(&door);
    let lines = || values(dir, USAGE);
    let kick = || audit.0.as_ref().unwrap().shared.bill();
    for minute in 1..=2 {
        drop(silent.refuse(DoorReason::BadTarget, "x.test"));
        clock.advance(Duration::from_secs(60));
        kick();
        until(|| of_kind(&lines(), "usage").len() == minute).await;
    }
    // Nothing new, no line: the third minute is over, as another's line of it shows.
    let other = egress.door(SandboxId::from_random([2; 16]));
    arm(&egress, &other, ClaimId::from_random([2; 16]));
    let busy = visit(&other);
    drop(busy.refuse(DoorReason::BadTarget, "x.test"));
    clock.advance(Duration::from_secs(60));
    kick();
    let is_other = |line: &&Value| line["sandbox"] == other.sandbox().to_string();
    until(|| of_kind(&lines(), "usage").iter().any(is_other)).await;
    clock.advance(Duration::from_secs(60));
    drop(silent.refuse(DoorReason::BadTarget, "x.test"));
    drop(silent);
    door.disarm();
    until(|| of_kind(&lines(), "usage").iter().any(|line| line["last"] == true)).await;
    let lines = lines();
    let mut usage = of_kind(&lines, "usage");
    usage.retain(|line| !is_other(line));
    let requests: Vec<u64> = usage
        .iter()
        .map(|line| line["requests"].as_u64().unwrap())
        .collect();
    assert_eq!(requests, [1, 1, 1], "{usage:?}");
    assert_eq!(usage[1]["since"], usage[0]["time"]);
    audit.stop().await;
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
async fn every_decision_and_every_end_has_a_line_and_bytes_are_exact() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let audit = Audit::open(options(dir, QUEUE)).unwrap();
    let bench = Bench::audited(audit.clone()).await;
    // Refusals that refill asks for have no line.
    bench.door.prove().by_host().await.unwrap();
    // Before the claim.
    let answer = bench.get(&bench.url("/")).await;
    assert!(answer.starts_with("HTTP/1.1 403 not_armed"), "{answer}");
    assert!(answer.contains("\"audit_seq\":2"), "{answer}");
    bench.arm();
    let evil = "GET http://allowed.test/\u{7f}%0a?q=1 HTTP/1.1\r\nhost: x\r\n\r\n";
    let refused = bench.ask(evil.as_bytes()).await;
    let url = bench.url("/a?secret=1");
    let ask = format!("GET {url} HTTP/1.1\r\nhost: x\r\n\r\n");
    let answer = bench.ask(ask.as_bytes()).await;
    let target = format!("allowed.test:{}", bench.origin.port());
    let mut io = bench.connect(DoorKind::Http);
    let status = tunnel(&mut io, &target).await;
    assert_eq!(status, "HTTP/1.1 200 Connection established");
    let payload = vec![7; 100_000];
    let (mut from, mut to) = tokio::io::split(io);
    let (sent, echoed) = tokio::join!(
        async {
            to.write_all(&payload).await.unwrap();
            to.shutdown().await.unwrap();
            payload.len()
        },
        async {
            let mut all = Vec::new();
            within(from.read_to_end(&mut all)).await.unwrap();
            all.len()
        }
    );
    assert_eq!(sent, echoed);
    bench.quiet().await;
    bench.door.disarm();
    audit.stop().await;

    let lines = values(dir, AUDIT);
    let kinds: Vec<(&str, &str)> = lines
        .iter()
        .map(|line| {
            (
                line["kind"].as_str().unwrap(),
                line["decision"].as_str().unwrap_or_default(),
            )
        })
        .collect();
    let expected = [
        ("open", ""),
        ("start", ""),
        ("decision", "deny"),
        ("decision", "deny"),
        ("end", ""),
        ("decision", "allow"),
        ("end", ""),
        ("decision", "allow"),
        ("end", ""),
        ("stop", ""),
    ];
    assert_eq!(kinds, expected);
    assert_eq!(
        (&lines[2]["reason"], &lines[2]["claim"]),
        (&"not_armed".into(), &Value::Null)
    );
    let allowed = &lines[5];
    for (key, value) in [
        ("method", "GET"),
        ("path", "/a"),
        ("door", "http"),
        ("lane", "none"),
        ("tenant", OPERATOR),
        ("pool", "p"),
        ("layer", "pool"),
        ("rule", "t"),
        ("target", target.as_str()),
    ] {
        assert_eq!(allowed[key], value, "{key}: {allowed}");
    }
    assert_eq!(allowed["address"], bench.origin.address.to_string());
    assert_eq!(allowed["vetted"], true);
    let ended = &lines[6];
    assert_eq!(ended["bytes_sent"], ask.len());
    assert_eq!(ended["bytes_received"], answer.len());
    assert!(ended["duration_us"].is_u64() && ended["target"].is_null());
    let cut = &lines[8];
    let head = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n").len();
    assert_eq!(cut["bytes_sent"], head + sent);
    assert_eq!(cut["bytes_received"], status.len() + 4 + echoed);
    assert_eq!(cut["target"], target.as_str());
    let text = fs::read_to_string(&ledger::files(&dir.join(AUDIT), AUDIT).unwrap()[0]).unwrap();
    assert!(!text.contains("secret=1") && !text.contains('\u{7f}'), "{text}");

    let usage = values(dir, USAGE);
    let used = of_kind(&usage, "usage");
    assert_eq!(used.len(), 1);
    let used = used[0];
    assert_eq!(
        (&used["last"], &used["requests"], &used["denials"]),
        (&true.into(), &3.into(), &1.into())
    );
    assert_eq!(used["connections"], 3);
    assert_eq!(used["bytes_sent"], evil.len() + ask.len() + head + sent);
    assert_eq!(
        used["bytes_received"],
        refused.len() + answer.len() + status.len() + 4 + echoed
    );
}
