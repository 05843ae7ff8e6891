//! Listeners and connections. One accept task per listener, one task per connection; the requests of a connection are
//! tasks too, as HTTP/2 interleaves them. All belong to one group, which [`Server::stop`] joins.

use std::{
    io,
    net::SocketAddr,
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use hyper::{rt::Executor, server::conn::http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use sandbox_protocol::limits;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{Certificates, ListenError, Peer, RequestIds, front::Front};
use crate::{access::PeerIds, link::Prefixed, sys, tasks};

/// Connections that are open at once; more wait in the kernel's backlog. An idle one holds some 40 KiB.
const CONNECTIONS: usize = 1024;
/// From a connection to its first bytes of HTTP/2, TLS included: whoever says nothing does not keep a place.
const GREETING: Duration = Duration::from_secs(10);
/// Wait after an accept that failed for want of something (descriptors, memory), so as not to spin on it.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);
/// What every HTTP/2 client says first.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A bound socket.
#[derive(Debug)]
pub struct Listener(Kind);

#[derive(Debug)]
enum Kind {
    Unix(UnixListener, Option<SocketFile>),
    Tcp(TcpListener, Option<Arc<Certificates>>),
}

/// A socket file of ours, removed when its listener goes, unless another has taken its name.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|about| about.ino() == self.inode);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, path = %self.path.display(), "socket file left behind");
        }
    }
}

/// Binds a Unix socket with this mode and group. A stale socket is removed; the caller holds the state directory's lock,
/// so no other daemon of this state is about to bind it too. Blocks shortly; call it inside the runtime.
///
/// # Errors
/// [`ListenError::InUse`] if somebody answers on it, [`ListenError::NotASocket`], [`ListenError::Bind`].
pub fn unix(path: &Path, mode: u32, gid: Option<u32>) -> Result<Listener, ListenError> {
    let bind = |source| ListenError::Bind {
        place: path.display().to_string(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Ok(about) if !about.file_type().is_socket() => {
            return Err(ListenError::NotASocket {
                path: path.to_owned(),
            });
        }
        Ok(_stale) => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(ListenError::InUse {
                    path: path.to_owned(),
                });
            }
            std::fs::remove_file(path).map_err(bind)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(bind(error)),
    }
    let listener = UnixListener::bind(path).map_err(bind)?;
    let about = std::fs::symlink_metadata(path).map_err(bind)?;
    let file = SocketFile {
        path: path.to_owned(),
        inode: about.ino(),
    };
    // The group first: until the mode is set, only the owner can connect.
    if let Some(gid) = gid {
        std::os::unix::fs::chown(path, None, Some(gid)).map_err(bind)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(bind)?;
    Ok(Listener(Kind::Unix(listener, Some(file))))
}

/// Binds a TCP address; without certificates only a loopback one.
///
/// # Errors
/// [`ListenError::NeedsTls`], [`ListenError::Bind`].
pub fn tcp(addr: SocketAddr, tls: Option<Arc<Certificates>>) -> Result<Listener, ListenError> {
    if tls.is_none() && !addr.ip().is_loopback() {
        return Err(ListenError::NeedsTls { addr });
    }
    let bind = |source| ListenError::Bind {
        place: addr.to_string(),
        source,
    };
    let listener = std::net::TcpListener::bind(addr).map_err(bind)?;
    listener.set_nonblocking(true).map_err(bind)?;
    let listener = TcpListener::from_std(listener).map_err(bind)?;
    Ok(Listener(Kind::Tcp(listener, tls)))
}

impl Listener {
    /// Takes a listening socket that systemd passed, Unix or TCP.
    ///
    /// # Errors
    /// [`ListenError::Passed`], [`ListenError::NeedsTls`].
    pub fn passed(fd: OwnedFd, tls: Option<Arc<Certificates>>) -> Result<Self, ListenError> {
        let at = rustix::net::getsockname(&fd).map_err(|errno| ListenError::Passed(errno.into()))?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(|errno| ListenError::Passed(errno.into()))?;
        if at.address_family() == rustix::net::AddressFamily::UNIX {
            let listener = UnixListener::from_std(fd.into()).map_err(ListenError::Passed)?;
            return Ok(Self(Kind::Unix(listener, None)));
        }
        let listener = TcpListener::from_std(fd.into()).map_err(ListenError::Passed)?;
        let addr = listener.local_addr().map_err(ListenError::Passed)?;
        if tls.is_none() && !addr.ip().is_loopback() {
            return Err(ListenError::NeedsTls { addr });
        }
        Ok(Self(Kind::Tcp(listener, tls)))
    }

    /// Where it listens, as clients write it.
    #[must_use]
    pub fn address(&self) -> String {
        match &self.0 {
            Kind::Unix(listener, _) => {
                let at = listener.local_addr().ok();
                let path = at.as_ref().and_then(|at| at.as_pathname());
                format!("unix:{}", path.unwrap_or(Path::new("?")).display())
            }
            Kind::Tcp(listener, tls) => {
                let scheme = if tls.is_some() { "https" } else { "http" };
                let at = listener.local_addr().ok();
                format!("{scheme}://{}", at.map_or("?".to_owned(), |at| at.to_string()))
            }
        }
    }
}

/// The API as it is being served, until [`stop`](Self::stop) or drop.
#[derive(Debug)]
pub struct Server {
    group: tasks::Group,
    cut: CancellationToken,
}

#[derive(Debug, Clone)]
struct Serving {
    group: tasks::Group,
    cut: CancellationToken,
    routes: Routes,
    ids: Arc<RequestIds>,
    places: Arc<Semaphore>,
}

impl Server {
    /// Serves `routes` on all listeners until [`stop`](Self::stop).
    #[must_use]
    pub fn start(listeners: Vec<Listener>, routes: Routes, ids: RequestIds) -> Self {
        let serving = Serving {
            group: tasks::Group::new(),
            cut: CancellationToken::new(),
            routes: routes.prepare(),
            ids: Arc::new(ids),
            places: Arc::new(Semaphore::new(CONNECTIONS)),
        };
        for Listener(kind) in listeners {
            let serving = serving.clone();
            let group = serving.group.clone();
            match kind {
                Kind::Unix(listener, file) => group.spawn("api-accept", serving.accept_unix(listener, file)),
                Kind::Tcp(listener, tls) => group.spawn("api-accept", serving.accept_tcp(listener, tls)),
            }
        }
        Self {
            group: serving.group,
            cut: serving.cut,
        }
    }

    /// Accepts nothing more, tells clients so (GOAWAY), lets open calls go on for `grace`, then cuts them. Done when
    /// every task has ended. Cancel safe; a second call goes on, with its own grace.
    pub async fn stop(&self, grace: Duration) {
        if tokio::time::timeout(grace, self.group.stop()).await.is_err() {
            self.cut.cancel();
            self.group.stop().await;
        }
    }
}

impl Drop for Server {
    /// Without a stop, everything is cut.
    fn drop(&mut self) {
        self.group.ask();
        self.cut.cancel();
    }
}

impl Serving {
    async fn accept_unix(self, listener: UnixListener, file: Option<SocketFile>) {
        while let Some((stream, place)) = self.next(|| async { Ok(listener.accept().await?.0) }).await {
            match unix_peer(&stream) {
                Ok(peer) => self.clone().begin(stream, peer, place),
                Err(error) => tracing::warn!(%error, "a connection without credentials was dropped"),
            }
        }
        drop((listener, file));
    }

    async fn accept_tcp(self, listener: TcpListener, tls: Option<Arc<Certificates>>) {
        while let Some(((stream, addr), place)) = self.next(|| listener.accept()).await {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "small replies may be late");
            }
            match &tls {
                None => self.clone().begin(stream, Peer::Tcp(addr), place),
                Some(certificates) => {
                    let config = certificates.now();
                    self.clone().begin_tls(stream, addr, config, place);
                }
            }
        }
    }

    /// The next connection and a place for it; none when the server stops.
    async fn next<T, F>(&self, accept: impl Fn() -> F) -> Option<(T, OwnedSemaphorePermit)>
    where
        F: Future<Output = io::Result<T>>,
    {
        let mut told = false;
        loop {
            let accepted = async {
                let place = Arc::clone(&self.places).acquire_owned().await;
                (accept().await, place)
            };
            let (accepted, place) = tokio::select! {
                biased;
                () = self.group.stopping() => return None,
                accepted = accepted => accepted,
            };
            let place = place.ok()?;
            match accepted {
                Ok(stream) => return Some((stream, place)),
                // That one connection's own end; the next may be well.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(%error, "cannot accept connections; trying again");
                    }
                    tokio::select! {
                        () = self.group.stopping() => return None,
                        () = tokio::time::sleep(ACCEPT_AGAIN) => {}
                    }
                }
            }
        }
    }

    fn begin<T>(self, stream: T, peer: Peer, place: OwnedSemaphorePermit)
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let group = self.group.clone();
        group.spawn("api-connection", async move {
            self.serve(stream, peer).await;
            drop(place);
        });
    }

    fn begin_tls(
        self,
        stream: TcpStream,
        addr: SocketAddr,
        config: Arc<rustls::ServerConfig>,
        place: OwnedSemaphorePermit,
    ) {
        let group = self.group.clone();
        group.spawn("api-connection", async move {
            let handshake = tokio_rustls::TlsAcceptor::from(config).accept(stream);
            let stream = tokio::select! {
                () = self.group.stopping() => return,
                stream = tokio::time::timeout(GREETING, handshake) => stream,
            };
            match stream {
                // Boxed: it would be kept beside the handshake.
                Ok(Ok(stream)) => Box::pin(self.serve(stream, Peer::Tcp(addr))).await,
                Ok(Err(error)) => tracing::debug!(%error, %addr, "TLS failed"),
                Err(_elapsed) => tracing::debug!(%addr, "TLS took too long"),
            }
            drop(place);
        });
    }

    async fn serve<T>(self, mut stream: T, peer: Peer)
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut first = [0; PREFACE.len()];
        let greeted = tokio::select! {
            biased;
            () = self.group.stopping() => return,
            read = tokio::time::timeout(GREETING, stream.read_exact(&mut first)) => matches!(read, Ok(Ok(_))),
        };
        if !greeted || first != *PREFACE {
            tracing::debug!("a connection that did not speak HTTP/2 was dropped");
            return;
        }
        let stream = Prefixed::new(Bytes::from_static(PREFACE), stream);
        let front = Front {
            routes: self.routes,
            ids: self.ids,
            peer,
        };
        let builder = settings(self.group.clone());
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), front));
        let mut told = false;
        loop {
            tokio::select! {
                biased;
                () = self.cut.cancelled() => return,
                () = self.group.stopping(), if !told => {
                    connection.as_mut().graceful_shutdown();
                    told = true;
                }
                ended = &mut connection => {
                    if let Err(error) = ended {
                        tracing::debug!(error = &error as &dyn std::error::Error, "connection ended");
                    }
                    return;
                }
            }
        }
    }
}

fn settings(group: tasks::Group) -> http2::Builder<Spawn> {
    let keepalive = Duration::from_secs(limits::KEEPALIVE_SECS);
    let mut builder = http2::Builder::new(Spawn(group));
    builder
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .initial_stream_window_size(limits::STREAM_WINDOW)
        .initial_connection_window_size(limits::API_CONNECTION_WINDOW)
        .max_concurrent_streams(limits::API_STREAMS)
        .max_header_list_size(limits::HEADER_LIST)
        .max_send_buf_size(limits::SEND_BUFFER)
        .keep_alive_interval(keepalive)
        .keep_alive_timeout(keepalive);
    builder
}

/// Runs the requests of a connection as tasks of the server's group.
#[derive(Debug, Clone)]
struct Spawn(tasks::Group);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Spawn {
    fn execute(&self, request: F) {
        self.0.spawn("api-request", request);
    }
}

fn unix_peer(stream: &UnixStream) -> io::Result<Peer> {
    let ids = stream.peer_cred()?;
    // A kernel without the option (gVisor): the caller is in no group but its own, which lets in nobody more.
    let groups = sys::peer_groups(stream).unwrap_or_else(|error| {
        tracing::debug!(%error, "supplementary groups of a caller are not known");
        Vec::new()
    });
    Ok(Peer::Unix(Arc::new(PeerIds {
        uid: ids.uid(),
        gid: ids.gid(),
        groups,
    })))
}
