//! Doors: how a guest's connections are judged, dialled, recorded and let go.
//!
//! A door is made with its sandbox and denies. A claim arms it by one pointer swap ([`Door::arm`]) under the sandbox's own
//! lock, behind its record; the end disarms it first. Both doors of a sandbox share that pointer. Every byte that leaves
//! has passed target, decision, resolver, vetting and dial, in this order, in one place ([`Visit::reach`]), whatever the
//! kind of request; explain asks the same functions.
//!
//! May call: ca, link, policy, journal (heads of the audit's files).
//! Never inside: an answer that is not a denial where something is missing or fails; a way to dial what was not vetted,
//! but for an upstream proxy that the operator named; the value of a secret in anything that is told.
//! Invariant 12: a door denies until armed and by default, disarms first, and dials what it judged.
//! Invariant 13: credentials and claim tokens never reach a guest.
//! Cancel safety: dropping what serves a connection resets both of its sides; dropping a link's future ends the link and
//! leaves connections to [`Door::stop`].

mod answer;
mod armed;
pub mod audit;
mod book;
mod decisions;
mod dial;
pub mod door;
mod explain;
mod interfaces;
mod node;
mod pins;
mod resolve;
mod secret;
#[cfg(test)]
mod tests;
mod upstream;
mod visit;
mod way;

pub use self::{
    answer::Denial,
    armed::{Armed, Door, DoorKind, Seat},
    audit::Audit,
    book::{Book, PoolTerms},
    decisions::{Decided, Decisions, Outcome},
    door::intercept::{Interception, InterceptionError},
    explain::{Explained, explain},
    node::{Egress, Settings},
    resolve::Resolver,
    secret::{Given, SecretError, Secrets, Unreadable},
    upstream::Routes,
    visit::{Reached, Visit},
    way::Way,
};
