//! One file.

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentReadRequest, AgentStatReply, AgentStatRequest, AgentWriteReply, ReadOut, WriteIn, write_in,
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::{boxed, enter, no_start};
use crate::{agent::Parts, run::ExecCtx};

/// Writes a file. Cancel safe: the old content stays.
///
/// # Errors
/// Those of [`Files::write`](crate::fs::Files::write); `STREAM_LIMIT`.
pub async fn write(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    mut request: Streaming<WriteIn>,
) -> Result<AgentWriteReply, Status> {
    let seat = ctx.gate.input()?;
    let first = request.message().await?.and_then(|message| message.m);
    let Some(write_in::M::Start(start)) = first else {
        return Err(no_start("Write").into());
    };
    let call = enter(&parts, ctx, start.resolve.as_ref(), Some(seat))?;
    parts.files.write(call, &start, request).await
}

/// Reads a file. Cancel safe.
///
/// # Errors
/// Those of [`Files::read`](crate::fs::Files::read).
pub async fn read(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentReadRequest,
) -> Result<BoxStream<ReadOut>, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(boxed(parts.files.read(call, &request).await?))
}

/// What is there. Cancel safe.
///
/// # Errors
/// Those of [`Files::stat`](crate::fs::Files::stat).
pub async fn stat(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentStatRequest,
) -> Result<AgentStatReply, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(parts.files.stat(call, &request).await?)
}
