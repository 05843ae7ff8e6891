//! Rows of the journal, read back: what a restarted daemon knows of a sandbox.

use std::{sync::Arc, time::Duration};

use sandbox_protocol::id::SandboxId;

use super::{
    entry::{AgentFacts, Birth},
    life::{Claim, Life, Why, WhyKind},
};
use crate::{
    clock::Clock,
    engine::Identity,
    journal::{RowState, SandboxRow},
    names::SlotNumber,
};

/// A row whose life can go on, if its machine is found.
#[derive(Debug)]
pub struct Adoptable {
    pub(super) birth: Birth,
    pub(super) tap: Option<SlotNumber>,
    /// Its process, to be proved before anything is done with it.
    pub identity: Identity,
    /// What its agent said when it was warm; shown until it answers again.
    pub(super) agent: AgentFacts,
}

impl Adoptable {
    /// Its place.
    #[must_use]
    pub const fn slot(&self) -> SlotNumber {
        self.birth.slot
    }
}

/// What a row says, as a life of this daemon.
///
/// Elapsed time does not compare across boots: a lease of an earlier boot (`rebooted`) lasts as long as its wall time says.
pub(super) fn birth(id: SandboxId, row: &SandboxRow, rebooted: Option<&Clock>) -> Birth {
    let mut claim = row.claim.as_deref().and_then(Claim::from_facts);
    if let (Some(claim), Some(clock)) = (&mut claim, rebooted) {
        let left = claim
            .lease
            .expires_at
            .as_micros()
            .saturating_sub(clock.wall().as_micros());
        claim.lease.until = clock.tick().plus(Duration::from_micros(left));
    }
    let why = || Why::parse(row.why.as_deref().unwrap_or_default());
    let damaged = || Life::Quarantined {
        why: Why::of(WhyKind::RecordDamaged),
    };
    let life = match (row.state, claim) {
        (RowState::Making, _) => Life::Making,
        (RowState::Warm, _) => Life::Warm,
        (RowState::Claimed, Some(claim)) => Life::Claimed(claim),
        (RowState::Ending, claim) => Life::Ending {
            owed: claim.is_some() && why().kind.is_news(),
            why: why(),
            claim,
        },
        (RowState::Failed, Some(claim)) => Life::Failed { why: why(), claim },
        (RowState::Quarantined, _) => Life::Quarantined { why: why() },
        (RowState::Gone, claim) => Life::Gone { why: why(), claim },
        (RowState::Claimed | RowState::Failed, None) => damaged(),
    };
    Birth {
        id,
        slot: row.slot,
        key: row.key.clone(),
        pool: row.pool.clone(),
        made_as: row.tier,
        digest: Arc::from(row.template_digest.as_str()),
        created_at: row.created_at,
        life,
    }
}

/// The row of a sandbox that was warm or claimed, ready to be taken up; none for every other row.
#[must_use]
pub fn adoptable(id: SandboxId, row: &SandboxRow) -> Option<Adoptable> {
    let birth = birth(id, row, None);
    let warmed = row.warmed.as_ref()?;
    let agent = AgentFacts {
        proto: warmed.proto,
        version: warmed.agent_version.clone(),
        pid: warmed.pid,
    };
    let identity = Identity {
        pid: warmed.pid,
        started: warmed.started,
    };
    matches!(birth.life, Life::Warm | Life::Claimed(_)).then(|| Adoptable {
        tap: row.holds_tap(),
        birth,
        identity,
        agent,
    })
}
