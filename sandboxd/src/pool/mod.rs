//! The stock of warm sandboxes of one key: what is taken, who waits, how much is made.
//!
//! May call: clock, words.
//! Never inside: I/O; an await under the lock.
//! Invariant 01: one sandbox, at most one claim: stock is moved, never lent (the other half is `sandbox/warm`'s).
//! Cancel safety: a waiter that leaves costs nobody else anything; see [`core::Core::leave`].

pub mod core;
pub mod policy;

#[cfg(test)]
mod core_tests;
#[cfg(test)]
mod policy_tests;
