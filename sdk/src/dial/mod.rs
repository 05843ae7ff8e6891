//! From an address to calls: one HTTP/2 connection, made anew when it is lost and a call needs it.
//!
//! May call: tasks, error.
//! Never inside: a repeated call, a message. A request goes to the connection on the caller's own stack: there is
//! neither queue nor task between them, so that a claim costs what an empty call costs.
//! Invariant 17: the windows are those of `protocol::limits`; an unread stream stalls only itself.
//! Cancel safety: dropping a call resets its stream, both halves.

mod address;
#[cfg(test)]
mod tests;
mod tls;
mod wire;

use std::{
    io,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use h2::{Ping, PingPong, client::SendRequest};
use sandbox_protocol::limits;
use tokio::{
    io::{AsyncRead, AsyncWrite, BufReader},
    net::{TcpStream, UnixStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tonic::body::Body;

pub use address::Address;
pub(crate) use wire::Incoming;

use crate::{error::Error, tasks};
use address::Place;
use wire::Sent;

/// Bytes that are read at once: HTTP/2 alone takes 8 KiB, which is two reads for a frame of a file.
const AHEAD: usize = 64 * 1024;

/// Why there is no reply.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// No connection could be made: nothing was sent.
    #[error("cannot connect to {address}")]
    Unreachable {
        address: String,
        #[source]
        source: io::Error,
    },
    /// The connection or the stream was lost; whether the call took effect is not known.
    #[error("the connection broke before the call was over")]
    Broken {
        #[source]
        source: h2::Error,
    },
}

impl DialError {
    fn broken(source: h2::Error) -> Self {
        Self::Broken { source }
    }
}

/// A cloneable way to one daemon.
#[derive(Debug, Clone)]
pub(crate) struct Link(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    address: Address,
    tls: Option<Arc<rustls::ClientConfig>>,
    patience: Duration,
    current: Mutex<Option<Open>>,
    /// One attempt at a time: whoever else needs a connection waits for its outcome.
    dialing: Semaphore,
}

#[derive(Debug, Clone)]
struct Open {
    send: SendRequest<Bytes>,
    lost: Arc<AtomicBool>,
}

/// Sets its flag when the task that drives a connection is gone, however it ended.
struct LostOnDrop(Arc<AtomicBool>);

impl Drop for LostOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Link {
    /// Connects; `patience` bounds this and every later attempt.
    pub(crate) async fn open(address: Address, ca: &[u8], patience: Duration) -> Result<Self, Error> {
        let tls = match address.place() {
            Place::Tls { .. } => Some(tls::config(ca).await?),
            Place::Unix(_) | Place::Loopback { .. } => None,
        };
        let link = Self(Arc::new(Shared {
            address,
            tls,
            patience,
            current: Mutex::new(None),
            dialing: Semaphore::new(1),
        }));
        link.0.connected().await.map_err(Error::dial)?;
        Ok(link)
    }
}

impl Shared {
    fn current(&self) -> Option<Open> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current
            .as_ref()
            .is_some_and(|open| open.lost.load(Ordering::Acquire))
        {
            *current = None;
        }
        current.clone()
    }

    /// The connection there is, or a new one.
    async fn connected(&self) -> Result<Open, DialError> {
        let _turn = self.dialing.acquire().await;
        if let Some(open) = self.current() {
            return Ok(open);
        }
        let unreachable = |source| DialError::Unreachable {
            address: self.address.to_string(),
            source,
        };
        let open = timeout(self.patience, Box::pin(self.dial()))
            .await
            .unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
            .map_err(unreachable)?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(open.clone());
        Ok(open)
    }

    async fn dial(&self) -> io::Result<Open> {
        match self.address.place() {
            Place::Unix(path) => start(UnixStream::connect(path).await?, false).await,
            Place::Loopback { host, port } => {
                let stream = tcp(host, *port).await?;
                // `localhost` is a name, and names lead anywhere.
                if !stream.peer_addr()?.ip().is_loopback() {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        "plain HTTP is for loopback only",
                    ));
                }
                start(stream, true).await
            }
            Place::Tls { host, name, port } => {
                let config = self.tls.clone().ok_or(io::ErrorKind::InvalidInput)?;
                let connector = tokio_rustls::TlsConnector::from(config);
                let tls = connector.connect(name.clone(), tcp(host, *port).await?).await?;
                match tls.get_ref().1.alpn_protocol() {
                    None | Some(b"h2") => Box::pin(start(tls, true)).await,
                    Some(_) => Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "the server speaks no HTTP/2",
                    )),
                }
            }
        }
    }
}

async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Greets and starts the task that drives the connection until it is lost or nobody uses it.
async fn start<T>(stream: T, pinged: bool) -> io::Result<Open>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (send, mut connection) = h2::client::Builder::new()
        .initial_window_size(limits::WIDE_WINDOW)
        .initial_connection_window_size(limits::CLIENT_CONNECTION_WINDOW)
        .max_header_list_size(limits::HEADER_LIST)
        .max_send_buffer_size(limits::SEND_BUFFER)
        .max_concurrent_reset_streams(limits::API_STREAMS as usize)
        .enable_push(false)
        .handshake(BufReader::with_capacity(AHEAD, stream))
        .await
        .map_err(|error| io::Error::new(io::ErrorKind::ConnectionReset, error))?;
    let lost = Arc::new(AtomicBool::new(false));
    let guard = LostOnDrop(lost.clone());
    // A local daemon cannot go silent without its socket closing.
    let pinger = if pinged { connection.ping_pong() } else { None };
    let driver = async move {
        let _guard = guard;
        let mut silence = pin!(silence(pinger));
        let ended = tokio::select! {
            ended = connection => ended.err().map(|error| error.to_string()),
            () = &mut silence => Some("no answer to pings".to_owned()),
        };
        tracing::debug!(why = ended, "connection to the daemon ended");
    };
    // It ends when the last user of the connection is gone.
    drop(tasks::detached(driver));
    Ok(Open { send, lost })
}

/// Returns when the peer has gone silent.
async fn silence(pinger: Option<PingPong>) {
    let Some(mut pinger) = pinger else {
        return std::future::pending().await;
    };
    let wait = Duration::from_secs(limits::KEEPALIVE_SECS);
    loop {
        sleep(wait).await;
        match timeout(wait, pinger.ping(Ping::opaque())).await {
            Ok(Ok(_pong)) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

impl tower_service::Service<http::Request<Body>> for Link {
    type Response = http::Response<Incoming>;
    type Error = DialError;
    type Future = Call;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Call {
        if let Some(mut open) = self.0.current() {
            if wire::takes_calls(&mut open.send) {
                return Call(State::of(wire::send(open.send, request)));
            }
            open.lost.store(true, Ordering::Release);
        }
        let shared = self.0.clone();
        Call(State::Dialing(Box::pin(async move {
            let open = shared.connected().await?;
            wire::send(open.send, request)
        })))
    }
}

/// One call on its way.
pub(crate) struct Call(State);

enum State {
    Sent(Sent),
    Dialing(Pin<Box<dyn Future<Output = Result<Sent, DialError>> + Send>>),
    /// Taken once; a future is not polled after its end.
    Failed(Option<DialError>),
}

impl State {
    fn of(sent: Result<Sent, DialError>) -> Self {
        sent.map_or_else(|error| Self::Failed(Some(error)), Self::Sent)
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").finish_non_exhaustive()
    }
}

impl Future for Call {
    type Output = Result<http::Response<Incoming>, DialError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                State::Sent(sent) => return sent.poll(cx),
                State::Dialing(dialing) => {
                    let sent = std::task::ready!(dialing.as_mut().poll(cx));
                    self.0 = State::of(sent);
                }
                State::Failed(error) => {
                    return error
                        .take()
                        .map_or(Poll::Pending, |error| Poll::Ready(Err(error)));
                }
            }
        }
    }
}
