//! Service `Pools`.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures_util::stream;
use sandbox_protocol::{id::RequestId, reason::Reason, v1};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    desk::{Desk, answer, is_operator},
    parse,
    stream::Boxed,
};
use crate::{
    access::Principal,
    journal::Written,
    pool::{Pool, PoolError, Spec},
    words::Name,
};

/// A watcher is told of each pool at most this often.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);

/// Moments of a next try that are less apart are the same one, nanoseconds: well below the shortest wait before a try.
const RETRY_APART: u128 = 100_000_000;

/// Service `Pools`.
#[derive(Debug, Clone)]
pub(super) struct PoolsService(pub(super) Desk);

#[tonic::async_trait]
impl v1::pools_server::Pools for PoolsService {
    async fn list(
        &self,
        request: Request<v1::PoolsListRequest>,
    ) -> Result<Response<v1::PoolsListReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(
            &ctx,
            Look::new(&self.0, &ctx, &[]).map(|look| v1::PoolsListReply {
                pools: look.views(&self.0),
            }),
        )
    }

    async fn apply(&self, request: Request<v1::PoolsApplyRequest>) -> Result<Response<v1::Pool>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, apply(&self.0, &ctx, request.into_inner()).await)
    }

    async fn delete(
        &self,
        request: Request<v1::PoolsDeleteRequest>,
    ) -> Result<Response<v1::PoolsDeleteReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, delete(&self.0, &ctx, request.get_ref()).await)
    }

    async fn watch(
        &self,
        request: Request<v1::PoolsWatchRequest>,
    ) -> Result<Response<Boxed<v1::PoolsWatchReply>>, Status> {
        let desk = &self.0;
        let ctx = desk.ctx(&request);
        let look = Look::new(desk, &ctx, &request.get_ref().pools);
        answer(&ctx, look.map(|look| watch(desk, ctx.id, look)))
    }
}

/// What a reader sees of the pools.
#[derive(Debug)]
struct Look {
    principal: Principal,
    /// Empty: all.
    names: BTreeSet<Name>,
}

impl Look {
    /// Operators and tenants may look at pools.
    fn new(desk: &Desk, ctx: &Ctx, names: &[String]) -> Result<Self, Refusal> {
        desk.started()?;
        Ok(Self {
            principal: ctx.principal()?,
            names: parse::pools(names)?,
        })
    }

    /// The pools of these names, or all: of a tenant, those that it may claim from as of now.
    fn views(&self, desk: &Desk) -> Vec<v1::Pool> {
        let allowed = desk.allowed(&self.principal);
        let shown =
            |name: &Name| (self.names.is_empty() || self.names.contains(name)) && allowed.contains(name);
        let pools = desk.claims.pools.list();
        pools
            .iter()
            .filter(|pool| shown(pool.name()))
            .map(|pool| self.trim(pool.view()))
            .collect()
    }

    /// Takes out what concerns the host: a failure's text names its files and programs.
    fn trim(&self, mut pool: v1::Pool) -> v1::Pool {
        if let Some(parked) = pool.parked.as_mut().filter(|_| !is_operator(&self.principal)) {
            parked.message.clear();
        }
        pool
    }
}

async fn apply(desk: &Desk, ctx: &Ctx, request: v1::PoolsApplyRequest) -> Result<v1::Pool, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let (pool, written) = put(desk, parse::pool(request.spec)?)?;
    settle(desk, written).await?;
    Ok(pool.view())
}

/// Looks whether template and size are there and puts the pool in place, with no deletion between.
fn put(desk: &Desk, spec: Spec) -> Result<(Arc<Pool>, Written), Refusal> {
    desk.has(spec.key.lane)?;
    let _one = desk.changing.begin();
    let templates = &desk.claims.templates;
    if templates.size(&spec.key.size).is_none() {
        return Err(Refusal::new(
            Reason::SizeNotFound,
            format!("there is no size {}", spec.key.size),
        ));
    }
    if !templates.knows(&spec.key.template) {
        let text = format!("there is no template {}", spec.key.template);
        return Err(Refusal::new(Reason::TemplateNotFound, text));
    }
    desk.claims.pools.apply(spec).map_err(|error| refusal(&error))
}

async fn delete(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::PoolsDeleteRequest,
) -> Result<v1::PoolsDeleteReply, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let name = parse::name("name", &request.name)?;
    settle(desk, take_out(desk, &name)?).await?;
    Ok(v1::PoolsDeleteReply {})
}

fn take_out(desk: &Desk, name: &Name) -> Result<Written, Refusal> {
    let _one = desk.changing.begin();
    desk.claims.pools.delete(name).map_err(|error| refusal(&error))
}

/// Waits as long as the configuration wants a record to wait. The change is in force already.
async fn settle(desk: &Desk, written: Written) -> Result<(), Refusal> {
    let settled = desk.claims.sandboxes.means().settle(written).await;
    settled.map(drop).map_err(|error| super::claims::journal(&error))
}

fn refusal(error: &PoolError) -> Refusal {
    match error {
        PoolError::NotFound(_) => Refusal::new(Reason::PoolNotFound, error.to_string()),
        PoolError::FromFile(_) => Refusal::new(Reason::PoolFromFile, error.to_string()),
        PoolError::Journal(error) => super::claims::journal(error),
    }
}

struct Watcher {
    desk: Desk,
    look: Look,
    changes: watch::Receiver<u64>,
    /// What was told last.
    told: BTreeMap<String, v1::Pool>,
    queue: VecDeque<v1::pools_watch_reply::Event>,
}

fn watch(desk: &Desk, id: RequestId, look: Look) -> Boxed<v1::PoolsWatchReply> {
    let changes = desk.claims.pools.changes();
    let mut watcher = Watcher {
        desk: desk.clone(),
        look,
        changes,
        told: BTreeMap::new(),
        queue: VecDeque::new(),
    };
    watcher.look();
    watcher
        .queue
        .push_back(v1::pools_watch_reply::Event::Synced(v1::Synced {}));
    let events = stream::unfold(watcher, |mut watcher| async move {
        let event = watcher.next().await?;
        Some((v1::PoolsWatchReply { event: Some(event) }, watcher))
    });
    desk.until_stop(id, events)
}

impl Watcher {
    async fn next(&mut self) -> Option<v1::pools_watch_reply::Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            // The pause bounds what a watcher costs; what changes meanwhile is seen after it.
            tokio::time::sleep(AT_MOST_EVERY).await;
            self.changes.changed().await.ok()?;
            self.changes.mark_unchanged();
            self.look();
        }
    }

    fn look(&mut self) {
        use v1::pools_watch_reply::Event;
        let now: BTreeMap<String, v1::Pool> = self
            .look
            .views(&self.desk)
            .into_iter()
            .map(|pool| {
                (
                    pool.spec
                        .as_ref()
                        .map(|spec| spec.name.clone())
                        .unwrap_or_default(),
                    pool,
                )
            })
            .collect();
        let gone = self.told.keys().filter(|name| !now.contains_key(*name));
        self.queue.extend(gone.map(|name| Event::Deleted(name.clone())));
        let changed = now
            .iter()
            .filter(|(name, pool)| !self.told.get(*name).is_some_and(|told| same(told, pool)));
        self.queue
            .extend(changed.map(|(_, pool)| Event::Pool(pool.clone())));
        self.told = now;
    }
}

/// Whether nothing has happened between two views: some numbers follow from the time of the look alone.
fn same(a: &v1::Pool, b: &v1::Pool) -> bool {
    let timeless = |pool: &v1::Pool| {
        let mut pool = pool.clone();
        pool.arrivals_per_min = 0.0;
        if let Some(parked) = &mut pool.parked {
            parked.since = None;
            parked.retry_at = None;
        }
        pool
    };
    // Shown by its distance from now, the same moment comes out some microseconds apart.
    let retry = |pool: &v1::Pool| {
        let at = pool.parked.as_ref().and_then(|parked| parked.retry_at.as_ref());
        at.map(|at| i128::from(at.seconds) * 1_000_000_000 + i128::from(at.nanos))
    };
    let near = match (retry(a), retry(b)) {
        (Some(a), Some(b)) => a.abs_diff(b) < RETRY_APART,
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    };
    near && timeless(a) == timeless(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_alone_is_no_news() {
        let at = |seconds, nanos| Some(prost_types::Timestamp { seconds, nanos });
        let pool = |arrivals, since, retry_at| v1::Pool {
            arrivals_per_min: arrivals,
            parked: Some(v1::Parked {
                reason: "CAPACITY".into(),
                since,
                retry_at,
                message: String::new(),
            }),
            ..v1::Pool::default()
        };
        let one = pool(1.0, at(5, 0), at(9, 999_999_999));
        assert!(same(&one, &pool(0.5, at(5, 3), at(10, 2_000))));
        assert!(!same(&one, &pool(1.0, at(5, 0), at(10, 200_000_000))));
        assert!(!same(&one, &pool(1.0, at(5, 0), None)));
        assert!(!same(
            &one,
            &v1::Pool {
                warm: 1,
                ..one.clone()
            }
        ));
        assert!(!same(
            &one,
            &v1::Pool {
                parked: None,
                ..one.clone()
            }
        ));
    }
}
