//! What a client may say to a guest: one plain method of Agent, and three headers.

use http::{
    HeaderMap, HeaderName, Method, Request, Uri,
    header::{CONTENT_TYPE, TE},
};
use sandbox_protocol::metadata::{AGENT_PREFIX, AGENT_PROTO_MIN, SANDBOX_ID};
use tonic::{Status, body::Body};

use crate::api::Refusal;

/// Proto of a call that does not say which it needs.
const PROTO_UNSAID: u32 = 1;
/// Metadata that goes on to the guest; all else stays here.
const ALLOWED: [HeaderName; 3] = [CONTENT_TYPE, TE, HeaderName::from_static("grpc-timeout")];
const ENCODING: &str = "grpc-encoding";

/// What a client says to the host by metadata.
#[derive(Debug)]
pub(super) struct Wish<'a> {
    /// Which guest: any text.
    pub(super) sandbox: &'a str,
    /// Lowest agent protocol that the call can do with.
    pub(super) proto_min: u32,
}

pub(super) fn read(headers: &HeaderMap) -> Result<Wish<'_>, Refusal> {
    let sandbox = headers
        .get(SANDBOX_ID)
        .ok_or_else(|| Refusal::field(SANDBOX_ID, "calls to an agent name a sandbox in this metadata"))?;
    let proto_min = match headers.get(AGENT_PROTO_MIN) {
        None => PROTO_UNSAID,
        Some(value) => value
            .to_str()
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| Refusal::field(AGENT_PROTO_MIN, "must be a number"))?,
    };
    Ok(Wish {
        // What is no text is no id either, and is told so by the same path as one.
        sandbox: sandbox.to_str().unwrap_or_default(),
        proto_min,
    })
}

/// The call as the guest gets it; the body is left as it comes.
pub(super) fn strip(request: Request<Body>) -> Result<Request<Body>, Status> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let method = path.strip_prefix(AGENT_PREFIX).unwrap_or_default();
    let plain = !method.is_empty() && method.bytes().all(|b| b.is_ascii_alphanumeric());
    if !plain || parts.method != Method::POST {
        return Err(Status::unimplemented("no such method of sandbox.v1.Agent"));
    }
    let encoding = parts.headers.get(ENCODING);
    if encoding.is_some_and(|value| value != "identity") {
        return Err(Status::unimplemented(
            "calls to an agent are not compressed: use grpc-encoding identity",
        ));
    }
    let mut stripped = Request::new(body);
    *stripped.method_mut() = Method::POST;
    *stripped.uri_mut() = Uri::try_from(path).map_err(|_invalid| Status::internal("a path that is none"))?;
    for name in ALLOWED {
        if let Some(value) = parts.headers.get(&name) {
            stripped.headers_mut().insert(name, value.clone());
        }
    }
    Ok(stripped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(path: &str) -> http::request::Builder {
        Request::post(path)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
    }

    #[test]
    fn inv_13_nothing_but_three_headers_passes() {
        let request = request("/sandbox.v1.Agent/Exec?token=x")
            .header("authorization", "Bearer sbt_secret")
            .header("cookie", "sbt_secret")
            .header("sandbox-id", "sb_1")
            .header("grpc-timeout", "5S")
            .header("x-trace-bin", "AAAA")
            .extension("an extension")
            .body(Body::empty())
            .unwrap();
        let stripped = strip(request).unwrap();
        let names: Vec<_> = stripped.headers().keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["content-type", "te", "grpc-timeout"]);
        assert_eq!(stripped.uri().to_string(), "/sandbox.v1.Agent/Exec");
        assert!(stripped.extensions().is_empty());
    }

    #[test]
    fn inv_18_control_unimplemented() {
        for path in [
            "/sandbox.v1.AgentControl/Renew",
            "/sandbox.v1.Agent",
            "/sandbox.v1.Agent/",
            "/sandbox.v1.Agent/../sandbox.v1.AgentControl/Renew",
            "/sandbox.v1.Agent//Exec",
            "/sandbox.v1.Agent/Exec/",
            "/sandbox.v1.Agent/%2e%2e",
            "//sandbox.v1.Agent/Exec",
            "/Sandbox.v1.Agent/Exec",
        ] {
            let status = strip(request(path).body(Body::empty()).unwrap()).unwrap_err();
            assert_eq!(status.code(), tonic::Code::Unimplemented, "{path}");
        }
        let get = request("/sandbox.v1.Agent/Exec")
            .method(Method::GET)
            .body(Body::empty())
            .unwrap();
        assert!(strip(get).is_err());
    }

    #[test]
    fn compression_is_refused() {
        for (encoding, fine) in [("identity", true), ("gzip", false), ("", false)] {
            let request = request("/sandbox.v1.Agent/Exec")
                .header(ENCODING, encoding)
                .body(Body::empty())
                .unwrap();
            assert_eq!(strip(request).is_ok(), fine, "{encoding}");
        }
    }

    #[test]
    fn wishes() {
        let mut headers = HeaderMap::new();
        assert!(read(&headers).is_err());
        headers.insert(SANDBOX_ID, "sb_x".parse().unwrap());
        let wish = read(&headers).unwrap();
        assert_eq!((wish.sandbox, wish.proto_min), ("sb_x", 1));
        headers.insert(AGENT_PROTO_MIN, "7".parse().unwrap());
        assert_eq!(read(&headers).unwrap().proto_min, 7);
        headers.insert(AGENT_PROTO_MIN, "-7".parse().unwrap());
        assert!(read(&headers).is_err());
    }
}
