//! A sandbox's ways to its doors: the connection that its guest opens for them, or the slot of lane guarded on which they
//! listen.

use std::sync::Arc;

use sandbox_protocol::id::{RequestId, SandboxId};

use super::{
    Actor,
    steps::{StepError, within},
};
use crate::{
    agent::{self, RenewMode, RenewSpec, Renewed},
    engine::{EngineError, Machine, Port, PortName},
    link::Link,
    names::SlotNumber,
    net::{Draining, NetError, Taken},
    random,
    sandbox::{life::Life, registry::Sandboxes},
    words::{EngineKind, Lane},
};

impl Sandboxes {
    /// The slot that a sandbox of an earlier daemon has on lane guarded. Without it the sandbox lives on and reaches nothing.
    pub(super) fn held(&self, id: SandboxId, slot: Option<SlotNumber>) -> Option<Taken> {
        let slot = slot?;
        let lane = self.means().net.as_deref().ok_or(NetError::Off);
        let held = lane.and_then(|lane| lane.adopt(slot));
        held.inspect_err(|error| tracing::error!(sandbox = %id, %error, "its network slot cannot be taken up: it reaches nothing"))
            .ok()
    }
}

/// Tells a slot, if there is one, what became of its sandbox.
pub(super) fn tell(draining: Option<&Draining>, news: impl FnOnce(&Draining) -> Result<(), NetError>) {
    if let Some(Err(error)) = draining.map(news) {
        tracing::error!(%error, "a network slot cannot be told what became of its sandbox");
    }
}

impl Actor {
    /// Has the doors listen on the sandbox's TAP, where it has one: they deny unless its claim has armed them already.
    pub(super) async fn bind_doors(&self) -> Result<(), StepError> {
        let taken = match (self.sandbox.key.lane, self.sandbox.taken()) {
            (Lane::Guarded, Some(taken)) => taken,
            (Lane::Guarded, None) => return Err(StepError::Net(NetError::Lost)),
            (Lane::None, _) => return Ok(()),
        };
        let limit = self.sandboxes.means().deadlines.hello;
        let doors = within("bind", limit, StepError::Net, taken.bind()).await?;
        let served = self.sandbox.door().listen(doors.http, doors.socks5);
        let served = served.and_then(|()| self.sandbox.door().listen_dns(doors.dns, doors.dns_stream));
        served.map_err(StepError::Serve)?;
        self.sandbox.with_life(|life| match life {
            Life::Claimed(_) => taken.arm().map_err(StepError::Net),
            Life::Making
            | Life::Warm
            | Life::Ending { .. }
            | Life::Failed { .. }
            | Life::Quarantined { .. }
            | Life::Gone { .. } => Ok(()),
        })
    }

    /// Opens the guest's connection for its doors and has it kept. A guest in this process has none, and one of lane
    /// guarded comes by its TAP. Whether it comes to its doors by itself.
    pub(super) async fn open_doors(&self, machine: &Arc<dyn Machine>) -> Result<bool, EngineError> {
        if self.sandbox.key.lane == Lane::Guarded {
            // Behind a TAP of the stub there is nobody.
            return Ok(match self.sandboxes.means().engine.kind() {
                EngineKind::Qemu => true,
                EngineKind::Stub => false,
            });
        }
        let Port::Stream(first) = machine.connect(PortName::Egress).await? else {
            return Ok(false);
        };
        let door = self.sandbox.door();
        let machine = Arc::clone(machine);
        door.keep_link(first, move || {
            let machine = Arc::clone(&machine);
            async move {
                match machine.connect(PortName::Egress).await {
                    Ok(Port::Stream(stream)) => Some(stream),
                    Ok(Port::InProcess) | Err(_) => None,
                }
            }
        });
        door.linked().await;
        Ok(true)
    }

    /// Gives the guest its identity and opens its gate, and has its doors prove that they refuse: in the guest, where that
    /// comes to them (`inside`) and its agent knows the question, else at the host's end of them.
    pub(super) async fn renew(
        &self,
        link: &Link,
        mode: RenewMode,
        inside: bool,
    ) -> Result<Renewed, StepError> {
        let means = self.sandboxes.means();
        let limits = means.deadlines;
        let proof = self.sandbox.door().prove();
        let renewing = agent::renew(link, renewal(mode, self.sandbox.id, inside), &means.clock);
        let renewed = within("renew", limits.renew, StepError::Agent, renewing).await?;
        match &renewed.doors {
            Some(said) => proof
                .by_guest(&said.http, &said.socks5)
                .map_err(StepError::Unproved)?,
            None => {
                within(
                    "proof",
                    limits.hello,
                    StepError::Unproved,
                    Box::pin(proof.by_host()),
                )
                .await?
            }
        }
        Ok(renewed)
    }
}

/// A renewal of its own for each sandbox. The guest's host name is made of the id, which tells clones apart.
fn renewal(mode: RenewMode, sandbox: SandboxId, ask_doors: bool) -> RenewSpec {
    let text = sandbox.to_string();
    let hostname = text.get(..15).unwrap_or(&text).replace('_', "-");
    let renew_id = RequestId::from_random(random::bytes()).to_string();
    RenewSpec {
        mode,
        renew_id,
        seed: random::bytes(),
        sandbox,
        hostname,
        ask_doors,
    }
}
