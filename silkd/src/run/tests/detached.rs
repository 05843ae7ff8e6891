//! Programs that nobody waits for, and their output.

use std::time::Duration;

use bytes::Bytes;
use rustix::process::Signal;
use sandbox_protocol::{
    limits::EXITED_KEPT,
    reason::Reason,
    v1::{
        AgentForgetRequest, AgentKillReply, AgentKillRequest, AgentLogsRequest, AgentSpawnRequest,
        AgentWaitRequest, AttachStart, Command, ExecStart, Flow, OnDisconnect, ProcessKind, ProcessState,
        Signal as Wanted, Size, StdinClose, attach_in::M, exec_in, exit::How,
    },
};

use super::harness::{
    Guest, by_id, command, death, detached, eventually, from, handle, lives, of, refusal, sh, to, with_stdin,
    within,
};
use crate::run::Scope;

fn kill(id: u64, signal: Signal, scope: Scope) -> AgentKillRequest {
    AgentKillRequest {
        process: by_id(id),
        signal: signal.as_raw(),
        scope: match scope {
            Scope::Group => 1,
            Scope::Leader => 2,
            Scope::Tree => 3,
        },
    }
}

fn detach(command: Command) -> ExecStart {
    ExecStart {
        on_disconnect: OnDisconnect::Detach.into(),
        ..of(command)
    }
}

/// What `seq 1 last` prints.
fn seq(last: u32) -> Vec<u8> {
    let lines: Vec<String> = (1..=last).map(|n| format!("{n}\n")).collect();
    lines.concat().into_bytes()
}

fn row(guest: &Guest, id: u64) -> sandbox_protocol::v1::Process {
    let rows = guest.runner.list(false, id - 1, 1);
    assert_eq!(rows[0].id, id);
    rows[0].clone()
}

#[tokio::test]
async fn attach_after_client_loss() {
    let guest = Guest::start();
    let mut start = detach(sh("echo one; read x; echo two; exit 5"));
    start.stdin = true;
    start.name = "job".into();
    let mut call = guest.begin(start).await.unwrap();
    assert_eq!(call.chunk().await, "one\n");
    let id = call.started.id;
    assert_eq!(row(&guest, id).kind(), ProcessKind::Exec);
    // The client is gone; the program is not, nor is its input.
    drop(call);
    eventually("left by its client", || {
        row(&guest, id).kind() == ProcessKind::Detached
    })
    .await;
    let mut again = guest
        .attach(AttachStart {
            input: true,
            from: from(4),
            ..to(id)
        })
        .await
        .unwrap();
    assert_eq!((again.attached.log_start, again.attached.log_end), (0, 4));
    again.send(M::Stdin(Bytes::from_static(b"go\n"))).await;
    let heard = again.finish().await;
    assert_eq!((&*heard.data, heard.code()), (&b"two\n"[..], 5));
    // It is there for ten minutes.
    guest.runner.shared.pass(Duration::from_secs(9 * 60));
    let late = guest.attach(to(id)).await.unwrap().finish().await;
    assert_eq!((&*late.data, late.code()), (&b"one\ntwo\n"[..], 5));
    guest.runner.shared.pass(Duration::from_secs(61));
    let (reason, _) = refusal(guest.attach(to(id)).await.unwrap_err());
    assert_eq!(reason, Reason::ProcessNotFound);
    assert_eq!(guest.runner.log_usage().0, 0);
    guest.end().await;
}

#[tokio::test]
async fn detach_on_disconnect_keeps_output() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let mut wanted = sh("seq 1 100000; while [ ! -e \"$MARK\" ]; do sleep 0.01; done; seq 1 100000");
    let mark = dir.path().join("mark");
    wanted.env = vec![super::harness::var(b"MARK", mark.as_os_str().as_encoded_bytes())];
    let mut start = detach(wanted);
    start.log_bytes = 4 * 1024 * 1024;
    let mut call = guest.begin(start).await.unwrap();
    let mut first = Vec::new();
    while first.len() < 100_000 {
        first.extend_from_slice(&call.chunk().await);
    }
    let id = call.started.id;
    drop(call);
    std::fs::File::create(mark).unwrap();
    let start = AttachStart {
        from: from(u64::try_from(first.len()).unwrap()),
        ..to(id)
    };
    let rest = guest.attach(start).await.unwrap().finish().await;
    first.extend_from_slice(&rest.data);
    assert_eq!((rest.code(), rest.missed), (0, 0));
    assert!(first == seq(100_000).repeat(2));
    guest.end().await;
}

#[tokio::test]
async fn resume_from_offset_exact() {
    let guest = Guest::start();
    let expected = seq(60_000);
    let spawned = guest.spawn(detached(sh("seq 1 60000"))).await.unwrap();
    let mut said = Vec::new();
    // Cut wherever the numbers fall, time and again, while it runs and afterwards.
    let mut cut = 7_919_usize;
    while said.len() < expected.len() {
        let start = AttachStart {
            from: from(u64::try_from(said.len()).unwrap()),
            ..to(spawned.id)
        };
        let mut attachment = guest.attach(start).await.unwrap();
        cut = cut * 31 % 50_021 + 1;
        let heard = attachment.read(cut).await;
        assert_eq!(heard.missed, 0);
        assert!(
            heard
                .next
                .is_none_or(|next| next == u64::try_from(said.len() + heard.data.len()).unwrap())
        );
        // Not all of what came has to have been taken.
        let keep = heard.data.len() - heard.data.len() / 7;
        said.extend_from_slice(&heard.data[..keep]);
    }
    assert!(said == expected);
    let beyond = AttachStart {
        from: from(u64::try_from(expected.len() + 1).unwrap()),
        ..to(spawned.id)
    };
    let (reason, _) = refusal(guest.attach(beyond).await.unwrap_err());
    assert_eq!(reason, Reason::OffsetOutOfRange);
    guest.end().await;
}

#[tokio::test]
async fn eviction_is_a_gap() {
    let guest = Guest::start();
    let mut wanted = sh("seq 1 60000; echo last >&2");
    wanted.merge_output = true;
    let mut request = detached(wanted);
    request.log_bytes = 16 * 1024;
    let spawned = guest.spawn(request).await.unwrap();
    let exit = guest.exit_of(spawned.id).await;
    let all = seq(60_000);
    assert_eq!(exit.stdout_bytes, u64::try_from(all.len()).unwrap() + 5);
    let heard = guest.attach(to(spawned.id)).await.unwrap();
    assert_eq!(heard.attached.state(), ProcessState::Exited);
    let mut heard = heard;
    let heard = heard.finish().await;
    // From the first byte that is held; from before it, what is missing is told.
    let whole = guest
        .attach(AttachStart {
            from: from(0),
            ..to(spawned.id)
        })
        .await
        .unwrap()
        .finish()
        .await;
    assert_eq!((heard.missed, &heard.data), (0, &whole.data));
    assert!(whole.missed > 0 && whole.data.len() >= 16 * 1024 - 64);
    assert_eq!(
        whole.missed + u64::try_from(whole.data.len()).unwrap(),
        exit.stdout_bytes
    );
    let (lines, last) = whole.data.split_at(whole.data.len() - 5);
    assert!(all.ends_with(lines) && last == b"last\n");
    // The same by Logs, cut where it was asked for.
    let some = guest
        .logs(AgentLogsRequest {
            process: by_id(spawned.id),
            from: from(0),
            max_bytes: 100,
            ..AgentLogsRequest::default()
        })
        .await
        .unwrap();
    assert_eq!((some.missed, &some.data[..]), (whole.missed, &whole.data[..100]));
    assert_eq!(some.exit, None);
    guest.end().await;
}

#[tokio::test]
async fn two_readers_same_bytes() {
    let guest = Guest::start();
    // In one pipe: two have no order.
    let mut wanted = sh("read x; seq 1 40000; seq 1 9 >&2");
    wanted.merge_output = true;
    let mut request = detached(wanted);
    request.keep_stdin = true;
    let spawned = guest.spawn(request).await.unwrap();
    // One is there from the first byte on, one comes in the middle, one when all is over.
    let mut live = guest
        .attach(AttachStart {
            input: true,
            ..to(spawned.id)
        })
        .await
        .unwrap();
    live.send(M::Stdin(Bytes::from_static(b"\n"))).await;
    let mut first = live.read(1000).await;
    let mut late = guest.attach(to(spawned.id)).await.unwrap();
    let follow = AgentLogsRequest {
        process: by_id(spawned.id),
        follow: true,
        ..AgentLogsRequest::default()
    };
    let (rest, late, log) = tokio::join!(live.finish(), late.finish(), guest.logs(follow));
    first.data.extend_from_slice(&rest.data);
    let after = guest.attach(to(spawned.id)).await.unwrap().finish().await;
    let expected = [seq(40_000), seq(9)].concat();
    for data in [&first.data, &late.data, &log.unwrap().data, &after.data] {
        assert!(*data == expected);
    }
    assert_eq!(rest.exit, late.exit);
    // Both were on one list.
    assert_eq!(guest.runner.rings_built(), 1);
    guest.end().await;
}

#[tokio::test]
async fn hold_blocks_gap_does_not() {
    let guest = Guest::start();
    let bytes = 4 * 1024 * 1024_u64;
    // Neither says a word before its reader is there.
    let dir = tempfile::tempdir().unwrap();
    let go = |name: &str| dir.path().join(name);
    let waiting = |name: &str| {
        let file = go(name).display().to_string();
        let script =
            format!("until [ -e {file} ]; do sleep 0.01; done; head -c {bytes} /dev/zero; echo end >&2");
        let mut request = detached(sh(&script));
        request.log_bytes = 256 * 1024;
        request
    };
    // Whoever follows and does not read holds up nobody.
    let gap = guest.spawn(waiting("gap")).await.unwrap();
    let mut lazy = guest.attach(to(gap.id)).await.unwrap();
    std::fs::create_dir(go("gap")).unwrap();
    guest.exit_of(gap.id).await;
    let heard = lazy.finish().await;
    assert!(heard.missed > 0);
    assert_eq!(heard.missed + u64::try_from(heard.data.len()).unwrap(), bytes + 4);
    // Unless the program is to wait: then nothing is lost, and it stands still meanwhile.
    let held = guest.spawn(waiting("held")).await.unwrap();
    let mut slow = guest
        .attach(AttachStart {
            flow: Flow::Hold.into(),
            ..to(held.id)
        })
        .await
        .unwrap();
    std::fs::create_dir(go("held")).unwrap();
    let mut before = 0;
    eventually("it stands still", || {
        let end = row(&guest, held.id).log_end;
        std::mem::replace(&mut before, end) == end && end > 0
    })
    .await;
    let still = guest.runner.wait(AgentWaitRequest {
        process: by_id(held.id),
        timeout_ms: 0,
    });
    assert_eq!(still.await.unwrap_err().reason, Reason::StillRunning);
    let heard = slow.finish().await;
    assert_eq!(
        (heard.missed, u64::try_from(heard.data.len()).unwrap()),
        (0, bytes + 4)
    );
    // And who has left holds up nobody either.
    let mut request = detached(sh(&format!("head -c {bytes} /dev/zero")));
    request.log_bytes = 256 * 1024;
    let left = guest.spawn(request).await.unwrap();
    let slow = guest
        .attach(AttachStart {
            flow: Flow::Hold.into(),
            ..to(left.id)
        })
        .await
        .unwrap();
    drop(slow);
    assert_eq!(guest.exit_of(left.id).await.stdout_bytes, bytes);
    guest.end().await;
}

#[tokio::test]
async fn spawn_retry_starts_one() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let mut wanted = sh("echo $$ >>\"$FILE\"");
    let file = dir.path().join("starts");
    wanted.env = vec![super::harness::var(b"FILE", file.as_os_str().as_encoded_bytes())];
    let request = AgentSpawnRequest {
        request_key: "once".into(),
        ..detached(wanted)
    };
    // At once, one after the other, and when it has exited.
    let both = tokio::join!(guest.spawn(request.clone()), guest.spawn(request.clone()));
    let (one, two) = (both.0.unwrap(), both.1.unwrap());
    guest.exit_of(one.id).await;
    eventually("exited", || row(&guest, one.id).state() == ProcessState::Exited).await;
    let three = guest.spawn(request.clone()).await.unwrap();
    assert_eq!((&one, &one), (&two, &three));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{}\n", one.pid));
    // No longer kept, it is a new request.
    guest
        .runner
        .forget(&AgentForgetRequest {
            process: by_id(one.id),
        })
        .unwrap();
    assert!(guest.spawn(request).await.unwrap().id > one.id);
    // One that failed to start leaves the key to the next.
    let missing = AgentSpawnRequest {
        request_key: "other".into(),
        name: "named".into(),
        ..detached(command(&[b"no-such-program"]))
    };
    let both = tokio::join!(guest.spawn(missing.clone()), guest.spawn(missing.clone()));
    for failed in [both.0, both.1] {
        assert_eq!(refusal(failed.unwrap_err()).0, Reason::ProgramNotFound);
    }
    let found = AgentSpawnRequest {
        command: Some(sh("exit 4")),
        ..missing
    };
    let found = guest.spawn(found).await.unwrap();
    assert_eq!(guest.exit_of(found.id).await.how, Some(How::Code(4)));
    guest.end().await;
}

#[tokio::test]
async fn a_name_belongs_to_one_that_runs_or_is_kept() {
    let guest = Guest::start();
    let named = |script: &str| AgentSpawnRequest {
        name: "web".into(),
        ..detached(sh(script))
    };
    let first = guest.spawn(named("exec sleep 1000")).await.unwrap();
    let (reason, status) = refusal(guest.spawn(named("true")).await.unwrap_err());
    assert_eq!(reason, Reason::NameTaken);
    assert!(
        status.message().contains(&format!("process {} ", first.id)),
        "{status}"
    );
    let by_name = || {
        Some(sandbox_protocol::v1::ProcessRef {
            which: Some(sandbox_protocol::v1::process_ref::Which::Name("web".into())),
        })
    };
    let forget = AgentForgetRequest { process: by_name() };
    assert_eq!(
        guest.runner.forget(&forget).unwrap_err().reason,
        Reason::StillRunning
    );
    let end = AgentKillRequest {
        process: by_name(),
        ..AgentKillRequest::default()
    };
    guest.runner.kill(&end).unwrap();
    assert_eq!(guest.exit_of(first.id).await.how, Some(How::Signal(9)));
    eventually("exited", || row(&guest, first.id).state() == ProcessState::Exited).await;
    let kept = row(&guest, first.id);
    assert_eq!(
        (kept.name, kept.kind, kept.pid),
        ("web".into(), ProcessKind::Detached.into(), first.pid)
    );
    guest.runner.forget(&forget).unwrap();
    assert_eq!(
        guest.runner.forget(&forget).unwrap_err().reason,
        Reason::ProcessNotFound
    );
    guest.spawn(named("true")).await.unwrap();
    guest.end().await;
}

#[tokio::test]
async fn kill_twice_is_ok() {
    let guest = Guest::start();
    let spawned = guest.spawn(detached(sh("exec sleep 1000"))).await.unwrap();
    let reply = |already_exited, signalled| AgentKillReply {
        already_exited,
        signalled,
    };
    let end = AgentKillRequest {
        process: by_id(spawned.id),
        ..AgentKillRequest::default()
    };
    assert_eq!(guest.runner.kill(&end).unwrap(), reply(false, true));
    assert_eq!(guest.exit_of(spawned.id).await.how, Some(How::Signal(9)));
    assert_eq!(guest.runner.kill(&end).unwrap(), reply(true, false));
    let refused = |request: AgentKillRequest| guest.runner.kill(&request).unwrap_err().reason;
    let mut wrong = end.clone();
    wrong.signal = 65;
    assert_eq!(refused(wrong), Reason::InvalidSignal);
    assert_eq!(
        refused(AgentKillRequest {
            process: by_id(99),
            ..end
        }),
        Reason::ProcessNotFound
    );
    guest.end().await;
}

/// A leader that has left something behind.
#[tokio::test]
async fn kill_reaches_what_outlived_its_leader() {
    let guest = Guest::start();
    let script = "(trap 'echo asked; exit' TERM; echo ready; while :; do sleep 0.01; done) & setsid sleep 1000 & exit 6";
    let spawned = guest.spawn(detached(sh(script))).await.unwrap();
    assert_eq!(guest.exit_of(spawned.id).await.how, Some(How::Code(6)));
    let mut live = guest.attach(to(spawned.id)).await.unwrap();
    assert_eq!(live.read(6).await.data, b"ready\n");
    assert_eq!(live.attached.state(), ProcessState::Draining);
    let draining = row(&guest, spawned.id);
    assert_eq!(
        (draining.state(), draining.exit.unwrap().how),
        (ProcessState::Draining, Some(How::Code(6)))
    );
    // Its own number may be somebody else's by now: only the tree can still be reached.
    for scope in [Scope::Leader, Scope::Group] {
        let sent = guest.runner.kill(&kill(spawned.id, Signal::KILL, scope)).unwrap();
        assert_eq!((sent.already_exited, sent.signalled), (true, false));
    }
    let sent = guest
        .runner
        .kill(&kill(spawned.id, Signal::TERM, Scope::Tree))
        .unwrap();
    assert_eq!((sent.already_exited, sent.signalled), (true, true));
    let heard = live.finish().await;
    // The shell says on stderr what became of the other.
    assert!(heard.data.ends_with(b"asked\n") && heard.code() == 6, "{heard:?}");
    assert_eq!(heard.exit.unwrap().stdout_bytes, 12);
    assert_eq!(row(&guest, spawned.id).state(), ProcessState::Exited);
    guest.end().await;
}

#[tokio::test]
async fn input_is_one_at_a_time() {
    let guest = Guest::start();
    let mut request = detached(sh("trap 'echo usr' USR1; read x; echo got $x; cat; exit 2"));
    request.keep_stdin = true;
    let id = guest.spawn(request).await.unwrap().id;
    let with_input = || AttachStart {
        input: true,
        ..to(id)
    };
    let first = guest.attach(with_input()).await.unwrap();
    let (reason, _) = refusal(guest.attach(with_input()).await.unwrap_err());
    assert_eq!(reason, Reason::InputBusy);
    // Any number may read.
    let mut reader = guest.attach(to(id)).await.unwrap();
    first.send(M::Stdin(Bytes::from_static(b"one\n"))).await;
    assert_eq!(reader.read(8).await.data, b"got one\n");
    drop(first);
    // The program's input stays open for the next.
    let mut second = loop {
        match guest.attach(with_input()).await {
            Ok(attachment) => break attachment,
            Err(status) => assert_eq!(refusal(status).0, Reason::InputBusy),
        }
    };
    second.send(M::Signal(Wanted { number: 10, scope: 2 })).await;
    second.send(M::Stdin(Bytes::from_static(b"two"))).await;
    second.send(M::StdinClose(StdinClose {})).await;
    let heard = second.finish().await;
    let said = String::from_utf8(heard.data.clone()).unwrap();
    assert!(said.contains("two") && said.contains("usr\n"), "{said}");
    assert_eq!(heard.code(), 2);
    guest.end().await;
}

#[tokio::test]
async fn a_wrong_message_ends_the_attach_and_not_the_program() {
    let guest = Guest::start();
    let id = guest.spawn(detached(sh("exec sleep 1000"))).await.unwrap().id;
    for (message, expected) in [
        (M::Resize(Size { cols: 80, rows: 24 }), Reason::NotATty),
        (M::Signal(Wanted { number: 65, scope: 0 }), Reason::InvalidSignal),
        (M::Start(to(id)), Reason::InvalidCommand),
    ] {
        let start = AttachStart {
            input: true,
            ..to(id)
        };
        let mut attachment = guest.attach(start).await.unwrap();
        attachment.send(message).await;
        assert_eq!(refusal(attachment.next().await.unwrap_err()).0, expected);
    }
    assert_eq!(row(&guest, id).state(), ProcessState::Running);
    guest.end().await;
}

#[tokio::test]
async fn what_has_no_log_cannot_be_read() {
    let guest = Guest::start();
    let call = guest.begin(with_stdin(sh("read x"))).await.unwrap();
    let (reason, status) = refusal(guest.attach(to(call.started.id)).await.unwrap_err());
    assert_eq!(reason, Reason::ProcessNotFound);
    assert!(status.message().contains("has no log"), "{status}");
    let neither = AttachStart::default();
    assert_eq!(
        refusal(guest.attach(neither).await.unwrap_err()).0,
        Reason::FieldInvalid
    );
    drop(call);
    guest.end().await;
}

#[tokio::test]
async fn no_wakeup_list_without_reader() {
    let guest = Guest::start();
    for _ in 0..20 {
        let exit = guest.run(sh("echo x")).await.unwrap();
        assert_eq!(exit.code(), 0);
        let spawned = guest.spawn(detached(sh("echo y"))).await.unwrap();
        guest.exit_of(spawned.id).await;
        // Who looks and does not follow needs none.
        let request = AgentLogsRequest {
            process: by_id(spawned.id),
            ..AgentLogsRequest::default()
        };
        assert_eq!(guest.logs(request).await.unwrap().data, b"y\n");
    }
    assert_eq!(guest.runner.rings_built(), 0);
    let spawned = guest.spawn(detached(sh("exec sleep 1000"))).await.unwrap();
    let first = guest.attach(to(spawned.id)).await.unwrap();
    assert_eq!(guest.runner.rings_built(), 1);
    let second = guest.attach(to(spawned.id)).await.unwrap();
    assert_eq!(
        (guest.runner.rings_built(), row(&guest, spawned.id).readers),
        (1, 2)
    );
    drop((first, second));
    eventually("readers are gone", || row(&guest, spawned.id).readers == 0).await;
    guest.end().await;
}

#[tokio::test]
async fn budget_holds_under_chatter() {
    let guest = Guest::start_with_logs(2 * 1024 * 1024);
    let mut ids = Vec::new();
    for n in 0..100 {
        let script = format!("yes {n} | head -c 300000; exec sleep 1000");
        ids.push(guest.spawn(detached(sh(&script))).await.unwrap().id);
    }
    // All is said when the last one sleeps.
    for id in &ids {
        eventually("it said all", || row(&guest, *id).log_end == 300_000).await;
        let (used, budget) = guest.runner.log_usage();
        assert!(used <= budget + 100 * 256, "{used} of {budget}");
    }
    let (used, budget) = guest.runner.log_usage();
    assert_eq!(budget, 2 * 1024 * 1024);
    assert!(used > budget - 100 * 4096, "{used} of {budget}");
    // Nobody has lost more than others had to keep.
    for id in &ids {
        let row = row(&guest, *id);
        assert!(row.log_end - row.log_start >= 8 * 1024, "{row:?}");
    }
    // The dead give first.
    let end = kill(ids[0], Signal::KILL, Scope::Tree);
    guest.runner.kill(&end).unwrap();
    eventually("exited", || row(&guest, ids[0]).state() == ProcessState::Exited).await;
    let kept: Vec<u64> = ids[1..].iter().map(|id| row(&guest, *id).log_start).collect();
    let one = guest.spawn(detached(sh("head -c 9000 /dev/zero"))).await.unwrap();
    guest.exit_of(one.id).await;
    assert_eq!(row(&guest, one.id).log_start, 0);
    assert_eq!(
        kept,
        ids[1..]
            .iter()
            .map(|id| row(&guest, *id).log_start)
            .collect::<Vec<_>>()
    );
    assert!(row(&guest, ids[0]).log_start > 0);
    guest.end().await;
}

#[tokio::test]
async fn exited_ones_are_kept_up_to_a_number() {
    let guest = Guest::start();
    let shared = &guest.runner.shared;
    let first = guest.spawn(detached(sh("echo first"))).await.unwrap();
    guest.exit_of(first.id).await;
    eventually("exited", || row(&guest, first.id).state() == ProcessState::Exited).await;
    super::memory::fill(shared, EXITED_KEPT - 1);
    assert_eq!(row(&guest, first.id).id, first.id);
    super::memory::fill(shared, 1);
    assert_eq!(guest.runner.list(false, 0, 9999).len(), EXITED_KEPT);
    let gone = guest.attach(to(first.id)).await.unwrap_err();
    assert_eq!(refusal(gone).0, Reason::ProcessNotFound);
    guest.runner.forget_exited();
    assert!(guest.runner.list(false, 0, 9999).is_empty());
    guest.end().await;
}

#[tokio::test]
async fn a_template_forgets_and_keeps_what_runs() {
    let guest = Guest::start();
    let server = guest
        .spawn(detached(sh("echo said; exec sleep 1000")))
        .await
        .unwrap();
    eventually("it said all", || row(&guest, server.id).log_end == 5).await;
    let exited = guest.spawn(detached(sh("echo x"))).await.unwrap();
    guest.exit_of(exited.id).await;
    eventually("exited", || {
        row(&guest, exited.id).state() == ProcessState::Exited
    })
    .await;
    // Nothing that a call waits for.
    assert!(guest.runner.open().is_empty());
    guest.runner.forget_exited();
    let rows = guest.runner.list(false, 0, 9);
    assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), [server.id]);
    assert_eq!(
        (rows[0].log_start, rows[0].log_end, guest.runner.log_usage().0),
        (5, 5, 0)
    );
    guest.end().await;
}

#[tokio::test]
async fn a_foreground_program_outlives_sleep() {
    let guest = Guest::start();
    let mut call = guest
        .begin(with_stdin(sh("echo before; read x; echo $x; exit 3")))
        .await
        .unwrap();
    assert_eq!(call.chunk().await, "before\n");
    let id = call.started.id;
    let run = guest.run(sh("sleep 1000"));
    let mut run = Box::pin(run);
    let started = async {
        eventually("the other runs", || guest.runner.open().len() == 2).await;
    };
    tokio::select! {
        ran = &mut run => panic!("{ran:?}"),
        () = started => {}
    }
    guest.gate.end_streams();
    let status = call.finish().await.unwrap_err();
    assert_eq!(refusal(status).0, Reason::SandboxHibernating);
    assert_eq!(refusal(run.await.unwrap_err()).0, Reason::SandboxHibernating);
    within(guest.gate.idle()).await;
    // Nothing is waited for any more, and what was not read yet comes to a log.
    assert!(guest.runner.open().is_empty());
    let mut again = guest
        .attach(AttachStart {
            input: true,
            ..to(id)
        })
        .await
        .unwrap();
    assert_eq!((again.attached.log_start, again.attached.log_end), (7, 7));
    again.send(M::Stdin(Bytes::from_static(b"after\n"))).await;
    let heard = again.finish().await;
    assert_eq!((&*heard.data, heard.code()), (&b"after\n"[..], 3));
    guest.end().await;
}

#[tokio::test]
async fn a_client_that_is_gone_before_the_start_leaves_nothing() {
    let guest = Guest::start();
    let mut answered = Vec::new();
    let mut given_up = 0;
    while given_up < 50 {
        let spawn = guest.runner.spawn(guest.ctx(), detached(sh("exec sleep 1000")));
        // Ordered, and not awaited; yet the spawn thread can be quicker than the look at its answer.
        match futures_util::FutureExt::now_or_never(Box::pin(spawn)) {
            None => given_up += 1,
            Some(reply) => answered.push(reply.unwrap().id),
        }
    }
    eventually("nothing is left", || {
        let rows = guest.runner.list(false, 0, usize::MAX);
        rows.iter().map(|row| row.id).eq(answered.iter().copied())
    })
    .await;
    for id in answered {
        guest.runner.kill(&kill(id, Signal::KILL, Scope::Tree)).unwrap();
    }
    eventually("nothing runs", || guest.runner.running() == 0).await;
    guest.end().await;
}

#[tokio::test]
async fn a_detached_program_has_its_time() {
    let guest = Guest::start();
    let mut wanted = sh("setsid sleep 1000 & sleep 1000");
    wanted.timeout_ms = 100;
    let spawned = guest.spawn(detached(wanted)).await.unwrap();
    let exit = guest.exit_of(spawned.id).await;
    assert!(exit.timed_out);
    assert_eq!(exit.how, Some(How::Signal(9)));
    eventually("exited", || {
        row(&guest, spawned.id).state() == ProcessState::Exited
    })
    .await;
    guest.end().await;
}

#[tokio::test]
async fn a_disconnect_without_detach_ends_it() {
    let guest = Guest::start();
    let call = guest.begin(of(sh("exec sleep 1000"))).await.unwrap();
    let leader = handle(i32::try_from(call.started.pid).unwrap());
    assert!(lives(&leader));
    drop(call);
    death(leader).await;
    eventually("its entry goes with it", || {
        guest.runner.list(false, 0, 9).is_empty()
    })
    .await;
    // Asked to stay, its input can be used up before its client goes.
    let mut start = detach(command(&[b"cat"]));
    start.stdin = true;
    let call = guest.begin(start).await.unwrap();
    call.send(exec_in::M::Stdin(Bytes::from_static(b"x"))).await;
    call.send(exec_in::M::StdinClose(StdinClose {})).await;
    let ran = call.finish().await.unwrap();
    assert_eq!((ran.code(), ran.text()), (0, "x"));
    // It was there to be attached to all along, and still is.
    assert_eq!(
        guest
            .attach(to(ran.started.id))
            .await
            .unwrap()
            .finish()
            .await
            .data,
        b"x"
    );
    guest.end().await;
}
