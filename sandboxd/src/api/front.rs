//! What every call passes: a request id on the way in; on the way out, who spoke and that id, in headers and trailers.
//! It is on the path of each claim, so it allocates the id's text and nothing else.

use std::{
    any::Any,
    convert::Infallible,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use sandbox_protocol::{
    id::RequestId,
    metadata::{ORIGIN_HOST, SANDBOX_ORIGIN, SANDBOX_REQUEST_ID},
    reason::Reason,
};
use tonic::{Status, body::Body, service::Routes};
use tower_service::Service as _;
use tracing::Span;

use super::{Peer, Refusal};
use crate::telemetry::span;

/// Makes ids of calls: distinct within a daemon's life by a counter, and between lives by the seed. They are no secret.
#[derive(Debug)]
pub struct RequestIds {
    seed: [u8; 16],
    made: AtomicU64,
}

impl RequestIds {
    /// The seed is 16 random bytes.
    #[must_use]
    pub const fn new(seed: [u8; 16]) -> Self {
        Self {
            seed,
            made: AtomicU64::new(0),
        }
    }

    /// The next id.
    pub fn next(&self) -> RequestId {
        let n = u128::from(self.made.fetch_add(1, Ordering::Relaxed));
        let bits = u128::from_be_bytes(self.seed).wrapping_add(n);
        RequestId::from_random(bits.to_be_bytes())
    }
}

/// The services as one connection sees them.
#[derive(Debug, Clone)]
pub(super) struct Front {
    pub(super) routes: Routes,
    pub(super) ids: Arc<RequestIds>,
    pub(super) peer: Peer,
}

type Answering = <Routes as tower_service::Service<Request<Incoming>>>::Future;

impl hyper::service::Service<Request<Incoming>> for Front {
    type Response = Response<Stamped>;
    type Error = Infallible;
    type Future = Stamping;

    fn call(&self, mut request: Request<Incoming>) -> Stamping {
        let id = self.ids.next();
        let span = span::rpc(request.uri().path(), &id);
        request.extensions_mut().insert(id);
        request.extensions_mut().insert(self.peer.clone());
        Stamping {
            // A router is always ready.
            answering: self.routes.clone().call(request),
            id,
            stamps: Some(Stamps::new(id)),
            span,
        }
    }
}

pin_project! {
    /// A call that is being answered.
    pub(super) struct Stamping {
        #[pin]
        answering: Answering,
        id: RequestId,
        stamps: Option<Stamps>,
        span: Span,
    }
}

impl Future for Stamping {
    type Output = Result<Response<Stamped>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        // The future is not polled again after a panic, so nobody sees what it left half done.
        let polled = this
            .span
            .in_scope(|| catch_unwind(AssertUnwindSafe(|| this.answering.as_mut().poll(cx))));
        let mut response = match polled {
            Ok(answered) => {
                let Ok(response) = ready!(answered);
                response
            }
            Err(panic) => bug(panic.as_ref(), *this.id),
        };
        let stamps = this.stamps.take();
        if let Some(stamps) = &stamps {
            stamps.put(response.headers_mut());
        }
        Poll::Ready(Ok(response.map(|body| Stamped { body, stamps })))
    }
}

/// What a caller gets of a call that panicked; the other calls of its connection go on.
fn bug(panic: &(dyn Any + Send), id: RequestId) -> Response<Body> {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(%id, panic = text.unwrap_or("-"), "a call panicked");
    let refusal = Refusal::new(Reason::Bug, "the daemon failed at this call by a bug");
    refusal.status(id).into_http()
}

#[derive(Debug)]
struct Stamps {
    id: HeaderValue,
}

impl Stamps {
    fn new(id: RequestId) -> Self {
        let id = HeaderValue::try_from(id.to_string()).expect("an id's text is plain");
        Self { id }
    }

    /// Never over what `forward` stamped: it alone knows when a guest spoke.
    fn put(&self, headers: &mut HeaderMap) {
        const ORIGIN: HeaderName = HeaderName::from_static(SANDBOX_ORIGIN);
        const ID: HeaderName = HeaderName::from_static(SANDBOX_REQUEST_ID);
        headers
            .entry(ORIGIN)
            .or_insert(HeaderValue::from_static(ORIGIN_HOST));
        headers.insert(ID, self.id.clone());
    }
}

pin_project! {
    /// A reply's body whose trailers are stamped.
    #[derive(Debug)]
    pub(super) struct Stamped {
        #[pin]
        body: Body,
        stamps: Option<Stamps>,
    }
}

impl http_body::Body for Stamped {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.project();
        let mut frame = ready!(this.body.poll_frame(cx));
        if let Some(Ok(frame)) = &mut frame
            && let (Some(trailers), Some(stamps)) = (frame.trailers_mut(), &this.stamps)
        {
            stamps.put(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let ids = RequestIds::new([0xff; 16]);
        let first = ids.next();
        assert_ne!(first, ids.next());
        assert_ne!(RequestIds::new([1; 16]).next(), first);
    }
}
