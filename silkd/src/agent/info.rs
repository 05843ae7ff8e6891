//! Info: how the agent is; answers with the gate shut too, and changes nothing.
//!
//! May call: agent, clock.
//! Never inside: a wait.

use sandbox_protocol::{limits::PROTO_MAX, v1::AgentInfoReply};

use super::Agent;
use crate::clock;

/// What silkd calls itself.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How things stand.
#[must_use]
pub fn info(agent: &Agent) -> AgentInfoReply {
    let ago = clock::since_boot().saturating_sub(agent.parts.started);
    let (log_bytes, log_budget) = agent.parts.control.runner.log_usage();
    AgentInfoReply {
        version: VERSION.to_owned(),
        proto: PROTO_MAX,
        pid1: agent.parts.pid1,
        state: agent.parts.control.gate.state().on_the_wire().into(),
        generation: agent.facts.generation(),
        booted_ago_ms: u64::try_from(ago.as_millis()).unwrap_or(u64::MAX),
        guest_time: Some(clock::timestamp(agent.parts.control.machine.now())),
        processes: agent.parts.control.runner.running(),
        log_bytes,
        log_budget,
        conditions: agent.parts.control.conditions.list(),
        sessions: agent.parts.control.runner.sessions(),
    }
}
