//! What making, adopting and relinking are done by: steps that end in time, or say which one did not.

use std::{io, time::Duration};

use tokio::time::timeout;

use crate::{
    agent::{self, AgentError},
    egress::door::Unproved,
    engine::{EngineError, ExitReport, Machine, Port, PortName},
    link::{self, Opened},
    net::NetError,
    random,
    sandbox::registry::Sandboxes,
};

/// A machine that dies closes its ports a moment before its process is seen to have ended: for so long a broken port waits
/// for the better reason.
pub(super) const DYING: Duration = Duration::from_secs(1);

/// A step of a making failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error("{step}: no answer within {limit:?}")]
    Late { step: &'static str, limit: Duration },
    #[error("start")]
    Engine(#[source] EngineError),
    #[error("the machine ended: {0}")]
    Exited(ExitReport),
    #[error("doors")]
    Net(#[source] NetError),
    #[error("serve the doors")]
    Serve(#[source] io::Error),
    #[error("its doors are not proved to refuse")]
    Unproved(#[source] Unproved),
    #[error("link")]
    Link(#[source] link::LinkError),
    #[error("agent")]
    Agent(#[source] AgentError),
    #[error("its agent is in state {0:?}")]
    NotReady(agent::State),
    #[error("the agent says it belongs to another sandbox")]
    Foreign,
}

pub(super) async fn within<T, E>(
    step: &'static str,
    limit: Duration,
    kind: impl FnOnce(E) -> StepError,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, StepError> {
    match timeout(limit, work).await {
        Ok(result) => result.map_err(kind),
        Err(_elapsed) => Err(StepError::Late { step, limit }),
    }
}

/// Connects to the agent and greets it, unless the machine ends first.
pub(super) async fn open_link(
    machine: &dyn Machine,
    sandboxes: &Sandboxes,
    limit: Duration,
) -> Result<Opened, StepError> {
    let opening = async {
        let opened = greet(machine, sandboxes, limit).await;
        if opened.is_err() {
            tokio::time::sleep(DYING).await;
        }
        opened
    };
    tokio::select! {
        biased;
        report = machine.exited() => Err(StepError::Exited(report)),
        opened = opening => opened,
    }
}

async fn greet(machine: &dyn Machine, sandboxes: &Sandboxes, limit: Duration) -> Result<Opened, StepError> {
    let port = within(
        "connect",
        limit,
        StepError::Engine,
        machine.connect(PortName::Agent),
    )
    .await?;
    let clock = sandboxes.means().clock.clone();
    match port {
        Port::Stream(stream) => {
            let opening = Box::pin(link::open(stream, random::bytes(), clock));
            within("hello", limit, StepError::Link, opening).await
        }
        Port::InProcess => Ok(agent::local_link(clock)),
    }
}
