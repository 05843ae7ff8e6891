//! WebSocket: how a request asks for it, how an origin agrees, and the raw bytes that follow.

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, header, uri::PathAndQuery};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    Visit,
    body::{Body, full},
    farewell,
    guard::{self, WEBSOCKET},
    onward::strip,
    say, tunnel,
};
use crate::{egress::Reached, policy::Seen};

/// Whether a request asks for it, as the guard in front of hyper judged the same head.
pub(super) fn asks(request: &Request<Incoming>) -> bool {
    let fields = request.headers().iter();
    let fields = fields.map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()));
    request.version() == Version::HTTP_11
        && request.body().is_end_stream()
        && guard::asks_websocket(request.method().as_str().as_bytes(), fields)
}

/// Asks for it, or agrees to it, behind what [`strip`] left.
pub(super) fn write(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(WEBSOCKET));
}

/// An origin whose connection has left HTTP.
#[derive(Debug)]
pub(super) struct Switched<T> {
    /// The origin.
    reached: Reached<T>,
    /// What it said behind its answer.
    early: Bytes,
}

impl<T> Switched<T> {
    /// What an origin that answered 101 agreed to; none: it means another protocol. `I` is what its connection speaks
    /// HTTP over, which is moved elsewhere, and holds what leads to `place`.
    pub(super) async fn agreed<I>(
        response: &mut Response<Incoming>,
        place: &Reached<()>,
        inner: impl FnOnce(I) -> T,
    ) -> Option<Self>
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let agreed = response.headers().get(header::UPGRADE)?;
        if !agreed.as_bytes().eq_ignore_ascii_case(WEBSOCKET.as_bytes()) {
            return None;
        }
        let raw = hyper::upgrade::on(response).await.ok()?;
        let raw = raw.downcast::<TokioIo<I>>().ok()?;
        Some(Self {
            reached: place.by(inner(raw.io.into_inner())),
            early: raw.read_buf,
        })
    }
}

/// The answer to a client whose origin agreed.
pub(super) fn answer(response: Response<Incoming>) -> Response<Body> {
    let (mut parts, _none) = response.into_parts();
    strip(&mut parts.headers);
    write(&mut parts.headers);
    Response::from_parts(parts, full(Bytes::new()))
}

/// A request that switched, as it was judged.
#[derive(Debug)]
struct Switch<T> {
    to: Switched<T>,
    method: Method,
    path: PathAndQuery,
}

/// Where a request that switched leaves its origin until its client's connection is free of HTTP.
#[derive(Debug)]
pub(super) struct Turnout<T>(Mutex<Option<Switch<T>>>);

impl<T> Default for Turnout<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> Turnout<T> {
    /// Leaves it there. Nothing behind such a request is read as HTTP, so no other comes after it.
    pub(super) fn put(&self, to: Switched<T>, method: Method, path: PathAndQuery) {
        let switch = Switch { to, method, path };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(switch);
    }

    fn take(&self) -> Option<Switch<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What follows a request for WebSocket: raw bytes where the origin agreed, and else nothing. `seen` is what it is held to.
pub(super) async fn run<T, O>(
    visit: &Visit,
    mut io: T,
    early: &[u8],
    turnout: &Turnout<O>,
    seen: impl for<'a> FnOnce(&'a str, &'a str) -> Seen<'a>,
) where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    O: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Some(Switch { to, method, path }) = turnout.take() else {
        return farewell(io).await;
    };
    let seen = seen(method.as_str(), path.as_str());
    if say(&mut io, &to.early).await {
        Box::pin(tunnel::run(visit, io, early, to.reached, seen)).await;
    }
}
