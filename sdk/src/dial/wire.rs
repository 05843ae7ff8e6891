//! One call on an HTTP/2 connection: the request is sent on the caller's own stack, without a task or a queue of
//! ours between it and the connection.

use std::{
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};

use base64::{
    Engine as _, alphabet,
    engine::{
        DecodePaddingMode,
        general_purpose::{GeneralPurpose, GeneralPurposeConfig},
    },
};
use bytes::Bytes;
use h2::{
    RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::HeaderMap;
use http_body::{Body as _, Frame};
use tonic::body::Body;

use super::DialError;
use crate::tasks::{self, AbortOnDrop};

const STATUS_DETAILS: &str = "grpc-status-details-bin";
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A request that was handed to its connection.
#[derive(Debug)]
pub(super) struct Sent {
    response: ResponseFuture,
    upload: Option<AbortOnDrop>,
}

/// Whether the connection still takes calls: a daemon that stops has said that it does not.
pub(super) fn takes_calls(connection: &mut SendRequest<Bytes>) -> bool {
    // A fresh handle has no stream of its own to wait for, so nobody needs to be woken.
    let mut cx = Context::from_waker(Waker::noop());
    !matches!(connection.poll_ready(&mut cx), Poll::Ready(Err(_)))
}

/// Sends the head and what there is of the body. The rest of a body that is not all there is sent by a task that
/// lives as long as the reply is wanted, so that dropping a call drops both halves.
///
/// # Errors
/// The connection went away between [`takes_calls`] and this.
pub(super) fn send(
    mut connection: SendRequest<Bytes>,
    request: http::Request<Body>,
) -> Result<Sent, DialError> {
    let (head, mut body) = request.into_parts();
    let head = http::Request::from_parts(head, ());
    let (response, mut stream) = connection.send_request(head, false).map_err(DialError::broken)?;
    let upload = match first(&mut body) {
        // The reply tells of a stream that does not take its data.
        First::All(data) => {
            drop(stream.send_data(data, true));
            None
        }
        First::Part(data) => Some(tasks::guarded(upload(stream, body, data))),
        First::Failed => {
            stream.send_reset(h2::Reason::CANCEL);
            None
        }
    };
    Ok(Sent { response, upload })
}

enum First {
    All(Bytes),
    Part(Bytes),
    Failed,
}

/// What the body has at once. One message is all there is of most calls, and then its frame ends the stream.
fn first(body: &mut Body) -> First {
    // The upload polls again with its own waker, so that no wake-up is lost.
    let mut cx = Context::from_waker(Waker::noop());
    let mut held = Bytes::new();
    loop {
        match Pin::new(&mut *body).poll_frame(&mut cx) {
            Poll::Ready(None) => return First::All(held),
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if held.is_empty() => held = data,
                Ok(data) => return First::Part([held, data].concat().into()),
                Err(_trailers) => return First::Failed,
            },
            Poll::Ready(Some(Err(_status))) => return First::Failed,
            Poll::Pending => return First::Part(held),
        }
    }
}

/// Sends a body as the peer makes room for it.
async fn upload(mut stream: SendStream<Bytes>, mut body: Body, mut data: Bytes) {
    loop {
        while !data.is_empty() {
            stream.reserve_capacity(data.len());
            let room = match stream.capacity() {
                // h2 tells of growth only: room that is there already must not be waited for.
                0 => match std::future::poll_fn(|cx| stream.poll_capacity(cx)).await {
                    Some(Ok(room)) => room,
                    Some(Err(_)) | None => return,
                },
                room => room,
            };
            if room == 0 {
                continue;
            }
            let piece = data.split_to(room.min(data.len()));
            if stream.send_data(piece, false).is_err() {
                return;
            }
        }
        let next = std::future::poll_fn(|cx| {
            if stream.poll_reset(cx).is_ready() {
                return Poll::Ready(None);
            }
            Pin::new(&mut body).poll_frame(cx).map(Some)
        })
        .await;
        match next.map(|frame| frame.transpose().map(|frame| frame.map(Frame::into_data))) {
            Some(Ok(Some(Ok(more)))) => data = more,
            // The reply tells of a stream that does not take its end.
            Some(Ok(None)) => return drop(stream.send_data(Bytes::new(), true)),
            Some(Ok(Some(Err(_))) | Err(_)) => return stream.send_reset(h2::Reason::CANCEL),
            None => return,
        }
    }
}

impl Sent {
    /// Waits for the head of the reply.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<http::Response<Incoming>, DialError>> {
        let reply = ready!(Pin::new(&mut self.response).poll(cx)).map_err(DialError::broken)?;
        let upload = self.upload.take();
        let (mut head, stream) = reply.into_parts();
        drop_undecodable(&mut head.headers);
        let body = Incoming {
            stream,
            part: Part::Data,
            upload,
        };
        Poll::Ready(Ok(http::Response::from_parts(head, body)))
    }
}

/// tonic panics on details that are not base64, and a guest can send what it likes.
fn drop_undecodable(headers: &mut HeaderMap) {
    let bad = headers
        .get(STATUS_DETAILS)
        .is_some_and(|value| LENIENT.decode(value.as_bytes()).is_err());
    if bad {
        headers.remove(STATUS_DETAILS);
    }
}

/// The body of a reply. Dropping it before its end resets the stream, both halves of it.
#[derive(Debug)]
pub(crate) struct Incoming {
    stream: RecvStream,
    part: Part,
    upload: Option<AbortOnDrop>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Data,
    Trailers,
    End,
}

impl Incoming {
    fn end(&mut self) {
        self.part = Part::End;
        self.upload = None;
    }
}

impl http_body::Body for Incoming {
    type Data = Bytes;
    type Error = DialError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, DialError>>> {
        loop {
            match self.part {
                Part::Data => match ready!(self.stream.poll_data(cx)) {
                    Some(Ok(data)) => {
                        // Room is given back when the reader takes the data, so an unread stream stalls itself.
                        let freed = self.stream.flow_control().release_capacity(data.len());
                        return Poll::Ready(Some(
                            freed.map(|()| Frame::data(data)).map_err(DialError::broken),
                        ));
                    }
                    None => self.part = Part::Trailers,
                    // A peer that has said all may reset what it has not read.
                    Some(Err(error)) if error.reason() == Some(h2::Reason::NO_ERROR) && error.is_reset() => {
                        self.end();
                    }
                    Some(Err(error)) => {
                        self.end();
                        return Poll::Ready(Some(Err(DialError::broken(error))));
                    }
                },
                Part::Trailers => {
                    let trailers = ready!(self.stream.poll_trailers(cx));
                    self.end();
                    return Poll::Ready(match trailers {
                        Ok(Some(mut trailers)) => {
                            drop_undecodable(&mut trailers);
                            Some(Ok(Frame::trailers(trailers)))
                        }
                        Ok(None) => None,
                        Err(error) => Some(Err(DialError::broken(error))),
                    });
                }
                Part::End => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.part == Part::End
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn details_that_are_not_base64_are_dropped() {
        for (value, kept) in [("CAU", true), ("CAU=", true), ("*!*", false), ("C", false)] {
            let mut headers = HeaderMap::new();
            headers.insert(STATUS_DETAILS, HeaderValue::from_static(value));
            drop_undecodable(&mut headers);
            assert_eq!(headers.contains_key(STATUS_DETAILS), kept, "{value}");
            headers.insert("grpc-status", HeaderValue::from_static("5"));
            assert!(tonic::Status::from_header_map(&headers).is_some());
        }
    }
}
