//! Sandboxes as rows: filters, pages, watches.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use harness::{Daemon, HANG, Setup, refused, within};
use sandbox_sdk::{
    Reason, SandboxHandle,
    admin::{ClaimsWatch, SandboxFilter},
    v1::{Sandbox, State, claims_watch_reply::Event},
};

async fn claim(daemon: &Daemon, labels: &[(&str, &str)]) -> SandboxHandle {
    let client = daemon.client().await;
    let mut claim = client.claim("default").wait(Duration::from_secs(60));
    for (key, value) in labels {
        claim = claim.label(*key, *value);
    }
    claim.await.unwrap().keep()
}

fn labelled(key: &str, value: &str) -> SandboxFilter {
    SandboxFilter {
        labels: [(key.to_owned(), value.to_owned())].into(),
        ..SandboxFilter::default()
    }
}

#[tokio::test]
async fn rows_are_found_by_state_pool_label_and_owner_and_come_in_pages() {
    let daemon = Setup::stub().in_process().warm(8).start().await;
    daemon.until_warm(8).await;
    let mut all = BTreeSet::new();
    for n in 0..7 {
        let parity = if n % 2 == 0 { "even" } else { "odd" };
        let sandbox = claim(&daemon, &[("parity", parity), ("team/x", "a b")]).await;
        all.insert(sandbox.id().to_owned());
    }
    let client = daemon.client().await;
    let claims = client.claims();
    let even = claims.list(&labelled("parity", "even")).await.unwrap();
    assert_eq!(even.len(), 4);
    assert!(
        even.iter()
            .all(|row| row.labels["parity"] == "even" && row.labels["team/x"] == "a b")
    );
    assert_eq!(claims.list(&labelled("parity", "neither")).await.unwrap(), []);
    for (filter, count) in [
        (
            SandboxFilter {
                pools: vec!["default".into()],
                ..Default::default()
            },
            7,
        ),
        (
            SandboxFilter {
                pools: vec!["other".into()],
                ..Default::default()
            },
            0,
        ),
        (
            SandboxFilter {
                owner: Some("operator".into()),
                ..Default::default()
            },
            7,
        ),
        (
            SandboxFilter {
                owner: Some("acme".into()),
                ..Default::default()
            },
            0,
        ),
        (
            SandboxFilter {
                states: vec![State::Gone],
                ..Default::default()
            },
            0,
        ),
    ] {
        assert_eq!(claims.list(&filter).await.unwrap().len(), count, "{filter:?}");
    }

    let everything = SandboxFilter::default();
    let (mut seen, mut token, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = claims.page(&everything, 3, token).await.unwrap();
        assert!(page.sandboxes.len() <= 3);
        seen.extend(page.sandboxes.into_iter().map(|row| row.sandbox));
        pages += 1;
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, 3);
    assert!(seen.is_sorted(), "by id");
    assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), all);
    let error = refused(
        claims.page(&everything, 1001, String::new()).await,
        Reason::FieldInvalid,
    );
    assert_eq!(error.fields()[0].field, "page_size");
    refused(
        claims.page(&everything, 10, "next".into()).await,
        Reason::PageTokenInvalid,
    );
    let nonsense = SandboxFilter {
        states: vec![State::Unspecified],
        ..Default::default()
    };
    refused(claims.list(&nonsense).await, Reason::FieldInvalid);
}

async fn next(watch: &mut ClaimsWatch) -> Event {
    let reply = within(HANG, watch.next()).await.unwrap().unwrap();
    reply.event.unwrap()
}

/// The next row that is not as it was told before; what is and what changes meanwhile may be told twice.
async fn next_row(watch: &mut ClaimsWatch, told: &mut BTreeMap<String, Sandbox>) -> Sandbox {
    loop {
        match next(watch).await {
            Event::Sandbox(row) => {
                let before = told.insert(row.sandbox.clone(), row.clone());
                if before.as_ref() != Some(&row) {
                    return row;
                }
            }
            other @ (Event::Synced(_) | Event::Lost(_)) => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_watch_tells_what_is_then_synced_then_each_change_to_the_end() {
    let daemon = Setup::stub().in_process().warm(4).start().await;
    daemon.until_warm(4).await;
    let first = claim(&daemon, &[("job", "1")]).await;
    claim(&daemon, &[("job", "other")]).await;
    let client = daemon.client().await;
    let mut told = BTreeMap::new();
    let mut watch = client.claims().watch(&labelled("job", "1")).await.unwrap();
    assert_eq!(next_row(&mut watch, &mut told).await.sandbox, first.id());
    assert!(matches!(next(&mut watch).await, Event::Synced(_)));

    let second = claim(&daemon, &[("job", "1")]).await;
    let row = next_row(&mut watch, &mut told).await;
    assert_eq!((row.sandbox.as_str(), row.state()), (second.id(), State::Claimed));
    let renewed = second.renew(Duration::from_secs(9)).await;
    assert!(renewed.is_ok());
    let row = next_row(&mut watch, &mut told).await;
    assert_eq!((row.sandbox.as_str(), row.state()), (second.id(), State::Claimed));
    second.release().await.unwrap();
    // It leaves the filter (of claimed, ending and failed ones), and its last row says how.
    let mut states = Vec::new();
    while states.last() != Some(&State::Gone) {
        let row = next_row(&mut watch, &mut told).await;
        assert_eq!(
            (row.sandbox.as_str(), row.why.as_str()),
            (second.id(), "released")
        );
        states.push(row.state());
    }
    first.release().await.unwrap();
    assert_eq!(
        next_row(&mut watch, &mut told).await.sandbox,
        first.id(),
        "and nothing of the others"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_that_does_not_read_is_told_that_it_lost_and_gets_all_again() {
    let daemon = Setup::stub().in_process().warm(16).log("warn").start().await;
    daemon.until_warm(16).await;
    let client = daemon.client().await;
    let filter = SandboxFilter {
        states: vec![
            State::Making,
            State::Warm,
            State::Claimed,
            State::Ending,
            State::Gone,
        ],
        ..SandboxFilter::default()
    };
    let mut watch = client.claims().watch(&filter).await.unwrap();
    while !matches!(next(&mut watch).await, Event::Synced(_)) {}
    // Rows of half a kilobyte fill what lies between the two, and then 1,024 more.
    let long = "x".repeat(255);
    for _ in 0..40 {
        let labels = [("a", long.as_str()), ("b", &long)];
        let claims = (0..16).map(|_| claim(&daemon, &labels));
        for sandbox in futures_util::future::join_all(claims).await {
            sandbox.release().await.unwrap();
        }
    }
    let last = claim(&daemon, &[("last", "yes")]).await;
    let mut lost = 0;
    loop {
        match next(&mut watch).await {
            Event::Lost(event) => {
                assert!(event.count > 0);
                lost += 1;
            }
            Event::Sandbox(row) if row.sandbox == last.id() && row.state() == State::Claimed => break,
            Event::Sandbox(_) | Event::Synced(_) => {}
        }
    }
    assert!(lost > 0, "it was slow and nobody told it");
}

#[tokio::test]
async fn sandboxctl_lists_inspects_and_watches_as_json() {
    let daemon = Setup::stub().warm(1).start().await;
    let ctl = daemon.ctl();
    let mut watch = ctl
        .command(["--json", "watch", "--label", "n=1"])
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(watch.stdout.take().unwrap());
    let mut line = async || {
        let mut text = String::new();
        let read = tokio::io::AsyncBufReadExt::read_line(&mut lines, &mut text);
        within(HANG, read).await.unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    assert_eq!(line().await["synced"], true);
    let claim = ctl.json(["claim", "--label", "n=1"]).await;
    let id = claim["sandbox"].as_str().unwrap();
    let row = line().await;
    assert_eq!(
        (&row["sandbox"]["sandbox"], &row["sandbox"]["state"]),
        (&claim["sandbox"], &"claimed".into())
    );
    let one = ctl.json(["inspect", id]).await;
    assert_eq!(
        (&one["sandbox"], &one["labels"]["n"]),
        (&claim["sandbox"], &"1".into())
    );
    for key in [
        "pid",
        "slot",
        "created_at",
        "claimed_at",
        "expires_at",
        "agent_version",
    ] {
        assert!(!one[key].is_null(), "{key}: {one}");
    }
    let none = ctl.json(["list", "--label", "n=2"]).await;
    assert_eq!(none["sandboxes"], serde_json::json!([]));
    let table = ctl.run(["list"]).await;
    assert!(table.text().contains(id), "{}", table.text());
    let released = ctl.json(["release", "--all"]).await;
    assert_eq!(
        released["sandbox"]
            .as_str()
            .or(released["sandboxes"][0]["sandbox"].as_str()),
        Some(id),
        "{released}"
    );
    let mut row = line().await;
    while row["sandbox"]["state"] == "claimed" {
        row = line().await;
    }
    assert_eq!(row["sandbox"]["why"], "released");
    drop(watch);
}
