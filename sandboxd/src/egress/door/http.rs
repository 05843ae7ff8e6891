//! The HTTP door: plain requests by absolute target, and CONNECT. Messages are written anew, never forwarded as bytes, and
//! each request on a connection is judged.

use std::{convert::Infallible, future::poll_fn, sync::Arc};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request, uri::PathAndQuery};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use sandbox_protocol::{door::DoorReason, metadata::door::OWN_NAME};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use super::{
    Visit,
    body::{Body, full},
    farewell,
    gate::{Gate, Over},
    guard::FIELDS,
    intercept, last_word,
    onward::{self, Asked},
    say, tunnel,
    websocket::{self, Turnout},
};
use crate::{
    egress::Denial,
    policy::{Authority, Host, Seen},
};

/// What hyper buffers of a connection: a whole head, which the guard bounds.
pub(super) const BUFFER: usize = 128 * 1024;
/// That a tunnel stands.
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// Serves one connection.
pub(super) async fn serve<T>(visit: Visit, io: T)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let visit = Arc::new(visit);
    let turnout = Arc::new(Turnout::default());
    let serving = {
        let (visit, turnout) = (Arc::clone(&visit), Arc::clone(&turnout));
        service_fn(move |request| {
            let (visit, turnout) = (Arc::clone(&visit), Arc::clone(&turnout));
            Box::pin(async move { Ok::<_, Infallible>(answer(&visit, request, &turnout).await) })
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
    let (io, early, over) = connection.into_parts().io.into_inner().into_parts();
    match (outcome, over) {
        (Ok(()), Some(Over::Connect(connect))) => {
            Box::pin(connect_to(&visit, io, &early, &connect.target)).await;
        }
        (Ok(()), Some(Over::Upgrade)) => {
            let run = websocket::run(&visit, io, &early, &turnout, |method, path| Seen::Request {
                method,
                path,
            });
            Box::pin(run).await;
        }
        (Ok(()), Some(Over::Bad(reason))) => {
            let denial = visit.refuse(reason, "");
            last_word(io, &denial.bytes()).await;
        }
        (Ok(()), Some(Over::End) | None) => farewell(io).await,
        // Its answer was cut, or cannot be told any more: a reset says so.
        (Err(_broken), _) => {}
    }
}

/// A tunnel. Whatever is refused closes the connection: nothing behind it is parsed.
async fn connect_to<T>(visit: &Arc<Visit>, mut io: T, early: &[u8], text: &str)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let target = Authority::parse(text, None);
    if let Some(target) = target.as_ref().ok().and_then(|target| visit.looks_inside(target)) {
        let Some(means) = visit.interception() else {
            let denial = visit.refuse(DoorReason::CaUnavailable, &target.to_string());
            return last_word(io, &denial.bytes()).await;
        };
        if say(&mut io, ESTABLISHED).await {
            let early = Bytes::copy_from_slice(early);
            Box::pin(intercept::run(visit, &means, io, early, target)).await;
        }
        return;
    }
    let reached = match target {
        Ok(target) => Box::pin(visit.reach(&target, Seen::Tunnel)).await,
        Err(error) => Err(visit.refuse(error.reason(), text)),
    };
    match reached {
        Ok(reached) => {
            if say(&mut io, ESTABLISHED).await {
                Box::pin(tunnel::run(visit, io, early, reached, Seen::Tunnel)).await;
            }
        }
        Err(denial) => {
            last_word(io, &denial.bytes()).await;
        }
    }
}

async fn answer(visit: &Visit, request: Request<Incoming>, turnout: &Turnout<TcpStream>) -> Response<Body> {
    let upgrades = websocket::asks(&request);
    // Whoever was not told to send a body may send it or not: nobody can say what comes next.
    let unread = onward::expects(request.headers(), request.version());
    let outcome = if upgrades {
        Box::pin(upgrade(visit, request, turnout)).await
    } else {
        Box::pin(pass(visit, request)).await
    };
    let is_denied = outcome.is_err();
    let mut response = outcome.unwrap_or_else(|denial| denial.response().map(full));
    let is_last = (upgrades && response.status() != StatusCode::SWITCHING_PROTOCOLS) || (is_denied && unread);
    if visit.now().is_none() || is_last {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Method and path, for as long as the request is under way.
fn method_and_path(parts: &request::Parts) -> (Method, PathAndQuery) {
    let path = parts.uri.path_and_query().cloned();
    (
        parts.method.clone(),
        path.unwrap_or_else(|| PathAndQuery::from_static("/")),
    )
}

/// The origin that a plain request names.
fn target(visit: &Visit, parts: &request::Parts, seen: Seen<'_>) -> Result<Authority, Denial> {
    let authority = parts.uri.authority().map(http::uri::Authority::as_str);
    let text = authority.unwrap_or_else(|| parts.uri.path());
    let (Some(authority), Some("http")) = (authority, parts.uri.scheme_str()) else {
        return Err(visit.refuse_request(DoorReason::BadTarget, text, seen));
    };
    Authority::parse(authority, Some(80)).map_err(|error| visit.refuse_request(error.reason(), text, seen))
}

/// Judges a request, passes it on, and gives the origin's answer.
async fn pass(visit: &Visit, request: Request<Incoming>) -> Result<Response<Body>, Denial> {
    let (parts, body) = request.into_parts();
    let (method, path) = method_and_path(&parts);
    let seen = Seen::Request {
        method: method.as_str(),
        path: path.as_str(),
    };
    let target = target(visit, &parts, seen)?;
    if matches!(target.host(), Host::Name(name) if name == OWN_NAME) {
        return Ok(own(visit, &method, path.as_str()));
    }
    // It would show a guest what the host adds.
    if method == Method::TRACE {
        return Err(visit.refuse_request(DoorReason::MethodNotAllowed, &target.to_string(), seen));
    }
    let asked = Asked {
        target: &target,
        seen,
        keeps: Some(visit.kept()),
    };
    Box::pin(onward::pass(visit, asked, parts, body)).await
}

/// Judges a request for WebSocket and passes it on. The connection of one that switched is not HTTP any more, on either
/// side.
async fn upgrade(
    visit: &Visit,
    request: Request<Incoming>,
    turnout: &Turnout<TcpStream>,
) -> Result<Response<Body>, Denial> {
    let (parts, body) = request.into_parts();
    let (method, path) = method_and_path(&parts);
    let seen = Seen::Request {
        method: method.as_str(),
        path: path.as_str(),
    };
    let target = target(visit, &parts, seen)?;
    let reached = Box::pin(visit.reach(&target, seen)).await?;
    let asked = Asked {
        target: &target,
        seen,
        keeps: None,
    };
    let (response, switched) = Box::pin(onward::upgrade(visit, reached, asked, parts, body)).await?;
    if let Some(to) = switched {
        turnout.put(to, method, path);
    }
    Ok(response)
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
