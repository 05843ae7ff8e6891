//! The origin's side: dialled by the one way, verified, and spoken to in what it chose.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use http::{Request, Response, header};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls_pki_types::ServerName;
use sandbox_protocol::door::DoorReason;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    Interception,
    hello::{H2, HTTP_1},
    serve::Streams,
};
use crate::{
    egress::{
        Denial, Reached, Visit,
        door::{HEAD_TIME, TUNNEL, body::Body, guard::FIELDS},
    },
    policy::{Authority, Host, Seen},
};

/// Longest list of fields of an answer in HTTP/2, as long as a head in HTTP/1.
const FIELDS_MOST: u32 = 64 * 1024;
/// What an origin may send ahead of its reader: of one answer, and of a connection.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// How an origin that proved itself is spoken to.
pub(super) type Tls = TlsStream<TcpStream>;

/// An origin that proved itself.
pub(super) struct Origin(Reached<Tls>);

impl Origin {
    /// What it chose.
    pub(super) fn alpn(&self) -> Option<&'static [u8]> {
        let (_, tls) = self.0.stream.get_ref();
        match tls.alpn_protocol() {
            Some(H2) => Some(H2),
            Some(HTTP_1) => Some(HTTP_1),
            Some(_) | None => None,
        }
    }
}

/// Dials and verifies; the client's `alpn` is offered.
pub(super) async fn dial(
    visit: &Visit,
    means: &Interception,
    target: &Authority,
    alpn: Vec<Vec<u8>>,
) -> Result<Origin, Denial> {
    let refuse = |reason| visit.refuse(reason, &target.to_string());
    let name = match target.host() {
        Host::Name(name) => {
            ServerName::try_from(name.clone()).map_err(|_no_name| refuse(DoorReason::UpstreamTls))?
        }
        Host::Address(address) => ServerName::IpAddress((*address).into()),
    };
    let reached = Box::pin(visit.reach(target, Seen::Tunnel)).await?;
    let place = reached.by(());
    let mut config = means.client.clone();
    config.alpn_protocols = alpn;
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, reached.stream);
    match timeout(HEAD_TIME, connecting).await {
        Ok(Ok(tls)) => Ok(Origin(place.by(tls))),
        Ok(Err(error)) => {
            tracing::debug!(%error, %target, "an origin did not prove itself");
            Err(refuse(DoorReason::UpstreamTls))
        }
        Err(_elapsed) => Err(refuse(DoorReason::DialTimeout)),
    }
}

/// Moves an origin's connection; over when that is.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Requests to an origin.
pub(super) struct Requests {
    sender: Sender,
    place: Reached<()>,
}

enum Sender {
    /// One request at a time; away while one is asked, and not there again once the connection is lost.
    Http1(Mutex<Http1>),
    Http2(http2::SendRequest<Body>),
}

#[derive(Default)]
struct Http1 {
    sender: Option<http1::SendRequest<Body>>,
    has_answered: bool,
    /// It was asked to speak something else from here on, which is the last that it is asked.
    is_leaving: bool,
}

/// Why there is no answer.
pub(super) enum NoAnswer {
    /// The origin had closed a kept connection before any of the request went out. Whoever asked may ask again.
    Unsent,
    /// What it said is no HTTP, or it broke off.
    Broken,
    /// It took too long.
    Late,
}

impl Requests {
    /// Begins to speak HTTP; the driver has to be polled for anything to move.
    pub(super) async fn begin(origin: Origin, streams: &Streams) -> Result<(Self, Driver), hyper::Error> {
        let is_h2 = origin.alpn() == Some(H2);
        let place = origin.0.by(());
        let io = TokioIo::new(origin.0.stream);
        if is_h2 {
            let mut http2 = http2::Builder::new(streams.clone());
            http2
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_header_list_size(FIELDS_MOST);
            let (sender, connection) = Box::pin(http2.handshake(io)).await?;
            let sender = Sender::Http2(sender);
            return Ok((Self { sender, place }, driver(connection)));
        }
        let (sender, connection) = http1::Builder::new().max_headers(FIELDS).handshake(io).await?;
        let sender = Sender::Http1(Mutex::new(Http1 {
            sender: Some(sender),
            ..Http1::default()
        }));
        Ok((Self { sender, place }, driver(connection.with_upgrades())))
    }

    /// Where they go.
    pub(super) const fn place(&self) -> &Reached<()> {
        &self.place
    }

    /// Whether the end of the origin's HTTP is no loss: it was asked to speak something else.
    pub(super) fn is_leaving(&self) -> bool {
        match &self.sender {
            Sender::Http1(one) => locked(one).is_leaving,
            Sender::Http2(_) => false,
        }
    }

    /// Whether they are of HTTP/2.
    pub(super) const fn is_h2(&self) -> bool {
        matches!(self.sender, Sender::Http2(_))
    }

    /// Sends one and waits for its answer. A request may take long to be sent; one whose body rests is given up by it.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, NoAnswer> {
        let answered = timeout(TUNNEL, Box::pin(self.ask(request))).await;
        answered.unwrap_or(Err(NoAnswer::Late))
    }

    async fn ask(&self, request: Request<Body>) -> Result<Response<Incoming>, NoAnswer> {
        let one = match &self.sender {
            Sender::Http1(one) => one,
            Sender::Http2(sender) => {
                let mut sender = sender.clone();
                sender.ready().await.map_err(|_closed| NoAnswer::Unsent)?;
                return sender
                    .send_request(request)
                    .await
                    .map_err(|_error| NoAnswer::Broken);
            }
        };
        let (sender, has_answered) = {
            let mut one = locked(one);
            one.is_leaving = request.headers().contains_key(header::UPGRADE);
            (one.sender.take(), one.has_answered)
        };
        // Where none was answered yet, that it closed is its answer.
        let closed = || {
            if has_answered {
                NoAnswer::Unsent
            } else {
                NoAnswer::Broken
            }
        };
        let mut sender = sender.ok_or_else(closed)?;
        sender.ready().await.map_err(|_closed| closed())?;
        let answered = sender.try_send_request(request).await;
        let response = answered.map_err(|mut error| match error.take_message() {
            Some(_unsent) => closed(),
            None => NoAnswer::Broken,
        })?;
        let mut one = locked(one);
        one.sender = Some(sender);
        one.has_answered = true;
        Ok(response)
    }
}

fn locked(one: &Mutex<Http1>) -> MutexGuard<'_, Http1> {
    // Every change of it is whole.
    one.lock().unwrap_or_else(PoisonError::into_inner)
}

fn driver<C>(connection: C) -> Driver
where
    C: Future<Output = hyper::Result<()>> + Send + 'static,
{
    Box::pin(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to an origin ended");
        }
    })
}
