//! `trace claim|exec`: the exact work of one operation.

use serde_json::json;

use crate::{
    Reach,
    args::{ClaimArgs, ExecArgs, TraceVerb},
    claim, exec,
    fault::Fault,
    human, json,
    print::Out,
    text::word,
    within,
};

pub(crate) async fn verb(reach: &Reach, verb: TraceVerb, out: Out) -> Result<(), Fault> {
    match verb {
        TraceVerb::Claim(args) => trace_claim(reach, args, out).await,
        TraceVerb::Exec(args) => trace_exec(reach, args, out).await,
    }
}

async fn trace_claim(reach: &Reach, mut args: ClaimArgs, out: Out) -> Result<(), Fault> {
    args.trace = true;
    let limit = claim::limit(&args);
    let client = reach.client(Some(limit)).await?;
    let sandbox = within(Some(limit), claim::make(&client, args)).await?;
    let (tier, work) = (sandbox.tier(), sandbox.work().cloned());
    let (engine, accel) = (sandbox.engine(), sandbox.accel());
    sandbox.release().await?;
    let work = work.ok_or_else(|| uncounted("claim"))?;
    let tier = word(tier.as_str_name());
    out.result(
        || {
            json!({
                "work": json::work(&work),
                "steps_us": work.steps_us,
                "tier": tier,
                "engine": word(engine.as_str_name()),
                "accel": word(accel.as_str_name()),
            })
        },
        || {
            format!(
                "tier  {}\n{}",
                tier.clone().unwrap_or_default(),
                human::work(&work)
            )
        },
    )
}

async fn trace_exec(reach: &Reach, mut args: ExecArgs, out: Out) -> Result<(), Fault> {
    args.how.trace = true;
    args.how.stdin = false;
    args.how.tty = false;
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let command = exec::builder(&sandbox, args.how, args.command)?;
    let output = command.output_limit(0).output().await?;
    let (json, text) = exec::traced(&output.status).ok_or_else(|| uncounted("exec"))?;
    out.result(|| json, || text)
}

fn uncounted(what: &'static str) -> Fault {
    Fault::Io(what, std::io::Error::other("the daemon sent no counts"))
}
