//! What is held before the first call: request keys, slots, what lies on the host in no record.

use std::sync::Arc;

use super::Fate;
use crate::{
    admission::Reservation,
    claim::Claims,
    engine::Engine,
    faults,
    journal::{RowState, SandboxRow, State},
    names::SlotNumber,
    sandbox::{Why, WhyKind},
    words::{MemBytes, Size, Vcpus},
};

/// What lies on the host in no record; each holds its slot, so that nothing is made there.
#[derive(Debug)]
#[must_use = "their slots are free again when this is dropped"]
pub struct Strays(Vec<(SlotNumber, Option<Reservation>)>);

/// Puts the request keys back. Where several rows have one key, the live claim has it, else the newest: the key of a
/// claim that came to nothing was free again.
pub(super) fn restore_keys(claims: &Claims, state: &State) {
    let why = |row: &SandboxRow| Why::parse(row.why.as_deref().unwrap_or_default()).kind;
    let mut rows: Vec<_> = state
        .sandboxes
        .values()
        .filter(|row| row.why.is_none() || why(row) != WhyKind::ClaimFailed)
        .filter_map(|row| row.claim.as_deref().map(|facts| (row, facts)))
        .collect();
    rows.sort_by_key(|(row, facts)| (row.state == RowState::Claimed, facts.claimed_at));
    for (row, facts) in rows {
        if let (Some(key), Some(digest)) = (&facts.request_key, &facts.request_digest) {
            let owner = Arc::from(facts.owner.as_str());
            claims.keys.restore(&owner, key, digest, row.id);
        }
    }
}

pub(super) type Held<'a> = (&'a SandboxRow, Fate, Option<Reservation>);

/// Holds the slot of every row that may have something in it. Where damage left two rows with one slot, the later made
/// one has it: it could only be made once the other was gone.
pub(super) fn hold_slots<'a>(claims: &Claims, mut rows: Vec<(&'a SandboxRow, Fate)>) -> Vec<Held<'a>> {
    rows.sort_by_key(|(row, _)| std::cmp::Reverse(row.created_at));
    let admission = &claims.sandboxes.means().admission;
    let hold = |row: &SandboxRow| match row.state {
        RowState::Gone | RowState::Failed => None,
        RowState::Making | RowState::Warm | RowState::Claimed | RowState::Ending | RowState::Quarantined => {
            let held = admission.adopt(row.slot, size(claims, row));
            held.inspect_err(|error| tracing::error!(sandbox = %row.id, %error, "two rows have one slot"))
                .ok()
        }
    };
    rows.into_iter()
        .map(|(row, fate)| {
            let slot = hold(row);
            (row, fate, slot)
        })
        .collect()
}

/// What counts as used by what nobody knows the size of: nothing more than its slot.
const NOTHING: Size = Size {
    vcpus: Vcpus(1),
    memory: MemBytes(0),
};

/// What its guest has. A size that was renamed since counts as [`NOTHING`].
pub(super) fn size(claims: &Claims, row: &SandboxRow) -> Size {
    claims.templates.size(&row.key.size).unwrap_or(NOTHING)
}

/// Holds the slots of what lies on the host in no record.
pub fn hold(claims: &Claims, strays: Vec<SlotNumber>) -> Strays {
    let admission = &claims.sandboxes.means().admission;
    let held = strays
        .into_iter()
        .map(|slot| (slot, admission.adopt(slot, NOTHING).ok()));
    Strays(held.collect())
}

/// Ends what lies on the host in no record, and tells how much that was. Where records are damaged beyond a torn tail it
/// is told and left alone, its slot kept out of use.
pub async fn strays(engine: &Arc<dyn Engine>, strays: Strays, damaged: bool) -> usize {
    let count = strays.0.len();
    for (slot, reservation) in strays.0 {
        if damaged {
            tracing::error!(%slot, "on the host and in no record, and records are damaged: left alone, its slot is kept out of use");
            if let Some(reservation) = reservation {
                reservation.quarantine();
            }
            continue;
        }
        faults::passage("recover.stray");
        match engine.reap(slot).await {
            Ok(()) => tracing::info!(%slot, "on the host and in no record: ended"),
            Err(error) => {
                tracing::error!(%slot, error = %crate::telemetry::chain(&error), "cannot be ended: its slot is kept out of use");
                if let Some(reservation) = reservation {
                    reservation.quarantine();
                }
            }
        }
    }
    count
}
