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
    v1::{self, ExecIn, ExecOut, ExecStart, StdinClose, Work, exec_in, exec_out, signal::Scope},
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::{Streaming, metadata::MetadataValue};

use super::{Exec, Exit, Stdin};
use crate::{client::Terms, error::Error, retry::Repeat};

/// Largest piece of input in one message, in bytes: one HTTP/2 window's worth.
const PIECE: usize = 64 * 1024;
/// Pieces of input that wait for the connection: enough to keep it busy, 256 KiB at most.
const PIECES: usize = 4;
/// Signals that wait for the connection; a sender waits beyond that.
const SIGNALS: usize = 8;

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

/// A running program. Dropping it ends the call, and the guest kills the program.
#[derive(Debug)]
pub struct ExecStream {
    /// None once it has ended.
    replies: Option<Streaming<ExecOut>>,
    stdin: Option<ExecStdin>,
    signals: Option<Signaller>,
    exit: Option<v1::Exit>,
    stdout_bytes: u64,
    stderr_bytes: u64,
}

impl ExecStream {
    /// `signals`: keep the request half open, so that signals can be sent.
    pub(super) async fn open(exec: Exec, signals: bool) -> Result<Self, Error> {
        let Exec {
            sandbox,
            command,
            stdin,
            trace,
            ..
        } = exec;
        let start = ExecStart {
            command: Some(command),
            stdin: !matches!(stdin, Stdin::Null),
            trace,
            ..ExecStart::default()
        };
        let terms = Terms {
            token: sandbox.token(),
            ..Terms::new(Repeat::OnWord)
        };
        // Each attempt has a request half of its own.
        let opened = sandbox
            .client()
            .open(terms, &(), |client, mut request| {
                let (input, stdin, signals) = Input::new(start.clone(), &stdin, signals);
                sandbox.address(&mut request);
                if trace {
                    let yes = MetadataValue::from_static("1");
                    request.metadata_mut().insert(SANDBOX_TRACE, yes);
                }
                async move {
                    let mut agent = client.agent_client();
                    let replies = Box::pin(agent.exec(request.map(|()| input))).await?;
                    Ok(replies.map(|replies| (replies, stdin, signals)))
                }
            })
            .await?;
        let (replies, stdin, signals) = opened;
        Ok(Self {
            replies: Some(replies),
            stdin,
            signals,
            exit: None,
            stdout_bytes: 0,
            stderr_bytes: 0,
        })
    }

    /// The input of a program with [piped input](Exec::piped_stdin); once. Dropping it ends the input.
    pub fn take_stdin(&mut self) -> Option<ExecStdin> {
        self.stdin.take()
    }

    /// Sends signals while the events are read elsewhere.
    #[must_use]
    pub fn signaller(&self) -> Signaller {
        // Streams that callers hold are opened with signals; one without answers as an ended program does.
        self.signals
            .clone()
            .unwrap_or_else(|| Signaller(mpsc::channel(1).0))
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

/// The host's counts, from the trailers of a call that has ended.
fn host_work(replies: &mut Streaming<ExecOut>) -> Option<Work> {
    let trailers = replies.trailers().now_or_never()?.ok()??;
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
                    let work = host_work(replies);
                    self.finish(work)
                }
            };
            self.replies = None;
            self.stdin = None;
            return Poll::Ready(Some(outcome));
        }
    }
}

/// The program's input is over: it has ended, or the call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the program's input is over")]
pub struct StdinClosed;

/// The input of a running program. Dropping it ends the input.
#[derive(Debug)]
pub struct ExecStdin(mpsc::Sender<Bytes>);

impl ExecStdin {
    /// Writes all of it, as fast as the program reads. Not cancel safe: a part may have been written.
    ///
    /// # Errors
    /// The call is over. A program that only stops reading is no error: it has the right to.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), StdinClosed> {
        let mut bytes = bytes.into();
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(PIECE));
            self.0.send(piece).await.map_err(|_unsent| StdinClosed)?;
        }
        Ok(())
    }

    /// Returns when the call is over, and with it any use of more input. Cancel safe.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// Sends signals to a running program.
#[derive(Debug, Clone)]
pub struct Signaller(mpsc::Sender<v1::Signal>);

impl Signaller {
    /// Sends a signal to the program's process group. Nothing happens once it has ended. Cancel safe.
    pub async fn signal(&self, number: i32) {
        self.signal_scope(number, Scope::Group).await;
    }

    /// Sends a signal to the leader, its group, or all that descends from it. Nothing happens once it has ended.
    pub async fn signal_scope(&self, number: i32, scope: Scope) {
        let scope = i32::from(scope);
        // The program has ended: there is nobody to signal.
        self.0.send(v1::Signal { number, scope }).await.ok();
    }
}

/// The request half, as tonic sends it.
struct Input {
    start: Option<ExecStart>,
    signals: Option<mpsc::Receiver<v1::Signal>>,
    stdin: InputSource,
}

enum InputSource {
    End,
    Fixed(Bytes),
    Piped(mpsc::Receiver<Bytes>),
}

impl Input {
    fn new(start: ExecStart, stdin: &Stdin, signals: bool) -> (Self, Option<ExecStdin>, Option<Signaller>) {
        let (stdin, writer) = match stdin {
            Stdin::Null => (InputSource::End, None),
            Stdin::Fixed(bytes) => (InputSource::Fixed(bytes.clone()), None),
            Stdin::Piped => {
                let (writer, reader) = mpsc::channel(PIECES);
                (InputSource::Piped(reader), Some(ExecStdin(writer)))
            }
        };
        let (signaller, signals) = if signals {
            let (sender, receiver) = mpsc::channel(SIGNALS);
            (Some(Signaller(sender)), Some(receiver))
        } else {
            (None, None)
        };
        let input = Self {
            start: Some(start),
            signals,
            stdin,
        };
        (input, writer, signaller)
    }

    /// The next piece of input; nothing when there is and will be none.
    fn poll_stdin(&mut self, cx: &mut Context<'_>) -> Poll<Option<exec_in::M>> {
        let piece = match &mut self.stdin {
            InputSource::End => return Poll::Ready(None),
            InputSource::Fixed(bytes) if bytes.is_empty() => None,
            InputSource::Fixed(bytes) => Some(bytes.split_to(bytes.len().min(PIECE))),
            InputSource::Piped(reader) => ready!(reader.poll_recv(cx)),
        };
        Poll::Ready(Some(piece.map_or_else(
            || {
                self.stdin = InputSource::End;
                exec_in::M::StdinClose(StdinClose {})
            },
            exec_in::M::Stdin,
        )))
    }
}

impl Stream for Input {
    type Item = ExecIn;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ExecIn>> {
        let message = |m| Poll::Ready(Some(ExecIn { m: Some(m) }));
        if let Some(start) = self.start.take() {
            return message(exec_in::M::Start(start));
        }
        // Signals overtake input: a kill never waits behind it.
        if let Some(signals) = &mut self.signals {
            match signals.poll_recv(cx) {
                Poll::Ready(Some(signal)) => return message(exec_in::M::Signal(signal)),
                Poll::Ready(None) => self.signals = None,
                Poll::Pending => {}
            }
        }
        match self.poll_stdin(cx) {
            Poll::Ready(Some(m)) => message(m),
            Poll::Ready(None) if self.signals.is_none() => Poll::Ready(None),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}
