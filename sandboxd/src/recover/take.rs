//! Rows into the registry, and sandboxes taken up.

use std::{cmp::Reverse, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use sandbox_protocol::id::SandboxId;
use tokio::time::timeout;

use super::{Fate, Later, Summary, Taken, size};
use crate::{
    admission::Reservation,
    claim::Claims,
    faults,
    journal::{RowState, SandboxRow, State},
    sandbox::{Admitted, Event, Why, WhyKind, adoptable},
    words::Size,
};

/// Guests that are taken up at once: enough to hide their round trips, few enough for their sockets and processes.
const AT_ONCE: usize = 32;
/// How long a start waits for claimed guests to answer before it serves the others. One that is well answers in
/// milliseconds; whoever calls a late one meanwhile hears that its agent is not connected.
const PATIENCE: Duration = Duration::from_secs(5);

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
/// one has it: it could only be made once the other was gone. Records have one order, which no step of a clock changes.
fn hold_slots<'a>(claims: &Claims, mut rows: Vec<(&'a SandboxRow, Fate)>) -> Vec<Held<'a>> {
    rows.sort_by_key(|(row, _)| Reverse(row.seq));
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
