//! Group commit: one sync at a time, on a blocking thread; it covers every record appended before it began.
//!
//! Invariant 06: a failed sync is final. The kernel tells of it once and may have dropped the pages, so a second sync
//! of that file would lie.

use std::sync::Arc;

use tokio::sync::watch;

use super::{AppendError, Synced, Written, tail::Tail};
use crate::{faults, tasks, work};

#[derive(Debug, Clone, Copy)]
struct Progress {
    /// Number of the last record on the disk.
    through: u64,
    running: bool,
    failed: bool,
}

/// Who syncs, and how far it came.
#[derive(Debug, Clone)]
pub(super) struct Syncer {
    progress: Arc<watch::Sender<Progress>>,
}

impl Syncer {
    /// Everything through that record is on the disk already.
    pub(super) fn new(through: u64) -> Self {
        let progress = Progress {
            through,
            running: false,
            failed: false,
        };
        Self {
            progress: Arc::new(watch::Sender::new(progress)),
        }
    }

    pub(super) async fn synced(&self, tail: &Arc<Tail>, written: Written) -> Result<Synced, AppendError> {
        self.through(tail, written.seq).await?;
        Ok(Synced { seq: written.seq })
    }

    /// Waits until that record is on the disk. Cancel safe: a sync that runs goes on, and its end wakes the others.
    pub(super) async fn through(&self, tail: &Arc<Tail>, seq: u64) -> Result<(), AppendError> {
        let mut news = self.progress.subscribe();
        loop {
            let now = *news.borrow_and_update();
            if now.through >= seq {
                return Ok(());
            }
            if now.failed {
                return Err(AppendError::Failed);
            }
            if self.begin() {
                let running = Running {
                    syncer: self.clone(),
                    through: None,
                };
                let tail = tail.clone();
                // A panic of the job shows as a failed sync in the next turn.
                let syncs = tasks::blocking("journal-sync", move || running.run(&tail))
                    .await
                    .unwrap_or(0);
                work::count(work::Kind::Syncs, syncs);
            } else if news.changed().await.is_err() {
                return Err(AppendError::Failed);
            }
        }
    }

    /// Waits until no sync runs. Cancel safe.
    pub(super) async fn idle(&self) {
        // The sender is ours, so it is not gone.
        drop(self.progress.subscribe().wait_for(|now| !now.running).await);
    }

    fn begin(&self) -> bool {
        self.progress.send_if_modified(|now| {
            let free = !now.running && !now.failed;
            now.running |= free;
            free
        })
    }
}

/// A sync under way; however it ends, those who wait hear of it.
#[derive(Debug)]
struct Running {
    syncer: Syncer,
    through: Option<u64>,
}

impl Running {
    /// Syncs all that was appended so far; says how many calls that took.
    fn run(mut self, tail: &Tail) -> u64 {
        let dirty = tail.dirty();
        let mut calls = 0;
        let mut done = faults::point("journal.sync");
        for file in dirty
            .closed
            .iter()
            .map(|(_number, file)| file)
            .chain(&dirty.current)
        {
            if done.is_ok() {
                calls += 1;
                done = file.sync_data();
            }
        }
        match done {
            Ok(()) => {
                tail.forget(dirty.closed.iter().map(|(number, _file)| *number));
                self.through = Some(dirty.through);
            }
            Err(error) => tail.poison("sync", &error),
        }
        calls
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.syncer.progress.send_modify(|now| {
            now.running = false;
            match self.through {
                Some(through) => now.through = now.through.max(through),
                None => now.failed = true,
            }
        });
    }
}
