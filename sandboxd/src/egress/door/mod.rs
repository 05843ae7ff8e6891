//! What a guest's connection meets: who serves it, how it is refused, how it ends.

mod body;
pub mod dns;
mod gate;
pub mod guard;
mod http;
pub mod intercept;
mod keep;
mod link;
mod meter;
mod onward;
mod proof;
mod say;
pub mod socks5;
mod splice;
mod stream;
mod taken;
mod tap;
#[cfg(test)]
mod tests;
mod tunnel;
mod upload;
mod upstream;
mod websocket;

use std::{sync::Arc, time::Duration};

use tokio::io::{AsyncRead, AsyncWrite};

pub use self::link::{LinkOver, serve_link};
use self::meter::Metered;
pub(super) use self::meter::Traffic;
pub use self::proof::{Proof, Unproved};
use self::say::{farewell, last_word, say};
pub(super) use self::splice::Pipes;
pub(super) use self::upstream::{Kept, Upstream};
pub(super) use super::Visit;
use super::{Armed, Denial, Door, DoorKind, Seat};

/// A request's head, or a SOCKS5 handshake, from its first byte.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// From one request to the next on a kept connection.
const IDLE: Duration = Duration::from_secs(60);
/// A body that does not move, to either side, and an answer that is not taken.
const BODY: Duration = Duration::from_secs(5 * 60);
/// A tunnel in which nothing moves.
const TUNNEL: Duration = Duration::from_secs(60 * 60);
/// What a client may still send after it was told that it is over.
const FAREWELL: Duration = Duration::from_secs(5);

/// A connection as it was accepted: what the door was armed with then, and its place.
#[derive(Debug)]
pub struct Accepted {
    door: Door,
    kind: DoorKind,
    armed: Option<Arc<Armed>>,
    seat: Option<Seat>,
}

impl Accepted {
    /// Right after a connection was accepted: what is in force in this moment holds for it, whatever comes later.
    #[must_use]
    pub fn new(door: &Door, kind: DoorKind) -> Self {
        Self {
            armed: door.armed(),
            seat: door.seat(kind),
            door: door.clone(),
            kind,
        }
    }

    /// Serves it to its end: the claim's end cuts it, and so does [`Door::stop`].
    pub async fn serve<T>(self, io: T)
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Self {
            door,
            kind,
            armed,
            seat,
        } = self;
        let group = door.group().clone();
        let served = async {
            match (armed, seat) {
                // Nothing of it is parsed.
                (None, _) => canned(io, kind, door.turn_away(kind, None)).await,
                (Some(armed), None) => canned(io, kind, door.turn_away(kind, Some(&armed))).await,
                (Some(armed), Some(seat)) => {
                    let bytes = door.egress().decisions().metrics().bytes(door.lane());
                    let visit = Visit::new(door, kind, Arc::clone(&armed), seat);
                    let io = Metered::new(io, Arc::clone(visit.traffic()), bytes);
                    tokio::select! {
                        biased;
                        () = armed.cut.cancelled() => {}
                        () = visited(visit, io) => {}
                    }
                }
            }
        };
        tokio::select! {
            biased;
            () = group.stopping() => {}
            () = Box::pin(served) => {}
        }
    }
}

async fn visited<T>(visit: Visit, io: T)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    match visit.kind() {
        DoorKind::Http => Box::pin(http::serve(visit, io)).await,
        DoorKind::Socks5 => Box::pin(socks5::serve(visit, io)).await,
        // Its questions are no connections, and are read by their own door.
        DoorKind::Dns => {}
    }
}

/// Answers without having read anything.
async fn canned<T>(io: T, kind: DoorKind, denial: Denial)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let answer = match kind {
        DoorKind::Http => denial.bytes(),
        DoorKind::Socks5 => socks5::NO_METHOD.to_vec(),
        DoorKind::Dns => Vec::new(),
    };
    last_word(io, &answer).await;
}
