//! What a daemon holds, to be compared with what it held before.

use crate::{Daemon, eventually};

/// Descriptors, sandbox processes and slot directories of a daemon at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaks {
    descriptors: usize,
    processes: usize,
    directories: usize,
}

impl Daemon {
    /// What it holds now. Wait for a quiet pool first, and keep no client.
    #[must_use]
    pub fn holds(&self) -> Leaks {
        Leaks {
            descriptors: self.process().descriptors(),
            processes: self.sandbox_processes().len(),
            directories: self.slot_dirs().len(),
        }
    }

    /// Waits until it holds no more than it did: what was closed at the other end is closed here soon after.
    ///
    /// # Panics
    /// It holds more, and goes on to.
    pub async fn holds_no_more_than(&self, before: Leaks) {
        let what = format!("holds no more than {before:?}");
        eventually(&what, || async {
            let now = self.holds();
            let more = now.descriptors > before.descriptors
                || now.processes > before.processes
                || now.directories > before.directories;
            (!more).then_some(())
        })
        .await;
    }
}
