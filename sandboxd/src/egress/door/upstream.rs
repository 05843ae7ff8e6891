//! Connections to origins, and those of a claim that rest between two requests.

use std::{
    collections::VecDeque,
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};

use super::{IDLE, guard::FIELDS, upload::Upload};
use crate::{egress::Reached, policy::Authority, tasks};

/// Connections that rest, of one sandbox.
const KEPT: usize = 64;

/// For one that rests to be done with the request before: an origin that answered may not have taken the end of it.
const READY: Duration = Duration::from_millis(100);

/// One connection that speaks HTTP. It ends when it is dropped.
pub(in crate::egress) struct Upstream {
    pub(super) sender: SendRequest<Upload>,
    /// To where it was vetted for.
    pub(in crate::egress) address: SocketAddr,
    /// What it was judged as.
    target: Authority,
    rests: watch::Sender<bool>,
    driver: JoinHandle<()>,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream")
            .field("address", &self.address)
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Upstream {
    /// Speaks HTTP over what was reached.
    pub(super) async fn open<T>(reached: Reached<T>) -> Result<Self, hyper::Error>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Reached {
            stream,
            address,
            target,
            secret: _,
            is_direct: _,
        } = reached;
        let (sender, connection) = Builder::new()
            .max_headers(FIELDS)
            .handshake(TokioIo::new(Listening::new(stream)))
            .await?;
        let (rests, rested) = watch::channel(false);
        let driver = tasks::spawn("door upstream", async move {
            tokio::select! {
                biased;
                // Whoever waits for an answer is told how it ended.
                _ = connection.with_upgrades() => {}
                () = rests_too_long(rested) => {}
            }
        });
        Ok(Self {
            sender,
            address,
            target,
            rests,
            driver,
        })
    }
}

/// Resolves when a connection has rested for as long as it may.
async fn rests_too_long(mut rested: watch::Receiver<bool>) {
    while rested.wait_for(|rests| *rests).await.is_ok() {
        if timeout(IDLE, rested.wait_for(|rests| !*rests)).await.is_err() {
            return;
        }
    }
    // Its owner is gone, and ends it.
    std::future::pending().await
}

/// Connections of one claim that rest, shared with no other. They end with it.
#[derive(Debug, Default)]
pub(in crate::egress) struct Kept(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    /// Whoever rests the longest is the first.
    resting: VecDeque<Upstream>,
    is_shut: bool,
}

impl Kept {
    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // Every change of it is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the one to this authority that rests for the shortest time and lives. Cancel safe: what was taken ends.
    pub(in crate::egress) async fn take(&self, target: &Authority) -> Option<Upstream> {
        loop {
            let mut upstream = {
                let mut shelf = self.shelf();
                let at = shelf.resting.iter().rposition(|kept| kept.target == *target)?;
                shelf.resting.remove(at)?
            };
            upstream.rests.send_replace(false);
            let ready = timeout(READY, upstream.sender.ready()).await;
            if matches!(ready, Ok(Ok(()))) {
                return Some(upstream);
            }
        }
    }

    /// Keeps one for the next request. Of too many the one that rests the longest ends.
    pub(super) fn put(&self, upstream: Upstream) {
        let mut shelf = self.shelf();
        if shelf.is_shut || upstream.sender.is_closed() {
            return;
        }
        upstream.rests.send_replace(true);
        shelf.resting.retain(|kept| !kept.sender.is_closed());
        if shelf.resting.len() == KEPT {
            shelf.resting.pop_front();
        }
        shelf.resting.push_back(upstream);
    }

    /// Ends all of them, and keeps none from here on.
    pub(in crate::egress) fn shut(&self) {
        let mut shelf = self.shelf();
        shelf.is_shut = true;
        shelf.resting.clear();
    }

    #[cfg(test)]
    pub(in crate::egress) fn len(&self) -> usize {
        self.shelf().resting.len()
    }
}

/// A connection that is still read when it cannot be written any more: an origin that has given its answer takes no more
/// of a body, and the answer is what counts.
#[derive(Debug)]
pub(super) struct Listening<T> {
    io: T,
    is_deaf: bool,
}

impl<T> Listening<T> {
    const fn new(io: T) -> Self {
        Self { io, is_deaf: false }
    }

    pub(super) fn into_inner(self) -> T {
        self.io
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Listening<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Listening<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if !self.is_deaf
            && let Ok(n) = ready!(Pin::new(&mut self.io).poll_write(cx, buf))
        {
            return Poll::Ready(Ok(n));
        }
        self.is_deaf = true;
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if !self.is_deaf
            && let Ok(n) = ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs))
        {
            return Poll::Ready(Ok(n));
        }
        self.is_deaf = true;
        Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_deaf {
            let flushed = ready!(Pin::new(&mut self.io).poll_flush(cx));
            self.is_deaf = flushed.is_err();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
