//! One connection of a guest to a door, and the one way in which anything it asks for is judged and reached.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use sandbox_protocol::door::DoorReason;
use tokio::net::TcpStream;

use super::{
    Armed, Decided, Denial, Door, DoorKind, Given, Outcome, Seat, Way,
    audit::{Ended, Entry},
    door::{Kept, Traffic, Upstream, intercept::Interception},
    way::Connected,
};
use crate::{
    clock::{Tick, WallTime},
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
    begun: Tick,
    traffic: Arc<Traffic>,
}

/// A connection outwards.
#[derive(Debug)]
pub struct Reached<T = TcpStream> {
    /// The connection, or what speaks over it.
    pub stream: T,
    /// To where.
    pub address: SocketAddr,
    /// What it was judged as: by a name, where the guest dialled an address that it was told for that name.
    pub target: Authority,
    /// What the request is given.
    pub secret: Option<Given>,
    /// No upstream proxy stands between.
    pub is_direct: bool,
}

impl<T> Reached<T> {
    /// The same place, by what else leads there. What a request is given stays with that request.
    pub(super) fn by<O>(&self, stream: O) -> Reached<O> {
        Reached {
            stream,
            address: self.address,
            target: self.target.clone(),
            secret: None,
            is_direct: self.is_direct,
        }
    }
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
    pub(super) fn new(door: Door, kind: DoorKind, armed: Arc<Armed>, seat: Seat) -> Self {
        door.uses(&armed);
        Self {
            begun: door.egress().decisions().clock().tick(),
            traffic: Arc::new(Traffic::new(&armed, kind)),
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

    /// What moves on it.
    pub(super) const fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
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
        if !self.door.egress().audit().takes() {
            return Err(self.denied(&target.to_string(), seen, DoorReason::AuditUnavailable, decider));
        }
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

    /// The target of a tunnel that is allowed and has to be looked into, as it is judged: by a name, where the guest dials
    /// an address that it was told for that name.
    #[must_use]
    pub fn looks_inside(&self, target: &Authority) -> Option<Authority> {
        let pinned = self.pinned(target, Seen::Tunnel);
        let target = pinned.as_ref().unwrap_or(target);
        let now = self.now()?;
        let decision = decide(&now.sides, target, Seen::Tunnel);
        (decision.denial().is_none() && decision.looks_inside()).then(|| target.clone())
    }

    /// What this node looks into TLS with; none: it cannot.
    #[must_use]
    pub fn interception(&self) -> Option<Arc<Interception>> {
        self.door.egress().interception()
    }

    /// Judges a request inside a tunnel that is looked into, on its way to this address; recorded. Gives what it is given.
    ///
    /// # Errors
    /// The denial, recorded.
    pub fn admit(
        &self,
        target: &Authority,
        seen: Seen<'_>,
        address: SocketAddr,
    ) -> Result<Option<Given>, Denial> {
        let (decider, secret) = self.judge(target, seen)?;
        self.record(&target.to_string(), seen, Outcome::Allowed(address), decider);
        Ok(secret)
    }

    /// Whether the policy in force still allows what was asked for; records that it is cut where not. What has to be looked
    /// into passes nobody unseen, whatever it was when it began.
    ///
    /// # Errors
    /// The denial.
    pub fn still(&self, target: &Authority, seen: Seen<'_>) -> Result<(), Denial> {
        let allowed = self.now().is_some_and(|now| {
            let decision = decide(&now.sides, target, seen);
            decision.denial().is_none() && !(seen == Seen::Tunnel && decision.looks_inside())
        });
        if allowed {
            return Ok(());
        }
        Err(self.refuse_request(DoorReason::PolicyChanged, &target.to_string(), seen))
    }

    /// Whether the policy in force still allows a tunnel that is looked into; records that it is cut where not.
    ///
    /// # Errors
    /// The denial.
    pub fn still_inside(&self, target: &Authority) -> Result<(), Denial> {
        let allowed = self
            .now()
            .is_some_and(|now| decide(&now.sides, target, Seen::Tunnel).denial().is_none());
        if allowed {
            return Ok(());
        }
        Err(self.refuse_request(DoorReason::PolicyChanged, &target.to_string(), Seen::Tunnel))
    }

    /// Where connections of this claim rest.
    pub(super) fn kept(&self) -> &Arc<Kept> {
        &self.armed.kept
    }

    /// A connection of this claim that rests, for one more request, which is judged like any other. Its address is not
    /// looked up again; it is vetted again, as far as that is about this host and its operator's word.
    ///
    /// # Errors
    /// The denial, recorded. Cancel safe: a connection that was taken ends.
    pub(super) async fn reuse(
        &self,
        target: &Authority,
        seen: Seen<'_>,
    ) -> Result<Option<(Upstream, Option<Given>)>, Denial> {
        let pinned = self.pinned(target, seen);
        let target = pinned.as_ref().unwrap_or(target);
        let Some(upstream) = self.kept().take(target).await else {
            return Ok(None);
        };
        let (mut decider, secret) = self.judge(target, seen)?;
        let egress = self.door.egress();
        // What rests goes there directly: where that is not the way any more, it is of no use.
        let way = egress.way(target, self.who()).ok().filter(Way::is_direct);
        let vetted = egress.vet(target, &[upstream.address.ip()], self.who()).await;
        let (Some(way), Ok(_vetted)) = (way, vetted) else {
            return Ok(None);
        };
        decider.way = way;
        let outcome = Outcome::Allowed(upstream.address);
        self.record(&target.to_string(), seen, outcome, decider);
        Ok(Some((upstream, secret)))
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
                let is_direct = way.is_direct();
                decider.way = way;
                let text = target.to_string();
                let decided = self.record(&text, seen, Outcome::Allowed(address), decider);
                if !self.door.egress().audit().allows(decided.audit_seq) {
                    return Err(self.refuse_request(DoorReason::AuditUnavailable, &text, seen));
                }
                if matches!(seen, Seen::Tunnel) {
                    self.traffic.leads_to(decided, address);
                }
                Ok(Reached {
                    stream,
                    address,
                    target: target.clone(),
                    secret,
                    is_direct,
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
        self.traffic.decided(&outcome);
        let short = |text: &str| {
            let cut = text.floor_char_boundary(TEXT);
            GuestText::head(text.get(..cut).unwrap_or_default().as_bytes()).to_string()
        };
        self.door.egress().decisions().record(Decided {
            seq: 0,
            audit_seq: 0,
            at: WallTime::default(),
            sandbox: self.door.sandbox(),
            claim: Some(self.armed.claim),
            tenant: Arc::clone(&self.armed.tenant),
            pool: self.armed.pool.clone(),
            door: self.kind,
            lane: self.door.lane(),
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

impl Drop for Visit {
    /// However it ends: it is told, unless it was a question.
    fn drop(&mut self) {
        if self.kind == DoorKind::Dns {
            return;
        }
        let decisions = self.door.egress().decisions();
        let clock = decisions.clock();
        let lasted = clock.tick().since(self.begun);
        decisions.audit().push(|_seq| {
            let ended = Ended {
                at: clock.wall(),
                owner: self.armed.owner(&self.door),
                door: self.kind,
                traffic: Arc::clone(&self.traffic),
                lasted,
            };
            (Entry::End(Box::new(ended)), ())
        });
    }
}
