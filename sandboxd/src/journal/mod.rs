//! The journal: facts about sandboxes, pools and the drain. Append, receipts, fold, replay.
//!
//! A record is encoded by its caller and put by one write into a segment that was allocated ahead ([`Journal::append`]);
//! then it survives the daemon. A receipt says how far it came: [`Written`] is in the kernel, [`Synced`] on the disk.
//! A thread of its own folds the log into the store, in batches, and deletes what the store holds for good.
//!
//! May call: clock, words, names, disk, tasks, work, faults.
//! Never inside: a domain type, a decision about a sandbox, a wait for the store on the append.
//! Invariant 05: a transition costs the same whatever lives: a record says only what changed (`record`).
//! Invariant 06: records have one order; a failed write or sync is final (`tail`, `sync`).
//! Invariant 07: any cut of the log replays; damage costs its sandbox only (`replay`, `fold`).
//! Invariant 08: log goes only after the store's own barrier (`store`).
//! Invariant 22: one daemon per state directory (`lock`); the node budget is `admission`'s.
//! Cancel safety: what blocks runs to its end; async calls can be dropped, and what they started goes on.

mod cat;
mod fold;
pub mod history;
mod keeper;
mod lock;
mod open;
mod receipt;
mod record;
mod replay;
mod segment;
mod store;
mod sync;
mod tail;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc};

use sandbox_protocol::id::SandboxId;
use tokio::sync::watch;

pub use self::{
    cat::{Cat, Filter, Line, Report, cat, check, heads},
    fold::{GONE_KEPT, GONE_MAX, Heads, RowState, SandboxRow, State, WarmFacts, fold},
    lock::{Lock, LockError, lock_state_dir},
    open::{OpenError, Opened, Options, SEGMENT_BYTES, SyncMode},
    receipt::{AppendError, Health, Synced, Written},
    record::{ClaimFacts, HeadRow, LayerRow, PoolRow, Record, RuleRow, Transition, Unknown},
    replay::{Damage, Torn},
};

/// The open journal. Clones are the same journal.
#[derive(Debug, Clone)]
pub struct Journal {
    inner: Arc<open::Inner>,
}

impl Journal {
    /// Takes the state directory's lock, reads what is there and makes the journal ready for appends. Blocks: some
    /// milliseconds, and about half a second per 100,000 records that no earlier daemon folded.
    ///
    /// # Errors
    /// [`OpenError`]; nothing was changed then but the lock file and missing directories.
    pub fn open(options: Options) -> Result<(Self, Opened), OpenError> {
        let (inner, opened) = open::open(options)?;
        Ok((
            Self {
                inner: Arc::new(inner),
            },
            opened,
        ))
    }

    /// Appends one record with the next number and the time now, by one write on this thread or on that of another
    /// caller who appends at the same time. Blocks for a write into the page cache, some microseconds.
    ///
    /// # Errors
    /// See [`AppendError`]: on each of them the record will not be found after a restart, save after a failed write,
    /// where it may be: undo what it announced.
    pub fn append(
        &self,
        sandbox: Option<SandboxId>,
        transition: &Transition,
    ) -> Result<Written, AppendError> {
        self.inner.tail.append(sandbox, transition)
    }

    /// Waits until the record, and each before it, is on the disk. One sync covers all who wait. Dropping the call
    /// leaves the sync to its end.
    ///
    /// # Errors
    /// [`AppendError::Failed`] when a sync failed.
    pub async fn synced(&self, written: Written) -> Result<Synced, AppendError> {
        self.inner.syncer.synced(&self.inner.tail, written).await
    }

    /// Waits as long as the configuration wants a record to wait: for the disk with [`SyncMode::Always`], else not at
    /// all. Dropping the call leaves the sync to its end.
    ///
    /// # Errors
    /// [`AppendError::Failed`] when a sync failed.
    pub async fn settle(&self, written: Written) -> Result<Written, AppendError> {
        match self.inner.mode {
            SyncMode::Auto => Ok(written),
            SyncMode::Always => {
                let bytes = written.bytes;
                let synced = self.synced(written).await?;
                Ok(Written {
                    seq: synced.seq,
                    bytes,
                })
            }
        }
    }

    /// Whether [`settle`](Self::settle) waits at all.
    #[must_use]
    pub fn waits_for_disk(&self) -> bool {
        match self.inner.mode {
            SyncMode::Auto => false,
            SyncMode::Always => true,
        }
    }

    /// Whether the journal takes records, now and later.
    #[must_use]
    pub fn health(&self) -> watch::Receiver<Health> {
        self.inner.tail.health()
    }

    /// Has everything that is appended folded into the store, and waits for it. The daemon never needs to. Cancel safe.
    ///
    /// # Errors
    /// [`AppendError::Failed`] when the store failed or the journal is closed.
    pub async fn folded(&self) -> Result<(), AppendError> {
        self.inner.keeper.folded(&self.inner.tail).await
    }

    /// Takes no more records, brings all to the disk, folds them, and gives the lock back. Repeats harmlessly. A
    /// journal that is dropped instead loses nothing: the next start replays what was not folded.
    ///
    /// # Errors
    /// [`AppendError::Failed`] when the sync or the fold failed; closed and unlocked it is all the same.
    pub async fn close(&self) -> Result<(), AppendError> {
        self.inner.close().await
    }
}

/// Whether room on the disk would mend this error.
fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}
