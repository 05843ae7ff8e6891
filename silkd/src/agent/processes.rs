//! Programs that nobody has to wait for, and Run: decode, call, map the error.
//!
//! May call: agent, refusal, run.
//! Never inside: work of its own.

use std::sync::Arc;

use sandbox_protocol::{
    reason::Reason,
    v1::{
        AgentForgetReply, AgentForgetRequest, AgentKillReply, AgentKillRequest, AgentLogsRequest,
        AgentPsReply, AgentPsRequest, AgentRunReply, AgentRunRequest, AgentSpawnReply, AgentSpawnRequest,
        AgentWaitReply, AgentWaitRequest, AttachIn, attach_in::M,
    },
};
use tonic::{Status, Streaming, codegen::BoxStream};

use super::Parts;
use crate::{
    refusal::Refusal,
    run::{AttachStream, ExecCtx, LogsStream},
};

/// Rows of a message: each has 4 KiB of arguments at most.
const BATCH: usize = 64;

/// Runs a program to its end. Cancel safe: dropped, it leaves nothing running.
///
/// # Errors
/// Those of [`Runner::run`](crate::run::Runner::run).
pub async fn run(parts: Arc<Parts>, ctx: ExecCtx, request: AgentRunRequest) -> Result<AgentRunReply, Status> {
    Ok(parts.control.runner.run(ctx, request).await?)
}

/// Starts a program that nobody has to wait for.
///
/// # Errors
/// Those of [`Runner::spawn`](crate::run::Runner::spawn).
pub async fn spawn(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentSpawnRequest,
) -> Result<AgentSpawnReply, Status> {
    Ok(parts.control.runner.spawn(ctx, request).await?)
}

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
    let rows = move |after| parts.control.runner.list(request.running, after, BATCH);
    let replies = futures_util::stream::unfold(0, move |after| {
        // Open until the last one is sent.
        let _open = &ctx;
        let processes = rows(after);
        let last = processes.last().map(|row| row.id);
        std::future::ready(last.map(|last| (Ok(AgentPsReply { processes }), last)))
    });
    Ok(Box::pin(replies))
}

/// Waits for an end.
///
/// # Errors
/// Those of [`Runner::wait`](crate::run::Runner::wait).
pub async fn wait(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    request: AgentWaitRequest,
) -> Result<AgentWaitReply, Status> {
    let reply = parts.control.runner.wait(request).await?;
    drop(ctx);
    Ok(reply)
}

/// Signals a process.
///
/// # Errors
/// Those of [`Runner::kill`](crate::run::Runner::kill).
#[expect(clippy::unused_async, reason = "as all calls of the service")]
pub async fn kill(
    parts: Arc<Parts>,
    _ctx: ExecCtx,
    request: AgentKillRequest,
) -> Result<AgentKillReply, Status> {
    Ok(parts.control.runner.kill(&request)?)
}

/// Gives the output of a process that has a log.
///
/// # Errors
/// Those of [`Runner::logs`](crate::run::Runner::logs).
#[expect(clippy::unused_async, reason = "as all calls of the service")]
pub async fn logs(parts: Arc<Parts>, ctx: ExecCtx, request: AgentLogsRequest) -> Result<LogsStream, Status> {
    Ok(parts.control.runner.logs(ctx, &request)?)
}

/// Attaches to a process; the first message says to which.
///
/// # Errors
/// `INVALID_COMMAND` when the call does not begin with a start, and those of
/// [`Runner::attach`](crate::run::Runner::attach).
pub async fn attach(
    parts: Arc<Parts>,
    ctx: ExecCtx,
    mut messages: Streaming<AttachIn>,
) -> Result<AttachStream, Status> {
    let no_start = || {
        Refusal::new(
            Reason::InvalidCommand,
            "the first message of an Attach is its start",
        )
    };
    let first = messages.message().await?.and_then(|message| message.m);
    let Some(M::Start(start)) = first else {
        return Err(no_start().into());
    };
    Ok(parts.control.runner.attach(ctx, &start, messages)?)
}

/// Drops what is kept of an exited process.
///
/// # Errors
/// Those of [`Runner::forget`](crate::run::Runner::forget).
#[expect(clippy::unused_async, reason = "as all calls of the service")]
pub async fn forget(
    parts: Arc<Parts>,
    _ctx: ExecCtx,
    request: AgentForgetRequest,
) -> Result<AgentForgetReply, Status> {
    parts.control.runner.forget(&request)?;
    Ok(AgentForgetReply {})
}
