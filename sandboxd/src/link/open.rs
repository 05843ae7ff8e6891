//! From a port to a link.

use std::sync::Arc;

use sandbox_protocol::link::{Nonce, negotiate};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Inner, Link, LinkError, Opened, Way, greet, keep, port::Port, signals::Signals};
use crate::{clock::Clock, tasks};

/// Opens a link over a guest's port: writes BREAK once and waits for the HELLO that answers it, however long that
/// takes (the caller sets the deadline), then starts HTTP/2. The nonce must be fresh.
///
/// # Errors
/// [`LinkError::Port`], [`LinkError::Hello`], [`LinkError::NoCommonProto`], [`LinkError::Preface`].
///
/// Cancel safe: the port is dropped.
pub async fn open<T>(io: T, nonce: Nonce, clock: Clock) -> Result<Opened, LinkError>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (hello, io) = greet(io, nonce).await?;
    let proto = negotiate(&hello).ok_or(LinkError::NoCommonProto {
        min: hello.proto_min,
        max: hello.proto_max,
    })?;
    let signals = Arc::new(Signals::new(clock));
    let port = Port::new(io, Arc::clone(&signals));
    let (send, connection) = keep::settings()
        .handshake(port)
        .await
        .map_err(LinkError::Preface)?;
    // `Link::lost` is the join: it resolves when the task has ended, however that came.
    drop(tasks::spawn("link", keep::keep(connection, Arc::clone(&signals))));
    Ok(Opened {
        link: Link(Arc::new(Inner {
            way: Way::Kept(send),
            signals,
        })),
        hello,
        proto,
    })
}
