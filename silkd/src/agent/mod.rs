//! `Agent`: what a claimer uses. Decode, call, map the error.
//!
//! May call: agent/*, clock, control, fs, gate, refusal, relay, run, tools.
//! Never inside: work of its own.
//! Cancel safety: a call that is dropped drops its stream's guard, which acts at once.

pub mod base;
pub mod exec;
pub mod files;
pub mod git;
pub mod info;
pub mod processes;
pub mod reason;
pub mod service;
pub mod sessions;
pub mod tools;

use std::{sync::Arc, time::Duration};

use crate::{
    control::{Facts, Parts as ControlParts},
    fs::Files,
    relay::Relay,
    tools::lsp::Lsp,
};

/// What the service is made of.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Shared with control.
    pub control: ControlParts,
    /// Files.
    pub files: Files,
    /// What programs begin with.
    pub base_env: base::BaseEnv,
    /// The forwards that are open.
    pub relay: Relay,
    /// The language servers that run.
    pub lsp: Lsp,
    /// False in test mode.
    pub pid1: bool,
    /// When silkd started, since the machine's boot.
    pub started: Duration,
}

/// The service; a handle.
#[derive(Debug, Clone)]
pub struct Agent {
    parts: Arc<Parts>,
    facts: Facts,
}

impl Agent {
    /// The service.
    #[must_use]
    pub fn new(parts: Parts, facts: Facts) -> Self {
        Self {
            parts: Arc::new(parts),
            facts,
        }
    }
}
