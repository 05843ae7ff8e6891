//! The port below HTTP/2: first what came behind the HELLO, then the port itself, with every frame counted.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;

use super::{
    LostWhy,
    allowance::{Allowance, Verdict},
    signals::Signals,
};

/// Bytes that are read at once of a stream that brings more than its reader takes: HTTP/2 takes 8 KiB.
const AHEAD: usize = 64 * 1024;

/// A stream of which some bytes were read before, and are while much comes. A stream at rest holds none.
#[derive(Debug)]
pub struct Prefixed<T> {
    ahead: BytesMut,
    /// The last read left no room: there is more.
    has_more: bool,
    io: T,
}

impl<T> Prefixed<T> {
    /// `first` is read again before what `io` brings.
    pub fn new(first: Bytes, io: T) -> Self {
        Self {
            ahead: first.into(),
            has_more: false,
            io,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefixed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.ahead.is_empty() {
            if !this.has_more {
                let wanted = buf.remaining();
                ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
                this.has_more = wanted > 0 && buf.remaining() == 0;
                return Poll::Ready(Ok(()));
            }
            this.ahead.reserve(AHEAD);
            let read = poll_read_buf(Pin::new(&mut this.io), cx, &mut this.ahead);
            this.has_more = matches!(read, Poll::Ready(Ok(AHEAD..)));
            if !matches!(read, Poll::Ready(Ok(1..))) {
                this.ahead = BytesMut::new();
            }
            ready!(read)?;
        }
        let n = this.ahead.len().min(buf.remaining());
        buf.put_slice(this.ahead.get(..n).unwrap_or_default());
        this.ahead.advance(n);
        if this.ahead.is_empty() && !this.has_more {
            this.ahead = BytesMut::new();
        }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_util::io::InspectReader;

    use super::*;

    #[tokio::test]
    async fn much_is_read_at_once_and_nothing_is_held_at_rest() {
        let (mut far, near) = tokio::io::duplex(1 << 20);
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        far.write_all(&sent).await.unwrap();
        let reads = AtomicUsize::new(0);
        let counted = InspectReader::new(near, |_bytes| {
            reads.fetch_add(1, Ordering::Relaxed);
        });
        let mut stream = Prefixed::new(Bytes::from_static(b"first"), counted);
        let mut all = Vec::new();
        let mut piece = vec![0; 8 * 1024];
        while all.len() < 5 + sent.len() {
            let n = stream.read(&mut piece).await.unwrap();
            all.extend_from_slice(&piece[..n]);
        }
        assert!(all.starts_with(b"first") && all[5..] == sent);
        let reads = reads.load(Ordering::Relaxed);
        assert!(reads <= 2 + sent.len() / AHEAD, "{reads} reads");
        // What is small is read straight to where it is wanted.
        far.write_all(b"small").await.unwrap();
        assert_eq!(stream.read(&mut piece).await.unwrap(), 5);
        assert_eq!(stream.ahead.capacity(), 0);
        drop(far);
        assert_eq!(stream.read(&mut piece).await.unwrap(), 0);
        assert_eq!(stream.read(&mut piece).await.unwrap(), 0);
    }
}
