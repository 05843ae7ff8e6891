//! What the lines of both files say. All text of a guest in them was escaped and cut before.

use std::{
    fmt,
    io::Write as _,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use sandbox_protocol::id::{ClaimId, SandboxId};

use super::{
    chain::{Hash, Head},
    usage::Counts,
};
use crate::{
    clock::WallTime,
    egress::{Decided, DoorKind, Outcome, door::Traffic},
    words::{Lane, Name},
};

/// Version of the lines.
const VERSION: u8 = 1;

/// What lay in the files when a daemon took them up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::egress) enum After {
    /// Nothing.
    New,
    /// The line of a clean stop.
    Stop,
    /// Any other line: the last moments of that daemon are in no line.
    Cut,
}

impl After {
    const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Stop => "stop",
            Self::Cut => "cut",
        }
    }
}

/// Whose door it was.
#[derive(Debug, Clone)]
pub(in crate::egress) struct Owner {
    pub(in crate::egress) sandbox: SandboxId,
    pub(in crate::egress) claim: ClaimId,
    pub(in crate::egress) tenant: Arc<str>,
    pub(in crate::egress) pool: Option<Name>,
    pub(in crate::egress) lane: Lane,
}

/// A connection of a guest that is over.
#[derive(Debug)]
pub(in crate::egress) struct Ended {
    pub(in crate::egress) at: WallTime,
    pub(in crate::egress) owner: Owner,
    pub(in crate::egress) door: DoorKind,
    pub(in crate::egress) traffic: Arc<Traffic>,
    pub(in crate::egress) lasted: Duration,
}

/// What becomes a line.
#[derive(Debug)]
pub(in crate::egress) enum Entry {
    /// A daemon took the files up; `torn`: bytes of an unfinished line that it cut off.
    Start { at: WallTime, after: After, torn: u64 },
    /// It stopped, and all before is written.
    Stop { at: WallTime },
    /// A door decided.
    Decision(Arc<Decided>),
    /// A connection is over.
    End(Box<Ended>),
    /// Somebody else changed the packet filter of lane guarded, so many times since it was told.
    LaneLockLost { at: WallTime, count: u64 },
    /// From this number on, up to the line's own, everything was dropped.
    Lost { from: u64 },
    /// Files that have outlived what is kept go behind this: so many, with the lines of these numbers.
    Deleted {
        at: WallTime,
        files: u64,
        from: u64,
        to: u64,
    },
    /// A sync failed: the lines of these numbers may not be on the disk, whatever the files say now.
    Unsynced { at: WallTime, from: u64, to: u64 },
    /// What a claim used since its line before.
    Usage(Box<Used>),
    /// What was used between these times is in no line: at most a minute, of a daemon that was killed.
    UsageGap { since: WallTime, at: WallTime },
}

/// What a claim used in a while.
#[derive(Debug)]
pub(in crate::egress) struct Used {
    pub(in crate::egress) since: WallTime,
    pub(in crate::egress) at: WallTime,
    pub(in crate::egress) owner: Owner,
    pub(in crate::egress) counts: Counts,
    /// The claim is over: it has no later line.
    pub(in crate::egress) is_last: bool,
}

/// Writes the fields of one line, in their order, straight to where they go.
struct Line<'o>(&'o mut Vec<u8>);

impl<'o> Line<'o> {
    fn new(out: &'o mut Vec<u8>, seq: u64, time: WallTime, kind: &str) -> Self {
        out.clear();
        out.push(b'{');
        let mut line = Self(out);
        line.number("v", u64::from(VERSION));
        line.number("seq", seq);
        line.shown("time", time);
        line.word("kind", kind);
        line
    }

    fn key(&mut self, key: &str) {
        if self.0.len() > 1 {
            self.0.push(b',');
        }
        self.0.push(b'"');
        self.0.extend_from_slice(key.as_bytes());
        self.0.extend_from_slice(b"\":");
    }

    /// Text of which no character needs an escape.
    fn shown(&mut self, key: &str, value: impl fmt::Display) {
        self.key(key);
        write!(self.0, "\"{value}\"").expect(INFALLIBLE);
    }

    /// The same of a word of ours.
    fn word(&mut self, key: &str, word: &str) {
        self.key(key);
        self.0.push(b'"');
        self.0.extend_from_slice(word.as_bytes());
        self.0.push(b'"');
    }

    /// Any text, where there is one.
    fn text(&mut self, key: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        if text
            .bytes()
            .all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\')
        {
            return self.word(key, text);
        }
        self.key(key);
        serde_json::to_writer(&mut *self.0, text).expect(INFALLIBLE);
    }

    fn number(&mut self, key: &str, number: u64) {
        self.key(key);
        write!(self.0, "{number}").expect(INFALLIBLE);
    }

    fn flag(&mut self, key: &str, flag: bool) {
        self.key(key);
        self.0.extend_from_slice(if flag { b"true" } else { b"false" });
    }

    fn owner(&mut self, owner: &Owner) {
        self.shown("sandbox", owner.sandbox);
        self.shown("claim", owner.claim);
        self.text("tenant", &owner.tenant);
        self.text("pool", owner.pool.as_ref().map_or("", Name::as_str));
        self.word("lane", owner.lane.as_str());
    }

    fn stretch(&mut self, from: u64, to: u64) {
        self.number("from", from);
        self.number("to", to);
    }

    fn end(self) {
        self.0.push(b'}');
    }
}

/// Why writing to memory cannot fail.
const INFALLIBLE: &str = "a Vec takes every byte";

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The first line of a file: what it follows.
pub(super) fn open(before: Head, chained: Hash, at: WallTime, out: &mut Vec<u8>) {
    let mut line = Line::new(out, before.seq, at, "open");
    line.shown("prev", chained);
    line.end();
}

/// What a line is, and when it happened.
fn kind(entry: &Entry, now: WallTime) -> (&'static str, WallTime) {
    match entry {
        Entry::Start { at, .. } => ("start", *at),
        Entry::Stop { at } => ("stop", *at),
        Entry::Decision(decided) => ("decision", decided.at),
        Entry::End(ended) => ("end", ended.at),
        Entry::LaneLockLost { at, .. } => ("lane_lock_lost", *at),
        Entry::Lost { .. } => ("lost", now),
        Entry::Deleted { at, .. } => ("deleted", *at),
        Entry::Unsynced { at, .. } => ("unsynced", *at),
        Entry::Usage(used) => ("usage", used.at),
        Entry::UsageGap { at, .. } => ("usage_gap", *at),
    }
}

/// The text of a line without its hash.
pub(super) fn body(seq: u64, entry: &Entry, now: WallTime, out: &mut Vec<u8>) {
    let (kind, at) = kind(entry, now);
    let mut line = Line::new(out, seq, at, kind);
    match entry {
        Entry::Start { after, torn, .. } => {
            line.word("after", after.as_str());
            if *torn > 0 {
                line.number("torn", *torn);
            }
        }
        Entry::Stop { .. } => {}
        Entry::Decision(decided) => decision(decided, &mut line),
        Entry::End(ended) => end(ended, &mut line),
        Entry::LaneLockLost { count, .. } => line.number("count", *count),
        Entry::Lost { from } => {
            line.number("count", seq.saturating_sub(*from) + 1);
            line.stretch(*from, seq);
        }
        Entry::Deleted { files, from, to, .. } => {
            line.number("count", *files);
            line.stretch(*from, *to);
        }
        Entry::Unsynced { from, to, .. } => line.stretch(*from, *to),
        Entry::Usage(used) => usage(used, &mut line),
        Entry::UsageGap { since, .. } => {
            if since.as_micros() > 0 {
                line.shown("since", *since);
            }
        }
    }
    line.end();
}

fn usage(used: &Used, line: &mut Line<'_>) {
    line.owner(&used.owner);
    line.shown("since", used.since);
    let Counts {
        requests,
        denials,
        connections,
        sent,
        received,
    } = used.counts;
    line.number("requests", requests);
    line.number("denials", denials);
    line.number("connections", connections);
    line.number("bytes_sent", sent);
    line.number("bytes_received", received);
    if used.is_last {
        line.flag("last", true);
    }
}

fn end(ended: &Ended, line: &mut Line<'_>) {
    let Traffic {
        sent,
        received,
        requests,
        tunnel,
        ..
    } = &*ended.traffic;
    line.owner(&ended.owner);
    line.word("door", ended.door.as_str());
    if let Some((decided, address)) = tunnel.get() {
        line.text("target", &decided.target);
        line.shown("address", address);
    }
    line.number("requests", requests.load(Ordering::Relaxed));
    line.number("bytes_sent", sent.load(Ordering::Relaxed));
    line.number("bytes_received", received.load(Ordering::Relaxed));
    line.number("duration_us", micros(ended.lasted));
}

fn decision(decided: &Decided, line: &mut Line<'_>) {
    let (decision, reason, address) = match (&decided.outcome, decided.would_deny) {
        (Outcome::Denied(reason), _) => ("deny", Some(*reason), None),
        (Outcome::Allowed(address), true) => ("would_deny", None, Some(address)),
        (Outcome::Allowed(address), false) => ("allow", None, Some(address)),
    };
    line.shown("sandbox", decided.sandbox);
    if let Some(claim) = decided.claim {
        line.shown("claim", claim);
    }
    line.text("tenant", &decided.tenant);
    line.text("pool", decided.pool.as_ref().map_or("", Name::as_str));
    line.word("lane", decided.lane.as_str());
    line.word("door", decided.door.as_str());
    line.text("target", &decided.target);
    line.text("method", &decided.method);
    line.text("path", &decided.path);
    line.word("decision", decision);
    if let Some(reason) = reason {
        line.word("reason", reason.as_str());
    }
    if let Some(side) = decided.side {
        line.word("layer", side.as_str());
    }
    line.text("rule", decided.rule.as_deref().unwrap_or_default());
    line.text("secret", decided.secret.as_deref().unwrap_or_default());
    if let Some(address) = address {
        line.shown("address", address);
        line.flag("vetted", decided.way.vetted);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    proptest! {
        /// Whatever text is in a line, it is read as it was.
        #[test]
        fn any_text_is_read_as_it_was(text in "\\PC*|[\u{0}-\u{7f}]*") {
            let mut out = Vec::new();
            let mut line = Line::new(&mut out, 7, WallTime::from_micros(1), "decision");
            line.text("target", &text);
            line.number("count", u64::MAX);
            line.flag("last", false);
            line.end();
            let read: Value = serde_json::from_slice(&out).unwrap();
            let target = Some(text.as_str()).filter(|text| !text.is_empty());
            prop_assert_eq!(read["target"].as_str(), target);
            prop_assert_eq!(&read["seq"], 7);
            prop_assert_eq!(read["count"].as_u64(), Some(u64::MAX));
            prop_assert_eq!(&read["last"], false);
            prop_assert_eq!(&read["time"], "1970-01-01T00:00:00.000001Z");
        }
    }
}
