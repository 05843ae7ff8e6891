//! What all doors of this node share.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use arc_swap::{ArcSwap, ArcSwapOption};
use sandbox_protocol::{id::SandboxId, limits};

use super::{
    Audit, Book, Decisions, Door, Interception, Resolver, Routes, Secrets, door::Pipes,
    interfaces::Interfaces,
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
    /// Values that requests are given.
    pub secrets: Secrets,
    /// Upstream proxies, and where dials leave from.
    pub routes: Routes,
}

/// What all doors share; cheap to clone.
#[derive(Debug, Clone)]
pub struct Egress(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) book: Book,
    pub(super) vetting: ArcSwap<Vetting>,
    pub(super) interfaces: Interfaces,
    pub(super) resolver: ArcSwap<Resolver>,
    pub(super) secrets: ArcSwap<Secrets>,
    pub(super) routes: ArcSwap<Routes>,
    pub(super) decisions: Decisions,
    pub(super) interception: ArcSwapOption<Interception>,
    pub(super) open: AtomicUsize,
    pub(super) pipes: Pipes,
}

impl Egress {
    /// Without any policy: every door that is armed denies (`no_policy`).
    #[must_use]
    pub fn new(settings: Settings, metrics: DoorMetrics, clock: Clock) -> Self {
        Self::audited(settings, metrics, clock, Audit::off())
    }

    /// The same with an audit.
    #[must_use]
    pub fn audited(settings: Settings, metrics: DoorMetrics, clock: Clock, audit: Audit) -> Self {
        Self::with(settings, metrics, clock, audit, Pipes::of_this_process())
    }

    pub(super) fn with(
        settings: Settings,
        metrics: DoorMetrics,
        clock: Clock,
        audit: Audit,
        pipes: Pipes,
    ) -> Self {
        Self(Arc::new(Inner {
            book: Book::default(),
            vetting: ArcSwap::from_pointee(settings.vetting),
            interfaces: Interfaces::default(),
            resolver: ArcSwap::from_pointee(Resolver::new(settings.servers)),
            secrets: ArcSwap::from_pointee(settings.secrets),
            routes: ArcSwap::from_pointee(settings.routes),
            decisions: Decisions::new(metrics, clock, audit),
            interception: ArcSwapOption::const_empty(),
            open: AtomicUsize::new(0),
            pipes,
        }))
    }

    /// Puts new settings in force, for dials from now on.
    pub fn set(&self, settings: Settings) {
        self.0.vetting.store(Arc::new(settings.vetting));
        self.0.resolver.store(Arc::new(Resolver::new(settings.servers)));
        self.0.secrets.store(Arc::new(settings.secrets));
        self.0.routes.store(Arc::new(settings.routes));
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

    /// Where decisions are written.
    #[must_use]
    pub fn audit(&self) -> &Audit {
        self.0.decisions.audit()
    }

    /// A door of a sandbox, unarmed.
    #[must_use]
    pub fn door(&self, sandbox: SandboxId) -> Door {
        Door::new(self.clone(), sandbox)
    }

    /// Pipes for tunnels that say much.
    pub(super) fn pipes(&self) -> &Pipes {
        &self.0.pipes
    }

    /// Counts a connection in, if the node has room for it; `mine`: those that its sandbox has already.
    pub(super) fn enter(&self, mine: usize) -> bool {
        let before = self.0.open.fetch_add(1, Ordering::Relaxed);
        if mine < KEPT || before < NODE_CONNECTIONS {
            return true;
        }
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        false
    }

    pub(super) fn leave(&self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

const _: () = assert!(KEPT < limits::DOOR_CONNECTIONS);
