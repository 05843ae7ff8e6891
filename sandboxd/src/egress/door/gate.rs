//! A client's connection as hyper reads it: only what the guard let through, and in time.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, BytesMut};
use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::{
    BODY, HEAD_TIME, IDLE,
    guard::{Connect, Guard, Next},
};

/// Bytes read at once.
const READ: usize = 16 * 1024;

/// Why nothing more is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Over {
    /// The client ended its side, or was idle for too long.
    End,
    /// A tunnel is wanted.
    Connect(Connect),
    /// WebSocket is wanted, by a request that was passed on.
    Upgrade,
    /// It is refused, once what came before is answered.
    Bad(DoorReason),
}

/// The connection.
#[derive(Debug)]
pub(super) struct Gate<T> {
    io: T,
    guard: Guard,
    input: BytesMut,
    out: BytesMut,
    over: Option<Over>,
    timer: Pin<Box<Sleep>>,
    /// What the timer is set for.
    waits_for: Wait,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    First,
    Next,
    Head,
    Body,
}

impl Wait {
    const fn limit(self) -> Duration {
        match self {
            Self::First | Self::Head => HEAD_TIME,
            Self::Next => IDLE,
            Self::Body => BODY,
        }
    }
}

impl<T> Gate<T> {
    pub(super) fn new(io: T) -> Self {
        Self {
            io,
            guard: Guard::new(),
            input: BytesMut::new(),
            out: BytesMut::new(),
            over: None,
            timer: Box::pin(sleep(HEAD_TIME)),
            waits_for: Wait::First,
        }
    }

    /// The connection, what was read of it and not passed on, and why nothing more was.
    pub(super) fn into_parts(self) -> (T, BytesMut, Option<Over>) {
        (self.io, self.input, self.over)
    }

    /// Sets the timer for what is waited for now; a body's begins anew with each byte.
    fn set_timer(&mut self, has_moved: bool) {
        let wait = if !self.guard.is_between() {
            Wait::Body
        } else if !self.input.is_empty() {
            Wait::Head
        } else if self.waits_for == Wait::First && !has_moved {
            Wait::First
        } else {
            Wait::Next
        };
        if wait != self.waits_for || (wait == Wait::Body && has_moved) {
            self.waits_for = wait;
            self.timer.as_mut().reset(Instant::now() + wait.limit());
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Gate<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if !this.out.is_empty() {
                let n = this.out.len().min(buf.remaining());
                buf.put_slice(this.out.get(..n).unwrap_or_default());
                this.out.advance(n);
                return Poll::Ready(Ok(()));
            }
            if this.over.is_some() {
                return Poll::Ready(Ok(()));
            }
            match this.guard.feed(&mut this.input, &mut this.out) {
                Next::More => {}
                Next::Connect(connect) => this.over = Some(Over::Connect(connect)),
                Next::Upgrade => this.over = Some(Over::Upgrade),
                Next::Bad(reason) => this.over = Some(Over::Bad(reason)),
            }
            if !this.out.is_empty() || this.over.is_some() {
                this.set_timer(true);
                continue;
            }
            this.set_timer(false);
            let mut chunk = [0; READ];
            let mut read = ReadBuf::new(&mut chunk);
            match Pin::new(&mut this.io).poll_read(cx, &mut read) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    ready!(this.timer.as_mut().poll(cx));
                    this.over = Some(match this.waits_for {
                        Wait::First | Wait::Head => Over::Bad(DoorReason::HeadTimeout),
                        Wait::Next | Wait::Body => Over::End,
                    });
                    continue;
                }
            }
            if read.filled().is_empty() {
                // Within a head or a body this is a fault, which hyper tells itself; between two it is the end.
                this.over = Some(Over::End);
            }
            this.input.extend_from_slice(read.filled());
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gate<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
