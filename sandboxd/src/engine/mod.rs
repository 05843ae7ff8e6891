//! What runs the guests: start, load, pause, capture, watch, kill, behind one trait with two implementations, QEMU and
//! the stub. The only starter of processes.
//!
//! A machine is one process in one run directory: `run/<slot>/` holds its sockets and its identity file, which the
//! process locks and fills in before it becomes what it shall be. A process is known by pidfd, pid and start time
//! together with that lock, never by a name or command line. The in-process stub has neither process nor directory.
//!
//! May call: image, clock, disk, names, sys, tasks, telemetry, words, work.
//! Never inside: a claim, a pool, a record, a byte of what is spoken on a port.
//! Invariant 23: no death of the daemon ends a guest: own session, no pipe to us, nothing killed on drop.
//! Invariant 24: stub and TCG say so wherever reported; the stub starts only by name.
//! Cancel safety: dropping a future of [`Engine`] may leave a directory, never a process that runs on: a later
//! [`Engine::reap`] of that slot removes it. Futures of [`Machine`] may be dropped and called again.

mod ask;
mod capture;
mod cgroup;
mod error;
mod process;
pub mod qemu;
mod ram;
mod slotdir;
mod spawn;
pub mod stub;

use std::{fmt, future::Future, io, path::Path, pin::Pin};

pub use ask::version_of;
pub use capture::{Capture, CaptureError, CaptureManifest, ImageRef, Stale};
pub use error::EngineError;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::{
    image::{Digest, Image},
    names::SlotNumber,
    telemetry::GuestText,
    words::{Accel, EngineKind, Lane, Size},
};

/// A future behind a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What runs guests.
pub trait Engine: Send + Sync + fmt::Debug + 'static {
    /// Which engine it is.
    fn kind(&self) -> EngineKind;
    /// What its guests run on.
    fn accel(&self) -> Accel;
    /// Why they run on that, as one sentence for an operator.
    fn accel_why(&self) -> String;
    /// Version of the emulator; of this program for the stub.
    fn version(&self) -> String;
    /// What a capture must have in common with this host.
    fn facts(&self) -> Facts;

    /// Starts a machine from an image; its guest runs when this returns, its agent is not up yet.
    ///
    /// # Errors
    /// [`EngineError`]; no process and no directory is left.
    fn boot<'a>(
        &'a self,
        image: &'a Image,
        place: Place,
        purpose: Purpose,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>>;

    /// Starts a machine from a capture; its guest runs on from where it was captured when this returns.
    ///
    /// # Errors
    /// [`EngineError`]; no process and no directory is left. [`EngineError::Capture`] asks for the template to be rebuilt.
    fn clone_of<'a>(
        &'a self,
        capture: &'a Capture,
        place: Place,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>>;

    /// Takes over a machine of an earlier daemon in this slot, once its identity is proved.
    ///
    /// # Errors
    /// [`EngineError::Gone`] if that machine no longer runs: [`reap`](Self::reap) the slot then.
    fn attach(
        &self,
        place: Place,
        identity: Identity,
    ) -> BoxFuture<'_, Result<Box<dyn Machine>, EngineError>>;

    /// Every slot directory there is, with or without a living process; for recovery.
    ///
    /// # Errors
    /// The kernel's. A directory that cannot be read is an error: unreadable is never absent.
    fn inventory(&self) -> io::Result<Vec<Found>>;

    /// Ends whatever lives in that slot's directory and removes it. Of an empty slot: nothing to do. May be repeated.
    ///
    /// # Errors
    /// [`EngineError::Unproven`] if something holds the directory that cannot be identified: nothing was killed.
    fn reap(&self, slot: SlotNumber) -> BoxFuture<'_, Result<(), EngineError>>;

    /// Starts keeping blank processes ready for clones of this capture; one that is warmed already stays so.
    fn warm_up(&self, capture: &Capture);
    /// Ends that; its blank processes end soon.
    fn cool(&self, capture: &Capture);

    /// Ends blank processes and own tasks. Machines run on, and can no longer be made.
    fn stop(&self) -> BoxFuture<'_, ()>;
}

/// One guest and what runs it. Dropping it ends nothing: [`kill`](Self::kill) ends it, otherwise it runs on and a later
/// [`Engine::attach`] takes it over.
pub trait Machine: Send + Sync + fmt::Debug {
    /// What to write into a record, for [`Engine::attach`].
    fn identity(&self) -> Identity;

    /// Opens the host's end of a port. The one before it should be closed: a machine serves one host per port.
    ///
    /// # Errors
    /// [`EngineError::Gone`] if the machine no longer runs.
    fn connect(&self, port: PortName) -> BoxFuture<'_, Result<Port, EngineError>>;

    /// Resolves when the machine has ended by itself or was killed, at once if it has already.
    fn exited(&self) -> BoxFuture<'_, ExitReport>;

    /// Stops the guest's processors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn pause(&self) -> BoxFuture<'_, Result<(), EngineError>>;

    /// Lets them go on.
    ///
    /// # Errors
    /// [`EngineError`].
    fn resume(&self) -> BoxFuture<'_, Result<(), EngineError>>;

    /// Writes memory and device state into the directory, read-only, synced by [`Capture::seal`]. For a machine that was
    /// booted for [`Purpose::Template`], with both ports closed; pauses it, and it stays paused.
    ///
    /// # Errors
    /// [`EngineError`]; what was written so far is left for the caller, whose directory it is.
    fn capture<'a>(&'a self, into: &'a Path) -> BoxFuture<'a, Result<Captured, EngineError>>;

    /// The last of what the guest wrote to its console.
    fn console(&self) -> GuestText;

    /// Ends the machine, waits until it is dead, and removes its directory. May be repeated and raced: every caller
    /// returns after the one teardown.
    ///
    /// # Errors
    /// [`EngineError`] if death is not proved or the directory remains: call again.
    fn kill(&self) -> BoxFuture<'_, Result<(), EngineError>>;
}

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
    const fn socket(self) -> &'static str {
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

/// What [`Machine::capture`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// Digest of the memory file `ram` ([`CaptureManifest::ram`] says of what); `None` for the stub.
    pub ram: Option<Digest>,
    /// SHA-256 of the device state file `state`; `None` for the stub.
    pub state: Option<Digest>,
}
