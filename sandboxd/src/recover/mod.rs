//! The start: what the records say and what the host shows -> adopt, wind up, keep, reap.
//!
//! [`plan()`] is pure. Every row is in the registry, and its slot held, before the first call is served. Claimed sandboxes
//! are taken up first, many at a time, and the daemon serves once that is through; a mute one holds it up for
//! `PATIENCE` at most. Warm ones come behind, by the checks that made them warm.
//!
//! May call: pool, sandbox, template, claim, journal, engine, admission.
//! Never inside: a deletion on the word of something unreadable: unreadable is never empty.
//! Cancel safety: every step repeats safely; a start that is cut short is a start from the same records.

mod plan;
mod strays;
mod take;
#[cfg(test)]
mod tests;

use std::pin::Pin;

use futures_util::Stream;

pub use self::{
    plan::{Fate, Host, plan},
    strays::{hold, strays},
    take::{claimed, late, warm},
};
use crate::{
    admission::Reservation,
    claim::Claims,
    journal::SandboxRow,
    names::SlotNumber,
    sandbox::{Admitted, Warm},
    words::{MemBytes, Size, Vcpus},
};

/// What a start found, for its log line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Claims taken up.
    pub claimed: usize,
    /// Warm ones taken up.
    pub warm: usize,
    /// Sandboxes that could not go on.
    pub ended: usize,
}

/// What comes of sandboxes, in the order in which it is known; nothing goes on that nobody waits for.
pub type Taken = Pin<Box<dyn Stream<Item = Result<Option<Warm>, ()>> + Send>>;

/// Sandboxes that are yet to be taken up; each is in the registry and holds its slot.
#[must_use = "they are nobody's care until they are taken up"]
pub struct Later {
    /// For [`late`].
    pub claimed: Taken,
    /// For [`warm`].
    pub warm: Vec<(Admitted, Size)>,
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Later({} warm)", self.warm.len())
    }
}

/// What lies on the host in no record; each holds its slot, so that nothing is made there.
#[derive(Debug)]
#[must_use = "their slots are free again when this is dropped"]
pub struct Strays(Vec<(SlotNumber, Option<Reservation>)>);

/// What counts as used by what nobody knows the size of: nothing more than its slot.
const NOTHING: Size = Size {
    vcpus: Vcpus(1),
    memory: MemBytes(0),
};

/// What its guest has. A size that was renamed since counts as [`NOTHING`].
fn size(claims: &Claims, row: &SandboxRow) -> Size {
    claims.templates.size(&row.key.size).unwrap_or(NOTHING)
}
