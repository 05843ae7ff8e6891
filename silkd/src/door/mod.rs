//! The guest's ends of its doors: listeners on loopback, of which each connection becomes a stream to the host, or on lane
//! guarded a connection to it.
//!
//! END_STREAM is shutdown(WR) and a reset is a reset, both ways. Without a way to the host a program gets an answer
//! that says so, at once.
//!
//! May call: tasks.
//! Never inside: a policy, a look at what is said.
//! Cancel safety: dropping [`Doors::serve`] ends the connection to the host, and every relay over it is reset; dropping
//! [`Doors::listen`] resets all relays.

mod listeners;
mod places;
mod probe;
mod relay;

use std::{io, sync::Arc};

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use sandbox_protocol::{
    limits::{EGRESS_CONNECTION_WINDOW, EGRESS_STREAMS, HEADER_LIST, LINK_FRAME, SEND_BUFFER, STREAM_WINDOW},
    metadata::door,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
};

pub use self::{
    listeners::Listeners,
    probe::{Probe, Said},
};
use self::{
    places::{Place, Places},
    relay::{Kind, To},
};
use crate::tasks::Group;

/// Streams that were reset and may still be spoken of.
const RESETS: usize = EGRESS_STREAMS as usize;

/// The way to the host, while there is one; a handle.
#[derive(Debug, Clone, Default)]
pub struct Doors(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    way: watch::Sender<Option<SendRequest<Bytes>>>,
    /// Connections of programs, both doors together.
    places: Places,
}

impl Doors {
    /// Serves one connection to the host, whose server it is, until it ends. Relays go over it meanwhile.
    pub async fn serve<T>(&self, io: T)
    where
        T: AsyncRead + AsyncWrite + Unpin,
    {
        let opened = Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(EGRESS_CONNECTION_WINDOW)
            .max_frame_size(LINK_FRAME)
            .max_header_list_size(HEADER_LIST)
            .max_send_buffer_size(SEND_BUFFER)
            .max_concurrent_reset_streams(RESETS)
            .enable_push(false)
            .handshake::<_, Bytes>(io)
            .await;
        // A host that speaks no HTTP/2 has made itself heard by that.
        let Ok((send, connection)) = opened else { return };
        let _up = Up::new(self, send);
        // How it ended is the wire's to say.
        drop(connection.await);
    }

    /// The way to the host now.
    fn way(&self) -> Option<SendRequest<Bytes>> {
        self.0.way.borrow().clone()
    }

    /// A place for one more connection, once there is one. Cancel safe.
    async fn place(&self) -> Place {
        self.0.places.take().await
    }

    /// Resolves once there is a way to the host. Cancel safe.
    async fn linked(&self) {
        let mut way = self.0.way.subscribe();
        // The sender is ours.
        way.wait_for(Option::is_some).await.ok();
    }

    /// Relays connections of programs for ever.
    ///
    /// # Errors
    /// The kernel's, when the listeners cannot be watched.
    pub fn listen(self, listeners: Listeners) -> io::Result<impl Future<Output = ()> + Send + 'static> {
        let http = tokio::net::TcpListener::from_std(listeners.http.0)?;
        let socks5 = tokio::net::TcpListener::from_std(listeners.socks5.0)?;
        let relays = Group::new();
        let [to_http, to_socks5] = match listeners.by_card {
            Some(both) => both.map(To::Card),
            None => [To::Link; 2],
        };
        Ok(async move {
            tokio::join!(
                relay::accept(&http, (Kind::Http, to_http), &self, &relays),
                relay::accept(&socks5, (Kind::Socks5, to_socks5), &self, &relays)
            );
        })
    }
}

/// The way is there for as long as this lives.
struct Up<'a>(&'a Doors);

impl<'a> Up<'a> {
    fn new(doors: &'a Doors, send: SendRequest<Bytes>) -> Self {
        doors.0.way.send_replace(Some(send));
        Self(doors)
    }
}

impl Drop for Up<'_> {
    fn drop(&mut self) {
        self.0.0.way.send_replace(None);
    }
}

impl Kind {
    const fn authority(self) -> &'static str {
        match self {
            Self::Http => door::HTTP,
            Self::Socks5 => door::SOCKS5,
        }
    }
}

#[cfg(test)]
mod tests;
