//! The fold: records to state. Pure and total, whatever the order of the records.
//!
//! Ends absorb: after Ending no claim, after Gone nothing. A second claim of one sandbox changes nothing:
//! invariant 1 of ARCHITECTURE.md, in the record's terms.

use std::{collections::BTreeMap, time::Duration};

use sandbox_protocol::id::SandboxId;
use serde::{Deserialize, Serialize};

use super::record::{ClaimFacts, HeadRow, PoolRow, Record, Transition, Unknown, as_text};
use crate::{
    clock::WallTime,
    names::SlotNumber,
    words::{Accel, EngineKind, Name, PoolKey, Tier},
};

/// How long the row of a sandbox that is gone is kept, so that its claimer can still learn what became of it.
pub const GONE_KEPT: Duration = Duration::from_secs(600);
/// Rows of gone sandboxes that are kept at most, the newest: at some 700 bytes each, 3 MiB.
pub const GONE_MAX: usize = 4096;

/// Where a sandbox stands in the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowState {
    /// Intended, perhaps half there.
    Making,
    /// In stock.
    Warm,
    /// Somebody's.
    Claimed,
    /// Being taken down.
    Ending,
    /// Dead, its claimer not told.
    Failed,
    /// Nothing left on the host.
    Gone,
    /// Given to nobody, ended by an operator.
    Quarantined,
}

/// What is known of a running VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WarmFacts {
    /// Process of the VM, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// When that process started, in the kernel's clock ticks since boot.
    pub started: u64,
    /// How many times the guest was renewed.
    pub generation: u64,
    /// Agent proto that was agreed on.
    pub proto: u32,
    /// What silkd says it is.
    pub agent_version: String,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// All that the records say of one sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxRow {
    /// Which sandbox.
    #[serde(with = "as_text")]
    pub id: SandboxId,
    /// Where it stands.
    pub state: RowState,
    /// Number of the record of its beginning. Of two rows with one slot the one with the higher number has it.
    #[serde(default)]
    pub first_seq: u64,
    /// Number of the last record that changed this row.
    pub seq: u64,
    /// Its place on the host.
    pub slot: SlotNumber,
    /// What it is made of.
    pub key: PoolKey,
    /// The slot of its TAP, on lane guarded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<SlotNumber>,
    /// The pool it was made for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Name>,
    /// How it was made.
    pub tier: Tier,
    /// What runs it.
    pub engine: EngineKind,
    /// On what.
    pub accel: Accel,
    /// Digest of its template.
    pub template_digest: String,
    /// When it was begun.
    pub created_at: WallTime,
    /// The host's boot that it was begun in; its VM lives in no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// Its VM, once it was warm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmed: Option<WarmFacts>,
    /// Its claim, once it was claimed; kept through its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Box<ClaimFacts>>,
    /// Why it ends, failed or is quarantined: the first reason given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// When it was gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_at: Option<WallTime>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

impl SandboxRow {
    /// The slot of its TAP, unless nothing of it is left on the host.
    #[must_use]
    pub fn holds_tap(&self) -> Option<SlotNumber> {
        self.tap.filter(|_| match self.state {
            RowState::Gone | RowState::Failed => false,
            RowState::Making
            | RowState::Warm
            | RowState::Claimed
            | RowState::Ending
            | RowState::Quarantined => true,
        })
    }
}

/// All that the records say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct State {
    /// Every sandbox that lives, and those gone of late.
    pub sandboxes: BTreeMap<SandboxId, SandboxRow>,
    /// Pools made through the API.
    pub pools: BTreeMap<Name, PoolRow>,
    /// Whether the host drains.
    pub drain: bool,
    /// The boot of the last start.
    pub boot_id: Option<String>,
    /// How far the disk has the files of the audit.
    pub heads: Heads,
}

/// How far the disk has the files of the audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heads {
    /// Of decisions and connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<HeadRow>,
    /// Of what claims used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<HeadRow>,
}

impl Heads {
    /// Takes in what is said; what is not said stays.
    pub(super) fn take(&mut self, audit: Option<&HeadRow>, usage: Option<&HeadRow>) {
        for (mine, said) in [(&mut self.audit, audit), (&mut self.usage, usage)] {
            if let Some(said) = said {
                *mine = Some(said.clone());
            }
        }
    }
}

impl State {
    /// Forgets sandboxes that are gone for longer than [`GONE_KEPT`], and the oldest beyond [`GONE_MAX`].
    pub fn prune(&mut self, now: WallTime) {
        let gone = self
            .sandboxes
            .values()
            .filter_map(|row| row.gone_at.map(|at| (at, row.id)));
        let mut gone: Vec<(WallTime, SandboxId)> = gone.collect();
        gone.sort_unstable();
        let over = gone.len().saturating_sub(GONE_MAX);
        for (place, (at, id)) in gone.into_iter().enumerate() {
            if place < over || is_old(at, now) {
                self.sandboxes.remove(&id);
            }
        }
    }
}

/// Whether a sandbox that went then has been kept long enough.
pub(super) fn is_old(gone_at: WallTime, now: WallTime) -> bool {
    gone_at.plus(GONE_KEPT) < now
}

/// Takes one record into the state. A record that does not fit the state changes nothing.
pub fn fold(state: &mut State, record: &Record) {
    match (&record.transition, record.sandbox) {
        (Transition::Boot { boot_id }, _) => state.boot_id = Some(boot_id.clone()),
        (Transition::Drain { on }, _) => state.drain = *on,
        (Transition::Audited { audit, usage }, _) => state.heads.take(audit.as_ref(), usage.as_ref()),
        (Transition::PoolDeleted { name }, _) => drop(state.pools.remove(name)),
        (Transition::PoolApplied { spec }, _) => drop(state.pools.insert(spec.name.clone(), spec.clone())),
        (Transition::Making { .. }, Some(id)) => making(state, id, record),
        (
            Transition::Warmed { .. }
            | Transition::Claimed(_)
            | Transition::Renewed { .. }
            | Transition::Narrowed { .. }
            | Transition::Ending { .. }
            | Transition::Failed { .. }
            | Transition::Gone
            | Transition::Quarantined { .. },
            Some(id),
        ) => {
            if let Some(row) = state.sandboxes.get_mut(&id)
                && step(row, record)
            {
                row.seq = record.seq;
            }
        }
        (
            Transition::Making { .. }
            | Transition::Warmed { .. }
            | Transition::Claimed(_)
            | Transition::Renewed { .. }
            | Transition::Narrowed { .. }
            | Transition::Ending { .. }
            | Transition::Failed { .. }
            | Transition::Gone
            | Transition::Quarantined { .. },
            None,
        ) => {}
    }
}

fn making(state: &mut State, id: SandboxId, record: &Record) {
    if let Transition::Making {
        slot,
        key,
        tap,
        pool,
        tier,
        engine,
        accel,
        template_digest,
        created_at,
    } = &record.transition
    {
        let boot_id = state.boot_id.clone();
        state.sandboxes.entry(id).or_insert_with(|| SandboxRow {
            id,
            state: RowState::Making,
            first_seq: record.seq,
            seq: record.seq,
            slot: *slot,
            key: key.clone(),
            tap: *tap,
            pool: pool.clone(),
            tier: *tier,
            engine: *engine,
            accel: *accel,
            template_digest: template_digest.clone(),
            created_at: *created_at,
            boot_id,
            warmed: None,
            claim: None,
            why: None,
            gone_at: None,
            unknown: record.unknown.clone(),
        });
    }
}

/// Changes a row that is there; says whether it did.
fn step(row: &mut SandboxRow, record: &Record) -> bool {
    use RowState::{Claimed, Ending, Failed, Gone, Making, Quarantined, Warm};

    let next = match (&record.transition, row.state) {
        (Transition::Warmed { .. }, Making | Warm) => Warm,
        (Transition::Warmed { .. } | Transition::Renewed { .. } | Transition::Narrowed { .. }, Claimed) => {
            Claimed
        }
        // A clone on demand may be claimed before it was ever in stock.
        (Transition::Claimed(_), Making | Warm) => Claimed,
        (Transition::Ending { .. }, Making | Warm | Claimed | Quarantined) => Ending,
        (Transition::Failed { .. }, Making | Warm | Claimed | Ending) => Failed,
        (Transition::Gone, Making | Warm | Claimed | Ending | Failed | Quarantined) => Gone,
        (Transition::Quarantined { .. }, Making | Warm | Claimed | Ending | Failed) => Quarantined,
        (
            Transition::Boot { .. }
            | Transition::Making { .. }
            | Transition::PoolApplied { .. }
            | Transition::PoolDeleted { .. }
            | Transition::Drain { .. }
            | Transition::Audited { .. },
            _,
        )
        | (Transition::Warmed { .. }, Ending | Failed | Gone | Quarantined)
        | (Transition::Claimed(_), Claimed | Ending | Failed | Gone | Quarantined)
        | (
            Transition::Renewed { .. } | Transition::Narrowed { .. },
            Making | Warm | Ending | Failed | Gone | Quarantined,
        )
        | (Transition::Ending { .. }, Ending | Failed | Gone)
        | (Transition::Failed { .. }, Failed | Gone | Quarantined)
        | (Transition::Gone, Gone)
        | (Transition::Quarantined { .. }, Gone | Quarantined) => return false,
    };
    row.state = next;
    take_facts(row, record);
    true
}

fn take_facts(row: &mut SandboxRow, record: &Record) {
    let mut unknown = record.unknown.clone();
    match &record.transition {
        Transition::Warmed {
            pid,
            started,
            generation,
            proto,
            agent_version,
        } => {
            row.warmed = Some(WarmFacts {
                pid: *pid,
                started: *started,
                generation: *generation,
                proto: *proto,
                agent_version: agent_version.clone(),
                unknown: std::mem::take(&mut unknown),
            });
        }
        Transition::Claimed(facts) => row.claim = Some(facts.clone()),
        Transition::Renewed {
            lease_secs,
            expires_tick,
            expires_at,
        } => {
            if let Some(claim) = &mut row.claim {
                claim.lease_secs = *lease_secs;
                claim.expires_tick = *expires_tick;
                claim.expires_at = *expires_at;
            }
        }
        Transition::Narrowed { egress } => {
            if let Some(claim) = &mut row.claim {
                claim.egress.clone_from(egress);
            }
        }
        Transition::Ending { why } | Transition::Failed { why } | Transition::Quarantined { why } => {
            row.why.get_or_insert_with(|| why.clone());
        }
        Transition::Gone => row.gone_at = Some(record.at),
        Transition::Boot { .. }
        | Transition::Making { .. }
        | Transition::PoolApplied { .. }
        | Transition::PoolDeleted { .. }
        | Transition::Drain { .. }
        | Transition::Audited { .. } => {}
    }
    row.unknown.append(&mut unknown);
}
