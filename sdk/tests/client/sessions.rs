//! Sessions.

use std::time::Duration;

use sandbox_sdk::{
    ErrorKind, How, ProcessRef, Reason,
    session::{SessionEvent, SessionHandle},
};

use super::{
    SOON, client,
    support::{Mock, Plan, refusal},
    within,
};

async fn session(mock: &Mock) -> SessionHandle {
    client(mock).await.sandbox("sb_1", None).session_by_id("s-1")
}

#[tokio::test]
async fn a_session_opens_once_runs_and_closes() {
    let mut mock = Mock::start();
    let sandbox = client(&mock).await.sandbox("sb_1", None);
    mock.plan("session_open", Plan::Hang);
    let opening = tokio::spawn({
        let open = sandbox
            .session()
            .cwd("/w")
            .env("A", "B")
            .user("app")
            .idle(Some(Duration::from_millis(1_500)));
        async move { open.await }
    });
    mock.until(|seen| seen.sessions.len() == 1).await;
    mock.kill();
    mock.serve();
    let session = within(opening).await.unwrap().unwrap();
    assert_eq!((session.id(), session.pid()), ("s-1", 80));
    assert_eq!(session.process().which(), &ProcessRef::Id(8));
    let asked = mock.seen().sessions;
    assert_eq!(asked[0], asked[1]);
    assert!(!asked[0].request_key.is_empty());
    assert_eq!((&asked[0].cwd[..], asked[0].idle_secs), (&b"/w"[..], Some(2)));
    let never = sandbox.session().id("own").idle(None).await.unwrap();
    assert_eq!(never.id(), "own");
    assert_eq!(mock.seen().sessions[2].idle_secs, Some(0));
    let error = sandbox.session().idle(Some(Duration::ZERO)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);

    let output = output(session.run("late")).await;
    assert_eq!(output.stdout_text(), "late");
    assert_eq!(output.stderr_text(), "err");
    assert_eq!(
        (&output.late_stdout[..], &output.late_stderr[..]),
        (&b"old"[..], &b"older"[..])
    );
    assert!(output.status.success() && !output.status.session_ended && !output.truncated);
    assert_eq!(output.status.cwd, "/tmp");
    assert_eq!(sandbox.sessions().await.unwrap()[0].commands, 2);
    session.close().await.unwrap();
    assert_eq!(mock.seen().calls["session_close"], 1);
}

async fn output(run: sandbox_sdk::session::Run) -> sandbox_sdk::session::SessionOutput {
    within(run.output()).await.unwrap()
}

#[tokio::test]
async fn ends_of_a_command_are_told_apart() {
    let mock = Mock::start();
    let session = session(&mock).await;
    let ended = output(session.run("exit")).await.status;
    assert!(ended.session_ended && !ended.success());
    assert_eq!(ended.how, How::Code(5));
    let slow = session.run("slow").timeout(Duration::from_micros(1));
    let slow = output(slow).await.status;
    assert!(slow.timed_out && !slow.success());
    assert_eq!(mock.seen().texts[1].timeout_ms, 1);
    let cut = output(session.run("12345").output_limit(4)).await;
    assert!(cut.truncated && cut.stdout == b"1234");
    let error = within(session.run("noexit").output()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unfinished);
    mock.plan(
        "session_run",
        Plan::Fail(refusal(Reason::SessionBusy, "guest", SOON)),
    );
    let error = session.run("x").output().await.unwrap_err();
    assert!(error.is(Reason::SessionBusy) && error.retry_after().is_some());
    let error = session.run("x").timeout(Duration::ZERO).output().await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_command_gets_signals_and_a_dropped_one_is_cancelled() {
    let mock = Mock::start();
    let session = session(&mock).await;
    let mut stream = session.run("sleep").stream().await.unwrap();
    let signaller = stream.signaller();
    assert_eq!(
        within(stream.next()).await.unwrap().unwrap(),
        SessionEvent::Started { number: 1 }
    );
    signaller.signal(2).await;
    let mut last = None;
    while let Some(event) = within(stream.next()).await {
        last = Some(event.unwrap());
    }
    assert!(matches!(last, Some(SessionEvent::Exit(exit)) if exit.how == How::Code(130)));
    assert_eq!(mock.seen().signals, [2]);

    let stream = session.run("sleep").stream().await.unwrap();
    mock.until(|seen| seen.texts.len() == 2).await;
    drop(stream);
    mock.until(|seen| seen.cancelled == 1).await;
}
