//! How a program ends, and what of it.

use std::{sync::atomic::Ordering, time::Duration};

use rustix::process::Signal;
use sandbox_protocol::{
    reason::Reason,
    v1::{Descendants, ExecStart, Signal as Wanted, Size, exec_in::M, signal::Scope as Told},
};

use super::harness::{
    Guest, command, death, eventually, handle, lives, of, refusal, sh, var, with_stdin, within,
};
use crate::{
    run::{
        ClaimDefaults, HookEnd, Kind,
        entry::Argv,
        job::{Birth, Scope},
    },
    sys::{Dead, How, Usage},
};

/// Prints the number of a child that it leaves behind, which holds the output.
fn parent_of(child: &str) -> String {
    format!("{child} & echo $!")
}

fn pid(line: &[u8]) -> i32 {
    std::str::from_utf8(line).unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn exit_code_and_signal_are_told_apart() {
    let guest = Guest::start();
    assert_eq!(guest.run(sh("exit 137")).await.unwrap().code(), 137);
    assert_eq!(guest.run(sh("kill -KILL $$")).await.unwrap().signal(), 9);
    assert_eq!(guest.run(sh("kill -TERM $$")).await.unwrap().signal(), 15);
    assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    guest.end().await;
}

#[tokio::test]
async fn background_child_does_not_hang_exec() {
    let guest = Guest::start();
    let ran = guest.run(sh(&parent_of("sleep 1000"))).await.unwrap();
    assert_eq!((ran.code(), ran.exit.descendants_killed), (0, 1));
    // Ended when the exit is told; reaped soon after.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid(&ran.stdout))).unwrap_or_default();
    assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    guest.end().await;
}

#[tokio::test]
async fn setsid_child_is_killed() {
    let guest = Guest::start();
    // Double setsid, output closed: neither session nor pipe leads to it.
    let script = "setsid setsid sh -c 'echo $$; exec sleep 1000 >/dev/null 2>&1' & read x; exit 0";
    let mut call = guest.begin(with_stdin(sh(script))).await.unwrap();
    let child = handle(pid(&call.chunk().await));
    assert!(lives(&child));
    call.input = None;
    let ran = call.finish().await.unwrap();
    assert!(!lives(&child), "gone when the exit is told");
    assert!(ran.exit.descendants_killed >= 1);
    guest.end().await;
}

#[tokio::test]
async fn whoever_else_holds_the_pipe_does_not_hold_the_exit() {
    let guest = Guest::start();
    let mut leader = guest
        .begin(with_stdin(sh("echo mine; read x; echo last")))
        .await
        .unwrap();
    assert_eq!(leader.chunk().await, b"mine\n"[..]);
    // A program of another call opens the first one's output: no kill of the first one's tree closes that.
    let holder = format!(
        "exec 5>/proc/{}/fd/1; echo open; exec sleep 1000",
        leader.started.pid
    );
    let mut holder = guest.begin(of(sh(&holder))).await.unwrap();
    assert_eq!(holder.chunk().await, b"open\n"[..]);
    leader.input = None;
    let ran = within(leader.output.message()).await.unwrap().unwrap();
    assert!(format!("{ran:?}").contains("last"));
    let exit = within(leader.output.message()).await.unwrap().unwrap();
    assert!(format!("{exit:?}").contains("Exit"), "{exit:?}");
    drop(holder);
    guest.end().await;
}

fn kept(script: &str) -> ExecStart {
    let mut wanted = sh(script);
    wanted.descendants = Descendants::Keep.into();
    of(wanted)
}

const SERVER: &str = "use IO::Socket::INET; my $s = IO::Socket::INET->new(Listen => 5, LocalAddr => '127.0.0.1') or die; \
    $| = 1; print $s->sockport, \" $$\\n\"; while (my $c = $s->accept) { print 'x' x 5000; print $c \"hello\\n\"; close $c }";

async fn greeting(port: u16) -> std::io::Result<String> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text).await?;
    Ok(text)
}

#[tokio::test]
async fn keep_leaves_the_server() {
    let guest = Guest::start();
    let mut start = kept("perl -e \"$SERVER\" & read line < \"$GO\"");
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &go, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let command = start.command.as_mut().unwrap();
    command.env = vec![
        var(b"SERVER", SERVER.as_bytes()),
        var(b"GO", go.to_str().unwrap().as_bytes()),
    ];
    let mut call = guest.begin(start).await.unwrap();
    let line = String::from_utf8(call.chunk().await.to_vec()).unwrap();
    let (port, server) = line.trim().split_once(' ').unwrap();
    let server = handle(server.parse().unwrap());
    // The leader waits in its open until somebody writes.
    let writer = crate::tasks::blocking(move || std::fs::OpenOptions::new().write(true).open(go));
    drop(within(writer).await.unwrap().unwrap());
    let exit = call.finish().await.unwrap().exit;
    assert_eq!(exit.descendants_killed, 0);
    // It prints far more than a pipe holds while nobody but silkd reads, and does not die of it.
    for _ in 0..40 {
        assert_eq!(within(greeting(port.parse().unwrap())).await.unwrap(), "hello\n");
    }
    assert!(lives(&server));
    assert_eq!(guest.runner.running(), 0);
    guest.end().await;
    assert!(!lives(&server), "the stop ends what was kept");
}

#[tokio::test]
async fn a_chatty_kept_child_does_not_prolong_the_exit() {
    let guest = Guest::start();
    let ran = guest.run_start(kept("yes & exit 6")).await.unwrap();
    assert_eq!(ran.code(), 6);
    guest.end().await;
}

#[tokio::test]
async fn timeout_frees_the_port() {
    let guest = Guest::start();
    let mut wanted = sh("perl -e \"$SERVER\" & wait");
    wanted.env = vec![var(b"SERVER", SERVER.as_bytes())];
    wanted.timeout_ms = 3000;
    let mut call = guest.begin(of(wanted)).await.unwrap();
    let line = String::from_utf8(call.chunk().await.to_vec()).unwrap();
    let port = line.split(' ').next().unwrap().parse().unwrap();
    let ran = call.finish().await.unwrap();
    assert!(ran.exit.timed_out);
    assert_eq!((ran.signal(), ran.exit.descendants_killed), (9, 1));
    assert!(within(greeting(port)).await.is_err(), "the port is free");
    guest.end().await;
}

#[tokio::test]
async fn timeout_returns_on_time_with_orphans() {
    let guest = Guest::start();
    let mut wanted = sh("setsid sleep 1000 & (sleep 1000 &) ; sleep 1000");
    wanted.timeout_ms = 200;
    let ran = guest.run(wanted).await.unwrap();
    assert!(ran.exit.timed_out && ran.exit.wall_us >= 200_000);
    // Hang bound only: the sleeps are a thousand seconds long.
    assert!(ran.exit.wall_us < 30_000_000);
    guest.end().await;
}

#[tokio::test]
async fn a_polite_timeout_is_followed_by_kill() {
    let guest = Guest::start();
    let mut polite = sh("trap 'echo bye; exit 3' TERM; while :; do sleep 0.01; done");
    (polite.timeout_ms, polite.timeout_signal) = (1500, 15);
    let ran = guest.run(polite.clone()).await.unwrap();
    assert_eq!((ran.exit.timed_out, ran.code(), ran.text()), (true, 3, "bye\n"));
    let mut stubborn = sh("trap '' TERM; while :; do sleep 0.01; done");
    (stubborn.timeout_ms, stubborn.timeout_signal, stubborn.grace_ms) = (100, 15, Some(50));
    let ran = guest.run(stubborn).await.unwrap();
    assert_eq!((ran.exit.timed_out, ran.signal()), (true, 9));
    guest.end().await;
}

#[tokio::test]
async fn silent_child_dies_on_disconnect() {
    let guest = Guest::start();
    let call = guest.begin(of(sh("sleep 1000 & exec sleep 1000"))).await.unwrap();
    let leader = handle(i32::try_from(call.started.pid).unwrap());
    drop(call);
    death(leader).await;
    eventually("no program", || {
        guest.runner.running() == 0 && guest.gate.open() == 0
    })
    .await;
    guest.end().await;
}

#[tokio::test]
async fn a_blocked_program_dies_on_disconnect() {
    let guest = Guest::start();
    let call = guest.begin(with_stdin(command(&[b"yes"]))).await.unwrap();
    let leader = handle(i32::try_from(call.started.pid).unwrap());
    drop(call);
    death(leader).await;
    guest.end().await;
}

#[tokio::test]
async fn signals_reach_their_scope() {
    let guest = Guest::start();
    for (scope, ends) in [
        (Told::Unspecified, true),
        (Told::Group, true),
        (Told::Leader, false),
        (Told::Tree, true),
    ] {
        // The child says when it has set its trap; the leader stays for its child's end.
        let child = "trap 'echo child; exit 0' USR1; echo up; while :; do sleep 0.01; done";
        let script = format!("trap 'echo leader' USR1; sh -c \"{child}\" & wait; wait; sleep 0.02; exit 9");
        let mut start = with_stdin(sh(&script));
        start.command.as_mut().unwrap().descendants = Descendants::Kill.into();
        let mut call = guest.begin(start).await.unwrap();
        assert_eq!(call.chunk().await, b"up\n"[..]);
        let usr1 = Wanted {
            number: Signal::USR1.as_raw(),
            scope: scope.into(),
        };
        call.send(M::Signal(usr1)).await;
        if !ends {
            assert_eq!(call.chunk().await, b"leader\n"[..]);
            let kill = Wanted {
                number: 9,
                scope: Told::Leader.into(),
            };
            call.send(M::Signal(kill)).await;
            let ran = call.finish().await.unwrap();
            assert_eq!((ran.signal(), ran.text()), (9, ""));
            continue;
        }
        let ran = call.finish().await.unwrap();
        let mut lines: Vec<&str> = ran.text().lines().collect();
        lines.sort_unstable();
        assert_eq!((lines, ran.code()), (vec!["child", "leader"], 9), "{scope:?}");
    }
    guest.end().await;
}

#[tokio::test]
async fn a_wrong_message_ends_the_call_and_the_program() {
    let guest = Guest::start();
    for (message, expected) in [
        (M::Signal(Wanted { number: 65, scope: 0 }), Reason::InvalidSignal),
        (M::Signal(Wanted { number: 0, scope: 0 }), Reason::InvalidSignal),
        (M::Resize(Size::default()), Reason::NotATty),
        (M::Start(ExecStart::default()), Reason::InvalidCommand),
        (M::Stdin(vec![0; 256 * 1024 + 1].into()), Reason::InvalidCommand),
    ] {
        let call = guest.begin(with_stdin(sh("sleep 1000"))).await.unwrap();
        let leader = handle(i32::try_from(call.started.pid).unwrap());
        call.send(message).await;
        let (reason, _) = refusal(call.finish().await.unwrap_err());
        assert_eq!(reason, expected);
        death(leader).await;
    }
    guest.end().await;
}

#[tokio::test]
async fn hibernation_ends_the_stream_by_name() {
    let guest = Guest::start();
    let call = guest.begin(of(sh("sleep 1000"))).await.unwrap();
    guest.gate.end_streams();
    let (reason, _) = refusal(call.finish().await.unwrap_err());
    assert_eq!(reason, Reason::SandboxHibernating);
    guest.end().await;
}

#[tokio::test]
async fn rusage_is_of_the_process() {
    let guest = Guest::start();
    let ran = guest
        .run(command(&[b"perl", b"-e", b"1 while (times)[0] < 0.2"]))
        .await
        .unwrap();
    let usage = ran.exit.rusage.unwrap();
    assert!(usage.user_us >= 180_000, "{usage:?}");
    assert!(usage.max_rss_kib > 500, "{usage:?}");
    assert!(ran.exit.wall_us >= 180_000);
    let idle = guest.run(command(&[b"true"])).await.unwrap().exit.rusage.unwrap();
    assert!(idle.user_us + idle.system_us < usage.user_us);
    guest.end().await;
}

#[tokio::test]
async fn pid_reuse_never_hits_a_stranger() {
    let guest = Guest::start();
    let stranger = guest.begin(with_stdin(sh("read x; exit 8"))).await.unwrap();
    // A program that ended long ago, whose number the stranger has got since.
    let shared = &guest.runner.shared;
    let job = shared
        .admit(Birth::new(Kind::Exec, Argv::default(), 0, false))
        .unwrap();
    job.pid()
        .store(i32::try_from(stranger.started.pid).unwrap(), Ordering::Release);
    job.ended(Dead {
        how: How::Code(0),
        usage: Usage::default(),
    });
    for scope in [Scope::Group, Scope::Leader, Scope::Tree] {
        job.signal(Signal::KILL, scope);
    }
    job.time_out(Signal::KILL);
    job.abandon();
    drop(job);
    let mut stranger = stranger;
    stranger.input = None;
    assert_eq!(stranger.finish().await.unwrap().code(), 8);
    guest.end().await;
}

/// Children of this process that have ended and were not reaped.
fn zombies() -> usize {
    let me = std::process::id().to_string();
    let entries = std::fs::read_dir("/proc").unwrap();
    let stats = entries.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("stat")).ok());
    let mine = stats.filter(|stat| {
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        fields.next() == Some("Z") && fields.next() == Some(&me)
    });
    mine.count()
}

#[tokio::test]
async fn orphans_are_reaped() {
    let guest = Guest::start();
    let ran = guest
        .run(sh("i=0; while [ $i -lt 600 ]; do (true &); i=$((i+1)); done"))
        .await
        .unwrap();
    assert_eq!(ran.code(), 0);
    eventually("no zombie", || zombies() == 0).await;
    guest.end().await;
}

#[tokio::test]
async fn a_hundred_at_once_keep_their_statuses() {
    let guest = Guest::start();
    let runs = (0..100).map(|code| {
        let script = format!("echo {code}; exit {code}");
        let guest = &guest;
        async move {
            let ran = guest.run(sh(&script)).await.unwrap();
            assert_eq!((ran.code(), ran.text().trim().parse()), (code, Ok(code)));
            ran.started.id
        }
    });
    let mut ids = futures_util::future::join_all(runs).await;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 100, "ids are never reused");
    guest.end().await;
}

#[tokio::test]
async fn without_cgroups_sessions_have_to_do() {
    let guest = Guest::start_with(None, ClaimDefaults::default());
    assert!(!guest.runner.contains());
    let ran = guest.run(sh(&parent_of("sleep 1000"))).await.unwrap();
    assert_eq!((ran.code(), ran.exit.descendants_killed), (0, 1));
    let mut wanted = sh("sleep 1000 & sleep 1000");
    wanted.timeout_ms = 100;
    assert!(guest.run(wanted).await.unwrap().exit.timed_out);
    let call = guest.begin(of(command(&[b"sleep", b"1000"]))).await.unwrap();
    let leader = handle(i32::try_from(call.started.pid).unwrap());
    within(guest.runner.freeze()).await.unwrap();
    eventually("stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", call.started.pid)).unwrap();
        stat.contains(") T ")
    })
    .await;
    within(guest.runner.thaw()).await.unwrap();
    drop(call);
    death(leader).await;
    guest.end().await;
}

#[tokio::test]
async fn a_stop_asks_then_kills() {
    let guest = Guest::start();
    let polite = guest
        .begin(of(sh(
            "trap 'exit 3' TERM; echo up; while :; do sleep 0.01; done",
        )))
        .await
        .unwrap();
    let stubborn = guest
        .begin(of(sh("trap '' TERM; echo up; while :; do sleep 0.01; done")))
        .await
        .unwrap();
    let (mut polite, mut stubborn) = (polite, stubborn);
    assert_eq!(polite.chunk().await.len() + stubborn.chunk().await.len(), 6);
    within(guest.runner.stop(Duration::from_millis(500))).await;
    assert_eq!(polite.finish().await.unwrap().code(), 3);
    assert_eq!(stubborn.finish().await.unwrap().signal(), 9);
    guest.end().await;
}

#[tokio::test]
async fn a_hook_ends_in_time_with_its_last_words() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let hook = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::io::Write::write_all(&mut std::fs::File::create(&path).unwrap(), text.as_bytes()).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        path
    };
    let env = [var(b"SANDBOX_ID", b"sb_1")];
    let good = hook(
        "good",
        "#!/bin/sh\nyes | head -c 100000\necho $SANDBOX_ID >&2\nexit 4\n",
    );
    let outcome = within(guest.runner.run_hook(&good, &env, Duration::from_secs(30)))
        .await
        .unwrap();
    assert_eq!((outcome.end, outcome.output.len()), (HookEnd::Code(4), 4096));
    assert!(outcome.output.ends_with(b"y\nsb_1\n"));
    let slow = hook("slow", "#!/bin/sh\necho first\nsetsid sleep 1000 &\nsleep 1000\n");
    let outcome = within(guest.runner.run_hook(&slow, &env, Duration::from_millis(300)))
        .await
        .unwrap();
    assert_eq!(
        (outcome.end, &*outcome.output),
        (HookEnd::TimedOut, &b"first\n"[..])
    );
    let missing = dir.path().join("missing");
    let error = within(guest.runner.run_hook(&missing, &env, Duration::from_secs(1)))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("missing"));
    guest.end().await;
}
