//! Reading a process's log.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use sandbox_protocol::v1::{AgentLogsRequest, LogsOut};
use tokio_stream::Stream;

use super::{
    ProcessHandle,
    reader::{End, Ledger, LogEvent, LogFrom, Reader},
};
use crate::{client::via, error::Error, guest, retry::Repeat};

/// A look into a log, in the making. Made by [`ProcessHandle::logs`].
#[derive(Debug, Clone)]
#[must_use = "nothing is read until `open` is called"]
pub struct Logs {
    process: ProcessHandle,
    from: LogFrom,
    follow: bool,
    max_bytes: u64,
}

impl Logs {
    pub(super) fn new(process: ProcessHandle) -> Self {
        Self {
            process,
            from: LogFrom::default(),
            follow: false,
            max_bytes: 0,
        }
    }

    /// Where to begin. Default: at the oldest byte that is held.
    pub fn from(mut self, from: LogFrom) -> Self {
        self.from = from;
        self
    }

    /// Goes on with what comes, until the process has ended: then the last event is its exit.
    pub fn follow(mut self) -> Self {
        self.follow = true;
        self
    }

    /// Ends after so many bytes.
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Begins to read. A reader that pauses misses what the log can not hold, and is told.
    ///
    /// # Errors
    /// PROCESS_NOT_FOUND, OFFSET_OUT_OF_RANGE, here or as the first event.
    pub async fn open(self) -> Result<LogStream, Error> {
        let message = AgentLogsRequest {
            process: Some(self.process.which.message()),
            from: Some(self.from.message()),
            follow: self.follow,
            max_bytes: self.max_bytes,
        };
        let end = match (self.follow, self.max_bytes) {
            (false, _) => End::Any,
            (true, 0) => End::Exit,
            (true, bytes) => End::Bytes(bytes),
        };
        let sandbox = &self.process.sandbox;
        let replies = guest::open(sandbox, Repeat::Harmless, &message, via!(agent_client.logs)).await?;
        Ok(LogStream(Reader::new(replies, Ledger::new(self.from, end))))
    }
}

/// A log as it is read, a stream of events. Dropping it ends the call.
#[derive(Debug)]
pub struct LogStream(Reader<LogsOut>);

impl LogStream {
    /// The next event; nothing after the end or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<LogEvent, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// Where another reader would go on, once it is known.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.0.offset()
    }
}

impl Stream for LogStream {
    type Item = Result<LogEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.0).poll_next(cx)
    }
}
