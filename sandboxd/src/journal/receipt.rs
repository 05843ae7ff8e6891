//! What an append gives: how far the record came, or why it was not taken.

use sandbox_protocol::reason::Reason;

/// The record is in the kernel: it survives `kill -9` of the daemon. Only the journal makes one.
#[derive(Debug)]
#[must_use = "an answer takes its receipt"]
pub struct Written {
    pub(super) seq: u64,
    pub(super) bytes: u64,
}

impl Written {
    /// Number of the record.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }

    /// Its length in the log, framing included.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The record, and each before it, is on the disk: it survives the host's power. Only the journal makes one.
#[derive(Debug)]
#[must_use = "an answer takes its receipt"]
pub struct Synced {
    pub(super) seq: u64,
}

impl Synced {
    /// Number of the record.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }
}

/// A record that was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// No segment could be allocated. Nothing was written; changes are taken again once there is room.
    #[error("the journal is full")]
    Full,
    /// A write or sync failed earlier or now, or the journal is closed. Final until the daemon starts anew; the cause
    /// was logged where it happened.
    #[error("the journal takes no more records")]
    Failed,
    /// The record is longer than the format allows; nothing was written and nothing else is affected.
    #[error("a record of {bytes} bytes is too long")]
    TooLong {
        /// Its length, framing excluded.
        bytes: usize,
    },
}

impl AppendError {
    /// Its reason at the border.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Full => Reason::JournalFull,
            Self::Failed => Reason::JournalFailed,
            // What makes a record that long is bounded at the border.
            Self::TooLong { .. } => Reason::Bug,
        }
    }
}

/// Whether the journal takes records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It does.
    Ok,
    /// The disk is full: changes are refused, endings tried.
    Full,
    /// A write or sync failed: everything is refused until the daemon starts anew.
    Failed,
}
