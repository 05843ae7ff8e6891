//! A judged request on its way to its origin, and the origin's answer back. Both are written anew.

use std::{
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, header, request};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, combinators::BoxBody};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use sandbox_protocol::door::DoorReason;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::{BODY, TUNNEL, Visit, guard::FIELDS};
use crate::{
    egress::{Denial, Reached},
    policy::{Authority, Seen},
    tasks,
};

/// Fields that are about one connection, besides those that Connection names.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const VIA: HeaderValue = HeaderValue::from_static("1.1 sandboxd");

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A body of an answer.
pub(super) type Body = BoxBody<Bytes, BoxError>;

/// What was asked for, as it was judged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    /// The origin that the guest named.
    pub(super) target: &'a Authority,
    /// Method and path.
    pub(super) seen: Seen<'a>,
}

/// Sends a request over a connection made for it, and gives the answer.
///
/// # Errors
/// The denial, recorded. Cancel safe: the connection ends with it.
pub(super) async fn send(
    visit: &Visit,
    reached: Reached,
    asked: Asked<'_>,
    mut parts: request::Parts,
    body: Incoming,
) -> Result<Response<Body>, Denial> {
    let Asked { target, seen } = asked;
    let refuse = |reason| visit.refuse_request(reason, &target.to_string(), seen);
    let broken = |_error| refuse(DoorReason::UpstreamProtocol);
    strip(&mut parts.headers);
    write_anew(&mut parts.headers, target);
    let mut onwards = Request::new(body);
    *onwards.method_mut() = parts.method;
    *onwards.uri_mut() = parts
        .uri
        .path_and_query()
        .cloned()
        .map(http::Uri::from)
        .unwrap_or_default();
    *onwards.headers_mut() = parts.headers;
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_headers(FIELDS)
        .handshake::<_, Incoming>(TokioIo::new(reached.stream))
        .await
        .map_err(broken)?;
    // Its connection lives as long as somebody reads its answer, and no longer than the claim.
    let driver = AbortOnDrop(tasks::spawn("door upstream", connection));
    // A request may take long to be sent; one whose body rests is given up by the gate.
    let answered = timeout(TUNNEL, sender.send_request(onwards)).await;
    let response = match answered {
        Ok(answered) => answered.map_err(broken)?,
        Err(_elapsed) => return Err(refuse(DoorReason::DialTimeout)),
    };
    // Nobody asked for another protocol.
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(refuse(DoorReason::UpstreamProtocol));
    }
    Ok(back(response, driver))
}

/// The answer, written anew, which keeps its connection alive until it is read.
fn back(response: Response<Incoming>, driver: AbortOnDrop) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    strip(&mut parts.headers);
    parts.headers.append(header::VIA, VIA);
    parts.version = Version::HTTP_11;
    let body = Passing {
        body,
        rests: Box::pin(sleep(BODY)),
        _driver: driver,
    };
    Response::from_parts(parts, body.boxed())
}

/// An origin's body on its way, given up when it rests for too long.
struct Passing {
    body: Incoming,
    rests: Pin<Box<Sleep>>,
    /// Its connection.
    _driver: AbortOnDrop,
}

impl http_body::Body for Passing {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.rests.as_mut().reset(Instant::now() + BODY);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        ready!(self.rests.as_mut().poll(cx));
        Poll::Ready(Some(Err("the origin rests".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Ends a task when nobody needs it any more.
struct AbortOnDrop(tokio::task::JoinHandle<Result<(), hyper::Error>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Removes what is about one connection: the fields known for it, and those that Connection names. Host and the lengths
/// are written behind this, so that nobody can name them away.
pub(super) fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| *name != header::HOST && *name != header::CONTENT_LENGTH)
        .collect();
    let takes_trailers = headers
        .get_all(header::TE)
        .iter()
        .any(|value| value.as_bytes().eq_ignore_ascii_case(b"trailers"));
    for name in named.iter().chain(&HOP_BY_HOP).chain([&PROXY_CONNECTION]) {
        headers.remove(name);
    }
    if takes_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Sets what the door decides: Host by the target that was judged. Expect was answered here.
fn write_anew(headers: &mut HeaderMap, target: &Authority) {
    headers.remove(header::EXPECT);
    let host = if target.port() == 80 {
        target.host().to_string()
    } else {
        target.to_string()
    };
    if let Ok(host) = host.parse() {
        headers.insert(header::HOST, host);
    }
    headers.append(header::VIA, VIA);
}
