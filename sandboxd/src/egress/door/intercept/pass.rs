//! One request inside: named, judged, written anew, and its answer.

use std::sync::Arc;

use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header, request,
    uri::{PathAndQuery, Scheme},
};
use hyper::body::Incoming;
use sandbox_protocol::door::DoorReason;

use super::{
    origin::{NoAnswer, Requests, Tls},
    serve::Busy,
};
use crate::{
    egress::{
        Denial, Visit,
        door::{
            body::{Body, BoxError, full, moving},
            onward::strip,
            taken::took,
            websocket::{self, Switched, Turnout},
        },
    },
    policy::{Authority, Seen},
};

/// The port of https.
const HTTPS: u16 = 443;

/// Where the requests of one connection go.
pub(super) struct Inside {
    pub(super) visit: Arc<Visit>,
    /// What the tunnel was asked for.
    pub(super) target: Authority,
    /// The origin; or why there is none, which every request is answered.
    pub(super) origin: Result<Requests, Denial>,
    /// Where its connection is when that is not HTTP any more.
    pub(super) turnout: Turnout<Tls>,
}

impl Inside {
    /// Whether the end of the origin's HTTP is no loss of it.
    pub(super) fn is_leaving(&self) -> bool {
        self.origin.as_ref().is_ok_and(Requests::is_leaving)
    }
}

enum Refused {
    Denied(Denial),
    /// The connection ends without an answer, as its origin's did.
    Gone,
}

impl From<Denial> for Refused {
    fn from(denial: Denial) -> Self {
        Self::Denied(denial)
    }
}

/// Answers a request. An error ends its connection, or in HTTP/2 its stream.
pub(super) async fn answer(
    inside: Arc<Inside>,
    request: Request<Incoming>,
    busy: Busy,
) -> Result<Response<Body>, BoxError> {
    let is_h2 = request.version() == Version::HTTP_2;
    let upgrades = websocket::asks(&request);
    let mut response = match Box::pin(pass(&inside, request, busy)).await {
        Ok(response) => response,
        Err(Refused::Denied(denial)) => denial.response().map(full),
        Err(Refused::Gone) => return Err("the origin closed its connection".into()),
    };
    let is_last = upgrades && response.status() != StatusCode::SWITCHING_PROTOCOLS;
    if !is_h2 && (is_last || inside.origin.is_err() || inside.visit.now().is_none()) {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    took();
    Ok(response)
}

async fn pass(inside: &Inside, request: Request<Incoming>, busy: Busy) -> Result<Response<Body>, Refused> {
    let Inside {
        visit,
        target,
        origin,
        turnout,
    } = inside;
    let upgrades = websocket::asks(&request);
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let method = parts.method.clone();
    let seen = Seen::Inside {
        method: method.as_str(),
        path: path.as_str(),
    };
    let refuse = |reason| visit.refuse_request(reason, &target.to_string(), seen);
    named(&parts, target).map_err(refuse)?;
    // It would show a guest what the host adds.
    if method == Method::TRACE {
        return Err(refuse(DoorReason::MethodNotAllowed).into());
    }
    let origin = origin.as_ref().map_err(Denial::clone)?;
    let secret = visit.admit(target, seen, origin.place().address)?;
    write_anew(&mut parts, path.clone(), target, origin.is_h2()).map_err(refuse)?;
    if upgrades {
        websocket::write(&mut parts.headers);
    }
    // Behind all that a guest could name away, and in place of its own.
    if let Some(secret) = secret {
        secret.write(&mut parts.headers);
    }
    let mut onwards = Request::new(moving(body, None, |_| {}));
    *onwards.method_mut() = parts.method;
    *onwards.uri_mut() = parts.uri;
    *onwards.version_mut() = if origin.is_h2() {
        Version::HTTP_2
    } else {
        Version::HTTP_11
    };
    *onwards.headers_mut() = parts.headers;
    let mut response = match origin.send(onwards).await {
        Ok(response) => response,
        Err(NoAnswer::Unsent) => return Err(Refused::Gone),
        Err(NoAnswer::Broken) => return Err(refuse(DoorReason::UpstreamProtocol).into()),
        Err(NoAnswer::Late) => return Err(refuse(DoorReason::DialTimeout).into()),
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let switched = if upgrades {
            Switched::agreed(&mut response, origin.place(), |tls| tls).await
        } else {
            None
        };
        // Nobody asked for another protocol.
        let switched = switched.ok_or_else(|| refuse(DoorReason::UpstreamProtocol))?;
        turnout.put(switched, method, path);
        return Ok(websocket::answer(response));
    }
    let (mut parts, body) = response.into_parts();
    strip(&mut parts.headers);
    if !origin.is_h2() {
        parts.version = Version::HTTP_11;
    }
    Ok(Response::from_parts(parts, moving(body, None, |_| drop(busy))))
}

/// Whether a request is for what the tunnel was asked for, wherever it says so.
fn named(parts: &request::Parts, target: &Authority) -> Result<(), DoorReason> {
    let is_h2 = parts.version == Version::HTTP_2;
    let same = |text: &str| {
        let named = Authority::parse(text, Some(HTTPS));
        named.is_ok_and(|named| named == *target)
    };
    if parts.method == Method::CONNECT || (parts.uri.path() == "*" && parts.method != Method::OPTIONS) {
        return Err(DoorReason::BadTarget);
    }
    if let Some(authority) = parts.uri.authority() {
        if parts.uri.scheme() != Some(&Scheme::HTTPS) {
            return Err(DoorReason::BadTarget);
        }
        if !same(authority.as_str()) {
            return Err(DoorReason::AuthorityMismatch);
        }
    }
    let mut hosts = 0;
    for host in parts.headers.get_all(header::HOST) {
        hosts += 1;
        if !host.to_str().is_ok_and(same) {
            return Err(DoorReason::AuthorityMismatch);
        }
    }
    let is_said = hosts == 1 || (is_h2 && hosts == 0 && parts.uri.authority().is_some());
    if is_said {
        Ok(())
    } else {
        Err(DoorReason::AuthorityMismatch)
    }
}

/// Removes what is about the client's connection, and sets what the door decides: where it goes, by what was judged.
/// Expect was answered here. No Via: the origin is not told of us.
fn write_anew(
    parts: &mut request::Parts,
    path: PathAndQuery,
    target: &Authority,
    is_h2: bool,
) -> Result<(), DoorReason> {
    strip(&mut parts.headers);
    parts.headers.remove(header::EXPECT);
    parts.headers.remove(header::HOST);
    let host = if target.port() == HTTPS {
        target.host().to_string()
    } else {
        target.to_string()
    };
    if !is_h2 {
        let host = host.parse().map_err(|_no_value| DoorReason::BadTarget)?;
        parts.headers.insert(header::HOST, host);
        parts.uri = Uri::from(path);
        return Ok(());
    }
    let mut uri = http::uri::Parts::default();
    uri.scheme = Some(Scheme::HTTPS);
    uri.authority = Some(host.parse().map_err(|_no_authority| DoorReason::BadTarget)?);
    uri.path_and_query = Some(path);
    parts.uri = Uri::from_parts(uri).map_err(|_no_uri| DoorReason::BadTarget)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(version: Version, method: &str, uri: &str, hosts: &[&str]) -> request::Parts {
        let mut request = Request::builder().version(version).method(method).uri(uri);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_request_is_for_what_the_tunnel_was_asked_for() {
        let target = Authority::parse("a.test:443", None).unwrap();
        let judge = |version, method: &str, uri: &str, hosts: &[&str]| {
            named(&parts(version, method, uri, hosts), &target)
        };
        let (one, two) = (Version::HTTP_11, Version::HTTP_2);
        for (version, method, uri, hosts) in [
            (one, "GET", "/x", &["a.test"][..]),
            (one, "GET", "/x", &["A.test:443"]),
            (one, "GET", "https://a.test/x", &["a.test"]),
            (one, "OPTIONS", "*", &["a.test"]),
            (two, "GET", "https://a.test/x", &[]),
            (two, "GET", "https://a.test:443/x", &["a.test"]),
        ] {
            assert_eq!(judge(version, method, uri, hosts), Ok(()), "{uri} {hosts:?}");
        }
        for (version, uri, hosts) in [
            (one, "/x", &["b.test"][..]),
            (one, "/x", &["a.test:8443"]),
            (one, "/x", &["a.test", "a.test"]),
            (one, "/x", &["u@a.test"]),
            (one, "/x", &[]),
            (one, "https://b.test/x", &["a.test"]),
            (one, "https://a.test/x", &["b.test"]),
            (two, "https://b.test/x", &[]),
            (two, "https://a.test/x", &["b.test"]),
            (two, "/x", &[]),
        ] {
            let told = judge(version, "GET", uri, hosts);
            assert_eq!(told, Err(DoorReason::AuthorityMismatch), "{uri} {hosts:?}");
        }
        for (method, uri) in [
            ("GET", "http://a.test/x"),
            ("GET", "*"),
            ("CONNECT", "a.test:443"),
            ("GET", "a.test:443"),
        ] {
            assert_eq!(
                judge(one, method, uri, &["a.test"]),
                Err(DoorReason::BadTarget),
                "{uri}"
            );
        }
    }

    #[test]
    fn what_goes_out_names_what_was_judged() {
        let path = || PathAndQuery::from_static("/x?y");
        for (text, host) in [
            ("a.test:443", "a.test"),
            ("a.test:8443", "a.test:8443"),
            ("[2001:db8::1]:443", "[2001:db8::1]"),
        ] {
            let target = Authority::parse(text, None).unwrap();
            let mut one = parts(Version::HTTP_11, "GET", "https://else.test/x?y", &["else.test"]);
            one.headers
                .insert(header::CONNECTION, HeaderValue::from_static("host"));
            write_anew(&mut one, path(), &target, false).unwrap();
            assert_eq!(
                (one.uri.to_string(), &one.headers[header::HOST]),
                ("/x?y".to_owned(), &HeaderValue::from_str(host).unwrap())
            );
            assert!(!one.headers.contains_key(header::VIA));
            let mut two = parts(Version::HTTP_2, "GET", "https://else.test/x?y", &["else.test"]);
            write_anew(&mut two, path(), &target, true).unwrap();
            assert_eq!(two.uri.to_string(), format!("https://{host}/x?y"));
            assert!(!two.headers.contains_key(header::HOST));
        }
    }
}
