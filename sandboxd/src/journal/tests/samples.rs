//! Records to test with.

use std::collections::BTreeMap;

use sandbox_protocol::id::{ClaimId, SandboxId};

use crate::{
    clock::{Tick, WallTime},
    journal::{ClaimFacts, HeadRow, LayerRow, PoolRow, RuleRow, Transition, Unknown},
    names::SlotNumber,
    words::{Accel, EngineKind, Lane, PoolKey, Tier},
};

pub(in crate::journal) fn id(n: u16) -> SandboxId {
    // Ids are random and far from each other, which the repair of misspelt ones relies on.
    let spread = u128::from(n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    SandboxId::from_random(spread.to_be_bytes())
}

fn key() -> PoolKey {
    PoolKey {
        template: "base".parse().unwrap(),
        lane: Lane::Guarded,
        size: "small".parse().unwrap(),
    }
}

pub(in crate::journal) fn boot() -> Transition {
    Transition::Boot {
        boot_id: "3f0c".into(),
    }
}

pub(in crate::journal) fn making(n: u16) -> Transition {
    Transition::Making {
        slot: SlotNumber(n),
        key: key(),
        tap: Some(SlotNumber(n)),
        pool: Some("p".parse().unwrap()),
        tier: Tier::Warm,
        engine: EngineKind::Qemu,
        accel: Accel::Kvm,
        template_digest: "5ca1ab1e".into(),
        created_at: WallTime::from_micros(5),
    }
}

pub(in crate::journal) fn warmed() -> Transition {
    Transition::Warmed {
        pid: Some(77),
        started: 12,
        generation: 1,
        proto: 1,
        agent_version: "0.1.0".into(),
    }
}

pub(in crate::journal) fn claimed(n: u16) -> Transition {
    Transition::Claimed(Box::new(ClaimFacts {
        claim: ClaimId::from_random([n.to_be_bytes()[1]; 16]),
        owner: "tenant-a".into(),
        token_sha256: "e3b0".repeat(16),
        lease_secs: 60,
        expires_tick: Tick::from_nanos(9),
        expires_at: WallTime::from_micros(60_000_000),
        claimed_at: WallTime::from_micros(6),
        pool: Some("p".parse().unwrap()),
        tier: Tier::Warm,
        labels: BTreeMap::from([("job".into(), "\u{202e}x\n".into())]),
        egress: Some(layer()),
        request_key: Some("k".into()),
        request_digest: None,
        unknown: Unknown::new(),
    }))
}

pub(in crate::journal) fn renewed() -> Transition {
    Transition::Renewed {
        lease_secs: 90,
        expires_tick: Tick::from_nanos(99),
        expires_at: WallTime::from_micros(90_000_000),
    }
}

pub(in crate::journal) fn ending() -> Transition {
    Transition::Ending {
        why: "released".into(),
    }
}

pub(in crate::journal) fn failed() -> Transition {
    Transition::Failed {
        why: "vm_exited: 1".into(),
    }
}

/// A layer with everything that one can have.
fn layer() -> LayerRow {
    let rule = RuleRow {
        id: "git".into(),
        deny: true,
        host: vec!["*.example.org".into()],
        ports: vec![80],
        methods: vec!["GET".into()],
        paths: vec!["/a".into()],
        intercept: true,
        message: "ask".into(),
        unknown: Unknown::new(),
    };
    LayerRow {
        report: true,
        rules: vec![rule],
        unknown: Unknown::new(),
    }
}

pub(in crate::journal) fn narrowed() -> Transition {
    Transition::Narrowed {
        egress: Some(layer()),
    }
}

pub(in crate::journal) fn quarantined() -> Transition {
    Transition::Quarantined { why: "test".into() }
}

pub(in crate::journal) fn pool_applied(warm: u32) -> Transition {
    let spec = PoolRow {
        name: "p".parse().unwrap(),
        key: key(),
        warm,
        warm_max: 8,
        lease_secs: 60,
        lease_max_secs: 600,
        egress: Some("web".parse().unwrap()),
        require_claim_policy: true,
        unknown: Unknown::new(),
    };
    Transition::PoolApplied { spec }
}

pub(in crate::journal) fn pool_deleted() -> Transition {
    Transition::PoolDeleted {
        name: "p".parse().unwrap(),
    }
}

pub(in crate::journal) fn audited(seq: u64) -> Transition {
    let hash = format!("{seq:064x}");
    Transition::Audited {
        audit: Some(HeadRow { seq, hash }),
        usage: None,
    }
}

/// One of each.
pub(in crate::journal) fn all() -> Vec<(Option<SandboxId>, Transition)> {
    let sb = Some(id(1));
    vec![
        (None, boot()),
        (sb, making(1)),
        (sb, warmed()),
        (sb, claimed(1)),
        (sb, renewed()),
        (sb, narrowed()),
        (sb, ending()),
        (sb, failed()),
        (sb, Transition::Gone),
        (sb, quarantined()),
        (None, pool_applied(2)),
        (None, pool_deleted()),
        (None, Transition::Drain { on: true }),
        (None, audited(7)),
    ]
}
