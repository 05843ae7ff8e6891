//! A silkd of its own on a Unix socket, and a host's end of its link: calls without a daemon between.
#![expect(clippy::large_futures, reason = "no code of a service")]

use std::{
    path::Path,
    pin::Pin,
    process::Stdio,
    task::{Context as TaskContext, Poll},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandbox_protocol::{
    limits::{HOST_CONNECTION_WINDOW, MESSAGE_IN, WIDE_WINDOW},
    v1::{
        AgentSpawnRequest, AgentWaitRequest, AgentWork, Command, ControlRenewRequest, ExecIn, ExecStart,
        ProcessRef, agent_client::AgentClient, agent_control_client::AgentControlClient,
        control_renew_request::Mode, exec_in, exec_out, process_ref::Which,
    },
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::UnixStream,
    process::Child,
    task::JoinHandle,
};
use tonic::body::Body;
use tower_service::Service;

/// A start that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running silkd, and the one connection to it.
pub(crate) struct Guest {
    child: Child,
    pub(crate) agent: AgentClient<Calls>,
    connection: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Guest {
    /// Starts one and renews it.
    pub(crate) async fn start(bin: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("sbx-").tempdir()?;
        let socket = dir.path().join("s");
        let mut child = tokio::process::Command::new(bin.join("silkd"))
            .arg("--serve")
            .arg(&socket)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("start silkd")?;
        let mut lines = BufReader::new(child.stderr.take().context("no output")?).lines();
        let serves = async {
            loop {
                match lines.next_line().await? {
                    Some(line) if line.contains("serving ") => return anyhow::Ok(()),
                    Some(_line) => {}
                    None => bail!("silkd ended early"),
                }
            }
        };
        tokio::time::timeout(PATIENCE, serves)
            .await
            .context("silkd does not serve")??;
        let (calls, connection) = connect(&socket).await?;
        renew(calls.clone()).await?;
        Ok(Self {
            child,
            agent: AgentClient::new(calls).max_decoding_message_size(MESSAGE_IN),
            connection,
            _dir: dir,
        })
    }

    /// Its number.
    pub(crate) fn pid(&self) -> Result<u32> {
        self.child.id().context("silkd has ended")
    }

    /// Runs a program to its end; gives silkd's counts if `trace`.
    pub(crate) async fn exec(&mut self, argv: &[&str], trace: bool) -> Result<Option<AgentWork>> {
        self.exec_start(ExecStart {
            command: Some(command(argv)),
            trace,
            ..ExecStart::default()
        })
        .await
    }

    /// As [`exec`](Self::exec), whatever is asked for.
    pub(crate) async fn exec_start(&mut self, start: ExecStart) -> Result<Option<AgentWork>> {
        let first = ExecIn {
            m: Some(exec_in::M::Start(start)),
        };
        let reply = self.agent.exec(futures_util::stream::iter([first])).await?;
        let mut output = reply.into_inner();
        let mut last = None;
        while let Some(message) = output.message().await? {
            last = message.m;
        }
        match last {
            Some(exec_out::M::Exit(exit)) => Ok(exit.work),
            other => bail!("an Exec without an exit: {other:?}"),
        }
    }

    /// Starts a program that nobody waits for, and waits for its end all the same.
    pub(crate) async fn spawn(&mut self, argv: &[&str]) -> Result<u64> {
        let request = AgentSpawnRequest {
            command: Some(command(argv)),
            ..AgentSpawnRequest::default()
        };
        let id = self.agent.spawn(request).await?.into_inner().id;
        let wait = AgentWaitRequest {
            process: Some(ProcessRef {
                which: Some(Which::Id(id)),
            }),
            timeout_ms: 60_000,
        };
        self.agent.wait(wait).await?;
        Ok(id)
    }

    /// Ends it, as its host does.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let pid = i32::try_from(self.pid()?)?;
        let pid = rustix::process::Pid::from_raw(pid).context("no pid")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await??;
        self.connection.abort();
        ensure!(ended.success(), "silkd ended with {ended}");
        Ok(())
    }
}

pub(crate) fn command(argv: &[&str]) -> Command {
    Command {
        argv: argv.iter().map(|arg| (*arg).to_owned().into()).collect(),
        ..Command::default()
    }
}

/// BREAK, HELLO, then HTTP/2, driven by a task of this thread.
async fn connect(socket: &Path) -> Result<(Calls, JoinHandle<()>)> {
    let stream = UnixStream::connect(socket).await?;
    let (_hello, io) = sandboxd::link::greet(stream, [7; 16]).await?;
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(WIDE_WINDOW)
        .initial_connection_window_size(HOST_CONNECTION_WINDOW)
        .handshake(TokioIo::new(io))
        .await?;
    let connection = tokio::spawn(async move { drop(connection.await) });
    Ok((Calls(sender), connection))
}

async fn renew(calls: Calls) -> Result<()> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let request = ControlRenewRequest {
        mode: Mode::Boot.into(),
        renew_id: "bench".to_owned(),
        seed: vec![7; 32].into(),
        host_time: Some(prost_types::Timestamp {
            seconds: i64::try_from(now.as_secs())?,
            nanos: i32::try_from(now.subsec_nanos())?,
        }),
        sandbox_id: "sb_bench".to_owned(),
        ask_doors: false,
        hostname: "bench".to_owned(),
    };
    AgentControlClient::new(calls).renew(request).await?;
    Ok(())
}

/// Requests as tonic makes them over hyper's connection.
#[derive(Clone)]
pub(crate) struct Calls(http2::SendRequest<Body>);

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        if let Ok(uri) = format!("http://guest{path}").parse() {
            *request.uri_mut() = uri;
        }
        Box::pin(self.0.send_request(request))
    }
}

/// A line of `/proc/PID/<file>`, in KiB.
pub(crate) fn memory_kib(pid: u32, file: &str, line: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}"))?;
    let value = text.lines().find_map(|text| text.strip_prefix(line));
    let kib = value.and_then(|value| value.split_whitespace().next()?.parse().ok());
    kib.with_context(|| format!("the kernel tells no {line}"))
}
