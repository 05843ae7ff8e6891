//! The two halves of a running program's call.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use prost::Message as _;
use sandbox_protocol::{
    metadata::{SANDBOX_TRACE, SANDBOX_WORK},
    v1::{self, ExecIn, ExecOut, Work, exec_in, exec_out},
};
use tokio_stream::Stream;
use tonic::{
    Streaming,
    metadata::{MetadataMap, MetadataValue},
};

use super::{Exec, Exit};
use crate::{
    error::Error,
    guest,
    input::{Controls, Input, Resizer, Signaller, StdinWriter},
    retry::Repeat,
};

/// What a running program does.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It runs.
    Started {
        /// Never reused in a guest's life.
        id: u64,
        /// In the guest.
        pid: u32,
    },
    /// It wrote to standard output.
    Stdout(Bytes),
    /// It wrote to standard error.
    Stderr(Bytes),
    /// It ended, all of its output came before, and the call ended in order. The last event.
    Exit(Box<Exit>),
}

/// A running program. Dropping it ends the call, and the guest kills the program, unless it was to be
/// [detached](Exec::detach_on_disconnect).
#[derive(Debug)]
pub struct ExecStream {
    /// None once it has ended.
    replies: Option<Streaming<ExecOut>>,
    stdin: Option<StdinWriter>,
    controls: Controls,
    exit: Option<v1::Exit>,
    stdout_bytes: u64,
    stderr_bytes: u64,
}

impl ExecStream {
    /// `controls`: keep the request half open, so that signals and sizes can be sent.
    pub(super) async fn open(exec: Exec, controls: bool) -> Result<Self, Error> {
        let start = exec.start()?;
        let Exec {
            sandbox,
            stdin,
            trace,
            ..
        } = exec;
        // Each attempt has a request half of its own.
        let opened = guest::open(&sandbox, Repeat::OnWord, &(), |client, mut request| {
            let start = ExecIn {
                m: Some(exec_in::M::Start(start.clone())),
            };
            let (input, stdin, controls) = Input::new(start, &stdin, controls);
            if trace {
                ask_for_work(request.metadata_mut());
            }
            async move {
                let mut agent = client.agent_client();
                let replies = Box::pin(agent.exec(request.map(|()| input))).await?;
                Ok(replies.map(|replies| (replies, stdin, controls)))
            }
        })
        .await?;
        let (replies, stdin, controls) = opened;
        Ok(Self {
            replies: Some(replies),
            stdin,
            controls,
            exit: None,
            stdout_bytes: 0,
            stderr_bytes: 0,
        })
    }

    /// The input of a program with [piped input](Exec::piped_stdin); once. Dropping it ends the input.
    pub fn take_stdin(&mut self) -> Option<StdinWriter> {
        self.stdin.take()
    }

    /// Sends signals while the events are read elsewhere.
    #[must_use]
    pub fn signaller(&self) -> Signaller {
        self.controls.signaller()
    }

    /// Sets the size of its [terminal](Exec::tty) while the events are read elsewhere.
    #[must_use]
    pub fn resizer(&self) -> Resizer {
        self.controls.resizer()
    }

    /// The next event; nothing after the exit or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// Reads to the end and drops the output. Input that was not taken is at its end.
    ///
    /// # Errors
    /// As the events.
    pub async fn wait(mut self) -> Result<Exit, Error> {
        drop(self.stdin.take());
        loop {
            match self.next().await {
                Some(Ok(Event::Exit(exit))) => return Ok(*exit),
                Some(Ok(Event::Started { .. } | Event::Stdout(_) | Event::Stderr(_))) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(Error::unfinished("the exit was read before")),
            }
        }
    }

    /// One message, as an event if it is one.
    fn read(&mut self, message: ExecOut) -> Result<Option<Event>, Error> {
        if self.exit.is_some() {
            return Err(Error::unfinished("a message came after the program's exit"));
        }
        let length = |data: &Bytes| u64::try_from(data.len()).unwrap_or(u64::MAX);
        Ok(match message.m {
            Some(exec_out::M::Started(started)) => Some(Event::Started {
                id: started.id,
                pid: started.pid,
            }),
            Some(exec_out::M::Stdout(chunk)) => {
                self.stdout_bytes = self.stdout_bytes.saturating_add(length(&chunk.data));
                Some(Event::Stdout(chunk.data))
            }
            Some(exec_out::M::Stderr(chunk)) => {
                self.stderr_bytes = self.stderr_bytes.saturating_add(length(&chunk.data));
                Some(Event::Stderr(chunk.data))
            }
            // It counts only once the call has ended in order.
            Some(exec_out::M::Exit(exit)) => {
                self.exit = Some(exit);
                None
            }
            // Of a newer agent; it says nothing that this version asked for.
            None => None,
        })
    }

    /// The call ended in order.
    fn finish(&mut self, host_work: Option<Work>) -> Result<Event, Error> {
        let Some(exit) = self.exit.take() else {
            return Err(Error::unfinished("the call ended without the program's exit"));
        };
        if (exit.stdout_bytes, exit.stderr_bytes) != (self.stdout_bytes, self.stderr_bytes) {
            return Err(Error::unfinished("part of the program's output was lost"));
        }
        Exit::read(exit, host_work).map(|exit| Event::Exit(Box::new(exit)))
    }
}

/// Asks the host for its counts.
pub(super) fn ask_for_work(metadata: &mut MetadataMap) {
    metadata.insert(SANDBOX_TRACE, MetadataValue::from_static("1"));
}

/// The host's counts, from the trailers of a call that has ended.
pub(super) fn work(trailers: &MetadataMap) -> Option<Work> {
    let bytes = trailers.get_bin(SANDBOX_WORK)?.to_bytes().ok()?;
    Work::decode(bytes).ok()
}

impl Stream for ExecStream {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(&mut *replies).poll_next(cx)) {
                Some(Ok(message)) => match self.read(message) {
                    Ok(None) => continue,
                    Ok(Some(event)) => return Poll::Ready(Some(Ok(event))),
                    Err(error) => Err(error),
                },
                Some(Err(status)) => Err(Error::from_status(status)),
                None => {
                    let trailers = replies.trailers().now_or_never();
                    let work = trailers.and_then(|trailers| work(&trailers.ok()??));
                    self.finish(work)
                }
            };
            self.replies = None;
            self.stdin = None;
            return Poll::Ready(Some(outcome));
        }
    }
}
