//! `node info|doctor|reload`.

use sandbox_sdk::v1::Verdict;
use serde_json::json;

use crate::{
    Reach,
    args::NodeVerb,
    fault::Fault,
    human, json,
    print::{Out, fields},
    within,
};

pub(crate) async fn verb(reach: &Reach, verb: NodeVerb, out: Out) -> Result<(), Fault> {
    match verb {
        NodeVerb::Info(limit) => {
            let limit = limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let info = within(Some(limit), async { Ok(client.node().info().await?) }).await?;
            out.result(|| json::node(&info), || human::node(&info))
        }
        NodeVerb::Doctor(limit) => {
            let limit = limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let reply = within(Some(limit), async { Ok(client.node().doctor().await?) }).await?;
            out.result(|| json::doctor(&reply), || human::doctor(&reply))?;
            let failed = reply.checks.iter().any(|check| check.verdict() == Verdict::Fail);
            if failed { Err(Fault::Told) } else { Ok(()) }
        }
        NodeVerb::Reload(limit) => {
            let limit = limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let reply = within(Some(limit), async { Ok(client.node().reload().await?) }).await?;
            out.result(
                || json!({ "changed": reply.changed, "needs_restart": reply.needs_restart }),
                || {
                    let none = || "nothing".to_owned();
                    let list = |keys: &[String]| if keys.is_empty() { none() } else { keys.join(", ") };
                    fields(&[
                        ("changed", list(&reply.changed)),
                        ("needs a restart", reply.needs_restart.join(", ")),
                    ])
                },
            )
        }
    }
}
