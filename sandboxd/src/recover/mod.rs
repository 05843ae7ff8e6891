//! The start: what the records say and what the host shows -> adopt, wind up, keep, reap.
//!
//! [`plan`] is pure. Claimed sandboxes are taken up first, many at a time, and a mute one holds up nobody; the daemon
//! serves once that is through. Warm ones come behind, by the checks that made them warm.
//!
//! May call: pool, sandbox, template, claim, journal, engine, admission.
//! Never inside: a deletion on the word of something unreadable: unreadable is never empty.
//! Cancel safety: every step repeats safely; a start that is cut short is a start from the same records.

mod plan;
mod strays;

use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use sandbox_protocol::id::SandboxId;

pub use self::{
    plan::{Fate, Host, plan},
    strays::{Stray, hold, strays},
};
use crate::{
    admission::Reservation,
    claim::Claims,
    journal::{RowState, SandboxRow, State},
    sandbox::{Adoptable, Warm, adoptable},
    words::{MemBytes, Size, Vcpus},
};

/// Guests that are taken up at once: enough to hide their round trips, few enough for their sockets and processes.
const AT_ONCE: usize = 32;

/// What a start found, for its log line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Claims taken up.
    pub claimed: usize,
    /// Warm ones taken up.
    pub warm: usize,
    /// Sandboxes that could not go on.
    pub ended: usize,
    /// What lay on the host without a record.
    pub strays: usize,
}

/// Warm sandboxes that are yet to be taken up.
#[derive(Debug, Default)]
pub struct Later(Vec<Waiting>);

/// A row that can go on, with its place held so that nothing new takes it meanwhile.
#[derive(Debug)]
struct Waiting {
    adoptable: Adoptable,
    size: Size,
    reservation: Option<Reservation>,
}

/// Puts every row in the registry and takes up the claimed ones. Resolves when each of them is up or on its end.
pub async fn claimed(
    claims: &Claims,
    state: &State,
    fates: Vec<(SandboxId, Fate)>,
    boot_id: &str,
) -> (Summary, Later) {
    let (mut summary, mut later, mut now) = (Summary::default(), Later::default(), vec![]);
    for (id, fate) in fates {
        let Some(row) = state.sandboxes.get(&id) else {
            continue;
        };
        if let Some(facts) = &row.claim
            && let (Some(key), Some(digest)) = (&facts.request_key, &facts.request_digest)
        {
            claims
                .keys
                .restore(&Arc::from(facts.owner.as_str()), key, digest, id);
        }
        match (fate, adoptable(id, row)) {
            (Fate::AdoptClaimed, Some(adoptable)) => now.push(waiting(claims, row, adoptable)),
            (Fate::AdoptWarm, Some(adoptable)) => later.0.push(waiting(claims, row, adoptable)),
            (Fate::AdoptClaimed | Fate::AdoptWarm, None) => {}
            (Fate::WindUp(died), _) => {
                summary.ended += usize::from(died.is_some());
                let rebooted = row.boot_id.as_deref() != Some(boot_id);
                claims
                    .sandboxes
                    .wind_up(id, row, died, reserve(claims, row), rebooted);
            }
        }
    }
    let taken = stream::iter(now)
        .map(|waiting| take_up(claims, waiting))
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    summary.claimed = taken.iter().filter(|taken| taken.is_ok()).count();
    summary.ended += taken.len() - summary.claimed;
    (summary, later)
}

/// Takes up the warm ones, and puts each into its pool.
pub async fn warm(claims: &Claims, later: Later) -> Summary {
    let taken = stream::iter(later.0)
        .map(|waiting| take_up(claims, waiting))
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    let mut summary = Summary::default();
    for warm in taken {
        match warm {
            Ok(Some(warm)) => {
                claims.pools.put_back(warm);
                summary.warm += 1;
            }
            Ok(None) => {}
            Err(()) => summary.ended += 1,
        }
    }
    summary
}

fn waiting(claims: &Claims, row: &SandboxRow, adoptable: Adoptable) -> Waiting {
    Waiting {
        adoptable,
        size: size(claims, row),
        reservation: reserve(claims, row),
    }
}

async fn take_up(claims: &Claims, waiting: Waiting) -> Result<Option<Warm>, ()> {
    let Waiting {
        adoptable,
        size,
        reservation,
    } = waiting;
    let slot = adoptable.slot();
    let adopted = claims.sandboxes.adopt(adoptable, size, reservation).await;
    adopted.map_err(|why| tracing::warn!(%slot, %why, "could not be taken up"))
}

/// What its guest has. A size that was renamed since counts as nothing more than its slot.
fn size(claims: &Claims, row: &SandboxRow) -> Size {
    claims.templates.size(&row.key.size).unwrap_or(NOTHING)
}

fn reserve(claims: &Claims, row: &SandboxRow) -> Option<Reservation> {
    if row.state == RowState::Gone {
        return None;
    }
    let means = claims.sandboxes.means();
    let reserved = means.admission.adopt(row.slot, size(claims, row));
    reserved
        .inspect_err(|error| tracing::error!(slot = %row.slot, %error, "two rows have one slot"))
        .ok()
}

/// Of what has no record nothing is known but its slot.
const NOTHING: Size = Size {
    vcpus: Vcpus(1),
    memory: MemBytes(0),
};
