//! Connections to ports of a guest's own loopback.
//!
//! May call: sandbox, guest, retry, error, tasks.
//! Never inside: an end that was a reset: the end of one direction is an end of file there and leaves the other open, and a
//! connection that broke is an error.
//! Cancel safety: dropping a connection closes it in the guest; dropping a listener closes it and all its connections.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use sandbox_protocol::{
    limits,
    v1::{
        PortForwardEof, PortForwardIn, PortForwardOpen, PortForwardOut, port_forward_in,
        port_forward_open::Address, port_forward_out,
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes},
    net::{TcpListener, TcpStream, ToSocketAddrs},
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::{Stream as _, StreamExt as _, wrappers::ReceiverStream};
use tokio_util::sync::PollSender;
use tonic::Streaming;

use crate::{
    error::{Error, ErrorKind},
    guest,
    retry::Repeat,
    sandbox::SandboxHandle,
    tasks::{self, AbortOnDrop},
};

/// Largest piece in one message, in bytes: one HTTP/2 window's worth.
const PIECE: usize = 64 * 1024;
/// Pieces that wait for the connection: enough to keep it busy, 256 KiB at most.
const PIECES: usize = 4;
/// Failures of single connections that wait for whoever wants to know; more are dropped.
const FAILURES: usize = 16;
/// After an accept that failed (no descriptors left, mostly), until the next.
const PAUSE: Duration = Duration::from_millis(100);

impl SandboxHandle {
    /// A port of the guest's own loopback, 127.0.0.1 unless told otherwise.
    pub fn forward(&self, port: u16) -> Forward {
        Forward {
            sandbox: self.clone(),
            open: PortForwardOpen {
                port: port.into(),
                ..PortForwardOpen::default()
            },
        }
    }
}

/// A port of a guest. Made by [`SandboxHandle::forward`].
#[derive(Debug, Clone)]
#[must_use = "nothing is connected until `connect` or `listen` is called"]
pub struct Forward {
    sandbox: SandboxHandle,
    open: PortForwardOpen,
}

impl Forward {
    /// On ::1.
    pub fn v6(mut self) -> Self {
        self.open.set_address(Address::V6);
        self
    }

    /// Connects once, within the client's time.
    ///
    /// # Errors
    /// PORT_REFUSED: nothing listens there. STREAM_LIMIT.
    pub async fn connect(&self) -> Result<PortStream, Error> {
        let limit = self.sandbox.client().timeout();
        let connected = timeout(limit, Box::pin(self.dial())).await;
        connected.unwrap_or_else(|_elapsed| Err(Error::timed_out()))
    }

    async fn dial(&self) -> Result<PortStream, Error> {
        let opened = guest::open(&self.sandbox, Repeat::OnWord, &(), |client, request| {
            // Each attempt has a request half of its own.
            let (pieces, receiver) = mpsc::channel(PIECES);
            let open = PortForwardIn {
                m: Some(port_forward_in::M::Open(self.open)),
            };
            let input = tokio_stream::once(open).chain(ReceiverStream::new(receiver));
            async move {
                let mut agent = client.agent_client();
                let replies = Box::pin(agent.port_forward(request.map(|()| input))).await?;
                Ok(replies.map(|replies| (replies, pieces)))
            }
        });
        let (mut replies, pieces) = opened.await?;
        loop {
            match replies.message().await.map_err(Error::from_status)? {
                Some(PortForwardOut {
                    m: Some(port_forward_out::M::Ready(_)),
                }) => break,
                // Of a newer agent.
                Some(PortForwardOut { m: None }) => {}
                Some(_) | None => return Err(Error::unfinished("the call began without a connection")),
            }
        }
        let shut = Arc::new(AtomicBool::new(false));
        Ok(PortStream {
            reader: PortReader {
                replies: Replies::Open(replies),
                rest: Bytes::new(),
                shut: Arc::clone(&shut),
            },
            writer: PortWriter {
                pieces: PollSender::new(pieces),
                shut,
            },
        })
    }

    /// Listens on a local address and passes every connection on, at most 128 at once; further ones wait. Port 0 takes a
    /// free one, see [`PortListener::local_addr`].
    ///
    /// # Errors
    /// Kind `Local`: the address cannot be listened on.
    pub async fn listen(&self, address: impl ToSocketAddrs) -> Result<PortListener, Error> {
        let wrong = |error| Error::local("listen", error);
        let listener = TcpListener::bind(address).await.map_err(wrong)?;
        let local = listener.local_addr().map_err(wrong)?;
        let (told, failures) = mpsc::channel(FAILURES);
        let serve = Box::pin(serve(listener, self.clone(), told));
        Ok(PortListener {
            local,
            failures,
            _task: tasks::guarded(serve),
        })
    }
}

/// A connection to a port of a guest: `AsyncRead` and `AsyncWrite`. Each direction ends by itself: `shutdown` ends the one
/// to the guest, and a read of nothing tells that the guest has ended the other; whichever comes last returns once all has
/// arrived. A reset is an error of kind
/// `ConnectionReset` (reason PORT_RESET). Dropping it closes the connection.
#[derive(Debug)]
pub struct PortStream {
    reader: PortReader,
    writer: PortWriter,
}

impl PortStream {
    /// Both directions apart. Dropping the writer is `shutdown`; dropping the reader closes the connection, with what was
    /// written and has not arrived.
    #[must_use]
    pub fn into_split(self) -> (PortReader, PortWriter) {
        (self.reader, self.writer)
    }
}

/// What comes from the guest's port.
#[derive(Debug)]
pub struct PortReader {
    replies: Replies,
    rest: Bytes,
    /// The other direction was ended by this side.
    shut: Arc<AtomicBool>,
}

/// The call behind a connection.
#[derive(Debug)]
enum Replies {
    Open(Streaming<PortForwardOut>),
    /// The guest has ended its direction. The call lives on, for the other.
    Ended(Streaming<PortForwardOut>),
    /// The call has ended in order: both directions are through.
    Done,
    /// It is over, and was told.
    Failed,
}

impl Replies {
    fn end(&mut self) {
        *self = match std::mem::replace(self, Self::Failed) {
            Self::Open(replies) | Self::Ended(replies) => Self::Ended(replies),
            Self::Done => Self::Done,
            Self::Failed => Self::Failed,
        };
    }
}

/// Whether a direction goes on.
enum Direction {
    Open,
    Ended,
}

impl PortReader {
    fn take(&mut self, message: PortForwardOut) -> Result<Direction, Error> {
        match message.m {
            Some(port_forward_out::M::Data(data)) => self.rest = data,
            Some(port_forward_out::M::Eof(_)) => return Ok(Direction::Ended),
            Some(port_forward_out::M::Ready(_)) => {
                return Err(Error::unfinished("a connection was made twice"));
            }
            // Of a newer agent.
            None => {}
        }
        Ok(Direction::Open)
    }
}

/// What goes to the guest's port.
#[derive(Debug)]
pub struct PortWriter {
    pieces: PollSender<PortForwardIn>,
    shut: Arc<AtomicBool>,
}

impl Drop for PortWriter {
    fn drop(&mut self) {
        self.shut.store(true, Ordering::Relaxed);
    }
}

fn over() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the connection to the guest is over")
}

impl AsyncRead for PortReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.rest.is_empty() && into.remaining() > 0 {
            let replies = match &mut this.replies {
                Replies::Open(replies) => replies,
                Replies::Ended(_) => return this.poll_end(cx),
                Replies::Done => return Poll::Ready(Ok(())),
                Replies::Failed => return Poll::Ready(Err(over())),
            };
            let taken = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => this.take(message),
                Some(Err(status)) => Err(Error::from_status(status)),
                None => Err(Error::unfinished("the call ended without the connection's end")),
            };
            match taken {
                Ok(Direction::Open) => {}
                Ok(Direction::Ended) => this.replies.end(),
                Err(error) => {
                    this.replies = Replies::Failed;
                    return Poll::Ready(Err(error.into()));
                }
            }
        }
        let length = this.rest.len().min(into.remaining());
        into.put_slice(&this.rest.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl PortReader {
    /// Once both directions have ended, waits until the guest has all of it: who goes away before takes along what is
    /// still under way.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Replies::Ended(replies) = &mut self.replies else {
            return Poll::Ready(Ok(()));
        };
        if !self.shut.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let error = match ready!(Pin::new(replies).poll_next(cx)) {
            None => {
                self.replies = Replies::Done;
                return Poll::Ready(Ok(()));
            }
            Some(Ok(_)) => Error::unfinished("a message came after the connection's end"),
            Some(Err(status)) => Error::from_status(status),
        };
        self.replies = Replies::Failed;
        Poll::Ready(Err(error.into()))
    }
}

impl AsyncWrite for PortWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        if self.shut.load(Ordering::Relaxed) {
            return Poll::Ready(Err(over()));
        }
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        ready!(self.pieces.poll_reserve(cx)).map_err(|_closed| over())?;
        let piece = data.get(..PIECE).unwrap_or(data);
        let message = PortForwardIn {
            m: Some(port_forward_in::M::Data(Bytes::copy_from_slice(piece))),
        };
        self.pieces.send_item(message).map_err(|_closed| over())?;
        Poll::Ready(Ok(piece.len()))
    }

    /// What was written is on its way: nothing is held back here.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.shut.load(Ordering::Relaxed) {
            let room = ready!(self.pieces.poll_reserve(cx));
            let eof = PortForwardIn {
                m: Some(port_forward_in::M::Eof(PortForwardEof {})),
            };
            // A connection that is over needs no end.
            if room.is_ok() {
                self.pieces.send_item(eof).map_err(|_closed| over())?;
            }
            self.pieces.close();
            self.shut.store(true, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.reader).poll_read(cx, into)
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.writer).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.writer).poll_shutdown(cx))?;
        self.reader.poll_end(cx)
    }
}

/// A local address that passes connections on to a guest's port. Dropping it closes it and all its connections.
#[derive(Debug)]
pub struct PortListener {
    local: SocketAddr,
    failures: mpsc::Receiver<Error>,
    _task: AbortOnDrop,
}

impl PortListener {
    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The next connection that the guest did not take or that broke there; its local end was reset. The listener goes
    /// on. At most 16 wait to be told, more are dropped. Cancel safe.
    pub async fn next_failure(&mut self) -> Error {
        match self.failures.recv().await {
            Some(error) => error,
            // The task holds the sender as long as this value lives.
            None => std::future::pending().await,
        }
    }
}

async fn serve(listener: TcpListener, forward: Forward, failures: mpsc::Sender<Error>) {
    let mut connections = FuturesUnordered::new();
    let mut not_before = Instant::now();
    loop {
        let accept = async {
            sleep_until(not_before).await;
            listener.accept().await
        };
        tokio::select! {
            accepted = accept, if connections.len() < limits::FORWARDS => match accepted {
                Ok((socket, _peer)) => connections.push(Box::pin(relay(forward.clone(), socket))),
                Err(error) => {
                    failures.try_send(Error::local("accept", error)).ok();
                    not_before = Instant::now() + PAUSE;
                }
            },
            Some(ended) = connections.next() => {
                // Full: whoever wants to know has enough to read.
                if let Err(error) = ended && error.kind() != ErrorKind::Local {
                    failures.try_send(error).ok();
                }
            }
        }
    }
}

async fn relay(forward: Forward, mut socket: TcpStream) -> Result<(), Error> {
    // Whoever has gone away already is noticed by the first read.
    socket.set_nodelay(true).ok();
    let ended = match forward.connect().await {
        Ok(mut port) => copy_bidirectional_with_sizes(&mut socket, &mut port, PIECE, PIECE)
            .await
            .map(drop)
            .map_err(|error| Error::local("the local connection", error)),
        Err(error) => Err(error),
    };
    if ended.is_err() {
        // A reset there is a reset here: an end would look as if all had come.
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).ok();
    }
    ended
}
