//! Doors: how a guest's connections are judged, dialled, recorded and let go.
//!
//! A door is made with its sandbox and denies. A claim arms it by one pointer swap ([`Door::arm`]) under the sandbox's own
//! lock, behind its record; the end disarms it first. Both doors of a sandbox share that pointer. Every byte that leaves
//! has passed target, decision, resolver, vetting and dial, in this order, in one place ([`Visit::reach`]), whatever the
//! kind of request; explain asks the same functions.
//!
//! May call: ca, link, policy.
//! Never inside: an answer that is not a denial where something is missing or fails; a way to dial what was not vetted.
//! Invariant 12: a door denies until armed and by default, disarms first, and dials what it judged.
//! Cancel safety: dropping what serves a connection resets both of its sides; dropping a link's future ends the link and
//! leaves connections to [`Door::stop`].

mod answer;
mod armed;
mod book;
mod decisions;
mod dial;
pub mod door;
mod explain;
mod interfaces;
mod pins;
mod resolve;
#[cfg(test)]
mod tests;
mod visit;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use arc_swap::{ArcSwap, ArcSwapOption};
use sandbox_protocol::{id::SandboxId, limits};

pub use self::{
    answer::Denial,
    armed::{Armed, Door, DoorKind, Seat},
    book::{Book, PoolTerms},
    decisions::{Decided, Decisions, Outcome},
    door::intercept::{Interception, InterceptionError},
    explain::{Explained, explain},
    resolve::Resolver,
    visit::{Reached, Visit},
};
use crate::{clock::Clock, policy::Vetting, telemetry::metrics::DoorMetrics};

/// Connections of all doors of this node: a bound on descriptors and buffers.
const NODE_CONNECTIONS: usize = 65_536;
/// Of one sandbox, those that no other can take from it.
const KEPT: usize = 8;

/// What the operator may change while doors serve.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Name servers; empty: those of resolv.conf.
    pub servers: Vec<SocketAddr>,
    /// What is said about addresses.
    pub vetting: Vetting,
}

/// What all doors share; cheap to clone.
#[derive(Debug, Clone)]
pub struct Egress(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    book: Book,
    vetting: ArcSwap<Vetting>,
    resolver: ArcSwap<Resolver>,
    decisions: Decisions,
    interception: ArcSwapOption<Interception>,
    open: AtomicUsize,
}

impl Egress {
    /// Without any policy: every door that is armed denies (`no_policy`).
    #[must_use]
    pub fn new(settings: Settings, metrics: DoorMetrics, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            book: Book::default(),
            vetting: ArcSwap::from_pointee(settings.vetting),
            resolver: ArcSwap::from_pointee(Resolver::new(settings.servers)),
            decisions: Decisions::new(metrics, clock),
            interception: ArcSwapOption::const_empty(),
            open: AtomicUsize::new(0),
        }))
    }

    /// Puts new settings in force, for dials from now on.
    pub fn set(&self, settings: Settings) {
        self.0.vetting.store(Arc::new(settings.vetting));
        self.0.resolver.store(Arc::new(Resolver::new(settings.servers)));
    }

    /// Sets what tunnels that begin from now on are looked into with; none: those that have to be are refused.
    pub fn set_interception(&self, interception: Option<Interception>) {
        self.0.interception.store(interception.map(Arc::new));
    }

    /// What tunnels are looked into with.
    #[must_use]
    pub fn interception(&self) -> Option<Arc<Interception>> {
        self.0.interception.load_full()
    }

    /// Named policies, and who has which.
    #[must_use]
    pub fn book(&self) -> &Book {
        &self.0.book
    }

    /// What doors decided.
    #[must_use]
    pub fn decisions(&self) -> &Decisions {
        &self.0.decisions
    }

    /// A door of a sandbox, unarmed.
    #[must_use]
    pub fn door(&self, sandbox: SandboxId) -> Door {
        Door::new(self.clone(), sandbox)
    }

    /// Counts a connection in, if the node has room for it; `mine`: those that its sandbox has already.
    fn enter(&self, mine: usize) -> bool {
        let before = self.0.open.fetch_add(1, Ordering::Relaxed);
        if mine < KEPT || before < NODE_CONNECTIONS {
            return true;
        }
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        false
    }

    fn leave(&self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

const _: () = assert!(KEPT < limits::DOOR_CONNECTIONS);
