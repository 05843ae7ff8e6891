//! What can go wrong with a machine.

use std::{io, path::PathBuf, time::Duration};

use super::{CaptureError, ExitReport};
use crate::names::SlotNumber;

/// A failed operation of an engine or machine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The slot's run directory exists already: its last machine was not torn down.
    #[error("slot {slot} is taken: its run directory exists")]
    SlotTaken {
        /// The slot.
        slot: SlotNumber,
    },
    /// The machine no longer runs.
    #[error("the machine is gone: {why}")]
    Gone {
        /// How that is known.
        why: String,
    },
    /// Something lives in a slot's directory and cannot be told from a stranger; nothing was signalled.
    #[error("cannot prove what lives in {}: {why}", dir.display())]
    Unproven {
        /// Its run directory.
        dir: PathBuf,
        /// What is missing.
        why: String,
    },
    /// A call to the host failed.
    #[error("cannot {what}")]
    Host {
        /// The operation.
        what: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The emulator refused a command.
    #[error("QEMU refused `{command}`: {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// Its reason, escaped and cut.
        reason: String,
    },
    /// A step took too long.
    #[error("{what}: not done within {limit:?}")]
    Late {
        /// The step.
        what: &'static str,
        /// How long it could take.
        limit: Duration,
    },
    /// The machine ended while it was being made.
    #[error("ended while it was made: {0}")]
    Died(ExitReport),
    /// The capture cannot be loaded here.
    #[error("cannot use the template's capture")]
    Capture(#[source] CaptureError),
    /// This engine, image or machine cannot do that.
    #[error("not possible: {0}")]
    Unsupported(&'static str),
    /// The stub was told to fail here.
    #[error("failed by the fault script: {0}")]
    Scripted(&'static str),
    /// The engine was stopped.
    #[error("the engine is stopped")]
    Stopped,
}

impl EngineError {
    /// Whether the host has run out of something that others may give back: descriptors, processes, memory, disk.
    #[must_use]
    pub fn is_exhaustion(&self) -> bool {
        let Self::Host { source, .. } = self else {
            return false;
        };
        source
            .raw_os_error()
            .map(rustix::io::Errno::from_raw_os_error)
            .is_some_and(|errno| {
                use rustix::io::Errno;
                [
                    Errno::MFILE,
                    Errno::NFILE,
                    Errno::NOMEM,
                    Errno::AGAIN,
                    Errno::NOSPC,
                ]
                .contains(&errno)
            })
    }

    /// A failed call to the host.
    pub(super) fn host(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Host {
            what: what.into(),
            source: source.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn h07_a_host_that_is_full_is_told_from_one_that_fails() {
        for (errno, full) in [
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::NOMEM, true),
            (Errno::AGAIN, true),
            (Errno::NOSPC, true),
            (Errno::ACCESS, false),
            (Errno::NOENT, false),
        ] {
            assert_eq!(EngineError::host("try", errno).is_exhaustion(), full, "{errno}");
        }
        assert!(!EngineError::Stopped.is_exhaustion());
    }
}
