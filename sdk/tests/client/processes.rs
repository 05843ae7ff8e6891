//! Programs with a terminal, Run, and processes that outlive their call.

use std::time::Duration;

use futures_util::StreamExt as _;
use sandbox_sdk::{
    Client, Error, ErrorKind, Event, How, ProcessRef, Reason,
    process::{LogEvent, LogFrom},
    v1::{self, Flow, OnDisconnect, ProcessState, log_from::At, process_ref::Which, signal::Scope},
};
use tokio::io::AsyncWriteExt as _;

use super::{
    SOON, client,
    support::{Mock, Plan, refusal},
    within,
};

async fn sandbox(mock: &Mock) -> sandbox_sdk::SandboxHandle {
    client(mock).await.sandbox("sb_1", None)
}

#[tokio::test]
async fn run_is_one_exchange_with_all_that_was_said() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let output = sandbox
        .run(["both"])
        .env("A", "B")
        .cwd("/tmp")
        .max_output(5)
        .await
        .unwrap();
    assert_eq!(
        (&output.stdout[..], &output.stderr[..]),
        (&b"out"[..], &b"err"[..])
    );
    assert_eq!(output.status.how, How::Code(3));
    let seen = mock.seen().runs[0].clone();
    assert_eq!(seen.max_output, 5);
    assert_eq!(seen.command.unwrap().cwd, "/tmp");
    let output = sandbox.run(["cat"]).stdin("typed").await.unwrap();
    assert_eq!(output.stdout_text(), "typed");

    // Larger than any other message.
    let output = sandbox.run(["flood"]).await.unwrap();
    assert!(output.stdout_truncated && output.stderr_truncated);
    assert_eq!(output.stdout.len() + output.stderr.len(), 16 * 1024 * 1024);
    for program in ["lost", "noexit"] {
        let error = sandbox.run([program]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unfinished, "{program}");
    }
    let error = sandbox.run(["x"]).timeout(Duration::ZERO).await.unwrap_err();
    assert_eq!((error.kind(), mock.seen().runs.len()), (ErrorKind::Invalid, 5));
}

#[tokio::test]
async fn a_program_s_time_is_not_the_call_s() {
    let mock = Mock::start();
    let client = Client::options()
        .timeout(Duration::from_millis(50))
        .connect(&mock.address())
        .await
        .unwrap();
    let gate = std::sync::Arc::new(tokio::sync::Notify::new());
    mock.plan("run", Plan::Gate(gate.clone()));
    let sandbox = client.sandbox("sb_1", None);
    let running = tokio::spawn(async move { sandbox.run(["both"]).await });
    mock.until(|seen| seen.calls.contains_key("run")).await;
    // Another call on the same client is over by then.
    mock.plan("info", Plan::Hang);
    assert_eq!(
        client.node().info().await.unwrap_err().kind(),
        ErrorKind::TimedOut
    );
    gate.notify_one();
    assert_eq!(within(running).await.unwrap().unwrap().stdout, b"out");
}

#[tokio::test]
async fn a_terminal_has_a_size_from_the_start_and_is_resized() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let mut stream = sandbox
        .exec(["sleep"])
        .tty(80, 24)
        .term("vt100")
        .piped_stdin()
        .stream()
        .await
        .unwrap();
    let mut stdin = stream.take_stdin().unwrap();
    stream.resizer().resize(132, 43).await;
    let mut said = Vec::new();
    while !said.ends_with(b"132x43\n") {
        match within(stream.next()).await.unwrap().unwrap() {
            Event::Stdout(data) => said.extend_from_slice(&data),
            Event::Started { .. } => {}
            other @ (Event::Stderr(_) | Event::Exit(_)) => panic!("{other:?}"),
        }
    }
    let seen = mock.seen();
    let tty = seen.starts[0].command.clone().unwrap().tty.unwrap();
    assert_eq!((tty.cols, tty.rows, &tty.term[..]), (80, 24, &b"vt100"[..]));
    assert_eq!(seen.sizes, [(132, 43)]);
    assert_eq!(seen.starts[0].on_disconnect(), OnDisconnect::Unspecified);
    // As AsyncWrite too.
    stdin.write_all(b"typed").await.unwrap();
    assert_eq!(
        within(stream.next()).await.unwrap().unwrap(),
        Event::Stdout("typed".into())
    );
    let error = sandbox.exec(["x"]).term("vt100").output().await.unwrap_err();
    assert_eq!(error.fields()[0].field, "tty.term");
}

#[tokio::test]
async fn what_may_be_detached_says_so_from_the_start() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let exec = || sandbox.exec(["true"]);
    exec().detach_on_disconnect().output().await.unwrap();
    exec().name("job").log_bytes(5).output().await.unwrap();
    let starts = mock.seen().starts;
    assert!(
        starts
            .iter()
            .all(|start| start.on_disconnect() == OnDisconnect::Detach)
    );
    assert_eq!((&starts[1].name[..], starts[1].log_bytes), (&b"job"[..], 5));
}

#[tokio::test]
async fn a_start_that_is_sent_again_is_the_same_start() {
    let mut mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    mock.plan("spawn", Plan::Hang);
    let spawning = tokio::spawn({
        let spawn = sandbox
            .spawn(["serve"])
            .name("web")
            .log_bytes(1 << 20)
            .retain(Duration::from_millis(1_500))
            .keep_stdin()
            .tty(80, 24);
        async move { spawn.await }
    });
    mock.until(|seen| seen.spawns.len() == 1).await;
    mock.kill();
    mock.serve();
    let process = within(spawning).await.unwrap().unwrap();
    assert_eq!((process.id(), process.pid()), (7, 70));
    assert_eq!(process.which(), &ProcessRef::Id(7));
    let spawns = mock.seen().spawns;
    assert_eq!(spawns.len(), 2);
    assert_eq!(spawns[0], spawns[1]);
    assert!(!spawns[0].request_key.is_empty());
    assert_eq!((spawns[0].retain_secs, spawns[0].keep_stdin), (2, true));
    // Another start is another process.
    sandbox.spawn(["serve"]).await.unwrap();
    assert_ne!(mock.seen().spawns[2].request_key, spawns[0].request_key);
    sandbox.spawn(["serve"]).request_key("mine").await.unwrap();
    assert_eq!(mock.seen().spawns[3].request_key, "mine");
    let error = sandbox.spawn(["serve"]).retain(Duration::ZERO).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn processes_are_listed_waited_for_and_ended() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let list = sandbox.processes(false).await.unwrap();
    let ids: Vec<u64> = list.map(|row| row.unwrap().id).collect().await;
    assert_eq!(ids, [1, 2, 3]);
    assert_eq!(
        sandbox.processes(true).await.unwrap().all().await.unwrap().len(),
        1
    );

    assert_eq!(sandbox.process("web").wait().await.unwrap().how, How::Code(3));
    let killed = sandbox.process("killed").wait().await.unwrap();
    assert_eq!(killed.how, How::Signal(9));
    let running = sandbox.process("running");
    let looked = running.wait_timeout(Duration::ZERO).await.unwrap();
    assert!(looked.is_none());
    let long = running.wait_timeout(Duration::from_secs(301)).await.unwrap();
    assert!(long.is_none());
    // One call waits 300 s at most.
    assert_eq!(mock.seen().waits[2..], [0, 300_000, 1_000]);
    mock.plan("wait", Plan::Fail(refusal(Reason::StillRunning, "guest", None)));
    assert_eq!(sandbox.process("web").wait().await.unwrap().how, How::Code(3));

    let killed = sandbox.process(17).kill().await.unwrap();
    assert!(killed.signalled && !killed.already_exited);
    let signalled = sandbox.process("web").signal(15, Scope::Leader).await;
    signalled.unwrap();
    let kills = mock.seen().kills;
    assert_eq!((kills[0].signal, kills[0].scope()), (9, Scope::Tree));
    assert_eq!((kills[1].signal, kills[1].scope()), (15, Scope::Leader));
    let which = |kill: &v1::AgentKillRequest| kill.process.clone().unwrap().which.unwrap();
    assert_eq!(which(&kills[0]), Which::Id(17));
    assert_eq!(which(&kills[1]), Which::Name("web".into()));
    sandbox.process("web").forget().await.unwrap();
    mock.plan("forget", Plan::Fail(refusal(Reason::StillRunning, "guest", SOON)));
    let error = sandbox.process("web").forget().await.unwrap_err();
    assert!(error.is(Reason::StillRunning) && error.retry_after() == SOON);
    assert_eq!(mock.seen().calls["forget"], 2, "the guest's word repeats nothing");
}

#[tokio::test]
async fn only_a_kill_is_sent_again_over_a_broken_connection() {
    for (number, again) in [(9, true), (15, false)] {
        let mut mock = Mock::start();
        let sandbox = sandbox(&mock).await;
        mock.plan("kill", Plan::Hang);
        let killing = tokio::spawn(async move { sandbox.process(1).signal(number, Scope::Tree).await });
        mock.until(|seen| seen.kills.len() == 1).await;
        mock.kill();
        mock.serve();
        let outcome: Result<_, Error> = within(killing).await.unwrap();
        assert_eq!(outcome.is_ok(), again, "{number}");
        assert_eq!(mock.seen().kills.len(), 1 + usize::from(again));
    }
}

#[tokio::test]
async fn a_log_tells_what_is_gone_and_nothing_is_lost_in_silence() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let mut log = sandbox.process("web").logs().open().await.unwrap();
    assert_eq!(log.offset(), None);
    let mut events = Vec::new();
    while let Some(event) = log.next().await {
        events.push(event.unwrap());
    }
    assert_eq!(
        events,
        [
            LogEvent::Stdout {
                offset: 0,
                data: "out".into()
            },
            LogEvent::Gap { from: 3, to: 10 },
            LogEvent::Stderr {
                offset: 10,
                data: (&b"\xff\x00"[..]).into()
            },
        ]
    );
    assert_eq!(log.offset(), Some(12));

    let followed = sandbox
        .process("web")
        .logs()
        .follow()
        .from(LogFrom::Offset(0))
        .max_bytes(100)
        .open()
        .await
        .unwrap();
    let last = followed.collect::<Vec<_>>().await.pop().unwrap().unwrap();
    assert!(matches!(last, LogEvent::Exit(exit) if exit.how == How::Code(3)));
    let asked = mock.seen().logs.pop().unwrap();
    assert!(asked.follow && asked.max_bytes == 100);
    assert_eq!(asked.from.unwrap().at, Some(At::Offset(0)));

    let lossy = sandbox.process("lossy").logs().open().await.unwrap();
    let last = lossy.collect::<Vec<_>>().await.pop().unwrap();
    assert_eq!(last.unwrap_err().kind(), ErrorKind::Unfinished);
    // Where another process's log begins later than was asked for, that is lost too.
    let begun = sandbox.process("web").logs().from(LogFrom::Offset(1));
    let first = begun.open().await.unwrap().next().await.unwrap();
    assert_eq!(first.unwrap_err().kind(), ErrorKind::Unfinished);
}

#[tokio::test]
async fn a_visitor_talks_looks_on_and_leaves_the_process_alone() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let mut visit = sandbox
        .process("tty")
        .attach()
        .from(LogFrom::Live)
        .hold()
        .input()
        .open()
        .await
        .unwrap();
    let attached = visit.attached();
    assert_eq!((attached.id, attached.pid, attached.tty), (7, 70, true));
    assert_eq!(attached.state, ProcessState::Running);
    let start = mock.seen().attaches[0].clone();
    assert!(start.input && start.flow() == Flow::Hold);
    visit.resizer().resize(100, 30).await;
    let mut stdin = visit.take_stdin().unwrap();
    stdin.write("hello").await.unwrap();
    let mut said = Vec::new();
    while said.len() < 10 {
        match within(visit.next()).await.unwrap().unwrap() {
            LogEvent::Stdout { data, .. } => said.extend_from_slice(&data),
            other @ (LogEvent::Stderr { .. } | LogEvent::Gap { .. } | LogEvent::Exit(_)) => {
                panic!("{other:?}")
            }
        }
    }
    assert_eq!((&said[..], visit.offset()), (&b"readyhello"[..], Some(10)));
    assert_eq!(mock.seen().sizes, [(100, 30)]);
    visit.signaller().signal(15).await;
    assert_eq!(within(visit.wait()).await.unwrap().how, How::Signal(15));
    within(stdin.closed()).await;

    // One that only looks on has nothing to say.
    let mut visit = sandbox.process("web").attach().open().await.unwrap();
    assert!(visit.take_stdin().is_none());
    visit.signaller().signal(9).await;
    assert!(!mock.seen().attaches[1].input);
    drop(visit);
    mock.until(|seen| seen.cancelled == 1).await;
    assert_eq!(mock.seen().signals, [15]);
}

#[tokio::test]
async fn e07_a_visit_without_its_exit_is_an_error() {
    let mock = Mock::start();
    let sandbox = sandbox(&mock).await;
    let visit = sandbox.process("noexit").attach().open().await.unwrap();
    let error = within(visit.wait()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unfinished);
    let error = sandbox.process("strange").attach().open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unfinished);
    let busy = refusal(Reason::InputBusy, "guest", SOON);
    mock.plan("attach", Plan::Fail(busy));
    let error = sandbox.process("web").attach().input().open().await.unwrap_err();
    assert!(error.is(Reason::InputBusy) && error.remedy().is_some());
}
