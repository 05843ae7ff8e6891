//! Programs: started, fed, watched and ended. One way to start, whatever the kind.
//!
//! [`Runner::exec`] runs one program for a client: its stream carries Started, the output as it comes, Exit, OK. A
//! program is born into a cgroup of its own (a leaf), so that its whole tree can be ended by one write; without
//! cgroups its session has to do, which a program can leave ([`Runner::contains`] says so). The reaper learns of every
//! end, and ends what the program left behind; the stream tells the exit when nothing is left that could still write,
//! and everything written has been read. Nothing is built that a program does not need: no task for a client that has
//! closed its half, no queue or copy between pipe and HTTP/2.
//!
//! [`Runner::spawn`] starts one that nobody waits for: its output goes to a log, where readers are cursors, and what is
//! kept of it when it has exited fits into half a kilobyte. [`Runner::child`] starts one for another room.
//!
//! May call: clock, gate, reap, refusal, sys, tasks.
//! Never inside: a link, a service. Who may run something is the gate's to say.
//! Cancel safety: dropping [`ExecStream`] or [`Child`], or the future of [`Runner::exec`], [`Runner::run`],
//! [`Runner::spawn`] or [`Runner::run_hook`], ends the program and all it started, at once; a stream or a Run leaves it,
//! detached, where that was asked for or the sandbox goes to sleep. Dropping a reader leaves the program as it is.

mod attach;
mod child;
mod chores;
mod command;
mod core;
mod detached;
mod entry;
mod env;
mod exec;
mod gather;
mod hook;
mod input;
mod job;
mod leaf;
mod log;
mod logs;
mod output;
mod pty;
mod pump;
mod runner;
mod seat;
pub mod session;
mod shared;
mod signals;
mod spawn;
mod strings;
mod table;
mod time;
pub mod users;

#[cfg(test)]
mod tests;

use std::{io, path::PathBuf, sync::Arc};

use bytes::Bytes;
use sandbox_protocol::v1::EnvVar;

pub(crate) use self::job::Job;
use self::shared::Shared;
pub use self::{
    attach::{AttachStream, LogsStream},
    child::{Child, ChildEnds},
    entry::Kind,
    exec::ExecStream,
    hook::{HookEnd, HookOutcome},
    job::Scope,
    runner::Runner,
};
use crate::{gate::Permit, refusal::Refusal};

/// How programs are to be run.
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// A cgroup2 directory that is ours; `work` is made below. `None`: no cgroups here.
    pub cgroup_root: Option<PathBuf>,
    /// This process is PID 1, with protection that its programs must not inherit. Else it becomes a subreaper.
    pub pid1: bool,
}

/// What a claim says about all its programs.
#[derive(Debug, Clone, Default)]
pub struct ClaimDefaults {
    /// Over the image's environment, under the request's.
    pub env: Vec<EnvVar>,
    /// Name or uid, `[:group]`; empty: silkd's own.
    pub user: Bytes,
}

/// What an Exec needs beside its request.
#[derive(Debug)]
pub struct ExecCtx {
    /// Held until the stream ends.
    pub gate: Permit,
    /// The image's environment.
    pub base_env: Arc<Vec<EnvVar>>,
    /// The claim's part.
    pub claim: Arc<ClaimDefaults>,
}

/// An operation of the runner that failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The cgroup of all programs could not be set up.
    #[error("cannot {step} the cgroup {}", path.display())]
    Cgroup {
        /// What was tried.
        step: &'static str,
        /// The directory.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Something that every start needs could not be had.
    #[error("cannot {step}")]
    Setup {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The programs were not frozen or thawed.
    #[error("cannot freeze or thaw the programs")]
    Freeze {
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A hook did not start.
    #[error("the hook {} did not start", path.display())]
    Hook {
        /// The executable.
        path: PathBuf,
        /// Why not.
        #[source]
        source: Refusal,
    },
}
