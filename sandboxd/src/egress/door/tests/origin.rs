//! Origins that speak TLS, clients that a guest would run, and the CAs of both.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Frame, body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ClientConfig, RootCertStore, ServerConfig, crypto::ring};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use tokio::{io::DuplexStream, net::TcpListener};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use crate::{
    ca::Dir,
    clock::Clock,
    egress::{
        Interception,
        tests::{Bench, within},
    },
    tasks,
};

/// A CA of origins.
pub(super) struct World(CertifiedIssuer<'static, KeyPair>);

/// What an origin's certificate says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    Good,
    Expired,
    OtherName,
    UnknownRoot,
}

impl World {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(super) fn root(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    /// What an origin of this CA serves TLS by.
    pub(super) fn acceptor(&self, proof: Proof, alpn: &[&str]) -> TlsAcceptor {
        TlsAcceptor::from(Arc::new(self.config(proof, alpn)))
    }

    fn config(&self, proof: Proof, alpn: &[&str]) -> ServerConfig {
        let name = if proof == Proof::OtherName {
            "else.test"
        } else {
            "allowed.test"
        };
        let mut params = CertificateParams::new([name.to_owned(), "127.0.0.2".to_owned()]).unwrap();
        if proof == Proof::OtherName {
            params.subject_alt_names.truncate(1);
        }
        if proof == Proof::Expired {
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let other = Self::new();
        let issuer = if proof == Proof::UnknownRoot {
            &other.0
        } else {
            &self.0
        };
        let cert = params.signed_by(&key, issuer).unwrap();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key.into())
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }
}

/// An origin that speaks TLS: what it saw of each request, and how many connections it had.
pub(super) struct TlsOrigin {
    pub(super) port: u16,
    pub(super) seen: Arc<Mutex<Vec<String>>>,
    pub(super) connections: Arc<AtomicUsize>,
}

impl TlsOrigin {
    pub(super) async fn serve(bench: &Bench, world: &World, proof: Proof, alpn: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        bench.open(port);
        let acceptor = world.acceptor(proof, alpn);
        let origin = Self {
            port,
            seen: Arc::default(),
            connections: Arc::default(),
        };
        let (seen, connections) = (Arc::clone(&origin.seen), Arc::clone(&origin.connections));
        drop(tasks::spawn("origin", async move {
            while let Ok((stream, _)) = listener.accept().await {
                connections.fetch_add(1, Ordering::SeqCst);
                let (acceptor, seen) = (acceptor.clone(), Arc::clone(&seen));
                drop(tasks::spawn("origin", async move {
                    let Ok(tls) = acceptor.accept(stream).await else {
                        return;
                    };
                    let is_h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
                    let service = service_fn(move |request| answer(request, Arc::clone(&seen)));
                    if is_h2 {
                        let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                        drop(Box::pin(http2.serve_connection(TokioIo::new(tls), service)).await);
                    } else {
                        let mut http1 = hyper::server::conn::http1::Builder::new();
                        http1.half_close(true);
                        drop(http1.serve_connection(TokioIo::new(tls), service).await);
                    }
                }));
            }
        }));
        origin
    }

    pub(super) fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

/// Tells what it saw; `/grpc` answers as gRPC does, and `/close` closes behind the answer.
async fn answer(
    request: Request<Incoming>,
    seen: Arc<Mutex<Vec<String>>>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes);
    let host = parts
        .headers
        .get("host")
        .map(|host| host.to_str().unwrap().to_owned());
    let host = host.or_else(|| parts.uri.authority().map(ToString::to_string));
    let version = if parts.version == Version::HTTP_2 { 2 } else { 1 };
    let via = if parts.headers.contains_key("via") {
        " via"
    } else {
        ""
    };
    let text = format!(
        "{version} {} {} {}{via} {}",
        parts.method,
        parts.uri.path_and_query().map_or("", |path| path.as_str()),
        host.unwrap_or_default(),
        String::from_utf8_lossy(&body.unwrap_or_default()),
    );
    let given = parts.headers.get_all("authorization").iter();
    let given: Vec<&str> = given.map(|value| value.to_str().unwrap()).collect();
    let text = if given.is_empty() {
        text
    } else {
        format!("{text}given {given:?}")
    };
    seen.lock().unwrap().push(text.trim_end().to_owned());
    let mut response = if parts.uri.path() == "/grpc" {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        trailers.insert("grpc-message", HeaderValue::from_static("whole"));
        let frames = [Frame::data(Bytes::from("reply")), Frame::trailers(trailers)];
        let frames = tokio_stream::iter(frames.map(Ok::<_, Infallible>));
        Response::new(StreamBody::new(frames).boxed())
    } else {
        Response::new(Full::new(Bytes::from(text)).boxed())
    };
    if parts.uri.path() == "/close" {
        response
            .headers_mut()
            .insert("connection", HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// A node's CA in a folder, put in force on a bench.
pub(super) struct Inspected {
    pub(super) dir: tempfile::TempDir,
    pub(super) world: World,
}

impl Inspected {
    pub(super) fn new(bench: &Bench) -> Self {
        let inspected = Self {
            dir: tempfile::tempdir().unwrap(),
            world: World::new(),
        };
        let now = Clock::host().wall();
        let ca = inspected.ca();
        ca.init(None, crate::random::bytes(), now).unwrap();
        ca.issue_node(None, "bench", false, crate::random::bytes(), now)
            .unwrap();
        inspected.load(bench);
        inspected
    }

    pub(super) fn ca(&self) -> Dir {
        Dir::new(self.dir.path().to_owned())
    }

    /// As a start and a reload do.
    pub(super) fn load(&self, bench: &Bench) {
        let clock = Clock::host();
        let node = self.ca().open(clock.wall()).unwrap().unwrap();
        let interception = Interception::new(node, vec![self.world.root()], clock).unwrap();
        bench.egress.set_interception(Some(interception));
    }

    /// What a guest of a template trusts that was built now.
    pub(super) fn trust(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        for root in self.ca().bundle().unwrap().roots() {
            roots.add(root.der().clone()).unwrap();
        }
        roots
    }
}

/// A TLS client of a guest.
pub(super) async fn client(
    io: DuplexStream,
    roots: RootCertStore,
    name: &str,
    sni: bool,
    alpn: &[&str],
) -> std::io::Result<Box<TlsStream<DuplexStream>>> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.enable_sni = sni;
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let connecting = Box::pin(TlsConnector::from(Arc::new(config)).connect(name, io));
    within(connecting).await.map(Box::new)
}
