//! The port below HTTP/2: first what came behind the HELLO, then the port itself, with every frame counted.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    LostWhy,
    allowance::{Allowance, Verdict},
    signals::Signals,
};

/// A stream of which some bytes were read before.
#[derive(Debug)]
pub struct Prefixed<T> {
    first: Bytes,
    io: T,
}

impl<T> Prefixed<T> {
    /// `first` is read again before what `io` brings.
    pub const fn new(first: Bytes, io: T) -> Self {
        Self { first, io }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefixed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let n = self.first.len().min(buf.remaining());
        buf.put_slice(self.first.get(..n).unwrap_or_default());
        self.first.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Prefixed<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// A guest's port as HTTP/2 reads and writes it.
pub(super) struct Port<T> {
    io: Prefixed<T>,
    allowance: Allowance,
    signals: Arc<Signals>,
    /// Set: nothing more is read. What came before, a GOAWAY included, HTTP/2 has still seen.
    over: bool,
}

impl<T> Port<T> {
    pub(super) fn new(io: Prefixed<T>, signals: Arc<Signals>) -> Self {
        Self {
            io,
            allowance: Allowance::new(),
            signals,
            over: false,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Port<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let before = buf.filled().len();
        if let Err(error) = ready!(Pin::new(&mut self.io).poll_read(cx, buf)) {
            self.signals.blame(LostWhy::Port(error.kind()));
            return Poll::Ready(Err(error));
        }
        let (requests, pings) = (self.signals.requests(), self.signals.pings());
        let read = buf.filled().get(before..).unwrap_or_default();
        if read.is_empty() && buf.remaining() > 0 {
            self.signals.blame(LostWhy::Ended);
        }
        match self.allowance.read(read, requests, pings) {
            Verdict::Fine => Poll::Ready(Ok(())),
            Verdict::Goodbye => {
                self.signals.blame(LostWhy::Goodbye);
                self.over = true;
                Poll::Ready(Ok(()))
            }
            Verdict::Flood => {
                self.signals.blame(LostWhy::Flooded);
                self.over = true;
                Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()))
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> Port<T> {
    fn wrote(&mut self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &result {
            Poll::Ready(Ok(n)) => self.allowance.wrote(*n),
            Poll::Ready(Err(error)) => self.signals.blame(LostWhy::Port(error.kind())),
            Poll::Pending => {}
        }
        result
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Port<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(cx, buf);
        self.wrote(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.wrote(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
