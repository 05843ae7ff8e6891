//! From a request's path to the service that answers it, and from a panic to an error of that one call.
//!
//! May call: agent, control.
//! Never inside: a decision about a call.

use std::{
    any::Any,
    convert::Infallible,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use hyper::body::Incoming;
use sandbox_protocol::{
    limits::MESSAGE_IN,
    v1::{agent_control_server::AgentControlServer, agent_server::AgentServer},
};
use tonic::{Status, body::Body};
use tower_service::Service as _;

use crate::{
    agent::{Agent, reason::bug},
    control::Control,
};

/// What a link serves; a handle.
#[derive(Debug, Clone)]
pub struct Server {
    agent: AgentServer<Agent>,
    control: AgentControlServer<Control>,
}

impl Server {
    /// The two services.
    #[must_use]
    pub fn new(agent: Agent, control: Control) -> Self {
        Self {
            agent: AgentServer::new(agent).max_decoding_message_size(MESSAGE_IN),
            control: AgentControlServer::new(control).max_decoding_message_size(MESSAGE_IN),
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for Server {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let (mut agent, mut control) = (self.agent.clone(), self.control.clone());
        let service = request
            .uri()
            .path()
            .rsplit_once('/')
            .map(|(service, _method)| service);
        // The generated services answer what they do not know with UNIMPLEMENTED.
        match service {
            Some("/sandbox.v1.Agent") => {
                let request = request.map(Half);
                Box::pin(guarded(async move { agent.call(request).await }))
            }
            Some("/sandbox.v1.AgentControl") => {
                let request = request.map(Half);
                Box::pin(guarded(async move { control.call(request).await }))
            }
            Some(_) | None => Box::pin(async { Ok(Status::unimplemented("no such service").into_http()) }),
        }
    }
}

/// What a caller sends. A stream that was broken off is an error: tonic would take a cancelled one, and hyper one that
/// was reset without an error, for one that has come to its end, and half a file for a whole one.
struct Half<B>(B);

impl<B> http_body::Body for Half<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let left = || Status::aborted("the caller broke the call off");
        Poll::Ready(match std::task::ready!(Pin::new(&mut self.0).poll_frame(cx)) {
            Some(frame) => Some(frame.map_err(|_broken| left())),
            None if self.0.is_end_stream() => None,
            None => Some(Err(left())),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

/// Ends the one call in which something panics, with `AGENT_BUG`.
async fn guarded<F>(call: F) -> Result<Response<Body>, Infallible>
where
    F: Future<Output = Result<Response<Body>, Infallible>> + Send,
{
    // Unwind safe: what the call shared with others is behind locks that take a poisoned value as it is.
    match AssertUnwindSafe(call).catch_unwind().await {
        Ok(Ok(response)) => Ok(response.map(|body| Body::new(Guarded { body, over: false }))),
        Ok(Err(never)) => match never {},
        Err(panic) => Ok(told(&*panic).into_http()),
    }
}

fn told(panic: &(dyn Any + Send)) -> Status {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    bug(text.unwrap_or("a panic without words"))
}

/// A body that turns a panic into trailers.
struct Guarded {
    body: Body,
    over: bool,
}

impl http_body::Body for Guarded {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let this = &mut *self;
        match catch_unwind(AssertUnwindSafe(|| Pin::new(&mut this.body).poll_frame(cx))) {
            Ok(frame) => frame,
            Err(panic) => {
                this.over = true;
                // What the stream held is let go now: its programs end as for any client that is gone.
                this.body = Body::empty();
                let mut trailers = HeaderMap::new();
                told(&*panic).add_header(&mut trailers)?;
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.over || self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tonic::Code;

    use super::*;

    fn headers_of(status: &Status) -> HeaderMap {
        let mut headers = HeaderMap::new();
        status.add_header(&mut headers).unwrap();
        headers
    }

    /// What a handler gets of a request whose body is this.
    async fn received<B>(body: B) -> Result<usize, Code>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    {
        use sandbox_protocol::v1::Chunk;
        use tonic::codec::Codec as _;
        let decoder = tonic_prost::ProstCodec::<Chunk, Chunk>::default().decoder();
        let mut messages = tonic::Streaming::<Chunk>::new_request(decoder, Half(body), None, None);
        let mut count = 0;
        while let Some(_message) = messages.message().await.map_err(|status| status.code())? {
            count += 1;
        }
        Ok(count)
    }

    #[tokio::test]
    async fn f02_a_request_that_is_broken_off_does_not_end() {
        let message = || Bytes::from_static(b"\0\0\0\0\x03\x0a\x01x");
        assert_eq!(received(http_body_util::Full::new(message())).await, Ok(1));
        // Cancelled, as HTTP/2 and tonic have it.
        let frames = [Ok(Frame::data(message())), Err(Status::cancelled("left"))];
        let body = http_body_util::StreamBody::new(futures_util::stream::iter(frames));
        assert_eq!(received(body).await, Err(Code::Aborted));
        // Reset without an error, which hyper shows as no more frames of a body that has not ended.
        let frames = [Ok::<_, Status>(Frame::data(message()))];
        let body = http_body_util::StreamBody::new(futures_util::stream::iter(frames));
        assert_eq!(received(body).await, Err(Code::Aborted));
    }

    #[tokio::test]
    async fn panic_in_one_call_ends_one_call() {
        let response = guarded(async { panic!("on purpose") }).await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!((status.code(), status.message()), (Code::Internal, "on purpose"));

        let mut first = true;
        let frames = futures_util::stream::poll_fn(move |_cx| {
            assert!(std::mem::take(&mut first), "a second poll");
            Poll::Ready(Some(Ok::<_, Status>(Frame::data(Bytes::from_static(b"x")))))
        });
        let body = Body::new(http_body_util::StreamBody::new(frames));
        let response = guarded(async { Ok(Response::new(body)) }).await.unwrap();
        let collected = response.into_body().collect().await.unwrap();
        let trailers = collected.trailers().unwrap().clone();
        assert_eq!(
            Status::from_header_map(&trailers).unwrap().message(),
            "a second poll"
        );
        assert_eq!(collected.to_bytes(), "x");
        assert!(!headers_of(&bug("x")).is_empty());
    }
}
