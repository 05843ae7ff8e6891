//! The pointer that both doors of a sandbox share, and what is counted of them.

use std::{
    collections::VecDeque,
    fmt,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
};

use arc_swap::ArcSwapOption;
use sandbox_protocol::{
    door::DoorReason,
    id::{ClaimId, SandboxId},
    limits::DOOR_CONNECTIONS,
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    Decided, Denial, Egress, Outcome,
    audit::{Meters, Owner},
    door::Kept,
    pins::Pins,
};
use crate::{
    clock::WallTime,
    policy::{Authority, Host, Sides},
    tasks::Group,
    words::{Lane, Name},
};

/// Denials that a guest can list.
const DENIALS: usize = 32;

/// Which door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoorKind {
    /// HTTP.
    Http,
    /// SOCKS5.
    Socks5,
    /// DNS, on lane guarded.
    Dns,
}

impl DoorKind {
    /// Its text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Socks5 => "socks5",
            Self::Dns => "dns",
        }
    }
}

/// What a door enforces for one claim.
#[derive(Debug)]
pub struct Armed {
    /// The claim: a connection of another one, or of none, is not served.
    pub claim: ClaimId,
    /// Whose it is.
    pub tenant: Arc<str>,
    /// Which pool served it.
    pub pool: Option<Name>,
    /// The policy.
    pub sides: Sides,
    /// Cancelled with the claim's end, whatever is under way.
    pub(super) cut: CancellationToken,
    /// Connections to origins that rest: the claim's own.
    pub(super) kept: Arc<Kept>,
    /// What the claim uses.
    pub(super) meters: Arc<Meters>,
}

impl Armed {
    pub(super) fn owner(&self, door: &Door) -> Owner {
        Owner {
            sandbox: door.sandbox(),
            claim: self.claim,
            tenant: Arc::clone(&self.tenant),
            pool: self.pool.clone(),
            lane: door.lane(),
        }
    }
}

/// Both doors of one sandbox; a handle.
#[derive(Clone)]
pub struct Door(Arc<Inner>);

struct Inner {
    egress: Egress,
    sandbox: SandboxId,
    armed: ArcSwapOption<Armed>,
    /// By door: HTTP, SOCKS5, DNS.
    open: [AtomicUsize; 3],
    /// Whether the guest's connection is up; told too when the policy of the claim at hand is another, so that every
    /// sandbox holds one such channel and not two.
    is_linked: watch::Sender<bool>,
    /// It listens on a TAP.
    is_guarded: AtomicBool,
    /// The doors of which a refusal was asked for, as bits; see [`Proof`](super::door::Proof).
    asked_for: AtomicU8,
    denials: Mutex<VecDeque<Arc<Decided>>>,
    /// Names that the DNS door told addresses of, in this claim.
    pins: Mutex<Pins>,
    connections: Group,
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door")
            .field("sandbox", &self.0.sandbox)
            .field("armed", &self.0.armed.load().is_some())
            .field("open", &self.0.open)
            .finish_non_exhaustive()
    }
}

impl Door {
    pub(super) fn new(egress: Egress, sandbox: SandboxId) -> Self {
        Self(Arc::new(Inner {
            egress,
            sandbox,
            armed: ArcSwapOption::const_empty(),
            open: [const { AtomicUsize::new(0) }; 3],
            is_linked: watch::Sender::new(false),
            is_guarded: AtomicBool::new(false),
            asked_for: AtomicU8::new(0),
            denials: Mutex::default(),
            pins: Mutex::default(),
            connections: Group::new(),
        }))
    }

    /// From here on connections are judged by the policy of this claim: one store, nothing else.
    pub fn arm(&self, claim: ClaimId, tenant: Arc<str>, pool: Option<Name>, sides: Sides) {
        let armed = Armed {
            claim,
            tenant,
            pool,
            sides,
            cut: CancellationToken::new(),
            kept: Arc::default(),
            meters: Arc::default(),
        };
        self.pins().clear();
        self.0.armed.store(Some(Arc::new(armed)));
    }

    /// Sets another policy for the claim that the door is armed for. Tunnels judge themselves anew and are cut where it
    /// forbids them.
    pub fn change(&self, sides: Sides) {
        let Some(now) = self.armed() else { return };
        if now.sides == sides {
            return;
        }
        let armed = Armed {
            claim: now.claim,
            tenant: Arc::clone(&now.tenant),
            pool: now.pool.clone(),
            sides,
            cut: now.cut.clone(),
            kept: Arc::clone(&now.kept),
            meters: Arc::clone(&now.meters),
        };
        self.0.armed.store(Some(Arc::new(armed)));
        // To those who look at the policy anew; the link is as it was.
        self.0.is_linked.send_modify(|_same| {});
    }

    /// The claim is over: from here on nothing is served, and what is under way is cut. Needs nothing that can fail; twice is
    /// as once.
    pub fn disarm(&self) {
        if let Some(armed) = self.shut() {
            self.0.egress.audit().bill(&armed.meters, || armed.owner(self));
        }
    }

    /// The same for a claim that may go on without us.
    fn shut(&self) -> Option<Arc<Armed>> {
        let armed = self.0.armed.swap(None);
        if let Some(armed) = &armed {
            armed.cut.cancel();
            armed.kept.shut();
        }
        self.pins().clear();
        armed
    }

    /// Denies a connection that is not even read: nothing is in force, or there are too many. Its line is all that is
    /// kept of it; a refusal that was asked for has none.
    pub(super) fn turn_away(&self, door: DoorKind, armed: Option<&Armed>) -> Denial {
        let reason = match armed {
            None => DoorReason::NotArmed,
            Some(_) => DoorReason::TooManyConnections,
        };
        if armed.is_none() && self.was_asked_for(door) {
            return Denial::bare(reason);
        }
        let seq = self.0.egress.decisions().write(Decided {
            seq: 0,
            audit_seq: 0,
            at: WallTime::default(),
            sandbox: self.sandbox(),
            claim: armed.map(|armed| armed.claim),
            tenant: armed.map_or_else(|| Arc::from(""), |armed| Arc::clone(&armed.tenant)),
            pool: armed.and_then(|armed| armed.pool.clone()),
            door,
            lane: self.lane(),
            target: String::new(),
            method: String::new(),
            path: String::new(),
            outcome: Outcome::Denied(reason),
            side: None,
            rule: None,
            message: None,
            would_deny: false,
            secret: None,
            way: super::Way::default(),
        });
        Denial {
            seq,
            ..Denial::bare(reason)
        }
    }

    /// The claim of this pointer uses its doors.
    pub(super) fn uses(&self, armed: &Armed) {
        let audit = self.0.egress.audit();
        audit.uses(&armed.meters, || armed.owner(self));
    }

    fn pins(&self) -> MutexGuard<'_, Pins> {
        // Every change of it is whole.
        self.0.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers for a while that these addresses were told for a name.
    pub(super) fn pin(&self, name: &str, addresses: &[IpAddr]) {
        self.pins().put(name, addresses, Instant::now());
    }

    /// The target by name of one by address, if the guest was told that address.
    pub(super) fn pinned(&self, target: &Authority) -> Option<Authority> {
        let Host::Address(address) = target.host() else {
            return None;
        };
        let name = self.pins().name(*address, Instant::now())?;
        Authority::new(Host::Name(name), target.port()).ok()
    }

    /// What is in force; none: unarmed.
    #[must_use]
    pub fn armed(&self) -> Option<Arc<Armed>> {
        self.0.armed.load_full()
    }

    /// Whose doors they are.
    #[must_use]
    pub fn sandbox(&self) -> SandboxId {
        self.0.sandbox
    }

    /// Connections that are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.open.iter().map(|open| open.load(Ordering::Relaxed)).sum()
    }

    /// Whether the guest's connection is up.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        *self.0.is_linked.borrow()
    }

    /// Resolves once the guest's connection is up. Cancel safe.
    pub async fn linked(&self) {
        let mut linked = self.0.is_linked.subscribe();
        // The sender is ours.
        drop(linked.wait_for(|linked| *linked).await);
    }

    pub(super) fn set_linked(&self, is_linked: bool) {
        self.0.is_linked.send_replace(is_linked);
    }

    /// By which lane its guest is connected.
    #[must_use]
    pub fn lane(&self) -> Lane {
        if self.0.is_guarded.load(Ordering::Relaxed) {
            Lane::Guarded
        } else {
            Lane::None
        }
    }

    pub(super) fn set_guarded(&self) {
        self.0.is_guarded.store(true, Ordering::Relaxed);
    }

    pub(super) fn asked_for(&self) -> &AtomicU8 {
        &self.0.asked_for
    }

    pub(super) fn egress(&self) -> &Egress {
        &self.0.egress
    }

    /// Told when the policy may be another.
    pub(super) fn changes(&self) -> watch::Receiver<bool> {
        self.0.is_linked.subscribe()
    }

    pub(super) fn group(&self) -> &Group {
        &self.0.connections
    }

    /// Ends every connection and waits for their tasks. Cancel safe; call again to go on waiting.
    pub async fn stop(&self) {
        drop(self.shut());
        self.0.connections.stop().await;
    }

    /// Notes a denial for the guest to list.
    pub(super) fn note(&self, denied: Arc<Decided>) {
        let mut denials = self.0.denials.lock().unwrap_or_else(PoisonError::into_inner);
        if denials.len() == DENIALS {
            denials.pop_front();
        }
        denials.push_back(denied);
    }

    /// The last denials of the claim at hand, oldest first.
    #[must_use]
    pub fn denials(&self) -> Vec<Arc<Decided>> {
        let denials = self.0.denials.lock().unwrap_or_else(PoisonError::into_inner);
        denials.iter().cloned().collect()
    }

    fn open(&self, kind: DoorKind) -> &AtomicUsize {
        let [http, socks5, dns] = &self.0.open;
        match kind {
            DoorKind::Http => http,
            DoorKind::Socks5 => socks5,
            DoorKind::Dns => dns,
        }
    }

    /// A place for a connection; none: the door, or the node, has too many.
    #[must_use]
    pub fn seat(&self, kind: DoorKind) -> Option<Seat> {
        let open = self.open(kind);
        let mine = open.fetch_add(1, Ordering::Relaxed);
        if mine < DOOR_CONNECTIONS && self.0.egress.enter(mine) {
            self.0
                .egress
                .decisions()
                .metrics()
                .opened(kind.as_str(), self.lane());
            return Some(Seat {
                door: self.clone(),
                kind,
            });
        }
        open.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

/// A connection's place; free again when dropped.
#[derive(Debug)]
pub struct Seat {
    door: Door,
    kind: DoorKind,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.door.open(self.kind).fetch_sub(1, Ordering::Relaxed);
        let metrics = self.door.0.egress.decisions().metrics();
        metrics.closed(self.kind.as_str(), self.door.lane());
        self.door.0.egress.leave();
    }
}
