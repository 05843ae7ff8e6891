//! A guest's body on its way to an origin: read once the origin wants it, and never ahead of what the origin takes.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long a client that expects a word of the origin waits for it; many origins never say one.
const PATIENCE: Duration = Duration::from_secs(1);

/// The body.
pub(super) struct Upload {
    body: Option<Incoming>,
    /// Until the origin asks for it, or was silent for long enough.
    waits: Option<BoxFuture<'static, ()>>,
    progress: Progress,
}

/// How far a body has come; a handle.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    is_wanted: CancellationToken,
    is_whole: AtomicBool,
    is_answered: AtomicBool,
}

impl Progress {
    /// The origin asked for the body.
    pub(super) fn want(&self) {
        self.0.is_wanted.cancel();
    }

    /// The origin gave its last word. A body that was still held back for it stays so.
    pub(super) fn answer(&self) {
        self.0.is_answered.store(true, Ordering::Release);
    }

    /// Whether all of it was handed on.
    pub(super) fn is_whole(&self) -> bool {
        self.0.is_whole.load(Ordering::Acquire)
    }
}

impl Upload {
    /// A body; `expects`: held back until the origin asks for it, or for a second. Reading the first of it tells the
    /// client to send it.
    pub(super) fn new(body: Incoming, expects: bool) -> Self {
        let mut upload = Self::none();
        if http_body::Body::is_end_stream(&body) {
            return upload;
        }
        upload.progress.0.is_whole.store(false, Ordering::Release);
        if expects {
            let is_wanted = upload.progress.0.is_wanted.clone();
            upload.waits = Some(Box::pin(async move {
                // Silence is an answer too.
                timeout(PATIENCE, is_wanted.cancelled()).await.unwrap_or(());
            }));
        }
        upload.body = Some(body);
        upload
    }

    /// No body.
    pub(super) fn none() -> Self {
        let progress = Progress::default();
        progress.0.is_whole.store(true, Ordering::Release);
        Self {
            body: None,
            waits: None,
            progress,
        }
    }

    /// Whether it is held back until the origin asks for it.
    pub(super) const fn waits(&self) -> bool {
        self.waits.is_some()
    }

    /// Tells how far it is.
    pub(super) fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

/// Whether nothing comes behind this.
pub(super) fn is_last<E>(frame: Option<&Result<Frame<Bytes>, E>>) -> bool {
    match frame {
        Some(Ok(frame)) => frame.is_trailers(),
        Some(Err(_)) => false,
        None => true,
    }
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        if let Some(waits) = &mut this.waits {
            ready!(waits.as_mut().poll(cx));
            if this.progress.0.is_answered.load(Ordering::Acquire) {
                // Nobody waits for it: its connection ends with the answer.
                return Poll::Pending;
            }
            this.waits = None;
        }
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        if is_last(frame.as_ref()) || body.is_end_stream() {
            this.progress.0.is_whole.store(true, Ordering::Release);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let none = || SizeHint::with_exact(0);
        self.body.as_ref().map_or_else(none, http_body::Body::size_hint)
    }
}
