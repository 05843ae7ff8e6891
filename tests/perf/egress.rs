//! `egress`: what doors cost a claim, and what they do beside other proxies.

use anyhow::{Context as _, Result};
use sandbox_sdk::{Client, v1::Lane};
use serde_json::{Map, Value, json};

use crate::{
    Bench,
    arm::Arm,
    claim::counts_of,
    daemon::{Daemon, Doors, Guests, Setup, with},
    host, proxies,
    stock::{Stock, Terms, release},
};

/// Claims of an arm at a stretch.
const BLOCK: u32 = 100;
/// Rounds of A B C C B A: 10,200 claims of each arm.
const ROUNDS: usize = 51;
/// Rules of the policy.
const RULES: u16 = 50;
/// Slots of lane guarded: a block, and those of the last one on their way back.
const SLOTS: u16 = 300;

/// Pools that differ only so.
const ARMS: [Terms; 3] = [
    Terms {
        name: "none",
        lane: Lane::None,
        egress: "",
    },
    Terms {
        name: "both-doors",
        lane: Lane::None,
        egress: "bench",
    },
    Terms {
        name: "guarded",
        lane: Lane::Guarded,
        egress: "bench",
    },
];

pub(crate) async fn run(bench: &Bench) -> Result<Value> {
    let before = host::load();
    let doors = Box::pin(proxies::run(bench))
        .await
        .context("doors beside other proxies")?;
    let claims = Box::pin(claims(bench)).await.context("claims");
    // Its namespace outlives a daemon, and is nobody's when the bench is over.
    sandboxd::net::purge(&Doors::namespace().parse()?).context("purge the bench's network namespace")?;
    let claims = claims?;
    Ok(json!({
        "bench": "egress",
        "host": host::describe(&bench.out).await?,
        "load": { "before": before, "after": host::load() },
        "stop_line": "the reply in the calling process",
        "engine": "stub",
        "accel": "none",
        "sync": "auto",
        "rounds": ROUNDS,
        "rules": RULES,
        "arms": claims,
        "doors": doors,
    }))
}

/// Warm claims without a policy, with both doors armed by one, and on lane guarded: each guest is a silkd process, and each
/// door is bound.
async fn claims(bench: &Bench) -> Result<Value> {
    let setup = Setup {
        guests: Guests::Silkd,
        sync_always: false,
        doors: Some(Doors {
            rules: RULES,
            slots: SLOTS,
        }),
    };
    with(bench, setup, async |daemon: &mut Daemon| {
        // One connection for all: what differs is the pool alone.
        let client = daemon.client().await?;
        let mut stocks = Vec::new();
        for terms in ARMS {
            let stock = Stock::of(Client::clone(&client), BLOCK, terms).await?;
            stocks.push((terms.name, stock, Arm::new()?));
        }
        // The first round warms up.
        for round in 0..=ROUNDS {
            for which in [0, 1, 2, 2, 1, 0] {
                for (_name, stock, _arm) in &mut stocks {
                    stock.fill().await?;
                }
                for (_name, stock, _arm) in &stocks {
                    stock.aim(0).await?;
                }
                let (_name, stock, arm) = stocks.get_mut(which).context("three arms")?;
                let mut unmeasured = Arm::new()?;
                let arm = if round == 0 { &mut unmeasured } else { arm };
                let taken = stock.take(usize::try_from(BLOCK)?, 1, arm).await?;
                release(taken).await?;
            }
            bench.say(&format!("claims: round {round} of {ROUNDS}"));
            if round > 0 {
                stocks.iter_mut().for_each(|(_name, _stock, arm)| arm.round());
            }
        }
        let mut figures = Map::new();
        for (name, mut stock, arm) in stocks {
            let counts = counts_of(&mut stock).await?;
            let row = json!({ "claim_us": arm.json(), "counts": counts });
            bench.say(&format!("{name}: {row}"));
            figures.insert(name.replace('-', "_"), row);
        }
        anyhow::Ok(Value::Object(figures))
    })
    .await
}
