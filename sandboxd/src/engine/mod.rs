//! What runs the guests: start, load, pause, capture, watch, kill, behind one trait with two implementations, QEMU and
//! the stub. The only starter of processes.
//!
//! A machine is one process in one run directory: `run/<slot>/` holds its sockets and its identity file, which the
//! process locks and fills in before it becomes what it shall be. A process is known by pidfd, pid and start time
//! together with that lock, never by a name or command line. The in-process stub has neither process nor directory.
//!
//! May call: ca (fingerprints), image, clock, disk, names, sys, tasks, telemetry, words, work.
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
#[cfg(test)]
pub(crate) mod tests;
mod traits;
mod types;

pub use ask::version_of;
pub use capture::{Capture, CaptureError, CaptureManifest, ImageRef, Stale};
pub use error::EngineError;
pub use process::Pulse;
pub use traits::{BoxFuture, Engine, Machine};
pub use types::{Captured, ExitReport, Facts, Found, Identity, Place, Port, PortName, Purpose, Tap};
