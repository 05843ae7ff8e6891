//! Bytes both ways, until both sides have ended, the policy forbids it, or nothing moves.

use std::{
    any::Any,
    future::poll_fn,
    io,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf},
    net::TcpStream,
    time::sleep,
};

use super::{
    Metered, TUNNEL, Visit,
    splice::{Pipes, Way},
    tap::{Guest, Through},
};
use crate::{egress::Reached, policy::Seen};

/// Bytes in flight in each direction, where they are copied.
pub(super) const BUFFER: usize = 16 * 1024;

/// Runs a tunnel, or what became of a request that was `seen`; `early` is what the client sent before it was answered.
/// Dropping it resets both sides.
pub(super) async fn run<T, O>(visit: &Visit, mut io: T, early: &[u8], reached: Reached<O>, seen: Seen<'_>)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    O: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let moved = AtomicU64::new(1);
    let Reached {
        mut stream, target, ..
    } = reached;
    let both = async {
        let sockets = (
            (&io as &dyn Any).downcast_ref::<Metered<Guest>>(),
            (&stream as &dyn Any).downcast_ref::<TcpStream>(),
        );
        match sockets {
            (Some(guest), Some(origin)) => {
                let pipes = visit.door().egress().pipes();
                Box::pin(splice(guest, origin, early, &moved, pipes)).await
            }
            (_, _) => Box::pin(copy(&mut io, &mut stream, early, &moved)).await,
        }
    };
    let mut changes = visit.door().changes();
    let forbidden = async {
        // A policy that changed between the decision and this moment counts too.
        while visit.still(&target, seen).is_ok() {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        biased;
        () = forbidden => {}
        // One side's loss is the other's: both are dropped, which resets them.
        _ = Box::pin(both) => {}
        () = stalled(&moved, TUNNEL) => {}
    }
}

/// Both directions between two sockets, which the kernel moves once they say much.
async fn splice(
    guest: &Metered<Guest>,
    origin: &TcpStream,
    early: &[u8],
    moved: &AtomicU64,
    pipes: &Pipes,
) -> io::Result<()> {
    let socket = guest.inner().socket();
    let outwards = Way {
        from: socket,
        to: origin,
        has_read: |n| guest.sent(n),
        has_written: |_n| {},
        moved,
    };
    let inwards = Way {
        from: origin,
        to: socket,
        has_read: |_n| {},
        has_written: |n| guest.received(n),
        moved,
    };
    let inwards = async {
        inwards.pump(&[], pipes).await?;
        let mut through = Through::new();
        poll_fn(|cx| through.poll(socket, cx)).await
    };
    tokio::try_join!(outwards.pump(early, pipes), inwards).map(|((), ())| ())
}

/// Both directions between whatever carries bytes.
async fn copy<T, O>(io: &mut T, origin: &mut O, early: &[u8], moved: &AtomicU64) -> io::Result<()>
where
    T: AsyncRead + AsyncWrite + Send + Unpin,
    O: AsyncRead + AsyncWrite + Send + Unpin,
{
    let (from_client, to_client) = tokio::io::split(io);
    let (from_origin, to_origin) = tokio::io::split(origin);
    let outwards = pump(early, from_client, to_origin, moved);
    let inwards = pump(&[], from_origin, to_client, moved);
    tokio::try_join!(outwards, inwards).map(|((), ())| ())
}

/// One direction: its end is passed on as an end.
async fn pump<R, W>(
    early: &[u8],
    mut from: ReadHalf<R>,
    mut to: WriteHalf<W>,
    moved: &AtomicU64,
) -> io::Result<()>
where
    R: AsyncRead,
    W: AsyncWrite,
{
    to.write_all(early).await?;
    to.flush().await?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = from.read(&mut buffer).await?;
        if n == 0 {
            return to.shutdown().await;
        }
        to.write_all(buffer.get(..n).unwrap_or_default()).await?;
        // TLS takes more than it has sent, and what comes next may wait for this.
        to.flush().await?;
        moved.fetch_add(1, Ordering::Relaxed);
    }
}

/// Resolves when nothing has moved for as long as it may rest, or a little later. 0: it has not begun.
pub(super) async fn stalled(moved: &AtomicU64, limit: Duration) {
    loop {
        let before = moved.load(Ordering::Relaxed);
        sleep(limit).await;
        if before > 0 && moved.load(Ordering::Relaxed) == before {
            return;
        }
    }
}
