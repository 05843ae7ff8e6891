//! The end: one teardown list, whatever the reason.

use std::time::Duration;

use tracing::Instrument as _;

use super::{
    Actor,
    doors::tell,
    steps::{StepError, within},
};
use crate::{
    faults,
    net::{Draining, Taken},
    sandbox::life::{Event, Life},
    telemetry::{chain, span},
};

impl Actor {
    /// The one teardown list, for release, lease, failure and restart alike.
    pub(super) async fn end(self) {
        let why = self
            .sandbox
            .with_life(|life| life.why().map(ToString::to_string))
            .unwrap_or_default();
        let span = span::end(&self.sandbox.id, &why);
        self.tear_down().instrument(span).await;
    }

    async fn tear_down(self) {
        let means = self.sandboxes.means();
        if let Some(link) = self.sandbox.link() {
            link.close();
        }
        self.sandbox.set_link(None);
        self.sandbox.door().stop().await;
        let draining = self.sandbox.taken().map(Taken::release);
        tell(draining.as_ref(), Draining::doors_shut);
        faults::passage("sandbox.before_kill");
        let (mut pause, mut stuck) = (Duration::from_millis(100), false);
        loop {
            let killing = async {
                match &self.machine {
                    Some(machine) => machine.kill().await,
                    None if self.sandbox.has_place() => means.engine.reap(self.sandbox.slot).await,
                    None => Ok(()),
                }
            };
            let killed = within("kill", means.deadlines.kill, StepError::Engine, killing).await;
            let Err(error) = killed else { break };
            if !stuck {
                stuck = true;
                means.metrics.sandbox.stuck(true);
            }
            tracing::warn!(sandbox = %self.sandbox.id, slot = %self.sandbox.slot, error = %chain(&error), "teardown failed, will be tried again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(30));
        }
        if stuck {
            means.metrics.sandbox.stuck(false);
        }
        drop(self.machine);
        faults::passage("sandbox.after_kill");
        let torn_down = self.sandbox.apply(&self.sandboxes, Event::TornDown);
        if let Err(error) = torn_down {
            tracing::error!(sandbox = %self.sandbox.id, %error, "a teardown without an end");
        }
        faults::passage("sandbox.gone");
        // Invariant 11. The VM is proved gone, and the record says so: a later one may name the slot. The other way
        // round a kill in between would leave two rows with one slot, and the end of the first would end the second.
        tell(draining.as_ref(), Draining::vmm_gone);
        drop(self.sandbox.give_place_back());
        if let Some(why) = self.sandbox.with_life(|life| life.why().cloned()) {
            means.metrics.sandbox.ended(why.kind.metric());
            tracing::info!(%why, "ended");
        }
        if let Life::Failed { claim, .. } = self.sandbox.life() {
            means.reaper.set(self.sandbox.id, None, claim.lease.until);
        }
        self.sandboxes.retire_if_gone(&self.sandbox);
    }
}
