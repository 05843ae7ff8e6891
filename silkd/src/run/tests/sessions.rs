//! Sessions as a client sees them, with the bash of this machine.

use std::time::Duration;

use bytes::Bytes;
use sandbox_protocol::{
    limits::{SESSION_COMMAND, SESSIONS},
    reason::Reason,
    v1::{AgentSessionOpenRequest, session_exit::How},
};

use super::{
    harness::{Guest, death, eventually, handle, lives, of, refusal, sh, var},
    shells::{named, with_a_session},
};
use crate::run::ClaimDefaults;

#[tokio::test]
async fn state_persists() {
    let guest = with_a_session().await;
    let first = guest
        .told(
            "s",
            "cd /usr; x=5; f() { echo \"f of $1\"; }; alias ll='echo an alias'; declare -A m=([a]=1 [b]=2); \
             exec 7>/dev/null; set -o pipefail; sleep 1000 & j=$!; (exit 3)",
        )
        .await;
    assert_eq!(
        (first.number, first.code(), &first.exit.cwd[..]),
        (1, 3, &b"/usr"[..])
    );
    let second = guest
        .told(
            "s",
            "echo $?; pwd; echo $x; f me; ll; echo ${m[b]}; echo still >&7 && echo open; false | true; echo $?; \
             kill -0 $j && jobs %1 | grep -c Running",
        )
        .await;
    assert_eq!(second.out(), "3\n/usr\n5\nf of me\nan alias\n2\nopen\n1\n1\n");
    assert_eq!((second.number, second.err()), (2, ""));
    guest.end().await;
}

#[tokio::test]
async fn stderr_is_separate() {
    let guest = with_a_session().await;
    let said = guest
        .told(
            "s",
            "echo out; echo err >&2; ls /nowhere; exec 2>&1; echo merged >&2",
        )
        .await;
    assert_eq!(said.out(), "out\nmerged\n");
    assert!(
        said.err().starts_with("err\n") && said.err().contains("/nowhere"),
        "{}",
        said.err()
    );
    // Redirections by exec stay.
    let said = guest.told("s", "echo still >&2").await;
    assert_eq!((said.out(), said.err()), ("still\n", ""));
    guest.end().await;
}

#[tokio::test]
async fn cat_cannot_eat_the_end() {
    let guest = with_a_session().await;
    for text in [
        "cat",
        "cat -",
        "read x; echo \"[$x] $?\"",
        "bash",
        "head -c 9 /proc/self/fd/0; sh",
    ] {
        let said = guest.told("s", text).await;
        assert!(
            said.out().is_empty() || said.out() == "[] 1\n",
            "{text}: {said:?}"
        );
        assert!(!said.exit.session_ended);
    }
    assert_eq!(guest.told("s", "echo next").await.out(), "next\n");
    guest.end().await;
}

#[tokio::test]
async fn forged_report_fails() {
    let guest = with_a_session().await;
    // A program has none of the descriptors.
    let forge = "perl -e 'for my $n (10..13, 250, 251, 255) { my $f; \
        open($f, qq(>&=$n)) && syswrite($f, (qq(0) x 32) . qq(\\0000\\0hB\\0/\\0)) or print qq($n\\n) }'";
    let said = guest.told("s", forge).await;
    let refused: Vec<&str> = said.out().lines().collect();
    assert_eq!(refused, ["10", "11", "12", "13", "250", "251", "255"]);
    // Not even a part of the shell that forges by number ends a command, or makes the next one wrong.
    let forge = "( for n in 10 11 12 13; do printf '%s\\0' 00000000000000000000000000000000 0 hB / >&$n; done ) \
        >/dev/null 2>&1; echo done; (exit 4)";
    let said = guest.told("s", forge).await;
    assert_eq!((said.out(), said.code()), ("done\n", 4));
    let said = guest
        .told("s", "ls /proc/$$/fd >/dev/null; bash -c 'ls /proc/$$/fd'")
        .await;
    assert!(
        !said.out().lines().any(|fd| fd.parse::<i32>().unwrap() >= 4),
        "{}",
        said.out()
    );
    assert_eq!(guest.told("s", "echo $?").await.out(), "0\n");
    guest.end().await;
}

#[tokio::test]
async fn break_return_and_bad_syntax_survive() {
    let guest = with_a_session().await;
    let texts: [&[u8]; 18] = [
        b"break",
        b"continue 3",
        b"return 5",
        b"while :; do break; done",
        b"if then",
        b"echo 'open",
        b"echo \"open",
        b"echo `open",
        b"echo $(open",
        b"cat <<END\nno end",
        b"cat <<'END'",
        b"f() {",
        b"case x in",
        b"echo ${}",
        b"echo $((1/0))",
        b"}",
        b"\\",
        b"echo \xff\xfe \\",
    ];
    for text in texts {
        let said = guest.told("s", text).await;
        assert!(!said.exit.session_ended, "{}: {said:?}", text.escape_ascii());
        let next = guest.told("s", "echo next").await;
        assert_eq!(
            (next.out(), next.err()),
            ("next\n", ""),
            "after {}",
            text.escape_ascii()
        );
    }
    // What is at the top of a shell is at the top.
    let said = guest
        .told("s", "declare top=1; local no; return 7; echo on")
        .await;
    assert_eq!((said.out(), said.code()), ("on\n", 0));
    assert_eq!(guest.told("s", "echo $top").await.out(), "1\n");
    guest.end().await;
}

#[tokio::test]
async fn a_command_is_bytes_of_any_length() {
    let guest = with_a_session().await;
    assert_eq!(guest.told("s", "").await.code(), 0);
    assert_eq!(guest.told("s", "\n\n# nothing\n").await.code(), 0);
    let said = guest.told("s", &b"printf '%s' '\xff\xfe\r\n\x01'"[..]).await;
    assert_eq!(said.stdout, b"\xff\xfe\r\n\x01");
    let text = format!("x='{}'; echo ${{#x}}", "\u{e9}".repeat(450_000));
    let said = guest.told("s", text).await;
    assert!(matches!(said.out(), "450000\n" | "900000\n"), "{}", said.out());
    assert_eq!(
        guest.not_told("s", vec![b':'; SESSION_COMMAND + 1]).await,
        Reason::InvalidCommand
    );
    assert_eq!(guest.not_told("s", &b"echo \0"[..]).await, Reason::InvalidCommand);
    let mut full = vec![b' '; SESSION_COMMAND];
    full[..7].copy_from_slice(b"echo on");
    assert_eq!(guest.told("s", full).await.out(), "on\n");
    guest.end().await;
}

#[tokio::test]
async fn set_x_shows_no_plumbing() {
    let guest = with_a_session().await;
    let said = guest.told("s", "set -x; echo one").await;
    assert_eq!((said.out(), said.err()), ("one\n", "++ echo one\n"));
    let said = guest.told("s", "echo two; (exit 6)").await;
    assert_eq!((said.out(), said.err()), ("two\n", "++ echo two\n++ exit 6\n"));
    let said = guest.told("s", "echo $?; set +x").await;
    assert_eq!((said.out(), said.err()), ("6\n", "++ echo 6\n++ set +x\n"));
    let said = guest.told("s", "echo three").await;
    assert_eq!((said.out(), said.err()), ("three\n", ""));
    guest.end().await;
}

#[tokio::test]
async fn set_e_and_odd_options_meet_no_plumbing() {
    let guest = with_a_session().await;
    guest
        .told(
            "s",
            "set -eua -o posix -o pipefail; set -f; IFS=; LC_ALL=C.UTF-8; trap 'echo trapped' ERR",
        )
        .await;
    let said = guest.told("s", "! false; false || echo on; (exit 0)").await;
    assert_eq!((said.out(), said.err()), ("on\n", ""));
    guest.told("s", "set +e").await;
    let said = guest.told("s", "(exit 9)").await;
    assert_eq!((said.out(), said.code()), ("trapped\ntrapped\n", 9));
    // A status that is not zero ends no shell that has just been told to mind it.
    let said = guest
        .told("s", "echo $?; trap - ERR; set -e; env | grep -c silkd || :")
        .await;
    assert_eq!((said.out(), said.code()), ("9\n0\n", 0));
    // Functions of the user's with names of builtins are his.
    let said = guest.told("s", "set +e +o posix; read() { echo mine; }; printf() { echo mine; }; unset() { :; }; set() { :; }; return() { :; }").await;
    assert_eq!(said.code(), 0);
    let said = guest
        .told("s", "read; declare -F | grep -c silkd; declare -p __silkd")
        .await;
    assert_eq!(said.out(), "mine\n0\n");
    guest.end().await;
}

#[tokio::test]
async fn timeout_keeps_the_shell() {
    let guest = with_a_session().await;
    let said = guest
        .told(
            "s",
            "kept=yes; (while :; do sleep 1000; done) & echo $!; setsid sleep 1000 & echo $!",
        )
        .await;
    let older: Vec<_> = said
        .out()
        .lines()
        .map(|line| handle(line.parse().unwrap()))
        .collect();
    let mut running = guest
        .order("s", "setsid sh -c 'echo $$; sleep 1000' & sleep 1000", 1500)
        .await
        .unwrap();
    let started = handle(running.line().await);
    let said = running.finish().await.unwrap();
    assert!(said.exit.timed_out && !said.exit.cancelled);
    assert_eq!(said.code(), 137);
    death(started).await;
    assert!(older.iter().all(lives), "older jobs are none of its business");
    let said = guest.told("s", "echo $kept; jobs -r | grep -c sleep").await;
    assert_eq!(said.out(), "yes\n2\n");
    guest.end().await;
}

#[tokio::test]
async fn a_caller_who_leaves_cancels_and_the_session_stays() {
    let guest = with_a_session().await;
    let mut running = guest
        .order("s", "kept=yes; echo $BASHPID; sleep 1000; echo after", 0)
        .await
        .unwrap();
    running.until(&["\n"]).await;
    drop(running);
    eventually("the session is free", || !guest.runner.session_list()[0].busy).await;
    assert_eq!(guest.told("s", "echo $kept").await.out(), "yes\n");
    // Nor does one who reads nothing hold it, once it is gone.
    let running = guest.order("s", "yes", 0).await.unwrap();
    eventually("its program blocks", || {
        let row = &guest.runner.session_list()[0];
        row.busy
    })
    .await;
    drop(running);
    eventually("the session is free", || !guest.runner.session_list()[0].busy).await;
    assert_eq!(guest.told("s", "echo $kept").await.out(), "yes\n");
    guest.end().await;
}

#[tokio::test]
async fn stuck_builtin_loop_ends_session() {
    let guest = with_a_session().await;
    let row = guest.runner.session_list().remove(0);
    let shell = handle(row.pid.try_into().unwrap());
    let running = guest.order("s", "while :; do :; done", 50).await.unwrap();
    let said = running.finish().await.unwrap();
    assert!(said.exit.session_ended && said.exit.timed_out, "{said:?}");
    assert_eq!(said.exit.how, Some(How::Signal(9)));
    death(shell).await;
    assert_eq!(guest.not_told("s", "echo").await, Reason::SessionEnded);
    assert_eq!(guest.runner.sessions(), 0);
    guest.open(named("s")).await.unwrap();
    assert_eq!(guest.told("s", "echo anew").await.out(), "anew\n");
    guest.end().await;
}

#[tokio::test]
async fn exit_exec_and_crash_are_reported() {
    let guest = Guest::start();
    let code = |code| Some(How::Code(code));
    let cases = [
        ("cd /usr; echo last; exit 7", code(7)),
        ("cd /usr; echo last; exec sh -c 'exit 8'", code(8)),
        ("cd /usr; echo last; kill -SEGV $$", Some(How::Signal(11))),
        ("cd /usr; echo last; set -e; (exit 3)", code(3)),
        ("cd /usr; echo last; set -u; echo $missing", code(1)),
        // The session's own plumbing, torn out.
        ("echo last; exec 10>&- 11>&- 12>&-", code(1)),
    ];
    for (text, how) in cases {
        guest.open(named("s")).await.unwrap();
        let said = guest.told("s", text).await;
        assert!(said.exit.session_ended, "{text}: {said:?}");
        assert_eq!((said.out(), said.exit.how), ("last\n", how), "{text}");
        assert_eq!(guest.not_told("s", "echo").await, Reason::SessionEnded, "{text}");
    }
    assert_eq!(guest.not_told("nobody", "echo").await, Reason::SessionNotFound);
    // A shell that ends while nothing runs ends its session too.
    guest.open(named("s")).await.unwrap();
    let pid = guest.runner.session_list()[0].pid;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    eventually("it is struck out", || guest.runner.sessions() == 0).await;
    assert_eq!(guest.not_told("s", "echo").await, Reason::SessionEnded);
    guest.end().await;
}

#[tokio::test]
async fn busy_and_duplicate_refused() {
    let guest = with_a_session().await;
    let (reason, _) = refusal(guest.open(named("s")).await.unwrap_err());
    assert_eq!(reason, Reason::SessionExists);
    let mut running = guest
        .order("s", "sh -c 'echo on; exec sleep 1000'", 0)
        .await
        .unwrap();
    running.until(&["on\n"]).await;
    let busy = guest.order("s", "echo no", 0).await.err().unwrap();
    assert!(tonic_types::StatusExt::get_details_retry_info(&busy).is_some());
    assert_eq!(refusal(busy).0, Reason::SessionBusy);
    let row = guest.runner.session_list().remove(0);
    assert!(row.busy && row.idle_ms == 0);
    assert_eq!((row.commands, row.idle_secs), (1, 1800));
    running.signal(15).await;
    assert_eq!(running.finish().await.unwrap().code(), 143);
    assert!(!guest.runner.session_list()[0].busy);
    // It harmed nobody.
    assert_eq!(guest.told("s", "echo yes").await.out(), "yes\n");
    guest.end().await;
}

#[tokio::test]
async fn a_signal_reaches_what_the_command_started_and_not_the_shell() {
    let guest = with_a_session().await;
    let script = "sh -c 'trap \"echo heard; exit\" USR1; echo one; while :; do sleep 0.01; done' & \
        sh -c 'trap \"exit 5\" USR1; echo two; while :; do sleep 0.01; done'; echo was $?; wait";
    let mut running = guest.order("s", script, 0).await.unwrap();
    running.until(&["one\n", "two\n"]).await;
    running.signal(10).await;
    running.until(&["heard\n", "was 5\n"]).await;
    let said = running.finish().await.unwrap();
    assert_eq!(said.code(), 0);
    let running = guest.order("s", "sleep 1000", 0).await.unwrap();
    running.signal(65).await;
    let (reason, _) = refusal(running.finish().await.unwrap_err());
    assert_eq!(reason, Reason::InvalidSignal);
    eventually("a bad message cancels", || !guest.runner.session_list()[0].busy).await;
    assert_eq!(guest.told("s", "echo yes").await.out(), "yes\n");
    guest.end().await;
}

#[tokio::test]
async fn background_output_is_late_not_lost() {
    let guest = with_a_session().await;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (go, done) = (path("go"), path("done"));
    let text = format!(
        "mkfifo {go}; (read x <{go}; echo out; echo err >&2; read x <{go}; seq 1 100000; echo end; touch {done}) & echo begun"
    );
    let said = guest.told("s", text).await;
    assert_eq!((said.out(), said.late.len()), ("begun\n", 0));
    std::fs::File::options().write(true).open(&go).unwrap();
    // The job runs while nobody asks; whether it has said all by now is its own affair.
    let mut late = Vec::new();
    while !(late.windows(4).any(|part| part == b"out\n") && late.windows(4).any(|part| part == b"err\n")) {
        let said = guest.told("s", ":").await;
        assert_eq!(said.code(), 0);
        late.extend([said.late, said.stdout, said.stderr].concat());
    }
    // It does not block though nobody reads, and the last of it is kept.
    std::fs::File::options().write(true).open(&go).unwrap();
    eventually("the job is through", || std::path::Path::new(&done).exists()).await;
    let said = guest.told("s", "wait; echo after").await;
    assert_eq!(said.out(), "after\n");
    assert!(
        said.late.len() <= 64 * 1024 && said.late.ends_with(b"\n100000\nend\n"),
        "{}",
        said.late.len()
    );
    assert!(said.late.len() > 60 * 1024);
    guest.end().await;
}

/// Lets this much time pass; nothing else makes it pass meanwhile.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

#[tokio::test]
async fn idle_counts_from_last_end() {
    let guest = Guest::start();
    let idle = |name: &str, secs| AgentSessionOpenRequest {
        idle_secs: Some(secs),
        ..named(name)
    };
    guest.open(idle("s", 600)).await.unwrap();
    guest.open(idle("kept", 0)).await.unwrap();
    let names = || -> Vec<String> {
        let rows = guest.runner.session_list().into_iter();
        rows.map(|row| row.session).collect()
    };
    // A busy one is never idle, and its time begins anew with its end.
    let mut running = guest
        .order("s", "sh -c 'echo on; exec sleep 1000'", 0)
        .await
        .unwrap();
    running.until(&["on\n"]).await;
    pass(Duration::from_secs(700)).await;
    assert_eq!(guest.told("kept", "echo yes").await.out(), "yes\n");
    assert_eq!(names(), ["kept", "s"]);
    running.signal(9).await;
    assert_eq!(running.finish().await.unwrap().code(), 137);
    pass(Duration::from_secs(550)).await;
    assert_eq!(guest.told("s", "echo yes").await.out(), "yes\n");
    pass(Duration::from_secs(550)).await;
    assert_eq!(guest.told("kept", "echo yes").await.out(), "yes\n");
    assert_eq!(names(), ["kept", "s"]);
    let shell = handle(guest.runner.session_list()[1].pid.try_into().unwrap());
    pass(Duration::from_secs(100)).await;
    death(shell).await;
    eventually("it is struck out", || names() == ["kept"]).await;
    assert_eq!(guest.not_told("s", "echo").await, Reason::SessionEnded);
    guest.end().await;
}

#[tokio::test]
async fn one_request_opens_one_session() {
    let guest = Guest::start();
    let request = || AgentSessionOpenRequest {
        request_key: "once".into(),
        ..AgentSessionOpenRequest::default()
    };
    // At the same time, and later.
    let (first, second) = tokio::join!(guest.open(request()), guest.open(request()));
    let first = first.unwrap();
    assert_eq!(first, second.unwrap());
    assert_eq!(guest.open(request()).await.unwrap(), first);
    assert_eq!(guest.runner.sessions(), 1);
    guest.close(&first.session).await.unwrap();
    let again = guest.open(request()).await.unwrap();
    assert_ne!(again.process, first.process);
    for bad in [named("a b"), named(&"x".repeat(65)), named("a/b")] {
        assert_eq!(
            refusal(guest.open(bad).await.unwrap_err()).0,
            Reason::FieldInvalid
        );
    }
    guest.end().await;
}

#[tokio::test]
async fn close_ends_all_that_runs_in_it() {
    let guest = with_a_session().await;
    let script = "setsid sh -c 'trap \"\" TERM HUP; echo $$; sleep 1000' & sleep 1000";
    let mut running = guest.order("s", script, 0).await.unwrap();
    let left = handle(running.line().await);
    guest.close("s").await.unwrap();
    assert!(!lives(&left), "gone when the answer is there");
    // Whoever waited for the command hears of it.
    let said = running.finish().await.unwrap();
    assert!(said.exit.session_ended);
    assert_eq!(said.exit.how, Some(How::Signal(9)));
    let (reason, _) = refusal(guest.close("s").await.unwrap_err());
    assert_eq!(reason, Reason::SessionNotFound);
    assert_eq!(guest.not_told("s", "echo").await, Reason::SessionNotFound);
    guest.end().await;
}

#[tokio::test]
async fn an_opening_that_is_given_up_leaves_no_shell() {
    let guest = Guest::start();
    let dir = tempfile::tempdir().unwrap();
    let (fifo, pid) = (dir.path().join("fifo"), dir.path().join("pid"));
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let start = dir.path().join("start");
    let script = format!("echo $$ >{}; read x <{}", pid.display(), fifo.display());
    let mut file = std::fs::File::create(&start).unwrap();
    std::io::Write::write_all(&mut file, script.as_bytes()).unwrap();
    drop(file);
    let request = AgentSessionOpenRequest {
        env: vec![var(b"BASH_ENV", start.to_str().unwrap().as_bytes())],
        ..named("s")
    };
    let mut client = guest.client.clone();
    let opening = crate::tasks::spawn(async move { client.session_open(request).await });
    eventually("the shell has begun", || {
        std::fs::read_to_string(&pid).is_ok_and(|text| text.ends_with('\n'))
    })
    .await;
    let shell = handle(std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap());
    assert_eq!(guest.not_told("s", "echo").await, Reason::SessionNotFound);
    opening.abort();
    death(shell).await;
    // Its name is free again.
    eventually("no call is open", || guest.gate.open() == 0).await;
    guest.open(named("s")).await.unwrap();
    guest.end().await;
}

#[tokio::test]
async fn a_session_starts_as_asked() {
    let guest = Guest::start_with(
        Some(super::harness::own_cgroup()),
        ClaimDefaults {
            env: vec![var(b"CLAIM", b"c")],
            user: Bytes::new(),
        },
    );
    let request = AgentSessionOpenRequest {
        cwd: "/usr".into(),
        env: vec![var(b"ODD", b"a\nb\xff")],
        user: "4242:4343".into(),
        ..named("s")
    };
    guest.open(request).await.unwrap();
    let said = guest
        .told("s", "pwd; id -u; id -g; echo $CLAIM; printf %s \"$ODD\"")
        .await;
    assert_eq!(said.stdout, b"/usr\n4242\n4343\nc\na\nb\xff");
    let refused = |request| async { refusal(guest.open(request).await.unwrap_err()).0 };
    let mut request = named("t");
    request.cwd = "/nowhere".into();
    assert_eq!(refused(request.clone()).await, Reason::CwdNotFound);
    request.cwd = Bytes::new();
    request.user = "nobody-of-that-name".into();
    assert_eq!(refused(request.clone()).await, Reason::UserNotFound);
    request.user = Bytes::new();
    request.env = vec![var(b"PATH", b"/nowhere")];
    assert_eq!(refused(request.clone()).await, Reason::ProgramNotFound);
    // Something that is called bash, and is none.
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/bin/false", dir.path().join("bash")).unwrap();
    request.env = vec![var(b"PATH", dir.path().to_str().unwrap().as_bytes())];
    assert_eq!(refused(request).await, Reason::ProgramNotFound);
    // A failure leaves no name behind.
    guest.open(named("t")).await.unwrap();
    guest.end().await;
}

#[tokio::test]
async fn sessions_run_out_and_come_back() {
    let guest = Guest::start();
    for _ in 0..SESSIONS {
        guest.open(named("")).await.unwrap();
    }
    let (reason, _) = refusal(guest.open(named("")).await.unwrap_err());
    assert_eq!(reason, Reason::SessionLimit);
    guest.close("s7").await.unwrap();
    guest.open(named("")).await.unwrap();
    assert_eq!(guest.runner.sessions(), 64);
    guest.runner.forget_exited();
    assert_eq!(guest.runner.sessions(), 0);
    eventually("all shells have ended", || guest.runner.running() == 0).await;
    guest.end().await;
}

#[tokio::test]
async fn one_environment_for_all_ways() {
    let claim = ClaimDefaults {
        env: vec![var(b"CLAIM", b"c"), var(b"LANG", b"C")],
        user: Bytes::new(),
    };
    let guest = Guest::start_with(Some(super::harness::own_cgroup()), claim);
    let own = [var(b"OWN", b"a b"), var(b"HOME", b"/usr")];
    // Its own environment, as the kernel has it.
    let print = "tr '\\0' '\\n' </proc/$$/environ | sort";
    let mut command = sh(print);
    command.env = own.to_vec();
    let exec = guest.run(command.clone()).await.unwrap();
    let spawned = guest
        .spawn(super::harness::detached(command.clone()))
        .await
        .unwrap();
    let log = guest
        .attach(super::harness::to(spawned.id))
        .await
        .unwrap()
        .finish()
        .await;
    assert_eq!(String::from_utf8(log.data).unwrap(), exec.text());
    command.tty = Some(sandbox_protocol::v1::Tty {
        cols: 80,
        rows: 24,
        term: Bytes::new(),
    });
    let mut call = guest.begin(of(command)).await.unwrap();
    call.input = None;
    let pty = call.finish().await.unwrap();
    let request = AgentSessionOpenRequest {
        env: own.to_vec(),
        ..named("s")
    };
    guest.open(request).await.unwrap();
    let session = guest.told("s", print).await;
    let mut detached = sh(print);
    detached.env = own.to_vec();
    let spawned = guest.spawn(super::harness::detached(detached)).await.unwrap();
    let mut reader = guest.attach(super::harness::to(spawned.id)).await.unwrap();
    assert_eq!(reader.finish().await.data, exec.stdout);
    assert!(exec.text().contains("OWN=a b\n") && exec.text().contains("CLAIM=c\n"));
    assert_eq!(session.out(), exec.text());
    // A terminal has a name beside.
    let pty = pty
        .text()
        .replace("\r\n", "\n")
        .replace("TERM=xterm-256color\n", "");
    assert_eq!(pty, exec.text());
    guest.end().await;
}
