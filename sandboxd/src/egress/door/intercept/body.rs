//! A body on its way, given up when it rests for too long; and the stream of HTTP/2 that it is the answer of, given up when
//! nobody takes it for as long.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
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
    tunnel::stalled,
};

/// A body, of a request or of an answer.
pub(super) type Body = onward::Body;

tokio::task_local! {
    /// Counts up from an answer's head on, with each part of it that its client has room for.
    static TAKEN: Arc<AtomicU64>;
}

/// Runs a stream until it is through, or its client takes nothing of its answer for as long as a body may rest. hyper asks
/// for no more of a body then, so that the body itself would never know.
pub(super) async fn in_time(stream: impl Future<Output = ()>) {
    let taken = Arc::new(AtomicU64::new(0));
    tokio::select! {
        biased;
        () = TAKEN.scope(Arc::clone(&taken), stream) => {}
        () = stalled(&taken, BODY) => {}
    }
}

/// The client of this stream, where it is one, has something of its answer.
pub(super) fn took() {
    // In HTTP/1 the connection itself looks after that.
    TAKEN
        .try_with(|taken| {
            taken.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap_or(());
}

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
            took();
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

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_whose_answer_nobody_takes_is_given_up() {
        let begun = Instant::now();
        let untaken = async {
            // However long the origin thinks, nobody can have taken anything.
            sleep(3 * BODY).await;
            took();
            for _ in 0..3 {
                sleep(BODY / 2).await;
                took();
            }
            pending().await
        };
        in_time(untaken).await;
        let last = 3 * BODY + 3 * (BODY / 2);
        assert!(begun.elapsed() > last + BODY / 2, "{:?}", begun.elapsed());
        assert!(begun.elapsed() <= last + 2 * BODY, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_taken_goes_on() {
        let begun = Instant::now();
        in_time(async {
            for _ in 0..20 {
                took();
                sleep(BODY / 2).await;
            }
        })
        .await;
        assert_eq!(begun.elapsed().as_secs(), (BODY * 10).as_secs());
    }
}
