//! The service: which room answers which call, and what all calls have in common: the gate, and the end when the sandbox
//! goes to sleep.
//!
//! May call: agent/*, gate, refusal, run.
//! Never inside: what a call means.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use futures_util::{FutureExt as _, Stream};
use sandbox_protocol::v1::{
    AgentFindRequest, AgentForgetReply, AgentForgetRequest, AgentGitAddReply, AgentGitAddRequest,
    AgentGitBranchReply, AgentGitBranchRequest, AgentGitCheckoutReply, AgentGitCheckoutRequest,
    AgentGitCloneRequest, AgentGitCommitReply, AgentGitCommitRequest, AgentGitPullRequest,
    AgentGitPushRequest, AgentGitStatusReply, AgentGitStatusRequest, AgentInfoReply, AgentInfoRequest,
    AgentKillReply, AgentKillRequest, AgentListReply, AgentListRequest, AgentLogsRequest, AgentLspStopReply,
    AgentLspStopRequest, AgentMkdirReply, AgentMkdirRequest, AgentPsReply, AgentPsRequest, AgentPullRequest,
    AgentPushReply, AgentReadRequest, AgentRemoveReply, AgentRemoveRequest, AgentRenameReply,
    AgentRenameRequest, AgentReplaceRequest, AgentRunReply, AgentRunRequest, AgentSessionCloseReply,
    AgentSessionCloseRequest, AgentSessionListReply, AgentSessionListRequest, AgentSessionOpenReply,
    AgentSessionOpenRequest, AgentSpawnReply, AgentSpawnRequest, AgentStatReply, AgentStatRequest,
    AgentWaitReply, AgentWaitRequest, AgentWatchRequest, AgentWriteReply, AttachIn, AttachOut, ExecIn,
    ExecOut, FindOut, GitOut, LogsOut, LspIn, LspOut, PortForwardIn, PortForwardOut, PullOut, PushIn,
    ReadOut, ReplaceOut, SessionRunIn, SessionRunOut, WatchOut, WriteIn, agent_server::Agent as AgentService,
};
use tonic::{Request, Response, Status, Streaming, codegen::BoxStream};

use super::{Agent, Parts, exec, files, git, info, processes, sessions, tools};
use crate::{
    gate::{LetsGo, Listed},
    refusal::Refusal,
    run::ExecCtx,
};

type Sleep = Pin<Box<dyn Future<Output = Refusal> + Send>>;

impl Agent {
    /// Past the gate; the permit in the context counts the call as open until it is dropped.
    fn enter(&self) -> Result<(ExecCtx, Sleep), Status> {
        let permit = self.parts.control.gate.permit()?;
        let sleep = Box::pin(permit.hibernated());
        let ctx = ExecCtx {
            gate: permit,
            base_env: self.parts.base_env.now(),
            claim: self.facts.claim(),
        };
        Ok((ctx, sleep))
    }

    async fn unary<T, F>(&self, work: impl FnOnce(Arc<Parts>, ExecCtx) -> F) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let (ctx, sleep) = self.enter()?;
        let work = Box::pin(work(Arc::clone(&self.parts), ctx));
        // A caller that never says what it wants does not keep the sandbox awake.
        tokio::select! {
            refusal = sleep => Err(refusal.into()),
            reply = work => reply.map(Response::new),
        }
    }

    async fn stream<T, S, F>(
        &self,
        work: impl FnOnce(Arc<Parts>, ExecCtx) -> F,
    ) -> Result<Response<BoxStream<T>>, Status>
    where
        T: 'static,
        S: Stream<Item = Result<T, Status>> + Send + Unpin + 'static,
        F: Future<Output = Result<S, Status>>,
    {
        let (ctx, mut sleep) = self.enter()?;
        let work = Box::pin(work(Arc::clone(&self.parts), ctx));
        tokio::select! {
            refusal = &mut sleep => Err(refusal.into()),
            stream = work => {
                let held = Arc::new(Held(Mutex::new(Some(stream?))));
                let listed = self.parts.control.gate.list(held.clone());
                // A sleep that began just before has not found it in the list, and a client may never ask for more.
                if let Some(refusal) = (&mut sleep).now_or_never() {
                    return Err(refusal.into());
                }
                Ok(Response::new(Box::pin(UntilSleep { held, sleep, over: false, _listed: listed })))
            }
        }
    }
}

#[tonic::async_trait]
impl AgentService for Agent {
    async fn info(&self, _request: Request<AgentInfoRequest>) -> Result<Response<AgentInfoReply>, Status> {
        Ok(Response::new(info::info(self)))
    }

    async fn exec(
        &self,
        request: Request<Streaming<ExecIn>>,
    ) -> Result<Response<BoxStream<ExecOut>>, Status> {
        self.stream(|parts, ctx| exec::exec(parts, ctx, request.into_inner()))
            .await
    }

    async fn run(&self, request: Request<AgentRunRequest>) -> Result<Response<AgentRunReply>, Status> {
        self.unary(|parts, ctx| processes::run(parts, ctx, request.into_inner()))
            .await
    }

    async fn spawn(&self, request: Request<AgentSpawnRequest>) -> Result<Response<AgentSpawnReply>, Status> {
        self.unary(|parts, ctx| processes::spawn(parts, ctx, request.into_inner()))
            .await
    }

    async fn ps(
        &self,
        request: Request<AgentPsRequest>,
    ) -> Result<Response<BoxStream<AgentPsReply>>, Status> {
        self.stream(|parts, ctx| processes::ps(parts, ctx, request.into_inner()))
            .await
    }

    async fn wait(&self, request: Request<AgentWaitRequest>) -> Result<Response<AgentWaitReply>, Status> {
        self.unary(|parts, ctx| processes::wait(parts, ctx, request.into_inner()))
            .await
    }

    async fn kill(&self, request: Request<AgentKillRequest>) -> Result<Response<AgentKillReply>, Status> {
        self.unary(|parts, ctx| processes::kill(parts, ctx, request.into_inner()))
            .await
    }

    async fn logs(&self, request: Request<AgentLogsRequest>) -> Result<Response<BoxStream<LogsOut>>, Status> {
        self.stream(|parts, ctx| processes::logs(parts, ctx, request.into_inner()))
            .await
    }

    async fn attach(
        &self,
        request: Request<Streaming<AttachIn>>,
    ) -> Result<Response<BoxStream<AttachOut>>, Status> {
        self.stream(|parts, ctx| processes::attach(parts, ctx, request.into_inner()))
            .await
    }

    async fn forget(
        &self,
        request: Request<AgentForgetRequest>,
    ) -> Result<Response<AgentForgetReply>, Status> {
        self.unary(|parts, ctx| processes::forget(parts, ctx, request.into_inner()))
            .await
    }

    async fn session_open(
        &self,
        request: Request<AgentSessionOpenRequest>,
    ) -> Result<Response<AgentSessionOpenReply>, Status> {
        self.unary(|parts, ctx| sessions::session_open(parts, ctx, request.into_inner()))
            .await
    }

    async fn session_run(
        &self,
        request: Request<Streaming<SessionRunIn>>,
    ) -> Result<Response<BoxStream<SessionRunOut>>, Status> {
        self.stream(|parts, ctx| sessions::session_run(parts, ctx, request.into_inner()))
            .await
    }

    async fn session_list(
        &self,
        request: Request<AgentSessionListRequest>,
    ) -> Result<Response<AgentSessionListReply>, Status> {
        self.unary(|parts, ctx| sessions::session_list(parts, ctx, request.into_inner()))
            .await
    }

    async fn session_close(
        &self,
        request: Request<AgentSessionCloseRequest>,
    ) -> Result<Response<AgentSessionCloseReply>, Status> {
        self.unary(|parts, ctx| sessions::session_close(parts, ctx, request.into_inner()))
            .await
    }

    async fn write(&self, request: Request<Streaming<WriteIn>>) -> Result<Response<AgentWriteReply>, Status> {
        self.unary(|parts, ctx| files::write(parts, ctx, request.into_inner()))
            .await
    }

    async fn read(&self, request: Request<AgentReadRequest>) -> Result<Response<BoxStream<ReadOut>>, Status> {
        self.stream(|parts, ctx| files::read(parts, ctx, request.into_inner()))
            .await
    }

    async fn stat(&self, request: Request<AgentStatRequest>) -> Result<Response<AgentStatReply>, Status> {
        self.unary(|parts, ctx| files::stat(parts, ctx, request.into_inner()))
            .await
    }

    async fn list(
        &self,
        request: Request<AgentListRequest>,
    ) -> Result<Response<BoxStream<AgentListReply>>, Status> {
        self.stream(|parts, ctx| files::list(parts, ctx, request.into_inner()))
            .await
    }

    async fn mkdir(&self, request: Request<AgentMkdirRequest>) -> Result<Response<AgentMkdirReply>, Status> {
        self.unary(|parts, ctx| files::mkdir(parts, ctx, request.into_inner()))
            .await
    }

    async fn remove(
        &self,
        request: Request<AgentRemoveRequest>,
    ) -> Result<Response<AgentRemoveReply>, Status> {
        self.unary(|parts, ctx| files::remove(parts, ctx, request.into_inner()))
            .await
    }

    async fn rename(
        &self,
        request: Request<AgentRenameRequest>,
    ) -> Result<Response<AgentRenameReply>, Status> {
        self.unary(|parts, ctx| files::rename(parts, ctx, request.into_inner()))
            .await
    }

    async fn push(&self, request: Request<Streaming<PushIn>>) -> Result<Response<AgentPushReply>, Status> {
        self.unary(|parts, ctx| files::push(parts, ctx, request.into_inner()))
            .await
    }

    async fn pull(&self, request: Request<AgentPullRequest>) -> Result<Response<BoxStream<PullOut>>, Status> {
        self.stream(|parts, ctx| files::pull(parts, ctx, request.into_inner()))
            .await
    }

    async fn find(&self, request: Request<AgentFindRequest>) -> Result<Response<BoxStream<FindOut>>, Status> {
        self.stream(|parts, ctx| files::find(parts, ctx, request.into_inner()))
            .await
    }

    async fn replace(
        &self,
        request: Request<AgentReplaceRequest>,
    ) -> Result<Response<BoxStream<ReplaceOut>>, Status> {
        self.stream(|parts, ctx| files::replace(parts, ctx, request.into_inner()))
            .await
    }

    async fn watch(
        &self,
        request: Request<AgentWatchRequest>,
    ) -> Result<Response<BoxStream<WatchOut>>, Status> {
        self.stream(|parts, ctx| files::watch(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_clone(
        &self,
        request: Request<AgentGitCloneRequest>,
    ) -> Result<Response<BoxStream<GitOut>>, Status> {
        self.stream(|parts, ctx| git::git_clone(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_status(
        &self,
        request: Request<AgentGitStatusRequest>,
    ) -> Result<Response<AgentGitStatusReply>, Status> {
        self.unary(|parts, ctx| git::git_status(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_add(
        &self,
        request: Request<AgentGitAddRequest>,
    ) -> Result<Response<AgentGitAddReply>, Status> {
        self.unary(|parts, ctx| git::git_add(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_commit(
        &self,
        request: Request<AgentGitCommitRequest>,
    ) -> Result<Response<AgentGitCommitReply>, Status> {
        self.unary(|parts, ctx| git::git_commit(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_push(
        &self,
        request: Request<AgentGitPushRequest>,
    ) -> Result<Response<BoxStream<GitOut>>, Status> {
        self.stream(|parts, ctx| git::git_push(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_pull(
        &self,
        request: Request<AgentGitPullRequest>,
    ) -> Result<Response<BoxStream<GitOut>>, Status> {
        self.stream(|parts, ctx| git::git_pull(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_branch(
        &self,
        request: Request<AgentGitBranchRequest>,
    ) -> Result<Response<AgentGitBranchReply>, Status> {
        self.unary(|parts, ctx| git::git_branch(parts, ctx, request.into_inner()))
            .await
    }

    async fn git_checkout(
        &self,
        request: Request<AgentGitCheckoutRequest>,
    ) -> Result<Response<AgentGitCheckoutReply>, Status> {
        self.unary(|parts, ctx| git::git_checkout(parts, ctx, request.into_inner()))
            .await
    }

    async fn port_forward(
        &self,
        request: Request<Streaming<PortForwardIn>>,
    ) -> Result<Response<BoxStream<PortForwardOut>>, Status> {
        self.stream(|parts, ctx| tools::port_forward(parts, ctx, request.into_inner()))
            .await
    }

    async fn lsp_open(
        &self,
        request: Request<Streaming<LspIn>>,
    ) -> Result<Response<BoxStream<LspOut>>, Status> {
        self.stream(|parts, ctx| tools::lsp_open(parts, ctx, request.into_inner()))
            .await
    }

    async fn lsp_stop(
        &self,
        request: Request<AgentLspStopRequest>,
    ) -> Result<Response<AgentLspStopReply>, Status> {
        self.unary(|parts, ctx| tools::lsp_stop(parts, ctx, request.into_inner()))
            .await
    }
}

/// A stream that ends with `SANDBOX_HIBERNATING` when the sandbox goes to sleep.
struct UntilSleep<S: Send> {
    held: Arc<Held<S>>,
    sleep: Sleep,
    over: bool,
    _listed: Listed,
}

/// The stream proper, until the sandbox goes to sleep.
struct Held<S>(Mutex<Option<S>>);

impl<S> fmt::Debug for Held<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").finish_non_exhaustive()
    }
}

impl<S: Send> LetsGo for Held<S> {
    fn let_go(&self) {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Its guard acts now, behind the lock: sleep does not wait for a reader.
        drop(stream);
    }
}

impl<T, S: Stream<Item = Result<T, Status>> + Send + Unpin> Stream for UntilSleep<S> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(refusal) = this.sleep.as_mut().poll(cx) {
            this.over = true;
            this.held.let_go();
            return Poll::Ready(Some(Err(refusal.into())));
        }
        let mut stream = this.held.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *stream {
            Some(stream) => Pin::new(stream).poll_next(cx),
            // It is let go for a sleep alone, of which this is told next.
            None => Poll::Pending,
        }
    }
}
