//! What lies on the host in no record: held, then ended, or told and left alone.

use std::sync::Arc;

use super::NOTHING;
use crate::{admission::Reservation, claim::Claims, engine::Engine, names::SlotNumber, telemetry::chain};

/// A slot that something without a record lies in, held so that nothing new takes it.
#[derive(Debug)]
pub struct Stray {
    slot: SlotNumber,
    reservation: Option<Reservation>,
}

/// Takes the places of what lies on the host in no record, before anything new can.
pub fn hold(claims: &Claims, slots: &[SlotNumber]) -> Vec<Stray> {
    let admission = &claims.sandboxes.means().admission;
    let held = slots.iter().map(|slot| Stray {
        slot: *slot,
        reservation: admission.adopt(*slot, NOTHING).ok(),
    });
    held.collect()
}

/// Ends what lies on the host in no record. Where records are damaged beyond a torn tail it is told and left alone, its
/// slot kept out of use.
pub async fn strays(engine: &Arc<dyn Engine>, strays: Vec<Stray>, damaged: bool) -> usize {
    let count = strays.len();
    for Stray { slot, reservation } in strays {
        let ended = if damaged {
            None
        } else {
            Some(engine.reap(slot).await)
        };
        match ended {
            Some(Ok(())) => {
                tracing::info!(%slot, "on the host and in no record: ended");
                continue;
            }
            Some(Err(error)) => {
                tracing::error!(%slot, error = %chain(&error), "cannot be ended: its slot is kept out of use");
            }
            None => {
                tracing::error!(%slot, "on the host and in no record, and records are damaged: left alone, its slot is kept out of use");
            }
        }
        if let Some(reservation) = reservation {
            reservation.quarantine();
        }
    }
    count
}
