//! What guests may reach.

use sandbox_protocol::v1::{
    EgressExplainReply, EgressExplainRequest, EgressGetReply, EgressGetRequest, EgressPolicy,
    EgressUpdateReply, EgressUpdateRequest, EgressWatchReply, EgressWatchRequest,
};
use tokio_stream::StreamExt as _;

use super::Events;
use crate::{
    client::{Client, Terms, via},
    error::Error,
    retry::Repeat,
};

/// Policies and decisions of doors. Made by [`Client::egress`].
#[derive(Debug, Clone, Copy)]
pub struct Egress<'a>(pub(crate) &'a Client);

impl Egress<'_> {
    /// What a door would answer, and why. Nothing is dialled.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, POOL_NOT_FOUND, POLICY_INVALID, NOT_ALLOWED.
    pub async fn explain(&self, question: EgressExplainRequest) -> Result<EgressExplainReply, Error> {
        let terms = Terms::new(Repeat::Harmless);
        self.0.unary(terms, &question, via!(egress_client.explain)).await
    }

    /// The layers in force for a sandbox, and the state of its doors.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND.
    pub async fn get(&self, sandbox: impl Into<String>) -> Result<EgressGetReply, Error> {
        let message = EgressGetRequest {
            sandbox: sandbox.into(),
        };
        let terms = Terms::new(Repeat::Harmless);
        self.0.unary(terms, &message, via!(egress_client.get)).await
    }

    /// Sets the claim's layer anew; tunnels that it forbids are cut before this returns. `if_digest`: only if the
    /// layer is still the one that was read.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, SANDBOX_ENDED, POLICY_INVALID, POLICY_CHANGED, JOURNAL_FULL.
    pub async fn update(
        &self,
        sandbox: impl Into<String>,
        layer: Option<EgressPolicy>,
        if_digest: Option<String>,
    ) -> Result<EgressUpdateReply, Error> {
        let message = EgressUpdateRequest {
            sandbox: sandbox.into(),
            layer,
            if_digest,
        };
        // With a digest, doing it twice is refused the second time.
        let terms = Terms::new(Repeat::OnWord);
        self.0.unary(terms, &message, via!(egress_client.update)).await
    }

    /// Decisions as they happen; with `from_seq` those that are still kept come first. An empty `sandbox`: all that
    /// the caller may see.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, TOKEN_REQUIRED, NOT_ALLOWED.
    pub async fn watch(
        &self,
        sandbox: impl Into<String>,
        from_seq: Option<u64>,
    ) -> Result<EgressWatch, Error> {
        let message = EgressWatchRequest {
            sandbox: sandbox.into(),
            from_seq,
        };
        let terms = Terms::new(Repeat::Harmless);
        let stream = self.0.open(terms, &message, via!(egress_client.watch)).await?;
        Ok(EgressWatch(Events(stream)))
    }
}

/// Decisions of doors. Dropping it ends the call.
#[derive(Debug)]
pub struct EgressWatch(Events<EgressWatchReply>);

impl EgressWatch {
    /// The next decision; nothing when the daemon ended the stream. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<EgressWatchReply, Error>> {
        self.0.next().await
    }
}
