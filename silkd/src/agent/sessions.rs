//! Sessions: the first message decides, the rest is `run`'s.
//!
//! May call: agent, refusal, run.
//! Never inside: work of its own.

use std::sync::Arc;

use sandbox_protocol::{
    reason::Reason,
    v1::{
        AgentSessionCloseReply, AgentSessionCloseRequest, AgentSessionListReply, AgentSessionListRequest,
        AgentSessionOpenReply, AgentSessionOpenRequest, SessionRunIn, SessionRunOut, session_run_in::M,
    },
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::{
    refusal::Refusal,
    run::{ExecCtx, Runner},
};

/// Opens one. Cancel safe: dropped, it leaves none.
///
/// # Errors
/// Those of [`Runner::session_open`].
pub async fn session_open(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentSessionOpenRequest,
) -> Result<AgentSessionOpenReply, Status> {
    Ok(parts.control.runner.session_open(ctx, request).await?)
}

/// Answers one command. Cancel safe: dropped, it cancels the command and leaves the session.
///
/// # Errors
/// Those of [`start`].
pub async fn session_run(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    input: Streaming<SessionRunIn>,
) -> Result<BoxStream<SessionRunOut>, Status> {
    start(&parts.control.runner, ctx, input).await
}

/// Reads the start and begins. Cancel safe, as [`session_run`].
///
/// # Errors
/// `INVALID_COMMAND` when the call does not begin with a start, and the reasons of [`Runner::session_run`].
pub async fn start(
    runner: &Runner,
    ctx: ExecCtx,
    mut input: Streaming<SessionRunIn>,
) -> Result<BoxStream<SessionRunOut>, Status> {
    let no_start = || {
        let message = "the first message of a SessionRun is its start";
        Refusal::new(Reason::InvalidCommand, message)
    };
    let first = input.message().await?.and_then(|message| message.m);
    let Some(M::Start(start)) = first else {
        return Err(no_start().into());
    };
    Ok(Box::pin(runner.session_run(ctx, start, input)?))
}

/// Those that are open.
#[expect(clippy::unused_async, reason = "called like the others")]
pub async fn session_list(
    parts: Arc<Parts>,
    _ctx: ExecCtx,
    _request: AgentSessionListRequest,
) -> Result<AgentSessionListReply, Status> {
    Ok(AgentSessionListReply {
        sessions: parts.control.runner.session_list(),
    })
}

/// Ends one. Cancel safe: it ends all the same.
///
/// # Errors
/// Those of [`Runner::session_close`].
pub async fn session_close(
    parts: Arc<Parts>,
    _ctx: ExecCtx,
    request: AgentSessionCloseRequest,
) -> Result<AgentSessionCloseReply, Status> {
    parts.control.runner.session_close(&request.session).await?;
    Ok(AgentSessionCloseReply {})
}
