//! One command of a session.

use std::{
    borrow::Cow,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::StreamExt as _;
use sandbox_protocol::v1::{
    self, SessionRunIn, SessionRunOut, SessionRunStart, session_exit, session_run_in, session_run_out,
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::Streaming;

use super::SessionHandle;
use crate::{
    command::millis,
    error::Error,
    exec::{How, Kept},
    guest,
    input::{Control, Controls, Signaller},
    retry::Repeat,
};

/// Bytes of each output that [`Run::output`] keeps, unless set.
const OUTPUT_LIMIT: usize = 8 * 1024 * 1024;

/// A command in the making. Made by [`SessionHandle::run`].
#[derive(Debug, Clone)]
#[must_use = "a command does nothing until `output` or `stream` is called"]
pub struct Run {
    session: SessionHandle,
    text: Bytes,
    timeout: Option<Duration>,
    limit: usize,
}

impl Run {
    pub(super) fn new(session: SessionHandle, text: Bytes) -> Self {
        Self {
            session,
            text,
            timeout: None,
            limit: OUTPUT_LIMIT,
        }
    }

    /// Time of the command: after it, what the command started is killed. The shell and older jobs stay.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Bytes that [`output`](Self::output) keeps of each stream; default 8 MiB.
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    /// Runs it to its end and collects what it says. Beyond the limit the command runs on, and the rest is dropped
    /// and told.
    ///
    /// # Errors
    /// SESSION_NOT_FOUND, SESSION_BUSY, SESSION_ENDED, INVALID_COMMAND. A command that fails, or that ends the shell,
    /// is not an error: see [`SessionOutput::status`].
    pub async fn output(self) -> Result<SessionOutput, Error> {
        Box::pin(self.collect()).await
    }

    /// Starts it; events come as they happen, and a reader that pauses makes the command wait.
    ///
    /// # Errors
    /// See [`output`](Self::output), here or as the first event.
    pub async fn stream(self) -> Result<SessionStream, Error> {
        Box::pin(SessionStream::open(self)).await
    }

    async fn collect(self) -> Result<SessionOutput, Error> {
        let [mut stdout, mut stderr, mut late_stdout, mut late_stderr] =
            [(); 4].map(|()| Kept::new(self.limit));
        let mut stream = Box::pin(SessionStream::open(self)).await?;
        loop {
            match stream.next().await {
                Some(Ok(SessionEvent::Started { .. })) => {}
                Some(Ok(SessionEvent::Stdout(data))) => stdout.push(&data),
                Some(Ok(SessionEvent::Stderr(data))) => stderr.push(&data),
                Some(Ok(SessionEvent::LateStdout(data))) => late_stdout.push(&data),
                Some(Ok(SessionEvent::LateStderr(data))) => late_stderr.push(&data),
                Some(Ok(SessionEvent::Exit(status))) => {
                    return Ok(SessionOutput {
                        status: *status,
                        truncated: [&stdout, &stderr, &late_stdout, &late_stderr]
                            .iter()
                            .any(|kept| kept.cut),
                        stdout: stdout.bytes,
                        stderr: stderr.bytes,
                        late_stdout: late_stdout.bytes,
                        late_stderr: late_stderr.bytes,
                    });
                }
                Some(Err(error)) => return Err(error),
                None => return Err(Error::unfinished("the call ended without the command's exit")),
            }
        }
    }
}

/// The end of a session's command.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionExit {
    /// The command's code; a signal is the shell's, when it died of one.
    pub how: How,
    /// Where the shell is now.
    pub cwd: Bytes,
    /// The shell is gone: it exited, was replaced or crashed, or had to be killed.
    pub session_ended: bool,
    /// The command's time was over.
    pub timed_out: bool,
    /// The command was cancelled.
    pub cancelled: bool,
    /// From its start to its end.
    pub wall: Duration,
}

impl SessionExit {
    /// Code 0, within its time.
    #[must_use]
    pub fn success(&self) -> bool {
        self.how == How::Code(0) && !self.timed_out && !self.cancelled
    }

    fn read(exit: v1::SessionExit) -> Result<Self, Error> {
        let how = match exit.how {
            Some(session_exit::How::Code(code)) => How::Code(code),
            Some(session_exit::How::Signal(signal)) => How::Signal(signal),
            None => {
                return Err(Error::unfinished(
                    "the exit message names neither code nor signal",
                ));
            }
        };
        Ok(Self {
            how,
            cwd: exit.cwd,
            session_ended: exit.session_ended,
            timed_out: exit.timed_out,
            cancelled: exit.cancelled,
            wall: Duration::from_micros(exit.wall_us),
        })
    }
}

/// A command's end and what it said.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionOutput {
    /// How it ended.
    pub status: SessionExit,
    /// What it wrote to standard output, as bytes.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error, as bytes.
    pub stderr: Vec<u8>,
    /// What background jobs wrote to standard output before it began; the guest keeps the last 64 KiB.
    pub late_stdout: Vec<u8>,
    /// What background jobs wrote to standard error before it began.
    pub late_stderr: Vec<u8>,
    /// One of them went on beyond the limit.
    pub truncated: bool,
}

impl SessionOutput {
    /// Standard output as text; what is not UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn stdout_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout)
    }

    /// Standard error as text; what is not UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr)
    }
}

/// What a session's command does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionEvent {
    /// It runs.
    Started {
        /// Counts the commands of the session, from 1.
        number: u64,
    },
    /// It wrote to standard output.
    Stdout(Bytes),
    /// It wrote to standard error.
    Stderr(Bytes),
    /// A background job wrote to standard output before this command began.
    LateStdout(Bytes),
    /// A background job wrote to standard error before this command began.
    LateStderr(Bytes),
    /// It ended, and the call ended in order. The last event.
    Exit(Box<SessionExit>),
}

/// A running command, a stream of events. Dropping it cancels the command; the session stays.
#[derive(Debug)]
pub struct SessionStream {
    /// None once it has ended.
    replies: Option<Streaming<SessionRunOut>>,
    controls: Controls,
    exit: Option<v1::SessionExit>,
}

impl SessionStream {
    async fn open(run: Run) -> Result<Self, Error> {
        let timeout_ms = match run.timeout.map(millis) {
            None => 0,
            Some(Some(ms)) if ms > 0 => ms,
            Some(Some(_) | None) => {
                return Err(Error::invalid("timeout_ms", "1 ms to 2^32 - 1 ms".to_owned()));
            }
        };
        let start = SessionRunStart {
            session: run.session.id,
            command: run.text,
            timeout_ms,
        };
        let sandbox = &run.session.sandbox;
        let (replies, controls) = guest::open(sandbox, Repeat::OnWord, &(), |client, request| {
            let (controls, asked) = Controls::channel();
            let start = session_run_in::M::Start(start.clone());
            let signals = ReceiverStream::new(asked).filter_map(|control| {
                std::future::ready(match control {
                    Control::Signal(signal) => Some(session_run_in::M::Signal(signal)),
                    // Nobody is given a way to ask for it: a session has no terminal.
                    Control::Resize(_) => None,
                })
            });
            let input = futures_util::stream::iter([start])
                .chain(signals)
                .map(|m| SessionRunIn { m: Some(m) });
            async move {
                let mut agent = client.agent_client();
                let replies = Box::pin(agent.session_run(request.map(|()| input))).await?;
                Ok(replies.map(|replies| (replies, controls)))
            }
        })
        .await?;
        Ok(Self {
            replies: Some(replies),
            controls,
            exit: None,
        })
    }

    /// Sends signals to what the command started, while the events are read elsewhere. The shell gets none.
    #[must_use]
    pub fn signaller(&self) -> Signaller {
        self.controls.signaller()
    }

    /// The next event; nothing after the exit or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<SessionEvent, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// One message, as an event if it is one.
    fn read(&mut self, message: SessionRunOut) -> Result<Option<SessionEvent>, Error> {
        if self.exit.is_some() {
            return Err(Error::unfinished("a message came after the command's exit"));
        }
        Ok(match message.m {
            Some(session_run_out::M::Started(started)) => Some(SessionEvent::Started {
                number: started.number,
            }),
            Some(session_run_out::M::Stdout(chunk)) => Some(SessionEvent::Stdout(chunk.data)),
            Some(session_run_out::M::Stderr(chunk)) => Some(SessionEvent::Stderr(chunk.data)),
            Some(session_run_out::M::LateStdout(chunk)) => Some(SessionEvent::LateStdout(chunk.data)),
            Some(session_run_out::M::LateStderr(chunk)) => Some(SessionEvent::LateStderr(chunk.data)),
            // It counts only once the call has ended in order.
            Some(session_run_out::M::Exit(exit)) => {
                self.exit = Some(exit);
                None
            }
            // Of a newer agent; it says nothing that this version asked for.
            None => None,
        })
    }

    /// The call ended in order.
    fn finish(&mut self) -> Result<SessionEvent, Error> {
        let Some(exit) = self.exit.take() else {
            return Err(Error::unfinished("the call ended without the command's exit"));
        };
        SessionExit::read(exit).map(|exit| SessionEvent::Exit(Box::new(exit)))
    }
}

impl Stream for SessionStream {
    type Item = Result<SessionEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match self.read(message) {
                    Ok(None) => continue,
                    Ok(Some(event)) => return Poll::Ready(Some(Ok(event))),
                    Err(error) => Err(error),
                },
                Some(Err(status)) => Err(Error::from_status(status)),
                None => self.finish(),
            };
            self.replies = None;
            return Poll::Ready(Some(outcome));
        }
    }
}
