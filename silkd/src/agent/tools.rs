//! Ports and language servers: the first message decides, the rest is `relay`'s and `tools`'.

#![expect(clippy::unused_async, reason = "what is not there yet waits for nothing")]

use std::sync::Arc;

use sandbox_protocol::{
    reason::Reason,
    v1::{AgentLspStopReply, AgentLspStopRequest, LspIn, LspOut, PortForwardIn, port_forward_in},
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::{refusal::Refusal, relay::ForwardStream, run::ExecCtx};

/// Connects to a port of the guest. Cancel safe: dropped, it leaves no connection.
///
/// # Errors
/// `FIELD_INVALID` when the call does not begin with an open, and the reasons of [`crate::relay::Relay::forward`].
pub async fn port_forward(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    mut input: Streaming<PortForwardIn>,
) -> Result<ForwardStream, Status> {
    let first = input.message().await?.and_then(|message| message.m);
    let Some(port_forward_in::M::Open(open)) = first else {
        let message = "the first message of a PortForward is its open";
        return Err(Refusal::new(Reason::FieldInvalid, message).into());
    };
    Ok(parts.relay.forward(ctx.gate, open, input).await?)
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
