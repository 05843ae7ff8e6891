//! The body of a guest's reply.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Frame, SizeHint};
use tokio::task::JoinHandle;
use tonic::body::Body;

use super::{Link, LinkError, call::broken, details::drop_undecodable, signals::Place};

/// The body of a guest's reply, data and trailers. Room for more is given to the guest as frames are taken out of it.
/// Dropped early, it resets the call.
#[derive(Debug)]
pub struct LinkBody(Kind);

#[derive(Debug)]
enum Kind {
    Kept(Box<Kept>),
    Local { body: Body, _held: Held },
    Over,
}

struct Kept {
    stream: RecvStream,
    data_over: bool,
    /// Last, so that the call's place is free only after its stream is.
    held: Held,
}

/// What a call holds until its end.
struct Held {
    pump: Option<JoinHandle<()>>,
    _place: Place,
    /// The link stays open while its replies are read.
    _link: Option<Link>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(pump) = &self.pump {
            pump.abort();
        }
    }
}

impl LinkBody {
    pub(super) fn kept(
        stream: RecvStream,
        pump: Option<JoinHandle<()>>,
        (place, link): (Place, Link),
    ) -> Self {
        Self(Kind::Kept(Box::new(Kept {
            stream,
            data_over: false,
            held: Held {
                pump,
                _place: place,
                _link: Some(link),
            },
        })))
    }

    pub(super) fn local(body: Body, place: Place) -> Self {
        Self(Kind::Local {
            body,
            _held: Held {
                pump: None,
                _place: place,
                _link: None,
            },
        })
    }
}

impl http_body::Body for LinkBody {
    type Data = Bytes;
    type Error = LinkError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, LinkError>>> {
        let frame = match &mut self.0 {
            Kind::Kept(kept) => ready!(kept.poll_frame(cx)),
            Kind::Local { body, .. } => ready!(Pin::new(body).poll_frame(cx))
                .map(|frame| frame.map_err(|_status| LinkError::Reset(h2::Reason::INTERNAL_ERROR))),
            Kind::Over => None,
        };
        let over = frame
            .as_ref()
            .is_none_or(|frame| frame.as_ref().map_or(true, Frame::is_trailers));
        if over {
            self.0 = Kind::Over;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Kept(kept) => kept.stream.is_end_stream(),
            Kind::Local { body, .. } => body.is_end_stream(),
            Kind::Over => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Kept {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, LinkError>>> {
        if !self.data_over {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    // Fails only for more than came, which this is not.
                    drop(self.stream.flow_control().release_capacity(data.len()));
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                // The reply is complete; the guest only wants no more of the request.
                Some(Err(error)) if error.reason() == Some(h2::Reason::NO_ERROR) && error.is_reset() => {
                    return Poll::Ready(None);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(broken(error)))),
                None => self.data_over = true,
            }
        }
        let trailers = ready!(self.stream.poll_trailers(cx));
        Poll::Ready(match trailers {
            Ok(Some(mut trailers)) => {
                drop_undecodable(&mut trailers);
                Some(Ok(Frame::trailers(trailers)))
            }
            Ok(None) => None,
            Err(error) => Some(Err(broken(error))),
        })
    }
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept")
            .field("data_over", &self.data_over)
            .field("sending", &self.held.pump.is_some())
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").finish_non_exhaustive()
    }
}
