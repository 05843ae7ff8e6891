//! tools.
//!
//! May call: agent, run.
//! Never inside: work of its own.

#![expect(clippy::unused_async, reason = "what is not there yet waits for nothing")]

use std::sync::Arc;

use sandbox_protocol::v1::{
    AgentLspStopReply, AgentLspStopRequest, LspIn, LspOut, PortForwardIn, PortForwardOut,
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::run::ExecCtx;

/// Not there yet.
pub async fn port_forward(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: Streaming<PortForwardIn>,
) -> Result<BoxStream<PortForwardOut>, Status> {
    Err(Status::unimplemented("PortForward is not there yet"))
}

/// Not there yet.
pub async fn lsp_open(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: Streaming<LspIn>,
) -> Result<BoxStream<LspOut>, Status> {
    Err(Status::unimplemented("LspOpen is not there yet"))
}

/// Not there yet.
pub async fn lsp_stop(
    _parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentLspStopRequest,
) -> Result<AgentLspStopReply, Status> {
    Err(Status::unimplemented("LspStop is not there yet"))
}
