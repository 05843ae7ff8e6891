//! What files hold, and what happens to them.

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentFindRequest, AgentReplaceRequest, AgentWatchRequest, FindOut, ReplaceOut, WatchOut,
};
use tonic::{Status, codegen::BoxStream};

use super::{boxed, enter};
use crate::{agent::Parts, run::ExecCtx};

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
