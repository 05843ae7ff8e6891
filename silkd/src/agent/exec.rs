//! Exec: the first message decides, the rest is `run`'s.

use sandbox_protocol::{
    reason::Reason,
    v1::{ExecIn, exec_in::M},
};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    refusal::Refusal,
    run::{ExecCtx, ExecStream, Runner},
};

/// Answers one Exec. Cancel safe: dropped, it leaves nothing running.
///
/// # Errors
/// `INVALID_COMMAND` when the call does not begin with a start, and the reasons of [`Runner::exec`].
pub async fn exec(
    runner: &Runner,
    ctx: ExecCtx,
    request: Request<Streaming<ExecIn>>,
) -> Result<Response<ExecStream>, Status> {
    let mut input = request.into_inner();
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
    Ok(Response::new(runner.exec(ctx, start, input).await?))
}
