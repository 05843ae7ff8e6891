//! Terminals, as who sits at one sees them.

use bytes::Bytes;
use sandbox_protocol::{
    limits::TTYS,
    reason::Reason,
    v1::{
        AgentSpawnRequest, AgentWaitRequest, AttachStart, Command, Descendants, ExecStart, OnDisconnect,
        ProcessKind, ProcessState, Size, StdinClose, Tty, attach_in, exec_in::M,
    },
};

use super::harness::{
    Attachment, Call, Guest, Ran, Read, by_id, command, death, detached, eventually, from, handle, lives, of,
    refusal, sh, to, var, with_stdin,
};

fn at_a_terminal(mut command: Command) -> ExecStart {
    command.tty = Some(Tty {
        cols: 80,
        rows: 24,
        term: Bytes::new(),
    });
    with_stdin(command)
}

/// Reads on until it has said this.
async fn until(call: &mut Call, text: &str) -> String {
    let (mut said, mut seen) = (Vec::new(), 0_usize);
    let end = loop {
        let from = seen.saturating_sub(text.len());
        let place = said[from..]
            .windows(text.len())
            .position(|part| part == text.as_bytes());
        if let Some(place) = place {
            break from + place + text.len();
        }
        seen = said.len();
        said.extend_from_slice(&call.chunk().await);
    };
    call.unread(said.split_off(end).into());
    String::from_utf8(said).unwrap()
}

async fn typed(call: &Call, text: &'static [u8]) {
    call.send(M::Stdin(Bytes::from_static(text))).await;
}

async fn ran(guest: &Guest, start: ExecStart) -> Ran {
    let call = guest.begin(start).await.unwrap();
    call.finish().await.unwrap()
}

#[tokio::test]
async fn size_before_first_byte() {
    let guest = Guest::start();
    let ran = ran(&guest, at_a_terminal(command(&[b"stty", b"size"]))).await;
    assert_eq!(ran.text(), "24 80\r\n");
    guest.end().await;
}

#[tokio::test]
async fn a_terminal_is_one_as_programs_know_it() {
    let guest = Guest::start();
    // Three descriptors, the same by its name and by the name of every controlling terminal; UTF-8; the leader's
    // group in front.
    let script = "tty; test -t 0 && test -t 1 && test -t 2 && echo all; stty -a | grep -o -w iutf8; echo $TERM; \
        echo by name >/dev/tty; set -- $(cat /proc/$$/stat); test $5 = $8 && echo in front; echo to stderr >&2";
    let ran = ran(&guest, at_a_terminal(sh(script))).await;
    let mut lines = ran.text().lines();
    assert!(lines.next().unwrap().starts_with("/dev/pts/"), "{ran:?}");
    assert_eq!(
        lines.collect::<Vec<_>>(),
        [
            "all",
            "iutf8",
            "xterm-256color",
            "by name",
            "in front",
            "to stderr"
        ]
    );
    assert_eq!((ran.stderr.len(), ran.code()), (0, 0));
    guest.end().await;
}

#[tokio::test]
async fn a_terminal_belongs_to_its_user() {
    let guest = Guest::start();
    let mut wanted = sh("t=$(tty); echo written >\"$t\"; stat -c %u \"$t\"");
    wanted.user = "4242:4242".into();
    let ran = ran(&guest, at_a_terminal(wanted)).await;
    assert_eq!(ran.text(), "written\r\n4242\r\n");
    guest.end().await;
}

#[tokio::test]
async fn resize_raises_winch() {
    let guest = Guest::start();
    let script = "trap 'stty size' WINCH; echo ready; while :; do read x && exit; done";
    let mut call = guest.begin(at_a_terminal(sh(script))).await.unwrap();
    until(&mut call, "ready\r\n").await;
    call.send(M::Resize(Size { cols: 132, rows: 50 })).await;
    until(&mut call, "50 132\r\n").await;
    // Also when whoever sits there has nothing more to type.
    typed(&call, b"go\n").await;
    assert_eq!(call.finish().await.unwrap().code(), 0);
    guest.end().await;
}

#[tokio::test]
async fn a_size_that_cannot_be_is_refused() {
    let guest = Guest::start();
    for (cols, rows) in [(0, 24), (80, 0), (4097, 24), (80, 70_000)] {
        let mut wanted = command(&[b"true"]);
        let term = Bytes::new();
        wanted.tty = Some(Tty { cols, rows, term });
        assert_eq!(guest.refused(wanted).await.0, Reason::InvalidSize);
    }
    let mut call = guest
        .begin(at_a_terminal(sh("echo ready; exec sleep 1000")))
        .await
        .unwrap();
    until(&mut call, "ready").await;
    let program = handle(call.started.pid.try_into().unwrap());
    call.send(M::Resize(Size { cols: 80, rows: 0 })).await;
    let (reason, _) = refusal(call.finish().await.unwrap_err());
    assert_eq!(reason, Reason::InvalidSize);
    death(program).await;
    guest.end().await;
}

#[tokio::test]
async fn resize_without_a_terminal_is_refused() {
    let guest = Guest::start();
    let call = guest.begin(with_stdin(command(&[b"cat"]))).await.unwrap();
    call.send(M::Resize(Size { cols: 80, rows: 24 })).await;
    let (reason, _) = refusal(call.finish().await.unwrap_err());
    assert_eq!(reason, Reason::NotATty);
    guest.end().await;
}

#[tokio::test]
async fn seq_200000_last_line() {
    let guest = Guest::start();
    let expected: Vec<u8> = (1..=200_000)
        .flat_map(|n| format!("{n}\r\n").into_bytes())
        .collect();
    let seq = || at_a_terminal(command(&[b"seq", b"1", b"200000"]));
    let whole = ran(&guest, seq()).await;
    assert!(whole.stdout == expected, "{} bytes", whole.stdout.len());
    assert_eq!(whole.code(), 0);
    // Whoever else has it open holds nothing up: the end is not that of the terminal.
    let mut first = guest
        .begin(at_a_terminal(sh("tty; read x; exec seq 1 200000")))
        .await
        .unwrap();
    let name = until(&mut first, "\n").await;
    let holder = format!("exec 5<>{}; echo open; exec sleep 1000", name.trim());
    let mut holder = guest.begin(of(sh(&holder))).await.unwrap();
    assert_eq!(holder.chunk().await, b"open\n"[..]);
    typed(&first, b"\n").await;
    let whole = first.finish().await.unwrap();
    assert!(whole.stdout.ends_with(&expected), "{} bytes", whole.stdout.len());
    drop(holder);
    guest.end().await;
}

#[tokio::test]
async fn an_unread_terminal_blocks_its_program() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let done = dir.path().join("done");
    let script = "seq 1 200000; touch \"$DONE\"";
    let mut wanted = sh(script);
    wanted.env = vec![var(b"DONE", done.to_str().unwrap().as_bytes())];
    let mut call = guest.begin(at_a_terminal(wanted)).await.unwrap();
    // One reader that reads nothing; the guest answers others meanwhile.
    for _ in 0..20 {
        assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    }
    assert!(!done.exists(), "more than a window was taken from it");
    let text = until(&mut call, "\n200000\r\n").await;
    assert_eq!(text.lines().count(), 200_000);
    call.finish().await.unwrap();
    assert!(done.exists());
    guest.end().await;
}

#[tokio::test]
async fn quiet_exit_is_noticed() {
    let guest = Guest::start();
    let quiet = ran(&guest, at_a_terminal(command(&[b"sleep", b"1"]))).await;
    assert_eq!((quiet.stdout.len(), quiet.code()), (0, 0));
    guest.end().await;
}

#[tokio::test]
async fn ctrl_c_d_z_work() {
    let guest = Guest::start();
    // An interactive shell does job control, which needs a controlling terminal.
    let mut shell = command(&[b"bash", b"--norc", b"--noprofile", b"--noediting", b"-i"]);
    shell.env = vec![var(b"PS1", b"> "), var(b"HISTFILE", b"")];
    let mut call = guest.begin(at_a_terminal(shell)).await.unwrap();
    until(&mut call, "> ").await;
    // What is typed comes back too: what is waited for is not in it.
    // Said by the program in front: before it is there, the shell itself would get the signal and go on.
    typed(&call, b"sh -c 'echo o\"\"n; exec sleep 1000'\n").await;
    until(&mut call, "on\r\n").await;
    typed(&call, b"\x03").await;
    until(&mut call, "> ").await;
    typed(&call, b"echo was $?\n").await;
    until(&mut call, "was 130").await;
    typed(&call, b"sh -c 'echo o\"\"n; read x; echo got $x'\n").await;
    until(&mut call, "on\r\n").await;
    typed(&call, b"\x1a").await;
    until(&mut call, "Stopped").await;
    typed(&call, b"fg\nword\n").await;
    until(&mut call, "got word").await;
    typed(&call, b"echo la\"\"st\n").await;
    until(&mut call, "last\r\n").await;
    typed(&call, b"\x04").await;
    assert_eq!(call.finish().await.unwrap().code(), 0);
    guest.end().await;
}

#[tokio::test]
async fn stdin_close_is_eof_char() {
    let guest = Guest::start();
    let mut call = guest
        .begin(at_a_terminal(sh("echo ready; cat; echo over")))
        .await
        .unwrap();
    until(&mut call, "ready\r\n").await;
    typed(&call, b"line\n").await;
    call.send(M::StdinClose(StdinClose {})).await;
    let text = until(&mut call, "over\r\n").await;
    assert_eq!(text, "line\r\nline\r\nover\r\n");
    call.finish().await.unwrap();
    // Whatever the program says that it is, and more than once; the half-close says it too.
    let script = "stty eof '#' -echo; echo ready; cat; echo first; cat; echo second";
    let mut call = guest.begin(at_a_terminal(sh(script))).await.unwrap();
    until(&mut call, "ready\r\n").await;
    call.send(M::StdinClose(StdinClose {})).await;
    until(&mut call, "first\r\n").await;
    typed(&call, b"\x04\n").await;
    until(&mut call, "\x04\r\n").await;
    call.input = None;
    let last = call.finish().await.unwrap();
    assert_eq!(last.text(), "second\r\n");
    guest.end().await;
}

#[tokio::test]
async fn nobody_types_without_stdin() {
    let guest = Guest::start();
    let mut start = at_a_terminal(command(&[b"cat"]));
    start.stdin = false;
    let call = guest.begin(start).await.unwrap();
    typed(&call, b"dropped\n").await;
    let ran = call.finish().await.unwrap();
    assert_eq!((ran.text(), ran.code()), ("", 0));
    guest.end().await;
}

#[tokio::test]
async fn a_caller_who_leaves_hangs_up() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let told = dir.path().join("told");
    // A stopped child hears of it, the leader has time to act on it, and whoever will not hear is killed.
    let script = "sh -c 'trap \"echo child >>$TOLD; exit\" HUP; kill -STOP $$; while :; do read x; done' & \
        trap '' HUP; setsid sh -c 'trap \"\" HUP; echo $$; while :; do sleep 1000; done' & wait";
    let mut wanted = sh(script);
    wanted.env = vec![var(b"TOLD", told.to_str().unwrap().as_bytes())];
    let mut call = guest.begin(at_a_terminal(wanted)).await.unwrap();
    let deaf = until(&mut call, "\n").await;
    let deaf = handle(deaf.trim().parse().unwrap());
    let leader = handle(call.started.pid.try_into().unwrap());
    let stopped = format!("/proc/{}/task", call.started.pid);
    eventually("the child is stopped", || {
        let children = std::fs::read_dir(&stopped).unwrap().flatten();
        let children = children.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap());
        let children: String = children.collect();
        children.split_whitespace().any(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains(") T ")
        })
    })
    .await;
    drop(call);
    eventually("the child has heard", || told.exists()).await;
    death(leader).await;
    death(deaf).await;
    assert_eq!(std::fs::read_to_string(&told).unwrap(), "child\n");
    guest.end().await;
}

#[tokio::test]
async fn what_is_kept_has_no_terminal_and_holds_nothing_up() {
    let guest = Guest::start();
    // The kernel hangs the terminal up when its leader ends; who survives that writes to nobody.
    let script = "setsid sh -c 'trap \"\" HUP; echo $$; while :; do echo chatter 2>&-; done' 2>/dev/null & \
        read x; echo last";
    let mut wanted = sh(script);
    wanted.descendants = Descendants::Keep.into();
    let mut call = guest.begin(at_a_terminal(wanted)).await.unwrap();
    let server = until(&mut call, "\n").await;
    let server = handle(server.lines().next().unwrap().trim().parse().unwrap());
    typed(&call, b"\n").await;
    assert_eq!(call.finish().await.unwrap().code(), 0);
    assert!(lives(&server));
    guest.end().await;
}

#[tokio::test]
async fn terminals_run_out_and_come_back() {
    let guest = Guest::start();
    let mut calls = Vec::new();
    for _ in 0..TTYS {
        calls.push(guest.begin(at_a_terminal(command(&[b"cat"]))).await.unwrap());
    }
    let one_more = guest.begin(at_a_terminal(command(&[b"true"]))).await;
    let (reason, status) = refusal(one_more.unwrap_err());
    assert_eq!(reason, Reason::TtyLimit);
    assert!(tonic_types::StatusExt::get_details_retry_info(&status).is_some());
    // Programs without one are not concerned.
    assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    let mut last = calls.pop().unwrap();
    last.input = None;
    last.finish().await.unwrap();
    let again = ran(&guest, at_a_terminal(command(&[b"stty", b"size"]))).await;
    assert_eq!(again.text(), "24 80\r\n");
    drop(calls);
    guest.end().await;
}

fn spawned_at_a_terminal(mut command: Command) -> AgentSpawnRequest {
    command.tty = Some(Tty {
        cols: 80,
        rows: 24,
        term: Bytes::new(),
    });
    AgentSpawnRequest {
        keep_stdin: true,
        ..detached(command)
    }
}

async fn sit_down(guest: &Guest, id: u64, offset: u64) -> Attachment {
    let start = AttachStart {
        input: true,
        from: from(offset),
        ..to(id)
    };
    let attached = guest.attach(start).await.unwrap();
    assert!(attached.attached.tty);
    attached
}

/// Reads on until it has said this; gives the offset behind what was read.
async fn read_until(seat: &mut Attachment, text: &str) -> u64 {
    let (mut said, mut end) = (Vec::new(), 0);
    while !said.windows(text.len()).any(|part| part == text.as_bytes()) {
        let read = seat.next().await.unwrap();
        let Some(Read::Chunk(chunk)) = read else {
            panic!("no output: {read:?}");
        };
        end = chunk.offset + u64::try_from(chunk.data.len()).unwrap();
        said.extend_from_slice(&chunk.data);
    }
    end
}

#[tokio::test]
async fn reattach_a_detached_tty() {
    let guest = Guest::start();
    let script = "stty -echo; trap 'stty size' WINCH; echo ready; while :; do \
        read x && echo \"got $x\"; test \"$x\" = two && break; done; cat; echo end; exit 4";
    let spawned = guest.spawn(spawned_at_a_terminal(sh(script))).await.unwrap();
    let typed = |text: &'static [u8]| attach_in::M::Stdin(Bytes::from_static(text));
    let resize = |cols, rows| attach_in::M::Resize(Size { cols, rows });
    let mut first = sit_down(&guest, spawned.id, 0).await;
    read_until(&mut first, "ready\r\n").await;
    first.send(typed(b"one\n")).await;
    read_until(&mut first, "got one\r\n").await;
    first.send(resize(100, 30)).await;
    let offset = read_until(&mut first, "30 100\r\n").await;
    // One at a time types; others may watch.
    let start = AttachStart {
        input: true,
        ..to(spawned.id)
    };
    let (reason, _) = refusal(guest.attach(start).await.unwrap_err());
    assert_eq!(reason, Reason::InputBusy);
    // Whoever leaves hangs nothing up, and the seat is the next one's.
    drop(first);
    let mut second = loop {
        let start = AttachStart {
            input: true,
            from: from(offset),
            ..to(spawned.id)
        };
        match guest.attach(start).await {
            Ok(seat) => break seat,
            Err(status) => assert_eq!(refusal(status).0, Reason::InputBusy),
        }
    };
    second.send(resize(132, 50)).await;
    read_until(&mut second, "50 132\r\n").await;
    second.send(typed(b"two\n")).await;
    read_until(&mut second, "got two\r\n").await;
    // The end of a client's half is nobody's Ctrl-D; `stdin_close` is.
    second.send(attach_in::M::StdinClose(StdinClose {})).await;
    read_until(&mut second, "end\r\n").await;
    assert_eq!(second.finish().await.code(), 4);
    guest.end().await;
}

#[tokio::test]
async fn an_exec_at_a_terminal_can_be_left_and_found_again() {
    let guest = Guest::start();
    let script = "trap 'echo hung up; exit' HUP; echo ready; while :; do read x; echo \"got $x\"; test \"$x\" = last && exit 6; done";
    let mut start = at_a_terminal(sh(script));
    start.on_disconnect = OnDisconnect::Detach.into();
    let mut call = guest.begin(start).await.unwrap();
    let id = call.started.id;
    until(&mut call, "ready\r\n").await;
    drop(call);
    eventually("its seat is free", || {
        let rows = guest.runner.list(true, id - 1, 1);
        rows[0].kind() == ProcessKind::Detached
    })
    .await;
    let mut again = sit_down(&guest, id, 0).await;
    again
        .send(attach_in::M::Stdin(Bytes::from_static(b"last\n")))
        .await;
    let heard = again.finish().await;
    assert_eq!(heard.code(), 6);
    assert!(heard.data.ends_with(b"got last\r\n"), "{heard:?}");
    assert!(!heard.data.windows(4).any(|part| part == b"hung"));
    guest.end().await;
}

#[tokio::test]
async fn a_detached_leader_is_waited_for_and_not_what_it_left() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let deaf = dir.path().join("deaf");
    // The kernel hangs up as the leader ends: by then its child has to have left the session.
    let script = "seq 1 20000; setsid sh -c 'trap \"\" HUP; touch \"$DEAF\"; exec sleep 1000' & \
        while ! test -e \"$DEAF\"; do sleep 0.01; done; seq 1 9; exit 7";
    let mut wanted = sh(script);
    wanted.env = vec![var(b"DEAF", deaf.to_str().unwrap().as_bytes())];
    let mut request = spawned_at_a_terminal(wanted);
    request.keep_stdin = false;
    let spawned = guest.spawn(request).await.unwrap();
    let wait = AgentWaitRequest {
        process: by_id(spawned.id),
        timeout_ms: 60_000,
    };
    let exit = guest.runner.wait(wait).await.unwrap().exit.unwrap();
    assert_eq!(exit.how, Some(sandbox_protocol::v1::exit::How::Code(7)));
    let lines = (1..=20_000).chain(1..=9).map(|n: u32| format!("{n}\r\n").len());
    assert_eq!(exit.stdout_bytes, u64::try_from(lines.sum::<usize>()).unwrap());
    let rows = guest.runner.list(false, spawned.id - 1, 1);
    assert_eq!(rows[0].state(), ProcessState::Draining, "what it left goes on");
    guest.end().await;
}

#[tokio::test]
async fn a_spawn_without_input_has_nobody_at_its_terminal() {
    let guest = Guest::start();
    let mut request = spawned_at_a_terminal(sh("cat; stty size; exit 3"));
    request.keep_stdin = false;
    let spawned = guest.spawn(request).await.unwrap();
    let heard = guest.attach(to(spawned.id)).await.unwrap().finish().await;
    assert_eq!((&heard.data[..], heard.code()), (&b"24 80\r\n"[..], 3));
    guest.end().await;
}
