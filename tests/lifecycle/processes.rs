//! Run, and processes that outlive the call that started them, through the daemon.

use std::time::Duration;

use harness::{Daemon, HANG, Setup, process::Process, refused, within};
use sandbox_sdk::{
    Event, How, Reason, Sandbox, TextDecoder,
    process::{AttachStream, LogEvent, LogFrom, ProcessHandle},
    v1::{ProcessKind, ProcessState, signal::Scope},
};

async fn claimed(daemon: &Daemon) -> Sandbox {
    daemon.client().await.claim("default").await.unwrap()
}

/// All that its log holds, and how it ended.
async fn whole(process: &ProcessHandle) -> (Vec<u8>, How) {
    let mut log = process.logs().follow().open().await.unwrap();
    let mut said = Vec::new();
    loop {
        match within(HANG, log.next()).await.unwrap().unwrap() {
            LogEvent::Stdout { data, .. } | LogEvent::Stderr { data, .. } => said.extend_from_slice(&data),
            LogEvent::Exit(exit) => return (said, exit.how),
            gap @ LogEvent::Gap { .. } => panic!("{gap:?}"),
        }
    }
}

/// Reads until this was said.
async fn until(visit: &mut AttachStream, word: &str) {
    let mut said = String::new();
    while !said.contains(word) {
        match within(HANG, visit.next()).await.unwrap().unwrap() {
            LogEvent::Stdout { data, .. } => said.push_str(&String::from_utf8_lossy(&data)),
            other @ (LogEvent::Stderr { .. } | LogEvent::Gap { .. } | LogEvent::Exit(_)) => {
                panic!("{other:?} after {said:?}")
            }
        }
    }
}

#[tokio::test]
async fn split_code_points_decode() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    // 1 MiB and a bit of a character of three bytes: no size of a piece that is a power of two holds whole ones.
    let count = 350_000;
    let script = format!("yes '\u{20ac}' | head -n {count} | tr -d '\\n'");
    let mut stream = sandbox.exec(["sh", "-c", &script]).stream().await.unwrap();
    let (mut decoder, mut text, mut cut) = (TextDecoder::new(), String::new(), 0);
    while let Some(event) = within(HANG, stream.next()).await {
        match event.unwrap() {
            Event::Stdout(bytes) => {
                cut += usize::from(std::str::from_utf8(&bytes).is_err());
                text.push_str(&decoder.push(&bytes));
            }
            Event::Exit(exit) => assert!(exit.success()),
            Event::Started { .. } | Event::Stderr(_) => {}
        }
    }
    text.push_str(decoder.finish());
    assert!(cut > 0, "no piece ended within a character");
    assert!(text.chars().all(|c| c == '\u{20ac}'));
    assert_eq!(text.chars().count(), count);
}

#[tokio::test]
async fn run_answers_with_all_that_was_said() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let output = sandbox
        .run(["sh", "-c", "cat; echo err >&2; exit 4"])
        .stdin("typed")
        .await
        .unwrap();
    assert_eq!(
        (&output.stdout[..], &output.stderr[..]),
        (&b"typed"[..], &b"err\n"[..])
    );
    assert_eq!(output.status.how, How::Code(4));
    // Both outputs at their most: an answer larger than any other message.
    let script = "head -c 9000000 /dev/zero; head -c 9000000 /dev/zero >&2";
    let output = sandbox
        .run(["sh", "-c", script])
        .max_output(8 * 1024 * 1024)
        .await
        .unwrap();
    assert!(output.stdout_truncated && output.stderr_truncated);
    assert_eq!((output.stdout.len(), output.stderr.len()), (8 << 20, 8 << 20));
    assert_eq!(output.status.stdout_bytes, 9_000_000);
    refused(sandbox.run(["no-such-program"]).await, Reason::ProgramNotFound);
    let traced = sandbox.run(["true"]).trace().await.unwrap();
    assert!(traced.status.work.is_some() && traced.status.host_work.is_some());
}

#[tokio::test]
async fn a_process_outlives_client_and_daemon() {
    let mut daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await.keep();
    let script = "echo one; while read -r line; do echo \"$line\"; done; exit 3";
    let spawn = || {
        sandbox
            .spawn(["sh", "-c", script])
            .name("job")
            .keep_stdin()
            .request_key("k")
    };
    let process = spawn().await.unwrap();
    let again = spawn().await.unwrap();
    assert_eq!((again.id(), again.pid()), (process.id(), process.pid()));
    let taken = sandbox.spawn(["true"]).name("job").await;
    refused(taken, Reason::NameTaken);

    let mut visit = sandbox.process("job").attach().input().open().await.unwrap();
    until(&mut visit, "one\n").await;
    let busy = process.attach().input().open().await;
    refused(busy, Reason::InputBusy);
    daemon.kill9().await;
    assert!(within(HANG, visit.wait()).await.is_err());
    daemon.start_again().await;

    // Another client, which has the name and where the first one stopped.
    let client = daemon.client().await;
    let sandbox = client.sandbox(sandbox.id(), sandbox.token().cloned());
    let process = sandbox.process("job");
    let mut visit = process
        .attach()
        .from(LogFrom::Offset(4))
        .input()
        .open()
        .await
        .unwrap();
    let mut stdin = visit.take_stdin().unwrap();
    stdin.write("two\n").await.unwrap();
    until(&mut visit, "two\n").await;
    assert_eq!(visit.offset(), Some(8));
    drop(stdin);
    assert_eq!(within(HANG, visit.wait()).await.unwrap().how, How::Code(3));
    assert_eq!(whole(&process).await, (b"one\ntwo\n".to_vec(), How::Code(3)));
    assert_eq!(process.wait().await.unwrap().how, How::Code(3));
    process.forget().await.unwrap();
    refused(process.wait().await, Reason::ProcessNotFound);
}

#[tokio::test]
async fn processes_are_listed_signalled_and_told_apart() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let sleeper = sandbox.spawn(["sleep", "1000"]).await.unwrap();
    let pid = Process::look(i32::try_from(sleeper.pid()).unwrap()).unwrap();
    let exited = sandbox
        .spawn(["sh", "-c", "echo x; exit 7"])
        .name("short")
        .await
        .unwrap();
    assert_eq!(within(HANG, exited.wait()).await.unwrap().how, How::Code(7));
    let rows = sandbox.processes(false).await.unwrap().all().await.unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(
        (rows[0].id, rows[0].kind(), rows[0].state()),
        (sleeper.id(), ProcessKind::Detached, ProcessState::Running)
    );
    assert_eq!(
        (rows[1].state(), &rows[1].name[..]),
        (ProcessState::Exited, &b"short"[..])
    );
    let running = sandbox.processes(true).await.unwrap().all().await.unwrap();
    assert_eq!(running.len(), 1);

    assert!(sleeper.wait_timeout(Duration::ZERO).await.unwrap().is_none());
    refused(sleeper.forget().await, Reason::StillRunning);
    let killed = sleeper.signal(15, Scope::Leader).await.unwrap();
    assert!(killed.signalled && !killed.already_exited);
    pid.gone().await;
    assert_eq!(within(HANG, sleeper.wait()).await.unwrap().how, How::Signal(15));
    assert!(sleeper.kill().await.unwrap().already_exited);
    refused(sandbox.process("nobody").kill().await, Reason::ProcessNotFound);
    let beyond = exited.logs().from(LogFrom::Offset(99)).open().await;
    let error = match beyond {
        Ok(mut log) => within(HANG, log.next()).await.unwrap().unwrap_err(),
        Err(error) => error,
    };
    assert!(error.is(Reason::OffsetOutOfRange), "{error:?}");
}

#[tokio::test]
async fn what_a_log_does_not_hold_is_told() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let process = sandbox
        .spawn(["sh", "-c", "seq 1 200000"])
        .log_bytes(64 * 1024)
        .await
        .unwrap();
    let exit = within(HANG, process.wait()).await.unwrap();
    let mut log = process
        .logs()
        .from(LogFrom::Offset(0))
        .follow()
        .open()
        .await
        .unwrap();
    let (mut gone, mut held) = (0, Vec::new());
    while let Some(event) = within(HANG, log.next()).await {
        match event.unwrap() {
            LogEvent::Gap { from, to } => gone += to - from,
            LogEvent::Stdout { data, .. } => held.extend_from_slice(&data),
            LogEvent::Stderr { .. } | LogEvent::Exit(_) => {}
        }
    }
    assert!(gone > 0 && held.ends_with(b"\n199999\n200000\n"));
    assert_eq!(gone + held.len() as u64, exit.stdout_bytes);
}

#[tokio::test]
async fn a_program_that_is_left_can_be_found_again() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let exec = sandbox.exec(["sh", "-c", "echo begun; read -r x; echo $x; sleep 1000"]);
    let exec = exec.detach_on_disconnect().name("left").piped_stdin();
    let mut stream = exec.stream().await.unwrap();
    let mut stdin = stream.take_stdin().unwrap();
    stdin.write("heard\n").await.unwrap();
    let mut said = Vec::new();
    while !said.ends_with(b"heard\n") {
        if let Event::Stdout(bytes) = within(HANG, stream.next()).await.unwrap().unwrap() {
            said.extend_from_slice(&bytes);
        }
    }
    drop(stream);
    drop(stdin);
    let mut visit = sandbox.process("left").attach().open().await.unwrap();
    until(&mut visit, "begun\nheard\n").await;
    sandbox.process("left").kill().await.unwrap();
    assert_eq!(within(HANG, visit.wait()).await.unwrap().how, How::Signal(9));
}

#[tokio::test]
async fn the_verbs_of_processes_go_through() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let ctl = daemon.ctl().token(sandbox.token().unwrap().expose());
    let sb = sandbox.id();
    let script = "echo out; echo err >&2; cat; exit 5";
    let spawn = ["spawn", "--name", "job", "--stdin", sb, "--", "sh", "-c", script];
    let id = ctl.json(spawn).await["process"].as_u64().unwrap().to_string();
    let rows = ctl.json(["ps", "--running", sb]).await;
    assert_eq!(rows["processes"][0]["name"], "job");
    let attached = ctl
        .run_with(["attach", "-i", "--from", "oldest", sb, "job"], b"typed")
        .await;
    assert_eq!(
        (attached.code, attached.text(), &*attached.stderr),
        (5, "out\ntyped".to_owned(), "err\n")
    );
    let logs = ctl.run(["logs", "-f", sb, &id]).await;
    assert_eq!(
        (logs.code, logs.text(), &*logs.stderr),
        (0, "out\ntyped".to_owned(), "err\n")
    );
    let part = ctl
        .run(["logs", "--from", "4", "--max-bytes", "3", sb, &id])
        .await;
    assert_eq!(
        (part.code, part.stdout.len() + part.stderr.len()),
        (0, 3),
        "{part:?}"
    );
    assert_eq!(ctl.run(["wait", sb, "job"]).await.text(), "5\n");
    assert_eq!(ctl.json(["kill", sb, "job"]).await["already_exited"], true);
    assert_eq!(ctl.run(["forget", sb, "job"]).await.code, 0);
    assert_eq!(
        ctl.error(["wait", sb, "job"]).await["reason"],
        "PROCESS_NOT_FOUND"
    );
    let running = ctl.json(["spawn", sb, "--", "sleep", "1000"]).await["process"].to_string();
    assert_eq!(ctl.run(["wait", "--timeout", "10ms", sb, &running]).await.code, 3);
    assert_eq!(ctl.run(["kill", "-s", "TERM", sb, &running]).await.code, 0);
    assert_eq!(ctl.run(["wait", sb, &running]).await.text(), "143\n");
}
