//! One life from intent to Gone: the registry of sandboxes, the task that owns each of them, and what may happen to it.
//!
//! A transition is applied in one place, `Sandbox::apply`: the sandbox's own lock is held while the pure table
//! ([`life`]) is asked, the record is appended and the new life is set, so that the order of records is the order of
//! lives. The journal never calls out, hence that lock can wait for nobody but the page cache. One task per sandbox owns
//! its machine and its link: end > VM exit > link loss > what is under way.
//!
//! May call: template, egress, agent, link, engine, image, journal, net, policy, access (hashes), admission.
//! Never inside: a pool, a client. It speaks up by values and by its feed.
//! Invariant 01: one sandbox, at most one claim ([`Warm`] is moved, the table refuses a second).
//! Invariant 03: never back to Warm.
//! Invariant 04: what a sandbox takes on the host is in a record before it exists.
//! Invariant 11: a slot is reused only after its VM is proved gone, and its record says so.
//! Invariant 20: every claim has a lease, in elapsed time.
//! Invariant 21: ending always progresses; twice is harmless.
//! Cancel safety: a caller may leave any future here; the sandbox is then ended or handed on by its own task.

mod actor;
mod entry;
pub mod life;
mod meter;
mod reap;
mod registry;
mod relinks;
mod row;
#[cfg(test)]
mod tests;

pub use actor::{Admitted, MakeError, MakeSpec, Source};
pub use entry::{Applied, ApplyError, Sandbox, Warm};
pub use life::{Claim, Event, Lease, Life, Why, WhyKind};
pub use reap::Reaper;
pub use registry::{Deadlines, Deaths, Means, Paces, Sandboxes};
pub use row::{Adoptable, adoptable};
