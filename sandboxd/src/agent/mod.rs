//! What the host itself says to silkd: identity, rest, clock, claim; and what silkd says of its own sandbox.
//!
//! Each call is one round trip over a link and is counted as such. None has a deadline of its own, save
//! [`exec_once`]: the caller knows what the guest may take.
//!
//! May call: clock, link, telemetry, work.
//! Never inside: belief in a guest beyond its own sandbox. What silkd says grants nothing.
//! Invariant 16: texts and lists of a guest are cut before they are kept.
//! Cancel safety: a dropped call is cancelled in the guest. Renew repeats safely by its id; SetClaim and Quiesce may
//! have happened.

mod caller;
mod control;
mod exec;
mod local;
mod words;

pub use self::{
    control::{
        Adopted, Events, Info, News, Quiesce, RenewMode, RenewSpec, Renewed, Stepped, adopt, clock, events,
        info, power_off, quiesce, renew, resume, set_claim,
    },
    exec::{Ended, OUTPUT_KEPT, Ran, exec_once},
    local::Local,
    words::{Condition, ConditionName, State},
};
use std::sync::Arc;

use sandbox_protocol::{
    limits,
    v1::{AgentState, LinkHello},
};

use crate::{
    clock::Clock,
    link::{Link, Opened},
    telemetry::GuestText,
};

/// What silkd did not do for the host.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The link broke, or carries no more calls.
    #[error("{call}: the guest's agent cannot be reached")]
    Link {
        /// Which call.
        call: &'static str,
        /// Why; its own source is the [`LinkError`](crate::link::LinkError), unless the guest broke gRPC.
        #[source]
        source: Box<tonic::Status>,
    },
    /// silkd said no.
    #[error("{call}: the guest's agent refused ({code:?} {}): {said}", reason.map_or("-", sandbox_protocol::reason::Reason::as_str))]
    Refused {
        /// Which call.
        call: &'static str,
        /// Status.
        code: tonic::Code,
        /// Reason, if it is one of ours.
        reason: Option<sandbox_protocol::reason::Reason>,
        /// What it said.
        said: GuestText,
    },
    /// silkd answered, but not as the protocol has it.
    #[error("{call}: the guest's agent answered without {missing}")]
    Malformed {
        /// Which call.
        call: &'static str,
        /// What is missing.
        missing: &'static str,
    },
    /// The program's own time and the guest's grace are over, and nothing came.
    #[error("{call}: no answer within {after:?}")]
    Late {
        /// Which call.
        call: &'static str,
        /// How long was waited.
        after: std::time::Duration,
    },
}

/// A link to a guest that is none: the stub engine's, answered in this process.
#[must_use]
pub fn local_link(clock: Clock) -> Opened {
    let hello = LinkHello {
        proto_min: limits::PROTO_MIN,
        proto_max: limits::PROTO_MAX,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        state: AgentState::Fresh.into(),
        generation: 0,
    };
    Opened {
        link: Link::in_process(Arc::new(Local), clock),
        hello,
        proto: limits::PROTO_MAX,
    }
}

#[cfg(test)]
mod tests;
