//! `Agent`: what a claimer uses. Decode, call, map the error.
//!
//! May call: agent/*, clock, control, gate, refusal, run.
//! Never inside: work of its own.
//! Cancel safety: a call that is dropped drops its stream's guard, which acts at once.

pub mod exec;
pub mod info;
pub mod reason;

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::Stream;
use sandbox_protocol::v1::{
    AgentInfoReply, AgentInfoRequest, EnvVar, ExecIn, ExecOut, agent_server::Agent as AgentService,
};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    control::{Facts, Parts as ControlParts},
    refusal::Refusal,
    run::{ExecCtx, ExecStream},
};

/// What the service is made of.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Shared with control.
    pub control: ControlParts,
    /// The image's environment.
    pub base_env: Arc<Vec<EnvVar>>,
    /// False in test mode.
    pub pid1: bool,
    /// When silkd started, since the machine's boot.
    pub started: Duration,
}

/// The service; a handle.
#[derive(Debug, Clone)]
pub struct Agent {
    parts: Arc<Parts>,
    facts: Facts,
}

impl Agent {
    /// The service.
    #[must_use]
    pub fn new(parts: Parts, facts: Facts) -> Self {
        Self {
            parts: Arc::new(parts),
            facts,
        }
    }
}

#[tonic::async_trait]
impl AgentService for Agent {
    async fn info(&self, _request: Request<AgentInfoRequest>) -> Result<Response<AgentInfoReply>, Status> {
        Ok(Response::new(info::info(self)))
    }

    type ExecStream = UntilSleep;

    async fn exec(&self, request: Request<Streaming<ExecIn>>) -> Result<Response<UntilSleep>, Status> {
        let permit = self.parts.control.gate.permit()?;
        let mut sleep = Box::pin(permit.hibernated());
        let ctx = ExecCtx {
            gate: permit,
            base_env: self.parts.base_env.clone(),
            claim: self.facts.claim(),
        };
        let started = Box::pin(exec::exec(&self.parts.control.runner, ctx, request));
        // A caller that never says what to start does not keep the sandbox awake.
        let response = tokio::select! {
            refusal = &mut sleep => return Err(refusal.into()),
            response = started => response?,
        };
        Ok(response.map(|stream| UntilSleep {
            stream: Some(stream),
            sleep,
        }))
    }
}

/// A stream that ends with `SANDBOX_HIBERNATING` when the sandbox goes to sleep.
pub struct UntilSleep {
    stream: Option<ExecStream>,
    sleep: Pin<Box<dyn Future<Output = Refusal> + Send>>,
}

impl std::fmt::Debug for UntilSleep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UntilSleep").finish_non_exhaustive()
    }
}

impl Stream for UntilSleep {
    type Item = Result<ExecOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(refusal) = this.sleep.as_mut().poll(cx) {
            // Its guard acts now: sleep does not wait for a reader.
            this.stream = None;
            return Poll::Ready(Some(Err(refusal.into())));
        }
        Pin::new(stream).poll_next(cx)
    }
}
