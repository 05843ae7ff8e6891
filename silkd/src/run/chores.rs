//! The janitor: one task that does what no call waits for. Leaves that are not empty yet; the outputs of programs that
//! are kept, which somebody has to read so that they do not die of SIGPIPE or stop; and logs, so that a program with one
//! needs no task of its own.

use std::{
    collections::VecDeque,
    future::Future,
    os::fd::OwnedFd,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use rustix::{
    fs::{Mode, OFlags},
    pipe::SpliceFlags,
};
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, oneshot},
};

use super::{job::Job, pump::Pump};

/// Outputs of kept programs that go on being read; then the oldest is closed.
const SINKS: usize = 64;
/// Bytes that a sink throws away in one go.
const GULP: usize = 1024 * 1024;
/// How long an exit message waits for the kernel to end what was killed. A process that the kernel cannot end (it
/// waits for a device, say) must not hold up the news of its leader's end.
const SETTLE: Duration = Duration::from_secs(2);

/// From SIGHUP to KILL of programs whose terminal is gone: an editor saves its files in it.
const FAREWELL: Duration = Duration::from_secs(1);

/// Something to wait for.
#[derive(Debug)]
pub(super) enum Chore {
    /// A tree whose leader has ended, but not all of it.
    Empty(Arc<Job>),
    /// An output that nobody wants.
    Sink(AsyncFd<OwnedFd>),
    /// What goes into a log.
    Log(Box<Pump>),
    /// A tree that was told of its terminal's end.
    HungUp(Arc<Job>),
}

/// What waits for the janitor. As each program adds four at most, the limit on programs bounds it.
#[derive(Debug, Default)]
pub(super) struct Chores {
    list: Mutex<Vec<Chore>>,
    news: Notify,
}

type Waiting = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Chores {
    /// Hands one over.
    pub(super) fn add(&self, chore: Chore) {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(chore);
        self.news.notify_one();
    }

    fn take(&self) -> Vec<Chore> {
        std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does them until dropped.
    pub(super) async fn serve(self: Arc<Self>) {
        let mut waiting: FuturesUnordered<Waiting> = FuturesUnordered::new();
        // Dropping a sender closes its sink.
        let mut sinks: VecDeque<oneshot::Sender<()>> = VecDeque::new();
        loop {
            tokio::select! {
                () = self.news.notified() => {}
                Some(()) = waiting.next(), if !waiting.is_empty() => {}
            }
            sinks.retain(|sink| !sink.is_closed());
            for chore in self.take() {
                waiting.push(match chore {
                    Chore::Empty(job) => Box::pin(empty(job)),
                    Chore::HungUp(job) => Box::pin(async move {
                        tokio::time::sleep(FAREWELL).await;
                        job.abandon();
                    }),
                    Chore::Sink(output) => {
                        if sinks.len() >= SINKS {
                            sinks.pop_front();
                        }
                        let (open, closed) = oneshot::channel();
                        sinks.push_back(open);
                        Box::pin(sink(output, closed))
                    }
                    Chore::Log(pump) => Box::pin(pump.run()),
                });
            }
        }
    }
}

async fn empty(job: Arc<Job>) {
    let emptied = job.until_empty();
    tokio::pin!(emptied);
    if job.drains() {
        let sure = emptied.await;
        return job.emptied(sure);
    }
    let sure = match tokio::time::timeout(SETTLE, &mut emptied).await {
        Ok(sure) => sure,
        Err(_elapsed) => {
            job.settle();
            emptied.await
        }
    };
    job.emptied(sure);
}

async fn sink(output: AsyncFd<OwnedFd>, closed: oneshot::Receiver<()>) {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let Ok(null) = rustix::fs::open(c"/dev/null", flags, Mode::empty()) else {
        return;
    };
    let discard = async {
        loop {
            let Ok(mut ready) = output.readable().await else {
                return;
            };
            match rustix::pipe::splice(&output, None, &null, None, GULP, SpliceFlags::NONBLOCK) {
                Ok(0) => return,
                Ok(_bytes) => tokio::task::yield_now().await,
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                Err(_broken) => return,
            }
        }
    };
    tokio::select! {
        () = discard => {}
        // Only ever dropped: too many are open.
        _closed = closed => {}
    }
}
