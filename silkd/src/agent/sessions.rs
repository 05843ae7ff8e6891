//! sessions.
//!
//! May call: agent, run.
//! Never inside: work of its own.

#![expect(clippy::unused_async, reason = "what is not there yet waits for nothing")]

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentSessionCloseReply, AgentSessionCloseRequest, AgentSessionListReply, AgentSessionListRequest,
    AgentSessionOpenReply, AgentSessionOpenRequest, SessionRunIn, SessionRunOut,
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::run::ExecCtx;

/// Not there yet.
pub async fn session_open(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentSessionOpenRequest,
) -> Result<AgentSessionOpenReply, Status> {
    Err(Status::unimplemented("SessionOpen is not there yet"))
}

/// Not there yet.
pub async fn session_run(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: Streaming<SessionRunIn>,
) -> Result<BoxStream<SessionRunOut>, Status> {
    Err(Status::unimplemented("SessionRun is not there yet"))
}

/// Not there yet.
pub async fn session_list(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentSessionListRequest,
) -> Result<AgentSessionListReply, Status> {
    Err(Status::unimplemented("SessionList is not there yet"))
}

/// Not there yet.
pub async fn session_close(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentSessionCloseRequest,
) -> Result<AgentSessionCloseReply, Status> {
    Err(Status::unimplemented("SessionClose is not there yet"))
}
