//! A sandbox's life as a pure transition table: no I/O, no clock.
//!
//! ```text
//!  Making --made--> Warm --taken--> Claimed --renewed--> Claimed
//!  any of them --ended | died--> Ending --torn down--> Gone, or Failed while a claimer is still owed the news
//!  Failed --ended--> Gone      Quarantined --ended--> Ending
//! ```
//!
//! Invariant 3: never back to Warm; what is out of the pool is claimed or destroyed.

use std::{collections::BTreeMap, fmt, sync::Arc};

use sandbox_protocol::{id::ClaimId, limits, v1};

use crate::{
    access::TokenHash,
    clock::{Tick, WallTime},
    journal::{ClaimFacts, LayerRow, RuleRow, Transition},
    policy::{Effect, Layer, Mode, Rule, RuleFields},
    telemetry::metrics::EndedWhy,
    words::{Name, Tier},
};

macro_rules! why {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The kind of reason for which a life ends; a closed set, used as a metric's label.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum WhyKind { $($(#[$doc])* $name,)* }

        impl WhyKind {
            const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Its text, in records, replies and metrics.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

why! {
    /// Its claimer gave it back.
    Released = "released",
    /// Its lease was over.
    LeaseExpired = "lease_expired",
    /// It left the pool and no claim took it.
    Abandoned = "abandoned",
    /// The pool had more than it wanted.
    Surplus = "surplus",
    /// Its pool was deleted or changed its key.
    PoolGone = "pool_gone",
    /// Its template has changed since.
    TemplateChanged = "template_changed",
    /// The VMM process ended.
    VmExited = "vm_exited",
    /// The agent no longer answers.
    AgentLost = "agent_lost",
    /// It could not be made.
    MakeFailed = "make_failed",
    /// The claim could not be recorded or carried out.
    ClaimFailed = "claim_failed",
    /// The daemon stopped and was to leave nothing.
    Stopped = "stopped",
    /// The host was restarted.
    HostRestarted = "host_restarted",
    /// It was not there any more when the daemon came back.
    LostOnRestart = "lost_on_restart",
    /// Its record is damaged.
    RecordDamaged = "record_damaged",
    /// The task that owned it panicked.
    OwnerPanicked = "owner_panicked",
}

impl WhyKind {
    /// Under which cause the metrics count it.
    #[must_use]
    pub const fn metric(self) -> EndedWhy {
        match self {
            Self::Released => EndedWhy::Released,
            Self::LeaseExpired => EndedWhy::LeaseOver,
            Self::Abandoned | Self::ClaimFailed => EndedWhy::Abandoned,
            Self::Surplus => EndedWhy::Surplus,
            Self::PoolGone | Self::Stopped => EndedWhy::Drained,
            Self::TemplateChanged => EndedWhy::Stale,
            Self::VmExited => EndedWhy::Exited,
            Self::AgentLost => EndedWhy::LinkLost,
            Self::MakeFailed => EndedWhy::MakeFailed,
            Self::HostRestarted => EndedWhy::HostBooted,
            Self::LostOnRestart | Self::RecordDamaged => EndedWhy::NotAdopted,
            Self::OwnerPanicked => EndedWhy::Bug,
        }
    }

    /// Whether a claimer did not ask for such an end, so that it is owed the news.
    #[must_use]
    pub const fn is_news(self) -> bool {
        match self {
            Self::VmExited
            | Self::AgentLost
            | Self::HostRestarted
            | Self::LostOnRestart
            | Self::RecordDamaged
            | Self::OwnerPanicked => true,
            Self::Released
            | Self::LeaseExpired
            | Self::Abandoned
            | Self::Surplus
            | Self::PoolGone
            | Self::TemplateChanged
            | Self::MakeFailed
            | Self::ClaimFailed
            | Self::Stopped => false,
        }
    }
}

/// Why a life ends, with the detail that an operator needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// The kind.
    pub kind: WhyKind,
    detail: Option<Arc<str>>,
}

impl Why {
    /// A reason without detail.
    #[must_use]
    pub const fn of(kind: WhyKind) -> Self {
        Self { kind, detail: None }
    }

    /// A reason with detail, which must hold no unescaped text of a guest.
    #[must_use]
    pub fn with(kind: WhyKind, detail: impl fmt::Display) -> Self {
        Self {
            kind,
            detail: Some(detail.to_string().into()),
        }
    }

    /// Reads what [`fmt::Display`] wrote; text of an unknown kind becomes detail of a damaged record.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let (kind, detail) = text
            .split_once(": ")
            .map_or((text, None), |(kind, detail)| (kind, Some(detail)));
        match WhyKind::ALL.iter().find(|known| known.as_str() == kind) {
            Some(known) => Self {
                kind: *known,
                detail: detail.map(Into::into),
            },
            None => Self::with(WhyKind::RecordDamaged, text),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.as_str())?;
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

/// Until when a claim lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// As asked for.
    pub secs: u32,
    /// When it is over: what decides.
    pub until: Tick,
    /// The same as wall time: what is shown.
    pub expires_at: WallTime,
}

/// What makes a sandbox somebody's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its id.
    pub id: ClaimId,
    /// Who claimed: `operator`, or the tenant's name.
    pub owner: Arc<str>,
    /// SHA-256 of the claim's token.
    pub token_hash: TokenHash,
    /// The caller's labels.
    pub labels: Arc<BTreeMap<String, String>>,
    /// The pool that served it, if one did.
    pub pool: Option<Name>,
    /// How it was served.
    pub tier: Tier,
    /// When.
    pub claimed_at: WallTime,
    /// Its lease.
    pub lease: Lease,
    /// What its guest may reach, where the claim narrows that.
    pub layer: Option<Arc<Layer>>,
    /// The caller's request key and the digest of the request it stands for.
    pub request: Option<Arc<(String, String)>>,
}

impl Claim {
    /// The facts as the journal has them.
    #[must_use]
    pub fn to_facts(&self) -> ClaimFacts {
        ClaimFacts {
            claim: self.id,
            owner: self.owner.to_string(),
            token_sha256: self.token_hash.to_hex(),
            lease_secs: self.lease.secs,
            expires_tick: self.lease.until,
            expires_at: self.lease.expires_at,
            claimed_at: self.claimed_at,
            pool: self.pool.clone(),
            tier: self.tier,
            labels: self.labels.as_ref().clone(),
            egress: self.layer.as_deref().map(layer_row),
            request_key: self.request.as_ref().map(|request| request.0.clone()),
            request_digest: self.request.as_ref().map(|request| request.1.clone()),
            unknown: BTreeMap::new(),
        }
    }

    /// A claim from the journal's facts; none if the token's hash is damaged.
    #[must_use]
    pub fn from_facts(facts: &ClaimFacts) -> Option<Self> {
        Some(Self {
            id: facts.claim,
            owner: facts.owner.as_str().into(),
            token_hash: TokenHash::from_hex(&facts.token_sha256)?,
            labels: Arc::new(facts.labels.clone()),
            pool: facts.pool.clone(),
            tier: facts.tier,
            claimed_at: facts.claimed_at,
            lease: Lease {
                secs: facts.lease_secs,
                until: facts.expires_tick,
                expires_at: facts.expires_at,
            },
            layer: facts.egress.as_ref().map(|row| Arc::new(read_layer(row))),
            request: facts
                .request_key
                .clone()
                .map(|key| Arc::new((key, facts.request_digest.clone().unwrap_or_default()))),
        })
    }
}

/// A claim's layer as the journal has it.
fn layer_row(layer: &Layer) -> LayerRow {
    let rule = |rule: &Rule| {
        let fields = rule.fields();
        RuleRow {
            id: fields.id.clone(),
            deny: fields.effect == Effect::Deny,
            host: fields.host.clone(),
            ports: fields.ports.clone(),
            methods: fields.methods.clone(),
            paths: fields.paths.clone(),
            intercept: fields.intercept,
            message: fields.message.clone(),
            unknown: BTreeMap::new(),
        }
    };
    LayerRow {
        report: layer.mode() == Mode::Report,
        rules: layer.rules().iter().map(rule).collect(),
        unknown: BTreeMap::new(),
    }
}

/// The layer of a record. One that can no longer be read, or that says more than this version knows, denies everything.
fn read_layer(row: &LayerRow) -> Layer {
    let knows_all = row.unknown.is_empty() && row.rules.iter().all(|rule| rule.unknown.is_empty());
    let fields = |row: &RuleRow| RuleFields {
        id: row.id.clone(),
        effect: if row.deny { Effect::Deny } else { Effect::Allow },
        host: row.host.clone(),
        ports: row.ports.clone(),
        methods: row.methods.clone(),
        paths: row.paths.clone(),
        intercept: row.intercept,
        // A claim names no secret.
        secret: None,
        cleartext_secret: false,
        message: row.message.clone(),
    };
    let mode = if row.report { Mode::Report } else { Mode::Enforce };
    let rules = row.rules.iter().map(fields).collect();
    match Layer::new(mode, rules, limits::CLAIM_RULES) {
        Ok(layer) if knows_all => layer,
        Ok(_) | Err(_) => Layer::nothing(),
    }
}

/// Where a sandbox is, with exactly the data that is legal there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Life {
    /// Being made; nobody's.
    Making,
    /// In stock; nobody's.
    Warm,
    /// Somebody's.
    Claimed(Claim),
    /// Being torn down. Absorbs: only its teardown leads on.
    Ending {
        /// Why.
        why: Why,
        /// The claim that it had.
        claim: Option<Claim>,
        /// The claimer did not ask for it and is owed the news.
        owed: bool,
    },
    /// Torn down, while its claimer is owed the news.
    Failed {
        /// Why.
        why: Why,
        /// The claim that it had.
        claim: Claim,
    },
    /// Its record or teardown cannot be trusted; given to nobody, an operator ends it.
    Quarantined {
        /// Why.
        why: Why,
    },
    /// Nothing of it is left but this row.
    Gone {
        /// Why.
        why: Why,
        /// The claim that it had.
        claim: Option<Claim>,
    },
}

impl Life {
    /// As the API has it.
    #[must_use]
    pub const fn state(&self) -> v1::State {
        match self {
            Self::Making => v1::State::Making,
            Self::Warm => v1::State::Warm,
            Self::Claimed(_) => v1::State::Claimed,
            Self::Ending { .. } => v1::State::Ending,
            Self::Failed { .. } => v1::State::Failed,
            Self::Quarantined { .. } => v1::State::Quarantined,
            Self::Gone { .. } => v1::State::Gone,
        }
    }

    /// The claim that it has or had.
    #[must_use]
    pub const fn claim(&self) -> Option<&Claim> {
        match self {
            Self::Making | Self::Warm | Self::Quarantined { .. } => None,
            Self::Claimed(claim) | Self::Failed { claim, .. } => Some(claim),
            Self::Ending { claim, .. } | Self::Gone { claim, .. } => claim.as_ref(),
        }
    }

    /// Why it ended or ends.
    #[must_use]
    pub const fn why(&self) -> Option<&Why> {
        match self {
            Self::Making | Self::Warm | Self::Claimed(_) => None,
            Self::Ending { why, .. }
            | Self::Failed { why, .. }
            | Self::Quarantined { why }
            | Self::Gone { why, .. } => Some(why),
        }
    }
}

/// What happens to a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It answers, has its identity, and may be put in stock.
    Made(Box<Transition>),
    /// A claim takes it.
    Taken(Box<Claim>),
    /// Its lease is set anew.
    Renewed(Lease),
    /// What the claim narrows is set anew.
    Narrowed(Option<Arc<Layer>>),
    /// Somebody who may wants it ended.
    End(Why),
    /// It is dead, or as good as.
    Died(Why),
    /// It is this time: the end, if its lease is over by then.
    Expired(Tick),
    /// Nothing of it is left on the host.
    TornDown,
    /// Its record cannot be trusted.
    Distrusted(Why),
}

/// What an event leads to. The record comes before everything else.
#[derive(Debug, PartialEq)]
pub struct Step {
    /// The new life.
    pub next: Life,
    /// What is to be recorded first.
    pub record: Option<Transition>,
    /// A teardown is to begin.
    pub teardown: bool,
}

/// The event is not legal in this life, which stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// The transition table.
///
/// # Errors
/// [`Refused`] where there is no such edge.
#[expect(
    clippy::too_many_lines,
    reason = "one table, read as a whole: every edge there is, and no other"
)]
pub fn step(life: &Life, event: Event) -> Result<Step, Refused> {
    let ending = |why: Why, claim: Option<Claim>, owed| Step {
        record: Some(Transition::Ending { why: why.to_string() }),
        next: Life::Ending { why, claim, owed },
        teardown: true,
    };
    let still = |next: Life, record| Step {
        next,
        record: Some(record),
        teardown: false,
    };
    let forgotten = |why: &Why, claim: &Claim| {
        let gone = Life::Gone {
            why: why.clone(),
            claim: Some(claim.clone()),
        };
        still(gone, Transition::Gone)
    };
    match (life, event) {
        (Life::Making, Event::Made(record)) => Ok(still(Life::Warm, *record)),
        // A clone or cold boot on demand is somebody's from its making on; it never was in stock.
        (Life::Warm, Event::Taken(claim)) => {
            let record = Transition::Claimed(Box::new(claim.to_facts()));
            Ok(still(Life::Claimed(*claim), record))
        }
        (Life::Claimed(claim), Event::Renewed(lease)) => {
            let record = Transition::Renewed {
                lease_secs: lease.secs,
                expires_tick: lease.until,
                expires_at: lease.expires_at,
            };
            Ok(still(
                Life::Claimed(Claim {
                    lease,
                    ..claim.clone()
                }),
                record,
            ))
        }
        (Life::Claimed(claim), Event::Narrowed(layer)) => {
            let record = Transition::Narrowed {
                egress: layer.as_deref().map(layer_row),
            };
            let claim = Claim {
                layer,
                ..claim.clone()
            };
            Ok(still(Life::Claimed(claim), record))
        }
        (Life::Making | Life::Warm | Life::Quarantined { .. }, Event::End(why) | Event::Died(why)) => {
            Ok(ending(why, None, false))
        }
        (Life::Claimed(claim), Event::End(why)) => Ok(ending(why, Some(claim.clone()), false)),
        (Life::Claimed(claim), Event::Expired(now)) if claim.lease.until <= now => {
            Ok(ending(Why::of(WhyKind::LeaseExpired), Some(claim.clone()), false))
        }
        (Life::Claimed(claim), Event::Died(why)) => Ok(ending(why, Some(claim.clone()), true)),
        // The claimer asks for the end while it is under way: the news is no longer owed. The records have one reason for
        // an end and no more, so this change is in none: a daemon that comes back in this moment owes the news again.
        (
            Life::Ending {
                why,
                claim,
                owed: true,
            },
            Event::End(_),
        ) => Ok(Step {
            next: Life::Ending {
                why: why.clone(),
                claim: claim.clone(),
                owed: false,
            },
            record: None,
            teardown: false,
        }),
        (
            Life::Ending {
                why,
                claim: Some(claim),
                owed: true,
            },
            Event::TornDown,
        ) => {
            let record = Transition::Failed { why: why.to_string() };
            Ok(still(
                Life::Failed {
                    why: why.clone(),
                    claim: claim.clone(),
                },
                record,
            ))
        }
        (Life::Ending { why, claim, owed: _ }, Event::TornDown) => Ok(still(
            Life::Gone {
                why: why.clone(),
                claim: claim.clone(),
            },
            Transition::Gone,
        )),
        (Life::Failed { why, claim }, Event::End(_)) => Ok(forgotten(why, claim)),
        (Life::Failed { why, claim }, Event::Expired(now)) if claim.lease.until <= now => {
            Ok(forgotten(why, claim))
        }
        (Life::Making | Life::Warm | Life::Claimed(_), Event::Distrusted(why)) => Ok(Step {
            record: Some(Transition::Quarantined { why: why.to_string() }),
            next: Life::Quarantined { why },
            teardown: false,
        }),
        (
            Life::Making
            | Life::Warm
            | Life::Claimed(_)
            | Life::Ending { .. }
            | Life::Failed { .. }
            | Life::Quarantined { .. }
            | Life::Gone { .. },
            Event::Made(_)
            | Event::Taken(_)
            | Event::Renewed(_)
            | Event::Narrowed(_)
            | Event::End(_)
            | Event::Died(_)
            | Event::Expired(_)
            | Event::TornDown
            | Event::Distrusted(_),
        ) => Err(Refused),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claim() -> Claim {
        Claim {
            id: ClaimId::from_random([1; 16]),
            owner: "operator".into(),
            token_hash: TokenHash::of("token"),
            labels: Arc::default(),
            pool: Some("default".parse().unwrap()),
            tier: Tier::Warm,
            claimed_at: WallTime::from_micros(5),
            lease: lease(60),
            layer: Some(Arc::new(layer())),
            request: Some(Arc::new(("key".into(), "digest".into()))),
        }
    }

    fn layer() -> Layer {
        let rule = RuleFields {
            id: "r".into(),
            effect: Effect::Deny,
            host: vec!["*.example.org".into()],
            ports: vec![443],
            methods: vec!["GET".into()],
            paths: vec!["/a".into()],
            intercept: true,
            message: "ask".into(),
            ..RuleFields::default()
        };
        Layer::new(Mode::Report, vec![rule], limits::CLAIM_RULES).unwrap()
    }

    #[test]
    fn a_layer_comes_back_from_its_record_and_one_that_cannot_be_read_denies() {
        let layer = layer();
        let row = layer_row(&layer);
        assert_eq!(read_layer(&row), layer);
        let mut odd = row.clone();
        odd.rules[0].host = vec!["a b".into()];
        assert_eq!(read_layer(&odd), Layer::nothing());
        let mut newer = row;
        newer.rules[0].unknown.insert("secret".into(), "x".into());
        assert_eq!(read_layer(&newer), Layer::nothing());
    }

    fn lease(secs: u32) -> Lease {
        Lease {
            secs,
            until: Tick::from_nanos(9),
            expires_at: WallTime::from_micros(9),
        }
    }

    fn made() -> Event {
        Event::Made(Box::new(Transition::Warmed {
            pid: None,
            started: 0,
            generation: 1,
            proto: 1,
            agent_version: String::new(),
        }))
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(made()),
            Just(Event::Taken(Box::new(claim()))),
            Just(Event::Renewed(lease(5))),
            Just(Event::End(Why::of(WhyKind::Released))),
            Just(Event::Died(Why::with(WhyKind::VmExited, "signal 9"))),
            (0u64..20).prop_map(|now| Event::Expired(Tick::from_nanos(now))),
            Just(Event::TornDown),
            Just(Event::Distrusted(Why::of(WhyKind::RecordDamaged))),
        ]
    }

    #[test]
    fn facts_and_reasons_survive_the_journal() {
        assert_eq!(Claim::from_facts(&claim().to_facts()), Some(claim()));
        for kind in WhyKind::ALL {
            for why in [Why::of(*kind), Why::with(*kind, "a: b")] {
                assert_eq!(Why::parse(&why.to_string()), why);
            }
        }
        assert_eq!(Why::parse("new_kind: x").kind, WhyKind::RecordDamaged);
    }

    #[test]
    fn a_dead_claim_is_told_until_it_is_released() {
        let dead = step(&Life::Claimed(claim()), Event::Died(Why::of(WhyKind::VmExited))).unwrap();
        assert!(dead.teardown);
        let failed = step(&dead.next, Event::TornDown).unwrap();
        assert_eq!(failed.next.state(), v1::State::Failed);
        let gone = step(&failed.next, Event::End(Why::of(WhyKind::Released))).unwrap();
        assert_eq!(gone.next.state(), v1::State::Gone);
        assert_eq!(gone.next.why().unwrap().kind, WhyKind::VmExited);
        // Released while the teardown was under way: nothing is owed any more.
        let told = step(&dead.next, Event::End(Why::of(WhyKind::Released))).unwrap();
        assert_eq!(
            step(&told.next, Event::TornDown).unwrap().next.state(),
            v1::State::Gone
        );
    }

    #[test]
    fn only_a_lease_that_is_over_ends_a_claim() {
        let (claimed, failed) = (
            Life::Claimed(claim()),
            Life::Failed {
                why: Why::of(WhyKind::VmExited),
                claim: claim(),
            },
        );
        for life in [&claimed, &failed, &Life::Warm] {
            assert_eq!(step(life, Event::Expired(Tick::from_nanos(8))), Err(Refused));
        }
        let over = step(&claimed, Event::Expired(Tick::from_nanos(9))).unwrap();
        assert!(over.teardown);
        assert_eq!(over.next.why().unwrap().kind, WhyKind::LeaseExpired);
        let told = step(&failed, Event::Expired(Tick::from_nanos(9))).unwrap();
        assert_eq!(told.next.state(), v1::State::Gone);
        assert_eq!(told.next.why().unwrap().kind, WhyKind::VmExited);
    }

    proptest! {
        #[test]
        fn inv_03_no_way_back(events in proptest::collection::vec(any_event(), 0..12)) {
            let (mut life, mut was_claimed, mut teardowns) = (Life::Making, false, 0);
            for event in events {
                let before = life.state();
                match step(&life, event) {
                    Ok(step) => {
                        let after = step.next.state();
                        prop_assert!(after != v1::State::Making);
                        if after == v1::State::Warm {
                            prop_assert!(before == v1::State::Making && !was_claimed);
                        }
                        was_claimed |= after == v1::State::Claimed;
                        teardowns += u32::from(step.teardown);
                        // Nothing becomes Failed or Gone but through a teardown.
                        if matches!(after, v1::State::Failed | v1::State::Gone) {
                            prop_assert_eq!(teardowns, 1);
                        }
                        life = step.next;
                    }
                    Err(Refused) => prop_assert_eq!(life.state(), before),
                }
            }
            prop_assert!(teardowns <= 1, "C7: exactly one teardown");
        }
    }
}
