//! The stub engine: isolates nothing. For tests, and for measuring the claim path with thousands of claims.
//!
//! Its guests are `silkd --serve` processes on this host, which outlive the daemon as VMs do and share their run
//! directory, identity and end; or, for load, nothing at all: a machine without process, directory, descriptor or task,
//! whose agent is answered for inside this process and which ends with it.
//!
//! May call: image, clock, disk, names, sys, tasks, telemetry, words, work.
//! Never inside: a default that starts it. It is asked for by name.
//! Cancel safety: as the trait says.

mod engine;
mod faults;
mod machine;

use std::path::PathBuf;

pub use engine::StubEngine;
pub use faults::{StubFault, StubFaultError};

/// Who answers as the guest's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StubAgent {
    /// A silkd process per machine; the program's path.
    Process(PathBuf),
    /// This process.
    InProcess,
}

/// How the stub is run.
#[derive(Debug, Clone)]
pub struct StubOptions {
    /// The daemon's `run_dir`: machines live in `run/<slot>` below it.
    pub run_root: PathBuf,
    /// Who answers as agent.
    pub agent: StubAgent,
    /// What goes wrong, for tests.
    pub faults: Vec<StubFault>,
}

#[cfg(test)]
mod tests;
