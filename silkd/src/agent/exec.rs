//! Exec: the first message decides, the rest is `run`'s.

use std::sync::Arc;

use sandbox_protocol::{
    reason::Reason,
    v1::{ExecIn, exec_in::M},
};
use tonic::{Status, Streaming};

use super::Parts;
use crate::{
    refusal::Refusal,
    run::{ExecCtx, ExecStream, Runner},
};

/// Answers one Exec. Cancel safe: dropped, it leaves nothing running.
///
/// # Errors
/// Those of [`start`].
pub async fn exec(parts: Arc<Parts>, ctx: ExecCtx, input: Streaming<ExecIn>) -> Result<ExecStream, Status> {
    Box::pin(start(&parts.control.runner, ctx, input)).await
}

/// Reads the start and begins. Cancel safe: dropped, it leaves nothing running.
///
/// # Errors
/// `INVALID_COMMAND` when the call does not begin with a start, and the reasons of [`Runner::exec`].
pub async fn start(
    runner: &Runner,
    ctx: ExecCtx,
    mut input: Streaming<ExecIn>,
) -> Result<ExecStream, Status> {
    let no_start = || {
        Refusal::new(
            Reason::InvalidCommand,
            "the first message of an Exec is its start",
        )
    };
    let first = input.message().await?.and_then(|message| message.m);
    let Some(M::Start(start)) = first else {
        return Err(no_start().into());
    };
    Ok(runner.exec(ctx, start, input).await?)
}
