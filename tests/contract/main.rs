//! Checks of the repository itself: who may depend on whom, licences, signs on the doors of rooms, sizes, homes of
//! things, frozen protos, documents that are tables of code, promises and their tests, links between pages, and the files
//! of `deploy`.
//!
//! Each check is a function from what it reads to a list of complaints; beside the test that runs it on the tree stands
//! one that runs it on something broken. `BLESS=1` writes the files that are made from code (docs/reasons.md and
//! protocol/frozen) instead of comparing them.

#![expect(
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::panic,
    reason = "a check fails by panicking"
)]

mod crates;
mod deploy;
mod documents;
mod homes;
mod hygiene;
mod invariants;
mod licences;
mod promises;
mod protos;
mod rooms;
mod rust;
mod sizes;
mod tree;

/// Fails with every complaint, one a line.
fn none(complaints: impl IntoIterator<Item = String>) {
    let complaints: Vec<String> = complaints.into_iter().collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}
