//! Shells that keep their state between commands, through the daemon.

use std::time::Duration;

use harness::{HANG, Setup, process::Process, refused, within};
use sandbox_sdk::{
    How, Reason,
    session::{SessionEvent, SessionHandle, SessionOutput},
};

async fn output(session: &SessionHandle, text: &str) -> SessionOutput {
    within(HANG, session.run(text).output()).await.unwrap()
}

#[tokio::test]
async fn a_session_keeps_its_state_and_outlives_the_daemon() {
    let mut daemon = Setup::stub().warm(1).start().await;
    let sandbox = daemon.client().await.claim("default").await.unwrap().keep();
    let session = sandbox
        .session()
        .id("work")
        .env("A", "from outside")
        .await
        .unwrap();
    assert_eq!(session.id(), "work");
    let shell = Process::look(i32::try_from(session.pid()).unwrap()).unwrap();
    refused(sandbox.session().id("work").await, Reason::SessionExists);
    let made = output(&session, "cd /tmp; x=1; f() { echo f:$x; }; echo err >&2; false").await;
    assert_eq!((made.status.how, &made.stderr[..]), (How::Code(1), &b"err\n"[..]));
    assert_eq!(made.status.cwd, "/tmp");

    daemon.kill9().await;
    daemon.start_again().await;
    let client = daemon.client().await;
    let sandbox = client.sandbox(sandbox.id(), sandbox.token().cloned());
    let session = sandbox.session_by_id("work");
    let kept = output(&session, "f; pwd; echo $A").await;
    assert_eq!(kept.stdout_text(), "f:1\n/tmp\nfrom outside\n");
    assert!(kept.status.success() && !kept.status.session_ended);
    let listed = sandbox.sessions().await.unwrap();
    assert_eq!((listed.len(), listed[0].commands, listed[0].busy), (1, 2, false));
    session.close().await.unwrap();
    shell.gone().await;
    refused(session.close().await, Reason::SessionNotFound);
}

#[tokio::test]
async fn a_command_s_end_is_not_the_session_s() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = daemon.client().await.claim("default").await.unwrap();
    let session = sandbox.session().await.unwrap();
    output(&session, "x=kept").await;

    // Its time is over.
    let late = session.run("sleep 1000").timeout(Duration::from_millis(50));
    assert!(within(HANG, late.output()).await.unwrap().status.timed_out);

    // A signal, while another command has to wait its turn.
    let mut stream = session.run("echo begun; sleep 1000").stream().await.unwrap();
    while within(HANG, stream.next()).await.unwrap().unwrap() != SessionEvent::Stdout("begun\n".into()) {}
    refused(session.run("true").output().await, Reason::SessionBusy);
    stream.signaller().signal(2).await;
    let mut last = None;
    while let Some(event) = within(HANG, stream.next()).await {
        last = Some(event.unwrap());
    }
    assert!(matches!(last, Some(SessionEvent::Exit(exit)) if exit.how == How::Code(130)));

    // Its caller is gone.
    let mut stream = session
        .run("echo pid=$BASHPID; sh -c 'echo $$; exec sleep 1000'")
        .stream()
        .await
        .unwrap();
    let mut said = String::new();
    while said.lines().count() < 2 || !said.ends_with('\n') {
        if let SessionEvent::Stdout(bytes) = within(HANG, stream.next()).await.unwrap().unwrap() {
            said.push_str(&String::from_utf8_lossy(&bytes));
        }
    }
    let sleeper = Process::look(said.lines().nth(1).unwrap().parse().unwrap()).unwrap();
    drop(stream);
    sleeper.gone().await;
    let state = harness::eventually("the session takes commands again", async || {
        session.run("echo $x").output().await.ok()
    });
    assert_eq!(state.await.stdout_text(), "kept\n");

    let ended = output(&session, "exit 5").await;
    assert!(ended.status.session_ended);
    assert_eq!(ended.status.how, How::Code(5));
    let error = within(HANG, session.run("true").output()).await.unwrap_err();
    assert!(
        error.is(Reason::SessionEnded) || error.is(Reason::SessionNotFound),
        "{error:?}"
    );
}

#[tokio::test]
async fn the_verbs_of_sessions_go_through() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = daemon.client().await.claim("default").await.unwrap();
    let ctl = daemon.ctl().token(sandbox.token().unwrap().expose());
    let sb = sandbox.id();
    let opened = ctl.run(["session", "open", sb, "--cwd", "/tmp"]).await;
    let id = opened.text().trim().to_owned();
    assert_eq!(ctl.run(["session", "run", sb, &id, "x=1; cd /"]).await.code, 0);
    let ran = ctl
        .run(["session", "run", sb, &id, "echo $PWD $x; echo err >&2; (exit 4)"])
        .await;
    assert_eq!(
        (ran.code, ran.text(), &*ran.stderr),
        (4, "/ 1\n".to_owned(), "err\n")
    );
    let script = b"for n in 1 2; do\n  echo $n\ndone\n";
    let ran = ctl.run_with(["session", "run", "-i", sb, &id], script).await;
    assert_eq!((ran.code, ran.text()), (0, "1\n2\n".to_owned()));
    let slow = ["session", "run", "--timeout", "50ms", sb, &id, "sleep 1000"];
    assert_eq!(ctl.run(slow).await.code, 124);
    let listed = ctl.json(["session", "list", sb]).await;
    assert_eq!(listed["sessions"][0]["session"], id);
    let ended = ctl.run(["session", "run", sb, &id, "exit 3"]).await;
    assert!(ended.code == 3 && ended.stderr.contains("has ended"), "{ended:?}");
    let other = ctl.json(["session", "open", sb]).await["session"].clone();
    assert_eq!(
        ctl.run(["session", "close", sb, other.as_str().unwrap()])
            .await
            .code,
        0
    );
    let closed = ctl
        .run(["session", "run", sb, other.as_str().unwrap(), "true"])
        .await;
    assert!(
        closed.code == 125 && closed.stderr.contains("SESSION_"),
        "{closed:?}"
    );
}
