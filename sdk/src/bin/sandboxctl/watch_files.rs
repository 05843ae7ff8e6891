//! `watch-files`: changes of a guest's files, one a line.

use std::ffi::OsString;

use clap::Args;
use sandbox_sdk::{FileChange, v1::WatchKind};
use serde_json::{Value, json};

use crate::{
    Reach,
    args::Limit,
    fault::Fault,
    guest::{self, As},
    print::{self, Out},
    text::word,
};

#[derive(Debug, Clone, Args)]
pub(crate) struct WatchFilesArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// A file, or a directory; absolute.
    path: OsString,
    /// All levels below.
    #[arg(short = 'r', long)]
    recursive: bool,
    /// Not what fits this glob, over paths relative to PATH; may be repeated.
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<OsString>,
    #[command(flatten)]
    user: As,
    #[command(flatten)]
    limit: Limit,
}

pub(crate) async fn watch(reach: &Reach, args: WatchFilesArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.timeout;
    crate::within(limit, follow(reach, args, out)).await
}

async fn follow(reach: &Reach, args: WatchFilesArgs, out: Out) -> Result<(), Fault> {
    let files = guest::files(reach, args.sandbox, args.user).await?;
    let mut watch = files.watch(args.path);
    if args.recursive {
        watch = watch.recursive();
    }
    for glob in args.exclude {
        watch = watch.exclude(glob);
    }
    let mut changes = watch.stream().await?;
    while let Some(change) = changes.next().await {
        let change = change?;
        out.result(|| json(&change), || human(&change))?;
    }
    Ok(())
}

fn kind(kind: WatchKind) -> String {
    let name = kind.as_str_name().strip_prefix("WATCH_");
    name.and_then(word).unwrap_or_else(|| "changed".to_owned())
}

fn human(change: &FileChange) -> String {
    let path = |path: &[u8], directory: &bool| {
        let slash = if *directory { "/" } else { "" };
        format!("{}{slash}", guest::shown(path))
    };
    match change {
        FileChange::Ready { directories } => {
            print::stderr(&format!("sandboxctl: watching {directories} directories"));
            String::new()
        }
        FileChange::Changed {
            kind: how,
            path: what,
            directory,
        } => format!("{} {}", kind(*how), path(what, directory)),
        FileChange::Renamed { from, to, directory } => {
            format!("renamed {} -> {}", path(from, directory), path(to, directory))
        }
        FileChange::Overflow { reason } => {
            format!(
                "overflow ({}): changes were lost",
                guest::shown(reason.as_bytes())
            )
        }
        // Of a later SDK.
        _ => String::new(),
    }
}

fn json(change: &FileChange) -> Value {
    let about = |name: &str, mut object: serde_json::Map<String, Value>, directory: &bool| {
        object.insert("directory".to_owned(), json!(directory));
        json!({ name: object })
    };
    match change {
        FileChange::Ready { directories } => json!({ "ready": { "directories": directories } }),
        FileChange::Changed {
            kind: how,
            path,
            directory,
        } => about(&kind(*how), guest::object([("path", path)]), directory),
        FileChange::Renamed { from, to, directory } => {
            about("renamed", guest::object([("from", from), ("to", to)]), directory)
        }
        FileChange::Overflow { reason } => json!({ "overflow": { "reason": reason } }),
        // Of a later SDK.
        _ => Value::Null,
    }
}
