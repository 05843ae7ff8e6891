//! A client and a registry for tests of the front desk.

use std::{
    collections::HashMap,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandbox_protocol::{id::SandboxId, limits};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};
use tonic::{body::Body, service::Routes};

use super::*;
use crate::{
    access::{Access, Caller, Grant, Lock, Role, TokenHash},
    clock::Clock,
    link::{Link, fake::within},
    tasks,
};

/// Sandboxes with links, as the registry would have them.
#[derive(Default)]
pub(super) struct Sandboxes {
    pub(super) rows: Mutex<HashMap<SandboxId, (Lock, Link, u32)>>,
    pub(super) uses: Arc<AtomicUsize>,
}

/// One use of a sandbox.
pub(super) struct Use(Arc<AtomicUsize>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Guests for Sandboxes {
    type Use = Use;

    fn find(&self, sandbox: &str, caller: &Caller) -> Result<Guest<Use>, Refusal> {
        let rows = self.rows.lock().unwrap();
        let row = sandbox.parse().ok().and_then(|id: SandboxId| rows.get(&id));
        match (row, caller.opens(row.map(|row| &row.0))) {
            (Some((_, link, proto)), Some(_)) => {
                self.uses.fetch_add(1, Ordering::SeqCst);
                Ok(Guest {
                    link: link.clone(),
                    proto: *proto,
                    used: Use(Arc::clone(&self.uses)),
                })
            }
            (Some(_) | None, _) => Err(Refusal::not_found()),
        }
    }
}

impl Sandboxes {
    pub(super) fn add(&self, n: u8, link: Link, token: &str) -> SandboxId {
        self.add_with(n, link, limits::PROTO_MAX, token)
    }

    /// With the agent protocol that its link is spoken by.
    pub(super) fn add_with(&self, n: u8, link: Link, proto: u32, token: &str) -> SandboxId {
        let sandbox = SandboxId::from_random([n; 16]);
        let lock = Lock {
            sandbox,
            token: Some(TokenHash::of(token)),
            tenant: None,
        };
        self.rows.lock().unwrap().insert(sandbox, (lock, link, proto));
        sandbox
    }
}

/// `sba_op` is an operator's token.
pub(super) fn access() -> AccessNow {
    Arc::new(arc_swap::ArcSwap::from_pointee(Access {
        grants: vec![Grant {
            name: "op".parse().unwrap(),
            hash: TokenHash::of("sba_op"),
            role: Role::Operator,
        }],
        operator_gid: None,
        daemon_uid: u32::MAX,
    }))
}

/// A served front desk on a Unix socket and a port of its own.
pub(super) struct Desk {
    pub(super) server: Server,
    pub(super) path: PathBuf,
    pub(super) tcp: String,
    _dir: tempfile::TempDir,
}

pub(super) fn serve(routes: Routes) -> Desk {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api.sock");
    let listeners = vec![
        unix(&path, 0o600, None).unwrap(),
        tcp("127.0.0.1:0".parse().unwrap(), None).unwrap(),
    ];
    let tcp = listeners[1].address();
    Desk {
        server: Server::start(listeners, routes, RequestIds::new([1; 16])),
        path,
        tcp: tcp.strip_prefix("http://").unwrap().to_owned(),
        _dir: dir,
    }
}

pub(super) fn forwarding(sandboxes: &Arc<Sandboxes>) -> Desk {
    let forward = Forward::new(Arc::clone(sandboxes), access(), Clock::host());
    serve(Routes::new(forward))
}

/// A client's connection; also a channel for generated clients.
#[derive(Clone)]
pub(super) struct Client(SendRequest<Body>);

impl Client {
    pub(super) async fn new<T>(io: T) -> Self
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        builder
            .initial_stream_window_size(limits::STREAM_WINDOW)
            .initial_connection_window_size(limits::API_CONNECTION_WINDOW);
        let (send, connection) = Box::pin(builder.handshake(TokioIo::new(io))).await.unwrap();
        // Ends with the connection.
        drop(tasks::spawn("client", async {
            drop(connection.await);
        }));
        Self(send)
    }

    pub(super) async fn unix(desk: &Desk) -> Self {
        Self::new(UnixStream::connect(&desk.path).await.unwrap()).await
    }

    /// Without a user that the kernel vouches for: whoever runs the tests may be an operator.
    pub(super) async fn stranger(desk: &Desk) -> Self {
        Self::new(TcpStream::connect(&desk.tcp).await.unwrap()).await
    }

    pub(super) async fn send(&self, request: Request<Body>) -> Response<Incoming> {
        within(self.0.clone().send_request(request)).await.unwrap()
    }

    /// Sends a call with a body of these bytes and reads all of the reply.
    pub(super) async fn call(&self, request: http::request::Builder, body: &[u8]) -> Reply {
        let body = Body::new(Full::new(Bytes::copy_from_slice(body)));
        Reply::read(self.send(request.body(body).unwrap()).await).await
    }
}

impl tower_service::Service<Request<Body>> for Client {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        *request.uri_mut() = Uri::try_from(format!("http://host{path}")).unwrap();
        Box::pin(self.0.send_request(request))
    }
}

/// All of a reply.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) headers: http::HeaderMap,
    pub(super) data: Vec<u8>,
    /// The trailers; those of a reply without messages are its headers.
    pub(super) trailers: http::HeaderMap,
}

impl Reply {
    pub(super) async fn read(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = within(body.collect()).await.unwrap();
        Self {
            trailers: body.trailers().unwrap_or(&parts.headers).clone(),
            headers: parts.headers,
            data: body.to_bytes().to_vec(),
        }
    }

    pub(super) fn status(&self) -> tonic::Status {
        tonic::Status::from_header_map(&self.trailers).unwrap()
    }

    /// The reason, if the host gave one, and who spoke.
    pub(super) fn reason(&self) -> (String, String) {
        use tonic_types::StatusExt as _;
        let info = self.status().get_details_error_info();
        let origin = self.trailers["sandbox-origin"].to_str().unwrap();
        (
            info.map(|info| info.reason).unwrap_or_default(),
            origin.to_owned(),
        )
    }
}

/// A call to an agent.
pub(super) fn agent(method: &str) -> http::request::Builder {
    Request::post(format!("http://host/sandbox.v1.Agent/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
}

/// The same for a sandbox, with its token.
pub(super) fn to(sandbox: SandboxId, token: &str, method: &str) -> http::request::Builder {
    agent(method)
        .header("sandbox-id", sandbox.to_string())
        .header("authorization", format!("Bearer {token}"))
}
