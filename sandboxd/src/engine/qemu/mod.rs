//! The QEMU engine. Spoken to over QMP, in this process; all files and sockets reach QEMU as descriptors.
//!
//! May call: image, clock, disk, names, sys, tasks, telemetry, words, work.
//! Never inside: a guess about a template: what does not fit is refused by name.
//! Cancel safety: as the trait says.

mod accel;
mod args;
mod blanks;
mod engine;
mod host;
mod jail;
mod machine;
mod qmp;
mod wire;

use std::path::PathBuf;

pub use accel::AccelWish;
pub use engine::QemuEngine;

/// How QEMU is run.
#[derive(Debug, Clone)]
pub struct QemuOptions {
    /// The program, by name or path.
    pub program: PathBuf,
    /// The daemon's `run_dir`: machines live in `run/<slot>` below it.
    pub run_root: PathBuf,
    /// The daemon's state directory: remembers whether KVM works.
    pub state_dir: PathBuf,
    /// Which accelerator.
    pub accel: AccelWish,
    /// The account of VMMs, used if the daemon is root and the account exists.
    pub vm_user: String,
    /// Blank processes kept ready per capture in use; 0 keeps none.
    pub blanks: usize,
}

#[cfg(test)]
mod tests;
