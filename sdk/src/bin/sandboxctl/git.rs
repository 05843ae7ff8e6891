//! `git`: the guest's, in one work tree.

use std::{ffi::OsString, fmt::Write as _, os::unix::ffi::OsStringExt as _, time::Duration};

use clap::{Args, Subcommand};
use sandbox_sdk::{
    Git, TextDecoder,
    git::{GitEvent, GitProgress},
    v1::{AgentGitStatusReply, GitBranchEntry, GitEntry},
};
use serde_json::{Value, json};

use crate::{
    Reach,
    args::duration,
    claim::variable,
    fault::Fault,
    guest::{self, As},
    print::{self, Out},
    text::harmless,
};

#[derive(Debug, Clone, Args)]
pub(crate) struct GitArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// The work tree in the sandbox, absolute.
    #[arg(short = 'C', long = "dir", value_name = "DIR", global = true)]
    tree: Option<OsString>,
    /// Environment variable of git; may be repeated.
    #[arg(long = "env", value_name = "K=V", global = true)]
    env: Vec<OsString>,
    /// Time of git itself [default: 60s; none for clone, push and pull].
    #[arg(long, value_name = "D", value_parser = duration, global = true)]
    timeout: Option<Duration>,
    #[command(flatten)]
    user: As,
    #[command(subcommand)]
    verb: GitVerb,
}

#[derive(Debug, Clone, Subcommand)]
enum GitVerb {
    /// Clone a repository.
    Clone(CloneArgs),
    /// Show what has changed, as `git status --short --branch`.
    Status {
        /// Files that git ignores, too.
        #[arg(long)]
        ignored: bool,
    },
    /// Take changes into the index.
    Add {
        /// Files and directories, relative to the work tree.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        paths: Vec<OsString>,
        /// All that has changed.
        #[arg(short = 'A', long)]
        all: bool,
    },
    /// Commit what is in the index; print the commit.
    Commit(CommitArgs),
    /// Push commits.
    Push(PushArgs),
    /// Pull commits.
    Pull(PullArgs),
    /// List branches; make or remove one.
    Branch(BranchArgs),
    /// Move to a branch, tag or commit, or restore files.
    Checkout(CheckoutArgs),
}

#[derive(Debug, Clone, Args)]
struct CloneArgs {
    /// Where from.
    url: OsString,
    /// Where to in the sandbox, absolute; or -C.
    #[arg(value_name = "DIR")]
    into: Option<OsString>,
    /// This branch.
    #[arg(short = 'b', long, value_name = "B")]
    branch: Option<OsString>,
    /// So many commits of history [default: all].
    #[arg(long, value_name = "N")]
    depth: Option<u32>,
    /// With submodules.
    #[arg(long)]
    recurse_submodules: bool,
}

#[derive(Debug, Clone, Args)]
struct CommitArgs {
    /// What the commit says.
    #[arg(short = 'm', long, allow_hyphen_values = true)]
    message: OsString,
    /// Who wrote it, `NAME <EMAIL>` [default: git's configuration].
    #[arg(long, value_name = "WHO")]
    author: Option<String>,
    /// Changed files that git knows first.
    #[arg(short = 'a', long)]
    all: bool,
    /// Though nothing has changed.
    #[arg(long)]
    allow_empty: bool,
    /// In place of the last one.
    #[arg(long)]
    amend: bool,
}

#[derive(Debug, Clone, Args)]
struct PushArgs {
    /// To this remote [default: git's configuration].
    remote: Option<OsString>,
    /// What goes where.
    refspecs: Vec<OsString>,
    /// The branch follows where it was pushed to.
    #[arg(short = 'u', long)]
    set_upstream: bool,
    /// Over what is there, if that is what was last seen there.
    #[arg(long)]
    force_with_lease: bool,
}

#[derive(Debug, Clone, Args)]
struct PullArgs {
    /// From this remote [default: git's configuration].
    remote: Option<OsString>,
    /// This branch.
    branch: Option<OsString>,
    /// Put one's own commits on top.
    #[arg(long, conflicts_with = "ff_only")]
    rebase: bool,
    /// Only if one has no commits of one's own.
    #[arg(long)]
    ff_only: bool,
}

#[derive(Debug, Clone, Args)]
struct BranchArgs {
    /// The branch to make; without one, branches are listed.
    name: Option<OsString>,
    /// Where it begins [default: HEAD].
    start: Option<OsString>,
    /// Those of remotes, too.
    #[arg(short = 'a', long, conflicts_with = "name")]
    all: bool,
    /// Remove the branch.
    #[arg(short = 'd', long, requires = "name", conflicts_with = "start")]
    delete: bool,
    /// Though it is there, or is not merged.
    #[arg(short = 'f', long, requires = "name")]
    force: bool,
}

#[derive(Debug, Clone, Args)]
struct CheckoutArgs {
    /// Branch, tag or commit.
    target: OsString,
    /// Make the branch first.
    #[arg(short = 'b', long)]
    create: bool,
    /// Throw away what was changed.
    #[arg(short = 'f', long)]
    force: bool,
    /// Files to restore from it, behind `--`.
    #[arg(last = true)]
    paths: Vec<OsString>,
}

pub(crate) async fn git(reach: &Reach, args: GitArgs, out: Out) -> Result<(), Fault> {
    let into = match &args.verb {
        GitVerb::Clone(clone) => clone.into.clone(),
        GitVerb::Status { .. }
        | GitVerb::Add { .. }
        | GitVerb::Commit(_)
        | GitVerb::Push(_)
        | GitVerb::Pull(_)
        | GitVerb::Branch(_)
        | GitVerb::Checkout(_) => None,
    };
    let Some(tree) = into.or(args.tree) else {
        return Err(Fault::Usage("name the work tree: -C DIR".to_owned()));
    };
    let mut git = guest::sandbox(reach, args.sandbox).await?.git(tree);
    if let Some(user) = args.user.user {
        git = git.user(user.into_vec());
    }
    for text in args.env {
        let (key, value) = variable(text)?;
        git = git.env(key, value);
    }
    if let Some(timeout) = args.timeout {
        git = git.timeout(timeout);
    }
    Box::pin(verb(&git, args.verb, out)).await
}

async fn verb(git: &Git, verb: GitVerb, out: Out) -> Result<(), Fault> {
    match verb {
        GitVerb::Clone(args) => clone(git, args, out).await,
        GitVerb::Status { ignored } => {
            let status = if ignored {
                git.status_with_ignored().await?
            } else {
                git.status().await?
            };
            out.result(|| status_json(&status), || status_text(&status))
        }
        GitVerb::Add { paths, all } => {
            if all {
                git.add_all().await?;
            } else {
                git.add(paths).await?;
            }
            out.result(|| json!({}), String::new)
        }
        GitVerb::Commit(args) => commit(git, args, out).await,
        GitVerb::Push(args) => push(git, args, out).await,
        GitVerb::Pull(args) => pull(git, args, out).await,
        GitVerb::Branch(args) => branch(git, args, out).await,
        GitVerb::Checkout(args) => {
            let mut checkout = git.checkout(args.target);
            if args.create {
                checkout = checkout.create();
            }
            if args.force {
                checkout = checkout.force();
            }
            for path in args.paths {
                checkout = checkout.path(path);
            }
            head(&checkout.run().await?, out)
        }
    }
}

async fn clone(git: &Git, args: CloneArgs, out: Out) -> Result<(), Fault> {
    let mut clone = git.clone_from(args.url);
    if let Some(branch) = args.branch {
        clone = clone.branch(branch);
    }
    if let Some(depth) = args.depth {
        clone = clone.depth(depth);
    }
    if args.recurse_submodules {
        clone = clone.recurse_submodules();
    }
    progress(clone.stream().await?, out).await
}

async fn commit(git: &Git, args: CommitArgs, out: Out) -> Result<(), Fault> {
    let mut commit = git.commit(args.message);
    if let Some(author) = &args.author {
        let named = author
            .strip_suffix('>')
            .and_then(|author| author.rsplit_once('<'));
        let (name, email) =
            named.ok_or_else(|| Fault::Usage("--author: expected `NAME <EMAIL>`".to_owned()))?;
        commit = commit.author(name.trim_end(), email);
    }
    if args.all {
        commit = commit.all();
    }
    if args.allow_empty {
        commit = commit.allow_empty();
    }
    if args.amend {
        commit = commit.amend();
    }
    head(&commit.run().await?, out)
}

async fn push(git: &Git, args: PushArgs, out: Out) -> Result<(), Fault> {
    let mut push = git.push();
    if let Some(remote) = args.remote {
        push = push.remote(remote);
    }
    for refspec in args.refspecs {
        push = push.refspec(refspec);
    }
    if args.set_upstream {
        push = push.set_upstream();
    }
    if args.force_with_lease {
        push = push.force_with_lease();
    }
    progress(push.stream().await?, out).await
}

async fn pull(git: &Git, args: PullArgs, out: Out) -> Result<(), Fault> {
    let mut pull = git.pull();
    if let Some(remote) = args.remote {
        pull = pull.remote(remote);
    }
    if let Some(branch) = args.branch {
        pull = pull.branch(branch);
    }
    if args.rebase {
        pull = pull.rebase();
    }
    if args.ff_only {
        pull = pull.ff_only();
    }
    progress(pull.stream().await?, out).await
}

async fn branch(git: &Git, args: BranchArgs, out: Out) -> Result<(), Fault> {
    let Some(name) = args.name else {
        let listed = git.branches(args.all).await?;
        return out.result(
            || {
                let branches: Vec<Value> = listed.branches.iter().map(branch_json).collect();
                json!({ "branches": branches, "truncated": listed.truncated })
            },
            || {
                let mut lines: Vec<String> = listed.branches.iter().map(branch_text).collect();
                lines.extend(listed.truncated.then(|| ".. and more".to_owned()));
                lines.join("\n")
            },
        );
    };
    if args.delete {
        git.branch_delete(name, args.force).await?;
    } else {
        git.branch_create(name, args.start.as_deref(), args.force).await?;
    }
    out.result(|| json!({}), String::new)
}

fn head(head: &str, out: Out) -> Result<(), Fault> {
    out.result(|| json!({ "head": head }), || harmless(head))
}

/// What git says goes to stderr as it would; what a guest says moves the cursor only to the line's beginning.
async fn progress(mut progress: GitProgress, out: Out) -> Result<(), Fault> {
    let mut decoder = TextDecoder::new();
    while let Some(event) = progress.next().await {
        match event? {
            GitEvent::Progress(_) if out.json => {}
            GitEvent::Progress(bytes) => print::stderr_raw(&tame(&decoder.push(&bytes))),
            GitEvent::Done { head: at } => head(&at, out)?,
        }
    }
    Ok(())
}

fn tame(text: &str) -> String {
    let mut tame = String::with_capacity(text.len());
    for piece in text.split_inclusive(['\r', '\n']) {
        let line = piece.trim_end_matches(['\r', '\n']);
        tame.push_str(&harmless(line));
        tame.push_str(piece.strip_prefix(line).unwrap_or_default());
    }
    tame
}

fn status_text(status: &AgentGitStatusReply) -> String {
    let mut text = if status.branch.is_empty() {
        String::from("## HEAD (no branch)")
    } else {
        format!("## {}", guest::shown(&status.branch))
    };
    if !status.upstream.is_empty() {
        // Writing to a String does not fail.
        write!(text, "...{}", guest::shown(&status.upstream)).ok();
    }
    let sides = [("ahead", status.ahead), ("behind", status.behind)];
    let apart: Vec<String> = sides
        .into_iter()
        .filter_map(|(side, count)| Some(format!("{side} {}", count.filter(|count| *count > 0)?)))
        .collect();
    if !apart.is_empty() {
        write!(text, " [{}]", apart.join(", ")).ok();
    }
    for entry in &status.entries {
        let letter = |letter: &str| harmless(letter).replace('.', " ");
        let from = if entry.from.is_empty() {
            String::new()
        } else {
            format!("{} -> ", guest::shown(&entry.from))
        };
        let (index, tree) = (letter(&entry.index), letter(&entry.worktree));
        write!(text, "\n{index}{tree} {from}{}", guest::shown(&entry.path)).ok();
    }
    if status.truncated {
        text.push_str("\n.. and more");
    }
    text
}

fn status_json(status: &AgentGitStatusReply) -> Value {
    let mut object = guest::object([("branch", &status.branch), ("upstream", &status.upstream)]);
    let fields = json!({
        "head": status.head,
        "ahead": status.ahead,
        "behind": status.behind,
        "entries": status.entries.iter().map(entry_json).collect::<Vec<_>>(),
        "truncated": status.truncated,
    });
    if let Value::Object(mut fields) = fields {
        object.append(&mut fields);
    }
    Value::Object(object)
}

fn entry_json(entry: &GitEntry) -> Value {
    let mut object = guest::object([("path", &entry.path)]);
    if !entry.from.is_empty() {
        object.append(&mut guest::object([("from", &entry.from)]));
    }
    object.insert("index".to_owned(), json!(entry.index));
    object.insert("worktree".to_owned(), json!(entry.worktree));
    object.insert("unmerged".to_owned(), json!(entry.unmerged));
    Value::Object(object)
}

fn branch_text(branch: &GitBranchEntry) -> String {
    let sign = if branch.current { '*' } else { ' ' };
    let upstream = if branch.upstream.is_empty() {
        String::new()
    } else {
        format!(" [{}]", guest::shown(&branch.upstream))
    };
    let head: String = branch.head.chars().take(12).collect();
    format!(
        "{sign} {} {}{upstream}",
        guest::shown(&branch.name),
        harmless(&head)
    )
}

fn branch_json(branch: &GitBranchEntry) -> Value {
    let mut object = guest::object([("name", &branch.name), ("upstream", &branch.upstream)]);
    object.insert("head".to_owned(), json!(branch.head));
    object.insert("current".to_owned(), json!(branch.current));
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_writes_over_its_own_line_and_no_other() {
        assert_eq!(
            tame("Counting: 1%\rCounting: 2%\r\ndone\n"),
            "Counting: 1%\rCounting: 2%\r\ndone\n"
        );
        assert_eq!(tame("\u{1b}[2J\rx"), "\\u{1b}[2J\rx");
    }

    #[test]
    fn a_status_reads_as_git_s_own() {
        let entry = |index: &str, worktree: &str, path: &'static [u8], from: &'static str| GitEntry {
            path: path.into(),
            from: from.into(),
            index: index.to_owned(),
            worktree: worktree.to_owned(),
            unmerged: false,
        };
        let status = AgentGitStatusReply {
            branch: "main".into(),
            upstream: "origin/main".into(),
            ahead: Some(2),
            behind: Some(0),
            entries: vec![
                entry(".", "M", b"a\n", ""),
                entry("R", ".", b"c", "b"),
                entry("?", "?", b"\xff", ""),
            ],
            ..AgentGitStatusReply::default()
        };
        assert_eq!(
            status_text(&status),
            "## main...origin/main [ahead 2]\n M a\\n\nR  b -> c\n?? \u{fffd}"
        );
        let json = status_json(&status);
        assert_eq!(json["entries"][2]["path_base64"], "/w==");
        assert_eq!(json["entries"][1]["from"], "b");
        assert_eq!(
            status_text(&AgentGitStatusReply::default()),
            "## HEAD (no branch)"
        );
    }
}
