//! From requests to arguments of git. Pure. What a client names is never taken for an option: it comes behind `--`, in
//! one argument with its option, or is refused.

use bytes::Bytes;
use sandbox_protocol::{
    limits::PATH,
    reason::Reason,
    v1::{
        AgentGitAddRequest, AgentGitBranchRequest, AgentGitCheckoutRequest, AgentGitCloneRequest,
        AgentGitCommitRequest, AgentGitPullRequest, AgentGitPushRequest, AgentGitStatusRequest, EnvVar,
        GitBranchCreate, GitBranchDelete, GitBranchList,
    },
};

use crate::refusal::{Escaped, Refusal};

/// Arguments of one git, its name first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Args(pub(super) Vec<Bytes>);

impl Args {
    /// `git`, as a machine wants it: no pager, paths as they are, and no jobs left behind, which would be ended with it.
    fn new(verb: &'static str) -> Self {
        let start = [
            "git",
            "--no-pager",
            "--literal-pathspecs",
            "-c",
            "gc.auto=0",
            "-c",
            "maintenance.auto=false",
            verb,
        ];
        Self(start.map(|text| Bytes::from_static(text.as_bytes())).into())
    }

    fn flag(mut self, text: &'static str) -> Self {
        self.0.push(Bytes::from_static(text.as_bytes()));
        self
    }

    fn flag_if(self, wanted: bool, text: &'static str) -> Self {
        if wanted { self.flag(text) } else { self }
    }

    /// `--option=value`; nothing for no value.
    fn option(mut self, prefix: &'static str, value: &[u8]) -> Self {
        if !value.is_empty() {
            self.0.push([prefix.as_bytes(), value].concat().into());
        }
        self
    }

    /// `--`, and then what is no option whatever it looks like.
    fn names(mut self, names: impl IntoIterator<Item = Bytes>) -> Self {
        self = self.flag("--");
        self.0.extend(names);
        self
    }
}

fn invalid(message: &str) -> Refusal {
    Refusal::new(Reason::FieldInvalid, message)
}

/// A name that git is to find: given, and no option.
fn name(field: &str, value: &Bytes) -> Result<Bytes, Refusal> {
    if value.is_empty() || value.starts_with(b"-") {
        let message = format!("{field} `{}` is empty or begins with `-`", Escaped(value, 64));
        return Err(invalid(&message));
    }
    Ok(value.clone())
}

pub(super) fn clone(request: &AgentGitCloneRequest, into: &Bytes) -> Result<Args, Refusal> {
    if !into.starts_with(b"/") || into.len() > PATH || into.contains(&0) {
        let message = "the work tree's path is not absolute, too long, or holds NUL";
        return Err(Refusal::new(Reason::InvalidPath, message).with_path(into));
    }
    let url = name("url", &request.url)?;
    let depth = match request.depth {
        0 => String::new(),
        depth => depth.to_string(),
    };
    Ok(Args::new("clone")
        .flag("--progress")
        .option("--branch=", &request.branch)
        .option("--depth=", depth.as_bytes())
        .flag_if(request.recurse_submodules, "--recurse-submodules")
        .names([url, into.clone()]))
}

/// Also without taking the index's lock, which a client at work may want.
pub(super) fn status(request: &AgentGitStatusRequest) -> Args {
    Args::new("status")
        .flag("--porcelain=v2")
        .flag("--branch")
        .flag("-z")
        .flag("--untracked-files=normal")
        .flag_if(request.ignored, "--ignored")
}

pub(super) fn add(request: &AgentGitAddRequest) -> Result<Args, Refusal> {
    if request.all != request.paths.is_empty() {
        return Err(invalid("give paths, or all"));
    }
    Ok(Args::new("add")
        .flag_if(request.all, "--all")
        .names(request.paths.iter().cloned()))
}

/// And the variables that go with it.
pub(super) fn commit(request: &AgentGitCommitRequest) -> Result<(Args, Vec<EnvVar>), Refusal> {
    let (author, email) = (&request.author_name, &request.author_email);
    if author.is_empty() != email.is_empty() {
        return Err(invalid("give author_name and author_email, or none of them"));
    }
    // In a sandbox nobody may have told git who commits.
    let env = match author.is_empty() {
        true => Vec::new(),
        false => vec![
            variable("GIT_AUTHOR_NAME", author),
            variable("GIT_AUTHOR_EMAIL", email),
            variable("GIT_COMMITTER_NAME", author),
            variable("GIT_COMMITTER_EMAIL", email),
        ],
    };
    let kept = request.amend && request.message.is_empty();
    let author = match request.amend && !author.is_empty() {
        true => [author, &b" <"[..], email, b">"].concat(),
        false => Vec::new(),
    };
    let mut args = Args::new("commit")
        .flag("--no-status")
        .flag_if(request.all, "--all")
        .flag_if(request.allow_empty, "--allow-empty")
        .flag_if(request.amend, "--amend")
        .flag_if(kept, "--no-edit")
        .option("--author=", &author);
    if !kept {
        args.0.push([b"--message=", &request.message[..]].concat().into());
    }
    Ok((args, env))
}

fn variable(key: &'static str, value: &Bytes) -> EnvVar {
    EnvVar {
        key: Bytes::from_static(key.as_bytes()),
        value: value.clone(),
    }
}

pub(super) fn push(request: &AgentGitPushRequest) -> Result<Args, Refusal> {
    let names = remote_and(&request.remote, &request.refspecs)?;
    Ok(Args::new("push")
        .flag("--progress")
        .flag_if(request.set_upstream, "--set-upstream")
        .flag_if(request.force_with_lease, "--force-with-lease")
        .names(names))
}

pub(super) fn pull(request: &AgentGitPullRequest) -> Result<Args, Refusal> {
    if request.rebase && request.ff_only {
        return Err(invalid("rebase and ff_only exclude each other"));
    }
    let branch: Vec<Bytes> = (!request.branch.is_empty())
        .then(|| request.branch.clone())
        .into_iter()
        .collect();
    let names = remote_and(&request.remote, &branch)?;
    let manner = match (request.rebase, request.ff_only) {
        (true, _) => "--rebase",
        (false, true) => "--ff-only",
        // Said, so that what happens to branches that went apart does not hang on the guest's configuration.
        (false, false) => "--no-rebase",
    };
    Ok(Args::new("pull")
        .flag("--progress")
        .flag("--no-edit")
        .flag(manner)
        .names(names))
}

/// A remote and what of it; git would take the first name for the remote.
fn remote_and(remote: &Bytes, names: &[Bytes]) -> Result<Vec<Bytes>, Refusal> {
    if remote.is_empty() {
        return match names {
            [] => Ok(Vec::new()),
            [_, ..] => Err(invalid("what is to be moved is named, and its remote is not")),
        };
    }
    let mut all = vec![name("remote", remote)?];
    for ref_name in names {
        all.push(name("a refspec", ref_name)?);
    }
    Ok(all)
}

/// Fields of a branch, each ended by NUL; a record ends with a newline, which no name can hold.
const BRANCH: &str =
    "--format=%(refname:lstrip=2)%00%(objectname)%00%(HEAD)%00%(upstream:lstrip=2)%00%(symref)";

pub(super) fn branches(list: GitBranchList) -> Args {
    let args = Args::new("for-each-ref").flag(BRANCH).flag("refs/heads");
    args.flag_if(list.remotes, "refs/remotes")
}

pub(super) fn branch_create(create: &GitBranchCreate) -> Result<Args, Refusal> {
    let mut names = vec![name("name", &create.name)?];
    if !create.start.is_empty() {
        names.push(name("start", &create.start)?);
    }
    Ok(Args::new("branch").flag_if(create.force, "--force").names(names))
}

pub(super) fn branch_delete(delete: &GitBranchDelete) -> Result<Args, Refusal> {
    Ok(Args::new("branch")
        .flag("--delete")
        .flag_if(delete.force, "--force")
        .names([name("name", &delete.name)?]))
}

pub(super) fn checkout(request: &AgentGitCheckoutRequest) -> Result<Args, Refusal> {
    let mut args = Args::new("checkout")
        .flag("--no-progress")
        .flag_if(request.force, "--force");
    if !request.paths.is_empty() {
        if request.create {
            return Err(invalid("a branch is made, or paths are restored"));
        }
        if !request.target.is_empty() {
            args.0.push(name("target", &request.target)?);
        }
        return Ok(args.names(request.paths.iter().cloned()));
    }
    args = args.flag_if(request.create, "-b");
    args.0.push(name("target", &request.target)?);
    Ok(args.names([]))
}

pub(super) fn head() -> Args {
    Args::new("rev-parse")
        .flag("--verify")
        .flag("--quiet")
        .flag("HEAD")
}

pub(super) fn branch_request(request: &AgentGitBranchRequest) -> Result<(Args, bool), Refusal> {
    use sandbox_protocol::v1::agent_git_branch_request::What;
    match &request.what {
        Some(What::List(list)) => Ok((branches(*list), true)),
        Some(What::Create(create)) => Ok((branch_create(create)?, false)),
        Some(What::Delete(delete)) => Ok((branch_delete(delete)?, false)),
        None => Err(invalid("say what: list, create or delete")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(args: &Args) -> Vec<String> {
        let own = args.0.iter().skip(7);
        own.map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
    }

    #[test]
    fn names_are_never_options() {
        let evil = Bytes::from_static(b"--upload-pack=x");
        let clone_of = |url: &Bytes| AgentGitCloneRequest {
            url: url.clone(),
            ..Default::default()
        };
        assert!(clone(&clone_of(&evil), &"/w".into()).is_err());
        let branch = AgentGitCloneRequest {
            branch: evil.clone(),
            depth: 3,
            ..clone_of(&"u".into())
        };
        assert_eq!(
            shown(&clone(&branch, &"/w".into()).unwrap()),
            [
                "clone",
                "--progress",
                "--branch=--upload-pack=x",
                "--depth=3",
                "--",
                "u",
                "/w"
            ]
        );
        let added = AgentGitAddRequest {
            paths: vec![evil.clone()],
            ..Default::default()
        };
        assert_eq!(shown(&add(&added).unwrap()), ["add", "--", "--upload-pack=x"]);
        let target = AgentGitCheckoutRequest {
            target: evil.clone(),
            ..Default::default()
        };
        assert!(checkout(&target).is_err());
        let pushed = AgentGitPushRequest {
            remote: evil.clone(),
            ..Default::default()
        };
        assert!(push(&pushed).is_err());
        let pulled = AgentGitPullRequest {
            remote: "o".into(),
            branch: evil.clone(),
            ..Default::default()
        };
        assert!(pull(&pulled).is_err());
        let made = GitBranchCreate {
            name: "b".into(),
            start: evil.clone(),
            force: false,
        };
        assert!(branch_create(&made).is_err());
        let gone = GitBranchDelete {
            name: evil,
            force: true,
        };
        assert!(branch_delete(&gone).is_err());
    }

    #[test]
    fn what_contradicts_itself_is_refused_by_name() {
        let reason = |refused: Result<Args, Refusal>| refused.unwrap_err().reason;
        assert_eq!(reason(add(&AgentGitAddRequest::default())), Reason::FieldInvalid);
        let both = AgentGitAddRequest {
            paths: vec!["a".into()],
            all: true,
            ..Default::default()
        };
        assert_eq!(reason(add(&both)), Reason::FieldInvalid);
        let nowhere = AgentGitPushRequest {
            refspecs: vec!["main".into()],
            ..Default::default()
        };
        assert_eq!(reason(push(&nowhere)), Reason::FieldInvalid);
        let both = AgentGitPullRequest {
            rebase: true,
            ff_only: true,
            ..Default::default()
        };
        assert_eq!(reason(pull(&both)), Reason::FieldInvalid);
        let half = AgentGitCommitRequest {
            author_name: "a".into(),
            ..Default::default()
        };
        assert_eq!(commit(&half).unwrap_err().reason, Reason::FieldInvalid);
        let relative = AgentGitCloneRequest {
            url: "u".into(),
            ..Default::default()
        };
        assert_eq!(reason(clone(&relative, &"w".into())), Reason::InvalidPath);
    }
}
