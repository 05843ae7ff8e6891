//! Service `Claims`.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures_util::stream;
use sandbox_protocol::{id::SandboxId, limits, reason::Reason, v1};
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    desk::{Desk, answer, is_operator, owner},
    filter::{Filter, Wish},
    parse,
    stream::Boxed,
};
use crate::{
    claim::{Ask, ClaimError, Granted, check_lease},
    feed::{News, Reader},
    journal::AppendError,
    pool::LeaseBounds,
    sandbox::{Applied, ApplyError, Lease, Life, Sandbox, Why, WhyKind},
    work,
};

/// Service `Claims`.
#[derive(Debug, Clone)]
pub(super) struct ClaimsService(pub(super) Desk);

#[tonic::async_trait]
impl v1::claims_server::Claims for ClaimsService {
    async fn claim(
        &self,
        request: Request<v1::ClaimsClaimRequest>,
    ) -> Result<Response<v1::ClaimsClaimReply>, Status> {
        let ctx = self.0.ctx(&request);
        let trace = request.get_ref().trace;
        match admit(&self.0, &ctx, request) {
            Ok(ask) => answer(&ctx, claim(&self.0, ask, trace).await),
            Err(refusal) => answer(&ctx, Err(refusal)),
        }
    }

    async fn release(
        &self,
        request: Request<v1::ClaimsReleaseRequest>,
    ) -> Result<Response<v1::ClaimsReleaseReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, release(&self.0, &ctx, request.get_ref()).await)
    }

    async fn renew(
        &self,
        request: Request<v1::ClaimsRenewRequest>,
    ) -> Result<Response<v1::ClaimsRenewReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, renew(&self.0, &ctx, request.get_ref()).await)
    }

    async fn get(&self, request: Request<v1::ClaimsGetRequest>) -> Result<Response<v1::Sandbox>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, get(&self.0, &ctx, request.get_ref()))
    }

    async fn list(
        &self,
        request: Request<v1::ClaimsListRequest>,
    ) -> Result<Response<v1::ClaimsListReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, list(&self.0, &ctx, request.into_inner()))
    }

    async fn watch(
        &self,
        request: Request<v1::ClaimsWatchRequest>,
    ) -> Result<Response<Boxed<v1::ClaimsWatchReply>>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, watch(&self.0, &ctx, request.into_inner()))
    }
}

/// Everything about a claim that needs no waiting.
fn admit(desk: &Desk, ctx: &Ctx, request: Request<v1::ClaimsClaimRequest>) -> Result<Ask, Refusal> {
    desk.serving()?;
    let principal = ctx.principal()?;
    let owner =
        owner(&principal).ok_or_else(|| Refusal::new(Reason::NotAllowed, "a claimer cannot claim"))?;
    let deadline = desk.deadline(&request);
    parse::ask(request.into_inner(), owner, desk.allowed(&principal), deadline)
}

async fn claim(desk: &Desk, ask: Ask, trace: bool) -> Result<v1::ClaimsClaimReply, Refusal> {
    let (granted, counts) = if trace {
        let (granted, counts) = work::traced(Box::pin(desk.claims.claim(ask))).await;
        (granted, Some(counts.to_proto()))
    } else {
        (desk.claims.claim(ask).await, None)
    };
    Ok(reply(desk, granted.map_err(refusal)?, counts))
}

async fn release(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::ClaimsReleaseRequest,
) -> Result<v1::ClaimsReleaseReply, Refusal> {
    desk.started()?;
    let (sandbox, _) = desk.opened(&ctx.caller, &request.sandbox)?;
    let applied = desk.claims.sandboxes.end(&sandbox, Why::of(WhyKind::Released));
    let already = applied.is_none();
    let recorded = match applied {
        None => true,
        Some(Applied { unrecorded: true, .. }) => false,
        Some(Applied { written: None, .. }) => true,
        // It has ended whatever becomes of its record.
        Some(Applied {
            written: Some(written),
            ..
        }) => desk.claims.sandboxes.means().settle(written).await.is_ok(),
    };
    Ok(v1::ClaimsReleaseReply { already, recorded })
}

fn get(desk: &Desk, ctx: &Ctx, request: &v1::ClaimsGetRequest) -> Result<v1::Sandbox, Refusal> {
    desk.started()?;
    let (sandbox, principal) = desk.opened(&ctx.caller, &request.sandbox)?;
    Ok(sandbox.view(&desk.claims.sandboxes, is_operator(&principal)))
}

fn reply(desk: &Desk, granted: Granted, work: Option<v1::Work>) -> v1::ClaimsClaimReply {
    let Granted {
        sandbox,
        claim,
        token,
        ..
    } = granted;
    v1::ClaimsClaimReply {
        sandbox: sandbox.id.to_string(),
        claim: claim.id.to_string(),
        token: token.as_str().to_owned(),
        tier: claim.tier.to_proto().into(),
        pool: claim.pool.map_or(String::new(), String::from),
        expires_at: Some(claim.lease.expires_at.to_proto()),
        engine: desk.engine.kind().to_proto().into(),
        accel: desk.engine.accel().to_proto().into(),
        work,
    }
}

/// What became of a sandbox that no longer is.
pub(super) fn ended(why: &Why) -> Refusal {
    let reason = match why.kind {
        WhyKind::LeaseExpired => Reason::LeaseExpired,
        WhyKind::VmExited
        | WhyKind::AgentLost
        | WhyKind::HostRestarted
        | WhyKind::LostOnRestart
        | WhyKind::RecordDamaged
        | WhyKind::OwnerPanicked => Reason::SandboxFailed,
        WhyKind::Released
        | WhyKind::Abandoned
        | WhyKind::Surplus
        | WhyKind::PoolGone
        | WhyKind::TemplateChanged
        | WhyKind::MakeFailed
        | WhyKind::ClaimFailed
        | WhyKind::Stopped => Reason::SandboxEnded,
    };
    Refusal::new(reason, format!("the sandbox has ended: {why}")).why(why.to_string())
}

/// A journal that takes no changes.
pub(super) fn journal(error: &AppendError) -> Refusal {
    Refusal::new(error.reason(), crate::telemetry::chain(error))
}

fn refusal(error: ClaimError) -> Refusal {
    let text = error.to_string();
    let plain = |reason| Refusal::new(reason, text.clone());
    match error {
        ClaimError::PoolNotFound(_) => plain(Reason::PoolNotFound),
        ClaimError::TemplateNotFound(_) => plain(Reason::TemplateNotFound),
        ClaimError::SizeNotFound(_) => plain(Reason::SizeNotFound),
        ClaimError::Net(error) => plain(error.reason()),
        ClaimError::LeaseOutOfRange { .. } => plain(Reason::LeaseOutOfRange),
        ClaimError::KeyReused => plain(Reason::KeyReused),
        ClaimError::Ended(why) => ended(&why),
        ClaimError::PoolEmpty { .. } => plain(Reason::PoolEmpty),
        ClaimError::Capacity(_) | ClaimError::Exhausted(_) => plain(Reason::Capacity),
        ClaimError::Busy => plain(Reason::Busy),
        ClaimError::TemplateBuilding(_) => plain(Reason::TemplateBuilding),
        ClaimError::Template { reason, .. } => plain(reason),
        ClaimError::Journal(error) => journal(&error),
        ClaimError::NotAllowed(_) => plain(Reason::NotAllowed),
        ClaimError::Guest(_) => Refusal::field("env", text),
        ClaimError::GuestLost(_) => plain(Reason::AgentLost),
        ClaimError::Deadline => plain(Reason::Deadline),
        ClaimError::Draining => plain(Reason::Draining),
    }
}

async fn renew(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::ClaimsRenewRequest,
) -> Result<v1::ClaimsRenewReply, Refusal> {
    desk.started()?;
    let (sandbox, _) = desk.opened(&ctx.caller, &request.sandbox)?;
    let secs = request.lease_secs;
    let pool = sandbox.with_life(|life| life.claim().and_then(|claim| claim.pool.clone()));
    let bounds = pool
        .and_then(|name| desk.claims.pools.get(&name))
        .map_or(LeaseBounds::DEFAULT, |pool| pool.lease());
    check_lease(secs, bounds.max_secs).map_err(refusal)?;
    let lasts = Duration::from_secs(secs.into());
    let (until, expires_at) = (desk.clock().tick().plus(lasts), desk.clock().wall().plus(lasts));
    let applied = desk.claims.sandboxes.renew(
        &sandbox,
        Lease {
            secs,
            until,
            expires_at,
        },
    );
    let applied = applied.map_err(|error| match error {
        ApplyError::Journal(error) => journal(&error),
        ApplyError::Refused => match sandbox.life() {
            Life::Ending { why, .. }
            | Life::Failed { why, .. }
            | Life::Gone { why, .. }
            | Life::Quarantined { why } => ended(&why),
            // Nobody's: there is no lease to renew.
            Life::Making | Life::Warm | Life::Claimed(_) => Refusal::not_found(),
        },
    })?;
    if let Some(written) = applied.written {
        drop(
            desk.claims
                .sandboxes
                .means()
                .settle(written)
                .await
                .map_err(|error| journal(&error))?,
        );
    }
    Ok(v1::ClaimsRenewReply {
        expires_at: Some(expires_at.to_proto()),
    })
}

fn list(desk: &Desk, ctx: &Ctx, wanted: v1::ClaimsListRequest) -> Result<v1::ClaimsListReply, Refusal> {
    desk.started()?;
    let size = match wanted.page_size {
        0 => limits::PAGE_DEFAULT,
        n @ 1..=limits::PAGE_MAX => n,
        _ => {
            return Err(Refusal::field(
                "page_size",
                format!("at most {}", limits::PAGE_MAX),
            ));
        }
    };
    let after = match wanted.page_token.as_str() {
        "" => None,
        token => Some(token.parse::<SandboxId>().map_err(|_not_one_of_ours| {
            Refusal::new(Reason::PageTokenInvalid, "not a page token of this daemon")
        })?),
    };
    let v1::ClaimsListRequest {
        states,
        pools,
        labels,
        owner,
        ..
    } = wanted;
    let filter = Filter::new(
        desk,
        ctx,
        Wish {
            states,
            pools,
            labels,
            owner,
        },
    )?;
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let mut rest = filter.candidates(desk, after).into_iter();
    let mut sandboxes = vec![];
    for sandbox in rest.by_ref().filter(|sandbox| filter.shows(sandbox)) {
        let view = filter.view(desk, &sandbox);
        if filter.has_state(&view) {
            sandboxes.push(view);
            if sandboxes.len() == size {
                break;
            }
        }
    }
    let more = rest.any(|sandbox| filter.shows(&sandbox));
    let next = sandboxes.last().filter(|_| more).map(|last| last.sandbox.clone());
    Ok(v1::ClaimsListReply {
        next_page_token: next.unwrap_or_default(),
        sandboxes,
    })
}

/// A watch: everything that fits, Synced, then each change of what fits or was told before.
struct Watcher {
    desk: Desk,
    filter: Filter,
    reader: Reader<SandboxId>,
    queue: VecDeque<Next>,
    /// Those that the reader was shown and that are not gone; a reader hears of their end though it fits no filter.
    told: HashMap<SandboxId, Mark>,
}

enum Next {
    Sandbox(Arc<Sandbox>),
    Synced,
    Lost(u64),
}

fn watch(
    desk: &Desk,
    ctx: &Ctx,
    request: v1::ClaimsWatchRequest,
) -> Result<Boxed<v1::ClaimsWatchReply>, Refusal> {
    desk.started()?;
    let v1::ClaimsWatchRequest {
        states,
        pools,
        labels,
        owner,
    } = request;
    let filter = Filter::new(
        desk,
        ctx,
        Wish {
            states,
            pools,
            labels,
            owner,
        },
    )?;
    let mut watcher = Watcher::new(desk, filter);
    watcher.begin();
    let events = stream::unfold(watcher, |mut watcher| async move {
        watcher.next().await.map(|event| (event, watcher))
    });
    Ok(desk.until_stop(ctx.id, events))
}

impl Watcher {
    fn new(desk: &Desk, filter: Filter) -> Self {
        Self {
            desk: desk.clone(),
            filter,
            reader: desk.claims.sandboxes.read_feed(),
            queue: VecDeque::new(),
            told: HashMap::new(),
        }
    }

    fn begin(&mut self) {
        let all = self.filter.candidates(&self.desk, None).into_iter();
        let shown = all.filter(|sandbox| self.filter.shows(sandbox));
        self.queue.extend(shown.map(Next::Sandbox));
        self.queue.push_back(Next::Synced);
    }

    async fn next(&mut self) -> Option<v1::ClaimsWatchReply> {
        use v1::claims_watch_reply::Event;
        loop {
            let event = match self.queue.pop_front() {
                Some(Next::Sandbox(sandbox)) => self.tell(&sandbox).map(Event::Sandbox),
                Some(Next::Synced) => Some(Event::Synced(v1::Synced {})),
                Some(Next::Lost(count)) => Some(Event::Lost(v1::Lost { count })),
                None => match self.reader.next().await {
                    News::Event(id) => self.changed(id).map(Event::Sandbox),
                    News::Lost(count) => {
                        // What the reader knew is void: it is told everything anew.
                        self.told.clear();
                        self.queue.push_back(Next::Lost(count));
                        self.begin();
                        None
                    }
                    News::Closed => return None,
                },
            };
            if event.is_some() {
                return Some(v1::ClaimsWatchReply { event });
            }
        }
    }

    fn changed(&mut self, id: SandboxId) -> Option<v1::Sandbox> {
        if !self.filter.concerns(id) {
            return None;
        }
        let Some(sandbox) = self.desk.claims.sandboxes.get(id) else {
            self.told.remove(&id);
            return None;
        };
        self.tell(&sandbox)
    }

    fn tell(&mut self, sandbox: &Sandbox) -> Option<v1::Sandbox> {
        let shows = self.filter.shows(sandbox);
        let gone = sandbox.with_life(|life| matches!(life, Life::Gone { .. }));
        let before = self.told.remove(&sandbox.id);
        // What fitted before is told too: the reader hears how it ended.
        let owed = before.is_some() && self.filter.may_see(sandbox);
        if !shows && !owed {
            return None;
        }
        let view = self.filter.view(&self.desk, sandbox);
        let mark = Mark::of(&view);
        let is_news = before.as_ref() != Some(&mark);
        if shows && !gone {
            self.told.insert(sandbox.id, mark);
        }
        is_news.then_some(view)
    }
}

/// By what a row that changed is told from one that did not: events may outnumber changes.
#[derive(Debug, PartialEq)]
struct Mark {
    state: i32,
    why: String,
    expires_at: Option<prost_types::Timestamp>,
    conditions: Vec<v1::Condition>,
}

impl Mark {
    fn of(view: &v1::Sandbox) -> Self {
        Self {
            state: view.state,
            why: view.why.clone(),
            expires_at: view.expires_at,
            conditions: view.conditions.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::services_tests as services, *};
    use crate::{
        access::{Caller, Operator, Principal},
        claim::tests::rooms::{Rooms, boot},
        link::fake::within,
    };

    #[tokio::test]
    async fn a_watch_forgets_what_is_gone() {
        let rooms = Rooms::new();
        let desk = services::desk(&rooms, &[]);
        let ctx = Ctx {
            id: sandbox_protocol::id::RequestId::from_random([0; 16]),
            caller: Caller::Known(Principal::Operator(Operator::Uid(0))),
            trace: false,
        };
        let states = [v1::State::Warm, v1::State::Gone];
        let wish = Wish {
            states: states.map(i32::from).to_vec(),
            pools: vec![],
            labels: HashMap::new(),
            owner: None,
        };
        let filter = Filter::new(&desk, &ctx, wish).unwrap();
        let mut watcher = Watcher::new(&desk, filter);
        watcher.begin();
        let warm = within(rooms.sandboxes().make(boot())).await.unwrap();
        // Synced, and then one event per state that fits and per change of what was told.
        let mut seen = vec![];
        let mut warm = Some(warm);
        while seen.last() != Some(&v1::State::Gone) {
            let reply = within(watcher.next()).await.unwrap();
            if let Some(v1::claims_watch_reply::Event::Sandbox(sandbox)) = reply.event {
                seen.push(sandbox.state());
                if let Some(warm) = warm.take() {
                    assert_eq!(watcher.told.len(), 1);
                    warm.end(Why::of(WhyKind::Surplus));
                }
            }
        }
        assert_eq!(seen.first(), Some(&v1::State::Warm));
        assert!(watcher.told.is_empty());
    }
}
