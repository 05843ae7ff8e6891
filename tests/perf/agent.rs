//! `agent`: what a program in a sandbox costs beside starting it here, and what silkd holds for it afterwards.
#![expect(clippy::large_futures, reason = "no code of a service")]

use std::{process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use sandbox_protocol::v1::{AgentInfoRequest, ExecStart, OnDisconnect};
use sandbox_sdk::exec::Event;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep};

use crate::{
    Bench, agent_files, agent_io,
    arm::{Arm, millis, timed},
    daemon::{Daemon, Guests, Setup, with},
    guest::{Guest, command, memory_kib},
    host,
    stock::Stock,
};

/// Rounds of A B C C B A.
const ROUNDS: usize = 24;
/// Calls of an arm in one of its two turns of a round: 3,072 in all.
const TURN: usize = 64;
/// The program that does nothing, by its path: nobody looks for it along PATH.
const TRUE: &str = "/bin/true";
/// Processes beside which memory is looked at.
const SPAWNED: usize = 1_000;
/// Processes that silkd has seen at the end; it keeps 4,096 of them.
const SPAWNED_ALL: usize = 10_000;
const KEPT: usize = 4_096;
/// Calls whose counts are looked at.
const TRACED: usize = 100;
/// Bytes that one program says.
const STREAMED: u64 = 2 << 30;
/// What it says, over and over.
const LINE: &[u8] = b"sandbox\n";
/// Resident memory of each process while it streams, in KiB.
const FLAT_KIB: u64 = 64 << 10;

/// All of it.
pub(crate) async fn run(bench: &Bench) -> Result<Value> {
    let before = host::load();
    let mut figures = Map::new();
    let mut put = |name: &str, value: Value| {
        bench.say(&format!("{name}: {value}"));
        figures.insert(name.to_owned(), value);
    };
    let mut guest = Guest::start(&bench.bin).await?;
    put(
        "idle_rss_kib",
        json!(memory_kib(guest.pid()?, "smaps_rollup", "Rss:")?),
    );
    for (name, arm) in Box::pin(arms(&mut guest)).await? {
        put(name, arm.json());
    }
    for (name, value) in Box::pin(counts(&mut guest)).await? {
        put(name, value);
    }
    for (name, value) in Box::pin(agent_io::rows(&mut guest)).await? {
        put(name, value);
    }
    guest.stop().await?;
    for (name, value) in Box::pin(held(bench)).await? {
        put(name, value);
    }
    for (name, value) in Box::pin(full(bench)).await? {
        put(name, value);
    }
    put(
        "files_through_daemon",
        Box::pin(agent_files::through(bench)).await?,
    );
    put("stream", Box::pin(stream(bench)).await?);
    Ok(json!({
        "bench": "agent",
        "host": host::describe(&bench.out).await?,
        "load": { "before": before, "after": host::load() },
        "run": figures,
    }))
}

/// The program that does nothing, started and waited for here.
async fn bare() -> Result<Duration> {
    let (took, ended) = timed(async {
        let mut child = std::process::Command::new(TRUE);
        child
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Waited for on this thread, as posix_spawn and wait are meant.
        child.status()
    })
    .await;
    ensure!(ended?.success(), "{TRUE} failed");
    Ok(took)
}

/// A start and wait of its own, an empty call, and an exec, in turns.
async fn arms(guest: &mut Guest) -> Result<[(&'static str, Arm); 3]> {
    let mut arms = [Arm::new()?, Arm::new()?, Arm::new()?];
    for round in 0..=ROUNDS {
        for which in [0, 1, 2, 2, 1, 0_usize] {
            for _ in 0..TURN {
                let took = match which {
                    0 => bare().await?,
                    1 => {
                        let (took, reply) = timed(guest.agent.info(AgentInfoRequest {})).await;
                        reply?;
                        took
                    }
                    _ => {
                        let (took, done) = timed(guest.exec(&[TRUE], false)).await;
                        done?;
                        took
                    }
                };
                // The first round warms up.
                if round > 0
                    && let Some(arm) = arms.get_mut(which)
                {
                    arm.add(took);
                }
            }
        }
        if round > 0 {
            arms.iter_mut().for_each(Arm::round);
        }
    }
    let [spawn, empty, exec] = arms;
    Ok([("spawn_us", spawn), ("empty_rpc_us", empty), ("exec_us", exec)])
}

/// Exact counts: the most that any Exec had; and a log's wake-up lists.
async fn counts(guest: &mut Guest) -> Result<Vec<(&'static str, Value)>> {
    let (mut rings, mut tasks, mut reads) = (0, 0, 0);
    for _ in 0..TRACED {
        let work = guest
            .exec(&[TRUE], true)
            .await?
            .context("a traced Exec without counts")?;
        rings = rings.max(work.rings_built);
        tasks = tasks.max(work.tasks_spawned);
        reads = reads.max(work.reads);
    }
    // Its own stream is the first that follows its log.
    let first = guest
        .exec_start(ExecStart {
            command: Some(command(&[TRUE])),
            on_disconnect: OnDisconnect::Detach.into(),
            trace: true,
            ..ExecStart::default()
        })
        .await?
        .context("a traced Exec without counts")?;
    Ok(vec![
        ("rings_built_per_exec", json!(rings)),
        ("rings_built_by_first_follower", json!(first.rings_built)),
        ("tasks_spawned_per_exec", json!(tasks)),
        ("reads_per_exec", json!(reads)),
    ])
}

/// Resident memory once a second has passed in which nothing happened.
async fn at_rest(guest: &Guest) -> Result<u64> {
    sleep(Duration::from_secs(1)).await;
    memory_kib(guest.pid()?, "smaps_rollup", "Rss:")
}

/// Memory over programs that nobody waits for.
async fn held(bench: &Bench) -> Result<Vec<(&'static str, Value)>> {
    let mut guest = Guest::start(&bench.bin).await?;
    // What is made once, among it the pages of code that this path runs.
    for _ in 0..TURN {
        guest.spawn(&[TRUE]).await?;
    }
    let before = at_rest(&guest).await?;
    let mut last = 0;
    for _ in 0..SPAWNED {
        last = guest.spawn(&[TRUE]).await?;
    }
    let after = at_rest(&guest).await?;
    while last < u64::try_from(SPAWNED_ALL)? {
        last = guest.spawn(&[TRUE]).await?;
    }
    let all = at_rest(&guest).await?;
    guest.stop().await?;
    let grown = all.saturating_sub(before) * 1024;
    Ok(vec![
        ("detached_rss_kib", json!({ "before": before, "after": after })),
        (
            "detached_10000_rss_kib",
            json!({ "before": before, "after": all, "kept": KEPT }),
        ),
        ("bytes_per_exited_process", json!(grown / u64::try_from(KEPT)?)),
    ])
}

/// An exec beside nothing, and beside as many exited processes as are kept, with all memory of logs taken.
async fn full(bench: &Bench) -> Result<Vec<(&'static str, Value)>> {
    let mut empty = Guest::start(&bench.bin).await?;
    let mut full = Guest::start(&bench.bin).await?;
    for _ in 0..KEPT {
        full.spawn(&["head", "-c", "16300", "/dev/zero"]).await?;
    }
    let info = full.agent.info(AgentInfoRequest {}).await?.into_inner();
    let (mut alone, mut beside) = (Arm::new()?, Arm::new()?);
    for round in 0..=ROUNDS {
        for which in [0, 1, 1, 0] {
            for _ in 0..TURN {
                let guest = if which == 0 { &mut empty } else { &mut full };
                let (took, done) = timed(guest.exec(&[TRUE], false)).await;
                done?;
                if round > 0 {
                    let arm = if which == 0 { &mut alone } else { &mut beside };
                    arm.add(took);
                }
            }
        }
        if round > 0 {
            alone.round();
            beside.round();
        }
    }
    empty.stop().await?;
    full.stop().await?;
    Ok(vec![
        (
            "full_logs",
            json!({ "log_bytes": info.log_bytes, "log_budget": info.log_budget, "kept": KEPT }),
        ),
        ("exec_alone_us", alone.json()),
        ("exec_beside_full_us", beside.json()),
    ])
}

/// What `STREAMED` bytes of `LINE` come to.
fn digest() -> String {
    let mut sha = Sha256::new();
    let block = LINE.repeat(8 * 1024);
    let mut left = STREAMED;
    while left > 0 {
        let take = usize::try_from(left).unwrap_or(usize::MAX).min(block.len());
        sha.update(block.get(..take).unwrap_or_default());
        left -= u64::try_from(take).unwrap_or(left);
    }
    hex(sha)
}

fn hex(sha: Sha256) -> String {
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One long output through silkd, daemon and SDK: whole, and with flat memory on the way.
async fn stream(bench: &Bench) -> Result<Value> {
    let setup = Setup {
        guests: Guests::Silkd,
        sync_always: false,
        doors: None,
    };
    with(bench, setup, async |daemon: &mut Daemon| {
        let stock = Stock::open(daemon.client().await?, 1).await?;
        let (_took, sandbox) = stock.claim().await;
        let sandbox = sandbox?;
        let script = format!("yes sandbox | head -c {STREAMED}");
        let mut output = sandbox.exec(["sh", "-c", &script]).stream().await?;
        let (mut sha, mut bytes) = (Sha256::new(), 0_u64);
        let began = Instant::now();
        while let Some(event) = output.next().await {
            match event? {
                Event::Stdout(data) => {
                    bytes += u64::try_from(data.len())?;
                    sha.update(&data);
                }
                Event::Started { .. } | Event::Stderr(_) | Event::Exit(_) => {}
            }
        }
        let took = began.elapsed();
        ensure!(bytes == STREAMED, "{bytes} bytes came");
        ensure!(hex(sha) == digest(), "other bytes came");
        let agents = guests_of(daemon.pid()?)?;
        let silkd = agents.into_iter().map(|pid| memory_kib(pid, "status", "VmHWM:"));
        let silkd = silkd.collect::<Result<Vec<u64>>>()?.into_iter().max();
        let silkd = silkd.context("no silkd below the daemon")?;
        let sandboxd = memory_kib(daemon.pid()?, "status", "VmHWM:")?;
        sandbox.release().await?;
        let mib = f64::from(u32::try_from(STREAMED >> 20)?);
        Ok(json!({
            "bytes": bytes,
            "digests_are_equal": true,
            "wall_ms": millis(took),
            "mib_per_s": (mib / took.as_secs_f64()).round(),
            "silkd_peak_rss_kib": silkd,
            "sandboxd_peak_rss_kib": sandboxd,
            "both_below_64_mib": silkd < FLAT_KIB && sandboxd < FLAT_KIB,
        }))
    })
    .await
}

/// Agents that a daemon has started as processes.
pub(crate) fn guests_of(daemon: u32) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // It may have ended meanwhile.
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |key: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(key))
                .map(str::trim)
        };
        let ours = field("PPid:").and_then(|pid| pid.parse().ok()) == Some(daemon);
        if ours && field("Name:") == Some("silkd") {
            found.push(pid);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_told_and_no_agent_is_found_where_none_is() {
        let own = std::process::id();
        assert!(memory_kib(own, "smaps_rollup", "Rss:").unwrap() > 100);
        assert!(memory_kib(own, "status", "NoSuch:").is_err());
        assert!(guests_of(own).unwrap().is_empty());
    }
}
