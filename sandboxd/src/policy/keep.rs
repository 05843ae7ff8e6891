//! How much is kept of what was recorded.

use std::time::Duration;

/// How much of a chain is kept. What is over either bound is deleted, whole files from the oldest on; never the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// From a file's last line on.
    pub time: Duration,
    /// Bytes of all files.
    pub size: u64,
}

impl Keep {
    /// Everything, for ever.
    pub const ALL: Self = Self {
        time: Duration::MAX,
        size: u64::MAX,
    };
}

/// How much is kept of both chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Of what doors decided.
    pub audit: Keep,
    /// Of what claims used.
    pub usage: Keep,
}

impl Retention {
    /// Everything, for ever.
    pub const ALL: Self = Self {
        audit: Keep::ALL,
        usage: Keep::ALL,
    };
}
