//! Programs through the forwarded stream: bytes, ends, callers that leave.

use std::time::Duration;

use harness::{Daemon, HANG, Setup, process::Process, refused, within};
use rustix::process::Signal;
use sandbox_sdk::{ErrorKind, Event, ExecStream, How, Reason, Sandbox};

async fn claimed(daemon: &Daemon) -> Sandbox {
    daemon.client().await.claim("default").await.unwrap()
}

/// The next piece of standard output.
async fn piece(stream: &mut ExecStream) -> String {
    loop {
        match within(HANG, stream.next()).await.unwrap().unwrap() {
            Event::Stdout(bytes) => return String::from_utf8(bytes.to_vec()).unwrap(),
            Event::Started { .. } | Event::Stderr(_) => {}
            Event::Exit(exit) => panic!("{exit:?}"),
        }
    }
}

/// A program that tells its pid and then sleeps; guests of the stub engine share our process table.
async fn sleeper(sandbox: &Sandbox) -> (ExecStream, Process) {
    let mut stream = sandbox
        .exec(["sh", "-c", "echo $$; exec sleep 1000"])
        .stream()
        .await
        .unwrap();
    let pid = piece(&mut stream).await.trim().parse().unwrap();
    (stream, Process::look(pid).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn e06_eight_mebibytes_go_through_both_ways_unaltered() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    // Every byte value, in an order that no frame size divides.
    let bytes: Vec<u8> = (0..8 * 1024 * 1024_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0])
        .collect();
    let output = sandbox.exec(["cat"]).stdin(bytes.clone()).output().await.unwrap();
    assert!(output.status.success() && !output.truncated());
    assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
    let both = "cat >/dev/null; head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2; exit 4";
    let output = sandbox
        .exec(["sh", "-c", both])
        .stdin(bytes)
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.how, How::Code(4));
    assert_eq!((output.stdout.len(), output.stderr.len()), (3_000_000, 2_000_000));
}

#[tokio::test]
async fn e15_a_caller_that_leaves_takes_its_program_along() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let (stream, process) = sleeper(&sandbox).await;
    drop(stream);
    process.gone().await;

    // And one that is killed.
    let ctl = daemon.ctl().token(sandbox.token().unwrap().expose());
    let script = "echo $$; exec sleep 1000";
    let mut child = ctl
        .command(["exec", sandbox.id(), "--", "sh", "-c", script])
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    let read = tokio::io::AsyncBufReadExt::read_line(&mut lines, &mut line);
    within(HANG, read).await.unwrap();
    let process = Process::look(line.trim().parse().unwrap()).unwrap();
    child.kill().await.unwrap();
    process.gone().await;
    assert!(sandbox.exec(["true"]).output().await.unwrap().status.success());
}

#[tokio::test]
async fn e04_what_runs_ends_with_its_release() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let (stream, process) = sleeper(&sandbox).await;
    sandbox.release().await.unwrap();
    process.gone().await;
    let error = within(HANG, stream.wait()).await.unwrap_err();
    assert!(error.reason().is_some(), "{error:?}");
}

#[tokio::test]
async fn e07_a_daemon_that_dies_is_no_exit_of_the_program() {
    let mut daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await.keep();
    let mut stream = sandbox
        .exec(["sh", "-c", "echo up; exec sleep 1000"])
        .stream()
        .await
        .unwrap();
    assert_eq!(piece(&mut stream).await, "up\n");
    daemon.kill9().await;
    let error = within(HANG, stream.wait()).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Broken | ErrorKind::Unfinished),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn e10_a_reader_that_stalls_stops_only_itself_and_costs_no_memory() {
    let daemon = Setup::stub().warm(2).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let another = client.claim("default").await.unwrap();
    let flood = |sandbox: &Sandbox| sandbox.exec(["cat", "/dev/zero"]).stream();
    let mut stalled = Vec::new();
    for _ in 0..8 {
        stalled.push(flood(&sandbox).await.unwrap());
    }
    let before = resident(&daemon);
    // The same connection, the same guest, and another guest: all go on.
    for sandbox in [&sandbox, &another] {
        let output = sandbox
            .exec(["head", "-c", "8000000", "/dev/zero"])
            .output()
            .await
            .unwrap();
        assert_eq!(output.stdout.len(), 8_000_000);
    }
    let grown = resident(&daemon).saturating_sub(before);
    assert!(grown < 48 * 1024, "the daemon grew by {grown} KiB");
    // And the stalled ones still have every byte.
    for stream in &mut stalled {
        let mut read = 0;
        while read < 1_000_000 {
            match within(HANG, stream.next()).await.unwrap().unwrap() {
                Event::Stdout(bytes) => {
                    assert!(bytes.iter().all(|byte| *byte == 0));
                    read += bytes.len();
                }
                Event::Started { .. } => {}
                other @ (Event::Stderr(_) | Event::Exit(_)) => panic!("{other:?}"),
            }
        }
    }
}

/// KiB of memory that the daemon has.
fn resident(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.process().pid)).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test]
async fn e05_a_command_that_cannot_start_says_why() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    for (exec, reason) in [
        (sandbox.exec(["no-such-program"]), Reason::ProgramNotFound),
        (sandbox.exec(["/etc/passwd"]), Reason::NotExecutable),
        (sandbox.exec(["true"]).cwd("/nowhere"), Reason::CwdNotFound),
        (sandbox.exec(["true"]).cwd("/etc/passwd"), Reason::NotADirectory),
        (
            sandbox.exec(["true"]).user("nobody-of-that-name"),
            Reason::UserNotFound,
        ),
        (sandbox.exec([] as [&str; 0]), Reason::InvalidCommand),
        (sandbox.exec(["a\0b"]), Reason::InvalidCommand),
        (sandbox.exec(["true"]).env("A=B", "c"), Reason::InvalidEnv),
        (sandbox.exec(["true"]).cwd("relative"), Reason::InvalidPath),
        (
            sandbox.exec(["true".to_owned(), "x".repeat(128 * 1024)]),
            Reason::ArgumentsTooLarge,
        ),
    ] {
        let error = refused(exec.output().await, reason);
        assert_eq!(error.origin(), sandbox_sdk::Origin::Guest, "{error:?}");
    }
}

#[tokio::test]
async fn a_timeout_and_a_signal_end_a_program_and_say_so() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    let output = sandbox
        .exec(["sleep", "1000"])
        .timeout(Duration::from_millis(50))
        .output()
        .await
        .unwrap();
    assert!(output.status.timed_out);
    assert_eq!(output.status.how, How::Signal(Signal::KILL.as_raw()));
    let (stream, process) = sleeper(&sandbox).await;
    stream.signaller().signal(Signal::TERM.as_raw()).await;
    let exit = within(HANG, stream.wait()).await.unwrap();
    assert_eq!(
        (exit.how, exit.timed_out),
        (How::Signal(Signal::TERM.as_raw()), false)
    );
    process.gone().await;
}

#[tokio::test]
async fn an_exec_counts_its_own_work() {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = claimed(&daemon).await;
    // The first one of a guest makes what the others find.
    sandbox.exec(["true"]).output().await.unwrap();
    let exit = sandbox.exec(["true"]).trace().output().await.unwrap().status;
    let host = exit.host_work.unwrap();
    assert_eq!(
        (host.journal_records, host.writes, host.tasks_spawned, host.binds),
        (0, 0, 0, 0),
        "{host:?}"
    );
    assert_eq!(exit.work.unwrap().clones, 1);
}
