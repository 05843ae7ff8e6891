//! The library against a daemon that answers by script.
#![expect(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

#[path = "client/guest.rs"]
mod guest;
#[path = "client/processes.rs"]
mod processes;
#[path = "client/sessions.rs"]
mod sessions;
mod support;

use std::{sync::Arc, time::Duration};

use sandbox_sdk::{
    Client, ErrorKind, Event, How, Origin, Reason, Token, admin::SandboxFilter, v1::claims_watch_reply,
};
use support::{Mock, Plan, refusal};
use tokio::sync::Notify;

const SOON: Option<Duration> = Some(Duration::from_millis(1));

async fn client(mock: &Mock) -> Client {
    Client::connect(&mock.address()).await.unwrap()
}

/// Nothing here may hang.
async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("it hangs")
}

#[tokio::test]
async fn a_claim_tells_all_and_is_released_by_hand() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client
        .claim("default")
        .lease(Duration::from_millis(1_500))
        .label("job", "42")
        .wait(Duration::from_secs(1))
        .warm_only()
        .env("K", "V")
        .user("app")
        .trace()
        .await
        .unwrap();
    assert_eq!(sandbox.id(), "sb_1");
    assert_eq!(sandbox.claim_id(), "cl_1");
    assert_eq!(sandbox.tier(), sandbox_sdk::v1::Tier::Warm);
    assert_eq!(sandbox.engine(), sandbox_sdk::v1::Engine::Stub);
    assert_eq!(sandbox.work().unwrap().journal_records, 1);
    assert!(!format!("{sandbox:?}").contains("secret"));

    let released = sandbox.release().await.unwrap();
    assert!(!released.already && released.recorded);
    let seen = mock.seen();
    assert_eq!(seen.released, ["sb_1"]);
    assert_eq!(seen.authorization.as_deref(), Some("Bearer sbt_secret"));
    let claim = &seen.claims[0];
    assert_eq!(
        (claim.lease_secs, claim.wait_ms, claim.warm_only),
        (Some(2), Some(1_000), true)
    );
    assert_eq!((&claim.env[0].key[..], &claim.user[..]), (&b"K"[..], &b"app"[..]));
    assert!(claim.request_key.is_some());
}

#[tokio::test]
async fn dropped_is_released_once_and_kept_is_not() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let kept = client.claim("default").await.unwrap().keep();
    drop(kept.clone());
    client.flush().await;
    assert!(mock.seen().released.is_empty());

    drop(client.claim("default").await.unwrap());
    client.flush().await;
    assert_eq!(mock.seen().released, ["sb_1"]);

    client.claim("default").await.unwrap().release().await.unwrap();
    client.flush().await;
    assert_eq!(mock.seen().released.len(), 2);
}

#[tokio::test]
async fn an_unknown_sandbox_is_released() {
    let mock = Mock::start();
    let client = client(&mock).await;
    mock.plan(
        "release",
        Plan::Fail(refusal(Reason::SandboxNotFound, "host", None)),
    );
    let released = client.sandbox("sb_gone", None).release().await.unwrap();
    assert!(released.already);
    mock.plan("release", Plan::Fail(refusal(Reason::NotAllowed, "host", None)));
    let error = client.sandbox("sb_gone", None).release().await.unwrap_err();
    assert!(error.is(Reason::NotAllowed));
}

#[tokio::test]
async fn c02_a_repeated_claim_carries_the_same_key() {
    let mock = Mock::start();
    let client = client(&mock).await;
    mock.plan("claim", Plan::Fail(refusal(Reason::Starting, "host", SOON)));
    mock.plan("claim", Plan::Fail(refusal(Reason::Busy, "host", SOON)));
    let sandbox = client.claim("default").await.unwrap();
    let claims = mock.seen().claims;
    assert_eq!(claims.len(), 3);
    assert!(
        claims
            .iter()
            .all(|claim| claim.request_key == claims[0].request_key)
    );
    drop(sandbox.keep());

    drop(client.claim("default").request_key("mine").await.unwrap().keep());
    assert_eq!(mock.seen().claims[3].request_key.as_deref(), Some("mine"));
}

#[tokio::test]
async fn nothing_is_repeated_on_a_guest_s_word_or_without_advice() {
    let mock = Mock::start();
    let client = client(&mock).await;
    for (origin, retry) in [("guest", SOON), ("host", None), ("nobody", SOON)] {
        mock.plan("exec", Plan::Fail(refusal(Reason::NotReady, origin, retry)));
        let before = mock.seen().calls.get("exec").copied().unwrap_or(0);
        let error = client
            .sandbox("sb_1", None)
            .exec(["echo"])
            .output()
            .await
            .unwrap_err();
        assert!(error.is(Reason::NotReady));
        assert_eq!(mock.seen().calls["exec"], before + 1, "{origin}");
    }
    // The time in line was the caller's own.
    mock.plan("claim", Plan::Fail(refusal(Reason::PoolEmpty, "host", SOON)));
    let error = client.claim("default").await.unwrap_err();
    assert_eq!(error.retry_after(), SOON);
    assert_eq!((error.origin(), error.request_id()), (Origin::Host, Some("rq_7")));
    assert_eq!(mock.seen().calls["claim"], 1);
}

#[tokio::test]
async fn five_repeats_and_no_more() {
    let mock = Mock::start();
    let client = client(&mock).await;
    for _ in 0..7 {
        mock.plan("info", Plan::Fail(refusal(Reason::Starting, "host", SOON)));
    }
    let error = client.node().info().await.unwrap_err();
    assert!(error.is(Reason::Starting));
    assert_eq!(mock.seen().calls["info"], 6);
}

#[tokio::test]
async fn c02_a_broken_claim_goes_again_with_its_key_and_an_exec_does_not() {
    let mut mock = Mock::start();
    let client = client(&mock).await;
    for (method, again) in [
        ("claim", true),
        ("exec", false),
        ("pools.delete", false),
        ("renew", true),
    ] {
        mock.plan(method, Plan::Hang);
        let caller = client.clone();
        let call = tokio::spawn(async move {
            let sandbox = caller.sandbox("sb_1", None);
            match method {
                "claim" => caller.claim("default").await.map(|sandbox| drop(sandbox.keep())),
                "exec" => sandbox.exec(["echo"]).output().await.map(drop),
                "renew" => sandbox.renew(Duration::from_secs(1)).await.map(drop),
                _ => caller.pools().delete("x").await,
            }
        });
        mock.until(|seen| seen.calls.contains_key(method)).await;
        mock.kill();
        mock.serve();
        let outcome = within(call).await.unwrap();
        match outcome {
            Ok(()) => assert!(again, "{method}"),
            Err(error) => {
                assert!(!again, "{method}: {error}");
                assert_eq!(error.kind(), ErrorKind::Broken);
            }
        }
        assert_eq!(mock.seen().calls[method], 1 + usize::from(again), "{method}");
    }
    let claims = mock.seen().claims;
    assert_eq!(claims[0].request_key, claims[1].request_key);
}

#[tokio::test]
async fn a_lost_connection_is_made_anew_by_the_next_call() {
    let mut mock = Mock::start();
    let client = client(&mock).await;
    client.node().ping().await.unwrap();
    mock.kill();
    mock.serve();
    // Whatever the kind of call: nothing of it was sent before.
    let output = client.sandbox("sb_1", None).exec(["echo", "hi"]).output().await;
    match output {
        Ok(output) => assert_eq!(output.stdout, b"hi\n"),
        // The loss was noticed only while the call was on its way.
        Err(error) => assert_eq!(error.kind(), ErrorKind::Broken),
    }
    client.node().ping().await.unwrap();
}

#[tokio::test]
async fn nobody_there_and_time_over_are_told_apart() {
    let error = Client::connect("unix:/nonexistent/api.sock").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.remedy().unwrap().contains("start sandboxd"));

    let mock = Mock::start();
    let client = Client::options()
        .timeout(Duration::from_millis(50))
        .connect(&mock.address())
        .await
        .unwrap();
    mock.plan("info", Plan::Hang);
    let error = client.node().info().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.is(Reason::Deadline));
}

#[tokio::test]
async fn output_is_bytes_with_status() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_9", Some(Token::new("sbt_x").unwrap()));
    let output = sandbox
        .exec(["both"])
        .env("A", "B")
        .cwd("/tmp")
        .output()
        .await
        .unwrap();
    assert_eq!(
        (output.stdout_text(), output.stderr_text()),
        ("out".into(), "err".into())
    );
    assert_eq!(output.status.how, How::Code(3));
    assert!(!output.status.success() && !output.truncated());
    let seen = mock.seen();
    assert_eq!(seen.sandbox_id.as_deref(), Some("sb_9"));
    assert_eq!(seen.authorization.as_deref(), Some("Bearer sbt_x"));
    let command = seen.starts[0].command.clone().unwrap();
    assert_eq!(
        (&command.cwd[..], &command.env[0].value[..]),
        (&b"/tmp"[..], &b"B"[..])
    );
    assert!(!seen.starts[0].stdin);

    let output = sandbox.exec(["raw"]).output().await.unwrap();
    assert_eq!(output.stdout, b"\xff\x00\xfe");
    let output = sandbox.exec(["kill", "15"]).output().await.unwrap();
    assert_eq!(output.status.how, How::Signal(15));
    let output = sandbox
        .exec(["flood", "40"])
        .output_limit(100_000)
        .output()
        .await
        .unwrap();
    assert!(output.stdout_truncated && !output.stderr_truncated);
    assert_eq!(
        (output.stdout.len(), output.status.stdout_bytes),
        (100_000, 40 * 65_536)
    );
}

#[tokio::test]
async fn e02_all_input_comes_back_whatever_its_size() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0] ^ 0x5a).collect();
    let sandbox = client.sandbox("sb_1", None);
    let output = within(sandbox.exec(["cat"]).stdin(bytes.clone()).output())
        .await
        .unwrap();
    assert!(output.stdout == bytes);
    let output = within(sandbox.exec(["cat"]).stdin("").output()).await.unwrap();
    assert!(output.stdout.is_empty());
    // Piped input without a writer ends at once.
    let output = within(sandbox.exec(["cat"]).piped_stdin().output())
        .await
        .unwrap();
    assert!(output.status.success());
}

#[tokio::test]
async fn a_stream_reads_and_writes_at_once() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_1", None);
    let mut stream = sandbox.exec(["cat"]).piped_stdin().stream().await.unwrap();
    let mut stdin = stream.take_stdin().unwrap();
    assert!(stream.take_stdin().is_none());
    assert!(matches!(
        stream.next().await,
        Some(Ok(Event::Started { id: 1, pid: 2 }))
    ));
    for word in ["one", "two"] {
        stdin.write(word).await.unwrap();
        assert_eq!(
            within(stream.next()).await.unwrap().unwrap(),
            Event::Stdout(word.into())
        );
    }
    drop(stdin);
    let exit = within(stream.wait()).await.unwrap();
    assert!(exit.success());
}

#[tokio::test]
async fn a_signal_ends_a_program_and_the_exit_ends_the_input() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_1", None);
    let mut stream = sandbox.exec(["sleep"]).piped_stdin().stream().await.unwrap();
    let stdin = stream.take_stdin().unwrap();
    let signaller = stream.signaller();
    signaller.signal(15).await;
    // E1: the input is still open, and the call ends all the same.
    let exit = within(stream.wait()).await.unwrap();
    assert_eq!(exit.how, How::Signal(15));
    within(stdin.closed()).await;
    signaller.signal(9).await;
    assert_eq!(mock.seen().signals, [15]);
}

#[tokio::test]
async fn dropping_a_call_drops_both_halves() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_1", None);

    let mut stream = sandbox.exec(["sleep"]).piped_stdin().stream().await.unwrap();
    let mut stdin = stream.take_stdin().unwrap();
    let _signaller = stream.signaller();
    drop(stream);
    mock.until(|seen| seen.cancelled == 1).await;
    // The writer that outlives the call learns of its end.
    within(stdin.closed()).await;
    assert!(stdin.write("x").await.is_err());

    let output = tokio::spawn(sandbox.exec(["sleep"]).output());
    mock.until(|seen| seen.starts.len() == 2).await;
    output.abort();
    mock.until(|seen| seen.cancelled == 2).await;
}

#[tokio::test]
async fn e07_without_its_exit_a_call_is_an_error() {
    let mut mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_1", None);
    for program in ["noexit", "lost", "afterwards"] {
        let error = within(sandbox.exec([program]).output()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unfinished, "{program}");
        assert!(error.is(Reason::AgentLost));
    }
    let error = sandbox.exec(["fault"]).output().await.unwrap_err();
    assert_eq!((error.kind(), error.origin()), (ErrorKind::Refused, Origin::Host));

    let stream = sandbox.exec(["sleep"]).stream().await.unwrap();
    mock.kill();
    let error = within(stream.wait()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broken);
}

#[tokio::test]
async fn rows_pools_templates_and_node() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let ids: Vec<String> = client
        .claims()
        .list(&SandboxFilter::default())
        .await
        .unwrap()
        .into_iter()
        .map(|row| row.sandbox)
        .collect();
    assert_eq!(ids, ["sb_0a", "sb_0b", "sb_1a", "sb_1b", "sb_2a", "sb_2b"]);
    let mut watch = client.claims().watch(&SandboxFilter::default()).await.unwrap();
    let mut events = Vec::new();
    while let Some(event) = watch.next().await {
        events.push(event.unwrap().event.unwrap());
    }
    assert!(matches!(events[2], claims_watch_reply::Event::Lost(lost) if lost.count == 7));

    assert_eq!(client.pools().list().await.unwrap()[0].warm, 4);
    let mut steps = 0;
    let request = sandbox_sdk::v1::TemplatesBuildRequest {
        name: "new".into(),
        ..Default::default()
    };
    let build = client.templates().build(request).await.unwrap();
    assert_eq!(build.finish(|_step| steps += 1).await.unwrap().name, "new");
    assert_eq!(steps, 2);
    assert!(client.node().info().await.unwrap().ready);
    assert_eq!(client.node().doctor().await.unwrap().checks.len(), 1);
    assert_eq!(
        client.sandbox("sb_1", None).agent().await.unwrap().version,
        "0.1.0"
    );
    assert_eq!(client.sandbox("sb_8", None).get().await.unwrap().sandbox, "sb_8");
}

#[tokio::test]
async fn many_calls_share_one_connection() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let calls = (0..300).map(|_| {
        let client = client.clone();
        async move { client.node().ping().await }
    });
    for done in within(futures_util::future::join_all(calls)).await {
        done.unwrap();
    }
    assert_eq!(mock.seen().calls["ping"], 300);
}

#[tokio::test]
async fn inv_17_what_a_dropped_stream_held_is_given_back() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_1", None);
    // Together they hold more than the connection's window has.
    for _ in 0..300 {
        let mut stream = sandbox.exec(["flood", "10"]).stream().await.unwrap();
        while !matches!(within(stream.next()).await, Some(Ok(Event::Stdout(_)))) {}
    }
    let output = within(sandbox.exec(["flood", "20"]).output()).await.unwrap();
    assert_eq!(output.stdout.len(), 20 * 65_536);
}

#[tokio::test]
async fn a_slow_call_holds_up_no_other() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let gate = Arc::new(Notify::new());
    mock.plan("info", Plan::Gate(gate.clone()));
    let caller = client.clone();
    let slow = tokio::spawn(async move { caller.node().info().await });
    mock.until(|seen| seen.calls.contains_key("info")).await;
    within(client.node().ping()).await.unwrap();
    gate.notify_one();
    assert!(within(slow).await.unwrap().unwrap().ready);
}

#[tokio::test]
async fn inv_17_unread_streams_stall_only_themselves() {
    let mock = Mock::start();
    let client = client(&mock).await;
    let sandbox = client.sandbox("sb_1", None);
    let mut unread = Vec::new();
    for _ in 0..20 {
        unread.push(sandbox.exec(["flood", "100"]).stream().await.unwrap());
    }
    let output = within(sandbox.exec(["flood", "20"]).output()).await.unwrap();
    assert_eq!(output.stdout.len(), 20 * 65_536);
    for stream in unread {
        assert_eq!(within(stream.wait()).await.unwrap().stdout_bytes, 100 * 65_536);
    }
}
