//! Lists the pools, then follows them until all have what they aim at.
//!
//! `cargo run --example pools -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use std::collections::HashMap;

use sandbox_sdk::{Client, v1::pools_watch_reply::Event};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;

    for pool in client.pools().list().await? {
        let name = pool.spec.map(|spec| spec.name).unwrap_or_default();
        println!(
            "{name}: {} of {} warm, {} claimed",
            pool.warm, pool.target, pool.claimed
        );
    }

    let mut short = HashMap::new();
    let mut complete = false;
    let mut watch = client.pools().watch(Vec::new()).await?;
    while let Some(change) = watch.next().await {
        match change?.event {
            Some(Event::Pool(pool)) => {
                let name = pool.spec.map(|spec| spec.name).unwrap_or_default();
                short.insert(name, pool.target.saturating_sub(pool.warm));
            }
            Some(Event::Deleted(name)) => drop(short.remove(&name)),
            Some(Event::Synced(_)) => complete = true,
            None => {}
        }
        if complete && short.values().all(|missing| *missing == 0) {
            println!("all full");
            break;
        }
    }
    Ok(())
}
