//! Blank processes kept ready per capture in use: QEMU's start (at least 26 ms) leaves the refill path.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::sleep};
use tokio_util::sync::CancellationToken;

use super::host::{Host, Started};
use crate::{engine::Capture, image::Digest, words::Accel};

/// First wait after a blank process could not be started; it doubles up to the second.
const BACK_OFF: Duration = Duration::from_millis(200);
/// See [`BACK_OFF`].
const BACK_OFF_MOST: Duration = Duration::from_secs(30);

/// The blank processes of every capture in use.
#[derive(Debug, Default)]
pub(super) struct Blanks(Mutex<HashMap<Digest, Arc<Shelf>>>);

/// Those of one capture.
#[derive(Debug, Default)]
struct Shelf {
    ready: Mutex<Vec<Started>>,
    taken: Notify,
    cooled: CancellationToken,
}

impl Blanks {
    fn shelves(&self) -> MutexGuard<'_, HashMap<Digest, Arc<Shelf>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts keeping that many, in a task of the engine's group.
    pub(super) fn warm_up(&self, host: &Arc<Host>, accel: Accel, capture: &Capture, want: usize) {
        if want == 0 || host.group.is_stopping() {
            return;
        }
        let shelf = match self.shelves().entry(capture.digest()) {
            std::collections::hash_map::Entry::Occupied(_) => return,
            std::collections::hash_map::Entry::Vacant(place) => Arc::clone(place.insert(Arc::default())),
        };
        let (host, capture) = (Arc::clone(host), capture.clone());
        let group = host.group.clone();
        group.spawn("blanks", async move {
            Box::pin(keep(&host, accel, &capture, &shelf, want)).await
        });
    }

    /// Stops keeping them.
    pub(super) fn cool(&self, capture: &Capture) {
        if let Some(shelf) = self.shelves().remove(&capture.digest()) {
            shelf.cooled.cancel();
        }
    }

    /// How many are ready.
    #[cfg(test)]
    pub(super) fn ready(&self, capture: &Capture) -> usize {
        let shelf = self.shelves().get(&capture.digest()).cloned();
        shelf.map_or(0, |shelf| {
            shelf.ready.lock().unwrap_or_else(PoisonError::into_inner).len()
        })
    }

    /// One that is ready and alive, if there is. Those that died meanwhile are cleared away.
    pub(super) async fn take(&self, capture: &Capture) -> Option<Started> {
        let shelf = self.shelves().get(&capture.digest()).cloned()?;
        loop {
            let blank = shelf.ready.lock().unwrap_or_else(PoisonError::into_inner).pop();
            shelf.taken.notify_one();
            let blank = blank?;
            match blank.nascent.ended() {
                None => return Some(blank),
                Some(status) => {
                    tracing::warn!(status, "a blank process died");
                    end(blank).await;
                }
            }
        }
    }
}

async fn keep(host: &Host, accel: Accel, capture: &Capture, shelf: &Shelf, want: usize) {
    let mut back_off = BACK_OFF;
    while !shelf.cooled.is_cancelled() && !host.group.is_stopping() {
        let ready = shelf.ready.lock().unwrap_or_else(PoisonError::into_inner).len();
        if ready >= want {
            tokio::select! {
                () = shelf.taken.notified() => {}
                () = shelf.cooled.cancelled() => {}
                () = host.group.stopping() => {}
            }
            continue;
        }
        match host.blank(&host.hidden("blank"), accel, capture, None).await {
            Ok(blank) => {
                back_off = BACK_OFF;
                shelf
                    .ready
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(blank);
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot start a blank process"
                );
                tokio::select! {
                    () = sleep(back_off) => {}
                    () = shelf.cooled.cancelled() => {}
                    () = host.group.stopping() => {}
                }
                back_off = BACK_OFF_MOST.min(back_off * 2);
            }
        }
    }
    let left = std::mem::take(&mut *shelf.ready.lock().unwrap_or_else(PoisonError::into_inner));
    for blank in left {
        end(blank).await;
    }
}

async fn end(blank: Started) {
    if let Err(error) = blank.end().await {
        tracing::warn!(%error, "a blank process is not gone yet; the next start ends it");
    }
}
