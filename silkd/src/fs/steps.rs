//! A stream of messages that are made on the threads, a batch ahead of its reader and no further.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt as _, Stream};
use prost::Message;
use sandbox_protocol::limits::CHUNK_OUT;

use super::workers::{Call, Cancel, Parked, Pending, Workers};
use crate::{clock, refusal::Refusal};

/// What is produced step by step. A message is about [`CHUNK_OUT`] at most, so that a stream that nobody reads holds one
/// batch here and one on its way: below 256 KiB.
pub(super) trait Produce: Send + 'static {
    /// The messages.
    type Item: Message + 'static;

    /// Works on for a while. Looks at `cancel` with every block.
    fn next(&mut self, cancel: &Cancel) -> Result<Made<Self::Item>, Refusal>;
}

/// What came of a while's work.
#[derive(Debug)]
pub(super) enum Made<T> {
    /// A message.
    Item(T),
    /// None yet.
    Nothing,
    /// There are no more.
    End,
}

/// How long a step goes on that may go on: a batch need not be full.
const LONG: Duration = Duration::from_millis(20);

/// What a step brought.
struct Batch<P: Produce> {
    /// `None`: it was the last.
    producer: Option<P>,
    items: VecDeque<P::Item>,
    /// Comes behind the items.
    failed: Option<Refusal>,
}

impl<P: Produce> Batch<P> {
    fn make(mut producer: P, cancel: &Cancel) -> Self {
        let (mut items, mut bytes) = (VecDeque::new(), 0);
        let begun = clock::since_boot();
        while bytes < CHUNK_OUT {
            match producer.next(cancel) {
                Ok(Made::Item(item)) => {
                    bytes += item.encoded_len();
                    items.push_back(item);
                }
                // What was found is told, and who waits for a thread gets one.
                Ok(Made::Nothing) if clock::since_boot().saturating_sub(begun) > LONG => break,
                Ok(Made::Nothing) => {}
                Ok(Made::End) => return Self::last(items, None),
                Err(refusal) => return Self::last(items, Some(refusal)),
            }
        }
        Self {
            producer: Some(producer),
            items,
            failed: None,
        }
    }

    const fn last(items: VecDeque<P::Item>, failed: Option<Refusal>) -> Self {
        Self {
            producer: None,
            items,
            failed,
        }
    }
}

/// The stream. Dropped, it stops its producer within one block.
pub(super) struct Steps<P: Produce> {
    workers: Workers,
    call: Arc<Call>,
    at: At<P>,
    ready: VecDeque<P::Item>,
}

enum At<P: Produce> {
    Rest(Parked<P>),
    Busy(Pending<Batch<P>>),
    Failed(Refusal),
    Over,
}

impl<P: Produce> fmt::Debug for Steps<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps")
            .field("ready", &self.ready.len())
            .finish_non_exhaustive()
    }
}

impl<P: Produce> Steps<P> {
    /// Makes the producer, and its first batch with it. Cancel safe.
    ///
    /// # Errors
    /// What `make` says: nothing was streamed then.
    pub(super) async fn open(
        workers: &Workers,
        call: Arc<Call>,
        make: impl FnOnce(&Cancel) -> Result<P, Refusal> + Send + 'static,
    ) -> Result<Self, Refusal> {
        let first = workers.run(&call, |cancel| Ok(Batch::make(make(cancel)?, cancel)));
        let first = first.await?;
        let mut steps = Self {
            workers: workers.clone(),
            call,
            at: At::Over,
            ready: VecDeque::new(),
        };
        steps.take(first);
        Ok(steps)
    }

    fn take(&mut self, batch: Batch<P>) {
        self.ready = batch.items;
        self.at = match (batch.producer, batch.failed) {
            (_, Some(refusal)) => At::Failed(refusal),
            (Some(producer), None) => At::Rest(Parked::new(&self.workers, &self.call, producer)),
            (None, None) => At::Over,
        };
    }

    /// Makes the next batch while this one is read.
    fn ahead(&mut self) {
        self.at = match std::mem::replace(&mut self.at, At::Over) {
            At::Rest(producer) => match producer.step(|producer, cancel| Ok(Batch::make(producer, cancel))) {
                Ok(pending) => At::Busy(pending),
                Err(refusal) => At::Failed(refusal),
            },
            other @ (At::Busy(_) | At::Failed(_) | At::Over) => other,
        };
    }
}

impl<P: Produce> Unpin for Steps<P> {}

impl<P: Produce> Stream for Steps<P> {
    type Item = Result<P::Item, Refusal>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            this.ahead();
            if let Some(item) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(item)));
            }
            match &mut this.at {
                At::Busy(pending) => match std::task::ready!(pending.poll_unpin(cx)) {
                    Ok(batch) => this.take(batch),
                    Err(refusal) => this.at = At::Failed(refusal),
                },
                At::Rest(_) => {}
                At::Failed(_) | At::Over => {
                    return Poll::Ready(match std::mem::replace(&mut this.at, At::Over) {
                        At::Failed(refusal) => Some(Err(refusal)),
                        At::Rest(_) | At::Busy(_) | At::Over => None,
                    });
                }
            }
        }
    }
}
