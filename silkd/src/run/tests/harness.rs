//! A guest without a machine: runner, gate and service behind one HTTP/2 connection.

use std::{
    convert::Infallible,
    future::Future,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::process::{Pid, PidfdFlags};
use sandbox_protocol::{
    limits::{GUEST_CONNECTION_WINDOW, LINK_FRAME, SEND_BUFFER, STREAM_WINDOW},
    reason::Reason,
    v1::{
        AgentInfoReply, AgentInfoRequest, AgentLogsRequest, AgentRunReply, AgentRunRequest,
        AgentSessionCloseReply, AgentSessionCloseRequest, AgentSessionOpenReply, AgentSessionOpenRequest,
        AgentSpawnReply, AgentSpawnRequest, AgentWaitRequest, AttachIn, AttachOut, AttachStart, Attached,
        Command, EnvVar, ExecIn, ExecOut, ExecStart, Exit, LogChunk, LogFrom, LogGap, LogsOut, ProcessRef,
        SessionRunIn, SessionRunOut, Started,
        agent_client::AgentClient,
        agent_server::{Agent, AgentServer},
        attach_in, attach_out, exec_in, exec_out, exit, log_from, logs_out, process_ref,
    },
};
use tokio::{io::Interest, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming, body::Body, codegen::BoxStream};
use tonic_types::StatusExt as _;
use tower_service::Service;

use crate::{
    agent,
    gate::{Gate, Turn},
    run::{ClaimDefaults, ExecCtx, RunConfig, Runner},
    sys, tasks,
};

/// A bound against hangs; nothing takes nearly that long. Below the time at which nextest kills a test, so that the test
/// itself says what it waited for.
pub(super) const HANG: Duration = Duration::from_secs(40);

/// The result of `f`, which must not hang.
pub(super) async fn within<T>(f: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG, f).await.expect("it hangs")
}

/// Waits for something that sends no news.
pub(super) async fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let mut ticks = tokio::time::interval(Duration::from_millis(5));
    let until = async {
        while !is() {
            ticks.tick().await;
        }
    };
    let came = tokio::time::timeout(HANG, until).await;
    came.unwrap_or_else(|_elapsed| panic!("never: {what}"));
}

#[derive(Debug)]
struct Served {
    runner: Runner,
    gate: Gate,
    claim: Arc<ClaimDefaults>,
}

#[tonic::async_trait]
impl Agent for Served {
    async fn info(&self, _request: Request<AgentInfoRequest>) -> Result<Response<AgentInfoReply>, Status> {
        Ok(Response::new(AgentInfoReply::default()))
    }

    async fn exec(
        &self,
        request: Request<Streaming<ExecIn>>,
    ) -> Result<Response<BoxStream<ExecOut>>, Status> {
        let start = agent::exec::start(&self.runner, self.ctx()?, request.into_inner());
        let stream = Box::pin(start).await?;
        Ok(Response::new(Box::pin(stream)))
    }

    async fn session_open(
        &self,
        request: Request<AgentSessionOpenRequest>,
    ) -> Result<Response<AgentSessionOpenReply>, Status> {
        let opened = self.runner.session_open(self.ctx()?, request.into_inner());
        Ok(Response::new(opened.await?))
    }

    async fn session_run(
        &self,
        request: Request<Streaming<SessionRunIn>>,
    ) -> Result<Response<BoxStream<SessionRunOut>>, Status> {
        let stream = agent::sessions::start(&self.runner, self.ctx()?, request.into_inner());
        Ok(Response::new(stream.await?))
    }

    async fn session_close(
        &self,
        request: Request<AgentSessionCloseRequest>,
    ) -> Result<Response<AgentSessionCloseReply>, Status> {
        self.runner.session_close(&request.into_inner().session).await?;
        Ok(Response::new(AgentSessionCloseReply {}))
    }

    async fn run(&self, request: Request<AgentRunRequest>) -> Result<Response<AgentRunReply>, Status> {
        let reply = self.runner.run(self.ctx()?, request.into_inner()).await?;
        Ok(Response::new(reply))
    }

    async fn spawn(&self, request: Request<AgentSpawnRequest>) -> Result<Response<AgentSpawnReply>, Status> {
        let reply = self.runner.spawn(self.ctx()?, request.into_inner()).await?;
        Ok(Response::new(reply))
    }

    async fn attach(
        &self,
        request: Request<Streaming<AttachIn>>,
    ) -> Result<Response<BoxStream<AttachOut>>, Status> {
        let mut messages = request.into_inner();
        let first = messages.message().await?.and_then(|message| message.m);
        let Some(attach_in::M::Start(start)) = first else {
            panic!("no start");
        };
        let stream = self.runner.attach(self.ctx()?, &start, messages)?;
        Ok(Response::new(Box::pin(stream)))
    }

    async fn logs(&self, request: Request<AgentLogsRequest>) -> Result<Response<BoxStream<LogsOut>>, Status> {
        let stream = self.runner.logs(self.ctx()?, &request.into_inner())?;
        Ok(Response::new(Box::pin(stream)))
    }
}

impl Served {
    fn ctx(&self) -> Result<ExecCtx, Status> {
        Ok(ExecCtx {
            gate: self.gate.permit()?,
            base_env: Arc::default(),
            claim: self.claim.clone(),
        })
    }
}

/// The client's side of the connection.
#[derive(Debug, Clone)]
pub(super) struct Dialled(hyper::client::conn::http2::SendRequest<Body>);

impl Service<http::Request<Body>> for Dialled {
    type Response = http::Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) runner: Runner,
    pub(super) gate: Gate,
    pub(super) client: AgentClient<Dialled>,
    cgroup: Option<OwnCgroup>,
}

/// A cgroup2 directory of our own, ended and removed when dropped. Needs root, as `make test` has it.
#[derive(Debug)]
pub(super) struct OwnCgroup(PathBuf);

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        // A clean end has removed it; what a failed test left is killed, and removed as far as that goes.
        let work = self.0.join("work");
        let kill = std::fs::OpenOptions::new()
            .write(true)
            .open(work.join("cgroup.kill"));
        if let Ok(mut kill) = kill {
            std::io::Write::write_all(&mut kill, b"1").ok();
        }
        for leaf in std::fs::read_dir(&work).into_iter().flatten().flatten() {
            std::fs::remove_dir(leaf.path()).ok();
        }
        std::fs::remove_dir(&work).ok();
        std::fs::remove_dir(&self.0).ok();
    }
}

pub(super) fn own_cgroup() -> OwnCgroup {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let path = fields.next()?;
        (fields.next()? == "cgroup2").then_some(path)
    });
    let root = Path::new(root.expect("a cgroup2 mount is needed"));
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = root.join(format!("silkd-test-{}-{count}", std::process::id()));
        match std::fs::create_dir(&path) {
            Ok(()) => return OwnCgroup(path),
            // Of a test that was killed, and whose number came round.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => panic!("a cgroup2 mount that may be written to is needed: {error}"),
        }
    }
}

impl Guest {
    pub(super) fn start() -> Self {
        Self::start_with(Some(own_cgroup()), ClaimDefaults::default())
    }

    pub(super) fn start_with(cgroup: Option<OwnCgroup>, claim: ClaimDefaults) -> Self {
        Self::start_as(cgroup, claim, false)
    }

    /// As PID 1 would start it, with regard to what programs inherit.
    pub(super) fn start_as_pid1() -> Self {
        Self::start_as(Some(own_cgroup()), ClaimDefaults::default(), true)
    }

    /// The leaves that there are.
    pub(super) fn leaves(&self) -> Vec<String> {
        let work = self.cgroup.as_ref().unwrap().0.join("work");
        let entries = std::fs::read_dir(work).unwrap().map(|entry| entry.unwrap());
        let dirs = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        let mut names: Vec<String> = dirs
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// With so many bytes for all logs.
    pub(super) fn start_with_logs(budget: u64) -> Self {
        let cgroup = own_cgroup();
        let config = RunConfig {
            cgroup_root: Some(cgroup.0.clone()),
            pid1: false,
        };
        let runner = Runner::start_with(&config, budget).unwrap();
        Self::serve(runner, Some(cgroup), ClaimDefaults::default())
    }

    fn start_as(cgroup: Option<OwnCgroup>, claim: ClaimDefaults, pid1: bool) -> Self {
        let config = RunConfig {
            cgroup_root: cgroup.as_ref().map(|cgroup| cgroup.0.clone()),
            pid1,
        };
        Self::serve(Runner::start(&config).unwrap(), cgroup, claim)
    }

    fn serve(runner: Runner, cgroup: Option<OwnCgroup>, claim: ClaimDefaults) -> Self {
        let gate = Gate::new();
        gate.turn(Turn::Renew).unwrap();
        gate.turn(Turn::Renewed).unwrap();
        let service = AgentServer::new(Served {
            runner: runner.clone(),
            gate: gate.clone(),
            claim: Arc::new(claim),
        });
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        drop(tasks::spawn(serve(theirs, service)));
        Self {
            runner,
            gate,
            client: AgentClient::with_origin(dial(ours), http::Uri::from_static("http://guest")),
            cgroup,
        }
    }

    /// Stops everything; nothing may be left.
    pub(super) async fn end(self) {
        within(self.runner.stop(Duration::ZERO)).await;
        assert_eq!(self.runner.running(), 0);
        if let Some(cgroup) = &self.cgroup {
            assert!(!cgroup.0.join("work").exists(), "leaves were left");
            std::fs::remove_dir(&cgroup.0).unwrap();
        }
    }

    /// Starts a program; the client's half stays open.
    pub(super) async fn begin(&self, start: ExecStart) -> Result<Call, Status> {
        let (input, messages) = mpsc::channel(4);
        let first = ExecIn {
            m: Some(exec_in::M::Start(start)),
        };
        input.try_send(first).unwrap();
        let mut client = self.client.clone();
        let reply = within(client.exec(ReceiverStream::new(messages))).await?;
        let mut output = reply.into_inner();
        match within(output.message()).await?.and_then(|out| out.m) {
            Some(exec_out::M::Started(started)) => Ok(Call {
                input: Some(input),
                output,
                started,
                seen: 0,
                unread: Bytes::new(),
            }),
            other => panic!("no Started: {other:?}"),
        }
    }

    /// Runs a command without input to its end.
    pub(super) async fn run(&self, command: Command) -> Result<Ran, Status> {
        self.run_start(of(command)).await
    }

    /// Runs a request to its end; the client's half is closed at once.
    pub(super) async fn run_start(&self, start: ExecStart) -> Result<Ran, Status> {
        let mut call = self.begin(start).await?;
        call.input = None;
        call.finish().await
    }

    /// Why a command does not start.
    pub(super) async fn refused(&self, command: Command) -> (Reason, Status) {
        refusal(self.run(command).await.unwrap_err())
    }
}

pub(super) fn refusal(status: Status) -> (Reason, Status) {
    let info = status.get_details_error_info().expect("no reason in it");
    assert_eq!(info.domain, "sandbox.v1");
    let reason = Reason::parse(&info.reason).unwrap();
    assert_eq!(status.code(), reason.code());
    (reason, status)
}

fn dial(io: tokio::io::DuplexStream) -> Dialled {
    let handshake = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(GUEST_CONNECTION_WINDOW)
        .handshake(TokioIo::new(io));
    // The handshake only writes the preface into the pipe, which takes it.
    let (sender, connection) = futures_util::FutureExt::now_or_never(handshake)
        .expect("the preface fits")
        .unwrap();
    drop(tasks::spawn(async move { drop(connection.await) }));
    Dialled(sender)
}

async fn serve(io: tokio::io::DuplexStream, service: AgentServer<Served>) {
    let answer = hyper::service::service_fn(move |request| {
        let mut service = service.clone();
        async move { Ok::<_, Infallible>(service.call(request).await.unwrap()) }
    });
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(GUEST_CONNECTION_WINDOW)
        .max_frame_size(LINK_FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .serve_connection(TokioIo::new(io), answer);
    // It ends with the test.
    drop(connection.await);
}

#[derive(Debug)]
pub(super) struct Call {
    /// `None`: our half is closed.
    pub(super) input: Option<mpsc::Sender<ExecIn>>,
    pub(super) output: Streaming<ExecOut>,
    pub(super) started: Started,
    /// Bytes that [`chunk`](Self::chunk) took.
    seen: usize,
    /// Put back.
    unread: Bytes,
}

/// What a program said and how it ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ran {
    pub(super) started: Started,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    pub(super) exit: Exit,
}

impl Ran {
    pub(super) fn code(&self) -> i32 {
        match self.exit.how {
            Some(exit::How::Code(code)) => code,
            other => panic!("no code: {other:?}"),
        }
    }

    pub(super) fn signal(&self) -> i32 {
        match self.exit.how {
            Some(exit::How::Signal(signal)) => signal,
            other => panic!("no signal: {other:?}"),
        }
    }

    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

impl Call {
    pub(super) async fn send(&self, m: exec_in::M) {
        let input = self.input.as_ref().unwrap();
        within(input.send(ExecIn { m: Some(m) })).await.unwrap();
    }

    /// Puts bytes back that were read too early.
    pub(super) fn unread(&mut self, bytes: Bytes) {
        self.unread = bytes;
    }

    /// The next message, which is of stdout.
    pub(super) async fn chunk(&mut self) -> Bytes {
        if !self.unread.is_empty() {
            return std::mem::take(&mut self.unread);
        }
        match within(self.output.message()).await.unwrap().and_then(|out| out.m) {
            Some(exec_out::M::Stdout(chunk)) => {
                self.seen += chunk.data.len();
                chunk.data
            }
            other => panic!("no output: {other:?}"),
        }
    }

    /// Reads to the end: Exit, then OK, then nothing.
    pub(super) async fn finish(mut self) -> Result<Ran, Status> {
        let (mut stdout, mut stderr) = (self.unread.to_vec(), Vec::new());
        self.seen -= stdout.len();
        let exit = loop {
            match within(self.output.message()).await?.and_then(|out| out.m) {
                Some(exec_out::M::Stdout(chunk)) => stdout.extend_from_slice(&chunk.data),
                Some(exec_out::M::Stderr(chunk)) => stderr.extend_from_slice(&chunk.data),
                Some(exec_out::M::Exit(exit)) => break exit,
                other => panic!("out of order: {other:?}"),
            }
        };
        assert_eq!(within(self.output.message()).await?, None);
        assert_eq!(
            exit.stdout_bytes,
            u64::try_from(self.seen + stdout.len()).unwrap()
        );
        assert_eq!(exit.stderr_bytes, u64::try_from(stderr.len()).unwrap());
        Ok(Ran {
            started: self.started,
            stdout,
            stderr,
            exit,
        })
    }
}

pub(super) fn command(argv: &[&[u8]]) -> Command {
    Command {
        argv: argv.iter().map(|text| Bytes::copy_from_slice(text)).collect(),
        ..Command::default()
    }
}

pub(super) fn sh(script: &str) -> Command {
    command(&[b"sh", b"-c", script.as_bytes()])
}

pub(super) fn of(command: Command) -> ExecStart {
    ExecStart {
        command: Some(command),
        ..ExecStart::default()
    }
}

pub(super) fn with_stdin(command: Command) -> ExecStart {
    ExecStart {
        stdin: true,
        ..of(command)
    }
}

pub(super) fn var(key: &[u8], value: &[u8]) -> EnvVar {
    EnvVar {
        key: Bytes::copy_from_slice(key),
        value: Bytes::copy_from_slice(value),
    }
}

/// A handle of a process that is there now.
pub(super) fn handle(pid: i32) -> OwnedFd {
    rustix::process::pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::NONBLOCK).unwrap()
}

/// Waits for the end of a process.
pub(super) async fn death(handle: OwnedFd) {
    let watched = sys::watch(handle, Interest::READABLE).unwrap();
    drop(within(watched.readable()).await.unwrap());
}

/// Whether a process lives.
pub(super) fn lives(handle: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(
        handle.as_fd(),
        rustix::event::PollFlags::IN,
    )];
    let now = rustix::time::Timespec::default();
    rustix::event::poll(&mut fds, Some(&now)).unwrap() == 0
}

/// A program by its number.
pub(super) fn by_id(id: u64) -> Option<ProcessRef> {
    Some(ProcessRef {
        which: Some(process_ref::Which::Id(id)),
    })
}

pub(super) fn from(offset: u64) -> Option<LogFrom> {
    Some(LogFrom {
        at: Some(log_from::At::Offset(offset)),
    })
}

/// To attach to a program, from the oldest byte on.
pub(super) fn to(id: u64) -> AttachStart {
    AttachStart {
        process: by_id(id),
        ..AttachStart::default()
    }
}

/// What a reader of a log gets.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Read {
    Chunk(LogChunk),
    Gap(LogGap),
    Exit(Box<Exit>),
}

/// A client that is attached.
#[derive(Debug)]
pub(super) struct Attachment {
    /// `None`: our half is closed.
    pub(super) input: Option<mpsc::Sender<AttachIn>>,
    pub(super) output: Streaming<AttachOut>,
    pub(super) attached: Attached,
}

impl Attachment {
    pub(super) async fn send(&self, m: attach_in::M) {
        let input = self.input.as_ref().unwrap();
        within(input.send(AttachIn { m: Some(m) })).await.unwrap();
    }

    /// What comes next; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Read>, Status> {
        Ok(within(self.output.message())
            .await?
            .map(|out| match out.m.unwrap() {
                attach_out::M::Attached(twice) => panic!("{twice:?}"),
                attach_out::M::Chunk(chunk) => Read::Chunk(chunk),
                attach_out::M::Gap(gap) => Read::Gap(gap),
                attach_out::M::Exit(exit) => Read::Exit(Box::new(exit)),
            }))
    }

    /// Reads until so many bytes have come, or the exit has.
    pub(super) async fn read(&mut self, bytes: usize) -> Heard {
        let mut heard = Heard::default();
        while heard.data.len() < bytes && heard.exit.is_none() {
            let read = self.next().await.unwrap().expect("more");
            heard.take(read);
        }
        heard
    }

    /// Reads to the end.
    pub(super) async fn finish(&mut self) -> Heard {
        let heard = self.read(usize::MAX).await;
        assert_eq!(self.next().await.unwrap(), None);
        heard
    }
}

/// All that a reader got, which was without a hole that was not told.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) data: Vec<u8>,
    /// Bytes of gaps.
    pub(super) missed: u64,
    /// The number of the next byte.
    pub(super) next: Option<u64>,
    pub(super) exit: Option<Exit>,
}

impl Heard {
    pub(super) fn take(&mut self, read: Read) {
        let (begin, end) = match read {
            Read::Chunk(chunk) => {
                assert!(!chunk.data.is_empty() && chunk.data.len() <= 64 * 1024);
                self.data.extend_from_slice(&chunk.data);
                (
                    chunk.offset,
                    chunk.offset + u64::try_from(chunk.data.len()).unwrap(),
                )
            }
            Read::Gap(gap) => {
                assert!(gap.from < gap.to);
                self.missed += gap.to - gap.from;
                (gap.from, gap.to)
            }
            Read::Exit(exit) => {
                self.exit = Some(*exit);
                return;
            }
        };
        assert_eq!(*self.next.get_or_insert(begin), begin, "a hole");
        self.next = Some(end);
    }

    pub(super) fn code(&self) -> i32 {
        match self.exit.as_ref().and_then(|exit| exit.how) {
            Some(exit::How::Code(code)) => code,
            other => panic!("no code: {other:?}"),
        }
    }
}

impl Guest {
    /// Starts a program that nobody waits for.
    pub(super) async fn spawn(&self, request: AgentSpawnRequest) -> Result<AgentSpawnReply, Status> {
        Ok(within(Box::pin(self.client.clone().spawn(request)))
            .await?
            .into_inner())
    }

    pub(super) async fn attach(&self, start: AttachStart) -> Result<Attachment, Status> {
        let (input, messages) = mpsc::channel(4);
        let first = AttachIn {
            m: Some(attach_in::M::Start(start)),
        };
        input.try_send(first).unwrap();
        let mut client = self.client.clone();
        let mut output = within(client.attach(ReceiverStream::new(messages)))
            .await?
            .into_inner();
        match within(output.message()).await?.and_then(|out| out.m) {
            Some(attach_out::M::Attached(attached)) => Ok(Attachment {
                input: Some(input),
                output,
                attached,
            }),
            other => panic!("not attached: {other:?}"),
        }
    }

    pub(super) async fn logs(&self, request: AgentLogsRequest) -> Result<Heard, Status> {
        let mut output = within(Box::pin(self.client.clone().logs(request)))
            .await?
            .into_inner();
        let mut heard = Heard::default();
        while let Some(out) = within(output.message()).await? {
            heard.take(match out.m.unwrap() {
                logs_out::M::Chunk(chunk) => Read::Chunk(chunk),
                logs_out::M::Gap(gap) => Read::Gap(gap),
                logs_out::M::Exit(exit) => Read::Exit(Box::new(exit)),
            });
        }
        Ok(heard)
    }

    /// Waits for an end.
    pub(super) async fn exit_of(&self, id: u64) -> Exit {
        let request = AgentWaitRequest {
            process: by_id(id),
            timeout_ms: 300_000,
        };
        within(self.runner.wait(request)).await.unwrap().exit.unwrap()
    }

    /// A call that never was: past the gate, with nothing in it.
    pub(super) fn ctx(&self) -> ExecCtx {
        ExecCtx {
            gate: self.gate.permit().unwrap(),
            base_env: Arc::default(),
            claim: Arc::default(),
        }
    }
}

pub(super) fn detached(command: Command) -> AgentSpawnRequest {
    AgentSpawnRequest {
        command: Some(command),
        ..AgentSpawnRequest::default()
    }
}
