//! `claim`.

use std::{ffi::OsString, os::unix::ffi::OsStringExt as _, time::Duration};

use sandbox_sdk::{ClaimBuilder, Client, Sandbox, v1};

use crate::{
    Reach,
    args::{self, ClaimArgs, Wanted},
    egress,
    fault::Fault,
    human, json,
    print::{Out, fields},
    text::{time, word},
    within,
};

/// Pool of those who name none.
const POOL: &str = "default";

/// `K=V`, as bytes.
pub(crate) fn variable(text: OsString) -> Result<(Vec<u8>, Vec<u8>), Fault> {
    let mut key = text.into_vec();
    let Some(at) = key.iter().position(|byte| *byte == b'=') else {
        return Err(Fault::Usage("--env: expected K=V".to_owned()));
    };
    let value = key.split_off(at);
    Ok((key, value.into_iter().skip(1).collect()))
}

pub(crate) fn builder(client: &Client, wanted: Wanted) -> ClaimBuilder {
    let mut claim = match wanted.template {
        Some(template) => client.claim_key(v1::PoolKey {
            template,
            lane: args::lane(wanted.lane),
            size: wanted.size.unwrap_or_default(),
        }),
        None => client.claim(wanted.pool.unwrap_or_else(|| POOL.to_owned())),
    };
    if let Some(lease) = wanted.lease {
        claim = claim.lease(lease);
    }
    if let Some(key) = wanted.key {
        claim = claim.request_key(key);
    }
    if let Some(wait) = wanted.wait {
        claim = claim.wait(wait);
    }
    if wanted.warm_only {
        claim = claim.warm_only();
    }
    claim.labels(wanted.labels.into_iter().collect())
}

/// Time of the verb; unless it was set, the time in line comes on top.
pub(crate) fn limit(args: &ClaimArgs) -> Duration {
    let wait = args.wanted.wait.unwrap_or_default();
    args.limit.timeout.unwrap_or(crate::TIMEOUT.saturating_add(wait))
}

/// Claims as the arguments say.
pub(crate) async fn make(client: &Client, args: ClaimArgs) -> Result<Sandbox, Fault> {
    let limit = limit(&args);
    let mut claim = builder(client, args.wanted).timeout(limit);
    for text in args.env {
        let (key, value) = variable(text)?;
        claim = claim.env(key, value);
    }
    if let Some(user) = args.user {
        claim = claim.user(user.into_vec());
    }
    if let Some(path) = &args.egress {
        claim = claim.egress(egress::read(path)?);
    }
    if args.trace {
        claim = claim.trace();
    }
    Ok(claim.await?)
}

pub(crate) async fn claim(reach: &Reach, args: ClaimArgs, out: Out) -> Result<(), Fault> {
    let limit = limit(&args);
    let client = reach.client(Some(limit)).await?;
    let sandbox = within(Some(limit), make(&client, args)).await?;
    let printed = out.result(|| json::claimed(&sandbox), || shown(&sandbox));
    // What nobody has read the id of, nobody can use: then the drop gives it back.
    match printed {
        Ok(()) => drop(sandbox.keep()),
        Err(_) => drop(sandbox),
    }
    client.flush().await;
    printed
}

fn shown(sandbox: &Sandbox) -> String {
    let rows = fields(&[
        ("sandbox", sandbox.id().to_owned()),
        (
            "token",
            sandbox
                .token()
                .map(|token| token.expose().to_owned())
                .unwrap_or_default(),
        ),
        ("tier", word(sandbox.tier().as_str_name()).unwrap_or_default()),
        ("pool", sandbox.pool().to_owned()),
        ("expires", sandbox.expires_at().map(time).unwrap_or_default()),
        ("engine", word(sandbox.engine().as_str_name()).unwrap_or_default()),
        ("accel", word(sandbox.accel().as_str_name()).unwrap_or_default()),
    ]);
    match sandbox.work() {
        Some(work) => format!("{rows}\n{}", human::work(work)),
        None => rows,
    }
}
