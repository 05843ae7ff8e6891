//! One connection of a guest to a door, and the one way in which anything it asks for is judged and reached.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use sandbox_protocol::door::DoorReason;
use tokio::net::TcpStream;

use super::{
    Armed, Decided, Denial, Door, DoorKind, Outcome, Seat, dial, door::intercept::Interception, interfaces,
};
use crate::{
    clock::WallTime,
    policy::{Authority, Host, Judged, Ruling, Seen, Side, Vetted, Who, allowed_port, decide},
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
}

/// Who decided, for the record.
#[derive(Debug, Clone, Default)]
struct Decider {
    side: Option<Side>,
    rule: Option<String>,
    message: Option<String>,
    would_deny: bool,
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
    fn judge(&self, target: &Authority, seen: Seen<'_>) -> Result<Decider, Denial> {
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
            };
            return Err(self.denied(&target.to_string(), seen, reason, decider));
        }
        let allowing = decision.allowing();
        Ok(Decider {
            side: allowing.map(|(side, _)| side),
            rule: allowing.map(|(_, rule)| rule.id().to_owned()),
            message: None,
            would_deny,
        })
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

    /// Judges a request inside a tunnel that is looked into, on its way to this address; recorded.
    ///
    /// # Errors
    /// The denial, recorded.
    pub fn admit(&self, target: &Authority, seen: Seen<'_>, address: SocketAddr) -> Result<(), Denial> {
        let decider = self.judge(target, seen)?;
        self.record(&target.to_string(), seen, Outcome::Allowed(address), decider);
        Ok(())
    }

    /// Whether the policy in force still allows an opaque tunnel; records that it is cut where not.
    ///
    /// # Errors
    /// The denial.
    pub fn still(&self, target: &Authority) -> Result<(), Denial> {
        self.still_is(target, true)
    }

    /// Whether the policy in force still allows a tunnel that is looked into; records that it is cut where not.
    ///
    /// # Errors
    /// The denial.
    pub fn still_inside(&self, target: &Authority) -> Result<(), Denial> {
        self.still_is(target, false)
    }

    fn still_is(&self, target: &Authority, opaque: bool) -> Result<(), Denial> {
        let allowed = self.now().is_some_and(|now| {
            let decision = decide(&now.sides, target, Seen::Tunnel);
            // What has to be looked into passes nobody unseen, whatever it was when it began.
            decision.denial().is_none() && !(opaque && decision.looks_inside())
        });
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
        let decider = self.judge(target, seen)?;
        let dialled = async {
            let addresses = self.addresses(target).await?;
            let vetted = self.vet(target, &addresses).map_err(|judged| {
                tracing::debug!(address = %judged.address, range = judged.range, "an address was refused");
                judged.refused.unwrap_or(DoorReason::SpecialAddress)
            })?;
            dial::dial(&vetted).await
        };
        match dialled.await {
            Ok((stream, address)) => {
                self.record(&target.to_string(), seen, Outcome::Allowed(address), decider);
                Ok(Reached {
                    stream,
                    address,
                    target: target.clone(),
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
            let addresses = self.addresses(&target).await?;
            self.vet(&target, &addresses)
                .map_err(|judged| judged.refused.unwrap_or(DoorReason::SpecialAddress))?;
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

    async fn addresses(&self, target: &Authority) -> Result<Vec<IpAddr>, DoorReason> {
        match target.host() {
            Host::Address(address) => Ok(vec![*address]),
            Host::Name(name) => {
                let resolver = self.door.egress().0.resolver.load_full();
                resolver.resolve(name).await
            }
        }
    }

    fn vet(&self, target: &Authority, addresses: &[IpAddr]) -> Result<Vec<Vetted>, Judged> {
        let vetting = self.door.egress().0.vetting.load();
        let who = Who {
            pool: self.armed.pool.as_ref().map_or("", |pool| pool.as_str()),
            tenant: &self.armed.tenant,
        };
        let interfaces = interfaces::addresses().map_err(|error| {
            tracing::error!(%error, "the host's own addresses cannot be read: nothing is dialled");
            Judged {
                address: std::net::Ipv4Addr::UNSPECIFIED.into(),
                refused: Some(DoorReason::OwnAddress),
                range: None,
            }
        })?;
        vetting.vet(&interfaces, addresses, target.port(), who)
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
        })
    }
}
