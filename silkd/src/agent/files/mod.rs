//! Files: whose call it is, and on to `fs`.
//!
//! May call: agent, fs, gate, refusal, run.
//! Never inside: work of its own.

use std::sync::Arc;

use futures_util::{Stream, TryStreamExt as _};
use sandbox_protocol::{
    reason::Reason,
    v1::{
        AgentFindRequest, AgentListReply, AgentListRequest, AgentMkdirReply, AgentMkdirRequest,
        AgentPullRequest, AgentPushReply, AgentReadRequest, AgentRemoveReply, AgentRemoveRequest,
        AgentRenameReply, AgentRenameRequest, AgentReplaceRequest, AgentStatReply, AgentStatRequest,
        AgentWatchRequest, AgentWriteReply, FindOut, PullOut, PushIn, ReadOut, ReplaceOut, Resolve, WatchOut,
        WriteIn, push_in, write_in,
    },
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::{fs::Call, gate::InputSeat, refusal::Refusal, run::ExecCtx};

/// Whom the call acts as: the request's user, else the claim's. What comes of it holds the gate open.
fn enter(
    parts: &Parts,
    ctx: ExecCtx,
    resolve: Option<&Resolve>,
    seat: Option<InputSeat>,
) -> Result<Arc<Call>, Refusal> {
    let asked = resolve
        .map(|resolve| &resolve.user)
        .filter(|user| !user.is_empty());
    let ids = parts.control.runner.ids_of(asked.unwrap_or(&ctx.claim.user))?;
    Ok(Call::new(ctx.gate, ids, seat))
}

fn no_start(of: &str) -> Refusal {
    Refusal::new(
        Reason::FieldInvalid,
        format!("the first message of a {of} is its start"),
    )
}

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

fn boxed<T, S>(stream: S) -> BoxStream<T>
where
    T: 'static,
    S: Stream<Item = Result<T, Refusal>> + Send + 'static,
{
    Box::pin(stream.map_err(Status::from))
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

/// Lines that match. Cancel safe.
///
/// # Errors
/// Those of [`Files::find`](crate::fs::Files::find).
pub async fn find(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentFindRequest,
) -> Result<BoxStream<FindOut>, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(boxed(parts.files.find(call, request).await?))
}

/// Replaces in all files, or in none. Cancel safe.
///
/// # Errors
/// Those of [`Files::replace`](crate::fs::Files::replace).
pub async fn replace(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentReplaceRequest,
) -> Result<BoxStream<ReplaceOut>, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(boxed(parts.files.replace(call, request).await?))
}

/// Watches a tree. Cancel safe.
///
/// # Errors
/// Those of [`Files::watch`](crate::fs::Files::watch).
pub async fn watch(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentWatchRequest,
) -> Result<BoxStream<WatchOut>, Status> {
    let call = enter(&parts, ctx, request.resolve.as_ref(), None)?;
    Ok(boxed(parts.files.watch(call, &request).await?))
}
