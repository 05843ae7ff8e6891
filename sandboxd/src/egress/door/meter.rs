//! What moves on a guest's connection, counted as it passes: between guest and door, heads and handshakes included, whatever
//! is spoken on it.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use sandbox_protocol::door::DoorReason;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    egress::{
        Armed, Decided, DoorKind, Outcome,
        audit::{Meters, count},
    },
    telemetry::metrics::DoorBytes,
};

/// The counters of one connection; those of its claim go along.
#[derive(Debug)]
pub(in crate::egress) struct Traffic {
    /// From the guest.
    pub(in crate::egress) sent: AtomicU64,
    /// To the guest.
    pub(in crate::egress) received: AtomicU64,
    pub(in crate::egress) requests: AtomicU64,
    /// Where it leads, once it is a tunnel.
    pub(in crate::egress) tunnel: OnceLock<(Arc<Decided>, SocketAddr)>,
    claim: Arc<Meters>,
}

impl Traffic {
    pub(in crate::egress) fn new(armed: &Armed, kind: DoorKind) -> Self {
        if kind != DoorKind::Dns {
            count(&armed.meters.connections);
        }
        Self {
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            tunnel: OnceLock::new(),
            claim: Arc::clone(&armed.meters),
        }
    }

    /// Something was decided on it. A tunnel that is cut was no request.
    pub(in crate::egress) fn decided(&self, outcome: &Outcome) {
        if *outcome != Outcome::Denied(DoorReason::PolicyChanged) {
            count(&self.requests);
            count(&self.claim.requests);
        }
        if matches!(outcome, Outcome::Denied(_)) {
            count(&self.claim.denials);
        }
    }

    /// It is a tunnel from now on.
    pub(in crate::egress) fn leads_to(&self, decided: Arc<Decided>, address: SocketAddr) {
        // One connection has one tunnel.
        drop(self.tunnel.set((decided, address)));
    }
}

/// A connection whose bytes are counted.
#[derive(Debug)]
pub(super) struct Metered<T> {
    io: T,
    traffic: Arc<Traffic>,
    node: DoorBytes,
}

impl<T> Metered<T> {
    pub(super) const fn new(io: T, traffic: Arc<Traffic>, node: DoorBytes) -> Self {
        Self { io, traffic, node }
    }

    /// What is counted.
    pub(super) const fn inner(&self) -> &T {
        &self.io
    }

    /// So many bytes came from the guest, past this.
    pub(super) fn sent(&self, n: usize) {
        let n = u64::try_from(n).unwrap_or(0);
        self.traffic.sent.fetch_add(n, Ordering::Relaxed);
        self.traffic.claim.sent.fetch_add(n, Ordering::Relaxed);
        self.node.sent(n);
    }

    /// So many bytes went to the guest, past this.
    pub(super) fn received(&self, n: usize) {
        let n = u64::try_from(n).unwrap_or(0);
        self.traffic.received.fetch_add(n, Ordering::Relaxed);
        self.traffic.claim.received.fetch_add(n, Ordering::Relaxed);
        self.node.received(n);
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        self.sent(buf.filled().len().saturating_sub(before));
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        self.received(n);
        Poll::Ready(Ok(n))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs))?;
        self.received(n);
        Poll::Ready(Ok(n))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
