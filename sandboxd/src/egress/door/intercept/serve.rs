//! The client's requests, in what its origin chose.

use std::{future::poll_fn, pin::Pin, sync::Arc, time::Duration};

use hyper::{
    rt::Executor,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
    time::timeout,
};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use super::{
    farewell,
    hello::H2,
    origin::{Driver, Origin, Requests},
    pass::{self, Inside},
};
use crate::{
    egress::{
        Denial, Visit,
        door::{
            FAREWELL, IDLE,
            gate::{Gate, Over},
            guard::FIELDS,
            http::BUFFER,
            last_word, taken,
            websocket::{self, Turnout},
        },
    },
    policy::{Authority, Seen},
    tasks::Group,
};

/// Requests of one client at once.
const STREAMS: u32 = 100;
/// Longest list of fields of a request, as long as a head in HTTP/1.
const FIELDS_MOST: u32 = 64 * 1024;
/// What a client may send ahead of its reader: of one request, and of a connection.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// Runs what HTTP/2 interleaves as tasks of the sandbox's doors.
#[derive(Clone)]
pub(super) struct Streams {
    group: Group,
    cut: CancellationToken,
}

impl Streams {
    /// Tasks that `cut` ends.
    pub(super) fn new(visit: &Visit, cut: CancellationToken) -> Self {
        let group = visit.door().group().clone();
        Self { group, cut }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let cut = self.cut.clone();
        self.group.spawn("door stream", async move {
            tokio::select! {
                biased;
                () = cut.cancelled() => {}
                () = taken::in_time(stream) => {}
            }
        });
    }
}

/// Counts a request that is under way.
pub(super) struct Busy(watch::Sender<usize>);

impl Busy {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// Serves a client's requests until it ends, or its origin does.
pub(super) async fn serve<T>(
    visit: &Arc<Visit>,
    tls: TlsStream<T>,
    origin: Result<Origin, Denial>,
    target: &Authority,
    streams: Streams,
) where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let is_h2 = tls.get_ref().1.alpn_protocol() == Some(H2);
    let (origin, driver) = match origin {
        Ok(origin) => match Box::pin(Requests::begin(origin, &streams)).await {
            Ok((requests, driver)) => (Ok(requests), driver),
            Err(error) => {
                tracing::debug!(%error, %target, "an origin speaks no HTTP");
                (
                    Err(visit.refuse(DoorReason::UpstreamProtocol, &target.to_string())),
                    never(),
                )
            }
        },
        Err(denial) => (Err(denial), never()),
    };
    let inside = Arc::new(Inside {
        visit: Arc::clone(visit),
        target: target.clone(),
        origin,
        turnout: Turnout::default(),
    });
    if is_h2 {
        Box::pin(h2(inside, tls, driver, streams)).await;
    } else {
        Box::pin(h1(inside, tls, driver)).await;
    }
}

fn never() -> Driver {
    Box::pin(std::future::pending())
}

async fn h1<T>(inside: Arc<Inside>, tls: TlsStream<T>, mut driver: Driver)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let count = watch::Sender::new(0);
    let serving = {
        let inside = Arc::clone(&inside);
        service_fn(move |request| {
            let (inside, busy) = (Arc::clone(&inside), Busy::new(&count));
            Box::pin(pass::answer(inside, request, busy))
        })
    };
    let mut connection = http1::Builder::new()
        // A client that has sent all it has still wants its answer.
        .half_close(true)
        .max_headers(FIELDS + 1)
        .max_buf_size(BUFFER)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(Gate::new(tls)), serving);
    let mut is_lost = false;
    let outcome = loop {
        tokio::select! {
            biased;
            outcome = poll_fn(|cx| connection.poll_without_shutdown(cx)) => break outcome,
            () = &mut driver, if !is_lost => {
                is_lost = true;
                // What it still said is passed on; then the client is told as it would have been without us.
                if !inside.is_leaving() {
                    Pin::new(&mut connection).graceful_shutdown();
                }
            }
        }
    };
    let (io, early, over) = connection.into_parts().io.into_inner().into_parts();
    let refused = match (outcome, over) {
        (Ok(()), Some(Over::Connect(_))) => DoorReason::BadTarget,
        (Ok(()), Some(Over::Bad(reason))) => reason,
        (Ok(()), Some(Over::Upgrade)) => {
            let Inside { visit, turnout, .. } = &*inside;
            let run = websocket::run(visit, io, &early, turnout, |method, path| Seen::Inside {
                method,
                path,
            });
            return Box::pin(run).await;
        }
        (Ok(()), Some(Over::End) | None) => return farewell(io).await,
        // Its answer was cut, or cannot be told any more: a reset says so.
        (Err(_broken), _) => return,
    };
    let denial = inside.visit.refuse(refused, &inside.target.to_string());
    last_word(io, &denial.bytes()).await;
}

async fn h2<T>(inside: Arc<Inside>, tls: TlsStream<T>, mut driver: Driver, streams: Streams)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let count = watch::Sender::new(0);
    let mut watched = count.subscribe();
    let serving = service_fn(move |request| {
        let (inside, busy) = (Arc::clone(&inside), Busy::new(&count));
        Box::pin(pass::answer(inside, request, busy))
    });
    let mut connection = http2::Builder::new(streams)
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(FIELDS_MOST)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .serve_connection(TokioIo::new(tls), serving);
    let (mut is_lost, mut is_told) = (false, false);
    loop {
        let rest = if is_told { FAREWELL } else { IDLE };
        tokio::select! {
            biased;
            ended = Pin::new(&mut connection) => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection of a guest ended");
                }
                return;
            }
            () = &mut driver, if !is_lost => is_lost = true,
            () = rests(&mut watched, rest) => {
                // It was told, and does not go.
                if is_told {
                    return;
                }
            }
        }
        if !is_told {
            is_told = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
    }
}

/// Resolves when no request was under way for so long.
async fn rests(count: &mut watch::Receiver<usize>, limit: Duration) {
    loop {
        if count.wait_for(|count| *count == 0).await.is_err() {
            return std::future::pending().await;
        }
        if timeout(limit, count.wait_for(|count| *count > 0)).await.is_err() {
            return;
        }
    }
}
