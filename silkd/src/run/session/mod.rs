//! Sessions: shells that keep directory, variables, functions, aliases and jobs between commands.
//!
//! A session is a bash of the guest's in a leaf of its own, and a task that owns it. Control and data never share a
//! channel: the shell reads its script from one pipe and reports on another (`script`, `report`), and what a command
//! reads or prints can steer neither. A command has ended when its report is there; all that it said is in the pipes by
//! then, so no timer is needed. Whatever happens to the shell, its end is told and not waited for.
//!
//! May call: clock, gate, refusal, run/*, tasks.
//! Never inside: a guess at what a shell's output means.
//! Held for a session are two chunks that a client has not read, a command's text, and 64 KiB that came between two.
//! Cancel safety: a [`SessionStream`] that is dropped cancels its command: what the command started is killed, the
//! shell has two seconds to report, and the session stays. An opening that is dropped leaves no shell.

mod actor;
mod calls;
mod report;
mod script;
mod shell;
mod sink;
mod stream;
mod table;
mod tree;

use std::sync::{Arc, Mutex, PoisonError};

use self::{actor::Entry, table::Core};
pub use self::{
    report::{Nonsense, Reader, Report},
    script::{Nonce, nonce},
    stream::SessionStream,
};
use crate::tasks;

/// The sessions that there are.
#[derive(Debug, Clone, Default)]
struct Names(Arc<Mutex<Core<Entry>>>);

impl Names {
    fn with<T>(&self, f: impl FnOnce(&mut Core<Entry>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The sessions that there are, and their tasks.
#[derive(Debug, Default)]
pub(super) struct Table {
    names: Names,
    actors: tasks::Group,
}

impl Table {
    /// How many are open.
    pub(super) fn count(&self) -> usize {
        self.names.with(|core| core.entries().count())
    }

    /// Ends them all and forgets that they were there.
    pub(super) fn forget(&self) {
        let all = self.names.with(Core::take_all);
        all.iter().for_each(|entry| entry.job.abandon());
    }

    /// As [`forget`](Self::forget), with their tasks.
    pub(super) async fn stop(&self) {
        self.forget();
        self.actors.stop().await;
    }
}
