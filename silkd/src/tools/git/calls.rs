//! The calls: which git is run, and what its end means.

use futures_util::stream;
use sandbox_protocol::{
    reason::Reason,
    v1::{
        AgentGitAddRequest, AgentGitBranchReply, AgentGitBranchRequest, AgentGitCheckoutRequest,
        AgentGitCloneRequest, AgentGitCommitRequest, AgentGitPullRequest, AgentGitPushRequest,
        AgentGitStatusReply, AgentGitStatusRequest, Chunk, GitContext, GitDone, GitOut, git_out::M,
    },
};
use tonic::{Status, codegen::BoxStream};

use super::{
    porcelain::{Malformed, Porcelain},
    refs::Refs,
    verbs::{self, Args},
    work::{Git, Running, Said},
};
use crate::{
    refusal::Refusal,
    run::{ExecCtx, Runner},
};

/// Clones. Cancel safe: dropped, it ends git, at once; what there is of the work tree then is left.
///
/// # Errors
/// `INVALID_PATH`, `FIELD_INVALID`, `GIT_MISSING` and those of a start; later, in the stream, `GIT_FAILED`.
pub async fn clone(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitCloneRequest,
) -> Result<BoxStream<GitOut>, Refusal> {
    let context = given(&request.context)?;
    let args = verbs::clone(&request, &context.path)?;
    let git = Git::new(runner, ctx, context);
    let running = git.start_at(b"/", &args).await?;
    Ok(progress(git, running))
}

/// Pushes. Cancel safe, as [`clone`].
///
/// # Errors
/// As [`clone`].
pub async fn push(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitPushRequest,
) -> Result<BoxStream<GitOut>, Refusal> {
    let git = Git::new(runner, ctx, given(&request.context)?);
    network(git, &verbs::push(&request)?).await
}

/// Fetches and joins. Cancel safe, as [`clone`].
///
/// # Errors
/// As [`clone`].
pub async fn pull(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitPullRequest,
) -> Result<BoxStream<GitOut>, Refusal> {
    let git = Git::new(runner, ctx, given(&request.context)?);
    network(git, &verbs::pull(&request)?).await
}

/// What has changed. Cancel safe: dropped, it ends git.
///
/// # Errors
/// `INVALID_PATH`, `FIELD_INVALID`, `GIT_MISSING`, `GIT_FAILED`, and those of a start.
pub async fn status(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitStatusRequest,
) -> Result<AgentGitStatusReply, Refusal> {
    let mut git = Git::new(runner, ctx, given(&request.context)?);
    let mut porcelain = Porcelain::default();
    git.read(&verbs::status(&request), |bytes| {
        porcelain.feed(bytes).map_err(|malformed| unread(&malformed))
    })
    .await?;
    porcelain.finish().map_err(|malformed| unread(&malformed))
}

/// Adds to the index. Cancel safe: dropped, it ends git.
///
/// # Errors
/// As [`status`].
pub async fn add(runner: &Runner, ctx: ExecCtx, request: AgentGitAddRequest) -> Result<(), Refusal> {
    let mut git = Git::new(runner, ctx, given(&request.context)?);
    git.obey(&verbs::add(&request)?).await
}

/// Commits; gives the commit. Cancel safe: dropped, it ends git.
///
/// # Errors
/// As [`status`].
pub async fn commit(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitCommitRequest,
) -> Result<String, Refusal> {
    let (args, env) = verbs::commit(&request)?;
    let mut git = Git::new(runner, ctx, given(&request.context)?);
    git.env(env);
    git.obey(&args).await?;
    git.head().await
}

/// Lists, makes or deletes branches. Cancel safe: dropped, it ends git.
///
/// # Errors
/// As [`status`].
pub async fn branch(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitBranchRequest,
) -> Result<AgentGitBranchReply, Refusal> {
    let mut git = Git::new(runner, ctx, given(&request.context)?);
    let (args, list) = verbs::branch_request(&request)?;
    if !list {
        git.obey(&args).await?;
        return Ok(AgentGitBranchReply::default());
    }
    let mut refs = Refs::default();
    git.read(&args, |bytes| Ok(refs.feed(bytes))).await?;
    refs.finish()
        .ok_or_else(|| Refusal::new(Reason::GitFailed, "git's list of branches cannot be read"))
}

/// Moves HEAD or restores files; gives where HEAD is then. Cancel safe: dropped, it ends git.
///
/// # Errors
/// As [`status`].
pub async fn checkout(
    runner: &Runner,
    ctx: ExecCtx,
    request: AgentGitCheckoutRequest,
) -> Result<String, Refusal> {
    let mut git = Git::new(runner, ctx, given(&request.context)?);
    git.obey(&verbs::checkout(&request)?).await?;
    git.head().await
}

fn given(context: &Option<GitContext>) -> Result<GitContext, Refusal> {
    let missing = || Refusal::new(Reason::FieldInvalid, "a git call without context");
    let context = context.clone().ok_or_else(missing)?;
    if context.path.is_empty() {
        return Err(Refusal::new(Reason::InvalidPath, "a git call without path"));
    }
    Ok(context)
}

fn unread(malformed: &Malformed) -> Refusal {
    Refusal::new(
        Reason::GitFailed,
        format!("git's status cannot be read: {malformed}"),
    )
}

async fn network(git: Git, args: &Args) -> Result<BoxStream<GitOut>, Refusal> {
    let running = git.start(args, true).await?;
    Ok(progress(git, running))
}

/// What git says, as it says it, then where HEAD is.
fn progress(git: Git, running: Running) -> BoxStream<GitOut> {
    let state = Some(Box::new((git, running)));
    Box::pin(stream::unfold(state, async |state| {
        let mut state = state?;
        let said = next(&mut state).await;
        let goes_on = matches!(&said, Ok(M::Progress(_)));
        let said = said.map(|m| GitOut { m: Some(m) }).map_err(Status::from);
        Some((said, goes_on.then_some(state)))
    }))
}

async fn next(state: &mut (Git, Running)) -> Result<M, Refusal> {
    let (git, running) = state;
    match running.next(git.deadline()).await? {
        Said::Out(data) => Ok(M::Progress(Chunk { data })),
        Said::Exit(exit) => {
            running.well(&exit)?;
            let head = git.head().await?;
            Ok(M::Done(GitDone { head }))
        }
    }
}
