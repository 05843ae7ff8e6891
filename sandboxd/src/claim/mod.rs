//! The transaction that makes a warm sandbox somebody's: request keys, the choice of a tier, the walk itself.
//!
//! May call: pool, sandbox, template, agent (what a claim carries), engine (captures), journal, net (its
//! refusals), access, admission, config (what a tenant may), policy.
//! Never inside: a message of the API; a second way to give a sandbox to somebody.
//! Invariant 02: no answer before its record survives kill -9 ([`Granted`] holds the receipt).
//! Cancel safety: between the take and the record there is no await, so a caller who leaves cannot cut a claim in half.
//! At the awaits that some claims have (a sync, the guest's SetClaim) leaving ends the sandbox and frees the request key.

mod keys;
#[cfg(test)]
pub(crate) mod tests;
mod walk;

pub use keys::{Keys, Reserved};
pub use walk::{Ask, ClaimError, Claims, Granted, Wanted, check_lease};
