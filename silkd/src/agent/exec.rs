//! Placeholder.
use crate::{
    gate::Permit,
    refusal::Refusal,
    run::{ClaimDefaults, ExecCtx, ExecStream, Runner},
};
use sandbox_protocol::{
    reason::Reason,
    v1::{EnvVar, ExecIn, exec_in},
};
use std::sync::Arc;
use tonic::{Status, Streaming};
/// Placeholder.
pub async fn exec(
    runner: &Runner,
    gate: Permit,
    base_env: Arc<[EnvVar]>,
    claim: Arc<ClaimDefaults>,
    mut input: Streaming<ExecIn>,
) -> Result<ExecStream, Status> {
    let first = match input.message().await? {
        Some(ExecIn {
            m: Some(exec_in::M::Start(start)),
        }) => start,
        _ => return Err(Refusal::new(Reason::InvalidCommand, "start first").into()),
    };
    Ok(runner
        .exec(
            ExecCtx {
                gate,
                base_env,
                claim,
            },
            first,
            input,
        )
        .await?)
}
