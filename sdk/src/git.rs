//! A guest's git.
//!
//! May call: sandbox, guest, client, retry, error.
//! Never inside: a credential: those are the host's, and never in a guest.
//! Cancel safety: dropping a clone, push or pull ends it in the guest; what git leaves of it is there.

use std::{
    ffi::OsStr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use sandbox_protocol::v1::{
    AgentGitAddRequest, AgentGitBranchReply, AgentGitBranchRequest, AgentGitCheckoutRequest,
    AgentGitCloneRequest, AgentGitCommitRequest, AgentGitPullRequest, AgentGitPushRequest,
    AgentGitStatusReply, AgentGitStatusRequest, EnvVar, GitBranchCreate, GitBranchDelete, GitBranchList,
    GitContext, GitOut, agent_git_branch_request::What, git_out,
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    client::{Client, via},
    error::Error,
    guest,
    retry::Repeat,
    sandbox::SandboxHandle,
};

impl SandboxHandle {
    /// The guest's git, in this work tree; for [`Git::clone_from`], where it shall be. Absolute.
    #[must_use]
    pub fn git(&self, tree: impl AsRef<OsStr>) -> Git {
        Git {
            sandbox: self.clone(),
            context: GitContext {
                path: guest::bytes(tree),
                ..GitContext::default()
            },
            limit: None,
            wrong: None,
        }
    }
}

/// The guest's git in one work tree. Made by [`SandboxHandle::git`]. Reasons of all its calls: GIT_MISSING; GIT_FAILED
/// with git's exit code and the end of what it said; those of a program's start.
#[derive(Debug, Clone)]
pub struct Git {
    sandbox: SandboxHandle,
    context: GitContext,
    /// Of a call that answers once.
    limit: Option<Duration>,
    wrong: Option<(&'static str, &'static str)>,
}

impl Git {
    /// As this user: name or number, `[:group]`. Default: the claim's, else root.
    #[must_use]
    pub fn user(mut self, user: impl Into<Bytes>) -> Self {
        self.context.user = user.into();
        self
    }

    /// An environment variable, over those of the claim and the image.
    #[must_use]
    pub fn env(mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        let (key, value) = (key.into(), value.into());
        self.context.env.push(EnvVar { key, value });
        self
    }

    /// Time of git itself. Default: none, but for calls that answer once the client's time.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        match u32::try_from(timeout.as_nanos().div_ceil(1_000_000)) {
            Ok(ms @ 1..) => {
                self.context.timeout_ms = ms;
                // The guest answers that it was over.
                self.limit = Some(timeout.saturating_add(self.sandbox.client().timeout()));
            }
            Ok(0) | Err(_) => self.wrong = Some(("timeout_ms", "1 ms to 2^32 - 1 ms")),
        }
        self
    }

    fn context(&self) -> Result<Option<GitContext>, Error> {
        match self.wrong {
            Some((field, allowed)) => Err(Error::invalid(field, allowed.to_owned())),
            None => Ok(Some(self.context.clone())),
        }
    }

    /// Branch, upstream and what has changed; at most 10,000 entries.
    ///
    /// # Errors
    /// Those of all.
    pub async fn status(&self) -> Result<AgentGitStatusReply, Error> {
        self.look(false).await
    }

    /// As [`status`](Self::status), with files that git ignores.
    ///
    /// # Errors
    /// Those of all.
    pub async fn status_with_ignored(&self) -> Result<AgentGitStatusReply, Error> {
        self.look(true).await
    }

    /// A call that tells how git goes.
    async fn watched<M, S, F>(&self, message: &M, send: S) -> Result<GitProgress, Error>
    where
        M: Clone,
        S: Fn(Client, Request<M>) -> F,
        F: Future<Output = Result<Response<Streaming<GitOut>>, Status>>,
    {
        let replies = guest::open(&self.sandbox, Repeat::OnWord, message, send).await?;
        Ok(GitProgress::new(replies))
    }

    async fn look(&self, ignored: bool) -> Result<AgentGitStatusReply, Error> {
        let message = AgentGitStatusRequest {
            context: self.context()?,
            ignored,
        };
        let terms = (Repeat::Harmless, self.limit);
        guest::ask(&self.sandbox, terms, &message, via!(agent_client.git_status)).await
    }

    /// Takes these files into the index.
    ///
    /// # Errors
    /// Those of all.
    pub async fn add<I>(&self, paths: I) -> Result<(), Error>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let paths = paths.into_iter().map(guest::bytes).collect();
        self.stage(paths, false).await
    }

    /// Takes all that has changed into the index.
    ///
    /// # Errors
    /// Those of all.
    pub async fn add_all(&self) -> Result<(), Error> {
        self.stage(Vec::new(), true).await
    }

    async fn stage(&self, paths: Vec<Bytes>, all: bool) -> Result<(), Error> {
        let message = AgentGitAddRequest {
            context: self.context()?,
            paths,
            all,
        };
        let terms = (Repeat::OnWord, self.limit);
        guest::ask(&self.sandbox, terms, &message, via!(agent_client.git_add)).await?;
        Ok(())
    }

    /// Commits what is in the index.
    pub fn commit(&self, message: impl AsRef<OsStr>) -> GitCommit {
        GitCommit {
            git: self.clone(),
            message: AgentGitCommitRequest {
                message: guest::bytes(message),
                ..AgentGitCommitRequest::default()
            },
        }
    }

    /// Clones into the work tree's path.
    pub fn clone_from(&self, url: impl AsRef<OsStr>) -> GitClone {
        GitClone {
            git: self.clone(),
            message: AgentGitCloneRequest {
                url: guest::bytes(url),
                ..AgentGitCloneRequest::default()
            },
        }
    }

    /// Pushes; by git's configuration unless told otherwise.
    pub fn push(&self) -> GitPush {
        GitPush {
            git: self.clone(),
            message: AgentGitPushRequest::default(),
        }
    }

    /// Pulls; by git's configuration unless told otherwise.
    pub fn pull(&self) -> GitPull {
        GitPull {
            git: self.clone(),
            message: AgentGitPullRequest::default(),
        }
    }

    async fn branch(&self, repeat: Repeat, what: What) -> Result<AgentGitBranchReply, Error> {
        let message = AgentGitBranchRequest {
            context: self.context()?,
            what: Some(what),
        };
        let terms = (repeat, self.limit);
        guest::ask(&self.sandbox, terms, &message, via!(agent_client.git_branch)).await
    }

    /// Its branches, at most 10,000; with `remotes` those of the remotes too.
    ///
    /// # Errors
    /// Those of all.
    pub async fn branches(&self, remotes: bool) -> Result<AgentGitBranchReply, Error> {
        let what = What::List(GitBranchList { remotes });
        self.branch(Repeat::Harmless, what).await
    }

    /// Makes a branch, at `start` or else where HEAD is. `force`: though it is there.
    ///
    /// # Errors
    /// Those of all.
    pub async fn branch_create(
        &self,
        name: impl AsRef<OsStr>,
        start: Option<&OsStr>,
        force: bool,
    ) -> Result<(), Error> {
        let create = GitBranchCreate {
            name: guest::bytes(name),
            start: start.map(guest::bytes).unwrap_or_default(),
            force,
        };
        self.branch(Repeat::OnWord, What::Create(create)).await?;
        Ok(())
    }

    /// Removes a branch. `force`: though it is not merged.
    ///
    /// # Errors
    /// Those of all.
    pub async fn branch_delete(&self, name: impl AsRef<OsStr>, force: bool) -> Result<(), Error> {
        let delete = GitBranchDelete {
            name: guest::bytes(name),
            force,
        };
        self.branch(Repeat::OnWord, What::Delete(delete)).await?;
        Ok(())
    }

    /// Moves HEAD, or restores files.
    pub fn checkout(&self, target: impl AsRef<OsStr>) -> GitCheckout {
        GitCheckout {
            git: self.clone(),
            message: AgentGitCheckoutRequest {
                target: guest::bytes(target),
                ..AgentGitCheckoutRequest::default()
            },
        }
    }
}

/// A commit in the making. Made by [`Git::commit`].
#[derive(Debug, Clone)]
#[must_use = "nothing is committed until `run` is called"]
pub struct GitCommit {
    git: Git,
    message: AgentGitCommitRequest,
}

impl GitCommit {
    /// Who wrote it. Default: git's configuration.
    pub fn author(mut self, name: impl AsRef<OsStr>, email: impl AsRef<OsStr>) -> Self {
        self.message.author_name = guest::bytes(name);
        self.message.author_email = guest::bytes(email);
        self
    }

    /// Adds changed files that git knows first.
    pub fn all(mut self) -> Self {
        self.message.all = true;
        self
    }

    /// Though nothing has changed.
    pub fn allow_empty(mut self) -> Self {
        self.message.allow_empty = true;
        self
    }

    /// In place of the last one.
    pub fn amend(mut self) -> Self {
        self.message.amend = true;
        self
    }

    /// Commits, and gives the commit's name.
    ///
    /// # Errors
    /// Those of all.
    pub async fn run(mut self) -> Result<String, Error> {
        self.message.context = self.git.context()?;
        let terms = (Repeat::OnWord, self.git.limit);
        let sent = guest::ask(
            &self.git.sandbox,
            terms,
            &self.message,
            via!(agent_client.git_commit),
        );
        Ok(sent.await?.head)
    }
}

/// A checkout in the making. Made by [`Git::checkout`].
#[derive(Debug, Clone)]
#[must_use = "nothing is checked out until `run` is called"]
pub struct GitCheckout {
    git: Git,
    message: AgentGitCheckoutRequest,
}

impl GitCheckout {
    /// Makes the branch first.
    pub fn create(mut self) -> Self {
        self.message.create = true;
        self
    }

    /// Throws away what was changed.
    pub fn force(mut self) -> Self {
        self.message.force = true;
        self
    }

    /// Restores this file from the target instead of moving HEAD; may be repeated.
    pub fn path(mut self, path: impl AsRef<OsStr>) -> Self {
        self.message.paths.push(guest::bytes(path));
        self
    }

    /// Checks out, and gives the commit that HEAD is at.
    ///
    /// # Errors
    /// Those of all.
    pub async fn run(mut self) -> Result<String, Error> {
        self.message.context = self.git.context()?;
        let terms = (Repeat::OnWord, self.git.limit);
        let sent = guest::ask(
            &self.git.sandbox,
            terms,
            &self.message,
            via!(agent_client.git_checkout),
        );
        Ok(sent.await?.head)
    }
}

/// A clone in the making. Made by [`Git::clone_from`].
#[derive(Debug, Clone)]
#[must_use = "nothing is cloned until `stream` or `run` is called"]
pub struct GitClone {
    git: Git,
    message: AgentGitCloneRequest,
}

impl GitClone {
    /// This branch.
    pub fn branch(mut self, branch: impl AsRef<OsStr>) -> Self {
        self.message.branch = guest::bytes(branch);
        self
    }

    /// So many commits of history. Default: all.
    pub fn depth(mut self, commits: u32) -> Self {
        self.message.depth = commits;
        self
    }

    /// With submodules.
    pub fn recurse_submodules(mut self) -> Self {
        self.message.recurse_submodules = true;
        self
    }

    /// Clones, and tells how it goes.
    ///
    /// # Errors
    /// Those of all.
    pub async fn stream(mut self) -> Result<GitProgress, Error> {
        self.message.context = self.git.context()?;
        self.git
            .watched(&self.message, via!(agent_client.git_clone))
            .await
    }

    /// Clones, and gives the commit that HEAD is at; empty: none yet.
    ///
    /// # Errors
    /// Those of all.
    pub async fn run(self) -> Result<String, Error> {
        self.stream().await?.wait().await
    }
}

/// A push in the making. Made by [`Git::push`].
#[derive(Debug, Clone)]
#[must_use = "nothing is pushed until `stream` or `run` is called"]
pub struct GitPush {
    git: Git,
    message: AgentGitPushRequest,
}

impl GitPush {
    /// To this remote.
    pub fn remote(mut self, remote: impl AsRef<OsStr>) -> Self {
        self.message.remote = guest::bytes(remote);
        self
    }

    /// What goes where; may be repeated.
    pub fn refspec(mut self, refspec: impl AsRef<OsStr>) -> Self {
        self.message.refspecs.push(guest::bytes(refspec));
        self
    }

    /// The branch follows where it was pushed to.
    pub fn set_upstream(mut self) -> Self {
        self.message.set_upstream = true;
        self
    }

    /// Over what is there, if that is what was last seen there.
    pub fn force_with_lease(mut self) -> Self {
        self.message.force_with_lease = true;
        self
    }

    /// Pushes, and tells how it goes.
    ///
    /// # Errors
    /// Those of all.
    pub async fn stream(mut self) -> Result<GitProgress, Error> {
        self.message.context = self.git.context()?;
        self.git.watched(&self.message, via!(agent_client.git_push)).await
    }

    /// Pushes, and gives the commit that HEAD is at.
    ///
    /// # Errors
    /// Those of all.
    pub async fn run(self) -> Result<String, Error> {
        self.stream().await?.wait().await
    }
}

/// A pull in the making. Made by [`Git::pull`].
#[derive(Debug, Clone)]
#[must_use = "nothing is pulled until `stream` or `run` is called"]
pub struct GitPull {
    git: Git,
    message: AgentGitPullRequest,
}

impl GitPull {
    /// From this remote.
    pub fn remote(mut self, remote: impl AsRef<OsStr>) -> Self {
        self.message.remote = guest::bytes(remote);
        self
    }

    /// This branch.
    pub fn branch(mut self, branch: impl AsRef<OsStr>) -> Self {
        self.message.branch = guest::bytes(branch);
        self
    }

    /// Puts one's own commits on top.
    pub fn rebase(mut self) -> Self {
        self.message.rebase = true;
        self
    }

    /// Only if one has no commits of one's own.
    pub fn ff_only(mut self) -> Self {
        self.message.ff_only = true;
        self
    }

    /// Pulls, and tells how it goes.
    ///
    /// # Errors
    /// Those of all.
    pub async fn stream(mut self) -> Result<GitProgress, Error> {
        self.message.context = self.git.context()?;
        self.git.watched(&self.message, via!(agent_client.git_pull)).await
    }

    /// Pulls, and gives the commit that HEAD is at.
    ///
    /// # Errors
    /// Those of all.
    pub async fn run(self) -> Result<String, Error> {
        self.stream().await?.wait().await
    }
}

/// How a clone, push or pull goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GitEvent {
    /// What git says of its progress, as it says it: lines that end with a carriage return are written over.
    Progress(Bytes),
    /// It is done, and the call ended in order. The last event.
    Done {
        /// The commit that HEAD is at; empty: none yet.
        head: String,
    },
}

/// A clone, push or pull under way, a `Stream`. Dropping it ends git.
#[derive(Debug)]
pub struct GitProgress {
    /// None once it has ended.
    replies: Option<Streaming<GitOut>>,
    head: Option<String>,
}

impl GitProgress {
    fn new(replies: Streaming<GitOut>) -> Self {
        Self {
            replies: Some(replies),
            head: None,
        }
    }

    /// The next event; nothing after the last or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<GitEvent, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// Reads to the end and gives the commit that HEAD is at.
    ///
    /// # Errors
    /// As the events.
    pub async fn wait(mut self) -> Result<String, Error> {
        loop {
            match self.next().await {
                Some(Ok(GitEvent::Done { head })) => return Ok(head),
                Some(Ok(GitEvent::Progress(_))) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(Error::unfinished("the end was read before")),
            }
        }
    }
}

impl Stream for GitProgress {
    type Item = Result<GitEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match message.m {
                    Some(git_out::M::Progress(chunk)) if self.head.is_none() => {
                        return Poll::Ready(Some(Ok(GitEvent::Progress(chunk.data))));
                    }
                    // It counts only once the call has ended in order.
                    Some(git_out::M::Done(done)) if self.head.is_none() => {
                        self.head = Some(done.head);
                        continue;
                    }
                    Some(_) => Err(Error::unfinished("a message came after git's end")),
                    // Of a newer agent.
                    None => continue,
                },
                Some(Err(status)) => Err(Error::from_status(status)),
                None => match self.head.take() {
                    Some(head) => Ok(GitEvent::Done { head }),
                    None => Err(Error::unfinished("the call ended without git's end")),
                },
            };
            self.replies = None;
            return Poll::Ready(Some(outcome));
        }
    }
}
