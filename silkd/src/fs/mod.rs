//! Files and trees: read, written, listed, changed, on threads of their own.
//!
//! Each operation is a value that was checked without touching anything, and then acts on a thread, step by step, as
//! the user that it was asked for. A path is followed once; what it leads to is judged on the descriptor; whatever
//! changes a tree does it by a name in a directory that is open. A stream holds no thread while its client rests, and
//! less than 256 KiB.
//!
//! May call: clock, gate, refusal, sys, tasks.
//! Never inside: a link, a service; a lookup by name of what was judged before.
//! Cancel safety: dropping a call stops its step within one block, and leaves of a write, push or replace nothing: the
//! old content is there, and nothing beside it. A removal leaves what it had not come to.

pub mod archive;
mod choose;
mod errno;
mod files;
mod find;
mod globs;
mod input;
mod lines;
mod list;
mod open;
mod pattern;
mod read;
mod remove;
mod replace;
mod stat;
mod steps;
mod temp;
mod tree;
mod walk;
mod watch;
mod workers;
mod write;

#[cfg(test)]
mod tests;

pub use self::{files::Files, workers::Call};
