//! What every service needs: who calls, whether we serve yet, and the sandbox that a call names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use futures_util::{Stream, StreamExt as _, stream};
use sandbox_protocol::{id::RequestId, reason::Reason};
use tonic::Status;

use super::{AccessNow, Ctx, Refusal, stream::Boxed};
use crate::{
    access::{Caller, Lock, Principal},
    claim::Claims,
    clock::{Clock, Tick, WallTime},
    config::TenantPools,
    doctor::Check,
    engine::Engine,
    sandbox::Sandbox,
    telemetry::admin::{Phase, Readiness},
    words::{Lane, MemBytes, Name, OPERATOR},
};

/// What a reload did.
#[derive(Debug, Clone, Default)]
pub struct Reloaded {
    /// Settings that are in force now.
    pub changed: Vec<String>,
    /// Settings that differ and need a restart.
    pub needs_restart: Vec<String>,
}

/// What the daemon itself does for `Node`.
pub trait Host: Send + Sync + fmt::Debug + 'static {
    /// Reads the configuration again.
    ///
    /// # Errors
    /// Every mistake, in words.
    fn reload(&self) -> Result<Reloaded, String>;
    /// The checks of `sandboxd doctor`. Blocks.
    fn doctor(&self) -> Vec<Check>;
    /// Name of this host in replies.
    fn name(&self) -> String;
    /// Memory for guests.
    fn memory_budget(&self) -> MemBytes;
    /// When the daemon started.
    fn started_at(&self) -> WallTime;
}

/// What tenants may claim; a reload swaps it.
pub type TenantsNow = Arc<ArcSwap<BTreeMap<Name, TenantPools>>>;

/// Held over a look at pools or templates and the change that follows from it, so that no other change comes between.
/// Never over an await.
#[derive(Debug, Clone, Default)]
pub struct Changing(Arc<Mutex<()>>);

impl Changing {
    /// Waits for the change under way, some microseconds, and begins one.
    pub fn begin(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The front desk; cheap to clone.
#[derive(Debug, Clone)]
pub struct Desk(Arc<Inner>);

/// What the desk is made of.
#[derive(Debug)]
pub struct Inner {
    /// The domain.
    pub claims: Claims,
    /// Who may call.
    pub access: AccessNow,
    /// What tenants may claim.
    pub tenants: TenantsNow,
    /// One change of pools or templates at a time.
    pub changing: Changing,
    /// Whether we serve.
    pub readiness: Readiness,
    /// The daemon.
    pub host: Arc<dyn Host>,
    /// Machines.
    pub engine: Arc<dyn Engine>,
}

impl std::ops::Deref for Desk {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Desk {
    /// A desk of these parts.
    #[must_use]
    pub fn new(inner: Inner) -> Self {
        Self(Arc::new(inner))
    }

    /// Refuses a lane that this host does not have.
    ///
    /// # Errors
    /// `LANE_UNAVAILABLE`.
    pub fn has(&self, lane: Lane) -> Result<(), Refusal> {
        match (lane, &self.claims.sandboxes.means().net) {
            (Lane::None, _) | (Lane::Guarded, Some(_)) => Ok(()),
            (Lane::Guarded, None) => Err(Refusal::new(
                Reason::LaneUnavailable,
                "lane guarded is not available on this host: net.slots is 0",
            )),
        }
    }

    /// The clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.claims.sandboxes.means().clock
    }

    /// What a service needs to know of a request besides its message.
    #[must_use]
    pub fn ctx<T>(&self, request: &tonic::Request<T>) -> Ctx {
        Ctx::of(request, &self.access.load())
    }

    /// The sandbox that a call names, for a caller that may touch it. Unknown ids, wrong tokens and missing tokens take
    /// the same path and read the same.
    ///
    /// # Errors
    /// `SANDBOX_NOT_FOUND`.
    pub fn opened(&self, caller: &Caller, id: &str) -> Result<(Arc<Sandbox>, Principal), Refusal> {
        let sandbox = id.parse().ok().and_then(|id| self.claims.sandboxes.get(id));
        let lock = sandbox.as_ref().map(|sandbox| lock(sandbox));
        let principal = caller.opens(lock.as_ref());
        match (sandbox, principal) {
            (Some(sandbox), Some(principal)) => Ok((sandbox, principal)),
            (None | Some(_), _) => Err(Refusal::not_found()),
        }
    }

    /// Refuses calls before claims are taken up, and changes while the daemon stops.
    ///
    /// # Errors
    /// `STARTING`, `DRAINING`.
    pub fn serving(&self) -> Result<(), Refusal> {
        match self.readiness.phase() {
            // With a failed journal each change is refused by the journal itself.
            Phase::Ready | Phase::JournalFailed => Ok(()),
            Phase::Starting => Err(Refusal::new(
                Reason::Starting,
                "the daemon is taking up its claims",
            )),
            Phase::Draining => Err(Refusal::new(Reason::Draining, "the daemon is stopping")),
        }
    }

    /// Refuses calls before claims are taken up; while the daemon stops they are served.
    ///
    /// # Errors
    /// `STARTING`.
    pub fn started(&self) -> Result<(), Refusal> {
        match self.readiness.phase() {
            Phase::Ready | Phase::JournalFailed | Phase::Draining => Ok(()),
            Phase::Starting => Err(Refusal::new(
                Reason::Starting,
                "the daemon is taking up its claims",
            )),
        }
    }

    /// Resolves once the daemon stops: streams without an end of their own end then.
    pub fn stopping(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut phase = self.readiness.watch();
        async move {
            // A daemon that is gone has stopped too.
            drop(phase.wait_for(|phase| *phase == Phase::Draining).await);
        }
    }

    /// A stream that says why it ends when the daemon stops: to its reader, an end without a word would be all there is.
    pub(super) fn until_stop<T: Send + 'static>(
        &self,
        id: RequestId,
        events: impl Stream<Item = T> + Send + 'static,
    ) -> Boxed<T> {
        let draining = Refusal::new(Reason::Draining, "the daemon is stopping");
        let last = stream::once(async move { Err::<T, Status>(draining.status(id)) });
        Box::pin(events.take_until(self.stopping()).map(Ok).chain(last))
    }

    /// The pools that this principal may claim from and look at. A tenant that the configuration says nothing of may use
    /// all.
    #[must_use]
    pub fn allowed(&self, principal: &Principal) -> TenantPools {
        match principal {
            Principal::Operator(_) => TenantPools::All,
            Principal::Tenant { tenant, .. } => {
                let tenants = self.tenants.load();
                tenants.get(tenant).cloned().unwrap_or(TenantPools::All)
            }
            Principal::Claimer { .. } => TenantPools::Named(BTreeSet::new()),
        }
    }

    /// When the caller's own deadline is over, by its `grpc-timeout`.
    #[must_use]
    pub fn deadline<T>(&self, request: &tonic::Request<T>) -> Option<Tick> {
        let text = request.metadata().get("grpc-timeout")?.to_str().ok()?;
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let n: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
        let nanos = match unit {
            "H" => n.saturating_mul(3_600_000_000_000),
            "M" => n.saturating_mul(60_000_000_000),
            "S" => n.saturating_mul(1_000_000_000),
            "m" => n.saturating_mul(1_000_000),
            "u" => n.saturating_mul(1_000),
            "n" => n,
            _ => return None,
        };
        Some(self.clock().tick().plus(std::time::Duration::from_nanos(nanos)))
    }
}

/// What a sandbox's record says about who may touch it.
#[must_use]
pub fn lock(sandbox: &Sandbox) -> Lock {
    sandbox.with_life(|life| {
        let claim = life.claim();
        Lock {
            sandbox: sandbox.id,
            token: claim.map(|claim| claim.token_hash),
            tenant: claim
                .filter(|claim| *claim.owner != *OPERATOR)
                .and_then(|claim| claim.owner.parse().ok()),
        }
    })
}

/// Whether this principal is an operator, who is shown what concerns the host.
#[must_use]
pub const fn is_operator(principal: &Principal) -> bool {
    match principal {
        Principal::Operator(_) => true,
        Principal::Tenant { .. } | Principal::Claimer { .. } => false,
    }
}

/// Whose a claim by this principal is.
#[must_use]
pub fn owner(principal: &Principal) -> Option<Arc<str>> {
    match principal {
        Principal::Operator(_) => Some(OPERATOR.into()),
        Principal::Tenant { tenant, .. } => Some(tenant.as_str().into()),
        Principal::Claimer { .. } => None,
    }
}

/// The reply of a service, or its refusal as a status.
///
/// # Errors
/// The refusal.
pub fn answer<T>(ctx: &Ctx, outcome: Result<T, Refusal>) -> Result<tonic::Response<T>, Status> {
    outcome
        .map(tonic::Response::new)
        .map_err(|refusal| refusal.status(ctx.id))
}
