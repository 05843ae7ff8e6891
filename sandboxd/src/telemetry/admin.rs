//! The listener for operators: `/metrics`, `/healthz`, `/readyz`, on a thread and a runtime of its own, so that it
//! answers when everything else is stuck.

use std::{
    convert::Infallible,
    io,
    net::{SocketAddr, TcpListener as StdListener},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::timeout,
};

use super::metrics::Metrics;
use crate::tasks;

/// Connections at once. A scraper or two and some probes; more wait in the kernel's queue.
const CONNECTIONS: usize = 16;
/// How long one connection may take, from accepted to answered.
const TIME: Duration = Duration::from_secs(10);

/// Where the daemon is in its life. It only ever moves forward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Claims are being taken up.
    #[default]
    Starting,
    /// Claims are taken.
    Ready,
    /// The journal failed: changes are refused, endings still work.
    JournalFailed,
    /// It stops.
    Draining,
}

impl Phase {
    /// The text that `/readyz` gives.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::JournalFailed => "journal failed",
            Self::Draining => "draining",
        }
    }
}

/// Whether claims are taken; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<watch::Sender<Phase>>);

impl Readiness {
    /// A daemon that starts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves on; a step back is none.
    pub fn advance(&self, to: Phase) {
        self.0.send_if_modified(|phase| {
            let moved = to > *phase;
            *phase = to.max(*phase);
            moved
        });
    }

    /// Where it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// News of changes (for the health service).
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.0.subscribe()
    }
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address cannot be had.
    #[error("cannot listen on {addr} for metrics")]
    Bind {
        /// `listen.metrics`.
        addr: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No thread or runtime.
    #[error("cannot start the metrics listener's thread")]
    Start(#[source] io::Error),
}

/// The listener. Dropping it leaves it running; [`stop`](Self::stop) ends it.
#[derive(Debug)]
pub struct Admin {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shown {
    metrics: Arc<Metrics>,
    readiness: Readiness,
}

impl Admin {
    /// Listens. Port 0 takes any free one; see [`addr`](Self::addr).
    ///
    /// # Errors
    /// The address cannot be had, or no thread.
    pub fn start(addr: SocketAddr, metrics: Arc<Metrics>, readiness: Readiness) -> Result<Self, AdminError> {
        let bind = |source| AdminError::Bind { addr, source };
        let listener = StdListener::bind(addr).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(AdminError::Start)?;
        let (stop, stopped) = watch::channel(false);
        let shown = Arc::new(Shown { metrics, readiness });
        let thread = tasks::thread("admin", move || runtime.block_on(serve(listener, shown, stopped)))
            .map_err(AdminError::Start)?;
        Ok(Self { addr, stop, thread })
    }

    /// Where it listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Ends it at once and joins its thread. Blocks for as long as an answer is being written.
    pub fn stop(self) {
        self.stop.send_replace(true);
        // A panic of it is in the log already.
        drop(self.thread.join());
    }
}

async fn serve(listener: StdListener, shown: Arc<Shown>, mut stop: watch::Receiver<bool>) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(fault) => {
            tracing::error!(error = %fault, "the metrics listener cannot start");
            return;
        }
    };
    let connections = tasks::Group::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let accepting = async {
        loop {
            let place = Arc::clone(&places).acquire_owned().await;
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(fault) => {
                    tracing::warn!(error = %fault, "the metrics listener cannot accept");
                    // Out of descriptors: accepting again at once would spin until one is free.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let shown = Arc::clone(&shown);
            connections.spawn("admin connection", async move {
                // Whoever is too slow, or goes, is none of our business.
                drop(timeout(TIME, answer(stream, shown)).await);
                drop(place);
            });
        }
    };
    // An error is a stopper that is gone, which asks for the same.
    tokio::select! {
        () = accepting => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    // What is open ends with the runtime: an answer is one write.
}

async fn answer(stream: TcpStream, shown: Arc<Shown>) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let reply = reply(request.method(), request.uri().path(), &shown);
        async move { Ok::<_, Infallible>(reply) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(TIME)
        .max_buf_size(16 * 1024)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

const TEXT: &str = "text/plain; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

fn reply(method: &Method, path: &str, shown: &Shown) -> Response<Full<Bytes>> {
    let phase = shown.readiness.phase();
    let (status, kind, body) = match (method, path) {
        (&Method::GET | &Method::HEAD, "/metrics") => (StatusCode::OK, OPEN_METRICS, shown.metrics.render()),
        // Alive: this thread answers. Whether claims are taken is another question.
        (&Method::GET | &Method::HEAD, "/healthz") => (StatusCode::OK, TEXT, format!("{}\n", phase.as_str())),
        (&Method::GET | &Method::HEAD, "/readyz") => {
            let status = if phase == Phase::Ready {
                StatusCode::OK
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            };
            (status, TEXT, format!("{}\n", phase.as_str()))
        }
        (_, "/metrics" | "/healthz" | "/readyz") => {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, "GET only\n".to_owned())
        }
        _ => (
            StatusCode::NOT_FOUND,
            TEXT,
            "see /metrics, /healthz, /readyz\n".to_owned(),
        ),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpStream,
    };

    use super::*;

    fn ask(addr: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(addr: SocketAddr, path: &str) -> String {
        ask(addr, &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"))
    }

    #[test]
    fn it_shows_metrics_and_phases_and_stops() {
        let readiness = Readiness::new();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let admin = Admin::start(any, Arc::new(Metrics::new()), readiness.clone()).unwrap();
        let addr = admin.addr();
        assert!(get(addr, "/readyz").starts_with("HTTP/1.1 503"));
        readiness.advance(Phase::Ready);
        assert!(get(addr, "/readyz").starts_with("HTTP/1.1 200"));
        let metrics = get(addr, "/metrics");
        assert!(metrics.contains(OPEN_METRICS) && metrics.contains("sandboxd_ending_stuck 0"));
        assert!(get(addr, "/nothing").starts_with("HTTP/1.1 404"));
        assert!(
            ask(
                addr,
                "POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            )
            .contains("405")
        );
        readiness.advance(Phase::Draining);
        readiness.advance(Phase::Ready);
        let answer = get(addr, "/readyz");
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("draining\n"));
        assert!(get(addr, "/healthz").starts_with("HTTP/1.1 200"));

        let busy = Admin::start(addr, Arc::new(Metrics::new()), readiness);
        assert!(matches!(busy, Err(AdminError::Bind { .. })));
        // An idle connection does not hold the stop up.
        let idle = TcpStream::connect(addr).unwrap();
        admin.stop();
        drop(idle);
        assert!(TcpStream::connect(addr).is_err());
    }
}
