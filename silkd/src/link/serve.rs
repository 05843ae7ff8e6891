//! The loop of one port: BREAK, HELLO, a connection, and again.
//!
//! May call: door, events, link/*, server, tasks.
//! Never inside: a meaning of what is served.

use std::{
    future::{Future, poll_fn},
    io,
    os::fd::OwnedFd,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
};

use hyper::server::conn::http2;
use sandbox_protocol::{
    limits::{GUEST_CONNECTION_WINDOW, HEADER_LIST, LINK_FRAME, LINK_STREAMS, SEND_BUFFER, STREAM_WINDOW},
    link::{Nonce, encode_hello},
};
use tokio::net::UnixListener;

use super::{
    Link, Serves, Source,
    port::Port,
    wire::{Ended, Ends, Wire},
};
use crate::{door::Doors, server::Server, tasks::Group};

impl Link {
    /// Serves until stopped, or until the port itself fails.
    pub async fn run(mut self) {
        let mut next = None;
        while !*self.stop.borrow() {
            let file = match (next.take(), &self.source) {
                (Some(file), _) => file,
                (None, Source::Device(file)) => match file.try_clone() {
                    Ok(file) => file,
                    Err(error) => return self.failed(&error),
                },
                (None, Source::Listener(listener)) => {
                    let mut stop = self.stop.clone();
                    tokio::select! {
                        file = accept(listener) => match file {
                            Ok(file) => file,
                            Err(error) => return self.failed(&error),
                        },
                        _stopped = stop.wait_for(|stop| *stop) => return,
                    }
                }
            };
            let streams = Group::new();
            let outcome = tokio::select! {
                ended = self.one_port(file, &streams) => ended.map(|()| None),
                file = replacement(&self.source) => file.map(Some),
            };
            streams.stop().await;
            match (outcome, &self.source) {
                (Ok(file), Source::Listener(_)) => next = file,
                // A host that is gone is one port's end here; on a device only a failure is.
                (Err(error), Source::Listener(_)) if is_gone(&error) => {}
                (Ok(_), Source::Device(_)) => return,
                (Err(error), Source::Device(_) | Source::Listener(_)) => return self.failed(&error),
            }
        }
    }

    fn failed(&mut self, error: &io::Error) {
        self.events.log(&format!("port {} failed: {error}", self.name));
    }

    /// Connection after connection on one port, until it ends (a socket), fails, or the link is stopped.
    async fn one_port(&self, file: OwnedFd, streams: &Group) -> io::Result<()> {
        let ends = Ends(Arc::new(Mutex::new(Wire::new(Port::new(file)?))));
        let mut stop = self.stop.clone();
        let mut begun = None;
        loop {
            let nonce = match begun.take() {
                Some(nonce) => nonce,
                None => tokio::select! {
                    seen = poll_fn(|cx| ends.wire().poll_break(cx)) => match (seen?, &self.source) {
                        (Some(nonce), _) => nonce,
                        (None, Source::Device(_)) => continue,
                        (None, Source::Listener(_)) => return Ok(()),
                    },
                    _stopped = stop.wait_for(|stop| *stop) => return Ok(()),
                },
            };
            self.greet(&ends, nonce).await?;
            let ended = match &self.serves {
                Serves::Calls(server) => self.connection(&ends, server, streams).await,
                Serves::Doors(doors) => Box::pin(self.doors(&ends, doors)).await,
            };
            // Whoever held something of the old connection has let go before the new one is answered.
            streams.stop().await;
            match (ended, &self.source) {
                (Some(Ended::Break(nonce)), _) => begun = Some(nonce),
                (Some(Ended::End), Source::Device(_)) | (None, _) => {}
                (Some(Ended::End), Source::Listener(_)) => return Ok(()),
                (Some(Ended::Failed(error)), _) => return Err(error),
            }
        }
    }

    /// Answers a BREAK. A host that does not read holds this up, and nothing else: it has nothing else to ask for.
    async fn greet(&self, ends: &Ends, nonce: Nonce) -> io::Result<()> {
        let hello = encode_hello(nonce, &(self.hello)()).map_err(io::Error::other)?;
        let mut rest = hello.as_slice();
        while !rest.is_empty() {
            let n = poll_fn(|cx| ends.wire().poll_write(cx, rest)).await?;
            rest = rest.get(n..).unwrap_or_default();
        }
        Ok(())
    }

    /// One HTTP/2 connection. `None`: it ended by itself (a breach of the protocol, or a stop); the port goes on.
    async fn connection(&self, ends: &Ends, server: &Server, streams: &Group) -> Option<Ended> {
        let connection = http2::Builder::new(Spawner(streams.clone()))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(GUEST_CONNECTION_WINDOW)
            .max_frame_size(LINK_FRAME)
            .max_concurrent_streams(LINK_STREAMS)
            .max_header_list_size(HEADER_LIST)
            .max_send_buf_size(SEND_BUFFER)
            .auto_date_header(false)
            // The host may cancel as many calls at once as it may have, and its bytes may cross the end of a call as
            // often as calls end early: neither is an attack, and the link lives as long as the guest.
            .max_pending_accept_reset_streams(usize::try_from(LINK_STREAMS).ok())
            .max_local_error_reset_streams(None)
            .serve_connection(ends.clone(), server.clone());
        let mut connection = pin!(connection);
        let mut stop = self.stop.clone();
        let mut stopped = pin!(stop.wait_for(|stop| *stop));
        let mut stopping = false;
        let outcome = poll_fn(|cx| {
            if !stopping && stopped.as_mut().poll(cx).is_ready() {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            let done = connection.as_mut().poll(cx);
            match ends.wire().take_ended() {
                Some(ended) => Poll::Ready(Some(ended)),
                // A breach of the protocol was told to the host, in GOAWAY. The zeros of a BREAK are one as well.
                None => done.map(|_outcome| None),
            }
        });
        outcome.await
    }
}

impl Link {
    /// One HTTP/2 connection for the doors. `None` as for [`connection`](Self::connection).
    async fn doors(&self, ends: &Ends, doors: &Doors) -> Option<Ended> {
        let mut serving = pin!(doors.serve(ends.clone()));
        let mut stop = self.stop.clone();
        let mut stopped = pin!(stop.wait_for(|stop| *stop));
        poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            let done = serving.as_mut().poll(cx);
            match ends.wire().take_ended() {
                Some(ended) => Poll::Ready(Some(ended)),
                None => done.map(|()| None),
            }
        })
        .await
    }
}

async fn accept(listener: &UnixListener) -> io::Result<OwnedFd> {
    let (stream, _peer) = listener.accept().await?;
    // Still non-blocking: that is how the runtime made it.
    Ok(stream.into_std()?.into())
}

/// The connection that replaces the one in force; on a device there is none.
async fn replacement(source: &Source) -> io::Result<OwnedFd> {
    match source {
        Source::Device(_) => std::future::pending().await,
        Source::Listener(listener) => accept(listener).await,
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// hyper's streams as tasks of the connection's group.
#[derive(Debug, Clone)]
struct Spawner(Group);

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}
