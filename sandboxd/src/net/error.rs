//! What can go wrong with a lane.

use std::{io, path::PathBuf};

use sandbox_protocol::reason::Reason;

use crate::{names::SlotNumber, words::Name};

/// A lane cannot be had, or cannot do something.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// It was not asked for.
    #[error("lane guarded is not available on this host: net.slots is 0")]
    Off,
    /// We may not.
    #[error("{what} needs root: CAP_NET_ADMIN and CAP_SYS_ADMIN")]
    NotAllowed {
        /// What was tried.
        what: &'static str,
    },
    /// The kernel cannot.
    #[error("{what}: this kernel lacks {lacks}")]
    Kernel {
        /// What was tried.
        what: &'static str,
        /// What it lacks, by the name of its option.
        lacks: &'static str,
        /// Its word.
        #[source]
        source: io::Error,
    },
    /// The kernel refused.
    #[error("cannot {what}{}", .place.as_ref().map(|place| format!(" {}", place.display())).unwrap_or_default())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file, if any.
        place: Option<PathBuf>,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// The namespace has links that are up and not ours: it may lead somewhere.
    #[error("network namespace {namespace} is not ours alone: it has {}", .links.join(", "))]
    Foreign {
        /// The namespace.
        namespace: Name,
        /// Their names.
        links: Vec<String>,
    },
    /// Another daemon has the namespace.
    #[error("network namespace {namespace} is held by another daemon")]
    Held {
        /// The namespace.
        namespace: Name,
    },
    /// Every slot is somebody's, or not free yet. Retryable.
    #[error("all {slots} network slots are in use")]
    NoSlot {
        /// `net.slots`.
        slots: u16,
    },
    /// The packet filter is not in force; nothing is handed out until it is. Retryable.
    #[error("the packet filter of the guests' network is not in force")]
    Unlocked,
    /// A slot cannot do this in its state: a bug of ours.
    #[error("network slot {slot} is not in a state for this")]
    OutOfPlace {
        /// The slot.
        slot: SlotNumber,
    },
    /// A sandbox of an earlier daemon has no slot any more.
    #[error("its network slot was not taken up")]
    Lost,
    /// The lane has ended.
    #[error("the lane thread has ended")]
    Ended,
}

impl NetError {
    /// Its reason at the border.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        match self {
            Self::NoSlot { .. } => Reason::Capacity,
            Self::Unlocked => Reason::LaneUnlocked,
            Self::Off
            | Self::NotAllowed { .. }
            | Self::Kernel { .. }
            | Self::Io { .. }
            | Self::Foreign { .. }
            | Self::Held { .. }
            | Self::OutOfPlace { .. }
            | Self::Lost
            | Self::Ended => Reason::LaneUnavailable,
        }
    }

    /// The kernel's word on something, told apart as far as it says why.
    pub(super) fn io(what: &'static str, place: Option<PathBuf>, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NotAllowed { what },
            _ => Self::Io { what, place, source },
        }
    }

    /// The same where a missing part of the kernel shows as this.
    pub(super) fn lacking(
        what: &'static str,
        lacks: &'static str,
        place: Option<PathBuf>,
        source: io::Error,
    ) -> Self {
        match source.raw_os_error() {
            Some(
                libc::ENOENT
                | libc::ENODEV
                | libc::ENXIO
                | libc::EOPNOTSUPP
                | libc::EPROTONOSUPPORT
                | libc::EAFNOSUPPORT
                | libc::EINVAL,
            ) => Self::Kernel { what, lacks, source },
            _ => Self::io(what, place, source),
        }
    }
}
