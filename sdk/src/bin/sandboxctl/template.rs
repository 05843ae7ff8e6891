//! `template build|list|inspect|rm`.

use std::os::unix::ffi::OsStringExt as _;

use sandbox_sdk::{
    TextDecoder,
    v1::{self, templates_build_reply},
};
use serde_json::json;

use crate::{
    Reach,
    args::{self, TemplateBuildArgs, TemplateVerb},
    fault::Fault,
    human, json,
    print::{Out, Progress},
    text::word,
    within,
};

pub(crate) async fn verb(reach: &Reach, verb: TemplateVerb, out: Out) -> Result<(), Fault> {
    match verb {
        TemplateVerb::Build(args) => build(reach, args, out).await,
        TemplateVerb::List(limit) => {
            let limit = limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let templates = within(Some(limit), async { Ok(client.templates().list().await?) }).await?;
            out.result(
                || json!({ "templates": templates.iter().map(json::template).collect::<Vec<_>>() }),
                || human::templates(&templates),
            )
        }
        TemplateVerb::Inspect(args) => {
            let limit = args.limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let template = within(Some(limit), async {
                Ok(client.templates().get(args.name).await?)
            })
            .await?;
            out.result(|| json::template(&template), || human::template(&template))
        }
        TemplateVerb::Rm(args) => {
            let limit = args.limit.or_default();
            let client = reach.client(Some(limit)).await?;
            within(Some(limit), async {
                Ok(client.templates().delete(args.name).await?)
            })
            .await?;
            out.result(|| json!({}), String::new)
        }
    }
}

async fn build(reach: &Reach, args: TemplateBuildArgs, out: Out) -> Result<(), Fault> {
    let warmup_timeout_ms = match args
        .warmup_timeout
        .map(|timeout| u32::try_from(timeout.as_millis()))
    {
        None => None,
        Some(Ok(ms)) => Some(ms),
        Some(Err(_)) => return Err(Fault::Usage("--warmup-timeout: at most 10m".to_owned())),
    };
    let request = v1::TemplatesBuildRequest {
        name: args.name,
        image: args.image,
        lane: args::lane(args.lane),
        size: args.size,
        warmup: args
            .warmup
            .into_iter()
            .chain(args.warmup_args)
            .map(|arg| arg.into_vec().into())
            .collect(),
        warmup_timeout_ms,
        rebuild: args.rebuild,
    };
    let client = reach.client(None).await?;
    let template = within(args.limit.timeout, follow(&client, request, out)).await?;
    out.result(|| json::template(&template), || human::template(&template))
}

/// Shows the steps as they begin, and on a terminal the console's last line.
async fn follow(
    client: &sandbox_sdk::Client,
    request: v1::TemplatesBuildRequest,
    out: Out,
) -> Result<v1::Template, Fault> {
    use templates_build_reply::Event;
    let progress = Progress::start(out, "starting the build");
    let mut build = client.templates().build(request).await?;
    let mut decoder = TextDecoder::new();
    let mut step = String::new();
    while let Some(event) = build.next().await {
        match event?.event {
            Some(Event::Step(begun)) => {
                step = word(begun.kind().as_str_name()).unwrap_or_default();
                if !out.json {
                    progress.note(&format!("{:>7} ms  {step}", begun.elapsed_ms));
                }
                progress.say(&step);
            }
            Some(Event::Console(bytes)) => {
                let text = decoder.push(&bytes);
                if let Some(line) = text.lines().rfind(|line| !line.trim().is_empty()) {
                    progress.say(&format!("{step}: {}", line.trim()));
                }
            }
            Some(Event::Template(template)) => return Ok(template),
            // Of a newer daemon.
            None => {}
        }
    }
    Err(Fault::Io(
        "template build",
        std::io::Error::other("the daemon ended the build without a template"),
    ))
}
