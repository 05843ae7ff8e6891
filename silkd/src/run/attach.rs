//! Readers as clients have them: Logs and Attach.

use std::{
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::Stream;
use sandbox_protocol::{
    limits::CHUNK_OUT,
    reason::Reason,
    v1::{
        AgentLogsRequest, AttachIn, AttachOut, AttachStart, Attached, Flow, LogChunk, LogGap, LogsOut,
        Output, ProcessState, attach_out, logs_out,
    },
};
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

use super::{
    ExecCtx, Runner,
    detached::{Target, find},
    input::{self, End, Source, Stdin},
    log::{Piece, Side},
    logs::{Extent, Follow, Item, Reader},
    seat::Seat,
    time::Time,
};
use crate::{gate::InputSeat, refusal::Refusal, tasks};

fn chunk(piece: Piece) -> LogChunk {
    LogChunk {
        output: match piece.side {
            Side::Stdout => Output::Stdout.into(),
            Side::Stderr => Output::Stderr.into(),
        },
        offset: piece.offset,
        data: piece.data.into(),
    }
}

/// Whether a program has a log.
fn logged(target: &Target) -> Result<(), Refusal> {
    match target {
        Target::Living(job) if !job.is_kept() => {
            let message = format!(
                "process {} has no log: its output goes to whoever started it",
                job.id()
            );
            Err(Refusal::new(Reason::ProcessNotFound, message))
        }
        Target::Living(_) | Target::Exited { .. } => Ok(()),
    }
}

/// The answer to a Logs.
#[derive(Debug)]
pub struct LogsStream {
    reader: Reader,
    target: Target,
    follow: bool,
    /// Bytes that may still be sent.
    left: u64,
    over: bool,
    _ctx: ExecCtx,
}

impl Stream for LogsStream {
    type Item = Result<LogsOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over || this.left == 0 {
            return Poll::Ready(None);
        }
        let most = usize::try_from(this.left).unwrap_or(CHUNK_OUT);
        let m = match ready!(this.reader.poll(cx, most)) {
            Item::Piece(piece) => {
                let sent = u64::try_from(piece.data.len()).unwrap_or(u64::MAX);
                this.left = this.left.saturating_sub(sent);
                logs_out::M::Chunk(chunk(piece))
            }
            Item::Gap { from, to } => logs_out::M::Gap(LogGap { from, to }),
            Item::End => {
                this.over = true;
                match this.target.record().filter(|_| this.follow) {
                    Some(record) => logs_out::M::Exit(record.on_the_wire()),
                    None => return Poll::Ready(None),
                }
            }
        };
        Poll::Ready(Some(Ok(LogsOut { m: Some(m) })))
    }
}

/// The answer to an Attach. Dropped, it leaves the program as it is; its input is free for another.
#[derive(Debug)]
pub struct AttachStream {
    reader: Reader,
    target: Target,
    extent: Extent,
    told: Told,
    input: Option<JoinHandle<Result<(), Refusal>>>,
    _seat: Option<InputSeat>,
    _ctx: ExecCtx,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    Attached,
    All,
}

impl AttachStream {
    fn attached(&self) -> Attached {
        let (pid, state, tty) = match &self.target {
            Target::Living(job) => {
                let row = job.row(None, self.extent);
                (row.pid, row.state, row.tty)
            }
            Target::Exited { pid, tty, .. } => (*pid, ProcessState::Exited.into(), *tty),
        };
        Attached {
            id: self.target.id(),
            pid,
            state,
            log_start: self.extent.start,
            log_end: self.extent.end,
            tty,
        }
    }

    /// What the client did wrong, if it did.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Refusal> {
        let Some(input) = &mut self.input else {
            return Poll::Pending;
        };
        let ended = ready!(Pin::new(input).poll(cx));
        self.input = None;
        match ended {
            Ok(Err(refusal)) => Poll::Ready(refusal),
            Ok(Ok(())) => Poll::Pending,
            Err(panic) => Poll::Ready(Refusal::new(Reason::AgentBug, panic.to_string())),
        }
    }
}

impl Stream for AttachStream {
    type Item = Result<AttachOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let m = match this.told {
            Told::Nothing => {
                this.told = Told::Attached;
                attach_out::M::Attached(this.attached())
            }
            Told::All => return Poll::Ready(None),
            Told::Attached => {
                if let Poll::Ready(refusal) = this.poll_input(cx) {
                    this.told = Told::All;
                    return Poll::Ready(Some(Err(refusal.into())));
                }
                match ready!(this.reader.poll(cx, CHUNK_OUT)) {
                    Item::Piece(piece) => attach_out::M::Chunk(chunk(piece)),
                    Item::Gap { from, to } => attach_out::M::Gap(LogGap { from, to }),
                    Item::End => {
                        this.told = Told::All;
                        match this.target.record() {
                            Some(record) => attach_out::M::Exit(record.on_the_wire()),
                            // Forgotten meanwhile.
                            None => return Poll::Ready(None),
                        }
                    }
                }
            }
        };
        Poll::Ready(Some(Ok(AttachOut { m: Some(m) })))
    }
}

impl Drop for AttachStream {
    fn drop(&mut self) {
        // It holds nothing that needs more than being dropped; the runtime joins it.
        if let Some(input) = &self.input {
            input.abort();
        }
    }
}

impl Runner {
    /// What a program said, as far as it is held, and on with what comes if `follow`.
    ///
    /// # Errors
    /// `PROCESS_NOT_FOUND`, `OFFSET_OUT_OF_RANGE`, `FIELD_INVALID`.
    pub fn logs(&self, ctx: ExecCtx, request: &AgentLogsRequest) -> Result<LogsStream, Refusal> {
        let target = find(&self.shared, request.process.as_ref())?;
        logged(&target)?;
        let follow = if request.follow { Follow::Gap } else { Follow::No };
        let logs = &self.shared.logs;
        let (reader, _extent) = logs.reader(target.id(), request.from.as_ref(), follow)?;
        Ok(LogsStream {
            reader,
            target,
            follow: request.follow,
            left: match request.max_bytes {
                0 => u64::MAX,
                most => most,
            },
            over: false,
            _ctx: ctx,
        })
    }

    /// What a program said and says, and for one at a time its input.
    ///
    /// # Errors
    /// Those of [`logs`](Self::logs); `INPUT_BUSY`, `STREAM_LIMIT`.
    pub fn attach(
        &self,
        ctx: ExecCtx,
        start: &AttachStart,
        messages: Streaming<AttachIn>,
    ) -> Result<AttachStream, Refusal> {
        let target = find(&self.shared, start.process.as_ref())?;
        logged(&target)?;
        let follow = match Flow::try_from(start.flow) {
            Ok(Flow::Unspecified | Flow::Gap) => Follow::Gap,
            Ok(Flow::Hold) => Follow::Hold,
            Err(_unknown) => {
                let message = format!("flow: {} is none", start.flow);
                return Err(Refusal::new(Reason::FieldInvalid, message));
            }
        };
        let seat = start.input.then(|| ctx.gate.input()).transpose()?;
        // Nothing can be given to one that has exited.
        let job = match &target {
            Target::Living(job) if start.input => Some(job.clone()),
            Target::Living(_) | Target::Exited { .. } => None,
        };
        let given = job
            .map(|job| Seat::take(&job).map(|seat| (job, seat)))
            .transpose()?;
        let logs = &self.shared.logs;
        let (reader, extent) = logs.reader(target.id(), start.from.as_ref(), follow)?;
        let input = match given {
            Some((job, seat)) => {
                let source = Source::look(messages, End::LeavesStdin)?;
                let pump = input::pump(job, source, Stdin::new(seat), Time::new(None));
                Some(tasks::spawn(pump))
            }
            // What it sends is not looked at.
            None => None,
        };
        Ok(AttachStream {
            reader,
            target,
            extent,
            told: Told::Nothing,
            input,
            _seat: seat,
            _ctx: ctx,
        })
    }
}
