//! From the kernel's queue to the client.

use std::{
    fmt,
    os::fd::OwnedFd,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::Stream;
use prost::Message as _;
use sandbox_protocol::v1::{WatchOut, WatchOverflow, watch_out::M};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
    task::JoinHandle,
};

use super::{
    Plan, Taken,
    events::{BEHIND, News, Watching},
    tree::Tree,
};
use crate::{
    fs::workers::{Call, Cancel, Parked, Workers},
    refusal::Refusal,
    sys, tasks,
};

/// Bytes of messages that wait for the client.
const BYTES: usize = 128 * 1024;
/// How long half a rename waits for the other half, which the kernel writes right behind it.
const HALF: Duration = Duration::from_millis(5);

type Told = Result<WatchOut, Refusal>;

/// The answer to one Watch. Dropped, it ends the watch.
pub(in crate::fs) struct WatchStream {
    told: mpsc::Receiver<Told>,
    bytes: Arc<AtomicUsize>,
    pump: JoinHandle<()>,
}

impl fmt::Debug for WatchStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchStream").finish_non_exhaustive()
    }
}

impl Stream for WatchStream {
    type Item = Told;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Told>> {
        let told = std::task::ready!(self.told.poll_recv(cx));
        if let Some(Ok(out)) = &told {
            self.bytes.fetch_sub(out.encoded_len(), Ordering::AcqRel);
        }
        Poll::Ready(told)
    }
}

impl Drop for WatchStream {
    fn drop(&mut self) {
        // What it holds is cleared up on a thread; the runtime joins it.
        self.pump.abort();
    }
}

/// Arms a watch; the first message is `ready`. Cancel safe.
///
/// # Errors
/// Why it cannot be armed; `WATCH_LIMIT`.
pub(in crate::fs) async fn watch(
    workers: &Workers,
    taken: &Taken,
    call: Arc<Call>,
    plan: Plan,
) -> Result<WatchStream, Refusal> {
    let seat = taken.seat()?;
    let step = move |cancel: &Cancel| Tree::arm(plan, seat, cancel).map(Watching::new);
    let watching = workers.run(&call, step).await?;
    let full = |_full| super::limit("no descriptor is left to hear of events");
    let queue = watching.tree.notify().try_clone().map_err(full)?;
    let queue = sys::watch(queue, Interest::READABLE).map_err(full)?;
    let ready = watching.ready();
    let (tell, told) = mpsc::channel(BEHIND);
    let bytes = Arc::new(AtomicUsize::new(0));
    let pump = Pump {
        queue,
        client: Client {
            tell,
            bytes: bytes.clone(),
        },
        workers: workers.clone(),
        call: call.clone(),
    };
    let state = Parked::new(workers, &call, watching);
    // The channel is empty.
    let first = pump.client.put(ready);
    debug_assert!(first, "there is room for one");
    Ok(WatchStream {
        told,
        bytes,
        pump: tasks::spawn(pump.run(state)),
    })
}

/// The client's end.
struct Client {
    tell: mpsc::Sender<Told>,
    bytes: Arc<AtomicUsize>,
}

impl Client {
    /// False when the client is too far behind.
    fn put(&self, out: WatchOut) -> bool {
        let size = out.encoded_len();
        if self.bytes.load(Ordering::Acquire) + size > BYTES {
            return false;
        }
        self.bytes.fetch_add(size, Ordering::AcqRel);
        // To one that is gone nothing is told.
        !matches!(
            self.tell.try_send(Ok(out)),
            Err(mpsc::error::TrySendError::Full(_))
        )
    }
}

struct Pump {
    queue: AsyncFd<OwnedFd>,
    client: Client,
    workers: Workers,
    call: Arc<Call>,
}

impl Pump {
    /// Ends with the watch; aborted when the client goes.
    async fn run(self, state: Parked<Watching>) {
        if let Err(refusal) = self.serve(state).await {
            // Behind all that was told; a client that is gone is told nothing.
            drop(self.client.tell.send(Err(refusal)).await);
        }
    }

    async fn serve(&self, mut state: Parked<Watching>) -> Result<(), Refusal> {
        let mut half = false;
        loop {
            let waited = self.wait(half).await?;
            let (next, mut news) = self
                .step(state, move |watching, cancel| Ok(watching.read(waited, cancel)))
                .await?;
            (state, half) = (next, news.half);
            let (over, failed) = (news.over, news.failed.take());
            let lost = self.tell(news);
            if let Some(refusal) = failed {
                return Err(refusal);
            }
            if over && lost.is_none() {
                return Ok(());
            }
            if let Some(reason) = lost {
                state = match self.recover(state, reason).await? {
                    Some(state) => state,
                    None => return Ok(()),
                };
                half = false;
            }
        }
    }

    /// Waits for the kernel to have something to say; true when it had not, and half a rename waited long enough.
    async fn wait(&self, half: bool) -> Result<bool, Refusal> {
        let readable = async {
            loop {
                let ready = self.queue.readable().await;
                let mut ready = ready.map_err(|_gone| super::limit("events are heard of no more"))?;
                // It said so once; it may have been read since.
                if pending(self.queue.get_ref()) {
                    return Ok(());
                }
                ready.clear_ready();
            }
        };
        if !half {
            return readable.await.map(|()| false);
        }
        match tokio::time::timeout(HALF, readable).await {
            Ok(outcome) => outcome.map(|()| false),
            Err(_elapsed) => Ok(true),
        }
    }

    async fn step<T: Send + 'static>(
        &self,
        state: Parked<Watching>,
        step: impl FnOnce(&mut Watching, &Cancel) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<(Parked<Watching>, T), Refusal> {
        let step = state.step(move |mut watching, cancel| {
            let outcome = step(&mut watching, cancel)?;
            Ok((watching, outcome))
        })?;
        let (watching, outcome) = step.await?;
        Ok((Parked::new(&self.workers, &self.call, watching), outcome))
    }

    /// Puts messages into the client's queue; why something is lost.
    fn tell(&self, news: News) -> Option<&'static str> {
        for out in news.out {
            if !self.client.put(out) {
                return Some("client");
            }
        }
        news.lost
    }

    /// Something was lost. Until the client has read what it has, more is thrown away; then it is told, and all is armed
    /// anew. `None` when the root is gone.
    async fn recover(
        &self,
        mut state: Parked<Watching>,
        reason: &str,
    ) -> Result<Option<Parked<Watching>>, Refusal> {
        loop {
            tokio::select! {
                biased;
                room = self.client.tell.reserve_many(BEHIND) => {
                    // Or the client is gone, which ends this task.
                    drop(room);
                    break;
                }
                waited = self.wait(false) => {
                    waited?;
                    (state, ()) = self.step(state, |watching, _| {
                        watching.discard();
                        Ok(())
                    }).await?;
                }
            }
        }
        let overflow = M::Overflow(WatchOverflow {
            reason: reason.to_owned(),
        });
        let overflow = WatchOut { m: Some(overflow) };
        let (state, news) = self.step(state, Watching::again).await?;
        let over = news.over;
        // There is room: the queue was empty, and nobody else puts into it.
        let told = self.client.put(overflow) && self.tell(news).is_none();
        debug_assert!(told, "there is room for two");
        Ok((!over).then_some(state))
    }
}

/// Whether events wait. A queue that cannot be asked is read, which tells.
fn pending(queue: &OwnedFd) -> bool {
    rustix::io::ioctl_fionread(queue).map_or(true, |bytes| bytes > 0)
}
