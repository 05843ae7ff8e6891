//! `claim`: what a warm claim costs beside a call that does nothing.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use sandbox_sdk::v1::Work;
use serde_json::{Map, Value, json};

use crate::{
    Bench,
    arm::{Arm, median, timed},
    daemon::{Daemon, Guests, Setup, with},
    host, rows,
    stock::{Stock, release},
};

/// Rounds of A B B A.
const ROUNDS: usize = 3;
/// Calls of an arm in one of its two turns of a round, on the stub engine: 12,288 in all.
const TURN: usize = 2_048;
/// The same on real VMs: 216 in all.
const VM_TURN: usize = 36;
/// Warm VMs; each takes 256 MiB of the budget.
const VM_STOCK: u32 = 12;
/// Calls under way at once, where there are many.
const MANY: usize = 64;
/// Claims that live beside the measured ones, where there are many.
const LIVE: usize = 10_000;
/// Claims whose work is counted.
const TRACED: usize = 100;

/// Both runs, and what they ran on.
pub(crate) async fn run(bench: &Bench) -> Result<Value> {
    let before = host::load();
    let mut runs = vec![stub(bench).await.context("stub engine")?];
    if bench.vms {
        runs.push(vms(bench).await.context("virtual machines")?);
    }
    let replay = rows::replay(bench).await?;
    Ok(json!({
        "bench": "claim",
        "host": host::describe(&bench.out).await?,
        "load": { "before": before, "after": host::load() },
        "stop_line": "the reply in the calling process",
        "rounds": ROUNDS,
        "runs": runs,
        "journal_replay": replay,
    }))
}

/// A run's figures by name, as they come.
struct Figures<'a> {
    bench: &'a Bench,
    map: Map<String, Value>,
}

impl Figures<'_> {
    fn put(&mut self, name: &str, value: Value) {
        self.bench.say(&format!("{name}: {value}"));
        self.map.insert(name.to_owned(), value);
    }
}

async fn stub(bench: &Bench) -> Result<Value> {
    let setup = Setup {
        guests: Guests::InProcess,
        sync_always: false,
        doors: None,
    };
    let mut figures = Figures {
        bench,
        map: Map::new(),
    };
    figures.put("sync", json!("auto; the claim_sync and synced figures: always"));
    with(bench, setup, async |daemon: &mut Daemon| {
        let mut stock = Stock::open(daemon.client().await?, u32::try_from(TURN)?).await?;
        about(&mut figures, &stock).await?;
        warm_up(&mut stock, TURN / 4).await?;
        pair(&mut figures, &mut stock, TURN, 1, ["empty_rpc_us", "claim_us"]).await?;
        pair(
            &mut figures,
            &mut stock,
            TURN,
            MANY,
            ["c64_empty_rpc_us", "c64_claim_us"],
        )
        .await?;
        while_refilling(&mut figures, &mut stock).await?;
        let with_one = counted(&mut figures, &mut stock, "counts").await?;
        let with_many = live(&mut figures, &mut stock).await?;
        figures.put(
            "counts_are_equal_at_1_and_10000_live",
            json!(with_one == with_many),
        );
        anyhow::Ok(())
    })
    .await?;
    synced(&mut figures).await?;
    rows::memory(bench, &mut figures.map, LIVE).await?;
    rows::refill(bench, &mut figures.map, Guests::InProcess, 1_024).await?;
    rows::restart(bench, &mut figures.map).await?;
    Ok(Value::Object(figures.map))
}

async fn vms(bench: &Bench) -> Result<Value> {
    let setup = Setup {
        guests: Guests::Vm,
        sync_always: false,
        doors: None,
    };
    let mut figures = Figures {
        bench,
        map: Map::new(),
    };
    figures.put("sync", json!("auto"));
    with(bench, setup, async |daemon: &mut Daemon| {
        let mut stock = Stock::open(daemon.client().await?, VM_STOCK).await?;
        about(&mut figures, &stock).await?;
        warm_up(&mut stock, 12).await?;
        pair(&mut figures, &mut stock, VM_TURN, 1, ["empty_rpc_us", "claim_us"]).await?;
        counted(&mut figures, &mut stock, "counts").await?;
        let exec = Box::pin(execs(&mut stock, VM_TURN, ROUNDS)).await?;
        figures.put("exec_true", exec);
        anyhow::Ok(())
    })
    .await?;
    rows::refill(bench, &mut figures.map, Guests::Vm, VM_STOCK).await?;
    for name in [
        "claim_sync_us",
        "c64_empty_rpc_us",
        "c64_claim_us",
        "live_1_us",
        "live_10000_us",
        "unsynced_per_s",
        "synced_per_s",
    ] {
        figures.map.insert(name.to_owned(), Value::Null);
    }
    Ok(Value::Object(figures.map))
}

/// What runs the guests, as the daemon says it.
async fn about(figures: &mut Figures<'_>, stock: &Stock) -> Result<()> {
    let info = stock.client.node().info().await?;
    let word = |name: &str, prefix: &str| name.trim_start_matches(prefix).to_lowercase();
    figures.put("engine", json!(word(info.engine().as_str_name(), "ENGINE_")));
    figures.put("accel", json!(word(info.accel().as_str_name(), "ACCEL_")));
    Ok(())
}

async fn warm_up(stock: &mut Stock, n: usize) -> Result<()> {
    let mut unmeasured = Arm::new()?;
    stock.empty(n, 1, &mut unmeasured).await?;
    stock.claims(n, 1, &mut unmeasured).await?;
    Ok(())
}

/// Empty calls and claims, A B B A, on one connection.
async fn pair(
    figures: &mut Figures<'_>,
    stock: &mut Stock,
    turn: usize,
    at_once: usize,
    names: [&str; 2],
) -> Result<()> {
    let (mut empty, mut claim) = (Arm::new()?, Arm::new()?);
    for _ in 0..ROUNDS {
        stock.empty(turn, at_once, &mut empty).await?;
        stock.claims(turn, at_once, &mut claim).await?;
        stock.claims(turn, at_once, &mut claim).await?;
        stock.empty(turn, at_once, &mut empty).await?;
        empty.round();
        claim.round();
    }
    if at_once == 1 {
        figures.put("n", json!(claim.len()));
    }
    let [empty_name, claim_name] = names;
    figures.put(empty_name, empty.json());
    figures.put(claim_name, claim.json());
    Ok(())
}

/// Claims beside which the stock is refilled, as in daily use: the processors are shared with refill then.
async fn while_refilling(figures: &mut Figures<'_>, stock: &mut Stock) -> Result<()> {
    let mut claim = Arm::new()?;
    for _ in 0..ROUNDS {
        stock.claims_while_refilling(TURN, &mut claim).await?;
        stock.claims_while_refilling(TURN, &mut claim).await?;
        claim.round();
    }
    figures.put("claim_while_refilling_us", claim.json());
    Ok(())
}

fn kinds(work: &Work) -> [(&'static str, u64); 9] {
    [
        ("journal_records", work.journal_records),
        ("journal_bytes", work.journal_bytes),
        ("writes", work.writes),
        ("syncs", work.syncs),
        ("netlink_messages", work.netlink_messages),
        ("binds", work.binds),
        ("qmp_commands", work.qmp_commands),
        ("guest_round_trips", work.guest_round_trips),
        ("tasks_spawned", work.tasks_spawned),
    ]
}

/// Exact counts of claims, one at a time: the most of each kind that any of them had.
pub(crate) async fn counts_of(stock: &mut Stock) -> Result<Value> {
    let mut most: BTreeMap<&str, u64> = BTreeMap::new();
    let mut left = TRACED;
    while left > 0 {
        stock.fill().await?;
        stock.aim(0).await?;
        let batch = left.min(stock.batch());
        let mut taken = Vec::with_capacity(batch);
        for _ in 0..batch {
            let sandbox = stock.traced().await?;
            for (kind, count) in kinds(sandbox.work().context("a traced claim without counts")?) {
                let most = most.entry(kind).or_default();
                *most = count.max(*most);
            }
            taken.push(sandbox);
        }
        release(taken).await?;
        left -= batch;
    }
    Ok(json!(most))
}

async fn counted(figures: &mut Figures<'_>, stock: &mut Stock, name: &str) -> Result<Value> {
    let counts = counts_of(stock).await?;
    figures.put(name, counts.clone());
    Ok(counts)
}

/// One claim lives, or ten thousand do; gives the counts with many.
async fn live(figures: &mut Figures<'_>, stock: &mut Stock) -> Result<Value> {
    let (mut one, mut many) = (Arm::new()?, Arm::new()?);
    let mut kept = Vec::new();
    for _ in 0..ROUNDS {
        stock.level(&mut kept, 1).await?;
        stock.claims(TURN, 1, &mut one).await?;
        stock.level(&mut kept, LIVE).await?;
        stock.claims(TURN, 1, &mut many).await?;
        stock.claims(TURN, 1, &mut many).await?;
        stock.level(&mut kept, 1).await?;
        stock.claims(TURN, 1, &mut one).await?;
        one.round();
        many.round();
    }
    figures.put("live_1_us", one.json());
    figures.put("live_10000_us", many.json());
    stock.level(&mut kept, LIVE).await?;
    let counts = counted(figures, stock, "counts_at_10000_live").await?;
    stock.level(&mut kept, 0).await?;
    Ok(counts)
}

/// Two daemons on one disk, of which one syncs every record before its answer.
async fn synced(figures: &mut Figures<'_>) -> Result<()> {
    let bench = figures.bench;
    let setup = |sync_always| Setup {
        guests: Guests::InProcess,
        sync_always,
        doors: None,
    };
    figures.put("fdatasync_us", host::fdatasync(&bench.out).await?);
    let size = u32::try_from(TURN)?;
    with(bench, setup(false), async |plain: &mut Daemon| {
        let mut plain = Stock::open(plain.client().await?, size).await?;
        with(bench, setup(true), async |careful: &mut Daemon| {
            let mut careful = Stock::open(careful.client().await?, size).await?;
            warm_up(&mut plain, TURN / 4).await?;
            warm_up(&mut careful, TURN / 4).await?;
            pair(
                figures,
                &mut careful,
                TURN,
                1,
                ["sync_empty_rpc_us", "claim_sync_us"],
            )
            .await?;
            rates(figures, &mut plain, &mut careful).await?;
            counted(figures, &mut careful, "counts_sync").await?;
            anyhow::Ok(())
        })
        .await
    })
    .await
}

/// Claims per second with many at once: A B B A, the median of the turns.
async fn rates(figures: &mut Figures<'_>, plain: &mut Stock, careful: &mut Stock) -> Result<()> {
    let (mut unsynced, mut synced) = (Vec::new(), Vec::new());
    let (mut unsynced_arm, mut synced_arm) = (Arm::new()?, Arm::new()?);
    for _ in 0..ROUNDS {
        unsynced.push(plain.claims(TURN, MANY, &mut unsynced_arm).await?);
        synced.push(careful.claims(TURN, MANY, &mut synced_arm).await?);
        synced.push(careful.claims(TURN, MANY, &mut synced_arm).await?);
        unsynced.push(plain.claims(TURN, MANY, &mut unsynced_arm).await?);
        unsynced_arm.round();
        synced_arm.round();
    }
    figures.put("unsynced_per_s", json!(per_second(unsynced)?));
    figures.put("synced_per_s", json!(per_second(synced)?));
    figures.put("c64_claim_sync_us", synced_arm.json());
    Ok(())
}

fn per_second(turns: Vec<Duration>) -> Result<f64> {
    let calls = f64::from(u32::try_from(TURN)?);
    let rates = turns.into_iter().map(|wall| calls / wall.as_secs_f64()).collect();
    median(rates).map(f64::round).context("no turns")
}

/// Runs `true` in a claimed sandbox beside empty calls, A B B A, on one connection.
pub(crate) async fn execs(stock: &mut Stock, turn: usize, rounds: usize) -> Result<Value> {
    let (_took, sandbox) = stock.claim().await;
    let sandbox = sandbox?;
    let (mut empty, mut exec) = (Arm::new()?, Arm::new()?);
    for _ in 0..rounds {
        stock.empty(turn, 1, &mut empty).await?;
        for _ in 0..2 * turn {
            let (took, done) = timed(sandbox.exec(["true"]).output()).await;
            anyhow::ensure!(done?.status.success(), "`true` failed in the sandbox");
            exec.add(took);
        }
        stock.empty(turn, 1, &mut empty).await?;
        empty.round();
        exec.round();
    }
    sandbox.release().await?;
    Ok(json!({ "empty_rpc_us": empty.json(), "exec_us": exec.json() }))
}
