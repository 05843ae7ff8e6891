//! `AgentControl`: what only the host says. It alone turns the gate.
//!
//! Orders that change how the guest stands go to one actor, in order; Adopt, Clock, Events and PowerOff are answered
//! at once, whatever the actor is at.
//!
//! May call: clock, conditions, control/*, door, events, gate, places, refusal, run, sys, tasks.
//! Never inside: a claimer's call.
//! Invariant 15: no restored guest inherits a connection or its bytes: a template is captured only when no call and no
//! program is open.
//! Cancel safety: a call that is dropped leaves its order to be carried out.

pub mod actor;
pub mod files;
pub mod machine;
pub mod order;
mod renew;
mod service;

use tokio::sync::{mpsc, watch};

pub use actor::{Actor, Facts};
pub use renew::RenewError;

use crate::{conditions::Conditions, door::Probe, events::Events, gate::Gate, places::Places, run::Runner};
use actor::Order;
use machine::Machine;

/// Orders that wait: the host gives one at a time, and a second one after a lost link.
const ORDERS: usize = 8;

/// What control is made of.
#[derive(Debug, Clone)]
pub struct Parts {
    /// The gate.
    pub gate: Gate,
    /// Programs.
    pub runner: Runner,
    /// The machine, or its record.
    pub machine: Machine,
    /// Where files are.
    pub places: Places,
    /// News.
    pub events: Events,
    /// Trouble.
    pub conditions: Conditions,
    /// The guest's doors, where it has any.
    pub doors: Option<Probe>,
    /// Set to true by PowerOff.
    pub power_off: watch::Sender<bool>,
}

/// The service; a handle.
#[derive(Debug, Clone)]
pub struct Control {
    parts: Parts,
    facts: Facts,
    orders: mpsc::Sender<Order>,
}

impl Control {
    /// The service and its actor, which the caller runs.
    #[must_use]
    pub fn new(parts: Parts) -> (Self, Actor) {
        let (orders, queue) = mpsc::channel(ORDERS);
        let facts = Facts::default();
        let actor = Actor {
            orders: queue,
            gate: parts.gate.clone(),
            runner: parts.runner.clone(),
            facts: facts.clone(),
            machine: parts.machine.clone(),
            places: parts.places.clone(),
            events: parts.events.clone(),
            doors: parts.doors.clone(),
            renewed: None,
            rest: None,
        };
        (Self { parts, facts, orders }, actor)
    }

    /// What is known of the guest.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}
