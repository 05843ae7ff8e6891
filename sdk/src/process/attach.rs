//! Attaching to a process: its output as it comes, and its input.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use sandbox_protocol::v1::{
    self, AttachIn, AttachOut, AttachStart, Flow, ProcessState, attach_in, attach_out,
};
use tokio_stream::Stream;

use super::{
    ProcessHandle,
    reader::{End, Ledger, LogEvent, LogFrom, Reader},
};
use crate::{
    error::Error,
    exec::Exit,
    guest,
    input::{Controls, Input, Resizer, Signaller, Stdin, StdinWriter},
    retry::Repeat,
};

/// A visit to a process, in the making. Made by [`ProcessHandle::attach`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens until `open` is called"]
pub struct Attach {
    process: ProcessHandle,
    from: LogFrom,
    flow: Flow,
    input: bool,
}

impl Attach {
    pub(super) fn new(process: ProcessHandle) -> Self {
        Self {
            process,
            from: LogFrom::default(),
            flow: Flow::Gap,
            input: false,
        }
    }

    /// Where to begin. Default: at the oldest byte that is held.
    pub fn from(mut self, from: LogFrom) -> Self {
        self.from = from;
        self
    }

    /// Makes the program wait for this reader. Default: a reader that falls behind misses what the log can not hold,
    /// and is told.
    pub fn hold(mut self) -> Self {
        self.flow = Flow::Hold;
        self
    }

    /// Brings input, signals and sizes too; one client at a time may.
    pub fn input(mut self) -> Self {
        self.input = true;
        self
    }

    /// Attaches. Events come as they happen.
    ///
    /// # Errors
    /// PROCESS_NOT_FOUND, OFFSET_OUT_OF_RANGE, INPUT_BUSY.
    pub async fn open(self) -> Result<AttachStream, Error> {
        Box::pin(AttachStream::open(self)).await
    }
}

/// The process as it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attached {
    /// Its id.
    pub id: u64,
    /// In the guest.
    pub pid: u32,
    /// Whether it runs.
    pub state: ProcessState,
    /// Offset of the oldest byte that is held.
    pub log_start: u64,
    /// Offset of the next byte that it says.
    pub log_end: u64,
    /// It runs on a terminal.
    pub tty: bool,
}

impl From<v1::Attached> for Attached {
    fn from(attached: v1::Attached) -> Self {
        Self {
            id: attached.id,
            pid: attached.pid,
            state: attached.state(),
            log_start: attached.log_start,
            log_end: attached.log_end,
            tty: attached.tty,
        }
    }
}

/// A process that is visited, a stream of events that ends with its exit. Dropping it ends the visit, and the process
/// goes on.
#[derive(Debug)]
pub struct AttachStream {
    /// Boxed: it is large, and visits are moved.
    reader: Box<Reader<AttachOut>>,
    attached: Attached,
    stdin: Option<StdinWriter>,
    controls: Controls,
}

impl AttachStream {
    async fn open(attach: Attach) -> Result<Self, Error> {
        let mut start = AttachStart {
            process: Some(attach.process.which.message()),
            from: Some(attach.from.message()),
            input: attach.input,
            ..AttachStart::default()
        };
        start.set_flow(attach.flow);
        let sandbox = &attach.process.sandbox;
        let stdin = if attach.input { Stdin::Piped } else { Stdin::Null };
        // Nothing but the start was sent before the first answer.
        let opened = guest::open(sandbox, Repeat::Harmless, &(), |client, request| {
            let start = AttachIn {
                m: Some(attach_in::M::Start(start.clone())),
            };
            let (input, stdin, controls) = Input::new(start, &stdin, attach.input);
            async move {
                let mut agent = client.agent_client();
                let mut replies = Box::pin(agent.attach(request.map(|()| input))).await?;
                let first = replies.get_mut().message().await?;
                Ok(replies.map(|replies| (replies, first, stdin, controls)))
            }
        })
        .await?;
        let (replies, first, stdin, controls) = opened;
        let Some(attach_out::M::Attached(attached)) = first.and_then(|message| message.m) else {
            return Err(Error::unfinished(
                "the answer does not begin with the process's state",
            ));
        };
        Ok(Self {
            reader: Box::new(Reader::new(replies, Ledger::new(attach.from, End::Exit))),
            attached: attached.into(),
            stdin,
            controls,
        })
    }

    /// The process as it was found.
    #[must_use]
    pub fn attached(&self) -> Attached {
        self.attached
    }

    /// The process's input, if it was [asked for](Attach::input); once. Dropping it ends the input for good: to leave
    /// it open for the next visitor, drop the visit first.
    pub fn take_stdin(&mut self) -> Option<StdinWriter> {
        self.stdin.take()
    }

    /// Sends signals while the events are read elsewhere, if [input](Attach::input) was asked for.
    #[must_use]
    pub fn signaller(&self) -> Signaller {
        self.controls.signaller()
    }

    /// Sets the size of its terminal while the events are read elsewhere, if [input](Attach::input) was asked for.
    #[must_use]
    pub fn resizer(&self) -> Resizer {
        self.controls.resizer()
    }

    /// The next event; nothing after the exit or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<LogEvent, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// Where another reader would go on, once it is known.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.reader.offset()
    }

    /// Reads to the end and drops the output.
    ///
    /// # Errors
    /// As the events.
    pub async fn wait(mut self) -> Result<Exit, Error> {
        loop {
            match self.next().await {
                Some(Ok(LogEvent::Exit(exit))) => return Ok(*exit),
                Some(Ok(LogEvent::Stdout { .. } | LogEvent::Stderr { .. } | LogEvent::Gap { .. })) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(Error::unfinished("the exit was read before")),
            }
        }
    }
}

impl Stream for AttachStream {
    type Item = Result<LogEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut *self.reader).poll_next(cx)
    }
}
