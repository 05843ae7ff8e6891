//! What a reader of a log is told, checked: no byte is missing in silence.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use sandbox_protocol::v1::{self, AttachOut, LogChunk, LogGap, LogsOut, attach_out, log_from, logs_out};
use tokio_stream::Stream;
use tonic::Streaming;

use crate::{error::Error, exec::Exit};

/// Where a reader begins. An offset counts the bytes of output so far, both outputs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFrom {
    /// At the oldest byte that is held.
    #[default]
    Oldest,
    /// At what comes from now on.
    Live,
    /// At this byte: of [`LogStream::offset`](super::LogStream::offset) or
    /// [`AttachStream::offset`](super::AttachStream::offset), say.
    Offset(u64),
}

impl LogFrom {
    pub(super) fn message(self) -> v1::LogFrom {
        let at = match self {
            Self::Oldest => log_from::At::Oldest(log_from::Oldest {}),
            Self::Live => log_from::At::Live(log_from::Live {}),
            Self::Offset(offset) => log_from::At::Offset(offset),
        };
        v1::LogFrom { at: Some(at) }
    }
}

/// What a process said, or how it ended.
#[derive(Debug, Clone, PartialEq)]
pub enum LogEvent {
    /// It wrote to standard output, or to its terminal.
    Stdout {
        /// Of the first byte.
        offset: u64,
        /// What it wrote.
        data: Bytes,
    },
    /// It wrote to standard error.
    Stderr {
        /// Of the first byte.
        offset: u64,
        /// What it wrote.
        data: Bytes,
    },
    /// These bytes are no longer held: the log is shorter than what the process said.
    Gap {
        /// The first one that is missing.
        from: u64,
        /// The first one that is not.
        to: u64,
    },
    /// It has ended, all of its output came before, and the call ended in order. The last event.
    Exit(Box<Exit>),
}

/// A message that a reader gets.
#[derive(Debug)]
pub(super) enum Told {
    Chunk(LogChunk),
    Gap(LogGap),
    Exit(v1::Exit),
    /// Nothing that concerns the output.
    Else,
}

impl From<LogsOut> for Told {
    fn from(message: LogsOut) -> Self {
        match message.m {
            Some(logs_out::M::Chunk(chunk)) => Self::Chunk(chunk),
            Some(logs_out::M::Gap(gap)) => Self::Gap(gap),
            Some(logs_out::M::Exit(exit)) => Self::Exit(exit),
            // Of a newer agent; it says nothing that this version asked for.
            None => Self::Else,
        }
    }
}

impl From<AttachOut> for Told {
    fn from(message: AttachOut) -> Self {
        match message.m {
            Some(attach_out::M::Chunk(chunk)) => Self::Chunk(chunk),
            Some(attach_out::M::Gap(gap)) => Self::Gap(gap),
            Some(attach_out::M::Exit(exit)) => Self::Exit(exit),
            Some(attach_out::M::Attached(_)) | None => Self::Else,
        }
    }
}

/// When a call may end without the process's exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Never: the reader follows to the end.
    Exit,
    /// Once so many bytes were read.
    Bytes(u64),
    /// Always: it reads what there is.
    Any,
}

/// Decides, message by message. Pure.
#[derive(Debug)]
pub(super) struct Ledger {
    end: End,
    /// The next byte, where it is known.
    next: Option<u64>,
    read: u64,
    exit: Option<v1::Exit>,
}

impl Ledger {
    pub(super) fn new(from: LogFrom, end: End) -> Self {
        Self {
            end,
            next: match from {
                LogFrom::Offset(offset) => Some(offset),
                LogFrom::Oldest | LogFrom::Live => None,
            },
            read: 0,
            exit: None,
        }
    }

    fn lost() -> Error {
        Error::unfinished("part of the process's output was lost")
    }

    fn read(&mut self, told: Told) -> Result<Option<LogEvent>, Error> {
        if self.exit.is_some() && !matches!(told, Told::Else) {
            return Err(Error::unfinished("a message came after the process's exit"));
        }
        match told {
            Told::Chunk(chunk) => {
                if self.next.is_some_and(|next| next != chunk.offset) {
                    return Err(Self::lost());
                }
                let length = u64::try_from(chunk.data.len()).unwrap_or(u64::MAX);
                self.next = Some(chunk.offset.saturating_add(length));
                self.read = self.read.saturating_add(length);
                let (offset, output) = (chunk.offset, chunk.output());
                let data = chunk.data;
                Ok(match output {
                    v1::Output::Stdout => Some(LogEvent::Stdout { offset, data }),
                    v1::Output::Stderr => Some(LogEvent::Stderr { offset, data }),
                    v1::Output::Unspecified => {
                        return Err(Error::unfinished("a piece of output names no stream"));
                    }
                })
            }
            Told::Gap(LogGap { from, to }) => {
                if self.next.is_some_and(|next| next != from) || to < from {
                    return Err(Self::lost());
                }
                self.next = Some(to);
                Ok(Some(LogEvent::Gap { from, to }))
            }
            // It counts only once the call has ended in order.
            Told::Exit(exit) => {
                self.exit = Some(exit);
                Ok(None)
            }
            Told::Else => Ok(None),
        }
    }

    /// The call ended in order.
    fn finish(&mut self) -> Option<Result<LogEvent, Error>> {
        let early = match self.end {
            End::Exit => false,
            End::Bytes(bytes) => self.read >= bytes,
            End::Any => true,
        };
        match self.exit.take() {
            Some(exit) => Some(Exit::read(exit, None).map(|exit| LogEvent::Exit(Box::new(exit)))),
            None if early => None,
            None => Some(Err(Error::unfinished(
                "the call ended without the process's exit",
            ))),
        }
    }
}

/// The reply half of a reader's call.
#[derive(Debug)]
pub(super) struct Reader<M> {
    /// None once it has ended.
    replies: Option<Streaming<M>>,
    ledger: Ledger,
}

impl<M> Reader<M> {
    pub(super) fn new(replies: Streaming<M>, ledger: Ledger) -> Self {
        Self {
            replies: Some(replies),
            ledger,
        }
    }

    /// The offset of the byte that would come next, once one is known.
    pub(super) fn offset(&self) -> Option<u64> {
        self.ledger.next
    }
}

impl<M: Into<Told> + Unpin> Stream for Reader<M> {
    type Item = Result<LogEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let last = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match self.ledger.read(message.into()) {
                    Ok(None) => continue,
                    Ok(Some(event)) => return Poll::Ready(Some(Ok(event))),
                    Err(error) => Some(Err(error)),
                },
                Some(Err(status)) => Some(Err(Error::from_status(status))),
                None => self.ledger.finish(),
            };
            self.replies = None;
            return Poll::Ready(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn chunk(offset: u64, data: &'static str) -> Told {
        let mut chunk = LogChunk {
            offset,
            data: Bytes::from_static(data.as_bytes()),
            ..LogChunk::default()
        };
        chunk.set_output(v1::Output::Stderr);
        Told::Chunk(chunk)
    }

    fn exit() -> Told {
        Told::Exit(v1::Exit {
            how: Some(v1::exit::How::Code(0)),
            ..v1::Exit::default()
        })
    }

    #[test]
    fn what_is_missing_is_told_or_an_error() {
        let mut ledger = Ledger::new(LogFrom::Offset(10), End::Exit);
        assert!(matches!(ledger.read(chunk(10, "abc")), Ok(Some(_))));
        let gap = Told::Gap(LogGap { from: 13, to: 20 });
        assert_eq!(
            ledger.read(gap).unwrap(),
            Some(LogEvent::Gap { from: 13, to: 20 })
        );
        assert!(matches!(ledger.read(chunk(20, "d")), Ok(Some(_))));
        assert_eq!(ledger.next, Some(21));
        for told in [
            chunk(22, "e"),
            chunk(20, "d"),
            Told::Gap(LogGap { from: 22, to: 30 }),
        ] {
            let error = ledger.read(told).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unfinished);
        }
        // Who begins at an offset is told that it is gone.
        assert!(
            Ledger::new(LogFrom::Offset(1), End::Exit)
                .read(chunk(2, "x"))
                .is_err()
        );
        for from in [LogFrom::Oldest, LogFrom::Live] {
            assert!(Ledger::new(from, End::Exit).read(chunk(2, "x")).is_ok());
        }
    }

    #[test]
    fn an_end_is_in_order_or_an_error() {
        let mut followed = Ledger::new(LogFrom::Oldest, End::Exit);
        assert!(followed.finish().unwrap().is_err());
        assert_eq!(followed.read(exit()).unwrap(), None);
        assert!(followed.read(chunk(0, "late")).is_err());
        assert!(matches!(followed.finish(), Some(Ok(LogEvent::Exit(_)))));

        assert!(Ledger::new(LogFrom::Oldest, End::Any).finish().is_none());
        let mut bounded = Ledger::new(LogFrom::Oldest, End::Bytes(3));
        assert!(bounded.finish().unwrap().is_err());
        bounded.read(chunk(0, "abc")).unwrap();
        assert!(bounded.finish().is_none());
    }
}
