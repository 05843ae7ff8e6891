//! What becomes of each row, as a pure function of records and host.

use std::collections::BTreeSet;

use sandbox_protocol::id::SandboxId;

use crate::{
    journal::{RowState, SandboxRow, State},
    names::SlotNumber,
    sandbox::{Why, WhyKind},
    words::{EngineKind, Name, PoolKey},
};

/// What becomes of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// Taken up before the first call is served.
    AdoptClaimed,
    /// Taken up behind that.
    AdoptWarm,
    /// Its life is over (`died` says why, if its row does not), or it only stays to be asked for.
    WindUp(Option<Why>),
}

/// What the host shows, and what this daemon is.
#[derive(Debug)]
pub struct Host<'a, Digest, Pool> {
    /// The kernel's boot id.
    pub boot_id: &'a str,
    /// The engine that runs now.
    pub engine: EngineKind,
    /// Slots that something lies in.
    pub slots: &'a [SlotNumber],
    /// Whether this digest is that of the template in use for a key.
    pub digest: Digest,
    /// Whether there is a pool of this name with this key.
    pub pool: Pool,
}

/// Decides for every row, and names what lies on the host without one.
pub fn plan<Digest, Pool>(
    state: &State,
    host: &Host<'_, Digest, Pool>,
) -> (Vec<(SandboxId, Fate)>, Vec<SlotNumber>)
where
    Digest: Fn(&PoolKey, &str) -> bool,
    Pool: Fn(&Name, &PoolKey) -> bool,
{
    let mut held = BTreeSet::new();
    let fates = state
        .sandboxes
        .iter()
        .map(|(id, row)| {
            if row.state != RowState::Gone && row.state != RowState::Failed {
                held.insert(row.slot);
            }
            (*id, fate(row, host))
        })
        .collect();
    let strays = host
        .slots
        .iter()
        .copied()
        .filter(|slot| !held.contains(slot))
        .collect();
    (fates, strays)
}

fn fate<Digest, Pool>(row: &SandboxRow, host: &Host<'_, Digest, Pool>) -> Fate
where
    Digest: Fn(&PoolKey, &str) -> bool,
    Pool: Fn(&Name, &PoolKey) -> bool,
{
    let rebooted = row.boot_id.as_deref() != Some(host.boot_id);
    let died = |kind| Fate::WindUp(Some(Why::of(kind)));
    match row.state {
        RowState::Making | RowState::Warm | RowState::Claimed if rebooted => died(WhyKind::HostRestarted),
        RowState::Making => died(WhyKind::MakeFailed),
        RowState::Warm | RowState::Claimed if row.engine != host.engine => Fate::WindUp(Some(Why::with(
            WhyKind::LostOnRestart,
            format_args!("the daemon was started with engine {}", host.engine),
        ))),
        RowState::Claimed => Fate::AdoptClaimed,
        RowState::Warm => {
            let pool = row.pool.as_ref().is_some_and(|name| (host.pool)(name, &row.key));
            if !pool {
                died(WhyKind::PoolGone)
            } else if (host.digest)(&row.key, &row.template_digest) {
                Fate::AdoptWarm
            } else {
                died(WhyKind::TemplateChanged)
            }
        }
        RowState::Ending | RowState::Failed | RowState::Quarantined | RowState::Gone => Fate::WindUp(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock::WallTime,
        journal::{Record, Transition, fold},
        words::{Accel, Lane, Tier},
    };

    fn key() -> PoolKey {
        PoolKey {
            template: "default".parse().unwrap(),
            lane: Lane::None,
            size: "small".parse().unwrap(),
        }
    }

    /// A state with one row, after these transitions.
    fn state(boot: &str, slot: u16, pool: Option<&str>, digest: &str, then: Vec<Transition>) -> State {
        let mut state = State::default();
        let id = SandboxId::from_random([7; 16]);
        let making = Transition::Making {
            slot: SlotNumber(slot),
            key: key(),
            tap: None,
            pool: pool.map(|name| name.parse().unwrap()),
            tier: Tier::Warm,
            engine: EngineKind::Qemu,
            accel: Accel::Tcg,
            template_digest: digest.into(),
            created_at: WallTime::default(),
        };
        let boot = Transition::Boot { boot_id: boot.into() };
        for (seq, transition) in [boot, making].into_iter().chain(then).enumerate() {
            let sandbox = (seq > 0).then_some(id);
            let record = Record {
                seq: seq as u64 + 1,
                at: WallTime::default(),
                sandbox,
                transition,
                unknown: Default::default(),
            };
            fold(&mut state, &record);
        }
        state
    }

    fn warmed() -> Transition {
        Transition::Warmed {
            pid: Some(5),
            started: 9,
            generation: 1,
            proto: 1,
            agent_version: "0".into(),
        }
    }

    fn fate_of(state: &State) -> Fate {
        let host = Host {
            boot_id: "b1",
            engine: EngineKind::Qemu,
            slots: &[SlotNumber(1), SlotNumber(2)],
            digest: |_: &PoolKey, digest: &str| digest == "d1",
            pool: |name: &Name, _: &PoolKey| name.as_str() == "default",
        };
        let (fates, strays) = plan(state, &host);
        assert_eq!(strays, [SlotNumber(2)], "slot 1 has a row");
        fates.into_iter().next().unwrap().1
    }

    fn kind(fate: Fate) -> WhyKind {
        match fate {
            Fate::WindUp(Some(why)) => why.kind,
            other @ (Fate::WindUp(None) | Fate::AdoptClaimed | Fate::AdoptWarm) => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn warm_stock_is_taken_back_only_by_the_checks_that_made_it_warm() {
        assert_eq!(
            fate_of(&state("b1", 1, Some("default"), "d1", vec![warmed()])),
            Fate::AdoptWarm
        );
        for (boot, pool, digest, why) in [
            ("b0", Some("default"), "d1", WhyKind::HostRestarted),
            ("b1", Some("gone"), "d1", WhyKind::PoolGone),
            ("b1", None, "d1", WhyKind::PoolGone),
            ("b1", Some("default"), "d0", WhyKind::TemplateChanged),
        ] {
            assert_eq!(kind(fate_of(&state(boot, 1, pool, digest, vec![warmed()]))), why);
        }
    }

    #[test]
    fn what_was_being_made_ends_and_what_was_ending_goes_on_ending() {
        assert_eq!(
            kind(fate_of(&state("b1", 1, Some("default"), "d1", vec![]))),
            WhyKind::MakeFailed
        );
        let ending = Transition::Ending {
            why: "released".into(),
        };
        let fate = fate_of(&state("b1", 1, Some("default"), "d1", vec![warmed(), ending]));
        assert_eq!(fate, Fate::WindUp(None));
    }
}
