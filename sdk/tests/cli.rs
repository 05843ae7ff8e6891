//! The program sandboxctl against a daemon that answers by script: JSON shapes, exit codes, manners.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests start the program under test"
)]

#[path = "cli/guest.rs"]
mod guest;
#[path = "cli/processes.rs"]
mod processes;
#[path = "cli/sessions.rs"]
mod sessions;
mod support;

use std::{
    io::{Read as _, Write as _},
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

use sandbox_sdk::Reason;
use serde_json::{Value, json};
use support::{Mock, Plan, refusal};

fn command(address: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxctl"));
    command
        .env_clear()
        .env("SANDBOXD_ADDR", address)
        .stdin(Stdio::null())
        .args(args);
    command
}

fn ctl(mock: &Mock, args: &[&str]) -> Output {
    command(&mock.address(), args).output().unwrap()
}

fn start(mock: &Mock, args: &[&str]) -> Child {
    command(&mock.address(), args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn code(output: &Output) -> i32 {
    // Nothing here may end by a signal.
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    assert_eq!(code(output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    let text = stdout(output);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn one(output: &Output) -> Value {
    let mut lines = lines(output);
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines.remove(0)
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn block<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn claim_prints_what_opens_the_sandbox_and_keeps_it() {
    let mock = Mock::start();
    let value = one(&ctl(
        &mock,
        &[
            "--json", "claim", "--pool", "default", "--lease", "10m", "--label", "a=b", "--wait", "1s",
        ],
    ));
    assert_eq!(
        value,
        json!({
            "sandbox": "sb_1", "claim": "cl_1", "token": "sbt_secret", "tier": "warm", "pool": "default",
            "expires_at": "2023-11-14T23:13:21.000Z", "engine": "stub", "accel": "none",
        })
    );
    let claim = mock.seen().claims[0].clone();
    assert_eq!((claim.lease_secs, claim.wait_ms), (Some(600), Some(1_000)));
    assert_eq!(claim.labels["a"], "b");
    assert!(mock.seen().released.is_empty());
    let text = stdout(&ctl(&mock, &["claim"]));
    assert!(
        text.contains("sandbox  sb_1") && text.contains("sbt_secret"),
        "{text}"
    );
    let traced = one(&ctl(&mock, &["--json", "claim", "--trace"]));
    assert_eq!(traced["work"]["journal_records"], 1);
    assert_eq!(traced["steps_us"], json!({ "take": 3 }));
}

#[test]
fn rows_and_their_shapes() {
    let mock = Mock::start();
    let list = one(&ctl(
        &mock,
        &["--json", "list", "--state", "claimed", "--label", "job=42"],
    ));
    let rows = list["sandboxes"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    assert_eq!(
        keys(&rows[0]),
        [
            "accel",
            "agent_version",
            "claim",
            "claimed_at",
            "conditions",
            "created_at",
            "engine",
            "expires_at",
            "labels",
            "lane",
            "owner",
            "pid",
            "pool",
            "proto",
            "sandbox",
            "size",
            "slot",
            "state",
            "template",
            "tier",
            "why",
        ]
    );
    assert_eq!(
        (&rows[0]["state"], &rows[0]["slot"]),
        (&json!("claimed"), &json!(3))
    );
    assert_eq!(
        one(&ctl(&mock, &["--json", "inspect", "sb_9"]))["sandbox"],
        "sb_9"
    );
    let watched = lines(&ctl(&mock, &["--json", "watch"]));
    assert_eq!(watched[0]["sandbox"]["sandbox"], "sb_1");
    assert_eq!(watched[1..], [json!({ "synced": true }), json!({ "lost": 7 })]);

    let released = lines(&ctl(&mock, &["--json", "release", "sb_1", "sb_2"]));
    assert_eq!(
        released,
        ["sb_1", "sb_2"].map(|id| json!({ "sandbox": id, "already": false, "recorded": true }))
    );
    assert_eq!(lines(&ctl(&mock, &["--json", "release", "--all"])).len(), 6);
    let renewed = one(&ctl(&mock, &["--json", "renew", "sb_1", "--lease", "1h"]));
    assert_eq!(
        renewed,
        json!({ "sandbox": "sb_1", "expires_at": "2023-11-14T23:13:20.000Z" })
    );
    // The same for people.
    for args in [
        &["list"][..],
        &["inspect", "sb_1"],
        &["watch"],
        &["release", "sb_1"],
    ] {
        assert!(stdout(&ctl(&mock, args)).contains("sb_"), "{args:?}");
    }
}

#[test]
fn pools_templates_and_node() {
    let mock = Mock::start();
    let pools = one(&ctl(&mock, &["--json", "pool", "list"]));
    assert_eq!(pools["pools"][0]["spec"]["name"], "default");
    assert_eq!(
        keys(&pools["pools"][0]),
        [
            "arrivals_per_min",
            "claimed",
            "lead_ms",
            "making",
            "parked",
            "source",
            "spec",
            "target",
            "waiting",
            "warm",
        ]
    );
    let apply = [
        "--json", "pool", "apply", "web", "--warm", "8", "--lease", "10m", "--lane", "none",
    ];
    let spec = one(&ctl(&mock, &apply))["spec"].clone();
    assert_eq!((&spec["warm"], &spec["lease_secs"]), (&json!(8), &json!(600)));
    assert_eq!(
        spec["key"],
        json!({ "template": "default", "lane": "none", "size": "small" })
    );
    assert_eq!(one(&ctl(&mock, &["--json", "pool", "rm", "web"])), json!({}));

    let build = ctl(&mock, &["--json", "template", "build", "py", "--warmup", "true"]);
    assert_eq!(one(&build)["name"], "py");
    let build = ctl(&mock, &["template", "build", "py"]);
    assert!(stdout(&build).contains("py"));
    let steps = String::from_utf8_lossy(&build.stderr).into_owned();
    assert!(steps.contains("boot") && steps.contains("capture"), "{steps}");
    assert_eq!(
        one(&ctl(&mock, &["--json", "template", "list"]))["templates"][0]["name"],
        "default"
    );
    assert_eq!(
        one(&ctl(&mock, &["--json", "template", "inspect", "t"]))["warmup"],
        json!(["true"])
    );
    assert_eq!(one(&ctl(&mock, &["--json", "template", "rm", "t"])), json!({}));

    let info = one(&ctl(&mock, &["--json", "node", "info"]));
    assert_eq!((&info["engine"], &info["ready"]), (&json!("stub"), &json!(true)));
    let doctor = one(&ctl(&mock, &["--json", "node", "doctor"]));
    assert_eq!(doctor["checks"][0]["verdict"], "warn");
    let reload = one(&ctl(&mock, &["--json", "node", "reload"]));
    assert_eq!(
        reload,
        json!({ "changed": ["pool.default.warm"], "needs_restart": [] })
    );
    for args in [
        &["pool", "list"][..],
        &["template", "list"],
        &["node", "info"],
        &["node", "doctor"],
    ] {
        assert!(!stdout(&ctl(&mock, args)).is_empty());
    }
}

#[test]
fn exec_has_the_command_s_own_code() {
    let mock = Mock::start();
    for (program, expected) in [
        (&["exit", "7"][..], 7),
        (&["exit", "0"], 0),
        (&["kill", "15"], 143),
        (&["late"], 124),
        (&["noexit"], 125),
        (&["fault"], 125),
    ] {
        let args = [&["exec", "sb_1", "--"], program].concat();
        assert_eq!(code(&ctl(&mock, &args)), expected, "{program:?}");
    }
    for (reason, expected) in [
        (Reason::ProgramNotFound, 127),
        (Reason::NotExecutable, 126),
        (Reason::CwdNotFound, 125),
        (Reason::SandboxNotFound, 125),
    ] {
        mock.plan("exec", Plan::Fail(refusal(reason, "guest", None)));
        assert_eq!(
            code(&ctl(&mock, &["exec", "sb_1", "--", "x"])),
            expected,
            "{reason:?}"
        );
    }
    for args in [
        &["exec"][..],
        &["exec", "sb_1"],
        &["exec", "--bad", "sb_1", "x"],
        &["run"],
    ] {
        assert_eq!(code(&ctl(&mock, args)), 125, "{args:?}");
    }
    let absent = command("unix:/nonexistent/api.sock", &["exec", "sb_1", "--", "true"]);
    assert_eq!(code(&{ absent }.output().unwrap()), 125);
}

#[test]
fn exec_passes_bytes_and_options_on() {
    let mock = Mock::start();
    let output = ctl(&mock, &["exec", "sb_1", "--", "both"]);
    assert_eq!(
        (code(&output), &output.stdout[..], &output.stderr[..]),
        (3, &b"out"[..], &b"err"[..])
    );
    let output = ctl(&mock, &["exec", "sb_1", "--", "raw"]);
    assert_eq!(output.stdout, b"\xff\x00\xfe");
    let args = [
        "--token",
        "sbt_x",
        "exec",
        "--cwd",
        "/w",
        "--env",
        "A=b=c",
        "--user",
        "app",
        "--timeout",
        "5s",
        "sb_7",
        "echo",
        "--help",
    ];
    assert_eq!(stdout(&ctl(&mock, &args)), "--help\n");
    let seen = mock.seen();
    assert_eq!(seen.authorization.as_deref(), Some("Bearer sbt_x"));
    assert_eq!(seen.sandbox_id.as_deref(), Some("sb_7"));
    let start = seen.starts.last().unwrap();
    let sent = start.command.clone().unwrap();
    assert!(!start.stdin);
    assert_eq!(
        (&sent.cwd[..], &sent.user[..], sent.timeout_ms),
        (&b"/w"[..], &b"app"[..], 5_000)
    );
    assert_eq!(
        (&sent.env[0].key[..], &sent.env[0].value[..]),
        (&b"A"[..], &b"b=c"[..])
    );

    let output = ctl(&mock, &["--json", "exec", "sb_1", "--", "both"]);
    assert_eq!(code(&output), 3);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        value,
        json!({
            "code": 3, "signal": null, "timed_out": false, "truncated": false, "stdout": "out", "stderr": "err",
        })
    );
    let value = one(&ctl(&mock, &["--json", "exec", "sb_1", "--", "raw"]));
    assert_eq!(
        (&value["stdout_base64"], &value["stdout"]),
        (&json!("/wD+"), &Value::Null)
    );
    let flooded = one(&ctl(&mock, &["--json", "exec", "sb_1", "--", "flood", "130"]));
    assert_eq!(flooded["truncated"], true);
    assert_eq!(flooded["stdout"].as_str().unwrap().len(), 8 * 1024 * 1024);
}

#[test]
fn e19_stdin_only_when_asked_for() {
    let mock = Mock::start();
    let mut child = start(&mock, &["exec", "-i", "sb_1", "--", "cat"]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"over there").unwrap();
    drop(stdin);
    assert_eq!(child.wait_with_output().unwrap().stdout, b"over there");

    // A shell's own input stays where it is, and the end of the command ends the call (E1).
    let mut child = start(&mock, &["exec", "sb_1", "--", "echo", "x"]);
    let _held = child.stdin.take();
    assert!(child.wait().unwrap().success());
    let mut child = start(&mock, &["exec", "-i", "sb_1", "--", "exit", "4"]);
    let _held = child.stdin.take();
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

fn send(child: &Child, signal: &str) {
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args([signal, &pid])
            .status()
            .unwrap()
            .success()
    );
}

/// Waits for the command's first word: from then on signals are the command's.
fn ready(child: &mut Child) {
    let mut word = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    assert_eq!(&word, b"ready");
}

#[test]
fn e19_signals_go_to_the_command() {
    let mock = Mock::start();
    for (signal, number) in [("-INT", 2), ("-TERM", 15), ("-HUP", 1)] {
        let mut child = start(&mock, &["exec", "sb_1", "--", "sleep"]);
        ready(&mut child);
        send(&child, signal);
        assert_eq!(
            child.wait_with_output().unwrap().status.code(),
            Some(128 + number)
        );
        assert_eq!(mock.seen().signals.last(), Some(&number));
    }
}

#[test]
fn e19_a_closed_pipe_ends_it_quietly() {
    let mock = Mock::start();
    let mut child = start(&mock, &["exec", "sb_1", "--", "flood", "1000"]);
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 10]).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(141), &b""[..]));
    block(mock.until(|seen| seen.cancelled == 1));

    let mut child = start(&mock, &["claim"]);
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(141), &b""[..]));
    // Nobody read its id, so it was given back.
    assert_eq!(mock.seen().released, ["sb_1"]);
}

#[test]
fn run_claims_runs_and_releases() {
    let mock = Mock::start();
    let output = ctl(&mock, &["run", "--", "both"]);
    assert_eq!((code(&output), &output.stdout[..]), (3, &b"out"[..]));
    assert_eq!(mock.seen().released, ["sb_1"]);
    assert!(matches!(
        mock.seen().claims[0].source,
        Some(sandbox_sdk::v1::claims_claim_request::Source::Pool(ref pool)) if pool == "default"
    ));

    let value = one(&ctl(
        &mock,
        &["--json", "run", "--template", "py", "--", "echo", "hi"],
    ));
    assert_eq!(
        (&value["sandbox"], &value["stdout"]),
        (&json!("sb_1"), &json!("hi\n"))
    );
    assert_eq!(mock.seen().released.len(), 2);

    // Faults release too.
    assert_eq!(code(&ctl(&mock, &["run", "--", "noexit"])), 125);
    assert_eq!(mock.seen().released.len(), 3);

    let kept = ctl(&mock, &["run", "--keep", "--", "exit", "0"]);
    assert!(String::from_utf8_lossy(&kept.stderr).contains("sbt_secret"));
    assert_eq!(mock.seen().released.len(), 3);

    mock.plan("claim", Plan::Fail(refusal(Reason::PoolEmpty, "host", None)));
    let refused = ctl(&mock, &["run", "--", "echo"]);
    assert_eq!(code(&refused), 125);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("POOL_EMPTY"));
}

#[test]
fn a_run_that_is_interrupted_gives_its_sandbox_back() {
    let mock = Mock::start();
    let mut child = start(&mock, &["run", "--", "sleep"]);
    ready(&mut child);
    send(&child, "-TERM");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    assert_eq!(mock.seen().released, ["sb_1"]);

    // While it still claims, the claim is awaited and given back.
    let gate = Arc::new(tokio::sync::Notify::new());
    mock.plan("claim", Plan::Gate(gate.clone()));
    let child = start(&mock, &["run", "--", "sleep"]);
    block(mock.until(|seen| seen.claims.len() == 2));
    send(&child, "-TERM");
    gate.notify_one();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    assert_eq!(mock.seen().released.len(), 2);
}

#[test]
fn errors_say_reason_remedy_and_request() {
    let mock = Mock::start();
    let retry = Some(Duration::from_millis(500));
    mock.plan("claim", Plan::Fail(refusal(Reason::PoolEmpty, "host", retry)));
    let output = ctl(&mock, &["--json", "claim"]);
    assert_eq!((code(&output), &output.stdout[..]), (1, &b""[..]));
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(
        error,
        json!({ "error": {
            "reason": "POOL_EMPTY", "message": "refused by script", "remedy": Reason::PoolEmpty.remedy(),
            "retry_after_ms": 500, "request_id": "rq_7",
        }})
    );
    let evil = tonic::Status::failed_precondition("\u{1b}[2Jbad\nnews");
    mock.plan("get", Plan::Fail(evil));
    let output = ctl(&mock, &["inspect", "sb_1"]);
    assert_eq!(code(&output), 1);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("\\u{1b}[2Jbad\\nnews"), "{text}");
}

#[test]
fn exit_codes_of_usage_absence_and_time() {
    let mock = Mock::start();
    for args in [
        &["nonsense"][..],
        &["claim", "--pool", "a", "--template", "b"],
        &["claim", "--lane", "none"],
        &["renew", "sb_1"],
        &["release"],
        &["list", "--state", "lost"],
        &["claim", "--env", "novalue"],
        &["--addr", "tcp:1", "list"],
    ] {
        assert_eq!(code(&ctl(&mock, args)), 2, "{args:?}");
    }
    let usage = ctl(&mock, &["--json", "nonsense"]);
    let error: Value = serde_json::from_slice(&usage.stderr).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("nonsense"));

    let absent = command("unix:/nonexistent/api.sock", &["list"]).output().unwrap();
    assert_eq!(code(&absent), 3);
    assert!(String::from_utf8_lossy(&absent.stderr).contains("start sandboxd"));
    mock.plan("list", Plan::Hang);
    assert_eq!(code(&ctl(&mock, &["list", "--timeout", "100ms"])), 3);

    assert_eq!(code(&ctl(&mock, &["--help"])), 0);
    assert_eq!(code(&ctl(&mock, &["exec", "--help"])), 0);
}

#[test]
fn wait_ready_waits_for_the_daemon_and_for_stock() {
    let mut mock = Mock::start();
    mock.kill();
    std::fs::remove_file(mock.socket()).unwrap();
    let child = start(
        &mock,
        &["--json", "wait-ready", "--pool", "default", "--warm", "4"],
    );
    mock.serve();
    assert_eq!(
        one(&child.wait_with_output().unwrap()),
        json!({ "pool": "default", "warm": 4 })
    );

    let late = ctl(
        &mock,
        &["--json", "wait-ready", "--warm", "5", "--timeout", "300ms"],
    );
    assert_eq!(code(&late), 3);
    let error: Value = serde_json::from_slice(&late.stderr).unwrap();
    assert_eq!(error["error"]["message"], "pool default has 4 of 5 warm");
    let absent = ctl(&mock, &["wait-ready", "--pool", "other", "--timeout", "100ms"]);
    assert!(String::from_utf8_lossy(&absent.stderr).contains("no pool other"));
    let refused = command("unix:/nonexistent/api.sock", &["wait-ready", "--timeout", "50ms"]).output();
    assert_eq!(code(&refused.unwrap()), 3);
}

#[test]
fn trace_and_bench_report() {
    let mock = Mock::start();
    let trace = one(&ctl(&mock, &["--json", "trace", "claim"]));
    assert_eq!(trace["work"]["journal_records"], 1);
    assert_eq!(trace["steps_us"], json!({ "take": 3 }));
    assert_eq!(mock.seen().released.len(), 1);

    let bench = one(&ctl(
        &mock,
        &["--json", "bench", "claim", "--n", "60", "--concurrency", "2"],
    ));
    assert_eq!(
        (&bench["n"], &bench["engine"], &bench["accel"]),
        (&json!(60), &json!("stub"), &json!("none"))
    );
    assert!(bench["claim_us"]["p50"].is_number() && bench["claim_us"]["p99"].is_null());
    assert!(bench["empty_rpc_us"]["p90"].is_number() && bench["ratio"]["p50"].is_number());
    assert_eq!(mock.seen().released.len(), 61);
    let burst = one(&ctl(
        &mock,
        &["--json", "bench", "burst", "--n", "2", "--concurrency", "8"],
    ));
    assert_eq!(
        (&burst["n"], &burst["outcomes"]),
        (&json!(16), &json!({ "warm": 16 }))
    );
    let refill = one(&ctl(&mock, &["--json", "bench", "refill", "--n", "2"]));
    assert_eq!(refill["wall_ms"].as_array().unwrap().len(), 2);
    assert_eq!(mock.seen().released.len(), 61 + 16 + 8);
    let exec = one(&ctl(&mock, &["--json", "bench", "exec", "--n", "12"]));
    assert_eq!((&exec["n"], mock.seen().starts.len()), (&json!(12), 12));
    let text = stdout(&ctl(&mock, &["bench", "claim", "--n", "6"]));
    assert!(text.contains("empty rpc") && text.contains("ratio"), "{text}");
}

#[test]
fn packages_get_completions_and_manuals() {
    let mock = Mock::start();
    assert!(stdout(&ctl(&mock, &["completions", "bash"])).contains("wait-ready"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("man");
    stdout(&ctl(&mock, &["man", path.to_str().unwrap()]));
    let pages: Vec<_> = std::fs::read_dir(path)
        .unwrap()
        .map(|page| page.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(pages.contains(&"sandboxctl.1".to_owned()), "{pages:?}");
    assert!(
        pages.contains(&"sandboxctl-template-build.1".to_owned()),
        "{pages:?}"
    );
    assert!(
        pages.contains(&"sandboxctl-session-run.1".to_owned()),
        "{pages:?}"
    );
}
