//! States and conditions of a guest, as words of ours.

use sandbox_protocol::v1;

use crate::clock::WallTime;

/// Where silkd is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Booted, never renewed: nothing runs.
    Fresh,
    /// Programs may be started.
    Ready,
    /// At rest for a capture.
    Quiesced,
    /// Getting its identity.
    Renewing,
}

impl State {
    /// What a guest's number means; none for one that this build does not know.
    #[must_use]
    pub fn from_wire(state: i32) -> Option<Self> {
        match v1::AgentState::try_from(state).ok()? {
            v1::AgentState::Unspecified => None,
            v1::AgentState::Fresh => Some(Self::Fresh),
            v1::AgentState::Ready => Some(Self::Ready),
            v1::AgentState::Quiesced => Some(Self::Quiesced),
            v1::AgentState::Renewing => Some(Self::Renewing),
        }
    }
}

macro_rules! conditions {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Kinds of trouble of a guest.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum ConditionName { $($(#[$doc])* $name,)* }

        impl ConditionName {
            const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// As it is told.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

conditions! {
    /// The kernel killed a program for want of memory.
    OomKill = "OOM_KILL",
    /// A program could not fork.
    PidsLimit = "PIDS_LIMIT",
    /// silkd has few descriptors left.
    FdPressure = "FD_PRESSURE",
    /// `/tmp` is full.
    TmpFull = "TMP_FULL",
    /// The guest's kernel has no cgroups to hold programs in.
    NoContainment = "NO_CONTAINMENT",
    /// The doors of the guest cannot be opened again: it reaches nothing. The host's word, and no guest's.
    DoorsLost = "DOORS_LOST",
}

/// Trouble that a guest tells of, or its host.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    /// Which.
    pub name: ConditionName,
    /// How often, since the guest booted.
    pub count: u64,
    /// When last, by the clock of who tells it.
    pub last_at: Option<prost_types::Timestamp>,
}

impl Condition {
    /// What a guest told; none if this build knows no such condition.
    #[must_use]
    pub fn from_wire(wire: &v1::Condition) -> Option<Self> {
        let known = |name: &&ConditionName| **name != ConditionName::DoorsLost && name.as_str() == wire.name;
        Some(Self {
            name: *ConditionName::ALL.iter().find(known)?,
            count: wire.count,
            last_at: wire.last_at,
        })
    }

    /// The host cannot open the guest's doors.
    #[must_use]
    pub fn doors_lost(at: WallTime) -> Self {
        Self {
            name: ConditionName::DoorsLost,
            count: 1,
            last_at: Some(at.to_proto()),
        }
    }

    /// One of each name at most, whatever a guest sent.
    #[must_use]
    pub fn list(wire: &[v1::Condition]) -> Vec<Self> {
        let mut list: Vec<Self> = Vec::new();
        for condition in wire.iter().filter_map(Self::from_wire) {
            if !list.iter().any(|known| known.name == condition.name) {
                list.push(condition);
            }
        }
        list
    }

    /// As the API has it.
    #[must_use]
    pub fn to_proto(&self) -> v1::Condition {
        v1::Condition {
            name: self.name.as_str().to_owned(),
            count: self.count,
            last_at: self.last_at,
        }
    }
}
