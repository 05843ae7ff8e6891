//! git.
//!
//! May call: agent, run.
//! Never inside: work of its own.

#![expect(clippy::unused_async, reason = "what is not there yet waits for nothing")]

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentGitAddReply, AgentGitAddRequest, AgentGitBranchReply, AgentGitBranchRequest, AgentGitCheckoutReply,
    AgentGitCheckoutRequest, AgentGitCloneRequest, AgentGitCommitReply, AgentGitCommitRequest,
    AgentGitPullRequest, AgentGitPushRequest, AgentGitStatusReply, AgentGitStatusRequest, GitOut,
};
use tonic::{Status, codegen::BoxStream};

use super::Parts;
use crate::run::ExecCtx;

/// Not there yet.
pub async fn git_clone(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitCloneRequest,
) -> Result<BoxStream<GitOut>, Status> {
    Err(Status::unimplemented("GitClone is not there yet"))
}

/// Not there yet.
pub async fn git_status(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitStatusRequest,
) -> Result<AgentGitStatusReply, Status> {
    Err(Status::unimplemented("GitStatus is not there yet"))
}

/// Not there yet.
pub async fn git_add(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitAddRequest,
) -> Result<AgentGitAddReply, Status> {
    Err(Status::unimplemented("GitAdd is not there yet"))
}

/// Not there yet.
pub async fn git_commit(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitCommitRequest,
) -> Result<AgentGitCommitReply, Status> {
    Err(Status::unimplemented("GitCommit is not there yet"))
}

/// Not there yet.
pub async fn git_push(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitPushRequest,
) -> Result<BoxStream<GitOut>, Status> {
    Err(Status::unimplemented("GitPush is not there yet"))
}

/// Not there yet.
pub async fn git_pull(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitPullRequest,
) -> Result<BoxStream<GitOut>, Status> {
    Err(Status::unimplemented("GitPull is not there yet"))
}

/// Not there yet.
pub async fn git_branch(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitBranchRequest,
) -> Result<AgentGitBranchReply, Status> {
    Err(Status::unimplemented("GitBranch is not there yet"))
}

/// Not there yet.
pub async fn git_checkout(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentGitCheckoutRequest,
) -> Result<AgentGitCheckoutReply, Status> {
    Err(Status::unimplemented("GitCheckout is not there yet"))
}
