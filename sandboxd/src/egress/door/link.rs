//! The guest's connection for its doors: it is the HTTP/2 client, and each connection of its programs is a stream.

use std::fmt;

use bytes::Bytes;
use h2::{Reason, RecvStream, server};
use http::{Method, Request, Response};
use sandbox_protocol::{
    limits::{EGRESS_CONNECTION_WINDOW, EGRESS_STREAMS, HEADER_LIST, LINK_FRAME, SEND_BUFFER, STREAM_WINDOW},
    link::Nonce,
    metadata::door,
};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Accepted, stream::Stream};
use crate::{
    egress::{Door, DoorKind},
    link::{self, LinkError},
};

/// Streams that a guest may have reset before they were looked at, and resets of ours that are remembered.
const RESETS: usize = EGRESS_STREAMS as usize;
/// Streams that may be of no use, one after the other; the guest's agent opens none.
const USELESS: u32 = 64;

/// Why a link of doors ended.
#[derive(Debug)]
pub enum LinkOver {
    /// It could not be opened.
    Open(LinkError),
    /// HTTP/2 ended, or was breached.
    Http(Option<h2::Error>),
    /// The guest opens streams that no agent opens.
    Useless,
}

impl fmt::Display for LinkOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(error) => write!(f, "open: {}", crate::telemetry::chain(error)),
            Self::Http(Some(error)) => write!(f, "HTTP/2: {error}"),
            Self::Http(None) => f.write_str("the guest ended it"),
            Self::Useless => f.write_str("the guest opens streams of no use"),
        }
    }
}

/// Opens the link over the guest's port and serves it until it ends. Connections that were accepted go on by themselves
/// and lose their streams with it. Cancel safe: dropping it ends the link.
pub async fn serve_link<T>(door: &Door, io: T, nonce: Nonce) -> LinkOver
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let opened = match link::greet(io, nonce).await {
        Ok((_hello, io)) => Box::pin(settings().handshake::<_, Bytes>(io)).await,
        Err(error) => return LinkOver::Open(error),
    };
    let mut connection = match opened {
        Ok(connection) => connection,
        Err(error) => return LinkOver::Http(Some(error)),
    };
    let _linked = Linked::new(door);
    let mut useless = 0;
    loop {
        let (request, respond) = match connection.accept().await {
            Some(Ok(accepted)) => accepted,
            Some(Err(error)) => return LinkOver::Http(Some(error)),
            None => return LinkOver::Http(None),
        };
        match kind(&request) {
            Some(kind) => {
                useless = 0;
                accept(door, kind, request, respond);
            }
            None => {
                let mut respond = respond;
                respond.send_reset(Reason::REFUSED_STREAM);
                useless += 1;
                if useless > USELESS {
                    return LinkOver::Useless;
                }
            }
        }
    }
}

fn settings() -> server::Builder {
    let mut settings = server::Builder::new();
    settings
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(EGRESS_CONNECTION_WINDOW)
        .max_concurrent_streams(EGRESS_STREAMS)
        .max_frame_size(LINK_FRAME)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESETS)
        .max_pending_accept_reset_streams(RESETS);
    settings
}

/// The door that a stream is for.
fn kind(request: &Request<RecvStream>) -> Option<DoorKind> {
    if request.method() != Method::CONNECT {
        return None;
    }
    match request.uri().authority().map(http::uri::Authority::as_str) {
        Some(door::HTTP) => Some(DoorKind::Http),
        Some(door::SOCKS5) => Some(DoorKind::Socks5),
        Some(_) | None => None,
    }
}

/// Accepts a stream: what is in force in this moment holds for it.
fn accept(
    door: &Door,
    kind: DoorKind,
    request: Request<RecvStream>,
    mut respond: server::SendResponse<Bytes>,
) {
    let accepted = Accepted::new(door, kind);
    // It has been reset already, else.
    if let Ok(send) = respond.send_response(Response::new(()), false) {
        let stream = Stream::new(request.into_body(), send);
        door.group().spawn("door", accepted.serve(stream));
    }
}

/// The door shows that its link is up, for as long as this lives.
struct Linked<'a>(&'a Door);

impl<'a> Linked<'a> {
    fn new(door: &'a Door) -> Self {
        door.set_linked(true);
        Self(door)
    }
}

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        self.0.set_linked(false);
    }
}
