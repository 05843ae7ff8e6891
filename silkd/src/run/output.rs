//! One output of a program: read as the client takes it, and at the end exactly what is in the pipe.

use std::{
    os::fd::OwnedFd,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use rustix::{buffer::spare_capacity, io::Errno};
use sandbox_protocol::limits::CHUNK_OUT;
use tokio::io::unix::AsyncFd;

use super::{chores::Chore, pty};

/// First size of a read; it grows while reads are filled.
const SMALL: usize = 4 * 1024;

/// Our end of a pipe or terminal that a program writes to.
#[derive(Debug)]
pub(super) struct Output {
    /// `None` once it has ended.
    pipe: Option<AsyncFd<OwnedFd>>,
    /// It is the master of a terminal.
    tty: Option<pty::Seat>,
    size: usize,
    /// What is still to be read, once that is known.
    left: Option<u64>,
    /// What is to be read at most until it is found empty, while that is asked.
    probe: Option<u64>,
    total: u64,
    reads: u64,
}

impl Output {
    /// `pipe` does not block.
    pub(super) const fn new(pipe: AsyncFd<OwnedFd>) -> Self {
        Self {
            pipe: Some(pipe),
            tty: None,
            size: SMALL,
            left: None,
            probe: None,
            total: 0,
            reads: 0,
        }
    }

    /// `master` does not block.
    pub(super) fn of_tty(master: AsyncFd<OwnedFd>, seat: pty::Seat) -> Self {
        Self {
            tty: Some(seat),
            ..Self::new(master)
        }
    }

    /// Bytes read so far.
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    /// Reads made so far.
    pub(super) const fn reads(&self) -> u64 {
        self.reads
    }

    /// Whether no more is to come.
    pub(super) const fn is_over(&self) -> bool {
        self.pipe.is_none() || matches!(self.left, Some(0))
    }

    /// Bytes that are in the pipe. Of a terminal they are not known: ask [`probes`](Self::probes) as well.
    pub(super) fn pending(&self) -> u64 {
        let pipe = self.pipe.as_ref().filter(|_| self.tty.is_none());
        pipe.and_then(|pipe| rustix::io::ioctl_fionread(pipe).ok())
            .unwrap_or(0)
    }

    /// Asks a terminal whether all that was written to it by now has been read. The kernel does not count what is on its
    /// way between the two ends, but a read waits for it: once a read finds nothing, that was all. It is among so many
    /// bytes, whoever writes on.
    pub(super) fn probe(&mut self) {
        self.probe = self.tty.is_some().then_some(pty::HELD);
    }

    /// Whether that is not known yet.
    pub(super) const fn probes(&self) -> bool {
        self.probe.is_some() && !self.is_over()
    }

    /// From now on only what is in the pipe counts.
    pub(super) fn only_what_is_there(&mut self) {
        if let (Some(_pipe), None) = (&self.pipe, self.left) {
            self.left = Some(match &self.tty {
                None => self.pending(),
                // Until it is found empty.
                Some(_seat) => pty::HELD,
            });
        }
    }

    /// From now on what comes counts again.
    pub(super) fn go_on(&mut self) {
        self.left = None;
    }

    /// What is to become of the pipe when others still write to it. A terminal is none of theirs any more: the kernel
    /// hung it up when its leader ended.
    pub(super) fn into_chore(self) -> Option<Chore> {
        self.pipe.filter(|_| self.tty.is_none()).map(Chore::Sink)
    }

    /// The next bytes, [`CHUNK_OUT`] at most; `None` when no more is to come.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if self.is_over() {
                return Poll::Ready(None);
            }
            let Some(pipe) = &self.pipe else {
                return Poll::Ready(None);
            };
            // What the kernel has counted is there, and a question is asked now: no news is awaited for it.
            let guard = match self.left.or(self.probe) {
                Some(_) => None,
                None => match ready!(pipe.poll_read_ready(cx)) {
                    Ok(guard) => Some(guard),
                    Err(_runtime_is_gone) => return self.end(),
                },
            };
            let left = self
                .left
                .map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
            let room = self.size.min(left);
            let mut bytes = Vec::with_capacity(room);
            self.reads = self.reads.saturating_add(1);
            match rustix::io::read(pipe, spare_capacity(&mut bytes)) {
                Ok(0) => return self.end(),
                Ok(n) => {
                    // Room for what comes, not for what came once.
                    if n >= self.size {
                        self.size = self.size.saturating_mul(4).min(CHUNK_OUT);
                    } else if n < self.size / 16 {
                        self.size = (self.size / 4).max(SMALL);
                    }
                    if n < room
                        && self.tty.is_none()
                        && let Some(mut guard) = guard
                    {
                        // Less than there was room for: the pipe is empty, and the next byte will be news. A terminal
                        // gives less also where its buffer wraps around.
                        guard.clear_ready();
                    }
                    let n = u64::try_from(n).unwrap_or(u64::MAX);
                    self.total = self.total.saturating_add(n);
                    self.left = self.left.map(|left| left.saturating_sub(n));
                    self.probe = self.probe.and_then(|most| most.checked_sub(n));
                    return Poll::Ready(Some(bytes.into()));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match guard {
                    Some(mut guard) => guard.clear_ready(),
                    // The terminal is empty, or somebody else in the guest read what was counted.
                    None => {
                        self.probe = None;
                        self.left = self.left.map(|_counted| 0);
                    }
                },
                Err(_broken) => return self.end(),
            }
        }
    }

    fn end(&mut self) -> Poll<Option<Bytes>> {
        self.pipe = None;
        Poll::Ready(None)
    }
}
