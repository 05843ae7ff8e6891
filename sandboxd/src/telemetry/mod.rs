//! Logs, spans and metrics: the one home of their names, and the listener that shows them.
//!
//! May call: clock, tasks, words, work.
//! Never inside: a decision; a name that is not an enum.
//! Cancel safety: recording never waits. What waits says so itself.

pub mod admin;
pub mod log;
pub mod metrics;
pub mod span;
mod text;

pub use text::{GuestText, chain};
