//! A daemon that answers by script, on a Unix socket in a folder of its own. It runs on a runtime of its own, so that
//! a test can kill it with all its connections.

pub(crate) mod guest;
mod host;
mod processes;
mod sessions;

use std::{
    collections::{HashMap, VecDeque},
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use sandbox_sdk::{
    Reason,
    v1::{self, agent_server, claims_server, exec_in, exec_out, node_server, pools_server, templates_server},
};
use tokio::{
    net::UnixListener,
    runtime::Runtime,
    sync::{Notify, mpsc, watch},
};
use tokio_stream::{Stream, wrappers::UnixListenerStream};
use tonic::{Request, Response, Status, Streaming, metadata::MetadataMap};
use tonic_types::{ErrorDetails, StatusExt as _};

type Reply<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What a method does on its next call, instead of succeeding.
#[derive(Debug, Clone)]
pub(crate) enum Plan {
    Fail(Status),
    /// Never answers.
    Hang,
    /// Answers once this is notified.
    Gate(Arc<Notify>),
}

/// What was seen.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    pub(crate) claims: Vec<v1::ClaimsClaimRequest>,
    pub(crate) released: Vec<String>,
    pub(crate) starts: Vec<v1::ExecStart>,
    pub(crate) signals: Vec<i32>,
    /// Columns and rows.
    pub(crate) sizes: Vec<(u32, u32)>,
    pub(crate) runs: Vec<v1::AgentRunRequest>,
    pub(crate) spawns: Vec<v1::AgentSpawnRequest>,
    pub(crate) waits: Vec<u32>,
    pub(crate) kills: Vec<v1::AgentKillRequest>,
    pub(crate) logs: Vec<v1::AgentLogsRequest>,
    pub(crate) attaches: Vec<v1::AttachStart>,
    pub(crate) sessions: Vec<v1::AgentSessionOpenRequest>,
    pub(crate) texts: Vec<v1::SessionRunStart>,
    /// Calls of Exec, Attach and SessionRun whose client went away before their end.
    pub(crate) cancelled: usize,
    pub(crate) uploads: Vec<guest::Uploaded>,
    /// Bytes that came for ports.
    pub(crate) forwarded: usize,
    pub(crate) lsp: Vec<v1::LspStart>,
    /// Requests about files and git, as text.
    pub(crate) asked: Vec<String>,
    pub(crate) calls: HashMap<&'static str, usize>,
    /// `authorization` and `sandbox-id` of the last call.
    pub(crate) authorization: Option<String>,
    pub(crate) sandbox_id: Option<String>,
}

#[derive(Debug)]
struct State {
    seen: watch::Sender<Seen>,
    /// What Pull gives.
    archive: Mutex<Vec<u8>>,
    plans: Mutex<HashMap<&'static str, VecDeque<Plan>>>,
}

pub(crate) struct Mock {
    dir: Arc<tempfile::TempDir>,
    state: Arc<State>,
    runtime: Option<Runtime>,
}

/// A refusal as the daemon (`host`) or a guest makes it.
pub(crate) fn refusal(reason: Reason, origin: &'static str, retry: Option<Duration>) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(
        reason.as_str(),
        "sandbox.v1",
        HashMap::from([
            ("remedy".to_owned(), reason.remedy().to_owned()),
            ("request_id".to_owned(), "rq_7".to_owned()),
        ]),
    );
    if retry.is_some() {
        details.set_retry_info(retry);
    }
    let mut metadata = MetadataMap::new();
    metadata.insert("sandbox-origin", origin.parse().unwrap());
    Status::with_error_details_and_metadata(reason.code(), "refused by script", details, metadata)
}

impl Mock {
    pub(crate) fn start() -> Self {
        let mut mock = Self {
            dir: Arc::new(tempfile::tempdir().unwrap()),
            state: Arc::new(State {
                seen: watch::channel(Seen::default()).0,
                archive: Mutex::default(),
                plans: Mutex::default(),
            }),
            runtime: None,
        };
        mock.serve();
        mock
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    pub(crate) fn address(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// Ends the daemon and all its connections at once.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Starts it again (or first), with all that it remembers.
    pub(crate) fn serve(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        drop(std::fs::remove_file(self.socket()));
        let _context = runtime.enter();
        let listener = UnixListener::bind(self.socket()).unwrap();
        let service = Service(self.state.clone());
        let router = tonic::transport::Server::builder()
            .add_service(claims_server::ClaimsServer::new(service.clone()))
            .add_service(agent_server::AgentServer::new(service.clone()))
            .add_service(pools_server::PoolsServer::new(service.clone()))
            .add_service(templates_server::TemplatesServer::new(service.clone()))
            .add_service(node_server::NodeServer::new(service));
        drop(runtime.spawn(router.serve_with_incoming(UnixListenerStream::new(listener))));
        self.runtime = Some(runtime);
    }

    pub(crate) fn plan(&self, method: &'static str, plan: Plan) {
        let mut plans = self.state.plans.lock().unwrap();
        plans.entry(method).or_default().push_back(plan);
    }

    /// What a pulled tree is from now on.
    pub(crate) fn archive(&self, tar: Vec<u8>) {
        *self.state.archive.lock().unwrap() = tar;
    }

    pub(crate) fn seen(&self) -> Seen {
        self.state.seen.borrow().clone()
    }

    /// Waits until what was seen fits.
    pub(crate) async fn until(&self, fits: impl Fn(&Seen) -> bool) -> Seen {
        let mut seen = self.state.seen.subscribe();
        let found = tokio::time::timeout(Duration::from_secs(30), seen.wait_for(|seen| fits(seen)))
            .await
            .expect("the daemon never saw it");
        found.unwrap().clone()
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone)]
struct Service(Arc<State>);

fn at(secs: i64) -> Option<prost_types::Timestamp> {
    Some(prost_types::Timestamp {
        seconds: secs,
        nanos: 0,
    })
}

pub(crate) fn sandbox(id: &str) -> v1::Sandbox {
    v1::Sandbox {
        sandbox: id.to_owned(),
        claim: "cl_1".into(),
        pool: "default".into(),
        template: "default".into(),
        lane: v1::Lane::None.into(),
        size: "small".into(),
        state: v1::State::Claimed.into(),
        tier: v1::Tier::Warm.into(),
        engine: v1::Engine::Stub.into(),
        accel: v1::Accel::None.into(),
        created_at: at(1_700_000_000),
        claimed_at: at(1_700_000_001),
        expires_at: at(1_700_003_601),
        labels: HashMap::from([("job".to_owned(), "42".to_owned())]),
        proto: 1,
        slot: Some(3),
        ..v1::Sandbox::default()
    }
}

impl Service {
    fn note(&self, change: impl FnOnce(&mut Seen)) {
        self.0.seen.send_modify(change);
    }

    /// Notes a call and does what was planned for it.
    async fn begin<T>(&self, method: &'static str, request: &Request<T>) -> Result<(), Status> {
        let text = |key: &str| {
            let value = request.metadata().get(key)?;
            Some(value.to_str().unwrap().to_owned())
        };
        self.note(|seen| {
            *seen.calls.entry(method).or_default() += 1;
            seen.authorization = text("authorization");
            seen.sandbox_id = text("sandbox-id");
        });
        let plan = self
            .0
            .plans
            .lock()
            .unwrap()
            .get_mut(method)
            .and_then(VecDeque::pop_front);
        match plan {
            None => Ok(()),
            Some(Plan::Fail(status)) => Err(status),
            Some(Plan::Hang) => std::future::pending().await,
            Some(Plan::Gate(gate)) => {
                gate.notified().await;
                Ok(())
            }
        }
    }
}

/// Notes a call whose client went away.
struct Attendant(Service, bool);

impl Drop for Attendant {
    fn drop(&mut self) {
        if !self.1 {
            self.0.note(|seen| seen.cancelled += 1);
        }
    }
}

fn out(m: exec_out::M) -> Result<v1::ExecOut, Status> {
    Ok(v1::ExecOut { m: Some(m) })
}

fn chunk(data: impl Into<bytes::Bytes>) -> v1::Chunk {
    v1::Chunk { data: data.into() }
}

/// One program of the mock: what it writes, and how it ends.
struct Program {
    service: Service,
    input: Streaming<v1::ExecIn>,
    output: mpsc::Sender<Result<v1::ExecOut, Status>>,
    written: (u64, u64),
}

impl Program {
    async fn say(&mut self, m: exec_out::M) {
        match &m {
            exec_out::M::Stdout(chunk) => self.written.0 += chunk.data.len() as u64,
            exec_out::M::Stderr(chunk) => self.written.1 += chunk.data.len() as u64,
            exec_out::M::Started(_) | exec_out::M::Exit(_) => {}
        }
        drop(self.output.send(out(m)).await);
    }

    async fn exit(&mut self, how: v1::exit::How, timed_out: bool) {
        let exit = v1::Exit {
            how: Some(how),
            timed_out,
            stdout_bytes: self.written.0,
            stderr_bytes: self.written.1,
            ..v1::Exit::default()
        };
        self.say(exec_out::M::Exit(exit)).await;
    }

    async fn run(mut self, start: v1::ExecStart) {
        use v1::exit::How::{Code, Signal};
        let argv = start.command.clone().unwrap_or_default().argv;
        let argument = |n: usize| argv.get(n).map(|arg| String::from_utf8_lossy(arg).into_owned());
        let number = || argument(1).and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut guard = Attendant(self.service.clone(), false);
        self.say(exec_out::M::Started(v1::Started { id: 1, pid: 2 }))
            .await;
        match argument(0).unwrap_or_default().as_str() {
            "echo" => {
                self.say(exec_out::M::Stdout(chunk(argument(1).unwrap_or_default() + "\n")))
                    .await;
                self.exit(Code(0), false).await;
            }
            "both" => {
                self.say(exec_out::M::Stdout(chunk("out"))).await;
                self.say(exec_out::M::Stderr(chunk("err"))).await;
                self.exit(Code(3), false).await;
            }
            "raw" => {
                self.say(exec_out::M::Stdout(chunk(&b"\xff\x00\xfe"[..]))).await;
                self.exit(Code(0), false).await;
            }
            "flood" => {
                for _ in 0..number() {
                    self.say(exec_out::M::Stdout(chunk(vec![b'x'; 64 * 1024]))).await;
                }
                self.exit(Code(0), false).await;
            }
            "true" => self.exit(Code(0), false).await,
            "exit" => self.exit(Code(number()), false).await,
            "kill" => self.exit(Signal(number()), false).await,
            "late" => self.exit(Signal(9), true).await,
            "noexit" => {}
            "lost" => {
                self.written.0 += 1;
                self.exit(Code(0), false).await;
            }
            "afterwards" => {
                self.exit(Code(0), false).await;
                self.say(exec_out::M::Stdout(chunk("x"))).await;
            }
            "fault" => {
                let status = refusal(Reason::AgentLost, "host", None);
                drop(self.output.send(Err(status)).await);
            }
            "cat" => {
                let ended = self.cat().await;
                self.exit(ended, false).await;
            }
            // Until a signal comes, or its client goes; its word says that it runs.
            _ => {
                self.say(exec_out::M::Stdout(chunk("ready"))).await;
                match self.cat().await {
                    ended @ Signal(_) => self.exit(ended, false).await,
                    Code(_) => self.output.closed().await,
                }
            }
        }
        // Whoever is gone before the end has cancelled.
        guard.1 = !self.output.is_closed();
    }

    /// Gives back its input, until that ends or a signal comes.
    async fn cat(&mut self) -> v1::exit::How {
        loop {
            let message = tokio::select! {
                message = self.input.message() => message,
                () = self.output.closed() => return v1::exit::How::Code(1),
            };
            match message.ok().flatten().and_then(|message| message.m) {
                Some(exec_in::M::Stdin(data)) => self.say(exec_out::M::Stdout(chunk(data))).await,
                Some(exec_in::M::Signal(signal)) => {
                    self.service.note(|seen| seen.signals.push(signal.number));
                    return v1::exit::How::Signal(signal.number);
                }
                Some(exec_in::M::Resize(size)) => {
                    self.service.note(|seen| seen.sizes.push((size.cols, size.rows)));
                    let said = format!("{}x{}\n", size.cols, size.rows);
                    self.say(exec_out::M::Stdout(chunk(said))).await;
                }
                Some(_) | None => return v1::exit::How::Code(0),
            }
        }
    }
}

impl Service {
    /// As [`begin`](Self::begin), and keeps what was asked.
    async fn asked<T: std::fmt::Debug>(
        &self,
        method: &'static str,
        request: &Request<T>,
    ) -> Result<(), Status> {
        self.note(|seen| seen.asked.push(format!("{:?}", request.get_ref())));
        self.begin(method, request).await
    }
}

#[tonic::async_trait]
impl agent_server::Agent for Service {
    async fn info(&self, request: Request<v1::AgentInfoRequest>) -> Reply<v1::AgentInfoReply> {
        self.begin("agent.info", &request).await?;
        Ok(Response::new(v1::AgentInfoReply {
            version: "0.1.0".into(),
            ..v1::AgentInfoReply::default()
        }))
    }

    async fn exec(&self, request: Request<Streaming<v1::ExecIn>>) -> Reply<Events<v1::ExecOut>> {
        self.begin("exec", &request).await?;
        let mut input = request.into_inner();
        let Some(v1::ExecIn {
            m: Some(exec_in::M::Start(start)),
        }) = input.message().await?
        else {
            return Err(Status::invalid_argument("no start"));
        };
        self.note(|seen| seen.starts.push(start.clone()));
        let (output, replies) = mpsc::channel(4);
        let program = Program {
            service: self.clone(),
            input,
            output,
            written: (0, 0),
        };
        drop(tokio::spawn(program.run(start)));
        let replies = tokio_stream::wrappers::ReceiverStream::new(replies);
        Ok(Response::new(Box::pin(replies)))
    }

    async fn stat(&self, request: Request<v1::AgentStatRequest>) -> Reply<v1::AgentStatReply> {
        self.asked("stat", &request).await?;
        guest::look(request.get_ref())
    }

    async fn list(&self, request: Request<v1::AgentListRequest>) -> Reply<Events<v1::AgentListReply>> {
        self.asked("list", &request).await?;
        guest::list()
    }

    async fn read(&self, request: Request<v1::AgentReadRequest>) -> Reply<Events<v1::ReadOut>> {
        self.asked("read", &request).await?;
        guest::read(request.get_ref())
    }

    async fn mkdir(&self, request: Request<v1::AgentMkdirRequest>) -> Reply<v1::AgentMkdirReply> {
        self.asked("mkdir", &request).await?;
        Ok(Response::new(v1::AgentMkdirReply { made: true }))
    }

    async fn remove(&self, request: Request<v1::AgentRemoveRequest>) -> Reply<v1::AgentRemoveReply> {
        self.asked("remove", &request).await?;
        Ok(Response::new(v1::AgentRemoveReply { removed: 4 }))
    }

    async fn rename(&self, request: Request<v1::AgentRenameRequest>) -> Reply<v1::AgentRenameReply> {
        self.asked("rename", &request).await?;
        Ok(Response::new(v1::AgentRenameReply {}))
    }

    async fn pull(&self, request: Request<v1::AgentPullRequest>) -> Reply<Events<v1::PullOut>> {
        self.asked("pull", &request).await?;
        let archive = self.0.archive.lock().unwrap().clone();
        guest::pull(request.get_ref(), archive)
    }

    async fn find(&self, request: Request<v1::AgentFindRequest>) -> Reply<Events<v1::FindOut>> {
        self.asked("find", &request).await?;
        guest::find(request.get_ref())
    }

    async fn replace(&self, request: Request<v1::AgentReplaceRequest>) -> Reply<Events<v1::ReplaceOut>> {
        self.asked("replace", &request).await?;
        guest::replace(request.get_ref())
    }

    async fn watch(&self, request: Request<v1::AgentWatchRequest>) -> Reply<Events<v1::WatchOut>> {
        self.asked("watch", &request).await?;
        guest::watch(request.get_ref(), Arc::new(Attendant(self.clone(), false)))
    }

    async fn git_clone(&self, request: Request<v1::AgentGitCloneRequest>) -> Reply<Events<v1::GitOut>> {
        self.asked("git_clone", &request).await?;
        guest::git_progress(request.get_ref().url == "cut")
    }

    async fn git_push(&self, request: Request<v1::AgentGitPushRequest>) -> Reply<Events<v1::GitOut>> {
        self.asked("git_push", &request).await?;
        guest::git_progress(false)
    }

    async fn git_pull(&self, request: Request<v1::AgentGitPullRequest>) -> Reply<Events<v1::GitOut>> {
        self.asked("git_pull", &request).await?;
        guest::git_progress(false)
    }

    async fn git_status(
        &self,
        request: Request<v1::AgentGitStatusRequest>,
    ) -> Reply<v1::AgentGitStatusReply> {
        self.asked("git_status", &request).await?;
        guest::git_status()
    }

    async fn git_add(&self, request: Request<v1::AgentGitAddRequest>) -> Reply<v1::AgentGitAddReply> {
        self.asked("git_add", &request).await?;
        Ok(Response::new(v1::AgentGitAddReply {}))
    }

    async fn git_commit(
        &self,
        request: Request<v1::AgentGitCommitRequest>,
    ) -> Reply<v1::AgentGitCommitReply> {
        self.asked("git_commit", &request).await?;
        Ok(Response::new(v1::AgentGitCommitReply { head: "def".into() }))
    }

    async fn git_branch(
        &self,
        request: Request<v1::AgentGitBranchRequest>,
    ) -> Reply<v1::AgentGitBranchReply> {
        self.asked("git_branch", &request).await?;
        guest::git_branch(request.get_ref())
    }

    async fn git_checkout(
        &self,
        request: Request<v1::AgentGitCheckoutRequest>,
    ) -> Reply<v1::AgentGitCheckoutReply> {
        self.asked("git_checkout", &request).await?;
        Ok(Response::new(v1::AgentGitCheckoutReply { head: "abc".into() }))
    }

    async fn lsp_stop(&self, request: Request<v1::AgentLspStopRequest>) -> Reply<v1::AgentLspStopReply> {
        self.asked("lsp_stop", &request).await?;
        let how = Some(v1::exit::How::Signal(15));
        let exit = Some(v1::Exit {
            how,
            ..v1::Exit::default()
        });
        Ok(Response::new(v1::AgentLspStopReply { exit }))
    }

    async fn write(&self, request: Request<Streaming<v1::WriteIn>>) -> Reply<v1::AgentWriteReply> {
        self.begin("write", &request).await?;
        self.take_write(request.into_inner()).await
    }

    async fn push(&self, request: Request<Streaming<v1::PushIn>>) -> Reply<v1::AgentPushReply> {
        self.begin("push", &request).await?;
        self.take_push(request.into_inner()).await
    }

    async fn port_forward(
        &self,
        request: Request<Streaming<v1::PortForwardIn>>,
    ) -> Reply<Events<v1::PortForwardOut>> {
        self.begin("port_forward", &request).await?;
        self.connect(request.into_inner()).await
    }

    async fn lsp_open(&self, request: Request<Streaming<v1::LspIn>>) -> Reply<Events<v1::LspOut>> {
        self.begin("lsp_open", &request).await?;
        self.serve_lsp(request.into_inner()).await
    }

    async fn run(&self, request: Request<v1::AgentRunRequest>) -> Reply<v1::AgentRunReply> {
        self.begin("run", &request).await?;
        self.answer(request.into_inner())
    }

    async fn spawn(&self, request: Request<v1::AgentSpawnRequest>) -> Reply<v1::AgentSpawnReply> {
        self.note(|seen| seen.spawns.push(request.get_ref().clone()));
        self.begin("spawn", &request).await?;
        Ok(Response::new(v1::AgentSpawnReply { id: 7, pid: 70 }))
    }

    async fn ps(&self, request: Request<v1::AgentPsRequest>) -> Reply<Events<v1::AgentPsReply>> {
        self.begin("ps", &request).await?;
        Ok(Response::new(processes::list(request.get_ref().running)))
    }

    async fn wait(&self, request: Request<v1::AgentWaitRequest>) -> Reply<v1::AgentWaitReply> {
        self.note(|seen| seen.waits.push(request.get_ref().timeout_ms));
        self.begin("wait", &request).await?;
        processes::end(request.get_ref())
    }

    async fn kill(&self, request: Request<v1::AgentKillRequest>) -> Reply<v1::AgentKillReply> {
        self.note(|seen| seen.kills.push(request.get_ref().clone()));
        self.begin("kill", &request).await?;
        Ok(Response::new(v1::AgentKillReply {
            already_exited: false,
            signalled: true,
        }))
    }

    async fn logs(&self, request: Request<v1::AgentLogsRequest>) -> Reply<Events<v1::LogsOut>> {
        self.note(|seen| seen.logs.push(request.get_ref().clone()));
        self.begin("logs", &request).await?;
        Ok(Response::new(processes::log(request.get_ref())))
    }

    async fn attach(&self, request: Request<Streaming<v1::AttachIn>>) -> Reply<Events<v1::AttachOut>> {
        self.begin("attach", &request).await?;
        self.visit(request.into_inner()).await
    }

    async fn forget(&self, request: Request<v1::AgentForgetRequest>) -> Reply<v1::AgentForgetReply> {
        self.begin("forget", &request).await?;
        Ok(Response::new(v1::AgentForgetReply {}))
    }

    async fn session_open(
        &self,
        request: Request<v1::AgentSessionOpenRequest>,
    ) -> Reply<v1::AgentSessionOpenReply> {
        self.note(|seen| seen.sessions.push(request.get_ref().clone()));
        self.begin("session_open", &request).await?;
        let session = match request.into_inner().session {
            none if none.is_empty() => "s-1".to_owned(),
            session => session,
        };
        Ok(Response::new(v1::AgentSessionOpenReply {
            session,
            process: 8,
            pid: 80,
        }))
    }

    async fn session_run(
        &self,
        request: Request<Streaming<v1::SessionRunIn>>,
    ) -> Reply<Events<v1::SessionRunOut>> {
        self.begin("session_run", &request).await?;
        self.command(request.into_inner()).await
    }

    async fn session_list(
        &self,
        request: Request<v1::AgentSessionListRequest>,
    ) -> Reply<v1::AgentSessionListReply> {
        self.begin("session_list", &request).await?;
        Ok(Response::new(sessions::list()))
    }

    async fn session_close(
        &self,
        request: Request<v1::AgentSessionCloseRequest>,
    ) -> Reply<v1::AgentSessionCloseReply> {
        self.begin("session_close", &request).await?;
        Ok(Response::new(v1::AgentSessionCloseReply {}))
    }
}
