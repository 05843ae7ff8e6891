//! Doors that listen on a TAP: each connection of the guest is one of TCP, and whose it is its listener says.

use std::{
    io, net,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::net::sockopt::set_tcp_nodelay;
use sandbox_protocol::limits::DOOR_CONNECTIONS;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, Sleep, sleep},
};

use super::Accepted;
use crate::{
    egress::{Door, DoorKind},
    sys,
};

/// Connections of one door at once: those that it serves, and as many that are told that there are too many. What is beyond
/// waits until one of them has ended, which those that are told do soon; then it is told too.
const MOST: usize = 2 * DOOR_CONNECTIONS;
/// Until connections are accepted again, when descriptors have run out.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two looks at what the guest has yet to acknowledge: the kernel tells nobody of that.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(50);

impl Door {
    /// Serves what comes by these listeners, which one guest alone can reach: denies until armed.
    /// [`stop`](Self::stop) ends that, joins it and closes them. They must not linger: what is closed with bytes on their
    /// way is reset.
    ///
    /// # Errors
    /// The kernel's, when they cannot be watched; then nothing is served.
    pub fn listen(&self, http: net::TcpListener, socks5: net::TcpListener) -> io::Result<()> {
        let both = [
            (DoorKind::Http, TcpListener::from_std(http)?),
            (DoorKind::Socks5, TcpListener::from_std(socks5)?),
        ];
        self.set_guarded();
        for (kind, listener) in both {
            // What is accepted has it from its listener. It is a hint.
            set_tcp_nodelay(&listener, true).unwrap_or(());
            let (door, group) = (self.clone(), self.group().clone());
            self.group().spawn("door listener", async move {
                tokio::select! {
                    biased;
                    () = group.stopping() => {}
                    () = accept(&door, kind, &listener, MOST) => {}
                }
            });
        }
        self.set_linked(true);
        Ok(())
    }
}

/// Accepts for ever, so many at once: what is in force in the moment of each holds for it.
async fn accept(door: &Door, kind: DoorKind, listener: &TcpListener, most: usize) {
    let places = Arc::new(Semaphore::new(most));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let accepted = Accepted::new(door, kind);
                // Never closed: there is always a place in the end.
                let place = Arc::clone(&places).acquire_owned().await;
                door.group().spawn("door", async move {
                    accepted.serve(Guest::new(stream)).await;
                    drop(place);
                });
            }
            // One that left before it was looked at, or no descriptor.
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// A guest's connection. Its shutdown is over once the guest has acknowledged all of it: the socket does not linger, so that
/// whatever closes it before resets it, and nothing of it is sent to the next guest of its TAP.
#[derive(Debug)]
pub(super) struct Guest {
    io: TcpStream,
    has_ended: bool,
    through: Through,
}

impl Guest {
    pub(super) const fn new(io: TcpStream) -> Self {
        Self {
            io,
            has_ended: false,
            through: Through::new(),
        }
    }

    /// Its socket. Whoever ends that side by itself waits by a [`Through`] of its own.
    pub(super) const fn socket(&self) -> &TcpStream {
        &self.io
    }
}

/// Waits until a guest has acknowledged all that was said to it, the end included, or is gone.
#[derive(Debug)]
pub(super) struct Through {
    pause: Duration,
    look: Option<Pin<Box<Sleep>>>,
}

impl Through {
    pub(super) const fn new() -> Self {
        Self {
            pause: SHORTEST,
            look: None,
        }
    }

    pub(super) fn poll(&mut self, io: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while sys::unacknowledged(io)? != 0 && io.peer_addr().is_ok() {
            let pause = self.pause;
            let look = self.look.get_or_insert_with(|| Box::pin(sleep(pause)));
            ready!(look.as_mut().poll(cx));
            self.pause = (self.pause * 2).min(LONGEST);
            look.as_mut().reset(Instant::now() + self.pause);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Guest {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Guest {
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
        let this = &mut *self;
        if !this.has_ended {
            ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
            this.has_ended = true;
        }
        this.through.poll(&this.io, cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::egress::tests::{Bench, within};

    #[tokio::test]
    async fn a_listening_door_denies_until_armed_and_is_shut_by_its_stop() {
        let bench = Bench::new().await;
        let at = bench.listen();
        let url = bench.url("/");
        let get = async || {
            let mut stream = TcpStream::connect(at).await.unwrap();
            let head = format!("GET {url} HTTP/1.1\r\nhost: x\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
            let mut all = String::new();
            within(stream.read_to_string(&mut all)).await.unwrap();
            all.lines().next().unwrap_or_default().to_owned()
        };
        assert_eq!(get().await, "HTTP/1.1 403 not_armed");
        bench.arm();
        assert_eq!(get().await, "HTTP/1.1 200 OK");
        bench.door.disarm();
        assert_eq!(get().await, "HTTP/1.1 403 not_armed");
        within(bench.door.stop()).await;
        assert!(TcpStream::connect(at).await.is_err());
    }

    /// Nobody is turned away without a word, however many come at once.
    #[tokio::test]
    async fn whoever_finds_no_place_waits_for_one_and_is_told() {
        let bench = Bench::new().await;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let door = bench.door.clone();
        let accepting = crate::tasks::spawn("accepting", async move {
            accept(&door, DoorKind::Socks5, &listener, 2).await;
        });
        let mut told = std::collections::VecDeque::new();
        for n in 0..12 {
            let mut client = TcpStream::connect(at).await.unwrap();
            if n >= 2 {
                // Both places are taken by those who do not leave: this one leaves, and the next is told.
                let first: TcpStream = told.pop_front().unwrap();
                drop(first);
            }
            let mut word = [0; 2];
            within(client.read_exact(&mut word)).await.unwrap();
            assert_eq!(word, [5, 0xff]);
            told.push_back(client);
        }
        accepting.abort();
    }

    /// The client reads late: what was said to it before the end must all be there.
    #[tokio::test]
    async fn an_end_waits_for_what_was_said() {
        let listener = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::sockopt::set_socket_linger(&listener, Some(Duration::ZERO)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let client = TcpStream::connect(at).await.unwrap();
        let mut client = client;
        client.shutdown().await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let mut guest = Guest::new(stream);
        // As much as fits into both sockets.
        let mut said = 0;
        while let Some(Ok(n)) = {
            use futures_util::FutureExt as _;
            guest.write(&[7; 64 << 10]).now_or_never()
        } {
            said += n;
        }
        let ending = crate::tasks::spawn("ending", async move {
            guest.shutdown().await.unwrap();
            drop(guest);
        });
        let mut all = Vec::new();
        within(client.read_to_end(&mut all)).await.unwrap();
        assert_eq!(all.len(), said);
        within(ending).await.unwrap();
    }
}
