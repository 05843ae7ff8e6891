//! Bytes both ways, until both sides have ended, the policy forbids it, or nothing moves.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf},
    time::sleep,
};

use super::{TUNNEL, Visit};
use crate::{egress::Reached, policy::Seen};

/// Bytes in flight in each direction.
const BUFFER: usize = 16 * 1024;

/// Runs a tunnel, or what became of a request that was `seen`; `early` is what the client sent before it was answered.
/// Dropping it resets both sides.
pub(super) async fn run<T, O>(visit: &Visit, io: T, early: &[u8], reached: Reached<O>, seen: Seen<'_>)
where
    T: AsyncRead + AsyncWrite + Send + Unpin,
    O: AsyncRead + AsyncWrite + Send + Unpin,
{
    let moved = AtomicU64::new(0);
    let (from_client, to_client) = tokio::io::split(io);
    let Reached { stream, target, .. } = reached;
    let (from_origin, to_origin) = tokio::io::split(stream);
    let both = async {
        tokio::try_join!(
            pump(early, from_client, to_origin, &moved),
            pump(&[], from_origin, to_client, &moved)
        )
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
        () = stalled(&moved) => {}
    }
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

/// Resolves when nothing has moved for the whole time that a tunnel may rest.
async fn stalled(moved: &AtomicU64) {
    loop {
        let before = moved.load(Ordering::Relaxed);
        sleep(TUNNEL).await;
        if moved.load(Ordering::Relaxed) == before {
            return;
        }
    }
}
