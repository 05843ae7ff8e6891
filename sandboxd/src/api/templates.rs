//! Service `Templates`.

use std::{pin::Pin, time::Duration};

use futures_util::{Stream, stream};
use sandbox_protocol::{id::RequestId, reason::Reason, v1};
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    desk::{Desk, answer},
    parse,
    stream::Boxed,
};
use crate::{
    access::Principal,
    sandbox::Life,
    template::{Build, BuildEvent, BuildStep, Spec, TemplateError, Variant},
    words::{Name, PoolKey},
};

/// Time of a warm-up when none is given, and the most.
const WARMUP_DEFAULT: Duration = Duration::from_secs(30);
const WARMUP_MAX_MS: u32 = 600_000;
/// Bytes of a warm-up's arguments together.
const WARMUP_BYTES: usize = 64 * 1024;

/// Service `Templates`.
#[derive(Debug, Clone)]
pub(super) struct TemplatesService(pub(super) Desk);

#[tonic::async_trait]
impl v1::templates_server::Templates for TemplatesService {
    async fn build(
        &self,
        request: Request<v1::TemplatesBuildRequest>,
    ) -> Result<Response<Boxed<v1::TemplatesBuildReply>>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, build(&self.0, &ctx, &request.into_inner()))
    }

    async fn list(
        &self,
        request: Request<v1::TemplatesListRequest>,
    ) -> Result<Response<v1::TemplatesListReply>, Status> {
        let ctx = self.0.ctx(&request);
        let templates = viewer(&self.0, &ctx).map(|viewer| {
            let all = views(&self.0).into_iter();
            all.map(|template| viewer.sees(template)).collect()
        });
        answer(
            &ctx,
            templates.map(|templates| v1::TemplatesListReply { templates }),
        )
    }

    async fn get(&self, request: Request<v1::TemplatesGetRequest>) -> Result<Response<v1::Template>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, get(&self.0, &ctx, request.get_ref()))
    }

    async fn delete(
        &self,
        request: Request<v1::TemplatesDeleteRequest>,
    ) -> Result<Response<v1::TemplatesDeleteReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, delete(&self.0, &ctx, request.get_ref()).await)
    }
}

/// Who looks at templates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Viewer {
    Operator,
    Tenant,
}

impl Viewer {
    /// The part of a template that is his to see. A tenant learns what can be claimed, and nothing of how it is made, of
    /// this host or of its pools.
    fn sees(self, template: v1::Template) -> v1::Template {
        let variant = |variant: v1::Variant| v1::Variant {
            lane: variant.lane,
            size: variant.size,
            ..v1::Variant::default()
        };
        match self {
            Self::Operator => template,
            Self::Tenant => v1::Template {
                name: template.name,
                variants: template.variants.into_iter().map(variant).collect(),
                ..v1::Template::default()
            },
        }
    }
}

/// Operators and tenants may look at templates.
fn viewer(desk: &Desk, ctx: &Ctx) -> Result<Viewer, Refusal> {
    desk.started()?;
    ctx.principal().map(|principal| match principal {
        Principal::Operator(_) => Viewer::Operator,
        Principal::Tenant { .. } | Principal::Claimer { .. } => Viewer::Tenant,
    })
}

fn get(desk: &Desk, ctx: &Ctx, request: &v1::TemplatesGetRequest) -> Result<v1::Template, Refusal> {
    let viewer = viewer(desk, ctx)?;
    let name = parse::name("name", &request.name)?;
    let template = view(desk, &name).ok_or_else(|| not_found(&name))?;
    Ok(viewer.sees(template))
}

fn build(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::TemplatesBuildRequest,
) -> Result<Boxed<v1::TemplatesBuildReply>, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let key = parse::variant(&request.name, request.lane, &request.size)?;
    desk.has(key.lane)?;
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
        stopping: Box::pin(desk.stopping()),
    };
    Ok(Box::pin(telling.events()))
}

async fn delete(
    desk: &Desk,
    ctx: &Ctx,
    request: &v1::TemplatesDeleteRequest,
) -> Result<v1::TemplatesDeleteReply, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let name = parse::name("name", &request.name)?;
    let deleted = {
        // No pool of it appears between the look and the deletion.
        let _one = desk.changing.begin();
        unused(desk, &name)?;
        desk.claims.templates.delete(&name)
    };
    let deleted = match deleted {
        Ok(files) => files.await,
        Err(error) => Err(error),
    };
    deleted.map_err(|error| refusal(&error))?;
    Ok(v1::TemplatesDeleteReply {})
}

fn not_found(name: &Name) -> Refusal {
    Refusal::new(Reason::TemplateNotFound, format!("there is no template {name}"))
}

fn refusal(error: &TemplateError) -> Refusal {
    Refusal::new(error.reason(), error.chain())
}

/// What is to be built. A template that is known keeps what the request leaves out; one of the configuration file is
/// what the file says.
fn spec(desk: &Desk, request: &v1::TemplatesBuildRequest, key: &PoolKey) -> Result<Spec, Refusal> {
    let templates = &desk.claims.templates;
    let asked = Asked::parse(request)?;
    let Some(known) = templates.spec(&key.template) else {
        return Ok(Spec {
            name: key.template.clone(),
            image: asked
                .image
                .ok_or_else(|| Refusal::field("image", "a new template needs an image"))?,
            warmup: asked.warmup.unwrap_or_default(),
            warmup_timeout: asked.warmup_timeout.unwrap_or(WARMUP_DEFAULT),
        });
    };
    if templates.is_of_file(&key.template) {
        asked.agrees_with(&known)?;
    }
    // The time that is kept is the kept warm-up's.
    let (warmup, time) = match asked.warmup {
        Some(warmup) => (warmup, WARMUP_DEFAULT),
        None => (known.warmup, known.warmup_timeout),
    };
    Ok(Spec {
        name: known.name,
        image: asked.image.unwrap_or(known.image),
        warmup,
        warmup_timeout: asked.warmup_timeout.unwrap_or(time),
    })
}

/// What a request says of a template; none where it leaves it out.
struct Asked {
    image: Option<String>,
    warmup: Option<Vec<String>>,
    warmup_timeout: Option<Duration>,
}

impl Asked {
    fn parse(request: &v1::TemplatesBuildRequest) -> Result<Self, Refusal> {
        let image = Some(&request.image).filter(|image| !image.is_empty());
        if let Some(name) = image.filter(|image| !image.starts_with('/')) {
            parse::name("image", name)?;
        }
        let total: usize = request.warmup.iter().map(bytes::Bytes::len).sum();
        if total > WARMUP_BYTES || request.warmup.iter().any(|arg| arg.contains(&0)) {
            return Err(Refusal::field(
                "warmup",
                format!("at most {WARMUP_BYTES} bytes of arguments, without NUL"),
            ));
        }
        let warmup: Vec<String> = request
            .warmup
            .iter()
            .map(|arg| String::from_utf8(arg.to_vec()))
            .collect::<Result<_, _>>()
            .map_err(|_bytes| {
                Refusal::field("warmup", "not UTF-8: put such bytes into a script of the image")
            })?;
        let ms = request.warmup_timeout_ms;
        if ms.is_some_and(|ms| !(1..=WARMUP_MAX_MS).contains(&ms)) {
            return Err(Refusal::field(
                "warmup_timeout_ms",
                format!("1 to {WARMUP_MAX_MS}"),
            ));
        }
        Ok(Self {
            image: image.cloned(),
            warmup: Some(warmup).filter(|argv| !argv.is_empty()),
            warmup_timeout: ms.map(|ms| Duration::from_millis(ms.into())),
        })
    }

    /// The file would undo at its next reading what the API makes otherwise.
    fn agrees_with(&self, of_file: &Spec) -> Result<(), Refusal> {
        let refused = |field| {
            let text = format!(
                "the configuration file says otherwise of template {}: change it there, or build under another name",
                of_file.name
            );
            Err(Refusal::field(field, text))
        };
        if self.image.as_ref().is_some_and(|image| *image != of_file.image) {
            return refused("image");
        }
        if self.warmup.as_ref().is_some_and(|argv| *argv != of_file.warmup) {
            return refused("warmup");
        }
        Ok(())
    }
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
    /// The daemon stops, and the build with it.
    stopping: Pin<Box<dyn Future<Output = ()> + Send>>,
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
        let event = tokio::select! {
            biased;
            event = self.build.as_mut()?.next() => event,
            () = &mut self.stopping => {
                self.build = None;
                return Some(Err(Refusal::new(Reason::Draining, "the daemon is stopping")));
            }
        };
        match event {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of_file() -> Spec {
        Spec {
            name: "default".parse().unwrap(),
            image: "busybox".into(),
            warmup: vec!["true".into()],
            warmup_timeout: Duration::from_secs(300),
        }
    }

    #[test]
    fn what_the_file_says_is_not_built_otherwise() {
        let asked = |image: &str, warmup: &[&str]| {
            let request = v1::TemplatesBuildRequest {
                image: image.into(),
                warmup: warmup.iter().map(|arg| (*arg).to_owned().into()).collect(),
                ..v1::TemplatesBuildRequest::default()
            };
            Asked::parse(&request).unwrap().agrees_with(&of_file())
        };
        for (image, warmup) in [("", &[][..]), ("busybox", &[]), ("", &["true"])] {
            assert!(asked(image, warmup).is_ok(), "{image} {warmup:?}");
        }
        for (image, warmup) in [("other", &[][..]), ("busybox", &["false"])] {
            let refusal = asked(image, warmup).unwrap_err();
            assert!(
                format!("{refusal:?}").contains("configuration file"),
                "{refusal:?}"
            );
        }
    }

    #[test]
    fn tenants_learn_what_can_be_claimed_and_no_more() {
        let variant = v1::Variant {
            lane: 1,
            size: "small".into(),
            qemu_version: "10.0".into(),
            pools: vec!["others".into()],
            ..v1::Variant::default()
        };
        let template = v1::Template {
            name: "py".into(),
            image: "/srv/images/py".into(),
            warmup: vec!["secret".into()],
            variants: vec![variant],
            ..v1::Template::default()
        };
        assert_eq!(Viewer::Operator.sees(template.clone()), template);
        let seen = v1::Template {
            name: "py".into(),
            variants: vec![v1::Variant {
                lane: 1,
                size: "small".into(),
                ..v1::Variant::default()
            }],
            ..v1::Template::default()
        };
        assert_eq!(Viewer::Tenant.sees(template), seen);
    }
}
