//! What a guest may say to a client: data as it comes, and a status within limits. All of it is stamped with who spoke.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};
use http_body::{Body as _, Frame};
use sandbox_protocol::{
    id::RequestId,
    limits::{GUEST_STATUS_DETAILS, GUEST_STATUS_MESSAGE},
    metadata::{ORIGIN_GUEST, ORIGIN_HOST, SANDBOX_ORIGIN},
    reason::Reason,
};
use tonic::{Code, Status, body::Body};

use crate::{
    api::{Ctx, Refusal, trace::Trace},
    link::{LinkBody, LinkError},
};

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const ORIGIN: HeaderName = HeaderName::from_static(SANDBOX_ORIGIN);

/// How a call failed, and whose word that is.
#[derive(Debug)]
pub(super) struct Failure {
    status: Status,
    origin: &'static str,
}

impl Failure {
    const fn host(status: Status) -> Self {
        Self {
            status,
            origin: ORIGIN_HOST,
        }
    }

    /// The guest's doing, said in a guest's name: the host vouches for nothing, and nobody may retry on its word.
    const fn guest(status: Status) -> Self {
        Self {
            status,
            origin: ORIGIN_GUEST,
        }
    }

    pub(super) fn http(self) -> Response<Body> {
        let mut response = self.status.into_http();
        response
            .headers_mut()
            .insert(ORIGIN, HeaderValue::from_static(self.origin));
        response
    }

    fn trailers(self) -> HeaderMap {
        let (parts, ()) = self.status.into_http::<()>().into_parts();
        let mut trailers = parts.headers;
        trailers.remove(CONTENT_TYPE);
        trailers.insert(ORIGIN, HeaderValue::from_static(self.origin));
        trailers
    }
}

/// What a client is told of a call that the link could not bring to its end.
pub(super) fn failed(error: &LinkError, id: RequestId) -> Failure {
    let lost = || Refusal::new(Reason::AgentLost, "the connection to the guest broke");
    let refusal = match error {
        LinkError::Full => Refusal::new(Reason::Busy, "too many calls to this sandbox are open"),
        LinkError::Reset(code) => return Failure::guest(reset(*code)),
        LinkError::CallerLeft => return Failure::host(Status::cancelled("the caller left")),
        LinkError::Unsendable(_) => Refusal::new(Reason::Bug, "the call could not be sent to the guest"),
        LinkError::Lost(_)
        | LinkError::Port(_)
        | LinkError::Hello(_)
        | LinkError::NoCommonProto { .. }
        | LinkError::Preface(_) => lost(),
    };
    tracing::debug!(%id, error = error as &dyn std::error::Error, "forwarded call failed");
    Failure::host(refusal.status(id))
}

/// The status that gRPC has for a stream that its server reset.
fn reset(code: h2::Reason) -> Status {
    let (status, word) = match code {
        h2::Reason::REFUSED_STREAM => (Code::Unavailable, "refused"),
        h2::Reason::CANCEL => (Code::Cancelled, "cancelled"),
        h2::Reason::ENHANCE_YOUR_CALM => (Code::ResourceExhausted, "shed"),
        h2::Reason::INADEQUATE_SECURITY => (Code::PermissionDenied, "denied"),
        _ => (Code::Internal, "reset"),
    };
    Status::new(status, format!("the guest's agent {word} the call"))
}

/// The body of a guest's reply on its way to the client.
pub(super) struct GuestReply<U> {
    body: LinkBody,
    id: RequestId,
    trace: Trace,
    over: bool,
    /// Dropped with the reply: the use ends when the call does.
    _used: U,
}

impl<U: Send + 'static> GuestReply<U> {
    pub(super) fn begin(
        response: Response<LinkBody>,
        ctx: &Ctx,
        used: U,
        mut trace: Trace,
    ) -> Response<Body> {
        let (parts, body) = response.into_parts();
        if parts.status != StatusCode::OK {
            let said = format!("the guest's agent answered HTTP {}", parts.status.as_u16());
            return Failure::guest(Status::unknown(said)).http();
        }
        let whole = body.is_end_stream() || parts.headers.contains_key(STATUS);
        let mut response = if whole {
            // A reply without messages has its status in front.
            let mut response = Response::new(Body::empty());
            *response.headers_mut() = status(&parts.headers);
            trace.end(response.headers_mut());
            response
        } else {
            Response::new(Body::new(Self {
                body,
                id: ctx.id,
                trace,
                over: false,
                _used: used,
            }))
        };
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, content_type(&parts.headers));
        headers.insert(ORIGIN, HeaderValue::from_static(ORIGIN_GUEST));
        response
    }
}

/// Nothing in it is ever pinned: the use is only kept.
impl<U> Unpin for GuestReply<U> {}

impl<U> http_body::Body for GuestReply<U> {
    type Data = Bytes;
    type Error = Status;

    /// An error becomes trailers too, so that a client reads a status and not a broken stream.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let mut trailers = match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_trailers() {
                Ok(trailers) => status(&trailers),
                Err(data) => return Poll::Ready(Some(Ok(data))),
            },
            Some(Err(error)) => failed(&error, self.id).trailers(),
            None => status(&HeaderMap::new()),
        };
        trailers
            .entry(ORIGIN)
            .or_insert(HeaderValue::from_static(ORIGIN_GUEST));
        self.trace.end(&mut trailers);
        self.over = true;
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    /// Never before the trailers, which are always there.
    fn is_end_stream(&self) -> bool {
        self.over
    }
}

/// A status within limits, of what a guest sent; one that is missing or none is made UNKNOWN.
fn status(from: &HeaderMap) -> HeaderMap {
    let mut to = HeaderMap::with_capacity(6);
    let code = from.get(STATUS).and_then(|value| {
        let text = value.to_str().ok()?;
        let code: u8 = text.parse().ok()?;
        (code <= 16).then(|| HeaderValue::from(u16::from(code)))
    });
    let Some(code) = code else {
        let (parts, ()) = Status::unknown("the guest's agent ended the call without a status")
            .into_http::<()>()
            .into_parts();
        to.extend(parts.headers);
        to.remove(CONTENT_TYPE);
        return to;
    };
    to.insert(STATUS, code);
    if let Some(message) = from.get(MESSAGE).and_then(message) {
        to.insert(MESSAGE, message);
    }
    let details = from.get(DETAILS);
    if let Some(details) = details.filter(|details| details.len() <= GUEST_STATUS_DETAILS) {
        to.insert(DETAILS, details.clone());
    }
    to
}

/// Cut to its limit, not within an escape; gone if it holds what gRPC would have escaped.
fn message(value: &HeaderValue) -> Option<HeaderValue> {
    let bytes = value.as_bytes();
    if bytes.iter().any(|byte| !(b' '..=b'~').contains(byte)) {
        return None;
    }
    if bytes.len() <= GUEST_STATUS_MESSAGE {
        return Some(value.clone());
    }
    let cut = bytes.get(..GUEST_STATUS_MESSAGE)?;
    let escape = cut.iter().rev().take(2).position(|byte| *byte == b'%');
    let cut = cut.get(..cut.len() - escape.map_or(0, |back| back + 1))?;
    HeaderValue::from_bytes(cut).ok()
}

fn content_type(from: &HeaderMap) -> HeaderValue {
    let grpc = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        bytes.starts_with(b"application/grpc") && bytes.len() <= 64
    };
    from.get(CONTENT_TYPE)
        .filter(grpc)
        .cloned()
        .unwrap_or(HeaderValue::from_static("application/grpc"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_bytes(value).unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn a_guest_can_say_a_status_and_nothing_else() {
        let said = map(&[
            ("grpc-status", b"07"),
            ("grpc-message", b"no%20way"),
            ("grpc-status-details-bin", b"AAAA"),
            ("sandbox-origin", b"host"),
            ("sandbox-request-id", b"rq_forged"),
            ("sandbox-work-bin", b"AAAA"),
            ("set-cookie", b"x"),
        ]);
        let passed = status(&said);
        assert_eq!(passed.len(), 3);
        assert_eq!(passed["grpc-status"], "7");
        assert_eq!(passed["grpc-message"], "no%20way");
        assert_eq!(passed["grpc-status-details-bin"], "AAAA");
    }

    #[test]
    fn a_missing_or_wrong_status_is_unknown() {
        for said in [
            map(&[]),
            map(&[("grpc-status", b"17")]),
            map(&[("grpc-status", b"-1")]),
            map(&[("grpc-status", b"\xff")]),
        ] {
            assert_eq!(status(&said)["grpc-status"], "2", "{said:?}");
        }
    }

    #[test]
    fn inv_16_statuses_are_cut() {
        let long = "y".repeat(5000);
        let said = map(&[
            ("grpc-status", b"2"),
            ("grpc-message", long.as_bytes()),
            ("grpc-status-details-bin", long.as_bytes()),
        ]);
        let passed = status(&said);
        assert_eq!(passed["grpc-message"].len(), GUEST_STATUS_MESSAGE);
        assert!(!passed.contains_key("grpc-status-details-bin"));
        let raw = map(&[("grpc-status", b"2"), ("grpc-message", b"\xe4")]);
        assert!(!status(&raw).contains_key("grpc-message"));
        assert_eq!(
            content_type(&map(&[("content-type", b"text/html")])),
            "application/grpc"
        );
        assert_eq!(
            content_type(&map(&[("content-type", b"application/grpc+proto")])),
            "application/grpc+proto"
        );
    }

    proptest! {
        #[test]
        fn an_escape_is_never_cut(before in 1000_usize..1030) {
            let said = format!("{}{}", "y".repeat(before), "%C3%A4".repeat(10));
            let cut = message(&HeaderValue::from_str(&said).unwrap()).unwrap();
            prop_assert!(cut.len() <= GUEST_STATUS_MESSAGE && cut.len() > GUEST_STATUS_MESSAGE - 3);
            let text = cut.to_str().unwrap();
            let escapes = text.matches('%').count();
            prop_assert_eq!(text.len() - before.min(text.len()), escapes * 3);
        }
    }
}
