//! Doors beside other proxies, in one run: the same origin, the same load, each proxy alone on the first core; load and
//! origin on the second.
//!
//! Our door is the production code of `sandboxd::egress` in a process of its own ([`door`]), which listens on loopback
//! where a sandbox's listens on its TAP. The origin lives in a network namespace of the bench ([`world`]).

pub(crate) mod door;
mod load;
mod peers;
pub(crate) mod tls;
pub(crate) mod world;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Map, Value, json};

use self::{
    load::{Speaks, Tunnels},
    peers::{Peer, Running},
    tls::{Certificates, Handshakes},
    world::World,
};
use crate::{
    Bench,
    arm::{Arm, median},
};

/// Rounds; the order of the proxies turns with each.
const ROUNDS: usize = 5;
/// Tunnels dialled one after another, of each proxy in a round: 5,000 in all.
const DIALS: usize = 1_000;
/// TLS handshakes of each kind in a round: 1,000 in all.
const HANDSHAKES: usize = 200;
/// Bytes through one tunnel, and through many together, in a round.
const BYTES: u64 = 1 << 30;
const MANY: u64 = 64;
/// Core of the proxies, and of all else.
const PROXY: usize = 0;
const LOAD: usize = 1;

/// What one proxy did in each round.
struct Seen {
    speaks: Speaks,
    dial: Arm,
    rows: Map<String, Value>,
    requests: Vec<f64>,
    requests_per_cpu: Vec<f64>,
    dials_per_cpu: Vec<f64>,
    one: Vec<f64>,
    one_per_cpu: Vec<f64>,
    many: Vec<f64>,
    many_per_cpu: Vec<f64>,
}

impl Seen {
    fn new(speaks: Speaks) -> Result<Self> {
        Ok(Self {
            speaks,
            dial: Arm::new()?,
            rows: Map::new(),
            requests: Vec::new(),
            requests_per_cpu: Vec::new(),
            dials_per_cpu: Vec::new(),
            one: Vec::new(),
            one_per_cpu: Vec::new(),
            many: Vec::new(),
            many_per_cpu: Vec::new(),
        })
    }

    fn json(self) -> Value {
        let mut row = self.rows;
        row.insert("dial_us".to_owned(), self.dial.json());
        for (name, all) in [
            ("get_per_s", self.requests),
            ("get_per_cpu_s", self.requests_per_cpu),
            ("dials_per_cpu_s", self.dials_per_cpu),
            ("one_tunnel_mib_per_s", self.one),
            ("one_tunnel_mib_per_cpu_s", self.one_per_cpu),
            ("many_tunnels_mib_per_s", self.many),
            ("many_tunnels_mib_per_cpu_s", self.many_per_cpu),
        ] {
            if let Some(value) = median(all) {
                row.insert(name.to_owned(), value.round().into());
            }
        }
        Value::Object(row)
    }
}

/// All rows, by proxy.
pub(crate) async fn run(bench: &Bench) -> Result<Value> {
    let everywhere = sched_getaffinity(None)?;
    let mut one = CpuSet::new();
    one.set(LOAD);
    // The children of the bench begin there too, and are moved.
    sched_setaffinity(None, &one).context("move the bench to one core")?;
    let outcome = Box::pin(pinned(bench)).await;
    sched_setaffinity(None, &everywhere)?;
    outcome
}

async fn pinned(bench: &Bench) -> Result<Value> {
    let dir = tempfile::Builder::new().prefix("sbx-").tempdir()?;
    let certificates = Certificates(dir.path());
    certificates.make().context("make certificates")?;
    let world = Box::pin(World::make(certificates)).await?;
    let outcome = Box::pin(rounds(bench, certificates)).await;
    let removed = world.remove().await;
    let figures = outcome?;
    removed?;
    Ok(figures)
}

async fn rounds(bench: &Bench, certificates: Certificates<'_>) -> Result<Value> {
    let mut seen = Peer::ALL
        .iter()
        .flat_map(|peer| peer.speaks().iter().map(|speaks| (*peer, *speaks)))
        .map(|(peer, speaks)| Ok((peer, Seen::new(speaks)?)))
        .collect::<Result<Vec<_>>>()?;
    let mut denied = Arm::new()?;
    let mut handshakes = Handshakes::new()?;
    for round in 0..ROUNDS {
        if round % 2 == 1 {
            seen.reverse();
        }
        for (peer, seen) in &mut seen {
            bench.say(&format!("round {round}: {} {}", peer.name(), seen.speaks.name()));
            let running = Running::start(*peer, seen.speaks, certificates).await?;
            let measured = Box::pin(measure(&running, seen)).await;
            if *peer == Peer::Door && seen.speaks == Speaks::Http {
                load::denials(&running, 200, &mut denied).await?;
                let shaking = handshakes.measure(&running, certificates, HANDSHAKES);
                Box::pin(shaking).await?;
            }
            running.stop().await?;
            measured.with_context(|| format!("{} {}", peer.name(), seen.speaks.name()))?;
        }
    }
    let mut figures = Map::new();
    for (peer, seen) in seen {
        let name = format!("{}_{}", peer.name(), seen.speaks.name());
        let row = seen.json();
        bench.say(&format!("{name}: {row}"));
        figures.insert(name, row);
    }
    figures.insert("denial_us".to_owned(), denied.json());
    figures.insert("tls".to_owned(), handshakes.json());
    Ok(json!(figures))
}

/// One proxy in one round.
async fn measure(running: &Running, seen: &mut Seen) -> Result<()> {
    if seen.speaks == Speaks::Http {
        let before = running.cpu()?;
        let got = load::gets(running).await?;
        let cpu = running.cpu()?.saturating_sub(before).as_secs_f64();
        seen.requests.push(got.per_second);
        seen.requests_per_cpu.push(got.requests / cpu);
        seen.rows.insert("get_p50_us".to_owned(), got.p50_us.into());
        seen.rows.insert("get_p99_us".to_owned(), got.p99_us.into());
    }
    let before = running.cpu()?;
    load::dials(running, DIALS, &mut seen.dial).await?;
    let cpu = running.cpu()?.saturating_sub(before).as_secs_f64();
    seen.dial.round();
    let dials = f64::from(u32::try_from(DIALS)?);
    seen.dials_per_cpu.push(dials / cpu);
    let mib = f64::from(u32::try_from(BYTES >> 20)?);
    for (tunnels, wall_rates, cpu_rates) in [
        (Tunnels(1), &mut seen.one, &mut seen.one_per_cpu),
        (Tunnels(MANY), &mut seen.many, &mut seen.many_per_cpu),
    ] {
        let before = running.cpu()?;
        let wall = load::bytes(running, tunnels, BYTES).await?;
        let cpu = running.cpu()?.saturating_sub(before).as_secs_f64();
        wall_rates.push(mib / wall.as_secs_f64());
        cpu_rates.push(mib / cpu);
    }
    Ok(())
}
