//! The start: what the records say and what the host shows -> adopt, wind up, keep, reap.
//!
//! [`plan`] is pure. Every row is in the registry, and its slot held, before the first call is served. Claimed sandboxes
//! are taken up first, many at a time, and the daemon serves once that is through; a mute one holds it up for
//! [`PATIENCE`] at most. Warm ones come behind, by the checks that made them warm.
//!
//! May call: pool, sandbox, template, claim, journal, engine, admission.
//! Never inside: a deletion on the word of something unreadable: unreadable is never empty.
//! Cancel safety: every step repeats safely; a start that is cut short is a start from the same records.

mod plan;
#[cfg(test)]
mod tests;

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use sandbox_protocol::id::SandboxId;
use tokio::time::timeout;

pub use self::plan::{Fate, Host, plan};
use crate::{
    admission::Reservation,
    claim::Claims,
    engine::Engine,
    faults,
    journal::{RowState, SandboxRow, State},
    names::SlotNumber,
    sandbox::{Admitted, Event, Warm, Why, WhyKind, adoptable},
    words::{MemBytes, Size, Vcpus},
};

/// Guests that are taken up at once: enough to hide their round trips, few enough for their sockets and processes.
const AT_ONCE: usize = 32;
/// How long a start waits for claimed guests to answer before it serves the others. One that is well answers in
/// milliseconds; whoever calls a late one meanwhile hears that its agent is not connected.
const PATIENCE: Duration = Duration::from_secs(5);

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

/// Puts every row in the registry and takes up the claimed ones. Resolves when each of them is up or on its end, or when
/// those that are not have had their time.
pub async fn claimed(
    claims: &Claims,
    state: &State,
    fates: Vec<(SandboxId, Fate)>,
    boot_id: &str,
) -> (Summary, Later) {
    let (mut summary, mut now, mut warm) = (Summary::default(), vec![], vec![]);
    restore_keys(claims, state);
    let rows = fates
        .into_iter()
        .filter_map(|(id, fate)| state.sandboxes.get(&id).map(|row| (row, fate)));
    for (row, fate, slot) in hold_slots(claims, rows.collect()) {
        let rebooted = row.boot_id.as_deref() != Some(boot_id);
        let wind_up = |event, slot| claims.sandboxes.wind_up(row.id, row, event, slot, rebooted);
        match (&fate, slot, adoptable(row.id, row)) {
            (Fate::AdoptClaimed, Some(slot), Some(adoptable)) => {
                now.push((claims.sandboxes.admit(adoptable, slot), size(claims, row)));
            }
            (Fate::AdoptWarm, Some(slot), Some(adoptable)) => {
                warm.push((claims.sandboxes.admit(adoptable, slot), size(claims, row)));
            }
            // It cannot be told who it is, so nothing is done to it on that word.
            (Fate::AdoptClaimed | Fate::AdoptWarm, Some(slot), None) => {
                summary.ended += 1;
                wind_up(Some(Event::Distrusted(incomplete())), Some(slot));
            }
            (Fate::AdoptClaimed | Fate::AdoptWarm, None, _) => {
                summary.ended += 1;
                let why = Why::with(WhyKind::LostOnRestart, "its slot was given to a later sandbox");
                wind_up(Some(Event::Died(why)), None);
            }
            (Fate::WindUp(died), slot, _) => {
                summary.ended += usize::from(died.is_some());
                wind_up(died.clone().map(Event::Died), slot);
            }
        }
    }
    let mut taking = take_up(now);
    let through = timeout(PATIENCE, async {
        while let Some(taken) = taking.next().await {
            summary.claimed += usize::from(taken.is_ok());
            summary.ended += usize::from(taken.is_err());
        }
    });
    if through.await.is_err() {
        tracing::warn!(patience = ?PATIENCE, "some claimed guests do not answer yet; the others are served");
    }
    let later = Later {
        claimed: taking,
        warm,
    };
    (summary, later)
}

/// Takes up the warm ones, and puts each into its pool.
pub async fn warm(claims: &Claims, warm: Vec<(Admitted, Size)>) -> Summary {
    let (mut summary, mut taking) = (Summary::default(), take_up(warm));
    while let Some(taken) = taking.next().await {
        match taken {
            Ok(Some(warm)) => {
                claims.pools.put_back(warm);
                faults::passage("recover.warm_put_back");
                summary.warm += 1;
            }
            Ok(None) => {}
            Err(()) => summary.ended += 1,
        }
    }
    summary
}

/// Sees those claimed ones through that the start did not wait for.
pub async fn late(mut claimed: Taken) {
    while let Some(taken) = claimed.next().await {
        // What came of each is in the log and in its row.
        drop(taken);
    }
}

fn take_up(admitted: Vec<(Admitted, Size)>) -> Taken {
    let taken = stream::iter(admitted).map(|(admitted, size)| async move {
        let taken = admitted.take_up(size).await;
        taken.map_err(|why| tracing::warn!(%why, "a sandbox could not be taken up"))
    });
    Box::pin(taken.buffer_unordered(AT_ONCE))
}

fn incomplete() -> Why {
    Why::with(
        WhyKind::RecordDamaged,
        "its records do not say which process it is",
    )
}

/// Puts the request keys back. Where several rows have one key, the live claim has it, else the newest: the key of a
/// claim that came to nothing was free again.
fn restore_keys(claims: &Claims, state: &State) {
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

type Held<'a> = (&'a SandboxRow, Fate, Option<Reservation>);

/// Holds the slot of every row that may have something in it. Where damage left two rows with one slot, the later made
/// one has it: it could only be made once the other was gone.
fn hold_slots<'a>(claims: &Claims, mut rows: Vec<(&'a SandboxRow, Fate)>) -> Vec<Held<'a>> {
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
fn size(claims: &Claims, row: &SandboxRow) -> Size {
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
