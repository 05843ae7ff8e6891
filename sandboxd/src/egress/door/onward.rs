//! A judged request on its way to its origin, and the origin's answer back. Both are written anew.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, header, request};
use http_body::Body as _;
use hyper::{body::Incoming, ext::on_informational};
use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

use super::{
    TUNNEL, Visit,
    body::{Body, moving},
    upload::{Progress, Upload},
    upstream::{Kept, Listening, Upstream},
    websocket::{self, Switched},
};
use crate::{
    egress::{Denial, Given, Reached},
    policy::{Authority, Seen},
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

/// What was asked for, as it was judged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    /// The origin that the guest named.
    pub(super) target: &'a Authority,
    /// Method and path.
    pub(super) seen: Seen<'a>,
    /// Where its connection rests behind it; none: it ends with the answer.
    pub(super) keeps: Option<&'a Arc<Kept>>,
}

impl Asked<'_> {
    fn refuse(self, visit: &Visit, lost: &Lost) -> Denial {
        let reason = match lost {
            Lost::Unanswered | Lost::Unreadable => DoorReason::UpstreamProtocol,
            Lost::Late => DoorReason::DialTimeout,
        };
        visit.refuse_request(reason, &self.target.to_string(), self.seen)
    }
}

/// Sends a plain request: over a connection of the claim that rests, if it could be sent again should that have died
/// meanwhile; else over a new one.
///
/// # Errors
/// The denial, recorded. Cancel safe: the connection ends with it.
pub(super) async fn pass(
    visit: &Visit,
    asked: Asked<'_>,
    parts: request::Parts,
    body: Incoming,
) -> Result<Response<Body>, Denial> {
    let can_repeat = body.is_end_stream() && parts.method.is_idempotent();
    if can_repeat && let Some((upstream, secret)) = Box::pin(visit.reuse(asked.target, asked.seen)).await? {
        let again = written(parts.clone(), Upload::none(), asked.target, secret);
        match exchange(upstream, again, asked.keeps).await {
            Ok(response) => return Ok(response),
            Err(Lost::Unanswered) => {}
            Err(lost @ (Lost::Late | Lost::Unreadable)) => return Err(asked.refuse(visit, &lost)),
        }
    }
    let reached = Box::pin(visit.reach(asked.target, asked.seen)).await?;
    Box::pin(send(visit, reached, asked, parts, body)).await
}

/// Sends a request over a connection made for it.
///
/// # Errors
/// The denial, recorded. Cancel safe: the connection ends with it.
pub(super) async fn send<T>(
    visit: &Visit,
    reached: Reached<T>,
    asked: Asked<'_>,
    parts: request::Parts,
    body: Incoming,
) -> Result<Response<Body>, Denial>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let upload = Upload::new(body, expects(&parts.headers, parts.version));
    let (secret, is_direct) = (reached.secret.clone(), reached.is_direct);
    let request = written(parts, upload, asked.target, secret);
    let sent = async {
        let upstream = open(reached).await?;
        exchange(upstream, request, asked.keeps.filter(|_| is_direct)).await
    };
    sent.await.map_err(|lost| asked.refuse(visit, &lost))
}

/// Asks an origin to speak WebSocket. Where it will, its connection comes with the answer: whatever follows is not HTTP.
///
/// # Errors
/// The denial, recorded. Cancel safe: the connection ends with it.
pub(super) async fn upgrade<T>(
    visit: &Visit,
    reached: Reached<T>,
    asked: Asked<'_>,
    parts: request::Parts,
    body: Incoming,
) -> Result<(Response<Body>, Option<Switched<T>>), Denial>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let refuse = |lost: Lost| asked.refuse(visit, &lost);
    let secret = reached.secret.clone();
    let mut request = written(parts, Upload::new(body, false), asked.target, secret);
    websocket::write(request.headers_mut());
    let place = reached.by(());
    let mut upstream = open(reached).await.map_err(refuse)?;
    let mut response = first_word(&mut upstream, request).await.map_err(refuse)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let progress = Upload::none().progress();
        return Ok((back(response, upstream, progress, None), None));
    }
    let switched = Switched::agreed(&mut response, &place, Listening::into_inner).await;
    let switched = switched.ok_or_else(|| refuse(Lost::Unreadable))?;
    let mut response = websocket::answer(response);
    response.headers_mut().append(header::VIA, VIA);
    Ok((response, Some(switched)))
}

/// A request as it goes on, written anew.
fn written(
    parts: request::Parts,
    upload: Upload,
    target: &Authority,
    secret: Option<Given>,
) -> Request<Upload> {
    let path = parts.uri.path_and_query().cloned();
    let mut onwards = Request::new(upload);
    *onwards.method_mut() = parts.method;
    *onwards.uri_mut() = path.map(http::Uri::from).unwrap_or_default();
    *onwards.headers_mut() = parts.headers;
    let waits = onwards.body().waits();
    let headers = onwards.headers_mut();
    strip(headers);
    write_anew(headers, target);
    if waits {
        headers.insert(header::EXPECT, HeaderValue::from_static("100-continue"));
    }
    // Behind all that a guest could name away, and in place of its own.
    if let Some(secret) = secret {
        secret.write(headers);
    }
    onwards
}

/// Whether a client waits for leave to send its body.
pub(super) fn expects(headers: &HeaderMap, version: Version) -> bool {
    let mut words = headers.get_all(header::EXPECT).iter();
    // A client of before does not know the word that it would get.
    version == Version::HTTP_11 && words.any(|word| word.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Why there is no answer.
#[derive(Debug)]
enum Lost {
    /// The connection ended before one.
    Unanswered,
    /// It was waited for long enough.
    Late,
    /// What came is none.
    Unreadable,
}

async fn open<T>(reached: Reached<T>) -> Result<Upstream, Lost>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    Upstream::open(reached).await.map_err(|_error| Lost::Unanswered)
}

/// Sends a request and waits for the head of its answer.
async fn first_word(upstream: &mut Upstream, request: Request<Upload>) -> Result<Response<Incoming>, Lost> {
    // A request may take long to be sent; one whose body rests is given up by the gate.
    match timeout(TUNNEL, upstream.sender.send_request(request)).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) if error.is_parse() || error.is_parse_too_large() => Err(Lost::Unreadable),
        Ok(Err(_lost)) => Err(Lost::Unanswered),
        Err(_elapsed) => Err(Lost::Late),
    }
}

/// One request and its answer.
async fn exchange(
    mut upstream: Upstream,
    mut request: Request<Upload>,
    keeps: Option<&Arc<Kept>>,
) -> Result<Response<Body>, Lost> {
    let progress = request.body().progress();
    if request.body().waits() {
        let progress = progress.clone();
        on_informational(&mut request, move |word| {
            if word.status() == StatusCode::CONTINUE {
                progress.want();
            }
        });
    }
    let response = first_word(&mut upstream, request).await?;
    progress.answer();
    // Nobody asked for another protocol, or for a coding of the message.
    if response.status() == StatusCode::SWITCHING_PROTOCOLS || is_coded(response.headers()) {
        return Err(Lost::Unreadable);
    }
    Ok(back(response, upstream, progress, keeps.cloned()))
}

/// The answer, written anew, which keeps its connection alive until it is read. One that came before all of its request
/// was sent is the last of its client's connection.
fn back(
    response: Response<Incoming>,
    upstream: Upstream,
    progress: Progress,
    keeps: Option<Arc<Kept>>,
) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    if parts.headers.contains_key(header::TRANSFER_ENCODING) {
        // It framed nothing.
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    strip(&mut parts.headers);
    parts.headers.append(header::VIA, VIA);
    parts.version = Version::HTTP_11;
    if !progress.is_whole() {
        let close = HeaderValue::from_static("close");
        parts.headers.insert(header::CONNECTION, close);
    }
    let unsent = (parts.status == StatusCode::NOT_MODIFIED)
        .then(|| {
            parts
                .headers
                .get(header::CONTENT_LENGTH)?
                .to_str()
                .ok()?
                .parse()
                .ok()
        })
        .flatten();
    // Its connection stays until all was said, both ways, and goes to those that rest then.
    let body = moving(body, unsent, move |is_over| {
        if let Some(keeps) = keeps
            && is_over
            && progress.is_whole()
        {
            keeps.put(upstream);
        }
    });
    Response::from_parts(parts, body)
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

/// Whether a message is coded as nobody asked for.
fn is_coded(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(header::TRANSFER_ENCODING);
    let mut codings = codings.iter().map(HeaderValue::as_bytes);
    codings.any(|coding| !coding.eq_ignore_ascii_case(b"chunked"))
}

/// Sets what the door decides: Host by the target that was judged.
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
