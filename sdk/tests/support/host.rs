//! The daemon's own services, by script.

use std::collections::HashMap;

use sandbox_sdk::v1::{self, claims_server, node_server, pools_server, templates_server};
use tokio_stream::StreamExt as _;
use tonic::{Request, Response};

use super::{Events, Reply, Service, at, sandbox};

fn pool(spec: v1::PoolSpec, warm: u32) -> v1::Pool {
    v1::Pool {
        spec: Some(spec),
        source: v1::Source::Applied.into(),
        target: warm,
        warm,
        ..v1::Pool::default()
    }
}

fn default_pool(warm: u32) -> v1::Pool {
    let spec = v1::PoolSpec {
        name: "default".into(),
        warm,
        ..v1::PoolSpec::default()
    };
    pool(spec, warm)
}

fn template(name: &str) -> v1::Template {
    v1::Template {
        name: name.to_owned(),
        image: "busybox".into(),
        warmup: vec!["true".into()],
        variants: vec![v1::Variant {
            lane: v1::Lane::None.into(),
            size: "small".into(),
            ..v1::Variant::default()
        }],
        ..v1::Template::default()
    }
}

#[tonic::async_trait]
impl claims_server::Claims for Service {
    async fn claim(&self, request: Request<v1::ClaimsClaimRequest>) -> Reply<v1::ClaimsClaimReply> {
        self.note(|seen| seen.claims.push(request.get_ref().clone()));
        self.begin("claim", &request).await?;
        let work = request.get_ref().trace.then(|| v1::Work {
            journal_records: 1,
            steps_us: HashMap::from([("take".to_owned(), 3)]),
            ..v1::Work::default()
        });
        Ok(Response::new(v1::ClaimsClaimReply {
            sandbox: "sb_1".into(),
            claim: "cl_1".into(),
            token: "sbt_secret".into(),
            tier: v1::Tier::Warm.into(),
            pool: "default".into(),
            expires_at: at(1_700_003_601),
            engine: v1::Engine::Stub.into(),
            accel: v1::Accel::None.into(),
            work,
        }))
    }

    async fn release(&self, request: Request<v1::ClaimsReleaseRequest>) -> Reply<v1::ClaimsReleaseReply> {
        self.begin("release", &request).await?;
        self.note(|seen| seen.released.push(request.into_inner().sandbox));
        Ok(Response::new(v1::ClaimsReleaseReply {
            already: false,
            recorded: true,
        }))
    }

    async fn renew(&self, request: Request<v1::ClaimsRenewRequest>) -> Reply<v1::ClaimsRenewReply> {
        self.begin("renew", &request).await?;
        let expires_at = at(1_700_000_000 + i64::from(request.get_ref().lease_secs));
        Ok(Response::new(v1::ClaimsRenewReply { expires_at }))
    }

    async fn get(&self, request: Request<v1::ClaimsGetRequest>) -> Reply<v1::Sandbox> {
        self.begin("get", &request).await?;
        Ok(Response::new(sandbox(&request.get_ref().sandbox)))
    }

    async fn list(&self, request: Request<v1::ClaimsListRequest>) -> Reply<v1::ClaimsListReply> {
        self.begin("list", &request).await?;
        // Three pages.
        let page: usize = request.get_ref().page_token.parse().unwrap_or(0);
        Ok(Response::new(v1::ClaimsListReply {
            sandboxes: vec![sandbox(&format!("sb_{page}a")), sandbox(&format!("sb_{page}b"))],
            next_page_token: if page < 2 {
                (page + 1).to_string()
            } else {
                String::new()
            },
        }))
    }

    async fn watch(&self, request: Request<v1::ClaimsWatchRequest>) -> Reply<Events<v1::ClaimsWatchReply>> {
        self.begin("watch", &request).await?;
        use v1::claims_watch_reply::Event;
        let events = [
            Event::Sandbox(sandbox("sb_1")),
            Event::Synced(v1::Synced {}),
            Event::Lost(v1::Lost { count: 7 }),
        ];
        let events = events.map(|event| Ok(v1::ClaimsWatchReply { event: Some(event) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }
}

#[tonic::async_trait]
impl pools_server::Pools for Service {
    async fn list(&self, request: Request<v1::PoolsListRequest>) -> Reply<v1::PoolsListReply> {
        self.begin("pools.list", &request).await?;
        Ok(Response::new(v1::PoolsListReply {
            pools: vec![default_pool(4)],
        }))
    }

    async fn apply(&self, request: Request<v1::PoolsApplyRequest>) -> Reply<v1::Pool> {
        self.begin("pools.apply", &request).await?;
        Ok(Response::new(pool(request.into_inner().spec.unwrap(), 0)))
    }

    async fn delete(&self, request: Request<v1::PoolsDeleteRequest>) -> Reply<v1::PoolsDeleteReply> {
        self.begin("pools.delete", &request).await?;
        Ok(Response::new(v1::PoolsDeleteReply {}))
    }

    async fn watch(&self, request: Request<v1::PoolsWatchRequest>) -> Reply<Events<v1::PoolsWatchReply>> {
        self.begin("pools.watch", &request).await?;
        use v1::pools_watch_reply::Event;
        let events = [
            Event::Pool(default_pool(1)),
            Event::Synced(v1::Synced {}),
            Event::Pool(default_pool(2)),
            Event::Pool(default_pool(4)),
        ];
        let events = events.map(|event| Ok(v1::PoolsWatchReply { event: Some(event) }));
        let events = tokio_stream::iter(events).chain(tokio_stream::pending());
        Ok(Response::new(Box::pin(events)))
    }
}

#[tonic::async_trait]
impl templates_server::Templates for Service {
    async fn build(
        &self,
        request: Request<v1::TemplatesBuildRequest>,
    ) -> Reply<Events<v1::TemplatesBuildReply>> {
        self.begin("templates.build", &request).await?;
        use v1::templates_build_reply::Event;
        let step = |kind: v1::build_step::Kind| {
            Event::Step(v1::BuildStep {
                kind: kind.into(),
                elapsed_ms: 5,
            })
        };
        let events = [
            step(v1::build_step::Kind::Boot),
            Event::Console("\u{1b}[31mhello\n".into()),
            step(v1::build_step::Kind::Capture),
            Event::Template(template(&request.get_ref().name)),
        ];
        let events = events.map(|event| Ok(v1::TemplatesBuildReply { event: Some(event) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }

    async fn list(&self, request: Request<v1::TemplatesListRequest>) -> Reply<v1::TemplatesListReply> {
        self.begin("templates.list", &request).await?;
        Ok(Response::new(v1::TemplatesListReply {
            templates: vec![template("default")],
        }))
    }

    async fn get(&self, request: Request<v1::TemplatesGetRequest>) -> Reply<v1::Template> {
        self.begin("templates.get", &request).await?;
        Ok(Response::new(template(&request.get_ref().name)))
    }

    async fn delete(&self, request: Request<v1::TemplatesDeleteRequest>) -> Reply<v1::TemplatesDeleteReply> {
        self.begin("templates.delete", &request).await?;
        Ok(Response::new(v1::TemplatesDeleteReply {}))
    }
}

#[tonic::async_trait]
impl node_server::Node for Service {
    async fn info(&self, request: Request<v1::NodeInfoRequest>) -> Reply<v1::NodeInfoReply> {
        self.begin("info", &request).await?;
        Ok(Response::new(v1::NodeInfoReply {
            version: "0.1.0".into(),
            name: "mock".into(),
            engine: v1::Engine::Stub.into(),
            accel: v1::Accel::None.into(),
            sandboxes: HashMap::from([("claimed".to_owned(), 1)]),
            started_at: at(1_700_000_000),
            ready: true,
            ..v1::NodeInfoReply::default()
        }))
    }

    async fn doctor(&self, request: Request<v1::NodeDoctorRequest>) -> Reply<v1::NodeDoctorReply> {
        self.begin("doctor", &request).await?;
        Ok(Response::new(v1::NodeDoctorReply {
            checks: vec![v1::Check {
                name: "kvm".into(),
                verdict: v1::Verdict::Warn.into(),
                found: "none".into(),
                remedy: "enable it".into(),
            }],
        }))
    }

    async fn reload(&self, request: Request<v1::NodeReloadRequest>) -> Reply<v1::NodeReloadReply> {
        self.begin("reload", &request).await?;
        Ok(Response::new(v1::NodeReloadReply {
            changed: vec!["pool.default.warm".into()],
            needs_restart: vec![],
        }))
    }

    async fn ping(&self, request: Request<v1::NodePingRequest>) -> Reply<v1::NodePingReply> {
        self.begin("ping", &request).await?;
        Ok(Response::new(v1::NodePingReply {}))
    }
}
