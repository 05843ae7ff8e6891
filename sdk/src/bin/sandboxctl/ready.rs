//! `wait-ready`: waits for the daemon to appear, then for a pool's stock, told by the daemon.

use std::{fmt::Write as _, time::Duration};

use sandbox_sdk::{Client, Error, ErrorKind, Origin, v1::pools_watch_reply::Event};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    Reach,
    args::ReadyArgs,
    fault::Fault,
    print::{Out, Progress},
};

/// Pauses between attempts to connect: a socket that appears says nothing to those who wait for it.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest of them.
const LAST_PAUSE: Duration = Duration::from_millis(250);

/// What was seen last, for whoever waited in vain.
#[derive(Debug, Default)]
struct Last {
    connected: bool,
    warm: Option<u32>,
    parked: Option<String>,
    trouble: Option<String>,
}

pub(crate) async fn wait(reach: &Reach, args: ReadyArgs, out: Out) -> Result<(), Fault> {
    let deadline = Instant::now()
        .checked_add(args.limit.or_default())
        .ok_or_else(|| Fault::Usage("--timeout: too long".to_owned()))?;
    let progress = Progress::start(out, "waiting for the daemon");
    let mut last = Last::default();
    let waited = timeout_at(deadline, Box::pin(until(reach, &args, &progress, &mut last))).await;
    drop(progress);
    match waited {
        Ok(warm) => {
            let warm = warm?;
            out.result(
                || json!({ "pool": args.pool, "warm": warm }),
                || format!("pool {}: {warm} warm", args.pool),
            )
        }
        Err(_elapsed) => Err(Fault::TimeOver(in_vain(&args, &last))),
    }
}

fn in_vain(args: &ReadyArgs, last: &Last) -> String {
    let mut text = match (last.connected, last.warm) {
        (false, _) => "no daemon appeared".to_owned(),
        (true, None) => format!("the daemon has no pool {}", args.pool),
        (true, Some(warm)) => format!("pool {} has {warm} of {} warm", args.pool, args.warm),
    };
    for more in [&last.parked, &last.trouble].into_iter().flatten() {
        // Writing to a String does not fail.
        write!(text, "; {more}").ok();
    }
    text
}

/// Whether the daemon may yet come, or come back.
fn passing(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Unreachable | ErrorKind::Broken | ErrorKind::TimedOut | ErrorKind::Unfinished => true,
        ErrorKind::Refused => error.origin() == Origin::Host && error.retry_after().is_some(),
        // With the kinds of a later SDK.
        ErrorKind::Invalid | _ => false,
    }
}

async fn until(reach: &Reach, args: &ReadyArgs, progress: &Progress, last: &mut Last) -> Result<u32, Fault> {
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match reach.client(None).await {
            Ok(client) => {
                last.connected = true;
                pause = FIRST_PAUSE;
                match stock(&client, args, progress, last).await {
                    Ok(Some(warm)) => return Ok(warm),
                    Ok(None) => None,
                    Err(error) => Some(error),
                }
            }
            Err(Fault::Sdk(error)) => Some(error),
            Err(fault) => return Err(fault),
        };
        if let Some(error) = error {
            if !passing(&error) {
                return Err(error.into());
            }
            last.trouble = Some(error.to_string());
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Reads the daemon's word until the stock is there; nothing if the daemon ended the stream.
async fn stock(
    client: &Client,
    args: &ReadyArgs,
    progress: &Progress,
    last: &mut Last,
) -> Result<Option<u32>, Error> {
    // All pools: one that is not there yet may come.
    let mut changes = client.pools().watch(Vec::new()).await?;
    last.trouble = None;
    while let Some(change) = changes.next().await {
        match change?.event {
            Some(Event::Pool(pool)) if pool.spec.as_ref().is_some_and(|spec| spec.name == args.pool) => {
                if pool.warm >= args.warm {
                    return Ok(Some(pool.warm));
                }
                last.warm = Some(pool.warm);
                last.parked = pool
                    .parked
                    .map(|parked| format!("its refill is parked: {} {}", parked.reason, parked.message));
                progress.say(&format!(
                    "pool {}: {} of {} warm",
                    args.pool, pool.warm, args.warm
                ));
            }
            Some(Event::Deleted(name)) if name == args.pool => last.warm = None,
            Some(Event::Pool(_) | Event::Deleted(_) | Event::Synced(_)) | None => {}
        }
    }
    Ok(None)
}
