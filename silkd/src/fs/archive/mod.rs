//! Trees as tar archives: in (Push) and out (Pull).
//!
//! May call: fs/*, refusal.
//! Never inside: a path of an archive that reaches the kernel unjudged.

pub mod names;
pub mod pax;
pub(super) mod pull;
pub(super) mod push;
pub mod reader;
mod stage;

#[cfg(test)]
mod tests;
