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
        AgentInfoReply, AgentInfoRequest, Command, EnvVar, ExecIn, ExecOut, ExecStart, Exit, Started,
        agent_client::AgentClient,
        agent_server::{Agent, AgentServer},
        exec_in, exec_out, exit,
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

/// A bound against hangs; nothing takes nearly that long.
pub(super) const HANG: Duration = Duration::from_secs(60);

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
        let ctx = ExecCtx {
            gate: self.gate.permit()?,
            base_env: Arc::default(),
            claim: self.claim.clone(),
        };
        let stream = agent::exec::start(&self.runner, ctx, request.into_inner()).await?;
        Ok(Response::new(Box::pin(stream)))
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

fn own_cgroup() -> OwnCgroup {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let path = fields.next()?;
        (fields.next()? == "cgroup2").then_some(path)
    });
    let root = Path::new(root.expect("a cgroup2 mount is needed"));
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = root.join(format!("silkd-test-{}-{count}", std::process::id()));
    std::fs::create_dir(&path).expect("a cgroup2 mount that may be written to is needed");
    OwnCgroup(path)
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

    fn start_as(cgroup: Option<OwnCgroup>, claim: ClaimDefaults, pid1: bool) -> Self {
        let config = RunConfig {
            cgroup_root: cgroup.as_ref().map(|cgroup| cgroup.0.clone()),
            pid1,
        };
        let runner = Runner::start(&config).unwrap();
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
