//! Content that comes: of a file, or of a tree as tar.

use std::{
    ffi::OsStr,
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use sandbox_protocol::v1::{AgentReadRequest, FileStat, ReadEnd, ReadOut, read_out};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_stream::Stream;
use tonic::Streaming;

use super::Files;
use crate::{client::via, error::Error, guest, retry::Repeat, sandbox::SandboxHandle};

/// Bytes that [`Read::bytes`] takes at most, unless set.
const LIMIT: u64 = 64 * 1024 * 1024;

impl Files {
    /// A file's content. Of `/proc` too, where files say that they are empty.
    pub fn read(&self, path: impl AsRef<OsStr>) -> Read {
        Read {
            sandbox: self.sandbox.clone(),
            message: AgentReadRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..AgentReadRequest::default()
            },
            limit: LIMIT,
        }
    }
}

/// A file that shall be read. Made by [`Files::read`].
#[derive(Debug, Clone)]
#[must_use = "nothing is read until `bytes` or `stream` is called"]
pub struct Read {
    sandbox: SandboxHandle,
    message: AgentReadRequest,
    limit: u64,
}

impl Read {
    /// Begins here, in bytes.
    pub fn offset(mut self, bytes: u64) -> Self {
        self.message.offset = bytes;
        self
    }

    /// So many bytes at most. Default: to the end.
    pub fn length(mut self, bytes: u64) -> Self {
        self.message.length = Some(bytes);
        self
    }

    /// Bytes that [`bytes`](Self::bytes) takes at most; default 64 MiB.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// The content as it comes; a reader that pauses makes the guest wait.
    ///
    /// # Errors
    /// NOT_REGULAR_FILE and the reasons of paths.
    pub async fn stream(self) -> Result<FileReader, Error> {
        let sent = guest::open(
            &self.sandbox,
            Repeat::Harmless,
            &self.message,
            via!(agent_client.read),
        );
        Ok(FileReader(Download::begin(sent.await?).await?))
    }

    /// All of it at once.
    ///
    /// # Errors
    /// As [`stream`](Self::stream); FIELD_INVALID (`limit`) for more than that.
    pub async fn bytes(self) -> Result<Vec<u8>, Error> {
        let limit = self.limit;
        let mut reader = self.stream().await?;
        let mut all = Vec::new();
        while let Some(piece) = reader.next().await {
            let piece = piece?;
            if reader.0.count > limit {
                return Err(Error::invalid(
                    "limit",
                    format!("the file has more than {limit} bytes: read it as a stream"),
                ));
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }
}

/// A part of a download.
pub(super) enum Part<E> {
    Head(FileStat),
    Data(Bytes),
    End(E),
}

/// A message of a download.
pub(super) trait Message {
    /// What stands at the end.
    type End: Unpin;

    /// Nothing: of a newer agent, and not asked for.
    fn part(self) -> Option<Part<Self::End>>;

    /// Whether so many bytes are all that the end speaks of.
    fn whole(end: &Self::End, bytes: u64) -> bool;
}

impl Message for ReadOut {
    type End = ReadEnd;

    fn part(self) -> Option<Part<ReadEnd>> {
        Some(match self.m? {
            read_out::M::Head(stat) => Part::Head(stat),
            read_out::M::Data(data) => Part::Data(data),
            read_out::M::End(end) => Part::End(end),
        })
    }

    fn whole(end: &ReadEnd, bytes: u64) -> bool {
        end.bytes == bytes
    }
}

/// Head, data, end: without an end that fits, and an orderly end of the call, it is an error.
#[derive(Debug)]
pub(super) struct Download<M: Message> {
    /// None once it has ended.
    replies: Option<Streaming<M>>,
    pub(super) head: FileStat,
    pub(super) end: Option<M::End>,
    pub(super) count: u64,
    /// Of a piece that was read in part.
    rest: Bytes,
}

impl<M: Message> Download<M> {
    pub(super) async fn begin(mut replies: Streaming<M>) -> Result<Self, Error> {
        loop {
            let message = replies.message().await.map_err(Error::from_status)?;
            let message = message.ok_or_else(|| Error::unfinished("the call ended without its content"))?;
            match message.part() {
                Some(Part::Head(head)) => {
                    return Ok(Self {
                        replies: Some(replies),
                        head,
                        end: None,
                        count: 0,
                        rest: Bytes::new(),
                    });
                }
                Some(Part::Data(_) | Part::End(_)) => {
                    return Err(Error::unfinished("the content came before its head"));
                }
                None => {}
            }
        }
    }

    fn take(&mut self, part: Part<M::End>) -> Result<Bytes, Error> {
        if self.end.is_some() {
            return Err(Error::unfinished("a message came after the end of the content"));
        }
        match part {
            Part::Head(_) => Err(Error::unfinished("a second head came")),
            Part::Data(data) => {
                let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
                self.count = self.count.saturating_add(length);
                Ok(data)
            }
            Part::End(end) => {
                self.end = Some(end);
                Ok(Bytes::new())
            }
        }
    }

    /// The next piece, never an empty one; nothing after the end or an error.
    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        if !self.rest.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut self.rest))));
        }
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match message.part().map(|part| self.take(part)) {
                    None => continue,
                    Some(Ok(data)) if data.is_empty() => continue,
                    Some(Ok(data)) => return Poll::Ready(Some(Ok(data))),
                    Some(Err(error)) => Some(Err(error)),
                },
                Some(Err(status)) => Some(Err(Error::from_status(status))),
                None => match &self.end {
                    Some(end) if M::whole(end, self.count) => None,
                    Some(_) => Some(Err(Error::unfinished("part of the content was lost"))),
                    None => Some(Err(Error::unfinished("the call ended without the content's end"))),
                },
            };
            self.replies = None;
            return Poll::Ready(outcome);
        }
    }

    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if into.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        match ready!(self.poll_piece(cx)) {
            Some(Ok(mut piece)) => {
                into.put_slice(&piece.split_to(piece.len().min(into.remaining())));
                self.rest = piece;
                Poll::Ready(Ok(()))
            }
            Some(Err(error)) => Poll::Ready(Err(error.into())),
            None => Poll::Ready(Ok(())),
        }
    }
}

/// A file's content, an `AsyncRead` and a `Stream` of pieces. Dropping it ends the call.
#[derive(Debug)]
pub struct FileReader(Download<ReadOut>);

impl FileReader {
    /// What the file was when its reading began.
    #[must_use]
    pub fn stat(&self) -> &FileStat {
        &self.0.head
    }

    /// After the end: size or time of change are no longer what they were at the beginning.
    #[must_use]
    pub fn changed(&self) -> bool {
        self.0.end.as_ref().is_some_and(|end| end.changed)
    }

    /// The next piece, at most 64 KiB; nothing after the end or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        poll_fn(|cx| self.0.poll_piece(cx)).await
    }
}

impl Stream for FileReader {
    type Item = Result<Bytes, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_piece(cx)
    }
}

impl AsyncRead for FileReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read(cx, into)
    }
}
