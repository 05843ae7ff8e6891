//! One connection of a guest to a door, and the one way in which anything it asks for is judged and reached.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use sandbox_protocol::door::DoorReason;
use tokio::net::TcpStream;

use super::{Armed, Decided, Denial, Door, DoorKind, Given, Outcome, Seat, Way, way::Connected};
use crate::{
    clock::WallTime,
    policy::{Authority, Host, Ruling, Seen, Side, Who, allowed_port, decide},
    telemetry::GuestText,
};

/// The port that stands for a name of which no port is allowed.
const HTTPS: u16 = 443;
/// Longest target, method and path in a record.
const TEXT: usize = 256;

/// A connection that a door serves for one claim.
#[derive(Debug)]
pub struct Visit {
    door: Door,
    kind: DoorKind,
    /// As it was right after the connection was accepted.
    armed: Arc<Armed>,
    _seat: Seat,
}

/// A connection outwards.
#[derive(Debug)]
pub struct Reached {
    /// The connection.
    pub stream: TcpStream,
    /// To where.
    pub address: SocketAddr,
    /// What it was judged as: by a name, where the guest dialled an address that it was told for that name.
    pub target: Authority,
    /// What the request is given.
    pub secret: Option<Given>,
}

/// Who decided, for the record.
#[derive(Debug, Clone, Default)]
struct Decider {
    side: Option<Side>,
    rule: Option<String>,
    message: Option<String>,
    would_deny: bool,
    secret: Option<String>,
    way: Way,
}

impl Visit {
    pub(super) const fn new(door: Door, kind: DoorKind, armed: Arc<Armed>, seat: Seat) -> Self {
        Self {
            door,
            kind,
            armed,
            _seat: seat,
        }
    }

    /// The door.
    #[must_use]
    pub const fn door(&self) -> &Door {
        &self.door
    }

    /// Which door it came to.
    #[must_use]
    pub const fn kind(&self) -> DoorKind {
        self.kind
    }

    /// What this connection was accepted under.
    #[must_use]
    pub const fn armed(&self) -> &Arc<Armed> {
        &self.armed
    }

    /// What is in force now; none: the claim of this connection is over.
    #[must_use]
    pub fn now(&self) -> Option<Arc<Armed>> {
        self.door.armed().filter(|now| now.claim == self.armed.claim)
    }

    /// Judges a target by the policy in force.
    ///
    /// # Errors
    /// The denial, recorded.
    fn judge(&self, target: &Authority, seen: Seen<'_>) -> Result<(Decider, Option<Given>), Denial> {
        let Some(now) = self.now() else {
            return Err(self.denied(
                &target.to_string(),
                seen,
                DoorReason::NotArmed,
                Decider::default(),
            ));
        };
        let decision = decide(&now.sides, target, seen);
        let would_deny = decision.would_deny().is_some();
        if let Some(verdict) = decision.denial()
            && let Ruling::Denied { reason, rule, .. } = verdict.ruling
        {
            let decider = Decider {
                side: Some(verdict.side),
                rule: rule.map(|rule| rule.id().to_owned()),
                message: rule.and_then(|rule| rule.message().map(str::to_owned)),
                would_deny,
                ..Decider::default()
            };
            return Err(self.denied(&target.to_string(), seen, reason, decider));
        }
        let allowing = decision.allowing();
        let mut decider = Decider {
            side: allowing.map(|(side, _)| side),
            rule: allowing.map(|(_, rule)| rule.id().to_owned()),
            would_deny,
            ..Decider::default()
        };
        let secrets = self.door.egress().secrets();
        match secrets.give(&decision, target, seen, &self.armed.tenant) {
            Ok(given) => {
                decider.secret = given.as_ref().map(|given| given.name().to_owned());
                Ok((decider, given))
            }
            Err(reason) => {
                decider.secret = decision.secret().map(str::to_owned);
                Err(self.denied(&target.to_string(), seen, reason, decider))
            }
        }
    }

    /// Whether the policy in force still allows a tunnel; records that it is cut where not.
    ///
    /// # Errors
    /// The denial.
    pub fn still(&self, target: &Authority) -> Result<(), Denial> {
        let allowed = self
            .now()
            .is_some_and(|now| decide(&now.sides, target, Seen::Tunnel).denial().is_none());
        if allowed {
            return Ok(());
        }
        let decider = Decider::default();
        Err(self.denied(
            &target.to_string(),
            Seen::Tunnel,
            DoorReason::PolicyChanged,
            decider,
        ))
    }

    /// The one way out: decides, resolves, vets, dials.
    ///
    /// # Errors
    /// The denial, recorded. Cancel safe: nothing is open then.
    pub async fn reach(&self, target: &Authority, seen: Seen<'_>) -> Result<Reached, Denial> {
        let pinned = self.pinned(target, seen);
        let target = pinned.as_ref().unwrap_or(target);
        let (mut decider, secret) = self.judge(target, seen)?;
        match Box::pin(self.door.egress().go(target, self.who())).await {
            Ok(Connected { stream, address, way }) => {
                decider.way = way;
                self.record(&target.to_string(), seen, Outcome::Allowed(address), decider);
                Ok(Reached {
                    stream,
                    address,
                    target: target.clone(),
                    secret,
                })
            }
            Err(reason) => Err(self.denied(&target.to_string(), seen, reason, decider)),
        }
    }

    /// The name that an address stands for, unless the address itself is allowed.
    fn pinned(&self, target: &Authority, seen: Seen<'_>) -> Option<Authority> {
        let named = self.door.pinned(target)?;
        let now = self.now()?;
        decide(&now.sides, target, seen)
            .denial()
            .is_some()
            .then_some(named)
    }

    /// Looks a name up for the guest itself: one of which the policy allows something, and only addresses that may be
    /// dialled.
    ///
    /// # Errors
    /// The denial, recorded. Cancel safe.
    pub async fn look_up(&self, name: &str) -> Result<Vec<IpAddr>, Denial> {
        let host = match Host::parse(name.trim_end_matches('.')) {
            Ok(host @ Host::Name(_)) => host,
            Ok(Host::Address(_)) => return Err(self.refuse(DoorReason::AddressLiteral, name)),
            Err(error) => return Err(self.refuse(error.reason(), name)),
        };
        let port = self.now().and_then(|now| allowed_port(&now.sides, &host));
        let target = Authority::new(host, port.unwrap_or(HTTPS));
        let target = target.map_err(|error| self.refuse(error.reason(), name))?;
        if port.is_none() {
            self.judge(&target, Seen::Tunnel)?;
            // What no layer allows on any port, each of them denies on this one.
            return Err(self.refuse(DoorReason::HostNotAllowed, name));
        }
        let found = async {
            let addresses = self.door.egress().addresses(&target).await?;
            self.door.egress().vet(&target, &addresses, self.who()).await?;
            Ok(addresses)
        };
        let addresses = found
            .await
            .map_err(|reason| self.denied(&target.to_string(), Seen::Tunnel, reason, Decider::default()))?;
        if let Host::Name(name) = target.host() {
            self.door.pin(name, &addresses);
        }
        Ok(addresses)
    }

    fn who(&self) -> Who<'_> {
        Who {
            pool: self.armed.pool.as_ref().map_or("", |pool| pool.as_str()),
            tenant: &self.armed.tenant,
        }
    }

    /// Refuses what could not be read as a target, or came too late; recorded.
    pub fn refuse(&self, reason: DoorReason, target: &str) -> Denial {
        self.denied(target, Seen::Tunnel, reason, Decider::default())
    }

    /// Refuses a request for a reason that no layer gave; recorded.
    pub fn refuse_request(&self, reason: DoorReason, target: &str, seen: Seen<'_>) -> Denial {
        self.denied(target, seen, reason, Decider::default())
    }

    fn denied(&self, target: &str, seen: Seen<'_>, reason: DoorReason, decider: Decider) -> Denial {
        let decided = self.record(target, seen, Outcome::Denied(reason), decider);
        self.door.note(Arc::clone(&decided));
        Denial::of(&decided).unwrap_or_else(|| Denial::bare(reason))
    }

    fn record(&self, target: &str, seen: Seen<'_>, outcome: Outcome, decider: Decider) -> Arc<Decided> {
        let (method, path) = match seen {
            Seen::Tunnel => ("", ""),
            Seen::Request { method, path } | Seen::Inside { method, path } => {
                (method, path.split(['?', '#']).next().unwrap_or_default())
            }
        };
        let short = |text: &str| {
            let cut = text.floor_char_boundary(TEXT);
            GuestText::head(text.get(..cut).unwrap_or_default().as_bytes()).to_string()
        };
        self.door.egress().decisions().record(Decided {
            seq: 0,
            at: WallTime::default(),
            sandbox: self.door.sandbox(),
            claim: Some(self.armed.claim),
            tenant: Arc::clone(&self.armed.tenant),
            pool: self.armed.pool.clone(),
            door: self.kind,
            target: short(target),
            method: short(method),
            path: short(path),
            outcome,
            side: decider.side,
            rule: decider.rule,
            message: decider.message,
            would_deny: decider.would_deny,
            secret: decider.secret,
            way: decider.way,
        })
    }
}
