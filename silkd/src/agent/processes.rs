//! processes.
//!
//! May call: agent, run.
//! Never inside: work of its own.

#![expect(clippy::unused_async, reason = "what is not there yet waits for nothing")]

use std::sync::Arc;

use futures_util::StreamExt as _;
use sandbox_protocol::v1::{
    AgentForgetReply, AgentForgetRequest, AgentKillReply, AgentKillRequest, AgentLogsRequest, AgentPsReply,
    AgentPsRequest, AgentRunReply, AgentRunRequest, AgentSpawnReply, AgentSpawnRequest, AgentWaitReply,
    AgentWaitRequest, AttachIn, AttachOut, LogsOut,
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::run::ExecCtx;

/// Not there yet.
pub async fn run(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentRunRequest,
) -> Result<AgentRunReply, Status> {
    Err(Status::unimplemented("Run is not there yet"))
}

/// Not there yet.
pub async fn spawn(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentSpawnRequest,
) -> Result<AgentSpawnReply, Status> {
    Err(Status::unimplemented("Spawn is not there yet"))
}

/// Rows of a message: each has 4 KiB of arguments at most.
const BATCH: usize = 64;

/// Lists what silkd started and still knows of.
///
/// # Errors
/// None.
#[expect(clippy::unused_async, reason = "as all calls of the service")]
pub async fn ps(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentPsRequest,
) -> Result<BoxStream<AgentPsReply>, Status> {
    let rows = parts.control.runner.list(request.running);
    let replies: Vec<_> = rows
        .chunks(BATCH)
        .map(|rows| AgentPsReply {
            processes: rows.to_vec(),
        })
        .collect();
    let replies = futures_util::stream::iter(replies).map(move |reply| {
        // Open until the last one is sent.
        let _open = &ctx;
        Ok(reply)
    });
    Ok(Box::pin(replies))
}

/// Not there yet.
pub async fn wait(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentWaitRequest,
) -> Result<AgentWaitReply, Status> {
    Err(Status::unimplemented("Wait is not there yet"))
}

/// Not there yet.
pub async fn kill(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentKillRequest,
) -> Result<AgentKillReply, Status> {
    Err(Status::unimplemented("Kill is not there yet"))
}

/// Not there yet.
pub async fn logs(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentLogsRequest,
) -> Result<BoxStream<LogsOut>, Status> {
    Err(Status::unimplemented("Logs is not there yet"))
}

/// Not there yet.
pub async fn attach(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: Streaming<AttachIn>,
) -> Result<BoxStream<AttachOut>, Status> {
    Err(Status::unimplemented("Attach is not there yet"))
}

/// Not there yet.
pub async fn forget(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentForgetRequest,
) -> Result<AgentForgetReply, Status> {
    Err(Status::unimplemented("Forget is not there yet"))
}
