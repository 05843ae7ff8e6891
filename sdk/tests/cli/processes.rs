//! The verbs of processes.

use std::io::{Read as _, Write as _};

use sandbox_sdk::{
    Reason,
    v1::{log_from::At, process_ref::Which, signal::Scope},
};
use serde_json::{Value, json};

use super::{
    block, code, ctl, keys, lines, one, ready, send, start, stdout,
    support::{Mock, Plan, refusal},
};

#[test]
fn spawn_prints_the_id_and_passes_all_on() {
    let mock = Mock::start();
    let args = [
        "spawn",
        "--name",
        "web",
        "--log",
        "4096",
        "--retain",
        "1h",
        "--stdin",
        "--tty",
        "--cwd",
        "/w",
        "--env",
        "A=b=c",
        "--user",
        "app",
        "--timeout",
        "5s",
        "sb_1",
        "--",
        "serve",
        "--port",
        "1",
    ];
    assert_eq!(stdout(&ctl(&mock, &args)), "7\n");
    let sent = mock.seen().spawns[0].clone();
    assert_eq!(
        (&sent.name[..], sent.log_bytes, sent.retain_secs, sent.keep_stdin),
        (&b"web"[..], 4096, 3600, true)
    );
    let command = sent.command.unwrap();
    assert_eq!(command.argv, ["serve", "--port", "1"]);
    assert_eq!((&command.cwd[..], command.timeout_ms), (&b"/w"[..], 5_000));
    // No terminal here: the usual size.
    let tty = command.tty.unwrap();
    assert_eq!((tty.cols, tty.rows), (80, 24));

    let spawned = one(&ctl(&mock, &["--json", "spawn", "--key", "k", "sb_1", "serve"]));
    assert_eq!(spawned, json!({ "process": 7, "pid": 70 }));
    let sent = mock.seen().spawns[1].clone();
    assert_eq!(sent.request_key, "k");
    assert_eq!(sent.command.unwrap().tty, None);
    mock.plan("spawn", Plan::Fail(refusal(Reason::NameTaken, "guest", None)));
    let taken = ctl(&mock, &["--json", "spawn", "sb_1", "serve"]);
    assert_eq!(code(&taken), 1);
    let error: Value = serde_json::from_slice(&taken.stderr).unwrap();
    assert_eq!(error["error"]["reason"], "NAME_TAKEN");
}

#[test]
fn ps_is_a_table_or_json() {
    let mock = Mock::start();
    let listed = one(&ctl(&mock, &["--json", "ps", "sb_1"]));
    let rows = listed["processes"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!(
        keys(&rows[2]),
        [
            "age_ms",
            "argv",
            "argv_cut",
            "exit",
            "kind",
            "log_end",
            "log_start",
            "name",
            "pid",
            "process",
            "readers",
            "started_at",
            "state",
            "tty",
            "uid",
        ]
    );
    assert_eq!(
        (&rows[2]["state"], &rows[2]["kind"], &rows[0]["exit"]),
        (&json!("exited"), &json!("detached"), &Value::Null)
    );
    assert_eq!(
        rows[2]["exit"],
        json!({ "code": 3, "signal": null, "timed_out": false })
    );
    let table = stdout(&ctl(&mock, &["ps", "sb_1"]));
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].starts_with("ID") && lines[0].ends_with("COMMAND"),
        "{table}"
    );
    assert!(
        lines[3].contains("exited (3)") && lines[3].contains("1m 5s"),
        "{table}"
    );
    // What a guest calls its programs moves no cursor.
    assert!(!table.contains('\u{1b}'), "{table}");
    assert_eq!(
        stdout(&ctl(&mock, &["ps", "--running", "sb_1"])).lines().count(),
        2
    );
}

#[test]
fn kill_and_forget_do_all_and_tell_of_each() {
    let mock = Mock::start();
    let args = [
        "--json", "kill", "-s", "TERM", "--scope", "leader", "sb_1", "web", "17",
    ];
    assert_eq!(
        lines(&ctl(&mock, &args)),
        [json!("web"), json!(17)]
            .map(|name| json!({ "process": name, "already_exited": false, "signalled": true }))
    );
    let kills = mock.seen().kills;
    assert_eq!((kills[0].signal, kills[0].scope()), (15, Scope::Leader));
    assert_eq!(kills[1].process.clone().unwrap().which, Some(Which::Id(17)));
    assert_eq!(stdout(&ctl(&mock, &["kill", "sb_1", "web"])), "web\n");
    let last = mock.seen().kills.pop().unwrap();
    assert_eq!((last.signal, last.scope()), (9, Scope::Tree));
    assert_eq!(code(&ctl(&mock, &["kill", "-s", "NOPE", "sb_1", "web"])), 2);
    assert_eq!(code(&ctl(&mock, &["kill", "sb_1"])), 2);

    mock.plan("forget", Plan::Fail(refusal(Reason::StillRunning, "guest", None)));
    let output = ctl(&mock, &["forget", "sb_1", "a", "b"]);
    assert_eq!((code(&output), &output.stdout[..]), (1, &b"b\n"[..]));
    assert!(String::from_utf8_lossy(&output.stderr).contains("STILL_RUNNING"));
}

#[test]
fn logs_are_bytes_on_their_own_outputs() {
    let mock = Mock::start();
    let output = ctl(&mock, &["logs", "sb_1", "web"]);
    assert_eq!((code(&output), &output.stdout[..]), (0, &b"out"[..]));
    assert!(output.stderr.ends_with(b"\xff\x00"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("7 bytes of output are no longer held"));
    let args = [
        "--json",
        "logs",
        "-f",
        "--from",
        "0",
        "--max-bytes",
        "99",
        "sb_1",
        "web",
    ];
    assert_eq!(
        lines(&ctl(&mock, &args)),
        [
            json!({ "output": "stdout", "offset": 0, "data": "out" }),
            json!({ "gap": { "from": 3, "to": 10 } }),
            json!({ "output": "stderr", "offset": 10, "data_base64": "/wA=" }),
            json!({ "exit": { "code": 3, "signal": null, "timed_out": false } }),
        ]
    );
    let asked = mock.seen().logs.pop().unwrap();
    assert!(asked.follow && asked.max_bytes == 99);
    assert_eq!(asked.from.unwrap().at, Some(At::Offset(0)));
    assert_eq!(code(&ctl(&mock, &["logs", "sb_1", "lossy"])), 1);
    assert_eq!(code(&ctl(&mock, &["logs", "--from", "newest", "sb_1", "web"])), 2);
}

#[test]
fn wait_prints_the_code() {
    let mock = Mock::start();
    assert_eq!(stdout(&ctl(&mock, &["wait", "sb_1", "web"])), "3\n");
    assert_eq!(stdout(&ctl(&mock, &["wait", "sb_1", "killed"])), "137\n");
    assert_eq!(
        one(&ctl(&mock, &["--json", "wait", "sb_1", "killed"])),
        json!({ "process": "killed", "code": null, "signal": 9, "timed_out": false })
    );
    let output = ctl(&mock, &["wait", "--timeout", "0s", "sb_1", "running"]);
    assert_eq!((code(&output), &output.stdout[..]), (3, &b""[..]));
}

#[test]
fn e19_attach_reads_stdin_only_when_asked_for() {
    let mock = Mock::start();
    let mut child = start(&mock, &["attach", "-i", "sb_1", "web"]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b" over there").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!((code(&output), &output.stdout[..]), (0, &b"ready over there"[..]));
    let asked = mock.seen().attaches[0].clone();
    assert!(asked.input);
    assert!(matches!(asked.from.unwrap().at, Some(At::Live(_))));

    // Signals are the process's, and its end is the verb's.
    let mut child = start(&mock, &["attach", "-i", "--from", "oldest", "sb_1", "web"]);
    ready(&mut child);
    let _held = child.stdin.take();
    send(&child, "-TERM");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    assert_eq!(mock.seen().signals, [15]);

    // Who only looks on leaves by a signal, and the process goes on.
    let mut child = start(&mock, &["attach", "sb_1", "web"]);
    ready(&mut child);
    send(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    block(mock.until(|seen| seen.cancelled == 1));
    assert!(!mock.seen().attaches[2].input);
    assert_eq!(mock.seen().signals, [15]);

    mock.plan("attach", Plan::Fail(refusal(Reason::InputBusy, "guest", None)));
    assert_eq!(code(&ctl(&mock, &["attach", "-i", "sb_1", "web"])), 125);
    assert_eq!(code(&ctl(&mock, &["attach", "sb_1", "noexit"])), 125);
    assert_eq!(code(&ctl(&mock, &["attach", "sb_1"])), 125);
    let args = ["attach", "-i", "--no-stdin", "sb_1", "web"];
    assert_eq!(code(&ctl(&mock, &args)), 125);
}

#[test]
fn e19_what_nobody_reads_any_more_ends_a_reader_quietly() {
    let mock = Mock::start();
    let mut child = start(&mock, &["attach", "-i", "sb_1", "web"]);
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 5]).unwrap();
    drop(stdout);
    // The next word finds nobody.
    child.stdin.as_mut().unwrap().write_all(b"more").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(141), &b""[..]));
}

#[test]
fn without_a_terminal_what_needs_one_is_refused() {
    let mock = Mock::start();
    for (args, word) in [
        (
            &["shell", "sb_1"][..],
            "shell needs a terminal, and stdin is none",
        ),
        (
            &["exec", "-i", "-t", "sb_1", "--", "sh"],
            "-t needs a terminal, and stdin is none",
        ),
        (
            &["exec", "-t", "sb_1", "--", "sh"],
            "-t needs a terminal, and stdout is none",
        ),
        (
            &["run", "-i", "-t", "--", "sh"],
            "-t needs a terminal, and stdin is none",
        ),
        (&["--json", "shell", "sb_1"], "cannot be with --json"),
        (&["shell", "--detach-keys", "ctrl-pp", "sb_1"], "is no key"),
    ] {
        let output = ctl(&mock, args);
        assert_eq!(code(&output), 125, "{args:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(word), "{args:?}: {text}");
    }
    // Nothing was begun for them.
    assert!(mock.seen().calls.is_empty());
}
