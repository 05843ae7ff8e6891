//! Trees, and trees as archives.

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentListReply, AgentListRequest, AgentMkdirReply, AgentMkdirRequest, AgentPullRequest, AgentPushReply,
    AgentRemoveReply, AgentRemoveRequest, AgentRenameReply, AgentRenameRequest, PullOut, PushIn, push_in,
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::{boxed, enter, no_start};
use crate::{agent::Parts, run::ExecCtx};

/// What a directory holds. Cancel safe.
///
/// # Errors
/// Those of [`Files::list`](crate::fs::Files::list).
pub async fn list(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentListRequest,
) -> Result<BoxStream<AgentListReply>, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(boxed(parts.files.list(call, &request).await?))
}

/// Makes a directory. Cancel safe.
///
/// # Errors
/// Those of [`Files::mkdir`](crate::fs::Files::mkdir).
pub async fn mkdir(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentMkdirRequest,
) -> Result<AgentMkdirReply, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(parts.files.mkdir(call, &request).await?)
}

/// Removes a name or a tree. Cancel safe: what it had not come to stays.
///
/// # Errors
/// Those of [`Files::remove`](crate::fs::Files::remove).
pub async fn remove(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentRemoveRequest,
) -> Result<AgentRemoveReply, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(parts.files.remove(call, &request).await?)
}

/// Renames. Cancel safe.
///
/// # Errors
/// Those of [`Files::rename`](crate::fs::Files::rename).
pub async fn rename(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentRenameRequest,
) -> Result<AgentRenameReply, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(parts.files.rename(call, &request).await?)
}

/// Unpacks an archive. Cancel safe: what was there stays.
///
/// # Errors
/// Those of [`Files::push`](crate::fs::Files::push); `STREAM_LIMIT`.
pub async fn push(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    mut request: Streaming<PushIn>,
) -> Result<AgentPushReply, Status> {
    let seat = ctx.gate.input()?;
    let first = request.message().await?.and_then(|message| message.m);
    let Some(push_in::M::Start(start)) = first else {
        return Err(no_start("Push").into());
    };
    let call = enter(&parts, ctx, start.resolve.as_ref(), Some(seat))?;
    parts.files.push(call, &start, request).await
}

/// A tree as an archive. Cancel safe.
///
/// # Errors
/// Those of [`Files::pull`](crate::fs::Files::pull).
pub async fn pull(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentPullRequest,
) -> Result<BoxStream<PullOut>, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(boxed(parts.files.pull(call, &request).await?))
}
