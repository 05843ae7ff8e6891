//! Agent calls to the right guest: bytes as they come, headers and trailers by an allow-list, and whose word it is.
//!
//! May call: access, clock, link, work; the registry of sandboxes through [`Guests`].
//! Never inside: prost, a message's body, a path but `/sandbox.v1.Agent/`.
//! Invariant 13: credentials never reach a guest: it gets content-type, te and grpc-timeout of a call's metadata.
//! Invariant 18: no client reaches AgentControl: the prefix is exact and the rest is one plain word.
//! Invariant 19: a call that needs a newer silkd than the guest's is refused here.
//! Cancel safety: a client that leaves, also while the guest is silent, drops the call and so resets it in the guest.

mod reply;
mod request;

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use sandbox_protocol::reason::Reason;
use tonic::{Status, body::Body, server::NamedService};
use tower_service::Service;

use self::reply::GuestReply;
use super::{
    Refusal,
    auth::{AccessNow, Ctx},
    trace::Trace,
};
use crate::{access::Caller, clock::Clock, link::Link, work};

/// Where guests are found.
pub trait Guests: Send + Sync + 'static {
    /// Counts a use of the sandbox for as long as it is kept.
    type Use: Send + 'static;

    /// The guest of that sandbox, for this caller. The text is the client's: it need not be an id.
    ///
    /// # Errors
    /// An unknown sandbox and a caller that does not open it are the same [`Refusal::not_found`], reached by the same
    /// path ([`Caller::opens`]). To a caller that opens it, one that has ended or failed says so.
    fn find(&self, sandbox: &str, caller: &Caller) -> Result<Guest<Self::Use>, Refusal>;
}

/// A guest that takes calls.
#[derive(Debug)]
pub struct Guest<U> {
    /// The way to it.
    pub link: Link,
    /// The agent protocol in use with it.
    pub proto: u32,
    /// Kept until the call ends.
    pub used: U,
}

/// The service `sandbox.v1.Agent` as clients of the host see it.
#[derive(Debug)]
pub struct Forward<G> {
    guests: Arc<G>,
    access: AccessNow,
    clock: Clock,
}

impl<G> Forward<G> {
    /// Forwards to those guests whoever this access lets.
    pub const fn new(guests: Arc<G>, access: AccessNow, clock: Clock) -> Self {
        Self {
            guests,
            access,
            clock,
        }
    }
}

impl<G> Clone for Forward<G> {
    fn clone(&self) -> Self {
        Self {
            guests: Arc::clone(&self.guests),
            access: Arc::clone(&self.access),
            clock: self.clock.clone(),
        }
    }
}

impl<G> NamedService for Forward<G> {
    const NAME: &'static str = "sandbox.v1.Agent";
}

impl<G: Guests> Service<Request<Body>> for Forward<G> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let ctx = Ctx::new(request.headers(), request.extensions(), &self.access.load());
        let mut trace = Trace::begin(&self.clock, ctx.trace);
        match self.admit(&ctx, request) {
            Ok((guest, request)) => {
                trace.step("find");
                Box::pin(pass(ctx, guest, request, trace))
            }
            Err(status) => Box::pin(std::future::ready(Ok(status.into_http()))),
        }
    }
}

impl<G: Guests> Forward<G> {
    fn admit(&self, ctx: &Ctx, request: Request<Body>) -> Result<(Guest<G::Use>, Request<Body>), Status> {
        let refuse = |refusal: Refusal| refusal.status(ctx.id);
        let wish = request::read(request.headers()).map_err(refuse)?;
        let guest = self.guests.find(wish.sandbox, &ctx.caller).map_err(refuse)?;
        if wish.proto_min > guest.proto {
            let message = format!(
                "this call needs agent protocol {}, the guest has {}",
                wish.proto_min, guest.proto
            );
            return Err(refuse(Refusal::new(Reason::AgentTooOld, message)));
        }
        Ok((guest, request::strip(request)?))
    }
}

async fn pass<U: Send + 'static>(
    ctx: Ctx,
    guest: Guest<U>,
    request: Request<Body>,
    mut trace: Trace,
) -> Result<Response<Body>, Infallible> {
    let Guest { link, used, .. } = guest;
    // Boxed: with and without a trace it would lie here twice.
    let called = Box::pin(async {
        work::count(work::Kind::GuestRoundTrips, 1);
        link.call(request).await
    });
    let called = trace.run("guest", called).await;
    Ok(match called {
        Ok(response) => GuestReply::begin(response, &ctx, used, trace),
        Err(error) => reply::failed(&error, ctx.id).http(),
    })
}
