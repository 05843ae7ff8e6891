//! Service `Pools`.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use sandbox_protocol::{reason::Reason, v1};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    desk::{Desk, answer},
    parse,
    stream::Boxed,
};
use crate::pool::{Pool, PoolError};

/// A watcher is told of each pool at most this often.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);

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
            known(&self.0, &ctx).map(|()| v1::PoolsListReply {
                pools: views(&self.0, &[]),
            }),
        )
    }

    async fn apply(&self, request: Request<v1::PoolsApplyRequest>) -> Result<Response<v1::Pool>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, apply(&self.0, &ctx, request.into_inner()))
    }

    async fn delete(
        &self,
        request: Request<v1::PoolsDeleteRequest>,
    ) -> Result<Response<v1::PoolsDeleteReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, delete(&self.0, &ctx, request.get_ref()))
    }

    type WatchStream = Boxed<v1::PoolsWatchReply>;

    async fn watch(
        &self,
        request: Request<v1::PoolsWatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let desk = &self.0;
        let ctx = desk.ctx(&request);
        let names = request.into_inner().pools;
        answer(&ctx, known(desk, &ctx).map(|()| watch(desk, names)))
    }
}

/// Operators and tenants may look at pools.
fn known(desk: &Desk, ctx: &Ctx) -> Result<(), Refusal> {
    desk.started()?;
    ctx.principal().map(drop)
}

fn apply(desk: &Desk, ctx: &Ctx, request: v1::PoolsApplyRequest) -> Result<v1::Pool, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let spec = parse::pool(request.spec)?;
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
    let (pool, _written) = desk.claims.pools.apply(spec).map_err(|error| refusal(&error))?;
    Ok(pool.view())
}

fn delete(desk: &Desk, ctx: &Ctx, request: &v1::PoolsDeleteRequest) -> Result<v1::PoolsDeleteReply, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let name = parse::name("name", &request.name)?;
    let _written = desk.claims.pools.delete(&name).map_err(|error| refusal(&error))?;
    Ok(v1::PoolsDeleteReply {})
}

fn refusal(error: &PoolError) -> Refusal {
    match error {
        PoolError::NotFound(_) => Refusal::new(Reason::PoolNotFound, error.to_string()),
        PoolError::FromFile(_) => Refusal::new(Reason::PoolFromFile, error.to_string()),
        PoolError::Journal(error) => super::claims::journal(error),
    }
}

/// The pools of these names, or all.
fn views(desk: &Desk, names: &[String]) -> Vec<v1::Pool> {
    let wanted = |pool: &Pool| names.is_empty() || names.iter().any(|name| name == pool.name().as_str());
    let pools = desk.claims.pools.list();
    pools
        .iter()
        .filter(|pool| wanted(pool))
        .map(|pool| pool.view())
        .collect()
}

struct Watcher {
    desk: Desk,
    names: Vec<String>,
    changes: watch::Receiver<u64>,
    /// What was told last.
    told: BTreeMap<String, v1::Pool>,
    queue: VecDeque<v1::pools_watch_reply::Event>,
}

fn watch(desk: &Desk, names: Vec<String>) -> Boxed<v1::PoolsWatchReply> {
    let changes = desk.claims.pools.changes();
    let stopping = desk.stopping();
    let mut watcher = Watcher {
        desk: desk.clone(),
        names,
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
    Box::pin(events.take_until(stopping).map(Ok))
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
        let now: BTreeMap<String, v1::Pool> = views(&self.desk, &self.names)
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
            .filter(|(name, pool)| self.told.get(*name) != Some(pool));
        self.queue
            .extend(changed.map(|(_, pool)| Event::Pool(pool.clone())));
        self.told = now;
    }
}
