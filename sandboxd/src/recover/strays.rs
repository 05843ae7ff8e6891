//! What lies on the host in no record.

use std::sync::Arc;

use super::{NOTHING, Strays};
use crate::{claim::Claims, engine::Engine, faults, names::SlotNumber};

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
