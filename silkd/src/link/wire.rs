//! A port's bytes below HTTP/2: data of the connection in force, and the BREAKs between connections.
//!
//! May call: link/port.
//! Never inside: HTTP/2, a task.

use std::{
    io,
    ops::Range,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use hyper::rt::ReadBufCursor;
use sandbox_protocol::link::{BreakReader, Nonce, Step};

use super::port::{Port, WRITE};

/// Bytes read at once; a virtio port gives 4 KiB at most.
const READ: usize = 64 * 1024;

/// What the bytes of a port came to.
#[derive(Debug)]
pub enum Seen {
    /// So many bytes of the connection in force were given out.
    Data(usize),
    /// A BREAK: whatever was in force is over.
    Break(Nonce),
    /// No host is connected.
    End,
}

/// A port and its reader.
#[derive(Debug)]
pub struct Wire {
    port: Port,
    reader: BreakReader,
    buffer: Box<[u8]>,
    unread: Range<usize>,
    /// Where small pieces meet before they are written at once.
    gather: Vec<u8>,
    /// How the connection in force ended, once it did.
    ended: Option<Ended>,
}

/// Why a connection ended.
#[derive(Debug)]
pub enum Ended {
    /// The host began a new one.
    Break(Nonce),
    /// The host is gone.
    End,
    /// The port failed.
    Failed(io::Error),
}

impl Wire {
    /// Takes a port at its beginning.
    #[must_use]
    pub fn new(port: Port) -> Self {
        Self {
            port,
            reader: BreakReader::default(),
            buffer: vec![0; READ].into_boxed_slice(),
            unread: 0..0,
            gather: Vec::with_capacity(WRITE),
            ended: None,
        }
    }

    /// Reads until there is something to say; gives at most `max` bytes out at once.
    pub fn poll_seen(
        &mut self,
        cx: &mut Context<'_>,
        max: usize,
        give: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<Seen>> {
        if max == 0 {
            return Poll::Ready(Ok(Seen::Data(0)));
        }
        loop {
            let unread = self.buffer.get(self.unread.clone()).unwrap_or_default();
            if unread.is_empty() {
                let n = ready!(self.port.poll_read(cx, &mut self.buffer))?;
                if n == 0 {
                    return Poll::Ready(Ok(Seen::End));
                }
                self.unread = 0..n;
                continue;
            }
            let part = unread.get(..max).unwrap_or(unread);
            let (step, n) = self.reader.feed(part);
            let data = part.get(..n).unwrap_or_default();
            self.unread.start += n;
            match step {
                Step::Nothing => {}
                Step::Data => {
                    give(data);
                    return Poll::Ready(Ok(Seen::Data(n)));
                }
                Step::Break(nonce) => return Poll::Ready(Ok(Seen::Break(nonce))),
            }
        }
    }

    /// Skips to the next BREAK. `Ok(None)`: no host is connected.
    pub fn poll_break(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Nonce>>> {
        loop {
            match ready!(self.poll_seen(cx, READ, &mut |_skipped| {}))? {
                Seen::Data(_) => {}
                Seen::Break(nonce) => return Poll::Ready(Ok(Some(nonce))),
                Seen::End => return Poll::Ready(Ok(None)),
            }
        }
    }

    /// Writes some of these bytes.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.port.poll_write(cx, bytes)
    }

    /// Writes the beginning of these pieces at once: on a virtio port every write costs an exit to the VMM.
    fn poll_write_pieces(
        &mut self,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.gather.clear();
        for piece in pieces {
            let room = WRITE.saturating_sub(self.gather.len());
            self.gather.extend_from_slice(piece.get(..room).unwrap_or(piece));
        }
        self.port.poll_write(cx, &self.gather)
    }

    /// Takes how the connection in force ended; none: it has not.
    pub fn take_ended(&mut self) -> Option<Ended> {
        self.ended.take()
    }

    /// Whether the connection in force has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }
}

/// One connection's end of a wire, as hyper wants it. After a BREAK or an end it reads as closed.
#[derive(Debug, Clone)]
pub struct Ends(pub Arc<Mutex<Wire>>);

impl Ends {
    /// The wire; only ever held within one poll.
    pub fn wire(&self) -> MutexGuard<'_, Wire> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives at most `max` bytes out; none where the connection has ended, now or before.
    fn poll_data(&self, cx: &mut Context<'_>, max: usize, give: &mut dyn FnMut(&[u8])) -> Poll<()> {
        let mut wire = self.wire();
        if wire.has_ended() {
            return Poll::Ready(());
        }
        wire.ended = match ready!(wire.poll_seen(cx, max, give)) {
            Ok(Seen::Data(_)) => None,
            Ok(Seen::Break(nonce)) => Some(Ended::Break(nonce)),
            Ok(Seen::End) => Some(Ended::End),
            Err(error) => Some(Ended::Failed(error)),
        };
        Poll::Ready(())
    }
}

impl hyper::rt::Read for Ends {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_data(cx, into.remaining(), &mut |data| into.put_slice(data))
            .map(Ok)
    }
}

impl tokio::io::AsyncRead for Ends {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_data(cx, into.remaining(), &mut |data| into.put_slice(data))
            .map(Ok)
    }
}

impl tokio::io::AsyncWrite for Ends {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        hyper::rt::Write::poll_write(self, cx, from)
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        hyper::rt::Write::poll_write_vectored(self, cx, pieces)
    }
}

impl hyper::rt::Write for Ends {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let mut wire = self.wire();
        // Unsent output of an old connection is nobody's.
        if wire.has_ended() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        wire.poll_write(cx, from)
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut wire = self.wire();
        if wire.has_ended() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        wire.poll_write_pieces(cx, pieces)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
    use sandbox_protocol::limits::LINK_FRAME;
    use tokio::io::Interest;

    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const DATA: u8 = 0;

    /// Counted where each write is a message: none of them ends within a frame.
    #[tokio::test]
    async fn a_frame_is_one_write() {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let wire = Wire::new(Port::new(ours).unwrap());
        let ends = Ends(Arc::new(Mutex::new(wire)));
        let (mut send, connection) = h2::client::handshake(ends).await.unwrap();
        let driving = crate::tasks::spawn(async move { drop(connection.await) });
        let request = http::Request::post("http://x/").body(()).unwrap();
        let (_response, mut stream) = send.send_request(request, false).unwrap();
        // Within the window that there is without a word of the other side.
        let frames = 3;
        let most = usize::try_from(LINK_FRAME).unwrap();
        stream
            .send_data(Bytes::from(vec![7; frames * most]), false)
            .unwrap();

        let theirs = crate::sys::watch(theirs, Interest::READABLE).unwrap();
        let mut whole = 0;
        while whole < frames {
            let mut message = vec![0; 256 << 10];
            let reading = theirs.async_io(Interest::READABLE, |fd| {
                Ok(recv(fd, message.as_mut_slice(), RecvFlags::empty())?.0)
            });
            let n = tokio::time::timeout(Duration::from_secs(30), reading).await;
            let message = &message[..n.expect("frames come").unwrap()];
            let mut rest = message.strip_prefix(PREFACE).unwrap_or(message);
            while let [a, b, c, kind, ..] = *rest {
                let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap();
                assert!(rest.len() >= 9 + length, "{length} of kind {kind} are cut");
                whole += usize::from(kind == DATA && length == most);
                rest = &rest[9 + length..];
            }
            assert!(rest.is_empty());
        }
        driving.abort();
    }
}
