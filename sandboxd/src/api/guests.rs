//! Where forwarded calls find their guests: the registry, behind the same lock as every other call on a sandbox.

use std::sync::Arc;

use sandbox_protocol::reason::Reason;

use super::{Guest, Guests, Refusal, claims, desk::Desk};
use crate::{
    access::Caller,
    sandbox::{Life, Sandbox},
};

impl Guests for Desk {
    /// Keeps the sandbox's entry while the call lasts.
    type Use = Arc<Sandbox>;

    fn find(&self, sandbox: &str, caller: &Caller) -> Result<Guest<Arc<Sandbox>>, Refusal> {
        self.started()?;
        let (sandbox, _) = self.opened(caller, sandbox)?;
        sandbox.with_life(|life| match life {
            Life::Claimed(_) => Ok(()),
            // Whatever runs in stock would meet its next claimer; only operators can name it at all.
            Life::Making | Life::Warm => Err(Refusal::new(
                Reason::NotAllowed,
                "the sandbox is warm stock and nobody's: claim one",
            )),
            Life::Ending { why, .. }
            | Life::Failed { why, .. }
            | Life::Quarantined { why }
            | Life::Gone { why, .. } => Err(claims::ended(why)),
        })?;
        let link = sandbox
            .link()
            .ok_or_else(|| Refusal::new(Reason::AgentLost, "its agent is not connected now"))?;
        let proto = sandbox.agent().map_or(0, |agent| agent.proto);
        Ok(Guest {
            link,
            proto,
            used: sandbox,
        })
    }
}
