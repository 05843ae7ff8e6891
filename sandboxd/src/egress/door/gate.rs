//! A client's connection as hyper reads it: only what the guard let through, and in time. What it is told must be taken in
//! time too.

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
    /// Set when it is waited for, and not with every byte: most are there before anybody waits.
    timer: Pin<Box<Sleep>>,
    /// What is waited for, and until when.
    waits_for: Wait,
    until: Instant,
    /// Runs while nothing of what is said is taken.
    unread: Option<Pin<Box<Sleep>>>,
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
            until: Instant::now() + HEAD_TIME,
            unread: None,
        }
    }

    /// What became of a write. A client that takes nothing for as long as a body may rest is given up.
    fn told<R>(&mut self, cx: &mut Context<'_>, told: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if told.is_ready() {
            self.unread = None;
            return told;
        }
        let unread = self.unread.get_or_insert_with(|| Box::pin(sleep(BODY)));
        ready!(unread.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// The connection, what was read of it and not passed on, and why nothing more was.
    pub(super) fn into_parts(self) -> (T, BytesMut, Option<Over>) {
        (self.io, self.input, self.over)
    }

    /// Notes what is waited for now, and until when: a body's time begins anew with each byte, and that between two requests
    /// with each of them.
    fn waits(&mut self, has_moved: bool) {
        let wait = if !self.guard.is_between() {
            Wait::Body
        } else if !self.input.is_empty() {
            Wait::Head
        } else if self.waits_for == Wait::First && !has_moved {
            Wait::First
        } else {
            Wait::Next
        };
        if wait != self.waits_for || (has_moved && matches!(wait, Wait::Body | Wait::Next)) {
            self.waits_for = wait;
            self.until = Instant::now() + wait.limit();
        }
    }

    /// Resolves when it was waited for long enough.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // A timer that ends too early is set again when it does.
        if self.until < self.timer.deadline() {
            self.timer.as_mut().reset(self.until);
        }
        loop {
            ready!(self.timer.as_mut().poll(cx));
            if self.until <= self.timer.deadline() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(self.until);
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
                this.waits(true);
                continue;
            }
            this.waits(false);
            let mut chunk = [0; READ];
            let mut read = ReadBuf::new(&mut chunk);
            match Pin::new(&mut this.io).poll_read(cx, &mut read) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    ready!(this.poll_late(cx));
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
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.told(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.told(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.io).poll_shutdown(cx);
        self.told(cx, ended)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_nobody_takes_is_given_up_and_each_byte_taken_begins_anew() {
        let (mut client, io) = duplex(4);
        let mut gate = Gate::new(io);
        let begun = Instant::now();
        let told = crate::tasks::spawn("gate", async move {
            let told = gate.write_all(b"more than four").await;
            // It stays open, so that its loss is no answer.
            (told, gate)
        });
        for _ in 0..5 {
            sleep(BODY / 5 * 4).await;
            client.read_u8().await.unwrap();
        }
        let (told, _gate) = told.await.unwrap();
        assert_eq!(told.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(begun.elapsed().as_secs(), (BODY * 5).as_secs());
    }
}
