//! What the lines of both files say. All text of a guest in them was escaped and cut before.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use sandbox_protocol::id::{ClaimId, SandboxId};
use serde::Serialize;

use super::{
    chain::{Hash, Head},
    usage::Counts,
};
use crate::{
    clock::WallTime,
    egress::{Decided, DoorKind, Outcome, door::Traffic},
    policy::Side,
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

#[derive(Debug, Default, Serialize)]
struct Line<'a> {
    v: u8,
    seq: u64,
    time: String,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prev: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    door: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decision: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vetted: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    denials: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connections: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_sent: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_received: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    torn: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<bool>,
}

fn text(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn write(line: &Line<'_>, out: &mut Vec<u8>) {
    out.clear();
    serde_json::to_writer(out, line).expect("lines have text keys and a Vec takes every byte");
}

/// The first line of a file: what it follows.
pub(super) fn open(before: Head, chained: Hash, at: WallTime, out: &mut Vec<u8>) {
    let line = Line {
        v: VERSION,
        seq: before.seq,
        time: at.to_string(),
        kind: "open",
        prev: Some(chained.to_string()),
        ..Line::default()
    };
    write(&line, out);
}

/// The text of a line without its hash.
pub(super) fn body(seq: u64, entry: &Entry, now: WallTime, out: &mut Vec<u8>) {
    let at = |kind, time: WallTime| Line {
        v: VERSION,
        seq,
        time: time.to_string(),
        kind,
        ..Line::default()
    };
    let line = match entry {
        Entry::Start {
            at: time,
            after,
            torn,
        } => Line {
            after: Some(after.as_str()),
            torn: Some(*torn).filter(|torn| *torn > 0),
            ..at("start", *time)
        },
        Entry::Stop { at: time } => at("stop", *time),
        Entry::Decision(decided) => decision(decided, at("decision", decided.at)),
        Entry::End(ended) => end(ended, owned(&ended.owner, at("end", ended.at))),
        Entry::LaneLockLost { at: time, count } => Line {
            count: Some(*count),
            ..at("lane_lock_lost", *time)
        },
        Entry::Lost { from } => Line {
            count: Some(seq.saturating_sub(*from) + 1),
            from: Some(*from),
            to: Some(seq),
            ..at("lost", now)
        },
        Entry::Unsynced { at: time, from, to } => Line {
            from: Some(*from),
            to: Some(*to),
            ..at("unsynced", *time)
        },
        Entry::Usage(used) => Line {
            since: Some(used.since.to_string()),
            requests: Some(used.counts.requests),
            denials: Some(used.counts.denials),
            connections: Some(used.counts.connections),
            bytes_sent: Some(used.counts.sent),
            bytes_received: Some(used.counts.received),
            last: Some(used.is_last).filter(|last| *last),
            ..owned(&used.owner, at("usage", used.at))
        },
        Entry::UsageGap { since, at: time } => Line {
            since: Some(since.to_string()).filter(|_| since.as_micros() > 0),
            ..at("usage_gap", *time)
        },
    };
    write(&line, out);
}

fn owned<'a>(owner: &'a Owner, line: Line<'a>) -> Line<'a> {
    Line {
        sandbox: Some(owner.sandbox.to_string()),
        claim: Some(owner.claim.to_string()),
        tenant: Some(&owner.tenant),
        pool: owner.pool.as_ref().map(Name::as_str),
        lane: Some(owner.lane.as_str()),
        ..line
    }
}

fn end<'a>(ended: &'a Ended, line: Line<'a>) -> Line<'a> {
    let Traffic {
        sent,
        received,
        requests,
        tunnel,
        ..
    } = &*ended.traffic;
    let tunnel = tunnel.get();
    Line {
        door: Some(ended.door.as_str()),
        target: tunnel.map(|(decided, _)| decided.target.as_str()),
        address: tunnel.map(|(_, address)| *address),
        requests: Some(requests.load(Ordering::Relaxed)),
        bytes_sent: Some(sent.load(Ordering::Relaxed)),
        bytes_received: Some(received.load(Ordering::Relaxed)),
        duration_us: Some(micros(ended.lasted)),
        ..line
    }
}

fn decision<'a>(decided: &'a Decided, line: Line<'a>) -> Line<'a> {
    let (decision, reason, address) = match (&decided.outcome, decided.would_deny) {
        (Outcome::Denied(reason), _) => ("deny", Some(reason.as_str()), None),
        (Outcome::Allowed(address), true) => ("would_deny", None, Some(*address)),
        (Outcome::Allowed(address), false) => ("allow", None, Some(*address)),
    };
    Line {
        sandbox: Some(decided.sandbox.to_string()),
        claim: decided.claim.map(|claim| claim.to_string()),
        tenant: text(&decided.tenant),
        pool: decided.pool.as_ref().map(Name::as_str),
        lane: Some(decided.lane.as_str()),
        door: Some(decided.door.as_str()),
        target: text(&decided.target),
        method: text(&decided.method),
        path: text(&decided.path),
        decision: Some(decision),
        reason,
        layer: decided.side.map(Side::as_str),
        rule: decided.rule.as_deref(),
        secret: decided.secret.as_deref(),
        vetted: address.map(|_| decided.way.vetted),
        address,
        ..line
    }
}
