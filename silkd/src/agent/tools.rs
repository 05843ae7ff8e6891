//! Ports and language servers: the first message decides, the rest is `relay`'s and `tools`'.

use std::sync::Arc;

use sandbox_protocol::{
    reason::Reason,
    v1::{AgentLspStopReply, AgentLspStopRequest, LspIn, PortForwardIn, lsp_in, port_forward_in},
};
use tonic::{Status, Streaming};

use super::Parts;
use crate::{refusal::Refusal, relay::ForwardStream, run::ExecCtx, tools::lsp::LspStream};

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

/// Starts a language server, or comes back to one. Cancel safe.
///
/// # Errors
/// `FIELD_INVALID` when the call does not begin with a start, and the reasons of [`crate::tools::lsp::Lsp::open`].
pub async fn lsp_open(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    mut input: Streaming<LspIn>,
) -> Result<LspStream, Status> {
    let first = input.message().await?.and_then(|message| message.m);
    let Some(lsp_in::M::Start(start)) = first else {
        let message = "the first message of an LspOpen is its start";
        return Err(Refusal::new(Reason::FieldInvalid, message).into());
    };
    Ok(parts.lsp.open(&parts.control.runner, ctx, start, input).await?)
}

/// Ends a language server. Cancel safe: it ends all the same.
///
/// # Errors
/// `LSP_UNKNOWN`.
pub async fn lsp_stop(
    parts: Arc<Parts>,
    _ctx: ExecCtx,
    request: AgentLspStopRequest,
) -> Result<AgentLspStopReply, Status> {
    let exit = parts.lsp.stop(request.server).await?;
    Ok(AgentLspStopReply { exit: Some(exit) })
}
