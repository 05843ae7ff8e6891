//! A sandbox in a claimer's hands.
//!
//! May call: claim (what it was given), guest, client, retry, exec, error, tasks, token.
//! Never inside: how a claim is made.
//! Cancel safety: a dropped [`release`](SandboxHandle::release) may or may not have ended the sandbox; asking again
//! is harmless.

use std::{
    ops::Deref,
    time::{Duration, SystemTime},
};

use sandbox_protocol::{
    reason::Reason,
    v1::{
        self, Accel, AgentInfoReply, AgentInfoRequest, ClaimsGetRequest, ClaimsReleaseRequest,
        ClaimsRenewRequest, Engine, Tier, Work,
    },
};
use tonic::{Request, metadata::MetadataValue};

use crate::{
    claim::seconds,
    client::{Client, Terms, via},
    error::Error,
    exec::{Exec, Run},
    guest,
    retry::Repeat,
    token::Token,
};

/// Time of a release that a drop began.
const BACKGROUND_RELEASE: Duration = Duration::from_secs(10);

/// A sandbox by id and token. Cheap to clone; dropping it leaves the sandbox alone.
#[derive(Debug, Clone)]
pub struct SandboxHandle {
    client: Client,
    id: String,
    token: Option<Token>,
}

/// What a release did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// It had ended before.
    pub already: bool,
    /// False: the daemon's journal takes no records; the sandbox was ended all the same.
    pub recorded: bool,
}

impl SandboxHandle {
    pub(crate) fn new(client: Client, id: String, token: Option<Token>) -> Self {
        Self { client, id, token }
    }

    /// `sb_..`
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Opens the sandbox to whoever has it.
    #[must_use]
    pub fn token(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn terms(&self, repeat: Repeat) -> Terms<'_> {
        Terms {
            token: self.token.as_ref(),
            ..Terms::new(repeat)
        }
    }

    /// Names the guest that a call on `Agent` is for.
    pub(crate) fn address<M>(&self, request: &mut Request<M>) {
        use sandbox_protocol::metadata::SANDBOX_ID;
        // An id that no header can hold is nobody's: without one the daemon answers SANDBOX_NOT_FOUND.
        if let Ok(id) = MetadataValue::try_from(self.id.as_str()) {
            request.metadata_mut().insert(SANDBOX_ID, id);
        }
    }

    /// Runs a program: `exec(["sh", "-c", "echo hello"])`. Nothing is interpreted by a shell that is not named.
    #[must_use = "a command does nothing until `output` or `stream` is called"]
    pub fn exec<I>(&self, argv: I) -> Exec
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        Exec::new(self.clone(), argv)
    }

    /// Runs a program in one exchange: await it for all that the program said, up to a cap. As [`exec`](Self::exec)
    /// for short programs, with less to send.
    pub fn run<I>(&self, argv: I) -> Run
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        Run::new(self.clone(), argv)
    }

    /// Its row, as the daemon sees it.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND: unknown, or the token is wrong.
    pub async fn get(&self) -> Result<v1::Sandbox, Error> {
        let message = ClaimsGetRequest {
            sandbox: self.id.clone(),
        };
        self.client
            .unary(self.terms(Repeat::Harmless), &message, via!(claims_client.get))
            .await
    }

    /// What its agent says of itself.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, SANDBOX_FAILED, AGENT_LOST.
    pub async fn agent(&self) -> Result<AgentInfoReply, Error> {
        let terms = (Repeat::Harmless, None);
        guest::ask(self, terms, &AgentInfoRequest {}, via!(agent_client.info)).await
    }

    /// Sets the lease anew, from now on; whole seconds, rounded up. Gives the time at which it ends.
    ///
    /// # Errors
    /// LEASE_OUT_OF_RANGE, LEASE_EXPIRED, SANDBOX_NOT_FOUND.
    pub async fn renew(&self, lease: Duration) -> Result<SystemTime, Error> {
        let lease_secs = seconds(lease)
            .ok_or_else(|| Error::invalid("lease_secs", "at most 2^32 - 1 seconds".to_owned()))?;
        let message = ClaimsRenewRequest {
            sandbox: self.id.clone(),
            lease_secs,
        };
        let reply = self
            .client
            .unary(self.terms(Repeat::Harmless), &message, via!(claims_client.renew))
            .await?;
        reply
            .expires_at
            .and_then(|at| SystemTime::try_from(at).ok())
            .ok_or_else(|| Error::unfinished("the answer names no time"))
    }

    /// Ends the sandbox. What is unknown is ended: SANDBOX_NOT_FOUND is success.
    ///
    /// # Errors
    /// The daemon could not be asked, or refused.
    pub async fn release(&self) -> Result<Released, Error> {
        self.release_within(None).await
    }

    async fn release_within(&self, limit: Option<Duration>) -> Result<Released, Error> {
        let message = ClaimsReleaseRequest {
            sandbox: self.id.clone(),
        };
        let terms = Terms {
            limit,
            ..self.terms(Repeat::Harmless)
        };
        let reply = self
            .client
            .unary(terms, &message, via!(claims_client.release))
            .await;
        match reply {
            Ok(reply) => Ok(Released {
                already: reply.already,
                recorded: reply.recorded,
            }),
            Err(error) if error.is(Reason::SandboxNotFound) => Ok(Released {
                already: true,
                recorded: true,
            }),
            Err(error) => Err(error),
        }
    }

    fn release_in_background(self) {
        let client = self.client.clone();
        // One task per dropped claim, each gone within its limit.
        client.releases().start(async move {
            if let Err(error) = self.release_within(Some(BACKGROUND_RELEASE)).await {
                tracing::warn!(sandbox = self.id, %error, "release failed; the lease will end the sandbox");
            }
        });
    }
}

/// What came with a claim.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) claim: String,
    pub(crate) tier: Tier,
    pub(crate) pool: String,
    pub(crate) expires_at: Option<SystemTime>,
    pub(crate) engine: Engine,
    pub(crate) accel: Accel,
    pub(crate) work: Option<Work>,
}

/// A claimed sandbox. Dropping it releases it in the background (see [`Client::flush`]); [`keep`](Self::keep) and
/// [`release`](Self::release) end that duty.
#[derive(Debug)]
pub struct Sandbox {
    handle: SandboxHandle,
    grant: Grant,
    duty: Duty,
}

/// Releases what it holds when it is dropped.
#[derive(Debug)]
struct Duty(Option<SandboxHandle>);

impl Drop for Duty {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take() {
            handle.release_in_background();
        }
    }
}

impl Sandbox {
    pub(crate) fn new(handle: SandboxHandle, grant: Grant) -> Self {
        let duty = Duty(Some(handle.clone()));
        Self { handle, grant, duty }
    }

    /// `cl_..`
    #[must_use]
    pub fn claim_id(&self) -> &str {
        &self.grant.claim
    }

    /// How the claim was served.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.grant.tier
    }

    /// The pool it came from; empty if it came from none.
    #[must_use]
    pub fn pool(&self) -> &str {
        &self.grant.pool
    }

    /// When its first lease ends.
    #[must_use]
    pub fn expires_at(&self) -> Option<SystemTime> {
        self.grant.expires_at
    }

    /// What runs it. The stub engine isolates nothing.
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.grant.engine
    }

    /// What it runs on.
    #[must_use]
    pub fn accel(&self) -> Accel {
        self.grant.accel
    }

    /// Exact counts of the claim's work, if it was [traced](crate::ClaimBuilder::trace).
    #[must_use]
    pub fn work(&self) -> Option<&Work> {
        self.grant.work.as_ref()
    }

    /// Lets the sandbox live until it is released by hand or its lease is over.
    #[must_use = "the handle holds the token, without which nobody gets back in"]
    pub fn keep(mut self) -> SandboxHandle {
        self.duty.0 = None;
        self.handle
    }

    /// Ends the sandbox and says what that did. After a failure the background tries once more, and then the lease
    /// ends the sandbox.
    ///
    /// # Errors
    /// See [`SandboxHandle::release`].
    pub async fn release(mut self) -> Result<Released, Error> {
        let released = self.handle.release().await;
        // Until the answer, a dropped future still leaves the duty to the background.
        if released.is_ok() {
            self.duty.0 = None;
        }
        released
    }
}

impl Deref for Sandbox {
    type Target = SandboxHandle;

    fn deref(&self) -> &SandboxHandle {
        &self.handle
    }
}
