//! What doors decided: a bounded ring for those who ask later, and a lossy feed for those who watch. Nobody waits.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use sandbox_protocol::{
    door::DoorReason,
    id::{ClaimId, SandboxId},
};

use super::{
    DoorKind, Way,
    audit::{Audit, Entry},
};
use crate::{
    clock::{Clock, WallTime},
    feed::{self, Feed, Reader},
    policy::Side,
    telemetry::metrics::DoorMetrics,
    words::{Lane, Name},
};

/// Decisions that are kept for a watcher who begins in the past: as many as one may be behind.
const KEPT: usize = feed::BEHIND;

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was let through to this address: of the target, or where its way is not vetted, of the upstream proxy.
    Allowed(std::net::SocketAddr),
    /// It was refused.
    Denied(DoorReason),
}

/// One decision. All text in it is escaped and short.
#[derive(Debug, Clone)]
pub struct Decided {
    /// Counts up by one for each decision of this daemon's life.
    pub seq: u64,
    /// Number of its line in the audit; 0: it has none.
    pub audit_seq: u64,
    /// When.
    pub at: WallTime,
    /// Whose door.
    pub sandbox: SandboxId,
    /// For which claim; none: the door was not armed.
    pub claim: Option<ClaimId>,
    /// Whose claim.
    pub tenant: Arc<str>,
    /// Which pool served it.
    pub pool: Option<Name>,
    /// Which door.
    pub door: DoorKind,
    /// By which lane its guest is connected.
    pub lane: Lane,
    /// `host:port`, or what could not be read as that.
    pub target: String,
    /// Of a plain request; empty: a tunnel.
    pub method: String,
    /// Its path, without query.
    pub path: String,
    /// What became of it.
    pub outcome: Outcome,
    /// The side that decided.
    pub side: Option<Side>,
    /// The rule that decided.
    pub rule: Option<String>,
    /// Its message to those it denies.
    pub message: Option<String>,
    /// A layer in report mode denies it.
    pub would_deny: bool,
    /// Name of the secret that the request is given, or should have been.
    pub secret: Option<String>,
    /// Which way it went.
    pub way: Way,
}

/// All decisions.
#[derive(Debug)]
pub struct Decisions {
    ring: Mutex<Ring>,
    feed: Feed<Arc<Decided>>,
    metrics: DoorMetrics,
    clock: Clock,
    audit: Audit,
}

#[derive(Debug, Default)]
struct Ring {
    last: u64,
    kept: VecDeque<Arc<Decided>>,
}

impl Decisions {
    pub(super) fn new(metrics: DoorMetrics, clock: Clock, audit: Audit) -> Self {
        Self {
            ring: Mutex::default(),
            feed: Feed::default(),
            metrics,
            clock,
            audit,
        }
    }

    pub(super) const fn audit(&self) -> &Audit {
        &self.audit
    }

    pub(super) const fn metrics(&self) -> &DoorMetrics {
        &self.metrics
    }

    pub(super) const fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Counts, and gives it its line: nothing of it is kept elsewhere. For what a door answered without having read
    /// anything, which is no news for whoever watches.
    pub(super) fn write(&self, mut decided: Decided) -> u64 {
        self.count(&decided);
        decided.at = self.clock.wall();
        self.line(decided).audit_seq
    }

    /// Gives a decision its line in the audit.
    fn line(&self, mut decided: Decided) -> Arc<Decided> {
        self.audit.push(|seq| {
            decided.audit_seq = seq;
            let decided = Arc::new(decided);
            (Entry::Decision(Arc::clone(&decided)), decided)
        })
    }

    fn count(&self, decided: &Decided) {
        let reason = match &decided.outcome {
            Outcome::Allowed(_) => None,
            Outcome::Denied(reason) => Some(*reason),
        };
        let door = decided.door.as_str();
        self.metrics
            .decided(door, decided.lane, reason, decided.would_deny);
    }

    /// Numbers, dates, keeps and tells a decision.
    pub(super) fn record(&self, mut decided: Decided) -> Arc<Decided> {
        self.count(&decided);
        decided.at = self.clock.wall();
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.last += 1;
        decided.seq = ring.last;
        let decided = self.line(decided);
        if ring.kept.len() == KEPT {
            ring.kept.pop_front();
        }
        ring.kept.push_back(Arc::clone(&decided));
        // Under the lock, so that they are told in their order.
        self.feed.tell(|| Arc::clone(&decided));
        decided
    }

    /// Decisions that are kept from `from` on, how many before them are not kept any more, and a reader of all later ones.
    #[must_use]
    pub fn read(&self, from: Option<u64>) -> (Vec<Arc<Decided>>, u64, Reader<Arc<Decided>>) {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let reader = self.feed.read();
        let Some(from) = from else {
            return (Vec::new(), 0, reader);
        };
        let first = ring.kept.front().map_or(ring.last + 1, |decided| decided.seq);
        let kept = ring.kept.iter().filter(|decided| decided.seq >= from).cloned();
        (kept.collect(), first.saturating_sub(from.max(1)), reader)
    }
}
