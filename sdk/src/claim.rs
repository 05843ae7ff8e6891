//! Claiming a sandbox.
//!
//! May call: client, retry, sandbox, error, token, key.
//! Never inside: a claim without a request key: what is repeated must be the same claim (docs/failures.md C2).

use std::{
    collections::HashMap,
    future::IntoFuture,
    pin::Pin,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use sandbox_protocol::v1::{ClaimsClaimRequest, EgressPolicy, EnvVar, PoolKey, claims_claim_request};

use crate::{
    client::{Client, Terms, via},
    error::Error,
    key,
    retry::Repeat,
    sandbox::{Grant, Sandbox, SandboxHandle},
    token::Token,
};

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Pool(String),
    Key(PoolKey),
}

/// A claim in the making; await it to make it. Made by [`Client::claim`].
///
/// Dropping the future while the call is under way may leave a sandbox that nobody knows; its lease ends it. Ask
/// again with the same [`request_key`](Self::request_key) to get hold of it.
#[derive(Debug, Clone)]
#[must_use = "a claim does nothing until it is awaited"]
pub struct ClaimBuilder {
    client: Client,
    message: ClaimsClaimRequest,
    timeout: Option<Duration>,
    wrong: Option<(&'static str, &'static str)>,
}

impl ClaimBuilder {
    pub(crate) fn new(client: Client, source: Source) -> Self {
        let source = match source {
            Source::Pool(pool) => claims_claim_request::Source::Pool(pool),
            Source::Key(key) => claims_claim_request::Source::Key(key),
        };
        Self {
            client,
            message: ClaimsClaimRequest {
                source: Some(source),
                ..ClaimsClaimRequest::default()
            },
            timeout: None,
            wrong: None,
        }
    }

    /// How long the claim lives unless renewed, in whole seconds (rounded up); default: the pool's lease.
    pub fn lease(mut self, lease: Duration) -> Self {
        match seconds(lease) {
            Some(secs) => self.message.lease_secs = Some(secs),
            None => self.wrong = Some(("lease_secs", "at most 2^32 - 1 seconds")),
        }
        self
    }

    /// A label to find the sandbox by; at most 16, key `[a-z0-9._/-]{1,63}`, value at most 255 bytes.
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.message.labels.insert(key.into(), value.into());
        self
    }

    /// All labels at once.
    pub fn labels(mut self, labels: HashMap<String, String>) -> Self {
        self.message.labels = labels;
        self
    }

    /// Time in line when the pool is empty; default 2 s, at most 10 min.
    pub fn wait(mut self, wait: Duration) -> Self {
        match u32::try_from(wait.as_millis()) {
            Ok(wait) => self.message.wait_ms = Some(wait),
            Err(_too_long) => self.wrong = Some(("wait_ms", "at most 10 minutes")),
        }
        self
    }

    /// Never a clone on demand or a cold boot: POOL_EMPTY after the time in line.
    pub fn warm_only(mut self) -> Self {
        self.message.warm_only = true;
        self
    }

    /// An environment variable of everything that runs in the sandbox. Environment and user cost one trip to the guest.
    pub fn env(mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        let (key, value) = (key.into(), value.into());
        self.message.env.push(EnvVar { key, value });
        self
    }

    /// User of all commands that name none: a name or number, `[:group]`.
    pub fn user(mut self, user: impl Into<Bytes>) -> Self {
        self.message.user = user.into();
        self
    }

    /// What the sandbox may reach, of what pool and tenant allow; at most 64 rules and 64 KiB.
    pub fn egress(mut self, layer: EgressPolicy) -> Self {
        self.message.egress = Some(layer);
        self
    }

    /// Exact counts of the work that the claim was; see [`Sandbox::work`].
    pub fn trace(mut self) -> Self {
        self.message.trace = true;
        self
    }

    /// Makes a repeated claim the same claim: 1 to 128 printable ASCII characters. Random by default.
    pub fn request_key(mut self, key: impl Into<String>) -> Self {
        self.message.request_key = Some(key.into());
        self
    }

    /// Time of the whole call; default: the client's, and the time in line on top.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    async fn run(mut self) -> Result<Sandbox, Error> {
        if let Some((field, allowed)) = self.wrong {
            return Err(Error::invalid(field, allowed.to_owned()));
        }
        if self.message.request_key.is_none() {
            self.message.request_key = Some(key::random()?);
        }
        let wait = Duration::from_millis(self.message.wait_ms.unwrap_or_default().into());
        let limit = self.timeout.unwrap_or(self.client.timeout().saturating_add(wait));
        let terms = Terms {
            limit: Some(limit),
            ..Terms::new(Repeat::Claim)
        };
        let reply = self
            .client
            .unary(terms, &self.message, via!(claims_client.claim))
            .await?;
        let grant = Grant {
            tier: reply.tier(),
            engine: reply.engine(),
            accel: reply.accel(),
            claim: reply.claim,
            pool: reply.pool,
            expires_at: reply.expires_at.and_then(|at| SystemTime::try_from(at).ok()),
            work: reply.work,
        };
        let token = Token::new(reply.token)?;
        let handle = SandboxHandle::new(self.client, reply.sandbox, Some(token));
        Ok(Sandbox::new(handle, grant))
    }
}

/// Whole seconds, rounded up, so that a lease is never shorter than asked for.
pub(crate) fn seconds(duration: Duration) -> Option<u32> {
    let secs = duration
        .as_secs()
        .checked_add(u64::from(duration.subsec_nanos() > 0))?;
    u32::try_from(secs).ok()
}

impl IntoFuture for ClaimBuilder {
    type Output = Result<Sandbox, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_never_cut_short() {
        assert_eq!(seconds(Duration::ZERO), Some(0));
        assert_eq!(seconds(Duration::from_millis(1)), Some(1));
        assert_eq!(seconds(Duration::from_millis(2_500)), Some(3));
        assert_eq!(seconds(Duration::from_secs(1 << 32)), None);
        assert_eq!(seconds(Duration::MAX), None);
    }
}
