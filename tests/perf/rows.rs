//! What else docs/performance.md names of claims: memory, refill, restart, replay.

use std::time::Duration;

use anyhow::{Context as _, Result};
use sandbox_protocol::id::{ClaimId, SandboxId};
use sandbox_sdk::{
    admin::SandboxFilter,
    v1::{State, claims_watch_reply::Event},
};
use sandboxd::{
    clock::{Clock, Tick, WallTime},
    journal::{ClaimFacts, Transition, history},
    words::Tier,
};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    Bench,
    arm::{Arm, median, millis},
    claim::execs,
    daemon::{Daemon, Guests, Setup, with},
    host,
    stock::Stock,
};

/// How long an idle daemon is looked at.
const IDLE: Duration = Duration::from_secs(5);
/// Claims that a restarted daemon takes up.
const RESTARTED: usize = 1_000;
/// Records that are replayed.
const REPLAYED: u32 = 100_000;
/// Times that a pool is filled.
const FULL: usize = 3;
/// Repetitions of what is one number each.
const TIMES: usize = 5;

const fn plain(guests: Guests) -> Setup {
    Setup {
        guests,
        sync_always: false,
        doors: None,
    }
}

/// Memory of the daemon by its live claims, and what it does while nothing is due: leases are not looked through.
pub(crate) async fn memory(bench: &Bench, figures: &mut Map<String, Value>, live: usize) -> Result<()> {
    let row = with(bench, plain(Guests::InProcess), async |daemon: &mut Daemon| {
        let client = daemon.client().await?;
        client.node().ping().await?;
        let empty = daemon.rss_kib()?;
        let mut stock = Stock::open(client, 500).await?;
        let mut kept = Vec::new();
        let mut unmeasured = Arm::new()?;
        // Nothing is in stock at the end, so that what is counted are claims.
        while kept.len() < live {
            stock.fill().await?;
            stock.aim(0).await?;
            kept.extend(
                stock
                    .take(stock.batch().min(live - kept.len()), 64, &mut unmeasured)
                    .await?,
            );
        }
        let full = daemon.rss_kib()?;
        let before = daemon.cpu()?;
        sleep(IDLE).await;
        let idle = daemon.cpu()?.saturating_sub(before);
        drop(
            kept.into_iter()
                .map(sandbox_sdk::Sandbox::keep)
                .collect::<Vec<_>>(),
        );
        let claims = f64::from(u32::try_from(live)?);
        let grown = f64::from(u32::try_from(full.saturating_sub(empty))?);
        let budget = 16.0 * 1024.0 + 6.0 * claims;
        anyhow::Ok(json!({
            "rss_empty_kib": empty,
            "rss_kib": full,
            "live": live,
            "kib_per_claim": (grown / claims * 100.0).round() / 100.0,
            "budget_kib": budget,
            "idle_cpu_ms_in_5_s": millis(idle),
        }))
    })
    .await
    .context("memory")?;
    bench.say(&format!("memory: {row}"));
    figures.insert("memory".to_owned(), row);
    Ok(())
}

/// From an empty pool to a full one, beside one clone alone.
pub(crate) async fn refill(
    bench: &Bench,
    figures: &mut Map<String, Value>,
    guests: Guests,
    size: u32,
) -> Result<()> {
    let row = with(bench, plain(guests), async |daemon: &mut Daemon| {
        let client = daemon.client().await?;
        // The template is made first.
        let mut stock = Stock::open(client, 1).await?;
        let mut single = Vec::new();
        let mut full = Vec::new();
        let (mut single_busy, mut full_busy) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..TIMES {
            empty(&mut stock, 1).await?;
            let before = host::busy()?;
            single.push(millis(warmed(&stock, 1).await?));
            single_busy += host::busy()?.saturating_sub(before);
        }
        for _ in 0..FULL {
            empty(&mut stock, 1).await?;
            let before = host::busy()?;
            full.push(millis(warmed(&stock, size).await?));
            full_busy += host::busy()?.saturating_sub(before);
            // Taken and not waited for: a surplus leaves the stock after a minute only.
            empty(&mut stock, size).await?;
            stock.fill().await?;
        }
        let (one, all) = (median(single).context("none")?, median(full).context("none")?);
        let in_flight = f64::from(u32::try_from(std::thread::available_parallelism()?.get())?);
        let bound = f64::from(size) * one / in_flight;
        // Of the whole host, which rests otherwise: what the clones cost, however many are in flight.
        let busy_one = millis(single_busy) / f64::from(u32::try_from(TIMES)?);
        let busy_each = millis(full_busy) / f64::from(u32::try_from(FULL)?) / f64::from(size);
        anyhow::Ok(json!({
            "clones": size,
            "clones_in_flight": in_flight,
            "one_clone_ms": one,
            "wall_ms": all,
            "one_clone_cpu_ms": (busy_one * 10.0).round() / 10.0,
            "cpu_ms_of_each": (busy_each * 10.0).round() / 10.0,
            "cores_busy": (busy_each * f64::from(size) / all * 100.0).round() / 100.0,
            "ratio": (all / bound * 100.0).round() / 100.0,
        }))
    })
    .await
    .context("refill")?;
    bench.say(&format!("refill: {row}"));
    figures.insert("refill".to_owned(), row);
    Ok(())
}

/// Takes out what is in stock, and lets nothing new in.
async fn empty(stock: &mut Stock, warm: u32) -> Result<()> {
    stock.aim(0).await?;
    let mut unmeasured = Arm::new()?;
    let taken = stock.take(usize::try_from(warm)?, 1, &mut unmeasured).await?;
    crate::stock::release(taken).await
}

/// Wants a stock of this size and waits until so many are warm.
async fn warmed(stock: &Stock, size: u32) -> Result<Duration> {
    let filter = SandboxFilter {
        states: vec![State::Warm],
        ..SandboxFilter::default()
    };
    let mut changes = stock.client.claims().watch(&filter).await?;
    loop {
        let change = changes.next().await.context("the daemon ended the watch")??;
        if matches!(change.event, Some(Event::Synced(_))) {
            break;
        }
    }
    let began = Instant::now();
    stock.aim(size).await?;
    let mut warm = std::collections::HashSet::new();
    while warm.len() < usize::try_from(size)? {
        let change = changes.next().await.context("the daemon ended the watch")??;
        match change.event {
            Some(Event::Sandbox(row)) if row.state() == State::Warm => {
                warm.insert(row.sandbox);
            }
            Some(Event::Sandbox(_) | Event::Synced(_) | Event::Lost(_)) | None => {}
        }
    }
    Ok(began.elapsed())
}

/// A daemon that is killed beside its claims, each a silkd process, and `true` run in one of those.
pub(crate) async fn restart(bench: &Bench, figures: &mut Map<String, Value>) -> Result<()> {
    let (exec, row) = with(bench, plain(Guests::Silkd), async |daemon: &mut Daemon| {
        let mut stock = Stock::open(daemon.client().await?, 250).await?;
        let exec = Box::pin(execs(&mut stock, 170, 3)).await?;
        let mut kept = Vec::new();
        stock.level(&mut kept, RESTARTED).await?;
        stock.aim(0).await?;
        let mut walls = Vec::new();
        for _ in 0..TIMES {
            walls.push(millis(daemon.crash().await?));
        }
        let first = kept.first().context("nothing was kept")?;
        anyhow::ensure!(
            first.exec(["true"]).output().await?.status.success(),
            "a claim did not survive"
        );
        let client = daemon.client().await?;
        let rows = client
            .claims()
            .list(&SandboxFilter {
                states: vec![State::Claimed],
                ..SandboxFilter::default()
            })
            .await?;
        anyhow::ensure!(rows.len() == RESTARTED, "{} claims after the restart", rows.len());
        drop(
            kept.into_iter()
                .map(sandbox_sdk::Sandbox::keep)
                .collect::<Vec<_>>(),
        );
        anyhow::Ok((
            exec,
            json!({ "live": RESTARTED, "ready_ms": median(walls.clone()), "each_ms": walls }),
        ))
    })
    .await
    .context("restart")?;
    bench.say(&format!("exec_true: {exec}\nrestart: {row}"));
    figures.insert("exec_true".to_owned(), exec);
    figures.insert("restart".to_owned(), row);
    Ok(())
}

/// A log that no daemon has folded, replayed.
pub(crate) async fn replay(bench: &Bench) -> Result<Value> {
    let out = bench.out.clone();
    let walls = tokio::task::spawn_blocking(move || {
        let dir = tempfile::Builder::new().prefix("state-").tempdir_in(out)?;
        let written = history::write(dir.path(), &Clock::host(), records())?;
        let mut walls = Vec::new();
        for _ in 0..TIMES {
            let began = Instant::now();
            let (_state, replayed) = history::fold_all(dir.path())?;
            walls.push(millis(began.elapsed()));
            anyhow::ensure!(
                replayed == written,
                "{replayed} of {written} records were replayed"
            );
        }
        anyhow::Ok(walls)
    })
    .await??;
    let row = json!({ "records": REPLAYED, "wall_ms": median(walls.clone()), "each_ms": walls });
    bench.say(&format!("journal_replay: {row}"));
    Ok(row)
}

/// Lives of sandboxes from making to gone, five records each.
fn records() -> impl Iterator<Item = (Option<SandboxId>, Transition)> {
    let key = sandboxd::words::PoolKey {
        template: "default".parse().expect("it is a name"),
        lane: sandboxd::words::Lane::None,
        size: "small".parse().expect("it is a name"),
    };
    (0..REPLAYED).map(move |n| {
        let bits = u128::from(n / 5).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let at = WallTime::from_micros(1_700_000_000_000_000 + u64::from(n));
        let transition = match n % 5 {
            0 => Transition::Making {
                slot: sandboxd::names::SlotNumber(u16::try_from(n / 5 % 4096).unwrap_or(0)),
                tap: None,
                key: key.clone(),
                pool: Some(key.template.clone()),
                tier: Tier::Warm,
                engine: sandboxd::words::EngineKind::Stub,
                accel: sandboxd::words::Accel::None,
                template_digest: "0".repeat(64),
                created_at: at,
            },
            1 => Transition::Warmed {
                pid: Some(n),
                started: u64::from(n),
                generation: 1,
                proto: 1,
                agent_version: "0.1.0".to_owned(),
            },
            2 => Transition::Claimed(Box::new(ClaimFacts {
                claim: ClaimId::from_random(bits.to_be_bytes()),
                owner: "operator".to_owned(),
                token_sha256: "0".repeat(64),
                lease_secs: 3600,
                expires_tick: Tick::from_nanos(1 << 50),
                expires_at: at,
                claimed_at: at,
                pool: Some(key.template.clone()),
                tier: Tier::Warm,
                labels: [("job".to_owned(), n.to_string())].into(),
                egress: None,
                request_key: Some(format!("sdk-{bits:032x}")),
                request_digest: Some("0".repeat(64)),
                unknown: Map::new().into_iter().collect(),
            })),
            3 => Transition::Ending {
                why: "released".to_owned(),
            },
            _ => Transition::Gone,
        };
        (Some(SandboxId::from_random(bits.to_be_bytes())), transition)
    })
}
