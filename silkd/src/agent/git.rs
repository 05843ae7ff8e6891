//! Git: the work is `tools`'.

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentGitAddReply, AgentGitAddRequest, AgentGitBranchReply, AgentGitBranchRequest, AgentGitCheckoutReply,
    AgentGitCheckoutRequest, AgentGitCloneRequest, AgentGitCommitReply, AgentGitCommitRequest,
    AgentGitPullRequest, AgentGitPushRequest, AgentGitStatusReply, AgentGitStatusRequest, GitOut,
};
use tonic::{Status, codegen::BoxStream};

use super::Parts;
use crate::{run::ExecCtx, tools::git};

/// See [`git::clone`].
pub async fn git_clone(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitCloneRequest,
) -> Result<BoxStream<GitOut>, Status> {
    Ok(git::clone(&parts.control.runner, ctx, request).await?)
}

/// See [`git::status`].
pub async fn git_status(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitStatusRequest,
) -> Result<AgentGitStatusReply, Status> {
    Ok(git::status(&parts.control.runner, ctx, request).await?)
}

/// See [`git::add`].
pub async fn git_add(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitAddRequest,
) -> Result<AgentGitAddReply, Status> {
    git::add(&parts.control.runner, ctx, request).await?;
    Ok(AgentGitAddReply {})
}

/// See [`git::commit`].
pub async fn git_commit(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitCommitRequest,
) -> Result<AgentGitCommitReply, Status> {
    let head = git::commit(&parts.control.runner, ctx, request).await?;
    Ok(AgentGitCommitReply { head })
}

/// See [`git::push`].
pub async fn git_push(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitPushRequest,
) -> Result<BoxStream<GitOut>, Status> {
    Ok(git::push(&parts.control.runner, ctx, request).await?)
}

/// See [`git::pull`].
pub async fn git_pull(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitPullRequest,
) -> Result<BoxStream<GitOut>, Status> {
    Ok(git::pull(&parts.control.runner, ctx, request).await?)
}

/// See [`git::branch`].
pub async fn git_branch(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitBranchRequest,
) -> Result<AgentGitBranchReply, Status> {
    Ok(git::branch(&parts.control.runner, ctx, request).await?)
}

/// See [`git::checkout`].
pub async fn git_checkout(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentGitCheckoutRequest,
) -> Result<AgentGitCheckoutReply, Status> {
    let head = git::checkout(&parts.control.runner, ctx, request).await?;
    Ok(AgentGitCheckoutReply { head })
}
