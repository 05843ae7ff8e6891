//! A client of one daemon: the connection, the token, and how long calls may take.
//!
//! May call: dial, retry, error, token, tasks, claim, sandbox, admin.
//! Never inside: a repeated call (that is `retry`'s).
//! Cancel safety: every future may be dropped; see the calls for what that leaves.

use std::{sync::Arc, time::Duration};

use sandbox_protocol::{
    limits, metadata,
    v1::{
        PoolKey, agent_client::AgentClient, claims_client::ClaimsClient, egress_client::EgressClient,
        node_client::NodeClient, pools_client::PoolsClient, templates_client::TemplatesClient,
    },
};
use tonic::{Request, Response, Status};

use crate::{
    admin::{Claims, Egress, Node, Pools, Templates},
    claim::{ClaimBuilder, Source},
    dial::{Address, Link},
    error::Error,
    retry::{self, Repeat},
    sandbox::SandboxHandle,
    tasks::Tasks,
    token::Token,
};

/// Time of a call, unless set.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time to connect, unless set.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How to connect. Made by [`Client::options`].
#[derive(Debug, Clone)]
pub struct Options {
    token: Option<Token>,
    ca: Vec<u8>,
    timeout: Duration,
    connect_timeout: Duration,
}

impl Options {
    /// The token of calls that have none of their own. Without one, over the Unix socket, the daemon knows who
    /// calls by the peer's credentials.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Certificates (PEM) to trust beside the host's own bundle; for `https://` addresses.
    #[must_use]
    pub fn ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca = pem.into();
        self
    }

    /// Time of every call but streams, repeats included; default 60 s. A claim has its time in line on top.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Time of one attempt to connect, TLS included; default 10 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Connects to `unix:PATH`, `http://127.0.0.1:PORT` (loopback only) or `https://HOST:PORT`.
    ///
    /// # Errors
    /// ADDRESS_INVALID, FIELD_INVALID (`ca`), or kind `Unreachable`.
    pub async fn connect(self, address: &str) -> Result<Client, Error> {
        let address: Address = address.parse()?;
        let origin = address.origin();
        let link = Link::open(address, &self.ca, self.connect_timeout).await?;
        Ok(Client(Arc::new(Shared {
            link,
            origin,
            token: self.token,
            timeout: self.timeout,
            releases: Tasks::here(),
        })))
    }
}

/// A client of one daemon. Cheap to clone; all clones share one connection, which is made anew when it was lost.
#[derive(Debug, Clone)]
pub struct Client(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    link: Link,
    origin: http::Uri,
    token: Option<Token>,
    timeout: Duration,
    releases: Tasks,
}

/// One method of a generated client, as [`Client::unary`] and [`Client::open`] take it. Boxed: tonic's futures are
/// large, and would be copied from caller to caller.
macro_rules! via {
    ($client:ident . $method:ident) => {
        |client: $crate::Client, request| async move { Box::pin(client.$client().$method(request)).await }
    };
}
pub(crate) use via;

/// What a call is done with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms<'a> {
    pub(crate) repeat: Repeat,
    /// In place of the client's.
    pub(crate) token: Option<&'a Token>,
    /// In place of the client's.
    pub(crate) limit: Option<Duration>,
}

impl Terms<'_> {
    pub(crate) const fn new(repeat: Repeat) -> Self {
        Terms {
            repeat,
            token: None,
            limit: None,
        }
    }
}

impl Client {
    /// Where a daemon of a package listens.
    pub const DEFAULT_ADDRESS: &'static str = "unix:/run/sandboxd/api.sock";

    /// Connects with the defaults of [`Options`].
    ///
    /// # Errors
    /// See [`Options::connect`].
    pub async fn connect(address: &str) -> Result<Self, Error> {
        Self::options().connect(address).await
    }

    /// How to connect, with the defaults.
    #[must_use]
    pub fn options() -> Options {
        Options {
            token: None,
            ca: Vec::new(),
            timeout: TIMEOUT,
            connect_timeout: CONNECT_TIMEOUT,
        }
    }

    /// Claims a sandbox of a pool. Await the builder, or set more first.
    pub fn claim(&self, pool: impl Into<String>) -> ClaimBuilder {
        ClaimBuilder::new(self.clone(), Source::Pool(pool.into()))
    }

    /// Claims a sandbox by template, lane and size: of the first pool that has this key, else made on demand.
    pub fn claim_key(&self, key: PoolKey) -> ClaimBuilder {
        ClaimBuilder::new(self.clone(), Source::Key(key))
    }

    /// A sandbox that was claimed before. Without a token the client's own rights count (an operator's do).
    /// Dropping the handle leaves the sandbox alone.
    #[must_use]
    pub fn sandbox(&self, id: impl Into<String>, token: Option<Token>) -> SandboxHandle {
        SandboxHandle::new(self.clone(), id.into(), token)
    }

    /// Claims as rows: list, look, watch.
    #[must_use]
    pub fn claims(&self) -> Claims<'_> {
        Claims(self)
    }

    /// The stocks of warm clones.
    #[must_use]
    pub fn pools(&self) -> Pools<'_> {
        Pools(self)
    }

    /// What clones start from.
    #[must_use]
    pub fn templates(&self) -> Templates<'_> {
        Templates(self)
    }

    /// What guests may reach, and what became of their attempts.
    #[must_use]
    pub fn egress(&self) -> Egress<'_> {
        Egress(self)
    }

    /// The host and its daemon.
    #[must_use]
    pub fn node(&self) -> Node<'_> {
        Node(self)
    }

    /// Waits until the releases that dropped sandboxes began are over, each within its 10 s. Call it before the
    /// process ends, or those may be lost (their leases end them then). Cancel safe.
    pub async fn flush(&self) {
        self.0.releases.join().await;
    }

    pub(crate) fn releases(&self) -> &Tasks {
        &self.0.releases
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    pub(crate) fn claims_client(&self) -> ClaimsClient<Link> {
        ClaimsClient::with_origin(self.0.link.clone(), self.0.origin.clone())
            .max_decoding_message_size(limits::MESSAGE_IN)
    }

    pub(crate) fn pools_client(&self) -> PoolsClient<Link> {
        PoolsClient::with_origin(self.0.link.clone(), self.0.origin.clone())
            .max_decoding_message_size(limits::MESSAGE_IN)
    }

    pub(crate) fn templates_client(&self) -> TemplatesClient<Link> {
        TemplatesClient::with_origin(self.0.link.clone(), self.0.origin.clone())
            .max_decoding_message_size(limits::MESSAGE_IN)
    }

    pub(crate) fn node_client(&self) -> NodeClient<Link> {
        NodeClient::with_origin(self.0.link.clone(), self.0.origin.clone())
            .max_decoding_message_size(limits::MESSAGE_IN)
    }

    pub(crate) fn egress_client(&self) -> EgressClient<Link> {
        EgressClient::with_origin(self.0.link.clone(), self.0.origin.clone())
            .max_decoding_message_size(limits::MESSAGE_IN)
    }

    pub(crate) fn agent_client(&self) -> AgentClient<Link> {
        AgentClient::with_origin(self.0.link.clone(), self.0.origin.clone())
            .max_decoding_message_size(limits::MESSAGE_IN)
    }

    /// Dresses a message with the token and the time left.
    pub(crate) fn request<M>(&self, message: M, token: Option<&Token>, left: Option<Duration>) -> Request<M> {
        let mut request = Request::new(message);
        if let Some(token) = token.or(self.0.token.as_ref()) {
            request
                .metadata_mut()
                .insert(metadata::AUTHORIZATION, token.bearer());
        }
        if let Some(left) = left {
            request.set_timeout(left);
        }
        request
    }

    /// One unary call, repeated as its terms allow.
    pub(crate) async fn unary<M, R, S, F>(&self, terms: Terms<'_>, message: &M, send: S) -> Result<R, Error>
    where
        M: Clone,
        S: Fn(Self, Request<M>) -> F,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let limit = terms.limit.unwrap_or(self.0.timeout);
        // Boxed, so that the futures of callers stay small.
        Box::pin(retry::call(terms.repeat, Some(limit), |left| {
            let sent = send(self.clone(), self.request(message.clone(), terms.token, left));
            async { sent.await.map(Response::into_inner) }
        }))
        .await
    }

    /// Opens a stream: the client's time counts until the daemon answers, and the stream itself has none.
    pub(crate) async fn open<M, R, S, F>(&self, terms: Terms<'_>, message: &M, send: S) -> Result<R, Error>
    where
        M: Clone,
        S: Fn(Self, Request<M>) -> F,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let limit = terms.limit.unwrap_or(self.0.timeout);
        Box::pin(retry::call(terms.repeat, Some(limit), |_left| {
            let sent = send(self.clone(), self.request(message.clone(), terms.token, None));
            async { sent.await.map(Response::into_inner) }
        }))
        .await
    }
}
