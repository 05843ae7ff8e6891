//! A stream of the guest's HTTP/2 connection as a connection of bytes: END_STREAM is its shutdown, a reset its loss.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes given to the stream at once.
const PIECE: usize = 16 * 1024;

/// One stream. Dropping it before both sides have ended resets it.
pub(super) struct Stream {
    recv: RecvStream,
    send: SendStream<Bytes>,
    /// Read and not given out yet; its window is given back with it.
    chunk: Bytes,
    has_read_end: bool,
    has_ended: bool,
}

impl Stream {
    pub(super) const fn new(recv: RecvStream, send: SendStream<Bytes>) -> Self {
        Self {
            recv,
            send,
            chunk: Bytes::new(),
            has_read_end: false,
            has_ended: false,
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.has_ended || !self.has_read_end {
            self.send.send_reset(Reason::CANCEL);
        }
    }
}

fn lost(error: &h2::Error) -> io::Error {
    let kind = if error.is_io() {
        io::ErrorKind::BrokenPipe
    } else {
        io::ErrorKind::ConnectionReset
    };
    io::Error::from(kind)
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.chunk.is_empty() {
            if this.has_read_end {
                return Poll::Ready(Ok(()));
            }
            match ready!(this.recv.poll_data(cx)) {
                Some(Ok(chunk)) => this.chunk = chunk,
                Some(Err(error)) => return Poll::Ready(Err(lost(&error))),
                None => this.has_read_end = true,
            }
        }
        let n = this.chunk.len().min(buf.remaining());
        buf.put_slice(this.chunk.get(..n).unwrap_or_default());
        this.chunk.advance(n);
        let given = this.recv.flow_control().release_capacity(n);
        Poll::Ready(given.map_err(|error| lost(&error)))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let wanted = buf.get(..PIECE).unwrap_or(buf);
        if wanted.is_empty() {
            return Poll::Ready(Ok(0));
        }
        loop {
            this.send.reserve_capacity(wanted.len());
            let room = if this.send.capacity() > 0 {
                this.send.capacity()
            } else {
                match ready!(this.send.poll_capacity(cx)) {
                    Some(Ok(room)) => room,
                    Some(Err(error)) => return Poll::Ready(Err(lost(&error))),
                    None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                }
            };
            let piece = wanted.get(..room).unwrap_or(wanted);
            if piece.is_empty() {
                continue;
            }
            let sent = this.send.send_data(Bytes::copy_from_slice(piece), false);
            return Poll::Ready(sent.map(|()| piece.len()).map_err(|error| lost(&error)));
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.has_ended {
            return Poll::Ready(Ok(()));
        }
        self.has_ended = true;
        let sent = self.send.send_data(Bytes::new(), true);
        Poll::Ready(sent.map_err(|error| lost(&error)))
    }
}
