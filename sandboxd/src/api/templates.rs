//! Service `Templates`.

use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use sandbox_protocol::{id::RequestId, reason::Reason, v1};
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    desk::{Desk, answer},
    parse,
    stream::Boxed,
};
use crate::{
    sandbox::Life,
    template::{Build, BuildEvent, BuildStep, Spec, TemplateError, Variant},
    words::{Name, PoolKey},
};

/// Time of a warm-up when none is given, and the most.
const WARMUP_DEFAULT_MS: u32 = 30_000;
const WARMUP_MAX_MS: u32 = 600_000;
/// Bytes of a warm-up's arguments together.
const WARMUP_BYTES: usize = 64 * 1024;

/// Service `Templates`.
#[derive(Debug, Clone)]
pub(super) struct TemplatesService(pub(super) Desk);

#[tonic::async_trait]
impl v1::templates_server::Templates for TemplatesService {
    type BuildStream = Boxed<v1::TemplatesBuildReply>;

    async fn build(
        &self,
        request: Request<v1::TemplatesBuildRequest>,
    ) -> Result<Response<Self::BuildStream>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, build(&self.0, &ctx, &request.into_inner()))
    }

    async fn list(
        &self,
        request: Request<v1::TemplatesListRequest>,
    ) -> Result<Response<v1::TemplatesListReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(
            &ctx,
            known(&self.0, &ctx).map(|()| v1::TemplatesListReply {
                templates: views(&self.0),
            }),
        )
    }

    async fn get(&self, request: Request<v1::TemplatesGetRequest>) -> Result<Response<v1::Template>, Status> {
        let ctx = self.0.ctx(&request);
        let name = known(&self.0, &ctx).and_then(|()| parse::name("name", &request.get_ref().name));
        answer(
            &ctx,
            name.and_then(|name| view(&self.0, &name).ok_or_else(|| not_found(&name))),
        )
    }

    async fn delete(
        &self,
        request: Request<v1::TemplatesDeleteRequest>,
    ) -> Result<Response<v1::TemplatesDeleteReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, delete(&self.0, &ctx, request.get_ref()))
    }
}

/// Operators and tenants may look at templates.
fn known(desk: &Desk, ctx: &Ctx) -> Result<(), Refusal> {
    desk.started()?;
    ctx.principal().map(drop)
}

fn build(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::TemplatesBuildRequest,
) -> Result<Boxed<v1::TemplatesBuildReply>, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let key = parse::variant(&request.name, request.lane, &request.size)?;
    let (name, spec) = (key.template.clone(), spec(desk, request, &key)?);
    let build = desk
        .claims
        .templates
        .build(spec, key, request.rebuild)
        .map_err(|error| refusal(&error))?;
    let telling = Telling {
        desk: desk.clone(),
        id: ctx.id,
        name,
        build: Some(build),
    };
    Ok(Box::pin(telling.events().take_until(desk.stopping())))
}

fn delete(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::TemplatesDeleteRequest,
) -> Result<v1::TemplatesDeleteReply, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let name = parse::name("name", &request.name)?;
    unused(desk, &name)?;
    desk.claims
        .templates
        .delete(&name)
        .map_err(|error| refusal(&error))?;
    Ok(v1::TemplatesDeleteReply {})
}

fn not_found(name: &Name) -> Refusal {
    Refusal::new(Reason::TemplateNotFound, format!("there is no template {name}"))
}

fn refusal(error: &TemplateError) -> Refusal {
    Refusal::new(error.reason(), error.chain())
}

/// What is to be built. A template that is known keeps what the request leaves out.
fn spec(desk: &Desk, request: &v1::TemplatesBuildRequest, key: &PoolKey) -> Result<Spec, Refusal> {
    let known = desk.claims.templates.spec(&key.template);
    let image = match (request.image.as_str(), &known) {
        ("", Some(known)) => known.image.clone(),
        ("", None) => return Err(Refusal::field("image", "a new template needs an image")),
        (image, _) => image.to_owned(),
    };
    if !image.starts_with('/') {
        parse::name("image", &image)?;
    }
    let total: usize = request.warmup.iter().map(bytes::Bytes::len).sum();
    if total > WARMUP_BYTES || request.warmup.iter().any(|arg| arg.contains(&0)) {
        return Err(Refusal::field(
            "warmup",
            format!("at most {WARMUP_BYTES} bytes of arguments, without NUL"),
        ));
    }
    let timeout = request.warmup_timeout_ms.unwrap_or(WARMUP_DEFAULT_MS);
    if !(1..=WARMUP_MAX_MS).contains(&timeout) {
        return Err(Refusal::field(
            "warmup_timeout_ms",
            format!("1 to {WARMUP_MAX_MS}"),
        ));
    }
    let warmup = match (request.warmup.is_empty(), known) {
        (true, Some(known)) => known.warmup,
        (true | false, _) => request
            .warmup
            .iter()
            .map(|arg| String::from_utf8(arg.to_vec()))
            .collect::<Result<_, _>>()
            .map_err(|_bytes| {
                Refusal::field("warmup", "not UTF-8: put such bytes into a script of the image")
            })?,
    };
    let warmup_timeout = Duration::from_millis(timeout.into());
    Ok(Spec {
        name: key.template.clone(),
        image,
        warmup,
        warmup_timeout,
    })
}

/// Refuses where a pool or a sandbox that is not gone was made from it.
fn unused(desk: &Desk, name: &Name) -> Result<(), Refusal> {
    let in_use = |what: String| {
        Refusal::new(
            Reason::TemplateInUse,
            format!("template {name} is used by {what}"),
        )
    };
    if let Some(pool) = desk
        .claims
        .pools
        .list()
        .iter()
        .find(|pool| pool.key().template == *name)
    {
        return Err(in_use(format!("pool {}", pool.name())));
    }
    let lives = |life: &Life| !matches!(life, Life::Gone { .. } | Life::Failed { .. });
    let sandboxes = desk.claims.sandboxes.list(None);
    match sandboxes
        .iter()
        .find(|sandbox| sandbox.key.template == *name && sandbox.with_life(lives))
    {
        Some(sandbox) => Err(in_use(format!("sandbox {}", sandbox.id))),
        None => Ok(()),
    }
}

fn views(desk: &Desk) -> Vec<v1::Template> {
    let pools = desk.claims.pools.list();
    let users = |key: &PoolKey| {
        pools
            .iter()
            .filter(|pool| pool.key() == *key)
            .map(|pool| pool.name().to_string())
            .collect()
    };
    let all = desk.claims.templates.list().into_iter();
    all.map(|(spec, variants)| v1::Template {
        name: spec.name.to_string(),
        image: spec.image,
        image_digest: variants
            .first()
            .map(|(_, variant)| variant.capture.manifest().image.digest.to_string())
            .unwrap_or_default(),
        warmup: spec.warmup.into_iter().map(bytes::Bytes::from).collect(),
        variants: variants
            .iter()
            .map(|(key, variant)| variant_view(key, variant, users(key)))
            .collect(),
    })
    .collect()
}

fn view(desk: &Desk, name: &Name) -> Option<v1::Template> {
    views(desk)
        .into_iter()
        .find(|template| template.name == name.as_str())
}

fn variant_view(key: &PoolKey, variant: &Variant, pools: Vec<String>) -> v1::Variant {
    let manifest = variant.capture.manifest();
    v1::Variant {
        lane: key.lane.to_proto().into(),
        size: key.size.to_string(),
        digest: variant.capture.digest().to_string(),
        qemu_version: manifest.facts.version.clone(),
        machine: manifest.facts.machine.clone(),
        cpu_model: manifest.facts.cpu.clone(),
        accel: manifest.facts.accel.to_proto().into(),
        ram_mib: u32::try_from(manifest.size.memory.mib()).unwrap_or(u32::MAX),
        state_bytes: std::fs::metadata(variant.capture.dir().join("state")).map_or(0, |state| state.len()),
        proto_min: manifest.proto_min,
        proto_max: manifest.proto_max,
        created_at: Some(manifest.created_at.to_proto()),
        pools,
        stale: variant.stale().unwrap_or_default().to_owned(),
    }
}

/// A build, told to one caller.
struct Telling {
    desk: Desk,
    id: RequestId,
    name: Name,
    /// None once it is through.
    build: Option<Build>,
}

impl Telling {
    fn events(self) -> impl Stream<Item = Result<v1::TemplatesBuildReply, Status>> + Send {
        stream::unfold(self, |mut telling| async move {
            let event = telling.next().await?;
            let reply = event.map(|event| v1::TemplatesBuildReply { event: Some(event) });
            Some((reply.map_err(|refusal| refusal.status(telling.id)), telling))
        })
    }

    async fn next(&mut self) -> Option<Result<v1::templates_build_reply::Event, Refusal>> {
        use v1::templates_build_reply::Event;
        match self.build.as_mut()?.next().await {
            BuildEvent::Step(step, elapsed) => {
                let elapsed_ms = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
                Some(Ok(Event::Step(v1::BuildStep {
                    kind: kind(step).into(),
                    elapsed_ms,
                })))
            }
            BuildEvent::Through => Some(match self.build.take()?.done().await {
                Ok(_) => view(&self.desk, &self.name)
                    .ok_or_else(|| not_found(&self.name))
                    .map(Event::Template),
                Err(error) => Err(refusal(&error)),
            }),
        }
    }
}

const fn kind(step: BuildStep) -> v1::build_step::Kind {
    match step {
        BuildStep::Boot => v1::build_step::Kind::Boot,
        BuildStep::Agent => v1::build_step::Kind::Agent,
        BuildStep::Warmup => v1::build_step::Kind::Warmup,
        BuildStep::Quiesce => v1::build_step::Kind::Quiesce,
        BuildStep::Capture => v1::build_step::Kind::Capture,
        BuildStep::Check => v1::build_step::Kind::Check,
    }
}
