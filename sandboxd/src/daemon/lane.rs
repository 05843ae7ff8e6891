//! Lane guarded, where the configuration has it.

use std::sync::Arc;

use super::print::{Refusal, StartReason};
use crate::{
    clock::Clock,
    config::Config,
    journal::{SandboxRow, State},
    net::{self, Lane, NetError},
    telemetry::metrics::{Metrics, NetNumbers},
    words::Name,
};

/// Opens the lane, unless it is off.
///
/// # Errors
/// It is wanted and cannot be had: a daemon that leaves out what it was told to do would be a surprise.
pub(super) async fn open(
    config: &Config,
    clock: &Clock,
    state: &State,
) -> Result<Option<Arc<Lane>>, Refusal> {
    let net = &config.net;
    if net.slots == 0 {
        return Ok(None);
    }
    let options = net::Options {
        namespace: net.namespace.clone(),
        slots: net.slots,
        held: state
            .sandboxes
            .values()
            .filter_map(SandboxRow::holds_tap)
            .collect(),
        clock: clock.clone(),
    };
    let lane = Lane::open(options)
        .await
        .map_err(|error| refusal(&net.namespace, &error))?;
    tracing::info!(namespace = %net.namespace, slots = net.slots, "the network of lane guarded is in force");
    Ok(Some(Arc::new(lane)))
}

/// Has the metrics show the lane, for as long as it is there.
pub(super) fn show(lane: &Arc<Lane>, metrics: &Metrics) {
    let lane = Arc::downgrade(lane);
    metrics.net.ask(move || {
        let lane = lane.upgrade()?;
        let counts = lane.slots();
        let lock_lost = lane.status().borrow().tampered;
        Some(NetNumbers {
            slots: net::State::ALL
                .iter()
                .map(|state| (state.as_str(), counts.get(*state)))
                .collect(),
            lock_lost,
        })
    });
}

/// Why a lane cannot be had, as it is printed.
pub(super) fn refusal(namespace: &Name, error: &NetError) -> Refusal {
    let reason = match error {
        NetError::NotAllowed { .. } => StartReason::NeedsRoot,
        NetError::Held { .. } => StartReason::NetHeld,
        NetError::Kernel { .. } | NetError::Foreign { .. } => StartReason::NetUnavailable,
        NetError::Io { .. }
        | NetError::NoSlot { .. }
        | NetError::Off
        | NetError::Unlocked
        | NetError::OutOfPlace { .. }
        | NetError::Lost
        | NetError::Ended => StartReason::HostFault,
    };
    Refusal::new(reason, Some(net::pin(namespace)), error)
}
