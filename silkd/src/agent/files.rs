//! files.
//!
//! May call: agent, run.
//! Never inside: work of its own.

#![expect(clippy::unused_async, reason = "what is not there yet waits for nothing")]

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentFindRequest, AgentListReply, AgentListRequest, AgentMkdirReply, AgentMkdirRequest, AgentPullRequest,
    AgentPushReply, AgentReadRequest, AgentRemoveReply, AgentRemoveRequest, AgentRenameReply,
    AgentRenameRequest, AgentReplaceRequest, AgentStatReply, AgentStatRequest, AgentWatchRequest,
    AgentWriteReply, FindOut, PullOut, PushIn, ReadOut, ReplaceOut, WatchOut, WriteIn,
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::run::ExecCtx;

/// Not there yet.
pub async fn write(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: Streaming<WriteIn>,
) -> Result<AgentWriteReply, Status> {
    Err(Status::unimplemented("Write is not there yet"))
}

/// Not there yet.
pub async fn read(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentReadRequest,
) -> Result<BoxStream<ReadOut>, Status> {
    Err(Status::unimplemented("Read is not there yet"))
}

/// Not there yet.
pub async fn stat(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentStatRequest,
) -> Result<AgentStatReply, Status> {
    Err(Status::unimplemented("Stat is not there yet"))
}

/// Not there yet.
pub async fn list(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentListRequest,
) -> Result<BoxStream<AgentListReply>, Status> {
    Err(Status::unimplemented("List is not there yet"))
}

/// Not there yet.
pub async fn mkdir(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentMkdirRequest,
) -> Result<AgentMkdirReply, Status> {
    Err(Status::unimplemented("Mkdir is not there yet"))
}

/// Not there yet.
pub async fn remove(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentRemoveRequest,
) -> Result<AgentRemoveReply, Status> {
    Err(Status::unimplemented("Remove is not there yet"))
}

/// Not there yet.
pub async fn rename(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentRenameRequest,
) -> Result<AgentRenameReply, Status> {
    Err(Status::unimplemented("Rename is not there yet"))
}

/// Not there yet.
pub async fn push(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: Streaming<PushIn>,
) -> Result<AgentPushReply, Status> {
    Err(Status::unimplemented("Push is not there yet"))
}

/// Not there yet.
pub async fn pull(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentPullRequest,
) -> Result<BoxStream<PullOut>, Status> {
    Err(Status::unimplemented("Pull is not there yet"))
}

/// Not there yet.
pub async fn find(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentFindRequest,
) -> Result<BoxStream<FindOut>, Status> {
    Err(Status::unimplemented("Find is not there yet"))
}

/// Not there yet.
pub async fn replace(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentReplaceRequest,
) -> Result<BoxStream<ReplaceOut>, Status> {
    Err(Status::unimplemented("Replace is not there yet"))
}

/// Not there yet.
pub async fn watch(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentWatchRequest,
) -> Result<BoxStream<WatchOut>, Status> {
    Err(Status::unimplemented("Watch is not there yet"))
}
