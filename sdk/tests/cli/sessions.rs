//! `session`.

use std::io::Write as _;

use sandbox_sdk::Reason;
use serde_json::{Value, json};

use super::{
    code, ctl, one, send, start, stdout,
    support::{Mock, Plan, refusal},
};

#[test]
fn a_session_is_opened_listed_and_closed() {
    let mock = Mock::start();
    let args = [
        "session", "open", "--cwd", "/w", "--env", "A=b", "--user", "app", "--idle", "0s", "sb_1",
    ];
    assert_eq!(stdout(&ctl(&mock, &args)), "s-1\n");
    let sent = mock.seen().sessions[0].clone();
    assert_eq!(
        (&sent.cwd[..], &sent.user[..], sent.idle_secs),
        (&b"/w"[..], &b"app"[..], Some(0))
    );
    let opened = one(&ctl(&mock, &["--json", "session", "open", "--id", "own", "sb_1"]));
    assert_eq!(opened, json!({ "session": "own", "process": 8, "pid": 80 }));
    let listed = one(&ctl(&mock, &["--json", "session", "list", "sb_1"]));
    assert_eq!(
        listed["sessions"][0],
        json!({
            "session": "s-1", "process": 8, "pid": 80, "busy": true, "commands": 2,
            "opened_at": "2023-11-14T22:13:20.000Z", "idle_ms": 1000, "idle_secs": 1800,
        })
    );
    assert!(stdout(&ctl(&mock, &["session", "list", "sb_1"])).contains("busy"));
    mock.plan(
        "session_close",
        Plan::Fail(refusal(Reason::SessionNotFound, "guest", None)),
    );
    let closed = ctl(&mock, &["--json", "session", "close", "sb_1", "a", "b"]);
    assert_eq!(code(&closed), 1);
    assert_eq!(closed.stdout, b"{\"session\":\"b\"}\n");
}

#[test]
fn session_run_has_the_command_s_own_code() {
    let mock = Mock::start();
    let output = ctl(&mock, &["session", "run", "sb_1", "s-1", "echo", "--x", "$PWD"]);
    assert_eq!(
        (code(&output), &output.stdout[..], &output.stderr[..]),
        (0, &b"echo --x $PWD"[..], &b"err"[..])
    );
    let ended = ctl(&mock, &["session", "run", "sb_1", "s-1", "exit"]);
    assert_eq!(code(&ended), 5);
    assert!(String::from_utf8_lossy(&ended.stderr).contains("session s-1 has ended"));
    let slow = ctl(
        &mock,
        &["session", "run", "--timeout", "1s", "sb_1", "s-1", "slow"],
    );
    assert_eq!(code(&slow), 124);
    let value = one(&ctl(&mock, &["--json", "session", "run", "sb_1", "s-1", "late"]));
    assert_eq!(
        value,
        json!({
            "code": 0, "signal": null, "timed_out": false, "cancelled": false, "session_ended": false,
            "cwd": "/tmp", "truncated": false, "stdout": "late", "stderr": "err", "late_stdout": "old",
            "late_stderr": "older",
        })
    );
    for reason in [Reason::SessionBusy, Reason::SessionNotFound] {
        mock.plan("session_run", Plan::Fail(refusal(reason, "guest", None)));
        let refused = ctl(&mock, &["--json", "session", "run", "sb_1", "s-1", "x"]);
        assert_eq!(code(&refused), 125);
        let error: Value = serde_json::from_slice(&refused.stderr).unwrap();
        assert_eq!(error["error"]["reason"], reason.as_str());
    }
    for (args, expected) in [
        (&["session", "run", "sb_1", "s-1"][..], 125),
        (&["session", "run", "sb_1", "s-1", "noexit"], 125),
        (&["session", "open"], 2),
        (&["session"], 2),
    ] {
        assert_eq!(code(&ctl(&mock, args)), expected, "{args:?}");
    }
}

#[test]
fn e19_session_run_reads_stdin_only_when_asked_for_and_passes_signals_on() {
    let mock = Mock::start();
    let mut child = start(&mock, &["session", "run", "-i", "sb_1", "s-1"]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"cd /tmp\nls\n").unwrap();
    drop(stdin);
    assert_eq!(child.wait_with_output().unwrap().stdout, b"cd /tmp\nls\n");
    let mut child = start(&mock, &["session", "run", "sb_1", "s-1", "sleep"]);
    let _held = child.stdin.take();
    let mut word = [0; 5];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut word).unwrap();
    send(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(mock.seen().signals, [2]);
}
