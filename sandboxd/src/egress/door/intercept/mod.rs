//! Looking into TLS: a tunnel that a rule wants to see inside ends here, as TLS of a host whose certificate is made here,
//! and begins anew as TLS to the host itself.
//!
//! One name everywhere: what was asked for is what the ClientHello names, what every request inside names, and what the
//! origin proves. The origin is dialled and verified before the client is answered, and the client is offered what the
//! origin chose: HTTP/2 speaks to HTTP/2 only. One connection of a client has one connection to its origin; the loss of
//! either ends the other, as it would without us.
//!
//! Never inside: a byte that is passed on unseen; a way to go on with an origin that was not verified.
//! Cancel safety: dropping a connection's future resets both of its sides and ends the tasks of its streams.

mod error;
mod hello;
mod leaves;
mod origin;
mod pass;
mod roots;
mod serve;

use std::{fmt, sync::Arc};

use bytes::Bytes;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig, client::Resumption, crypto::ring,
    server::NoServerSessionStorage,
};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

pub use self::error::InterceptionError;
use self::leaves::Leaves;
use super::{Visit, farewell, last_word};
use crate::{ca::Node, clock::Clock, link::Prefixed, policy::Authority};

/// What a node looks into TLS with.
pub struct Interception {
    leaves: Leaves,
    server: ServerConfig,
    client: ClientConfig,
}

impl fmt::Debug for Interception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interception")
            .field("node", self.leaves.node())
            .finish_non_exhaustive()
    }
}

impl Interception {
    /// With this intermediate; origins are verified by these roots. Those that cannot be read are passed over.
    ///
    /// # Errors
    /// [`InterceptionError`].
    pub fn new(
        node: Node,
        roots: Vec<CertificateDer<'static>>,
        clock: Clock,
    ) -> Result<Self, InterceptionError> {
        let provider = Arc::new(ring::default_provider());
        let leaves = Leaves::new(node, &provider, clock)?;
        let mut trusted = RootCertStore::empty();
        let (taken, passed_over) = trusted.add_parsable_certificates(roots);
        if taken == 0 {
            return Err(InterceptionError::NoRoots);
        }
        tracing::debug!(taken, passed_over, "roots that origins are verified by");
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(trusted)
            .with_no_client_auth();
        // A ticket of one sandbox would be shown by another.
        client.resumption = Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(leaves::NoLeaf));
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Self {
            leaves,
            server,
            client,
        })
    }

    /// The intermediate that it signs with.
    #[must_use]
    pub const fn node(&self) -> &Node {
        self.leaves.node()
    }
}

/// Serves a tunnel that was allowed and told to stand; `early` is what the client sent before that.
pub(super) async fn run<T>(
    visit: &Arc<Visit>,
    means: &Arc<Interception>,
    io: T,
    early: Bytes,
    target: Authority,
) where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let io = Prefixed::new(early, io);
    let Some(hello) = Box::pin(hello::read(visit, io, &target)).await else {
        return;
    };
    // Whatever ends this ends the tasks of its streams.
    let cut = CancellationToken::new();
    let _cuts = cut.clone().drop_guard();
    let streams = serve::Streams::new(visit, cut);
    let origin = Box::pin(origin::dial(visit, means, &target, hello.alpn())).await;
    let alpn = origin
        .as_ref()
        .map_or_else(|_denied| hello.plainest(), |origin| origin.alpn());
    let Some(tls) = Box::pin(hello::finish(visit, means, hello, &target, alpn)).await else {
        return;
    };
    let mut changes = visit.door().changes();
    let forbidden = async {
        // A policy that changed between the decision and this moment counts too.
        while visit.still_inside(&target).is_ok() {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        biased;
        () = forbidden => {}
        () = Box::pin(serve::serve(visit, tls, origin, &target, streams)) => {}
    }
}
