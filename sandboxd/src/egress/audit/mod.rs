//! The audit: a line for each decision of a door and each end of a connection, and a line a minute for what each claim used.
//!
//! Doors push into a bounded queue and go on; one thread writes, syncs and turns files over. What finds no room is counted,
//! and a line says so in its place. Both files are chains ([`verify()`] follows them), and the journal keeps their heads.
//! Files that have outlived what is kept go, and a line says so before they do. A disk that is full, or a folder that cannot be made, holds up nobody: lines wait within their bound, and are written
//! when there is room again.

mod chain;
mod entry;
mod handle;
mod keep;
mod ledger;
mod queue;
#[cfg(test)]
mod tests;
mod usage;
mod verify;
mod writer;

use std::path::{Path, PathBuf};

pub use self::{
    chain::{Fault, Hash, Head},
    handle::{Audit, Options},
    verify::{Chain, Finding, check, verify},
};
pub(super) use self::{
    entry::{Ended, Entry, Owner},
    usage::{Meters, count},
};

/// Entries that wait for the writer: a burst of six seconds at 10,000 requests a second, some 50 MiB at most.
pub const QUEUE: usize = 65_536;
/// Of a disk, what the audit leaves to others: room for the journal, which a guest's requests must not use up.
pub const SPARE: u64 = 32 << 20;
/// Names of files and folders.
const AUDIT: &str = "audit";
const USAGE: &str = "usage";

/// Folders of a state directory, with the name of their files.
fn folders(state_dir: &Path) -> [(&'static str, PathBuf); 2] {
    [AUDIT, USAGE].map(|name| (name, state_dir.join(name)))
}
