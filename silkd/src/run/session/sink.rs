//! Where the output of a session goes: to the client of a command, or to the next one.

use std::collections::VecDeque;

use bytes::Bytes;
use sandbox_protocol::v1::{Chunk, session_run_out::M};
use tokio::sync::mpsc;

/// Bytes that are kept between commands: the last ones.
const LATE: usize = 64 * 1024;

/// What was said while no command ran, in the order in which it was read.
#[derive(Debug, Default)]
pub(super) struct Late {
    pieces: VecDeque<(usize, Bytes)>,
    held: usize,
}

impl Late {
    /// Takes a piece; what is too old for the bound goes.
    pub(super) fn push(&mut self, place: usize, bytes: Bytes) {
        self.held = self.held.saturating_add(bytes.len());
        self.pieces.push_back((place, bytes));
        while let Some(excess) = self.held.checked_sub(LATE).filter(|excess| *excess > 0) {
            let Some((_, first)) = self.pieces.front_mut() else {
                return;
            };
            let cut = excess.min(first.len());
            drop(first.split_to(cut));
            self.held = self.held.saturating_sub(cut);
            if first.is_empty() {
                self.pieces.pop_front();
            }
        }
    }

    /// Everything, as messages; nothing is left.
    pub(super) fn take(&mut self) -> Vec<M> {
        self.held = 0;
        let message = |(place, data)| match place {
            0 => M::LateStdout(Chunk { data }),
            _ => M::LateStderr(Chunk { data }),
        };
        self.pieces.drain(..).map(message).collect()
    }
}

/// See the module.
#[derive(Debug)]
pub(super) enum Sink<'a> {
    Late(&'a mut Late),
    Client {
        events: mpsc::Sender<M>,
        /// Not passed on yet.
        queue: VecDeque<M>,
    },
    /// The client is gone.
    Nobody,
}

/// What became of a wait for the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Passed,
    /// Told once.
    Gone,
}

impl Sink<'_> {
    /// Whether it takes a piece. One that does not makes the programs wait.
    pub(super) fn is_free(&self) -> bool {
        match self {
            Self::Late(_) | Self::Nobody => true,
            Self::Client { queue, .. } => queue.is_empty(),
        }
    }

    pub(super) fn take(&mut self, place: usize, data: Bytes) {
        match self {
            Self::Late(late) => late.push(place, data),
            Self::Client { queue, .. } => queue.push_back(match place {
                0 => M::Stdout(Chunk { data }),
                _ => M::Stderr(Chunk { data }),
            }),
            Self::Nobody => {}
        }
    }

    /// Passes one message on, or waits for the client to leave; never resolves where there is none. Cancel safe.
    pub(super) async fn progress(&mut self) -> Progress {
        let Self::Client { events, queue } = self else {
            return std::future::pending().await;
        };
        if queue.is_empty() {
            events.closed().await;
        } else if let Ok(permit) = events.reserve().await {
            if let Some(message) = queue.pop_front() {
                permit.send(message);
            }
            return Progress::Passed;
        }
        *self = Self::Nobody;
        Progress::Gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_are_late_and_no_more() {
        let mut late = Late::default();
        let piece = |byte: u8, length: usize| Bytes::from(vec![byte; length]);
        late.push(0, piece(1, 10));
        late.push(1, piece(2, LATE - 4));
        late.push(0, piece(3, 2));
        let kept = late.take();
        let length = |message: &M| match message {
            M::LateStdout(chunk) => Some((0, chunk.data[0], chunk.data.len())),
            M::LateStderr(chunk) => Some((1, chunk.data[0], chunk.data.len())),
            M::Started(_) | M::Stdout(_) | M::Stderr(_) | M::Exit(_) => None,
        };
        let lengths: Vec<_> = kept.iter().map(|message| length(message).unwrap()).collect();
        assert_eq!(lengths, [(0, 1, 2), (1, 2, LATE - 4), (0, 3, 2)]);
        assert_eq!(late.held, 0);
        late.push(0, piece(4, 3 * LATE));
        assert_eq!(late.held, LATE);
        assert!(late.take().len() == 1 && late.take().is_empty());
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_noticed_at_once() {
        let (events, client) = mpsc::channel(1);
        let mut sink = Sink::Client {
            events,
            queue: VecDeque::new(),
        };
        sink.take(0, Bytes::from_static(b"a"));
        assert!(!sink.is_free());
        assert_eq!(sink.progress().await, Progress::Passed);
        sink.take(1, Bytes::from_static(b"b"));
        assert!(futures_util::FutureExt::now_or_never(sink.progress()).is_none());
        drop(client);
        assert_eq!(sink.progress().await, Progress::Gone);
        assert!(sink.is_free());
    }
}
