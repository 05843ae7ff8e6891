//! The link: one port, one HTTP/2 connection at a time, and the in-band boundary between them.
//!
//! A BREAK ends the connection in force: its streams are dropped and joined, its unsent output with them; then HELLO
//! answers and a new connection begins. The end of a port's bytes means that the host is gone: the connection ends and
//! the next BREAK is awaited. Nothing is inferred from the port itself.
//!
//! May call: door, events, link/port, link/wire, server, tasks.
//! Never inside: a meaning of what is served.
//! Invariant 15: no restored guest inherits a connection or its bytes. Invariant 16: frames, headers, streams and
//! windows have the limits of `protocol::limits`.
//! Cancel safety: dropping [`Link::run`] ends the connection and aborts its streams, without joining them.

pub mod port;
mod serve;
pub mod wire;

use std::os::fd::OwnedFd;

use sandbox_protocol::v1::LinkHello;
use tokio::{net::UnixListener, sync::watch};

use crate::{door::Doors, events::Events, server::Server};

/// Where a link's ports come from.
#[derive(Debug)]
pub enum Source {
    /// A virtio port, open for the guest's life.
    Device(OwnedFd),
    /// Test mode: each accepted connection is the port from then on, as a reconnected host would be.
    Listener(UnixListener),
}

/// What a link does between BREAKs.
#[derive(Debug, Clone)]
pub enum Serves {
    /// HTTP/2, the host being the client.
    Calls(Server),
    /// HTTP/2, the host being the server: connections of programs to their doors.
    Doors(Doors),
}

/// One port's loop.
pub struct Link {
    /// For messages.
    pub name: &'static str,
    /// Where its port comes from.
    pub source: Source,
    /// What it does.
    pub serves: Serves,
    /// What it says of itself, at the moment of asking.
    pub hello: Box<dyn Fn() -> LinkHello + Send + Sync>,
    /// True: let open calls end, take no more.
    pub stop: watch::Receiver<bool>,
    /// Where failures are told.
    pub events: Events,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("name", &self.name)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}
