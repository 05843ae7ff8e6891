//! The HTTP door: plain requests by absolute target, and CONNECT. Messages are written anew, never forwarded as bytes, and
//! each request on a connection is judged.

use std::{
    convert::Infallible,
    future::{Future as _, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header,
    uri::PathAndQuery,
};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use sandbox_protocol::{door::DoorReason, metadata::door::OWN_NAME};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    time::{Instant, Sleep, sleep, timeout},
};

use super::{
    BODY, TUNNEL, Visit, farewell,
    gate::{Gate, Over},
    guard::FIELDS,
    tunnel,
};
use crate::{
    egress::Denial,
    policy::{Authority, Host, Seen},
    tasks,
};

/// What hyper buffers of a connection: a whole head, which the guard bounds.
const BUFFER: usize = 128 * 1024;
/// That a tunnel stands.
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";
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

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Body = BoxBody<Bytes, BoxError>;

/// Serves one connection.
pub(super) async fn serve<T>(visit: Visit, io: T)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let visit = Arc::new(visit);
    let serving = {
        let visit = Arc::clone(&visit);
        service_fn(move |request| {
            let visit = Arc::clone(&visit);
            Box::pin(async move { Ok::<_, Infallible>(answer(&visit, request).await) })
        })
    };
    let mut connection = http1::Builder::new()
        // A client that has sent all it has still wants its answer.
        .half_close(true)
        .max_headers(FIELDS + 1)
        .max_buf_size(BUFFER)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(Gate::new(io)), serving);
    let outcome = poll_fn(|cx| connection.poll_without_shutdown(cx)).await;
    let (mut io, early, over) = connection.into_parts().io.into_inner().into_parts();
    match (outcome, over) {
        (Ok(()), Some(Over::Connect(connect))) => {
            Box::pin(connect_to(&visit, io, &early, &connect.target)).await;
        }
        (Ok(()), Some(Over::Bad(reason))) => {
            let denial = visit.refuse(reason, "");
            if io.write_all(&denial.bytes()).await.is_ok() {
                farewell(io).await;
            }
        }
        (Ok(()), Some(Over::End) | None) => farewell(io).await,
        // Its answer was cut, or cannot be told any more: a reset says so.
        (Err(_broken), _) => {}
    }
}

/// A tunnel. Whatever is refused closes the connection: nothing behind it is parsed.
async fn connect_to<T>(visit: &Visit, mut io: T, early: &[u8], text: &str)
where
    T: AsyncRead + AsyncWrite + Send + Unpin,
{
    let reached = match Authority::parse(text, None) {
        Ok(target) => Box::pin(visit.reach(&target, Seen::Tunnel)).await,
        Err(error) => Err(visit.refuse(error.reason(), text)),
    };
    match reached {
        Ok(reached) => {
            if io.write_all(ESTABLISHED).await.is_ok() {
                Box::pin(tunnel::run(visit, io, early, reached)).await;
            }
        }
        Err(denial) => {
            if io.write_all(&denial.bytes()).await.is_ok() {
                farewell(io).await;
            }
        }
    }
}

async fn answer(visit: &Visit, request: Request<Incoming>) -> Response<Body> {
    let mut response = match Box::pin(pass(visit, request)).await {
        Ok(response) => response,
        Err(denial) => denial.response().map(full),
    };
    if visit.now().is_none() {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

/// Judges a request, passes it on, and gives the origin's answer.
async fn pass(visit: &Visit, request: Request<Incoming>) -> Result<Response<Body>, Denial> {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let seen = Seen::Request {
        method: parts.method.as_str(),
        path: path.as_str(),
    };
    let authority = parts
        .uri
        .authority()
        .map(|authority| authority.as_str().to_owned());
    let text = authority.clone().unwrap_or_else(|| path.as_str().to_owned());
    let (Some(authority), Some("http")) = (authority, parts.uri.scheme_str()) else {
        return Err(visit.refuse_request(DoorReason::BadTarget, &text, seen));
    };
    let target = Authority::parse(&authority, Some(80))
        .map_err(|error| visit.refuse_request(error.reason(), &text, seen))?;
    if matches!(target.host(), Host::Name(name) if name == OWN_NAME) {
        return Ok(own(visit, &parts.method, path.as_str()));
    }
    // It would show a guest what the host adds.
    if parts.method == Method::TRACE {
        return Err(visit.refuse_request(DoorReason::MethodNotAllowed, &target.to_string(), seen));
    }
    let reached = Box::pin(visit.reach(&target, seen)).await?;
    let broken = |_error| visit.refuse_request(DoorReason::UpstreamProtocol, &target.to_string(), seen);
    strip(&mut parts.headers);
    write_anew(&mut parts.headers, &target);
    let mut onwards = Request::new(body);
    *onwards.method_mut() = parts.method.clone();
    *onwards.uri_mut() = http::Uri::from(path.clone());
    *onwards.headers_mut() = parts.headers;
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_headers(FIELDS)
        .handshake::<_, Incoming>(TokioIo::new(reached.stream))
        .await
        .map_err(broken)?;
    // Its connection lives as long as somebody reads its answer, and no longer than the claim.
    let driver = tasks::spawn("door upstream", connection);
    let driver = AbortOnDrop(driver);
    // A request may take long to be sent; one whose body rests is given up by the gate.
    let answered = timeout(TUNNEL, sender.send_request(onwards)).await;
    let response = match answered {
        Ok(answered) => answered.map_err(broken)?,
        Err(_elapsed) => {
            return Err(visit.refuse_request(DoorReason::DialTimeout, &target.to_string(), seen));
        }
    };
    // Nobody asked for another protocol.
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(visit.refuse_request(DoorReason::UpstreamProtocol, &target.to_string(), seen));
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
fn strip(headers: &mut HeaderMap) {
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

/// What the door itself answers: the last denials, for a program that wants to know.
fn own(visit: &Visit, method: &Method, path: &str) -> Response<Body> {
    if *method != Method::GET || path != "/denials" {
        let mut response = Response::new(full(Bytes::from_static(b"GET /denials is all there is\n")));
        *response.status_mut() = StatusCode::NOT_FOUND;
        return response;
    }
    let claim = visit.armed().claim;
    let denials: Vec<serde_json::Value> = visit
        .door()
        .denials()
        .iter()
        .filter(|decided| decided.claim == Some(claim))
        .filter_map(|decided| Denial::of(decided).map(|denial| denial.to_json()))
        .collect();
    let mut text = serde_json::json!({ "denials": denials }).to_string();
    text.push('\n');
    let mut response = Response::new(full(text.into()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
