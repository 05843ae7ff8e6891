//! How a program starts, or why not.

use std::os::unix::fs::PermissionsExt;

use bytes::Bytes;
use sandbox_protocol::{
    limits::LINK_INPUT_STREAMS,
    reason::Reason,
    v1::{ExecIn, ExecStart},
};
use tonic_types::StatusExt as _;

use super::harness::{Guest, command, of, refusal, sh, var, with_stdin, within};
use crate::{gate::Turn, run::ClaimDefaults};

#[tokio::test]
async fn missing_program_is_typed_and_fast() {
    let guest = Guest::start();
    let (reason, status) = guest.refused(command(&[b"no-such-program"])).await;
    assert_eq!(reason, Reason::ProgramNotFound);
    let info = status.get_details_error_info().unwrap();
    assert_eq!(
        (info.metadata["errno"].as_str(), info.metadata["path"].as_str()),
        ("2", "no-such-program")
    );
    let (reason, _) = guest.refused(command(&[b"/no/such/program"])).await;
    assert_eq!(reason, Reason::ProgramNotFound);
    let (reason, _) = guest.refused(command(&[b"/etc/passwd/x"])).await;
    assert_eq!(reason, Reason::ProgramNotFound);
    guest.end().await;
}

#[tokio::test]
async fn directory_bad_shebang_and_enoexec_are_typed() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &[u8], mode: u32| {
        let path = dir.path().join(name);
        std::io::Write::write_all(&mut std::fs::File::create(&path).unwrap(), text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let folder = dir.path().to_str().unwrap().to_owned();
    for (path, expected, errno) in [
        (folder, Reason::NotExecutable, "13"),
        (
            file("shebang", b"#!/no/such/interpreter\n", 0o755),
            Reason::BadInterpreter,
            "2",
        ),
        (
            file("rubbish", b"\x01\x02\x03\x04", 0o755),
            Reason::NotExecutable,
            "8",
        ),
        (file("plain", b"#!/bin/sh\n", 0o644), Reason::NotExecutable, "13"),
    ] {
        let (reason, status) = guest.refused(command(&[path.as_bytes()])).await;
        let info = status.get_details_error_info().unwrap();
        assert_eq!(
            (reason, info.metadata["errno"].as_str()),
            (expected, errno),
            "{path}"
        );
        assert_eq!(info.metadata["path"], path);
    }
    guest.end().await;
}

#[tokio::test]
async fn shell_missing_command_is_127() {
    let guest = Guest::start();
    let ran = guest.run(sh("no-such-program")).await.unwrap();
    assert_eq!(ran.code(), 127);
    assert!(!ran.stderr.is_empty());
    guest.end().await;
}

#[tokio::test]
async fn bad_cwd_and_user_are_typed() {
    let guest = Guest::start();
    let in_cwd = |cwd: &'static str| {
        let mut wanted = command(&[b"pwd"]);
        wanted.cwd = cwd.into();
        wanted
    };
    assert_eq!(guest.refused(in_cwd("/no/such")).await.0, Reason::CwdNotFound);
    assert_eq!(
        guest.refused(in_cwd("/etc/passwd")).await.0,
        Reason::NotADirectory
    );
    assert_eq!(guest.refused(in_cwd("relative")).await.0, Reason::InvalidPath);
    let as_user = |user: &'static str, cwd: &'static str| {
        let mut wanted = sh("id -u; id -g; id -G; echo $HOME $USER; pwd");
        (wanted.user, wanted.cwd) = (user.into(), cwd.into());
        wanted
    };
    assert_eq!(
        guest.refused(as_user("no-such-user", "")).await.0,
        Reason::UserNotFound
    );
    assert_eq!(
        guest.refused(as_user("root:no-such-group", "")).await.0,
        Reason::UserNotFound
    );
    assert_eq!(
        guest.refused(as_user("nobody", "/proc/1/fd")).await.0,
        Reason::PathDenied
    );
    let ran = guest.run(as_user("4711:42", "/tmp")).await.unwrap();
    assert_eq!(ran.text(), "4711\n42\n42\n/ 4711\n/tmp\n");
    let ran = guest.run(as_user("nobody", "")).await.unwrap();
    assert!(ran.text().starts_with("65534\n65534\n65534\n/"), "{}", ran.text());
    guest.end().await;
}

#[tokio::test]
async fn env_values_are_bytes() {
    let long = vec![b'x'; 100_000];
    let values: [(&[u8], &[u8]); 7] = [
        (b"NEWLINE", b"a\nb\n"),
        (b"QUOTES", b"'\"`\\"),
        (b"SUBSHELL", b"$(id)"),
        (b"LONG", &long),
        (b"EMPTY", b""),
        (b"EQUALS", b"a=b"),
        (b"RAW", b"\xff\xfe"),
    ];
    let claim = ClaimDefaults {
        env: vec![var(b"EMPTY", b"claim"), var(b"CLAIM", b"claim")],
        user: Bytes::new(),
    };
    let guest = Guest::start_with(None, claim);
    let mut wanted = command(&[b"env", b"-0"]);
    wanted.env = values.iter().map(|(key, value)| var(key, value)).collect();
    let ran = guest.run(wanted.clone()).await.unwrap();
    let got: Vec<&[u8]> = ran.stdout.split(|byte| *byte == 0).collect();
    for (key, value) in values {
        assert!(
            got.contains(&&*[key, b"=", value].concat()),
            "{}",
            key.escape_ascii()
        );
    }
    for text in [&b"CLAIM=claim"[..], b"LANG=C.UTF-8", b"HOME=/root", b"USER=root"] {
        assert!(got.contains(&text), "{}", text.escape_ascii());
    }
    wanted.clear_env = true;
    let ran = guest.run(wanted).await.unwrap();
    assert_eq!(ran.stdout.split(|byte| *byte == 0).count(), values.len() + 1);
    guest.end().await;
}

#[tokio::test]
async fn bad_env_key_refused() {
    let guest = Guest::start();
    for key in [&b""[..], b"a=b", b"a\0b"] {
        let mut wanted = sh("true");
        wanted.env = vec![var(key, b"v")];
        assert_eq!(guest.refused(wanted).await.0, Reason::InvalidEnv);
    }
    assert_eq!(guest.runner.running(), 0);
    guest.end().await;
}

#[tokio::test]
async fn non_utf8_argv_and_output_survive() {
    let guest = Guest::start();
    let ran = guest
        .run(command(&[b"printf", b"%s|", b"\xff\xfe", b"", b"a b", b"*"]))
        .await
        .unwrap();
    assert_eq!(ran.stdout, b"\xff\xfe||a b|*|");
    guest.end().await;
}

#[tokio::test]
async fn too_large_for_the_kernel_is_typed() {
    let guest = Guest::start();
    let mut many = command(&[b"true"]);
    many.argv.resize(400_000, Bytes::from_static(b"a"));
    assert_eq!(guest.refused(many).await.0, Reason::ArgumentsTooLarge);
    guest.end().await;
}

#[tokio::test]
async fn a_program_starts_plain() {
    let guest = Guest::start();
    // Signals ignored or blocked, descriptors beyond the three, a strange umask: none of silkd's is inherited.
    let script = "grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; umask; ls /proc/self/fd | wc -l; ps -o pid=,sid=,pgid= $$";
    let ran = guest.run(sh(script)).await.unwrap();
    let lines: Vec<&str> = ran.text().lines().collect();
    assert_eq!(lines[0].split_whitespace().nth(1).unwrap(), "0000000000000000");
    assert_eq!(lines[1].split_whitespace().nth(1).unwrap(), "0000000000000000");
    assert_eq!(lines[3], "0022");
    // The three, and the folder that `ls` reads.
    assert_eq!(lines[4], "4");
    let pid = ran.started.pid.to_string();
    assert!(
        lines[5].split_whitespace().all(|number| number == pid),
        "leads session and group: {}",
        lines[5]
    );
    guest.end().await;
}

#[tokio::test]
async fn a_program_of_pid_1_has_none_of_its_protection() {
    let adjust = "/proc/self/oom_score_adj";
    let set = |value: &str| {
        let mut file = std::fs::OpenOptions::new().write(true).open(adjust).unwrap();
        std::io::Write::write_all(&mut file, value.as_bytes()).unwrap();
    };
    let before = std::fs::read_to_string(adjust).unwrap();
    set("123");
    let guest = Guest::start_as_pid1();
    let ran = guest
        .run(sh("cat /proc/self/oom_score_adj; ulimit -Sn; ulimit -Hn; nice"))
        .await
        .unwrap();
    // More than our own only where we may.
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .maximum
        .unwrap();
    let most = [524_288, own].map(|most| format!("0\n1024\n{most}\n0\n"));
    assert!(most.contains(&ran.text().to_owned()), "{}", ran.text());
    // The child's memory was ours when it put that down, but its adjustment was its own.
    assert_eq!(std::fs::read_to_string(adjust).unwrap(), "123\n");
    set(before.trim());
    guest.end().await;
}

#[tokio::test]
async fn leaves_are_used_again_unless_they_were_killed() {
    let guest = Guest::start();
    let before = guest.leaves();
    for _ in 0..40 {
        assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    }
    assert_eq!(guest.leaves(), before);
    // As many kills as there are leaves, and each leaf still bears programs that live.
    for _ in 0..before.len() + 1 {
        let ran = guest.run(sh("sleep 1000 & exit 3")).await.unwrap();
        assert_eq!((ran.code(), ran.exit.descendants_killed), (3, 1));
    }
    super::harness::eventually("as many leaves, others", || {
        guest.leaves().len() == before.len() && guest.leaves() != before
    })
    .await;
    for _ in 0..before.len() {
        assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    }
    guest.end().await;
}

#[tokio::test]
async fn what_this_version_does_not_do_is_refused() {
    let guest = Guest::start();
    let unknown = ExecStart {
        on_disconnect: 3,
        ..of(sh("true"))
    };
    let (reason, _) = refusal(guest.run_start(unknown).await.unwrap_err());
    assert_eq!(reason, Reason::InvalidCommand);
    let nothing = futures_util::stream::iter([ExecIn { m: None }]);
    let (reason, _) = refusal(
        within(Box::pin(guest.client.clone().exec(nothing)))
            .await
            .unwrap_err(),
    );
    assert_eq!(reason, Reason::InvalidCommand);
    guest.end().await;
}

#[tokio::test]
async fn streams_with_input_run_out_and_come_back() {
    let guest = Guest::start();
    let permit = guest.gate.permit().unwrap();
    let mut seats: Vec<_> = (0..LINK_INPUT_STREAMS).map(|_| permit.input().unwrap()).collect();
    let (reason, _) = refusal(guest.run_start(with_stdin(sh("cat"))).await.unwrap_err());
    assert_eq!(reason, Reason::StreamLimit);
    assert_eq!(guest.run(sh("exit 3")).await.unwrap().code(), 3);
    seats.pop();
    assert_eq!(guest.run_start(with_stdin(sh("cat"))).await.unwrap().code(), 0);
    guest.end().await;
}

#[tokio::test]
async fn nothing_starts_at_rest() {
    let guest = Guest::start();
    let call = guest.begin(of(sh("sleep 1000"))).await.unwrap();
    assert_eq!(guest.runner.open().len(), 1);
    within(guest.runner.freeze()).await.unwrap();
    assert_eq!(guest.refused(sh("true")).await.0, Reason::NotReady);
    within(guest.runner.thaw()).await.unwrap();
    assert_eq!(guest.run(sh("exit 5")).await.unwrap().code(), 5);
    assert_eq!(guest.gate.open(), 1);
    drop(call);
    super::harness::eventually("no open stream", || guest.gate.open() == 0).await;
    guest.gate.turn(Turn::Stop).unwrap();
    assert_eq!(guest.refused(sh("true")).await.0, Reason::NotReady);
    guest.end().await;
}
