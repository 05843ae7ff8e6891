//! A body on its way, given up when it rests for too long.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};

use super::{BODY, taken::took, upload::is_last};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A body, of a request or of an answer.
pub(super) type Body = BoxBody<Bytes, BoxError>;

/// A body that is there.
pub(super) fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

/// A body that is given up when it rests for too long. `unsent` is a length that is told of a body that is never sent:
/// hyper would leave it out beside none. `then` is told whether it came to its end, when nobody reads it any more; what
/// it holds lives for as long as the body.
pub(super) fn moving<F>(body: Incoming, unsent: Option<u64>, then: F) -> Body
where
    F: FnOnce(bool) + Send + Sync + Unpin + 'static,
{
    let moving = Moving {
        body,
        unsent,
        has_ended: false,
        rests: Box::pin(sleep(BODY)),
        then: Some(then),
    };
    moving.boxed()
}

struct Moving<F: FnOnce(bool)> {
    body: Incoming,
    unsent: Option<u64>,
    has_ended: bool,
    rests: Pin<Box<Sleep>>,
    then: Option<F>,
}

impl<F: FnOnce(bool)> Drop for Moving<F> {
    fn drop(&mut self) {
        let is_over = self.has_ended || http_body::Body::is_end_stream(&self.body);
        if let Some(then) = self.then.take() {
            then(is_over);
        }
    }
}

impl<F: FnOnce(bool) + Unpin> http_body::Body for Moving<F> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.rests.as_mut().reset(Instant::now() + BODY);
            self.has_ended = is_last(frame.as_ref());
            took();
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        ready!(self.rests.as_mut().poll(cx));
        Poll::Ready(Some(Err("the body rests".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.unsent.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.unsent
            .map_or_else(|| self.body.size_hint(), SizeHint::with_exact)
    }
}
