//! One call over a link: the request's body goes out while the reply comes in.
//!
//! Until the reply begins, the caller's own task sends the body; a body that goes on after that gets a task of its own,
//! so that input flows while nobody reads the output.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::{SendStream, client::SendRequest};
use http::uri::{Authority, PathAndQuery, Scheme};
use http_body::Body as _;
use tonic::body::Body;

use super::details::drop_undecodable;
use super::{
    Link, LinkBody, LinkError, Way, local,
    signals::{Place, Signals},
};
use crate::tasks;

impl Link {
    /// Calls the guest. Both bodies are streamed under flow control; the reply's trailers come as its body's last
    /// frame. Trailers of the request are dropped: gRPC has none.
    ///
    /// # Errors
    /// [`LinkError::Full`] and [`LinkError::Unsendable`]: nothing was sent. [`LinkError::Reset`], [`LinkError::Lost`],
    /// [`LinkError::CallerLeft`]: the guest may have begun.
    ///
    /// Cancel safe: dropping the call, or later the body of its reply, resets the stream.
    pub async fn call(&self, request: http::Request<Body>) -> Result<http::Response<LinkBody>, LinkError> {
        let signals = &self.0.signals;
        let place = Place::take(signals).ok_or(LinkError::Full)?;
        match &self.0.way {
            Way::Kept(send) => kept(send.clone(), signals, request, (place, self.clone())).await,
            Way::Local(answerer) => local::call(answerer.as_ref(), signals, request, place).await,
        }
    }
}

async fn kept(
    send: SendRequest<Bytes>,
    signals: &Signals,
    request: http::Request<Body>,
    held: (Place, Link),
) -> Result<http::Response<LinkBody>, LinkError> {
    let (head, body) = head(request);
    // Each clone opens one stream, and `Place` bounds them: this waits for nothing but the connection's health.
    let mut send = send.ready().await.map_err(LinkError::Lost)?;
    signals.requested();
    let empty = body.is_end_stream();
    let (mut response, stream) = send.send_request(head, empty).map_err(unsendable)?;
    drop(send);
    let mut pump = (!empty).then(|| Pump::new(stream, body));
    let mut response = poll_fn(|cx| {
        if let Some(running) = &mut pump
            && let Poll::Ready(sent) = Pin::new(running).poll(cx)
        {
            pump = None;
            sent?;
        }
        Pin::new(&mut response).poll(cx).map_err(broken)
    })
    .await?;
    signals.hear();
    drop_undecodable(response.headers_mut());
    let pump = pump.map(|pump| {
        tasks::spawn("link-pump", async {
            // A body that failed has reset the stream, which the reader of the reply sees.
            drop(pump.await);
        })
    });
    Ok(response.map(|stream| LinkBody::kept(stream, pump, held)))
}

/// What HTTP/2 needs of a request: scheme and authority say nothing on a link, and are always the same.
fn head(request: http::Request<Body>) -> (http::Request<()>, Body) {
    let (mut parts, body) = request.into_parts();
    let mut uri = http::uri::Parts::default();
    uri.scheme = Some(Scheme::HTTP);
    uri.authority = Some(Authority::from_static("silkd"));
    uri.path_and_query = parts
        .uri
        .into_parts()
        .path_and_query
        .or(Some(PathAndQuery::from_static("/")));
    parts.uri = http::Uri::from_parts(uri).expect("scheme, authority and path make a URI");
    parts.version = http::Version::HTTP_2;
    // What a server hung on the request stays in this process.
    parts.extensions = http::Extensions::new();
    (http::Request::from_parts(parts, ()), body)
}

fn unsendable(error: h2::Error) -> LinkError {
    if error.is_io() || error.is_go_away() {
        LinkError::Lost(error)
    } else {
        LinkError::Unsendable(error)
    }
}

/// A reset by the guest ends the call; all else, also its breaches of the protocol, is the link's.
pub(super) fn broken(error: h2::Error) -> LinkError {
    match error.reason() {
        Some(reason) if error.is_reset() && error.is_remote() => LinkError::Reset(reason),
        Some(_) | None => LinkError::Lost(error),
    }
}

/// Sends a request's body as fast as the guest takes it. Dropped before its end, it leaves the stream to be reset.
struct Pump {
    stream: SendStream<Bytes>,
    body: Body,
    chunk: Bytes,
    last: bool,
}

impl Pump {
    fn new(stream: SendStream<Bytes>, body: Body) -> Self {
        Self {
            stream,
            body,
            chunk: Bytes::new(),
            last: false,
        }
    }

    /// Sends as much of the chunk as there is room for. False: the guest takes no more.
    fn send(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        self.stream.reserve_capacity(self.chunk.len());
        let room = match ready!(self.stream.poll_capacity(cx)) {
            Some(Ok(room)) => room.min(self.chunk.len()),
            Some(Err(_)) | None => return Poll::Ready(false),
        };
        let part = self.chunk.split_to(room);
        let last = self.last && self.chunk.is_empty();
        Poll::Ready(self.stream.send_data(part, last).is_ok())
    }
}

impl Future for Pump {
    type Output = Result<(), LinkError>;

    /// Ready when all is sent, or the guest wants no more (the reply says why), or the caller's body failed.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            if !self.chunk.is_empty() {
                if !ready!(self.send(cx)) {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            if self.last {
                return Poll::Ready(Ok(()));
            }
            let polled = Pin::new(&mut self.body).poll_frame(cx);
            match polled {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        // An end in a frame without data is told by the body once more.
                        self.last = !data.is_empty() && self.body.is_end_stream();
                        self.chunk = data;
                    }
                }
                Poll::Ready(Some(Err(_status))) => {
                    self.stream.send_reset(h2::Reason::CANCEL);
                    return Poll::Ready(Err(LinkError::CallerLeft));
                }
                Poll::Ready(None) => {
                    self.last = true;
                    // A stream that the guest has reset needs no end.
                    drop(self.stream.send_data(Bytes::new(), true));
                }
                Poll::Pending => {
                    // Also woken when the guest wants no more while the caller sends nothing.
                    return self.stream.poll_reset(cx).map(|_reset| Ok(()));
                }
            }
        }
    }
}
