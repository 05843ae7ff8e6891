//! The list of processes, batch by batch.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
};

use sandbox_protocol::v1::{self, AgentPsReply, AgentPsRequest};
use tokio_stream::Stream;
use tonic::Streaming;

use crate::{client::via, error::Error, guest, retry::Repeat, sandbox::SandboxHandle};

/// Processes of a sandbox, as a stream. Made by [`SandboxHandle::processes`]. Dropping it ends the call.
#[derive(Debug)]
pub struct ProcessList {
    /// None once it has ended.
    replies: Option<Streaming<AgentPsReply>>,
    batch: VecDeque<v1::Process>,
}

impl ProcessList {
    pub(super) async fn open(sandbox: &SandboxHandle, running: bool) -> Result<Self, Error> {
        let message = AgentPsRequest { running };
        let replies = guest::open(sandbox, Repeat::Harmless, &message, via!(agent_client.ps)).await?;
        Ok(Self {
            replies: Some(replies),
            batch: VecDeque::new(),
        })
    }

    /// The next process; nothing at the end. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<v1::Process, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// All of them.
    ///
    /// # Errors
    /// As the stream's.
    pub async fn all(mut self) -> Result<Vec<v1::Process>, Error> {
        let mut all = Vec::new();
        while let Some(process) = self.next().await {
            all.push(process?);
        }
        Ok(all)
    }
}

impl Stream for ProcessList {
    type Item = Result<v1::Process, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(process) = self.batch.pop_front() {
                return Poll::Ready(Some(Ok(process)));
            }
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(reply)) => self.batch = reply.processes.into(),
                Some(Err(status)) => {
                    self.replies = None;
                    return Poll::Ready(Some(Err(Error::from_status(status))));
                }
                None => self.replies = None,
            }
        }
    }
}
