//! The link of a sandbox's doors, kept: opened anew when it is lost, with growing pauses, until the doors are stopped.

use std::{future::Future, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep, timeout},
};

use super::{LinkOver, serve_link};
use crate::{egress::Door, random};

/// From one attempt to the next: a guest that plays with its link costs itself its doors, and nobody anything else.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(30);
/// A link that was up for so long begins with the shortest pause again.
const GOOD: Duration = Duration::from_secs(60);
/// Opening the guest's port.
const OPEN: Duration = Duration::from_secs(10);

impl Door {
    /// Serves the link over `first`, and over what `connect` gives when it is lost. [`stop`](Self::stop) ends and joins
    /// it.
    pub fn keep_link<T, C, F>(&self, first: T, connect: C)
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        C: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Option<T>> + Send + 'static,
    {
        let door = self.clone();
        let group = self.group().clone();
        self.group().spawn("door link", async move {
            let keeping = Box::pin(keep(&door, first, connect));
            tokio::select! {
                biased;
                () = group.stopping() => {}
                () = keeping => {}
            }
        });
    }
}

async fn keep<T, C, F>(door: &Door, first: T, connect: C)
where
    T: AsyncRead + AsyncWrite + Send + Unpin,
    C: Fn() -> F,
    F: Future<Output = Option<T>>,
{
    let mut next = Some(first);
    let mut pause = SHORTEST;
    loop {
        let begun = Instant::now();
        if let Some(io) = next.take() {
            let over = Box::pin(serve_link(door, io, random::bytes())).await;
            tracing::debug!(sandbox = %door.sandbox(), %over, "link of doors over");
            // What breached HTTP/2 does it again; a guest that is renewed or whose port was reopened does not.
            if begun.elapsed() >= GOOD && !matches!(over, LinkOver::Useless) {
                pause = SHORTEST;
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST);
        next = timeout(OPEN, connect()).await.ok().flatten();
    }
}
