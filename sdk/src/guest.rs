//! Calls on a sandbox's `Agent`: one answer, a stream of answers, an upload.
//!
//! May call: sandbox, client, retry, error.
//! Never inside: what a call means.
//! Cancel safety: dropping a call drops both its halves.

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt as _,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use sandbox_protocol::limits;
use tokio::{io::AsyncRead, sync::oneshot};
use tokio_stream::Stream;
use tokio_util::io::ReaderStream;
use tonic::{Request, Response, Status};

use crate::{
    client::{Client, Terms},
    error::Error,
    retry::Repeat,
    sandbox::SandboxHandle,
};

/// A path of the guest's, or any other string of its system, as the wire has it.
pub(crate) fn bytes(text: impl AsRef<OsStr>) -> Bytes {
    Bytes::copy_from_slice(text.as_ref().as_bytes())
}

/// One answer, within the client's time or, if given, `limit`.
pub(crate) async fn ask<M, R, S, F>(
    sandbox: &SandboxHandle,
    (repeat, limit): (Repeat, Option<Duration>),
    message: &M,
    send: S,
) -> Result<R, Error>
where
    M: Clone,
    S: Fn(Client, Request<M>) -> F,
    F: Future<Output = Result<Response<R>, Status>>,
{
    let terms = Terms {
        limit,
        ..sandbox.terms(repeat)
    };
    sandbox
        .client()
        .unary(terms, message, |client, mut request| {
            sandbox.address(&mut request);
            send(client, request)
        })
        .await
}

/// A stream of answers: the client's time counts until it begins.
pub(crate) async fn open<M, R, S, F>(
    sandbox: &SandboxHandle,
    repeat: Repeat,
    message: &M,
    send: S,
) -> Result<R, Error>
where
    M: Clone,
    S: Fn(Client, Request<M>) -> F,
    F: Future<Output = Result<Response<R>, Status>>,
{
    let terms = sandbox.terms(repeat);
    sandbox
        .client()
        .open(terms, message, |client, mut request| {
            sandbox.address(&mut request);
            send(client, request)
        })
        .await
}

/// What is uploaded.
pub(crate) enum Content {
    /// All of it is here.
    Fixed(Bytes),
    /// It comes.
    Reader(Pin<Box<dyn AsyncRead + Send>>),
}

impl Content {
    pub(crate) fn reader(reader: impl AsyncRead + Send + 'static) -> Self {
        Self::Reader(Box::pin(reader))
    }
}

/// The request half of an upload: the start, then pieces of at most 256 KiB. One is read only once the one before
/// is under way, so that memory stays flat whatever the size.
pub(crate) struct Upload<M> {
    start: Option<M>,
    wrap: fn(Bytes) -> M,
    source: Source,
}

enum Source {
    Fixed(Bytes),
    Reader {
        pieces: ReaderStream<Pin<Box<dyn AsyncRead + Send>>>,
        failed: Option<oneshot::Sender<io::Error>>,
    },
}

impl<M: Unpin> Stream for Upload<M> {
    type Item = M;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<M>> {
        if let Some(start) = self.start.take() {
            return Poll::Ready(Some(start));
        }
        let wrap = self.wrap;
        match &mut self.source {
            Source::Fixed(bytes) if bytes.is_empty() => Poll::Ready(None),
            Source::Fixed(bytes) => {
                let piece = bytes.split_to(bytes.len().min(limits::CHUNK_IN));
                Poll::Ready(Some(wrap(piece)))
            }
            Source::Reader { pieces, failed } => match ready!(Pin::new(pieces).poll_next(cx)) {
                Some(Ok(piece)) => Poll::Ready(Some(wrap(piece))),
                None => Poll::Ready(None),
                Some(Err(error)) => {
                    if let Some(failed) = failed.take() {
                        // Nobody listens any more: the call is over.
                        drop(failed.send(error));
                    }
                    // An end here would be taken for the end of the content; the call is dropped instead.
                    Poll::Pending
                }
            },
        }
    }
}

/// An upload and its one answer, without a limit of time. Bytes that are all here go again on the host's word; what a
/// reader gives is read once, so such a call is never repeated.
pub(crate) async fn upload<M, R, S, F>(
    sandbox: &SandboxHandle,
    (start, wrap): (M, fn(Bytes) -> M),
    content: Content,
    send: S,
) -> Result<R, Error>
where
    M: Clone,
    S: Fn(Client, Request<Upload<M>>) -> F,
    F: Future<Output = Result<Response<R>, Status>>,
{
    let upload = |source| Upload {
        start: Some(start.clone()),
        wrap,
        source,
    };
    match content {
        Content::Fixed(bytes) => {
            let terms = Terms {
                limit: Some(Duration::MAX),
                ..sandbox.terms(Repeat::OnWord)
            };
            sandbox
                .client()
                .open(terms, &(), |client, mut request| {
                    sandbox.address(&mut request);
                    send(client, request.map(|()| upload(Source::Fixed(bytes.clone()))))
                })
                .await
        }
        Content::Reader(reader) => {
            let (told, failed) = oneshot::channel();
            let source = Source::Reader {
                pieces: ReaderStream::with_capacity(reader, limits::CHUNK_IN),
                failed: Some(told),
            };
            let client = sandbox.client();
            let mut request = client.request(upload(source), sandbox.token(), None);
            sandbox.address(&mut request);
            let call = Box::pin(send(client.clone(), request));
            tokio::select! {
                biased;
                Ok(error) = failed => Err(Error::local("what was to be sent cannot be read", error)),
                reply = call => reply.map(Response::into_inner).map_err(Error::from_status),
            }
        }
    }
}
