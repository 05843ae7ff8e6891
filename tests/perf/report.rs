//! The results as tables.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Arms of `agent`, and their names.
const AGENT_ARMS: [(&str, &str); 7] = [
    ("/spawn_us", "posix_spawn and wait of `true` in the client"),
    ("/empty_rpc_us", "empty RPC (Info) on the link"),
    ("/exec_us", "exec `true`, from call to exit"),
    ("/exec_alone_us", "exec `true`, nothing kept"),
    (
        "/exec_beside_full_us",
        "exec `true`, 4,096 kept and all logs full",
    ),
    ("/pty_round_trip_us", "one byte to a terminal and back"),
    ("/forward_round_trip_us", "one byte to a port and back"),
];

/// Arms of `claim` in the order in which they are told, and their names.
const ARMS: [(&str, &str); 13] = [
    ("/empty_rpc_us", "empty RPC"),
    ("/claim_us", "warm claim"),
    ("/claim_while_refilling_us", "warm claim, refill beside it"),
    ("/c64_empty_rpc_us", "empty RPC, 64 at once"),
    ("/c64_claim_us", "warm claim, 64 at once"),
    ("/live_1_us", "warm claim, 1 live"),
    ("/live_10000_us", "warm claim, 10,000 live"),
    ("/sync_empty_rpc_us", "empty RPC, `sync = \"always\"`"),
    ("/claim_sync_us", "warm claim, `sync = \"always\"`"),
    ("/c64_claim_sync_us", "the same, 64 at once"),
    ("/fdatasync_us", "write and fdatasync of 512 bytes alone"),
    ("/exec_true/empty_rpc_us", "empty RPC beside exec"),
    ("/exec_true/exec_us", "exec `true`, from call to exit"),
];

/// A figure of the design, as a ratio of two numbers.
pub(crate) struct Held {
    what: &'static str,
    of: [&'static str; 2],
    bound: f64,
    at_least: bool,
}

pub(crate) const fn at_least(what: &'static str, of: [&'static str; 2], bound: f64) -> Held {
    Held {
        what,
        of,
        bound,
        at_least: true,
    }
}

pub(crate) const fn held(what: &'static str, of: [&'static str; 2], bound: f64) -> Held {
    Held {
        what,
        of,
        bound,
        at_least: false,
    }
}

const AGENT_HELD: [Held; 10] = [
    held(
        "exec / (spawn and wait + empty RPC), p50",
        ["/exec_us/p50", "/floor_us"],
        1.25,
    ),
    held(
        "exec beside full logs / alone, p50",
        ["/exec_beside_full_us/p50", "/exec_alone_us/p50"],
        1.1,
    ),
    held("exec, p99 / p50", ["/exec_us/p99", "/exec_us/p50"], 5.0),
    held(
        "growth over 1,000 detached `true` / 400 KiB",
        ["/detached_growth_kib", "/400"],
        1.0,
    ),
    held(
        "growth over 10,000 / 2,560 KiB",
        ["/detached_10000_growth_kib", "/2560"],
        1.0,
    ),
    held("idle memory / 8 MiB", ["/idle_rss_kib", "/8192"], 1.0),
    at_least(
        "file pull / plain copy over a Unix socket, MiB/s",
        ["/files/read_mib_per_s", "/files/copy_mib_per_s"],
        0.3,
    ),
    at_least(
        "file push / plain copy",
        ["/files/write_mib_per_s", "/files/copy_in_mib_per_s"],
        0.3,
    ),
    at_least(
        "file pull through the daemon / plain copy",
        [
            "/files_through_daemon/read_mib_per_s",
            "/files_through_daemon/copy_mib_per_s",
        ],
        0.2,
    ),
    at_least(
        "file push through the daemon / plain copy",
        [
            "/files_through_daemon/write_mib_per_s",
            "/files_through_daemon/copy_in_mib_per_s",
        ],
        0.2,
    ),
];

const HELD: [Held; 8] = [
    held(
        "claim / empty RPC, p50",
        ["/claim_us/p50", "/empty_rpc_us/p50"],
        1.25,
    ),
    held(
        "claim / empty RPC, p99",
        ["/claim_us/p99", "/empty_rpc_us/p99"],
        1.5,
    ),
    held(
        "the same at 64 at once, p99",
        ["/c64_claim_us/p99", "/c64_empty_rpc_us/p99"],
        1.5,
    ),
    held(
        "10,000 live / 1 live, p50",
        ["/live_10000_us/p50", "/live_1_us/p50"],
        1.1,
    ),
    at_least(
        "synced / unsynced claims per second, 64 at once",
        ["/synced_per_s", "/unsynced_per_s"],
        0.7,
    ),
    held(
        "daemon's memory / (16 MiB + 6 KiB per live claim)",
        ["/memory/rss_kib", "/memory/budget_kib"],
        1.0,
    ),
    held(
        "restart with 1,000 live claims to READY / 2,000 ms",
        ["/restart/ready_ms", "/2000"],
        1.0,
    ),
    held(
        "refill 0 to N / (N x one clone / clones in flight)",
        ["/refill/ratio", "/1"],
        1.2,
    ),
];

/// The report of `claim`.
pub(crate) fn claim(results: &Value) -> String {
    let mut text = String::new();
    let get = |at: &str| results.pointer(at).map(show).unwrap_or_default();
    machine(&mut text, results);
    line(&mut text, &format!("Stop line: {}.", get("/stop_line")));
    for run in results
        .get("runs")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        one(&mut text, run);
    }
    let records = get("/journal_replay/records");
    line(
        &mut text,
        &format!(
            "Journal: {records} records that no daemon has folded are replayed in {} ms (bound: 1,000).",
            get("/journal_replay/wall_ms")
        ),
    );
    text
}

pub(crate) fn machine(text: &mut String, results: &Value) {
    let get = |at: &str| results.pointer(at).map(show).unwrap_or_default();
    line(
        text,
        &format!(
            "{} cores ({}), {} MiB, {}, {}, state on {}. Load average {} before, {} after.",
            get("/host/cores"),
            get("/host/cpu"),
            get("/host/memory_mib"),
            get("/host/kernel"),
            get("/host/qemu"),
            get("/host/state_on"),
            get("/load/before"),
            get("/load/after"),
        ),
    );
}

/// The report of `agent`.
pub(crate) fn agent(results: &Value) -> String {
    let mut text = String::new();
    machine(&mut text, results);
    let Some(run) = results.get("run") else {
        return text;
    };
    arms(&mut text, run, &AGENT_ARMS);
    figures(&mut text, &derived(run.clone()), &AGENT_HELD);
    table(&mut text, ["what", "measured"], |add| {
        for (name, value) in run.as_object().into_iter().flatten() {
            if !name.ends_with("_us") {
                add([name.replace('_', " "), parts(value)]);
            }
        }
    });
    text
}

/// With what follows from the figures of a run.
fn derived(mut run: Value) -> Value {
    let number = |at: &str| run.pointer(at).and_then(Value::as_f64);
    let grown = |name: &str| {
        let [before, after] = ["before", "after"].map(|end| number(&format!("/{name}/{end}")));
        Some(after? - before?)
    };
    let floor = number("/spawn_us/p50").zip(number("/empty_rpc_us/p50"));
    let more = [
        ("floor_us", floor.map(|(spawn, empty)| spawn + empty)),
        ("detached_growth_kib", grown("detached_rss_kib")),
        ("detached_10000_growth_kib", grown("detached_10000_rss_kib")),
    ];
    if let Some(run) = run.as_object_mut() {
        for (name, value) in more {
            run.insert(name.to_owned(), value.into());
        }
    }
    run
}

/// A value, or those in it by name.
fn parts(value: &Value) -> String {
    match value.as_object() {
        Some(row) => {
            let parts = row
                .iter()
                .map(|(name, value)| format!("{} {}", name.replace('_', " "), show(value)));
            parts.collect::<Vec<_>>().join(", ")
        }
        None => show(value),
    }
}

fn one(text: &mut String, run: &Value) {
    let get = |at: &str| run.pointer(at).map(show).unwrap_or_default();
    line(
        text,
        &format!("### engine {}, accel {}", get("/engine"), get("/accel")),
    );
    line(text, &format!("Sync mode: {}.", get("/sync")));
    arms(text, run, &ARMS);
    figures(text, run, &HELD);
    let head = ["work of one warm claim", "sync = auto", "sync = always"];
    table(text, head, |add| counts(run).into_iter().for_each(add));
    let equal = run.get("counts_are_equal_at_1_and_10000_live");
    if let Some(equal) = equal.and_then(Value::as_bool) {
        let equal = if equal { "equal" } else { "**not equal**" };
        line(
            text,
            &format!("Counts with 1 and with 10,000 live claims are {equal}."),
        );
    }
    for (key, what) in [("memory", "Memory"), ("refill", "Refill"), ("restart", "Restart")] {
        if let Some(row) = run.get(key).and_then(Value::as_object) {
            let parts = row.iter().map(|(name, value)| format!("{name} {}", show(value)));
            line(
                text,
                &format!("{what}: {}.", parts.collect::<Vec<_>>().join(", ")),
            );
        }
    }
    if run.get("synced_per_s").is_some_and(Value::is_number) {
        let (unsynced, synced) = (get("/unsynced_per_s"), get("/synced_per_s"));
        line(
            text,
            &format!("Claims per second at 64 at once: {unsynced} unsynced, {synced} synced."),
        );
    }
}

pub(crate) fn arms(text: &mut String, run: &Value, arms: &[(&str, &str)]) {
    table(text, ["arm (us)", "n", "p50", "p90", "p99", "p99.9"], |add| {
        for (key, name) in arms {
            if let Some(arm) = run.pointer(key).filter(|arm| arm.is_object()) {
                let at = |part: &str| arm.get(part).map(show).unwrap_or_default();
                add([
                    (*name).to_owned(),
                    at("n"),
                    at("p50"),
                    at("p90"),
                    at("p99"),
                    at("p999"),
                ]);
            }
        }
    });
}

pub(crate) fn figures(text: &mut String, run: &Value, held: &[Held]) {
    table(text, ["figure", "measured", "bound", "held"], |add| {
        for figure in held {
            let number = |at: &str| match at.trim_start_matches('/').parse::<f64>() {
                Ok(number) => Some(number),
                Err(_is_a_path) => run.pointer(at).and_then(Value::as_f64),
            };
            let [over, under] = figure.of.map(number);
            let (Some(over), Some(under)) = (over, under) else {
                continue;
            };
            let ratio = over / under;
            let (sign, holds) = if figure.at_least {
                (">=", ratio >= figure.bound)
            } else {
                ("<=", ratio <= figure.bound)
            };
            add([
                figure.what.to_owned(),
                format!("{ratio:.2}"),
                format!("{sign} {}", figure.bound),
                if holds { "yes" } else { "**no**" }.to_owned(),
            ]);
        }
    });
}

fn counts(run: &Value) -> Vec<[String; 3]> {
    let of = |name: &str, kind: &str| {
        run.get(name)
            .and_then(|counts| counts.get(kind))
            .map(show)
            .unwrap_or_default()
    };
    let kinds = run.get("counts").and_then(Value::as_object);
    let kinds = kinds.into_iter().flat_map(|counts| counts.keys());
    kinds
        .map(|kind| {
            [
                kind.replace('_', " "),
                of("counts", kind),
                of("counts_sync", kind),
            ]
        })
        .collect()
}

pub(crate) fn line(text: &mut String, line: &str) {
    text.push_str(line);
    text.push_str("\n\n");
}

pub(crate) fn table<const N: usize>(
    text: &mut String,
    head: [&str; N],
    rows: impl FnOnce(&mut dyn FnMut([String; N])),
) {
    let mut row = |cells: &[String]| {
        text.push_str("| ");
        text.push_str(&cells.join(" | "));
        text.push_str(" |\n");
    };
    row(&head.map(str::to_owned));
    row(&head.map(|_| "---".to_owned()));
    rows(&mut |cells| row(&cells));
    text.push('\n');
}

/// A value as a person reads it.
pub(crate) fn show(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(show).collect::<Vec<_>>().join(" / "),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

/// Puts the tables into the documentation of this checkout.
pub(crate) async fn write_docs(part: &str, report: &str) -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/performance.md");
    let old = tokio::fs::read_to_string(&path)
        .await
        .context("docs/performance.md")?;
    let new = between(&old, part, report).context("docs/performance.md has no place for the tables")?;
    tokio::fs::write(&path, new).await.context("docs/performance.md")
}

/// Puts a part's tables between its marks.
fn between(old: &str, part: &str, report: &str) -> Option<String> {
    let (begin, end) = (
        format!("<!-- bench {part} -->\n"),
        format!("<!-- end of bench {part} -->"),
    );
    let (before, rest) = old.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}\n{report}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_held_is_told() {
        let run = json!({
            "engine": "stub", "accel": "none", "sync": "auto",
            "empty_rpc_us": { "p50": 100.0, "p90": 1, "p99": 200.0, "p999": null, "n": 1000 },
            "claim_us": { "p50": 120.0, "p90": 1, "p99": 301.0, "p999": null, "n": 1000 },
            "synced_per_s": 69.0, "unsynced_per_s": 100.0,
            "counts": { "writes": 1 },
        });
        let text = claim(&json!({ "runs": [run] }));
        assert!(
            text.contains("| claim / empty RPC, p50 | 1.20 | <= 1.25 | yes |"),
            "{text}"
        );
        assert!(
            text.contains("| claim / empty RPC, p99 | 1.50 | <= 1.5 | **no** |"),
            "{text}"
        );
        assert!(
            text.contains("per second, 64 at once | 0.69 | >= 0.7 | **no** |"),
            "{text}"
        );
        assert!(text.contains("| writes | 1 |  |"), "{text}");
    }

    #[test]
    fn an_agents_figures_are_told_with_their_bounds() {
        let arm = |p50: f64, p99: f64| json!({ "p50": p50, "p90": p50, "p99": p99, "n": 3072 });
        let run = json!({
            "spawn_us": arm(700.0, 900.0), "empty_rpc_us": arm(100.0, 200.0), "exec_us": arm(1000.0, 2000.0),
            "detached_rss_kib": { "before": 5000, "after": 5401 },
            "rings_built_per_exec": 0,
        });
        let text = agent(&json!({ "run": run }));
        assert!(
            text.contains("+ empty RPC), p50 | 1.25 | <= 1.25 | yes |"),
            "{text}"
        );
        assert!(
            text.contains("`true` / 400 KiB | 1.00 | <= 1 | **no** |"),
            "{text}"
        );
        assert!(
            text.contains("before 5000") && text.contains("after 5401"),
            "{text}"
        );
        assert!(text.contains("| rings built per exec | 0 |"), "{text}");
    }

    #[test]
    fn the_documentation_keeps_what_is_around() {
        let old = "a\n<!-- bench claim -->\nold\n<!-- end of bench claim -->\nb";
        let new = between(old, "claim", "new\n").unwrap();
        assert_eq!(
            new,
            "a\n<!-- bench claim -->\n\nnew\n<!-- end of bench claim -->\nb"
        );
        assert_eq!(between("nothing", "claim", "new"), None);
        assert_eq!(between(old, "agent", "new"), None);
    }
}
