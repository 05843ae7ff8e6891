//! `release`, `renew`, `list`, `inspect`, `watch`: sandboxes as rows.

use futures_util::StreamExt as _;
use sandbox_sdk::{
    Client,
    admin::SandboxFilter,
    v1::{State, claims_watch_reply},
};
use serde_json::json;

use crate::{
    Reach,
    args::{Filter, InspectArgs, ListArgs, ReleaseArgs, RenewArgs, WatchArgs},
    fault::Fault,
    human, json,
    print::{self, Out, fields},
    text::{harmless, time},
    within,
};

/// Releases that run at once: ends are slow, and a node has thousands.
const RELEASES: usize = 16;

fn filter(filter: Filter) -> SandboxFilter {
    SandboxFilter {
        states: filter.states.into_iter().map(State::from).collect(),
        pools: filter.pools,
        labels: filter.labels.into_iter().collect(),
        owner: filter.owner,
    }
}

pub(crate) async fn release(reach: &Reach, args: ReleaseArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    within(Some(limit), async {
        let sandboxes = if args.all {
            live(&client).await?
        } else {
            args.sandboxes
        };
        let mut released = futures_util::stream::iter(sandboxes.into_iter().map(|id| {
            let sandbox = client.sandbox(id, None);
            async move { (sandbox.release().await, sandbox.id().to_owned()) }
        }))
        .buffered(RELEASES);
        let mut failed = false;
        while let Some((outcome, id)) = released.next().await {
            match outcome {
                Ok(released) => out.result(
                    || json!({ "sandbox": id, "already": released.already, "recorded": released.recorded }),
                    || {
                        let already = if released.already { " (had ended)" } else { "" };
                        let recorded = if released.recorded { "" } else { " (not recorded)" };
                        format!("{}{already}{recorded}", harmless(&id))
                    },
                )?,
                Err(error) => {
                    failed = true;
                    // The code of it is 1 or 3 by itself; all others are tried all the same.
                    let _code = Fault::from(error).report(out, None);
                }
            }
        }
        if failed { Err(Fault::Told) } else { Ok(()) }
    })
    .await
}

async fn live(client: &Client) -> Result<Vec<String>, Fault> {
    let filter = SandboxFilter {
        states: vec![State::Claimed, State::Failed],
        ..SandboxFilter::default()
    };
    let rows = client.claims().list(&filter).await?;
    Ok(rows.into_iter().map(|row| row.sandbox).collect())
}

pub(crate) async fn renew(reach: &Reach, args: RenewArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let expires = within(Some(limit), async { Ok(sandbox.renew(args.lease).await?) }).await?;
    out.result(
        || json!({ "sandbox": sandbox.id(), "expires_at": time(expires) }),
        || fields(&[("sandbox", sandbox.id().to_owned()), ("expires", time(expires))]),
    )
}

pub(crate) async fn list(reach: &Reach, args: ListArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let filter = filter(args.filter);
    let rows = within(Some(limit), async { Ok(client.claims().list(&filter).await?) }).await?;
    out.result(
        || json!({ "sandboxes": rows.iter().map(json::sandbox).collect::<Vec<_>>() }),
        || human::sandboxes(&rows),
    )
}

pub(crate) async fn inspect(reach: &Reach, args: InspectArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let client = reach.client(Some(limit)).await?;
    let row = within(Some(limit), async {
        Ok(client.sandbox(args.sandbox, None).get().await?)
    })
    .await?;
    out.result(|| json::sandbox(&row), || human::sandbox(&row))
}

pub(crate) async fn watch(reach: &Reach, args: WatchArgs, out: Out) -> Result<(), Fault> {
    use claims_watch_reply::Event;
    let client = reach.client(None).await?;
    let filter = filter(args.filter);
    within(args.limit.timeout, async {
        let mut changes = client.claims().watch(&filter).await?;
        while let Some(change) = changes.next().await {
            match change?.event {
                Some(Event::Sandbox(row)) => out.result(
                    || json!({ "sandbox": json::sandbox(&row) }),
                    || {
                        let cells = human::row(&row).map(|cell| harmless(&cell));
                        cells.join("  ").trim_end().to_owned()
                    },
                )?,
                Some(Event::Synced(_)) => out.result(|| json!({ "synced": true }), String::new)?,
                Some(Event::Lost(lost)) => {
                    out.result(|| json!({ "lost": lost.count }), String::new)?;
                    if !out.json {
                        print::stderr(&format!(
                            "sandboxctl: {} changes were lost; all comes again",
                            lost.count
                        ));
                    }
                }
                // Of a newer daemon.
                None => {}
            }
        }
        Ok(())
    })
    .await
}
