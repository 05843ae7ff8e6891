//! A body on its way, given up when it rests for too long.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};

use super::serve::Busy;
use crate::egress::door::{
    BODY,
    onward::{self, BoxError},
};

/// A body, of a request or of an answer.
pub(super) type Body = onward::Body;

/// A body that is given up when it rests for too long; `busy` holds until it is through.
pub(super) fn moving(body: Incoming, busy: Option<Busy>) -> Body {
    let moving = Moving {
        body,
        rests: Box::pin(sleep(BODY)),
        _busy: busy,
    };
    moving.boxed()
}

struct Moving {
    body: Incoming,
    rests: Pin<Box<Sleep>>,
    _busy: Option<Busy>,
}

impl http_body::Body for Moving {
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
        Poll::Ready(Some(Err("the body rests".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
