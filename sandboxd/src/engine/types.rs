//! Values that engines and machines speak in.

use std::{fmt, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use super::EngineError;
use crate::{
    image::Digest,
    names::SlotNumber,
    telemetry::GuestText,
    words::{Accel, EngineKind, Lane, Size},
};

/// Where a machine is put and what it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its slot; the run directory is [`names::run_dir`](crate::names::run_dir).
    pub slot: SlotNumber,
    /// What it has of the host. A clone's is its capture's.
    pub size: Size,
    /// How it reaches out.
    pub lane: Lane,
}

/// The queue of the TAP that is the other end of a machine's network card. The machine has the only one.
#[derive(Debug)]
pub struct Tap(pub OwnedFd);

impl Place {
    /// Refuses a card where the lane has none, and a lane guarded without one.
    pub(super) const fn fits(&self, tap: Option<&Tap>) -> Result<(), EngineError> {
        match (self.lane, tap) {
            (Lane::None, None) | (Lane::Guarded, Some(_)) => Ok(()),
            (Lane::None, Some(_)) => Err(EngineError::Unsupported("a network card on lane none")),
            (Lane::Guarded, None) => Err(EngineError::Unsupported("lane guarded without a TAP")),
        }
    }
}

/// What a cold boot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To be a sandbox.
    Sandbox,
    /// To be captured: its memory can be read from outside.
    Template,
}

/// Which process a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Process id; `None` for a machine without a process.
    pub pid: Option<u32>,
    /// When the process started, in clock ticks since the host booted; 0 without a process.
    pub started: u64,
}

/// A guest's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortName {
    /// The host is client here.
    Agent,
    /// The guest is client here.
    Egress,
}

impl PortName {
    /// As the guest sees it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "silkd.agent",
            Self::Egress => "silkd.egress",
        }
    }

    /// Name of the socket in the run directory; the second is what `silkd --serve` makes of the first.
    pub(super) const fn socket(self) -> &'static str {
        match self {
            Self::Agent => "agent.sock",
            Self::Egress => "agent.sock.egress",
        }
    }
}

/// The host's end of a port.
#[derive(Debug)]
pub enum Port {
    /// A socket.
    Stream(UnixStream),
    /// There is no guest: whoever opened it makes an answerer in this process.
    InProcess,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitReport {
    /// Of the process: exit status or signal, or what the emulator said.
    pub status: String,
    /// The last of the guest's console.
    pub console: GuestText,
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.status)?;
        if self.console.as_str().is_empty() {
            Ok(())
        } else {
            write!(f, "; console: {}", self.console)
        }
    }
}

/// A slot directory that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Its slot.
    pub slot: SlotNumber,
    /// What its identity file says; `None` while that is missing or cut short.
    pub identity: Option<Identity>,
    /// Whether a process holds its lock.
    pub alive: bool,
}

/// What a capture and its clones must have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Engine.
    pub engine: EngineKind,
    /// Accelerator.
    pub accel: Accel,
    /// Version of the emulator, package included.
    pub version: String,
    /// Machine type.
    pub machine: String,
    /// Processor model; with hardware virtualisation, also which processor the host has.
    pub cpu: String,
}

/// What [`Machine::capture`](super::Machine::capture) wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// Digest of the memory file `ram` ([`CaptureManifest::ram`](super::CaptureManifest::ram) says of what); `None` for the stub.
    pub ram: Option<Digest>,
    /// SHA-256 of the device state file `state`; `None` for the stub.
    pub state: Option<Digest>,
}
