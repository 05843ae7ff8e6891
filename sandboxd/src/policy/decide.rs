//! The decision: pool AND tenant AND claim, each by its first rule that matches; the first that denies, in this order,
//! gives the reason. Doors and explain ask here and nowhere else.

use std::{collections::BTreeSet, sync::Arc};

use sandbox_protocol::door::DoorReason;

use super::{
    authority::{Authority, Host},
    layer::{Layer, Mode},
    rule::{Effect, PORTS, Reached, Rule},
};
use crate::words::Name;

/// How much of what is asked can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen<'a> {
    /// Host and port.
    Tunnel,
    /// A plain request.
    Request {
        /// Its method, in the case in which it was sent.
        method: &'a str,
        /// Its path, with its query.
        path: &'a str,
    },
    /// A request inside a tunnel that is looked into.
    Inside {
        /// Its method, in the case in which it was sent.
        method: &'a str,
        /// Its path, with its query.
        path: &'a str,
    },
}

/// Whose layer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The operator's own destinations.
    Infra,
    /// The pool's.
    Pool,
    /// The tenant's.
    Tenant,
    /// The claim's.
    Claim,
}

impl Side {
    /// Its text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Infra => "infra",
            Self::Pool => "pool",
            Self::Tenant => "tenant",
            Self::Claim => "claim",
        }
    }
}

/// A layer of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// Its name.
    pub name: Name,
    /// What it says.
    pub layer: Arc<Layer>,
}

/// The pool's part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PoolSide {
    /// There is no pool, it names no layer, or one that is not there.
    #[default]
    Missing,
    /// Its layer.
    Layer(Named),
}

/// The tenant's part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TenantSide {
    /// It names no layer, or one that is not there.
    #[default]
    Missing,
    /// The operator's own: everything.
    All,
    /// Its layer.
    Layer(Named),
}

/// The claim's part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ClaimSide {
    /// The pool wants one and the claim brought none.
    #[default]
    Missing,
    /// The claim does not narrow.
    Open,
    /// Its layer.
    Layer(Arc<Layer>),
}

/// All that is in force for one sandbox. Its default denies everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sides {
    /// The operator's own destinations, for tunnels of every claim, whatever its layers say.
    pub infra: Option<Arc<Layer>>,
    /// The pool's.
    pub pool: PoolSide,
    /// The tenant's.
    pub tenant: TenantSide,
    /// The claim's.
    pub claim: ClaimSide,
}

/// What one layer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ruling<'a> {
    /// Yes; by a rule, unless there is no layer that could narrow.
    Allowed(Option<&'a Rule>),
    /// No.
    Denied {
        /// Why.
        reason: DoorReason,
        /// The rule that decided; none where no rule matched.
        rule: Option<&'a Rule>,
        /// The rule that came nearest, where none matched.
        nearest: Option<&'a Rule>,
    },
}

/// What one side says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideVerdict<'a> {
    /// Which.
    pub side: Side,
    /// Its layer's name, where it has one.
    pub name: Option<&'a Name>,
    /// Its layer.
    pub layer: Option<&'a Layer>,
    /// What it says.
    pub ruling: Ruling<'a>,
    /// It wants to see what is inside the tunnel.
    pub looks_inside: bool,
}

impl SideVerdict<'_> {
    /// It denies, and that holds.
    #[must_use]
    pub fn denies(&self) -> bool {
        matches!(self.ruling, Ruling::Denied { .. }) && !self.would_deny()
    }

    /// It denies, and passes by report mode. A missing side never does.
    #[must_use]
    pub fn would_deny(&self) -> bool {
        let reports = self.layer.is_some_and(|layer| layer.mode() == Mode::Report);
        reports && matches!(self.ruling, Ruling::Denied { .. })
    }
}

/// What all sides say, in the order in which they are asked; and the rule by which it is a destination of the operator's
/// own, in front of all of them. Such a tunnel is not looked into and given nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a>(pub [SideVerdict<'a>; 3], pub Option<&'a Rule>);

impl<'a> Decision<'a> {
    /// The first side whose denial holds; none: it is allowed.
    #[must_use]
    pub fn denial(&self) -> Option<&SideVerdict<'a>> {
        let denies = || self.0.iter().find(|verdict| verdict.denies());
        if self.1.is_some() { None } else { denies() }
    }

    /// The first side that denies in report mode.
    #[must_use]
    pub fn would_deny(&self) -> Option<&SideVerdict<'a>> {
        let reports = || self.0.iter().find(|verdict| verdict.would_deny());
        if self.1.is_some() { None } else { reports() }
    }

    /// Whether a tunnel has to be looked into: a side decides by a rule that asks for it.
    #[must_use]
    pub fn looks_inside(&self) -> bool {
        self.1.is_none() && self.0.iter().any(|verdict| verdict.looks_inside)
    }

    /// The secret that the request is given: of the pool's deciding rule, before the tenant's. What passes by report mode
    /// gets none.
    #[must_use]
    pub fn secret(&self) -> Option<&'a str> {
        self.secret_rule()?.fields().secret.as_deref()
    }

    /// The rule that names that secret.
    #[must_use]
    pub fn secret_rule(&self) -> Option<&'a Rule> {
        if self.1.is_some() || self.denial().is_some() || self.would_deny().is_some() {
            return None;
        }
        self.0.iter().find_map(|verdict| {
            let enforces = verdict.layer.is_some_and(|layer| layer.mode() == Mode::Enforce);
            match (verdict.side, verdict.ruling) {
                (Side::Pool | Side::Tenant, Ruling::Allowed(Some(rule))) if enforces => {
                    rule.fields().secret.is_some().then_some(rule)
                }
                (Side::Infra | Side::Pool | Side::Tenant | Side::Claim, _) => None,
            }
        })
    }

    /// The rule that allowed it, of the first side that has one.
    #[must_use]
    pub fn allowing(&self) -> Option<(Side, &'a Rule)> {
        let infra = self.1.map(|rule| (Side::Infra, rule));
        let rules = || {
            self.0.iter().find_map(|verdict| match verdict.ruling {
                Ruling::Allowed(Some(rule)) => Some((verdict.side, rule)),
                Ruling::Allowed(None) | Ruling::Denied { .. } => None,
            })
        };
        infra.or_else(rules)
    }
}

/// A port on which something of this host is allowed; none: nothing of it is.
#[must_use]
pub fn allowed_port(sides: &Sides, host: &Host) -> Option<u16> {
    let layers = [
        sides.infra.as_deref(),
        match &sides.pool {
            PoolSide::Layer(named) => Some(&*named.layer),
            PoolSide::Missing => None,
        },
        match &sides.tenant {
            TenantSide::Layer(named) => Some(&*named.layer),
            TenantSide::Missing | TenantSide::All => None,
        },
        match &sides.claim {
            ClaimSide::Layer(layer) => Some(&**layer),
            ClaimSide::Missing | ClaimSide::Open => None,
        },
    ];
    let is_allowed = |port: u16, seen: Seen<'_>| {
        let target = Authority::new(host.clone(), port);
        target.is_ok_and(|target| decide(sides, &target, seen).denial().is_none())
    };
    // Rules of which one narrows the ports and another the requests: each of what they name is tried.
    let rules = || {
        let all = layers.iter().flatten().flat_map(|layer| layer.rules());
        all.filter(|rule| rule.allows_some_of(host))
    };
    let mut ports: BTreeSet<u16> = rules().flat_map(Rule::ports).copied().collect();
    // A layer in report mode lets pass what no rule names.
    ports.extend(PORTS);
    let requests = || {
        rules().map(|rule| {
            let fields = rule.fields();
            Seen::Request {
                method: fields.methods.first().map_or("GET", String::as_str),
                path: fields.paths.first().map_or("/", String::as_str),
            }
        })
    };
    ports
        .into_iter()
        .find(|port| is_allowed(*port, Seen::Tunnel) || requests().any(|seen| is_allowed(*port, seen)))
}

/// Decides.
#[must_use]
pub fn decide<'a>(sides: &'a Sides, target: &Authority, seen: Seen<'_>) -> Decision<'a> {
    let missing = Ruling::Denied {
        reason: DoorReason::NoPolicy,
        rule: None,
        nearest: None,
    };
    let judged = |side, name, layer: &'a Layer| {
        let (ruling, looks_inside) = judge(layer, target, seen);
        SideVerdict {
            side,
            name,
            layer: Some(layer),
            ruling,
            looks_inside,
        }
    };
    let named = |side, named: &'a Named| judged(side, Some(&named.name), &named.layer);
    let bare = |side, ruling| SideVerdict {
        side,
        name: None,
        layer: None,
        ruling,
        looks_inside: false,
    };
    let pool = match &sides.pool {
        PoolSide::Missing => bare(Side::Pool, missing),
        PoolSide::Layer(layer) => named(Side::Pool, layer),
    };
    let tenant = match &sides.tenant {
        TenantSide::Missing => bare(Side::Tenant, missing),
        TenantSide::All => bare(Side::Tenant, Ruling::Allowed(None)),
        TenantSide::Layer(layer) => named(Side::Tenant, layer),
    };
    let claim = match &sides.claim {
        ClaimSide::Missing => bare(Side::Claim, missing),
        ClaimSide::Open => bare(Side::Claim, Ruling::Allowed(None)),
        ClaimSide::Layer(layer) => judged(Side::Claim, None, layer),
    };
    let infra = match (&sides.infra, seen) {
        (Some(layer), Seen::Tunnel) => match judge(layer, target, seen).0 {
            Ruling::Allowed(rule) => rule,
            Ruling::Denied { .. } => None,
        },
        (Some(_) | None, _) => None,
    };
    Decision([pool, tenant, claim], infra)
}

/// What one layer says: its first rule that matches, or why none does; and whether it wants to see inside the tunnel.
fn judge<'a>(layer: &'a Layer, target: &Authority, seen: Seen<'_>) -> (Ruling<'a>, bool) {
    let mut looks_inside = false;
    let mut nearest: Option<(Reached, &Rule)> = None;
    for rule in layer.rules() {
        let effect = rule.fields().effect;
        let reached = rule.reached(target, seen);
        match (reached, effect) {
            (Reached::All, Effect::Allow) => {
                looks_inside |= seen == Seen::Tunnel && rule.fields().intercept;
                return (Ruling::Allowed(Some(rule)), looks_inside);
            }
            (Reached::Inside, Effect::Allow | Effect::Deny) => looks_inside = true,
            (Reached::All, Effect::Deny) => {
                let denied = Ruling::Denied {
                    reason: DoorReason::DeniedByRule,
                    rule: Some(rule),
                    nearest: None,
                };
                return (denied, false);
            }
            // Whether it matches hangs on who reads it: refused, and not repaired.
            (Reached::OddPath, Effect::Allow | Effect::Deny) => {
                let denied = Ruling::Denied {
                    reason: DoorReason::PathNotCanonical,
                    rule: Some(rule),
                    nearest: None,
                };
                return (denied, false);
            }
            (Reached::Nothing, Effect::Allow | Effect::Deny)
            | (Reached::Host | Reached::Port | Reached::Visible | Reached::Method, Effect::Deny) => {}
            (Reached::Host | Reached::Port | Reached::Visible | Reached::Method, Effect::Allow) => {
                if nearest.is_none_or(|(before, _)| reached > before) {
                    nearest = Some((reached, rule));
                }
            }
        }
    }
    let reason = match nearest.map_or(Reached::Nothing, |(reached, _)| reached) {
        Reached::Host => DoorReason::PortNotAllowed,
        Reached::Port => DoorReason::NeedsVisibleRequest,
        Reached::Visible => DoorReason::MethodNotAllowed,
        Reached::Method => DoorReason::PathNotAllowed,
        Reached::Nothing | Reached::OddPath | Reached::Inside | Reached::All => match target.host() {
            Host::Name(_) => DoorReason::HostNotAllowed,
            Host::Address(_) => DoorReason::AddressLiteral,
        },
    };
    let denied = Ruling::Denied {
        reason,
        rule: None,
        nearest: nearest.map(|(_, rule)| rule),
    };
    // What passes by report mode alone is seen too, if a rule asked for it.
    (denied, looks_inside)
}
