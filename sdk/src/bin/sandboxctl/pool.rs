//! `pool list|apply|rm`.

use std::time::Duration;

use sandbox_sdk::v1;
use serde_json::json;

use crate::{
    Reach,
    args::{self, PoolApplyArgs, PoolVerb},
    fault::Fault,
    human, json,
    print::Out,
    within,
};

fn seconds(flag: &str, duration: Option<Duration>) -> Result<Option<u32>, Fault> {
    let Some(duration) = duration else { return Ok(None) };
    match u32::try_from(duration.as_secs()) {
        Ok(secs) if duration.subsec_nanos() == 0 => Ok(Some(secs)),
        Ok(_) | Err(_) => Err(Fault::Usage(format!("{flag}: whole seconds, at most 30 days"))),
    }
}

pub(crate) async fn verb(reach: &Reach, verb: PoolVerb, out: Out) -> Result<(), Fault> {
    match verb {
        PoolVerb::List(limit) => {
            let limit = limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let pools = within(Some(limit), async { Ok(client.pools().list().await?) }).await?;
            out.result(
                || json!({ "pools": pools.iter().map(json::pool).collect::<Vec<_>>() }),
                || human::pools(&pools),
            )
        }
        PoolVerb::Apply(args) => apply(reach, args, out).await,
        PoolVerb::Rm(args) => {
            let limit = args.limit.or_default();
            let client = reach.client(Some(limit)).await?;
            within(Some(limit), async { Ok(client.pools().delete(args.name).await?) }).await?;
            out.result(|| json!({}), String::new)
        }
    }
}

async fn apply(reach: &Reach, args: PoolApplyArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let spec = v1::PoolSpec {
        name: args.name,
        key: Some(v1::PoolKey {
            template: args.template,
            lane: args::lane(args.lane),
            size: args.size,
        }),
        warm: args.warm,
        warm_max: args.warm_max,
        lease_secs: seconds("--lease", args.lease)?,
        lease_max_secs: seconds("--lease-max", args.lease_max)?,
        egress: args.egress.unwrap_or_default(),
        require_claim_policy: args.require_claim_policy,
    };
    let client = reach.client(Some(limit)).await?;
    let pool = within(Some(limit), async { Ok(client.pools().apply(spec).await?) }).await?;
    out.result(|| json::pool(&pool), || human::pool(&pool))
}
