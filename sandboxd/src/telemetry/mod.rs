//! Logs, spans and metrics: the one home of their names.
//!
//! May call: nothing.
//! Never inside: a decision; a name that is not an enum.

mod text;

pub use text::GuestText;
