//! `find`: lines that match, as `grep -n` shows them.

use std::ffi::OsString;

use clap::Args;
use sandbox_sdk::{
    files::FindEvent,
    v1::{FindDone, FindLine, FindSkipped},
};
use serde_json::{Value, json};

use crate::{
    Reach,
    args::Limit,
    fault::Fault,
    guest::{self, As},
    print::{self, Out},
};

/// In which files.
#[derive(Debug, Clone, Args)]
pub(crate) struct Where {
    /// Pattern and replacement are text, and no regular expression.
    #[arg(short = 'F', long)]
    pub(crate) fixed: bool,
    /// Upper and lower case are the same.
    #[arg(short = 'i', long)]
    pub(crate) ignore_case: bool,
    /// Only files that fit (`*.rs`), or not those that do (`!target`); may be repeated.
    #[arg(short = 'g', long = "glob", value_name = "GLOB", allow_hyphen_values = true)]
    pub(crate) globs: Vec<OsString>,
    /// Files whose names begin with a dot, too.
    #[arg(long)]
    pub(crate) hidden: bool,
    /// Not what gitignore files leave out.
    #[arg(long)]
    pub(crate) gitignore: bool,
}

/// Tells a search or a replacement where to look: two builders, whose setters have the same names.
macro_rules! look_within {
    ($builder:expr, $within:expr) => {{
        let (mut builder, within): (_, $crate::find::Where) = ($builder, $within);
        if within.fixed {
            builder = builder.fixed();
        }
        if within.ignore_case {
            builder = builder.ignore_case();
        }
        if within.hidden {
            builder = builder.hidden();
        }
        if within.gitignore {
            builder = builder.respect_gitignore();
        }
        for glob in within.globs {
            builder = builder.glob(glob);
        }
        builder
    }};
}
pub(crate) use look_within;

#[derive(Debug, Clone, Args)]
pub(crate) struct FindArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Regular expression (Rust's regex, on bytes).
    #[arg(allow_hyphen_values = true)]
    pattern: OsString,
    /// A file, or a directory that is walked; absolute.
    #[arg(default_value = "/")]
    path: OsString,
    #[command(flatten)]
    within: Where,
    /// Lines before and after each match, 10 at most.
    #[arg(short = 'C', long, value_name = "N", default_value_t = 0)]
    context: u32,
    /// End after so many matches.
    #[arg(short = 'm', long, value_name = "N")]
    max: Option<u64>,
    #[command(flatten)]
    user: As,
    #[command(flatten)]
    limit: Limit,
}

pub(crate) async fn find(reach: &Reach, args: FindArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.timeout;
    crate::within(limit, search(reach, args, out)).await
}

async fn search(reach: &Reach, args: FindArgs, out: Out) -> Result<(), Fault> {
    let files = guest::files(reach, args.sandbox, args.user).await?;
    let find = files.find(args.path, args.pattern).context(args.context);
    let mut find = look_within!(find, args.within);
    if let Some(max) = args.max {
        find = find.max_matches(max);
    }
    let mut finding = find.stream().await?;
    while let Some(event) = finding.next().await {
        match event? {
            FindEvent::Line(line) if out.json => print::line(&line_json(&line).to_string())?,
            FindEvent::Line(line) => print::line(&human(&line))?,
            FindEvent::Done(done) => end(&done, out)?,
        }
    }
    Ok(())
}

fn human(line: &FindLine) -> String {
    let (path, text) = (guest::shown(&line.path), guest::shown(&line.text));
    let sign = if line.context { '-' } else { ':' };
    let cut = if line.cut { " [..]" } else { "" };
    format!("{path}{sign}{}{sign}{text}{cut}", line.line)
}

fn line_json(line: &FindLine) -> Value {
    let mut object = guest::object([("path", &line.path), ("text", &line.text)]);
    let fields = json!({
        "line": line.line,
        "column": (!line.context).then_some(line.column),
        "offset": line.offset,
        "cut": line.cut,
        "context": line.context,
    });
    if let Value::Object(mut fields) = fields {
        object.append(&mut fields);
    }
    Value::Object(object)
}

pub(crate) fn skipped_json(skipped: Option<&FindSkipped>) -> Value {
    let skipped = skipped.copied().unwrap_or_default();
    json!({
        "binary": skipped.binary,
        "unreadable": skipped.unreadable,
        "line_too_long": skipped.line_too_long,
    })
}

/// What was not looked at is told, on stderr.
pub(crate) fn skipped(skipped: Option<&FindSkipped>) {
    let skipped = skipped.copied().unwrap_or_default();
    for (count, what) in [
        (skipped.binary, "binary files were left out"),
        (skipped.unreadable, "files could not be read"),
        (skipped.line_too_long, "files have lines that are too long"),
    ] {
        if count > 0 {
            print::stderr(&format!("sandboxctl: {count} {what}"));
        }
    }
}

fn end(done: &FindDone, out: Out) -> Result<(), Fault> {
    if out.json {
        let done = json!({ "done": {
            "searched": done.searched,
            "matches": done.matches,
            "skipped": skipped_json(done.skipped.as_ref()),
            "truncated": done.truncated,
        }});
        return print::line(&done.to_string());
    }
    skipped(done.skipped.as_ref());
    if done.truncated {
        print::stderr("sandboxctl: there are more matches");
    }
    Ok(())
}
