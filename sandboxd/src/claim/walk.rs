//! The walk of a claim. Warm: one record, one write; no netlink, QMP, bind, spawn, thread change or guest trip.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sandbox_protocol::{id::ClaimId, limits, reason::Reason, v1};
use tokio::time::timeout;
use tracing::Instrument as _;

use super::keys::{KeyGuard, Keys, Reserved};
use crate::{
    access::{ClaimToken, HostKey},
    admission::Full,
    agent::{self, AgentError},
    clock::Tick,
    config::TenantPools,
    engine::Capture,
    faults,
    journal::{AppendError, Written},
    net::NetError,
    policy::Layer,
    pool::{LeaseBounds, Pool, Pools, WaitEnd},
    random,
    sandbox::{
        ApplyError, Claim, Lease, Life, MakeError, MakeSpec, Sandbox, Sandboxes, Source, Warm, Why, WhyKind,
    },
    telemetry::{
        metrics::{ClaimSeries, ClaimStep, ClaimTimes, Outcome},
        span,
    },
    template::{TemplateError, Templates},
    words::{Name, PoolKey, Tier},
};

/// From where a claim wants its sandbox.
#[derive(Debug, Clone)]
pub enum Wanted {
    /// A pool.
    Pool(Name),
    /// The first pool by name with this key, else a clone or a cold boot.
    Key(PoolKey),
}

/// A claim as asked for; every field is within its limits.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Whose it will be.
    pub owner: Arc<str>,
    /// From where.
    pub from: Wanted,
    /// Pools that the caller may claim from; what it may not is to it as if it were not there.
    pub allowed: TenantPools,
    /// Seconds; absent: the pool's.
    pub lease_secs: Option<u32>,
    /// The caller's request key, and the digest of the request.
    pub request: Option<(String, String)>,
    /// The caller's labels.
    pub labels: BTreeMap<String, String>,
    /// Time in line.
    pub wait: Duration,
    /// Never a clone on demand or a cold boot.
    pub warm_only: bool,
    /// Environment of everything that runs in it.
    pub env: Vec<v1::EnvVar>,
    /// Its default user.
    pub user: bytes::Bytes,
    /// What its guest may reach, where it narrows that.
    pub layer: Option<Arc<Layer>>,
    /// Until when the caller waits, if it said so.
    pub deadline: Option<Tick>,
}

/// A claim that was recorded.
#[derive(Debug)]
pub struct Granted {
    /// The sandbox.
    pub sandbox: Arc<Sandbox>,
    /// The claim.
    pub claim: Claim,
    /// What opens it.
    pub token: ClaimToken,
    /// Proof that its record outlives the daemon; absent for a repetition, whose record the first answer was about.
    _receipt: Option<Written>,
}

#[cfg(test)]
impl Granted {
    /// Whether this answers a repeated request, whose receipt went to the first answer.
    pub(super) const fn is_repetition(&self) -> bool {
        self._receipt.is_none()
    }
}

/// Why there is no claim.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// No such pool.
    #[error("there is no pool {0}")]
    PoolNotFound(Name),
    /// The caller may claim from some pools only, and none of them has that key.
    #[error("no pool of this tenant has template {}, lane {} and size {}", .0.template, .0.lane, .0.size)]
    NotAllowed(PoolKey),
    /// No template of that name.
    #[error("there is no template {0}")]
    TemplateNotFound(Name),
    /// No size of that name.
    #[error("there is no size {0}")]
    SizeNotFound(Name),
    /// The lane is off, or cannot serve now.
    #[error("{0}")]
    Net(NetError),
    /// Zero, or over the pool's maximum.
    #[error("a lease of {asked} s is not within 1 ..= {max} s")]
    LeaseOutOfRange {
        /// As asked.
        asked: u32,
        /// What may be asked.
        max: u32,
    },
    /// Another request used the key.
    #[error("the request key was used for another request")]
    KeyReused,
    /// The claim of a repeated request has ended since.
    #[error("the claim of this request has ended: {0}")]
    Ended(Why),
    /// Nothing warm in time.
    #[error("nothing warm within {waited:?}: {why}")]
    PoolEmpty {
        /// The time in line.
        waited: Duration,
        /// What keeps refill, or what came of a clone on demand.
        why: String,
    },
    /// No room on the node.
    #[error("the node has no room: {0}")]
    Capacity(Full),
    /// The host has run out of descriptors, processes, memory or disk.
    #[error("the host has no room: {0}")]
    Exhausted(String),
    /// Too many claims in line.
    #[error("{} claims wait in line already", crate::pool::WAITERS)]
    Busy,
    /// The pool's template is being built, and only warm stock was wanted.
    #[error("template {0} is being built")]
    TemplateBuilding(Name),
    /// Neither template nor image can be had.
    #[error("template {name}: {why}")]
    Template {
        /// Its name.
        name: Name,
        /// Its reason at the border.
        reason: Reason,
        /// The error and its causes.
        why: String,
    },
    /// The record could not be written.
    #[error("the claim cannot be recorded")]
    Journal(#[source] AppendError),
    /// The guest did not take environment or user.
    #[error("the guest refused the claim's environment or user: {0}")]
    Guest(String),
    /// The guest could not be told of environment and user.
    #[error("the guest cannot be told of the claim: {0}")]
    GuestLost(String),
    /// The caller's own deadline.
    #[error("the call's deadline is over")]
    Deadline,
    /// The daemon stops.
    #[error("the daemon is stopping")]
    Draining,
}

fn of_template(name: &Name, error: &TemplateError) -> ClaimError {
    ClaimError::Template {
        name: name.clone(),
        reason: error.reason(),
        why: error.chain(),
    }
}

/// What claims work with; cheap to clone.
#[derive(Debug, Clone)]
pub struct Claims {
    /// All sandboxes.
    pub sandboxes: Sandboxes,
    /// All pools.
    pub pools: Pools,
    /// All templates.
    pub templates: Templates,
    /// All request keys.
    pub keys: Keys,
    /// Makes tokens.
    pub host_key: Arc<HostKey>,
    /// Where claims without a pool are counted.
    pub metrics: Arc<ClaimSeries>,
}

/// Ends a claimed sandbox that nobody was told of, unless it is defused.
struct Untold<'a> {
    claims: &'a Claims,
    sandbox: Option<Arc<Sandbox>>,
}

impl Drop for Untold<'_> {
    fn drop(&mut self) {
        if let Some(sandbox) = self.sandbox.take() {
            self.claims.sandboxes.end(&sandbox, Why::of(WhyKind::ClaimFailed));
        }
    }
}

/// What a claim is to get: the pool, if there is one, and the bounds of its lease.
struct Terms {
    pool: Option<Arc<Pool>>,
    key: PoolKey,
    lease_secs: u32,
}

impl Claims {
    /// Makes a sandbox the caller's.
    ///
    /// # Errors
    /// See [`ClaimError`]. Nothing is left claimed then.
    pub async fn claim(&self, ask: Ask) -> Result<Granted, ClaimError> {
        let mut times = ClaimTimes::start(self.sandboxes.means().clock.clone());
        let mut terms = self.terms(&ask)?;
        let pool = terms.pool.clone();
        let meter = pool.as_ref().map_or(&*self.metrics, |pool| pool.claim_metrics());
        let mut tier = None;
        let name = pool.as_ref().map_or("", |pool| pool.name().as_str());
        let walk = self.walk(&ask, &mut terms, &mut times, &mut tier);
        let outcome = walk.instrument(span::claim(name)).await;
        let kind = match &outcome {
            Ok(_) => Outcome::Ok,
            Err(
                ClaimError::Journal(_)
                | ClaimError::Guest(_)
                | ClaimError::GuestLost(_)
                | ClaimError::Template { .. },
            ) => Outcome::Failed,
            Err(_) => Outcome::Refused,
        };
        meter.finish(&times, tier, kind);
        outcome
    }

    async fn walk(
        &self,
        ask: &Ask,
        terms: &mut Terms,
        times: &mut ClaimTimes,
        served: &mut Option<Tier>,
    ) -> Result<Granted, ClaimError> {
        let key_guard = match self.look_up(ask) {
            None => None,
            Some(Reserved::New(guard)) => Some(guard),
            Some(held) => match Box::pin(self.held(ask, held)).await? {
                Held::Free(guard) => guard,
                Held::By(sandbox) => return Box::pin(self.again(sandbox, ask)).await,
            },
        };
        times.done(ClaimStep::Key);
        // What was taken and cannot be recorded is lost; so nothing is taken then.
        self.pools.may_take(self.now()).map_err(ClaimError::Journal)?;
        let usable = self.sandboxes.means().may_use(terms.key.lane);
        usable.map_err(ClaimError::Net)?;
        let (sandbox, claim, token, written) = loop {
            let (warm, tier) = match terms.pool.as_ref().and_then(|pool| pool.take()) {
                Some(warm) => (warm, Tier::Warm),
                // The way round by the line and by clones is long; the way through stock stays small.
                None => Box::pin(self.find(ask, terms, times)).await?,
            };
            times.done(ClaimStep::Take);
            *served = Some(tier);
            let (claim, token) = self.draw_up(ask, terms, tier);
            faults::passage("claim.taken");
            match warm.claim(claim.clone()) {
                Ok((sandbox, written)) => break (sandbox, claim, token, written),
                // It died in our hand; the next one.
                Err(ApplyError::Refused) => {}
                Err(ApplyError::Journal(error)) => return Err(ClaimError::Journal(error)),
            }
        };
        let mut untold = Untold {
            claims: self,
            sandbox: Some(Arc::clone(&sandbox)),
        };
        let receipt = self
            .sandboxes
            .means()
            .settle(written)
            .await
            .map_err(ClaimError::Journal)?;
        times.done(ClaimStep::Record);
        faults::passage("claim.recorded");
        if !ask.env.is_empty() || !ask.user.is_empty() {
            Box::pin(self.tell_guest(&sandbox, ask)).await?;
            times.done(ClaimStep::Setup);
        }
        faults::passage("claim.told_guest");
        untold.sandbox = None;
        if let Some(guard) = key_guard {
            guard.fulfil(sandbox.id);
        }
        times.done(ClaimStep::Hand);
        tracing::info!(sandbox = %sandbox.id, tier = tier_text(*served), owner = &*claim.owner, "claimed");
        faults::passage("claim.before_reply");
        Ok(Granted {
            sandbox,
            claim,
            token,
            _receipt: Some(receipt),
        })
    }

    fn now(&self) -> Tick {
        self.sandboxes.means().clock.tick()
    }

    fn terms(&self, ask: &Ask) -> Result<Terms, ClaimError> {
        let pool = match &ask.from {
            Wanted::Pool(name) => Some(
                self.pools
                    .get(name)
                    .filter(|_| ask.allowed.contains(name))
                    .ok_or_else(|| ClaimError::PoolNotFound(name.clone()))?,
            ),
            Wanted::Key(key) => {
                // Whether it can serve now is looked at when something is to be taken.
                if let Err(error @ NetError::Off) = self.sandboxes.means().may_use(key.lane) {
                    return Err(ClaimError::Net(error));
                }
                if self.templates.size(&key.size).is_none() {
                    return Err(ClaimError::SizeNotFound(key.size.clone()));
                }
                if !self.templates.knows(&key.template) {
                    return Err(ClaimError::TemplateNotFound(key.template.clone()));
                }
                let pool = self.pools.with_key_if(key, |name| ask.allowed.contains(name));
                match (pool, &ask.allowed) {
                    (None, TenantPools::Named(_)) => return Err(ClaimError::NotAllowed(key.clone())),
                    (pool, TenantPools::Named(_) | TenantPools::All) => pool,
                }
            }
        };
        let bounds = pool.as_ref().map_or(LeaseBounds::DEFAULT, |pool| pool.lease());
        let lease_secs = ask.lease_secs.unwrap_or(bounds.secs);
        check_lease(lease_secs, bounds.max_secs)?;
        let key = match (&ask.from, &pool) {
            (Wanted::Key(key), _) => key.clone(),
            (Wanted::Pool(_), Some(pool)) => pool.key(),
            (Wanted::Pool(name), None) => return Err(ClaimError::PoolNotFound(name.clone())),
        };
        // Before anything leaves the pool.
        if ask.layer.as_ref().is_some_and(|layer| layer.looks_inside()) {
            self.templates
                .may_look_inside(&key)
                .map_err(|error| of_template(&key.template, &error))?;
        }
        Ok(Terms {
            pool,
            key,
            lease_secs,
        })
    }

    /// Looks the request's key up, if it has one.
    fn look_up(&self, ask: &Ask) -> Option<Reserved> {
        let (key, digest) = ask.request.as_ref()?;
        let known = |id| self.sandboxes.get(id).is_some();
        Some(self.keys.reserve(&ask.owner, key, digest, known))
    }

    /// The key is held: by a claim, or by a request under way, which is waited for.
    async fn held(&self, ask: &Ask, mut held: Reserved) -> Result<Held, ClaimError> {
        loop {
            match held {
                Reserved::New(guard) => return Ok(Held::Free(Some(guard))),
                Reserved::Other => return Err(ClaimError::KeyReused),
                Reserved::Same(id) => {
                    if let Some(sandbox) = self.sandboxes.get(id) {
                        return Ok(Held::By(sandbox));
                    }
                }
                Reserved::Wait(mut through) => {
                    // Closing is the signal; nothing is ever sent.
                    let closed = async { drop(through.changed().await) };
                    self.within_deadline(ask, closed).await?;
                }
            }
            held = match self.look_up(ask) {
                Some(held) => held,
                None => return Ok(Held::Free(None)),
            };
        }
    }

    /// A repeated request: the same claim and token.
    async fn again(&self, sandbox: Arc<Sandbox>, ask: &Ask) -> Result<Granted, ClaimError> {
        let granted = self.same(sandbox)?;
        // Environment and user are in no record: a daemon that died between record and answer may not have told the
        // guest. To one that was told the same again is nothing.
        if !ask.env.is_empty() || !ask.user.is_empty() {
            self.tell_guest(&granted.sandbox, ask).await?;
        }
        Ok(granted)
    }

    fn same(&self, sandbox: Arc<Sandbox>) -> Result<Granted, ClaimError> {
        match sandbox.life() {
            Life::Claimed(claim) => {
                let token = ClaimToken::new(&self.host_key, claim.id);
                Ok(Granted {
                    sandbox,
                    claim,
                    token,
                    _receipt: None,
                })
            }
            Life::Ending { why, .. }
            | Life::Failed { why, .. }
            | Life::Gone { why, .. }
            | Life::Quarantined { why } => Err(ClaimError::Ended(why)),
            // A key is fulfilled only once its sandbox is claimed, and from there no edge leads back.
            Life::Making | Life::Warm => Err(ClaimError::Ended(Why::of(WhyKind::RecordDamaged))),
        }
    }

    fn draw_up(&self, ask: &Ask, terms: &Terms, tier: Tier) -> (Claim, ClaimToken) {
        let clock = &self.sandboxes.means().clock;
        let (id, lasts) = (
            ClaimId::from_random(random::bytes()),
            Duration::from_secs(terms.lease_secs.into()),
        );
        let now = clock.wall();
        let token = ClaimToken::new(&self.host_key, id);
        let claim = Claim {
            id,
            owner: Arc::clone(&ask.owner),
            token_hash: token.hash(),
            labels: Arc::new(ask.labels.clone()),
            pool: terms.pool.as_ref().map(|pool| pool.name().clone()),
            tier,
            claimed_at: now,
            lease: Lease {
                secs: terms.lease_secs,
                until: clock.tick().plus(lasts),
                expires_at: now.plus(lasts),
            },
            layer: ask.layer.clone(),
            request: ask.request.clone().map(Arc::new),
        };
        (claim, token)
    }

    /// The pool is empty: in line for the wait asked for, then by a clone or a cold boot of its own. A pool that gives way
    /// to another of its name meanwhile takes its line along.
    async fn find(
        &self,
        ask: &Ask,
        terms: &mut Terms,
        times: &mut ClaimTimes,
    ) -> Result<(Warm, Tier), ClaimError> {
        let mut why = String::from("there is no pool with this key");
        let over = self.now().plus(ask.wait);
        while let Some(pool) = terms.pool.clone() {
            let wait = over.since(self.now());
            let waited = self.within_deadline(ask, pool.wait(wait)).await?;
            match waited {
                Ok(warm) => {
                    times.done(ClaimStep::Wait);
                    return Ok((warm, Tier::Warm));
                }
                Err(WaitEnd::Full) => return Err(ClaimError::Busy),
                Err(WaitEnd::Closed) if self.pools.is_stopping() => return Err(ClaimError::Draining),
                Err(WaitEnd::Closed) => *terms = self.terms_after(ask, &pool)?,
                Err(WaitEnd::Over(parked)) => {
                    why = parked;
                    break;
                }
            }
        }
        times.done(ClaimStep::Wait);
        if ask.warm_only {
            let waited = match &terms.pool {
                Some(_) if self.templates.is_building(&terms.key) => {
                    return Err(ClaimError::TemplateBuilding(terms.key.template.clone()));
                }
                Some(_) => ask.wait,
                None => Duration::ZERO,
            };
            return Err(ClaimError::PoolEmpty { waited, why });
        }
        let made = self.on_demand(ask, terms).await?;
        times.done(ClaimStep::Make);
        Ok(made)
    }

    /// The terms anew, now that this pool is closed and another may be in its place.
    fn terms_after(&self, ask: &Ask, closed: &Arc<Pool>) -> Result<Terms, ClaimError> {
        let terms = self.terms(ask)?;
        match &terms.pool {
            Some(pool) if Arc::ptr_eq(pool, closed) => Err(ClaimError::PoolNotFound(closed.name().clone())),
            Some(_) | None => Ok(terms),
        }
    }

    async fn on_demand(&self, ask: &Ask, terms: &Terms) -> Result<(Warm, Tier), ClaimError> {
        let template = &terms.key.template;
        let failed = |error: TemplateError| of_template(template, &error);
        let size = self
            .templates
            .size(&terms.key.size)
            .ok_or_else(|| ClaimError::SizeNotFound(terms.key.size.clone()))?;
        let capture = self.templates.current(&terms.key);
        let digest = capture.as_ref().map(Capture::digest);
        let book = self.sandboxes.means().egress.book();
        let looks_inside = |pool: &Arc<Pool>| book.pool_looks_inside(pool.name());
        if terms.pool.as_ref().is_some_and(looks_inside) && self.templates.trust().is_some() {
            self.templates.may_look_inside(&terms.key).map_err(failed)?;
        }
        let (source, tier) = match capture {
            Some(capture) => (Source::Clone(capture), Tier::Clone),
            None => {
                let opening = self.within_deadline(ask, self.templates.image(template));
                (Source::Boot(opening.await?.map_err(failed)?), Tier::Cold)
            }
        };
        let pool = terms.pool.as_ref().map(|pool| pool.name().clone());
        let spec = MakeSpec {
            key: terms.key.clone(),
            pool,
            size,
            tier,
            source,
        };
        // As many are made at once as the node has turns, for claims and for stock.
        let making = async {
            let _turn = self.pools.turn().await;
            self.sandboxes.make(spec).await
        };
        let made = self.within_deadline(ask, making).await?;
        made.map(|warm| (warm, tier)).map_err(|error| match error {
            MakeError::Capacity(full) => ClaimError::Capacity(full),
            MakeError::Net(error) => ClaimError::Net(error),
            MakeError::Journal(error) => ClaimError::Journal(error),
            MakeError::Capture(why) => {
                if let Some(digest) = digest {
                    self.pools.spoil(&terms.key, digest, why.clone());
                }
                ClaimError::PoolEmpty {
                    waited: ask.wait,
                    why,
                }
            }
            MakeError::Exhausted(why) => ClaimError::Exhausted(why.to_string()),
            MakeError::Failed(why) if why.kind == WhyKind::Stopped => ClaimError::Draining,
            MakeError::Failed(why) => ClaimError::PoolEmpty {
                waited: ask.wait,
                why: why.to_string(),
            },
        })
    }

    async fn tell_guest(&self, sandbox: &Arc<Sandbox>, ask: &Ask) -> Result<(), ClaimError> {
        let link = sandbox
            .link()
            .ok_or_else(|| ClaimError::GuestLost("its agent is not connected".into()))?;
        let telling = agent::set_claim(&link, ask.env.clone(), ask.user.clone());
        let told = self.within_deadline(ask, timeout(SET_CLAIM, telling)).await?;
        match told {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error @ AgentError::Refused { .. })) => Err(ClaimError::Guest(error.to_string())),
            Ok(Err(
                error @ (AgentError::Link { .. } | AgentError::Malformed { .. } | AgentError::Late { .. }),
            )) => Err(ClaimError::GuestLost(error.to_string())),
            Err(_elapsed) => Err(ClaimError::GuestLost(format!("no answer within {SET_CLAIM:?}"))),
        }
    }

    /// Runs a wait within the caller's deadline.
    async fn within_deadline<T>(&self, ask: &Ask, wait: impl Future<Output = T>) -> Result<T, ClaimError> {
        match ask.deadline {
            None => Ok(wait.await),
            Some(deadline) => timeout(deadline.since(self.now()), wait)
                .await
                .map_err(|_elapsed| ClaimError::Deadline),
        }
    }
}

fn tier_text(tier: Option<Tier>) -> &'static str {
    tier.map_or("", Tier::as_str)
}

/// What a held key turned out to be.
enum Held {
    Free(Option<KeyGuard>),
    By(Arc<Sandbox>),
}

/// The guest has this long to take environment and user; it answers in under a millisecond when it is well.
const SET_CLAIM: Duration = Duration::from_secs(5);

/// Checks a lease.
///
/// # Errors
/// [`ClaimError::LeaseOutOfRange`].
pub fn check_lease(asked: u32, max: u32) -> Result<(), ClaimError> {
    let max = max.min(limits::LEASE_MAX_SECS);
    if (1..=max).contains(&asked) {
        Ok(())
    } else {
        Err(ClaimError::LeaseOutOfRange { asked, max })
    }
}
