//! Claims: what they may ask for, what they get, and what they are told.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use harness::{Setup, refused};
use sandbox_sdk::{
    Client, ErrorKind, Origin, Reason,
    v1::{PoolKey, State, Tier},
};

/// A key of template `default`.
fn key(template: &str, size: &str, lane: sandbox_sdk::v1::Lane) -> PoolKey {
    PoolKey {
        template: template.to_owned(),
        lane: lane.into(),
        size: size.to_owned(),
    }
}

#[tokio::test]
async fn c23_what_a_claim_may_not_ask_is_refused_by_name_and_takes_nothing() {
    use sandbox_sdk::v1::Lane;
    let daemon = Setup::stub()
        .in_process()
        .warm(2)
        .config("pool.default.lease_max = \"2h\"")
        .start()
        .await;
    daemon.until_warm(2).await;
    let client = daemon.client().await;
    let claim = || client.claim("default");
    let long = |n| "x".repeat(n);
    let many = (0..17).map(|n| (n.to_string(), String::new())).collect();
    let table = [
        (client.claim("nobody"), Reason::PoolNotFound, ""),
        (client.claim("No Name"), Reason::FieldInvalid, "pool"),
        (
            client.claim_key(key("nothing", "small", Lane::None)),
            Reason::TemplateNotFound,
            "",
        ),
        (
            client.claim_key(key("default", "huge", Lane::None)),
            Reason::SizeNotFound,
            "",
        ),
        (
            client.claim_key(key("default", "small", Lane::Guarded)),
            Reason::LaneUnavailable,
            "",
        ),
        (
            client.claim_key(key("", "small", Lane::None)),
            Reason::FieldInvalid,
            "key.template",
        ),
        (claim().lease(Duration::ZERO), Reason::LeaseOutOfRange, ""),
        (
            claim().lease(Duration::from_secs(7201)),
            Reason::LeaseOutOfRange,
            "",
        ),
        (
            claim().lease(Duration::from_secs(u32::MAX.into())),
            Reason::LeaseOutOfRange,
            "",
        ),
        (
            claim().wait(Duration::from_secs(601)),
            Reason::FieldInvalid,
            "wait_ms",
        ),
        (claim().labels(many), Reason::FieldInvalid, "labels"),
        (claim().label("Upper", ""), Reason::FieldInvalid, "labels"),
        (claim().label("", ""), Reason::FieldInvalid, "labels"),
        (claim().label(long(64), ""), Reason::FieldInvalid, "labels"),
        (claim().label("k", long(256)), Reason::FieldInvalid, "labels"),
        (claim().request_key(""), Reason::FieldInvalid, "request_key"),
        (
            claim().request_key(long(129)),
            Reason::FieldInvalid,
            "request_key",
        ),
        (claim().request_key("a\nb"), Reason::FieldInvalid, "request_key"),
        (claim().env("K", long(65_536)), Reason::FieldInvalid, "env"),
    ];
    for (wrong, reason, field) in table {
        let text = format!("{wrong:?}");
        let error = refused(wrong.await, reason);
        assert_eq!(error.origin(), Origin::Host, "{text}");
        assert_eq!(error.kind(), ErrorKind::Refused, "{text}");
        assert!(error.remedy().is_some() && error.request_id().is_some(), "{text}");
        assert!(
            error.retry_after().is_none(),
            "nothing of this can be retried: {text}"
        );
        let named: Vec<&str> = error.fields().iter().map(|field| field.field.as_str()).collect();
        let expected: Vec<&str> = Some(field)
            .filter(|field| !field.is_empty())
            .into_iter()
            .collect();
        assert_eq!(named, expected, "{text}");
    }
    // What is at its limit is taken.
    let at_limit = claim()
        .lease(Duration::from_secs(7200))
        .label(long(63), long(255))
        .request_key(long(128));
    let sandbox = at_limit.await.unwrap();
    let rows = daemon.rows(&[State::Claimed, State::Ending, State::Failed]).await;
    assert_eq!(rows.len(), 1, "the refused took nothing: {rows:?}");
    assert_eq!(rows[0].sandbox, sandbox.id());
}

#[tokio::test]
async fn c23_zero_and_huge_leases_are_refused_at_renewal_too() {
    let daemon = Setup::stub().in_process().warm(1).start().await;
    let sandbox = daemon.client().await.claim("default").await.unwrap();
    for lease in [0, 24 * 3600 + 1, u64::from(u32::MAX)] {
        refused(
            sandbox.renew(Duration::from_secs(lease)).await,
            Reason::LeaseOutOfRange,
        );
    }
    let before = sandbox.get().await.unwrap().expires_at;
    sandbox.renew(Duration::from_secs(60)).await.unwrap();
    let after = sandbox.get().await.unwrap().expires_at;
    assert!(
        after.unwrap().seconds < before.unwrap().seconds,
        "a lease can be made shorter"
    );
}

#[tokio::test]
async fn c21_a_lease_that_is_over_ends_the_sandbox_and_only_its_claimer_is_told() {
    let daemon = Setup::stub().warm(1).start().await;
    let client = daemon.client().await;
    let claim = client.claim("default").lease(Duration::from_secs(1));
    let sandbox = claim.await.unwrap().keep();
    let row = daemon.until_state(sandbox.id(), State::Gone).await;
    assert_eq!(row.why, "lease_expired");
    let token = sandbox.token().unwrap().expose().to_owned();
    let claimer = daemon.client_as(&token).await;
    let own = claimer.sandbox(sandbox.id(), None);
    refused(own.exec(["true"]).output().await, Reason::LeaseExpired);
    refused(own.renew(Duration::from_secs(60)).await, Reason::LeaseExpired);
    assert!(own.release().await.unwrap().already);
    let stranger = daemon.client_as(&format!("sbt_{}", "A".repeat(43))).await;
    let foreign = stranger.sandbox(sandbox.id(), None);
    refused(foreign.exec(["true"]).output().await, Reason::SandboxNotFound);
    refused(foreign.get().await, Reason::SandboxNotFound);
    assert_eq!(daemon.until_warm(1).await.claimed, 0);
}

#[tokio::test]
async fn c02_a_repeated_request_is_the_same_claim_across_a_crash_too() {
    let mut daemon = Setup::stub().warm(2).start().await;
    let ask = |client: &Client| client.claim("default").request_key("job 1").label("n", "1");
    let client = daemon.client().await;
    let first = ask(&client).await.unwrap().keep();
    let same = |again: &sandbox_sdk::SandboxHandle| {
        assert_eq!(again.id(), first.id());
        assert_eq!(again.token().unwrap().expose(), first.token().unwrap().expose());
    };
    same(&ask(&client).await.unwrap().keep());
    refused(ask(&client).label("n", "2").await, Reason::KeyReused);
    refused(
        ask(&client).lease(Duration::from_secs(60)).await,
        Reason::KeyReused,
    );

    daemon.kill9().await;
    daemon.start_again().await;
    let client = daemon.client().await;
    same(&ask(&client).await.unwrap().keep());
    refused(ask(&client).label("n", "2").await, Reason::KeyReused);
    assert_eq!(daemon.rows(&[State::Claimed]).await.len(), 1);

    first.release().await.ok();
    daemon.until_state(first.id(), State::Gone).await;
    refused(ask(&client).await, Reason::SandboxEnded);
}

#[tokio::test]
async fn c02_the_same_key_many_times_at_once_is_one_sandbox() {
    let daemon = Setup::stub().in_process().warm(4).start().await;
    daemon.until_warm(4).await;
    let client = daemon.client().await;
    let claims = (0..64).map(|_| client.claim("default").request_key("once").into_future());
    let claims: Result<Vec<_>, _> = join_all(claims).await.into_iter().collect();
    let ids: BTreeSet<String> = claims
        .unwrap()
        .into_iter()
        .map(|claim| claim.keep().id().to_owned())
        .collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(daemon.rows(&[State::Claimed]).await.len(), 1);
}

#[tokio::test]
async fn c20_who_waits_in_line_is_served_by_the_event_in_order() {
    let daemon = Setup::stub()
        .warm(1)
        .config("node.clones_in_flight = 1")
        .start()
        .await;
    daemon.until_warm(1).await;
    let client = daemon.client().await;
    let claims = (0..4).map(|_| {
        let claim = client.claim("default").wait(Duration::from_secs(60)).warm_only();
        claim.into_future()
    });
    let claims: Result<Vec<_>, _> = join_all(claims).await.into_iter().collect();
    let claims = claims.unwrap();
    assert!(
        claims
            .iter()
            .all(|claim| claim.tier() == Tier::Warm && claim.pool() == "default")
    );
    let ids: BTreeSet<&str> = claims.iter().map(|claim| claim.id()).collect();
    assert_eq!(ids.len(), 4);
}

#[tokio::test]
async fn c23_an_empty_pool_refuses_warm_claims_and_serves_others_by_clone_or_cold_boot() {
    let daemon = Setup::stub().warm(0).start().await;
    let client = daemon.client().await;
    let now = || client.claim("default").wait(Duration::ZERO);
    let error = refused(now().warm_only().await, Reason::PoolEmpty);
    assert_eq!(error.retry_after(), Some(Duration::from_millis(500)));
    let any = now().await.unwrap();
    assert_ne!(any.tier(), Tier::Unspecified, "which way it was served is told");
    assert_eq!(any.pool(), "default");

    // No pool has that key: a boot, and once there is a template a clone of it.
    let medium = || {
        let key = key("default", "medium", sandbox_sdk::v1::Lane::None);
        client.claim_key(key).wait(Duration::ZERO)
    };
    refused(medium().warm_only().await, Reason::PoolEmpty);
    let cold = medium().await.unwrap();
    assert_eq!((cold.tier(), cold.pool()), (Tier::Cold, ""));
    let build = sandbox_sdk::v1::TemplatesBuildRequest {
        name: "default".to_owned(),
        size: "medium".to_owned(),
        ..Default::default()
    };
    let build = client.templates().build(build).await.unwrap();
    build.finish(|_| {}).await.unwrap();
    let clone = medium().await.unwrap();
    assert_eq!((clone.tier(), clone.pool()), (Tier::Clone, ""));
    for sandbox in [&any, &cold, &clone] {
        let output = sandbox.exec(["true"]).output().await.unwrap();
        assert!(output.status.success());
    }
    // And a key that a pool has is served by that pool.
    let named = client.claim_key(key("default", "small", sandbox_sdk::v1::Lane::None));
    assert_eq!(named.await.unwrap().pool(), "default");
}

#[tokio::test]
async fn h07_a_full_node_refuses_by_name_parks_its_pools_and_recovers() {
    let daemon = Setup::stub()
        .in_process()
        .warm(2)
        .config("node.max_sandboxes = 2")
        .start()
        .await;
    daemon.until_warm(2).await;
    let client = daemon.client().await;
    let one = client.claim("default").await.unwrap();
    let two = client.claim("default").await.unwrap();
    let error = refused(
        client.claim("default").wait(Duration::ZERO).await,
        Reason::Capacity,
    );
    assert!(error.retry_after().is_some());
    let parked = daemon
        .until_pool("default", |pool| pool.parked.is_some())
        .await
        .parked
        .unwrap();
    assert_eq!(
        (parked.reason.as_str(), parked.retry_at),
        ("CAPACITY", None),
        "it waits for room, not for a time"
    );
    one.release().await.unwrap();
    two.release().await.unwrap();
    let pool = daemon.until_warm(2).await;
    assert_eq!(pool.parked, None);
    drop(client.claim("default").await.unwrap());
}

#[tokio::test]
async fn c20_a_caller_that_leaves_the_line_leaves_nothing() {
    let mut daemon = Setup::stub().warm(0).start().await;
    daemon.change(|setup| setup.stub_faults("hang boot *,hang clone *"));
    daemon.stop().await;
    daemon.start_again().await;
    let client = daemon.client().await;
    let patient = client
        .claim("default")
        .wait(Duration::from_secs(600))
        .timeout(Duration::from_millis(300));
    let error = patient.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    daemon.until_pool("default", |pool| pool.waiting == 0).await;
    assert_eq!(daemon.rows(&[State::Claimed]).await, []);
}

#[tokio::test]
async fn h07_a_line_that_is_full_says_busy() {
    const LINE: usize = 4096;
    let daemon = Setup::stub()
        .in_process()
        .warm(0)
        .stub_faults("hang boot *")
        .start()
        .await;
    let mut waiting = Vec::new();
    let mut clients = Vec::new();
    while clients.len() * 256 < LINE {
        clients.push(daemon.client().await);
    }
    for client in &clients {
        for _ in 0..256 {
            let claim = client.claim("default").wait(Duration::from_secs(600));
            waiting.push(tokio::spawn(claim.into_future()));
        }
    }
    daemon.until_pool("default", |pool| pool.waiting == 4096).await;
    let one_more = daemon.client().await;
    // The SDK asks again, as it is told, and then gives up.
    let error = refused(one_more.claim("default").await, Reason::Busy);
    assert!(error.retry_after().is_some());
    for claim in waiting {
        claim.abort();
    }
    daemon.until_pool("default", |pool| pool.waiting == 0).await;
}

#[tokio::test]
async fn environment_and_user_of_a_claim_hold_for_all_that_runs_and_are_written_nowhere() {
    let daemon = Setup::stub().warm(1).start().await;
    let user = rustix::process::geteuid().as_raw().to_string();
    let client = daemon.client().await;
    let sandbox = client
        .claim("default")
        .env("SECRET", "hush-hush")
        .user(user.clone())
        .trace()
        .await
        .unwrap();
    let work = sandbox.work().unwrap();
    assert_eq!(
        (work.guest_round_trips, work.journal_records, work.tasks_spawned),
        (1, 1, 0),
        "{work:?}"
    );
    let output = sandbox
        .exec(["sh", "-c", "echo $SECRET; id -u"])
        .output()
        .await
        .unwrap();
    assert_eq!(output.stdout_text(), format!("hush-hush\n{user}\n"));
    let own = sandbox.exec(["sh", "-c", "echo $SECRET"]).env("SECRET", "mine");
    assert_eq!(own.output().await.unwrap().stdout_text(), "mine\n");

    for entry in std::fs::read_dir(daemon.dir().join("journal")).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!bytes.windows(9).any(|window| window == b"hush-hush"));
    }
    assert!(!daemon.log().contains("hush-hush"));
    let nobody = client.claim("default").user("nobody-of-that-name").await.unwrap();
    refused(nobody.exec(["true"]).output().await, Reason::UserNotFound);
    nobody.release().await.unwrap();
    let error = refused(
        client.claim("default").env("A=B", "c").await,
        Reason::FieldInvalid,
    );
    assert_eq!(error.fields()[0].field, "env");
    let claimed = |row: &sandbox_sdk::v1::Sandbox| row.state() == State::Claimed;
    daemon
        .until_rows(|rows| rows.values().filter(|row| claimed(row)).count() == 1)
        .await;
}

#[tokio::test]
async fn sandboxctl_claims_runs_and_releases_with_the_codes_of_its_page() {
    let daemon = Setup::stub().warm(2).start().await;
    let ctl = daemon.ctl();
    let claim = ctl
        .json([
            "claim", "--pool", "default", "--lease", "10m", "--label", "job=42", "--trace",
        ])
        .await;
    for key in [
        "sandbox",
        "claim",
        "token",
        "tier",
        "pool",
        "expires_at",
        "engine",
        "accel",
        "work",
    ] {
        assert!(!claim[key].is_null(), "{key}: {claim}");
    }
    assert_eq!(
        (&claim["engine"], &claim["accel"]),
        (&"stub".into(), &"none".into())
    );
    let (id, token) = (
        claim["sandbox"].as_str().unwrap(),
        claim["token"].as_str().unwrap(),
    );
    let own = daemon.ctl().token(token);
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143)] {
        assert_eq!(
            own.run(["exec", id, "--", "sh", "-c", script]).await.code,
            code,
            "{script}"
        );
    }
    assert_eq!(own.run(["exec", id, "--", "no-such-program"]).await.code, 127);
    assert_eq!(own.run(["exec", id, "--", "/etc/passwd"]).await.code, 126);
    assert_eq!(
        own.run(["exec", id, "--timeout", "100ms", "--", "cat", "/dev/zero"])
            .await
            .code,
        124
    );
    let echoed = own.run_with(["exec", "-i", id, "--", "cat"], b"in\0out").await;
    assert_eq!((echoed.code, echoed.stdout.as_slice()), (0, &b"in\0out"[..]));
    let json = own
        .json(["exec", id, "--", "sh", "-c", "echo out; echo err >&2"])
        .await;
    assert_eq!(
        (&json["code"], &json["stdout"], &json["stderr"]),
        (&0.into(), &"out\n".into(), &"err\n".into())
    );
    assert!(own.json(["renew", id, "--lease", "1h"]).await["expires_at"].is_string());
    let wrong = daemon
        .ctl()
        .token("sbt_wrong")
        .run(["exec", id, "--", "true"])
        .await;
    assert_eq!(wrong.code, 125, "every fault of ours");
    let released = own.json(["release", id]).await;
    assert_eq!(
        (&released["already"], &released["recorded"]),
        (&false.into(), &true.into())
    );
    assert_eq!(own.json(["release", id]).await["already"], true);
    assert_eq!(
        ctl.error(["claim", "--pool", "nobody"]).await["reason"],
        "POOL_NOT_FOUND"
    );
    assert_eq!(ctl.run(["no-such-verb"]).await.code, 2);
    let nobody = harness::Ctl::new("unix:/nowhere/api.sock");
    assert_eq!(nobody.run(["list"]).await.code, 3);
    let ran = ctl.run(["run", "--", "sh", "-c", "echo run; exit 5"]).await;
    assert_eq!((ran.code, ran.text().as_str()), (5, "run\n"), "{}", ran.stderr);
    daemon
        .until_rows(|rows| rows.values().all(|row| row.state() != State::Claimed))
        .await;
}
