//! What is known of a program where it is listed, and how it ended. Pure.

use std::time::Duration;

use bytes::Bytes;
use sandbox_protocol::v1::{Exit, Process, ProcessKind, ProcessState, Rusage, exit::How as Told};

use super::{logs::Extent, table::Name};
use crate::{
    clock,
    sys::{Dead, How},
};

/// Bytes of its arguments that are kept while a program runs.
pub(super) const ARGV_LIVE: usize = 4 * 1024;
/// And once it has exited.
pub(super) const ARGV_EXITED: usize = 256;

/// What a program was started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A call that waits for it.
    Exec,
    /// Nobody has to wait for it.
    Detached,
    /// The shell of a session.
    Session,
    /// A git of a call.
    Git,
    /// A language server.
    Lsp,
}

impl Kind {
    /// As messages have it.
    pub(super) const fn on_the_wire(self) -> ProcessKind {
        match self {
            Self::Exec => ProcessKind::Exec,
            Self::Detached => ProcessKind::Detached,
            Self::Session => ProcessKind::Session,
            Self::Git => ProcessKind::Git,
            Self::Lsp => ProcessKind::Lsp,
        }
    }

    /// For messages.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Detached => "detached",
            Self::Session => "session",
            Self::Git => "git",
            Self::Lsp => "lsp",
        }
    }

    /// Whether a call waits for it, so that no template may be captured meanwhile.
    pub(super) const fn is_foreground(self) -> bool {
        match self {
            Self::Exec | Self::Git => true,
            Self::Detached | Self::Session | Self::Lsp => false,
        }
    }
}

/// Arguments in one piece, each ended by a NUL, which none can hold; the last one without if it was cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Argv {
    packed: Box<[u8]>,
    cut: bool,
}

impl Argv {
    /// The first `max` bytes of them.
    pub(super) fn pack(list: &[Bytes], max: usize) -> Self {
        let whole: usize = list.iter().map(|text| text.len().saturating_add(1)).sum();
        let mut packed = Vec::with_capacity(whole.min(max));
        for text in list {
            let room = max - packed.len();
            packed.extend(text.iter().chain(&[0]).take(room));
            if packed.len() >= max {
                break;
            }
        }
        Self {
            packed: packed.into(),
            cut: whole > max,
        }
    }

    /// No more than the first `max` bytes.
    pub(super) fn shrink(&self, max: usize) -> Self {
        Self {
            packed: self.packed.get(..max).unwrap_or(&self.packed).into(),
            cut: self.cut || self.packed.len() > max,
        }
    }

    /// The first one, as far as it is kept.
    pub(super) fn first(&self) -> &[u8] {
        self.packed.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    /// One by one.
    pub(super) fn list(&self) -> Vec<Bytes> {
        let pieces = self.packed.split_inclusive(|byte| *byte == 0);
        let texts = pieces.map(|piece| piece.strip_suffix(&[0]).unwrap_or(piece));
        texts.map(Bytes::copy_from_slice).collect()
    }

    /// Whether something is missing.
    pub(super) const fn is_cut(&self) -> bool {
        self.cut
    }
}

/// How a program ended, as small as it can be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    how: How,
    timed_out: bool,
    oom_suspected: bool,
    user_us: u64,
    system_us: u64,
    max_rss_kib: u32,
    minor_faults: u32,
    major_faults: u32,
    voluntary_switches: u32,
    involuntary_switches: u32,
    wall_us: u64,
    /// Bytes of stdout and of stderr.
    pub(super) said: [u64; 2],
    discarded: u64,
    descendants_killed: u32,
}

/// What a record is made of, beside how the leader died.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Facts {
    pub(super) timed_out: bool,
    pub(super) oom_suspected: bool,
    pub(super) wall: Duration,
    pub(super) said: [u64; 2],
    pub(super) discarded: u64,
    pub(super) descendants_killed: u32,
}

impl Record {
    pub(super) fn new(dead: Dead, facts: Facts) -> Self {
        let usage = dead.usage;
        let short = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        Self {
            how: dead.how,
            timed_out: facts.timed_out,
            oom_suspected: facts.oom_suspected,
            user_us: usage.user_us,
            system_us: usage.system_us,
            max_rss_kib: short(usage.max_rss_kib),
            minor_faults: short(usage.minor_faults),
            major_faults: short(usage.major_faults),
            voluntary_switches: short(usage.voluntary_switches),
            involuntary_switches: short(usage.involuntary_switches),
            wall_us: micros(facts.wall),
            said: facts.said,
            discarded: facts.discarded,
            descendants_killed: facts.descendants_killed,
        }
    }

    /// As messages have it.
    pub(super) fn on_the_wire(&self) -> Exit {
        let [stdout_bytes, stderr_bytes] = self.said;
        Exit {
            how: Some(match self.how {
                How::Code(code) => Told::Code(code),
                How::Signal(signal) => Told::Signal(signal),
            }),
            timed_out: self.timed_out,
            oom_suspected: self.oom_suspected,
            rusage: Some(Rusage {
                user_us: self.user_us,
                system_us: self.system_us,
                max_rss_kib: self.max_rss_kib.into(),
                minor_faults: self.minor_faults.into(),
                major_faults: self.major_faults.into(),
                voluntary_switches: self.voluntary_switches.into(),
                involuntary_switches: self.involuntary_switches.into(),
            }),
            wall_us: self.wall_us,
            stdout_bytes,
            stderr_bytes,
            stdin_discarded: self.discarded,
            descendants_killed: self.descendants_killed,
            work: None,
        }
    }
}

/// What is kept of a program that has exited, beside its log.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Exited {
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) kind: Kind,
    pub(super) name: Name,
    pub(super) key: Name,
    pub(super) argv: Argv,
    /// Wall time, in nanoseconds since 1970.
    pub(super) started: i64,
    /// Since the boot, in milliseconds; `until` ends what is kept.
    pub(super) ended: u64,
    pub(super) until: u64,
    pub(super) record: Record,
    pub(super) tty: bool,
}

impl Exited {
    /// The row of it in a list.
    pub(super) fn row(&self, id: u64, now: u64, extent: Extent) -> Process {
        Process {
            id,
            pid: self.pid,
            name: self
                .name
                .as_deref()
                .map(Bytes::copy_from_slice)
                .unwrap_or_default(),
            kind: self.kind.on_the_wire().into(),
            argv: self.argv.list(),
            argv_cut: self.argv.is_cut(),
            uid: self.uid,
            state: ProcessState::Exited.into(),
            exit: Some(self.record.on_the_wire()),
            started_at: Some(clock::timestamp(clock::from_nanos(self.started.into()))),
            age_ms: now.saturating_sub(self.ended),
            log_start: extent.start,
            log_end: extent.end,
            readers: extent.readers,
            tty: self.tty,
        }
    }
}

/// Whole microseconds.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arguments_come_out_as_they_went_in_or_cut_aloud(
            list in proptest::collection::vec(proptest::collection::vec(1..=255_u8, 0..9), 1..9),
            max in 1..60_usize,
        ) {
            let list: Vec<Bytes> = list.into_iter().map(Bytes::from).collect();
            let packed = Argv::pack(&list, max);
            let whole = Argv::pack(&list, usize::MAX);
            prop_assert_eq!(whole.list(), list.clone());
            prop_assert!(!whole.is_cut());
            prop_assert_eq!(whole.shrink(max), packed.clone());
            prop_assert!(packed.packed.len() <= max);
            prop_assert_eq!(packed.is_cut(), packed != whole);
            for (kept, text) in packed.list().iter().zip(&list) {
                prop_assert!(text.starts_with(kept));
            }
        }
    }
}
