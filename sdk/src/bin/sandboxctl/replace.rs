//! `replace`: in all the files, or in none.

use std::ffi::OsString;

use clap::Args;
use sandbox_sdk::files::ReplaceEvent;
use serde_json::{Value, json};

use crate::{
    Reach,
    args::Limit,
    fault::Fault,
    find::{self, Where, look_within},
    guest::{self, As},
    print::{self, Out},
};

#[derive(Debug, Clone, Args)]
pub(crate) struct ReplaceArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Regular expression (Rust's regex, on bytes); matches lie within one line.
    #[arg(allow_hyphen_values = true)]
    pattern: OsString,
    /// What comes in its place; `$1` and `${name}` are groups of the pattern.
    #[arg(allow_hyphen_values = true)]
    replacement: OsString,
    /// Files, or directories that are walked; absolute.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<OsString>,
    #[command(flatten)]
    within: Where,
    /// Count, and change nothing.
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    user: As,
    #[command(flatten)]
    limit: Limit,
}

pub(crate) async fn replace(reach: &Reach, args: ReplaceArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.timeout;
    crate::within(limit, run(reach, args, out)).await
}

async fn run(reach: &Reach, args: ReplaceArgs, out: Out) -> Result<(), Fault> {
    let files = guest::files(reach, args.sandbox, args.user).await?;
    let replace = files.replace(args.pattern, args.replacement);
    let mut replace = look_within!(replace, args.within);
    if args.dry_run {
        replace = replace.dry_run();
    }
    for path in args.paths {
        replace = replace.path(path);
    }
    let mut replacing = replace.stream().await?;
    while let Some(event) = replacing.next().await {
        match event? {
            ReplaceEvent::File(file) if out.json => {
                let mut object = guest::object([("path", &file.path)]);
                object.insert("replacements".to_owned(), json!(file.replacements));
                print::line(&Value::Object(object).to_string())?;
            }
            ReplaceEvent::File(file) => {
                print::line(&format!("{}: {}", guest::shown(&file.path), file.replacements))?;
            }
            ReplaceEvent::Done(done) if out.json => {
                let done = json!({ "done": {
                    "files": done.files,
                    "replacements": done.replacements,
                    "skipped": find::skipped_json(done.skipped.as_ref()),
                    "dry_run": args.dry_run,
                }});
                print::line(&done.to_string())?;
            }
            ReplaceEvent::Done(done) => {
                find::skipped(done.skipped.as_ref());
                let would = if args.dry_run { "would be " } else { "" };
                print::stderr(&format!(
                    "sandboxctl: {} {would}replaced in {} files",
                    done.replacements, done.files
                ));
            }
        }
    }
    Ok(())
}
