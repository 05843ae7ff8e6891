//! What an Exec of `true` costs beside what it cannot do without: a bare start and wait of the same program, and an
//! empty RPC on the same connection. Rounds of all arms are interleaved.
//!
//!
//! `exec_cost [rounds]`; starts itself again as the server, on a Unix socket, as silkd is used in test mode.
#![expect(clippy::print_stdout, reason = "it prints what it measured")]

use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandbox_protocol::{
    limits::{GUEST_CONNECTION_WINDOW, STREAM_WINDOW},
    v1::{
        AgentInfoReply, AgentInfoRequest, Command, ExecIn, ExecStart,
        agent_client::AgentClient,
        agent_server::{Agent, AgentServer},
        exec_in, exec_out,
    },
};
use silkd::{
    agent, clock,
    gate::{Gate, Turn},
    run::{ClaimDefaults, ExecCtx, RunConfig, Runner},
};
use tokio::net::{UnixListener, UnixStream};
use tonic::{Request, Response, Status, Streaming, body::Body, codegen::BoxStream};
use tower_service::Service;

type Failure = Box<dyn Error + Send + Sync>;

struct Served {
    runner: Runner,
    gate: Gate,
}

#[tonic::async_trait]
impl Agent for Served {
    async fn info(&self, _request: Request<AgentInfoRequest>) -> Result<Response<AgentInfoReply>, Status> {
        Ok(Response::new(AgentInfoReply::default()))
    }

    async fn exec(
        &self,
        request: Request<Streaming<ExecIn>>,
    ) -> Result<Response<BoxStream<sandbox_protocol::v1::ExecOut>>, Status> {
        let ctx = ExecCtx {
            gate: self.gate.permit()?,
            base_env: Arc::default(),
            claim: Arc::new(ClaimDefaults::default()),
        };
        let stream = Box::pin(agent::exec::start(&self.runner, ctx, request.into_inner())).await?;
        Ok(Response::new(Box::pin(stream)))
    }
}

#[derive(Clone)]
struct Dialled(hyper::client::conn::http2::SendRequest<Body>);

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

async fn serve(folder: &Path) -> Result<(), Failure> {
    let cgroup = std::env::var_os("EXEC_COST_CGROUP").map(Into::into);
    let runner = Runner::start(&RunConfig {
        cgroup_root: cgroup,
        pid1: false,
    })?;
    let gate = Gate::new();
    gate.turn(Turn::Renew)?;
    gate.turn(Turn::Renewed)?;
    let listener = UnixListener::bind(folder.join("socket"))?;
    println!("ready");
    let (io, _address) = listener.accept().await?;
    let service = AgentServer::new(Served {
        runner: runner.clone(),
        gate,
    });
    let answer = hyper::service::service_fn(move |request| {
        let mut service = service.clone();
        async move { service.call(request).await.map_err(|never: Infallible| never) }
    });
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(GUEST_CONNECTION_WINDOW)
        .serve_connection(TokioIo::new(io), answer);
    // It ends when the client goes.
    drop(connection.await);
    runner.stop(Duration::ZERO).await;
    Ok(())
}

async fn exec(client: &mut AgentClient<Dialled>) -> Result<(), Failure> {
    let start = ExecStart {
        command: Some(Command {
            argv: vec![Bytes::from_static(b"/bin/true")],
            ..Command::default()
        }),
        ..ExecStart::default()
    };
    let first = ExecIn {
        m: Some(exec_in::M::Start(start)),
    };
    let mut output = client
        .exec(futures_util::stream::iter([first]))
        .await?
        .into_inner();
    let mut last = None;
    while let Some(message) = output.message().await? {
        last = message.m;
    }
    match last {
        Some(exec_out::M::Exit(_)) => Ok(()),
        other => Err(format!("no exit: {other:?}").into()),
    }
}

fn median(times: &mut [Duration]) -> (Duration, Duration) {
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
    (at(50), at(90))
}

#[expect(clippy::disallowed_methods, reason = "the bare arm, and the server beside it")]
async fn measure(rounds: usize) -> Result<(), Failure> {
    use std::{io::BufRead as _, process};
    let folder = tempfile::tempdir()?;
    let mut server = process::Command::new(std::env::current_exe()?)
        .arg("serve")
        .arg(folder.path())
        .stdout(process::Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    std::io::BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let io = UnixStream::connect(folder.path().join("socket")).await?;
    let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .handshake(TokioIo::new(io))
        .await?;
    let connection = silkd::tasks::spawn(connection);
    let origin = http::Uri::from_static("http://guest");
    let mut client = AgentClient::with_origin(Dialled(sender), origin);
    let (mut bare, mut empty, mut execs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds + 20 {
        let mut arms = [clock::since_boot(); 4];
        process::Command::new("/bin/true")
            .stdin(process::Stdio::null())
            .status()?;
        arms[1] = clock::since_boot();
        client.info(AgentInfoRequest {}).await?;
        arms[2] = clock::since_boot();
        exec(&mut client).await?;
        arms[3] = clock::since_boot();
        // The first ones warm up.
        if round >= 20 {
            bare.push(arms[1] - arms[0]);
            empty.push(arms[2] - arms[1]);
            execs.push(arms[3] - arms[2]);
        }
    }
    drop(client);
    drop(connection.await);
    server.wait()?;
    let (bare, empty, execs) = (median(&mut bare), median(&mut empty), median(&mut execs));
    println!("n = {rounds}; p50 / p90 in us");
    for (name, (p50, p90)) in [
        ("bare start + wait", bare),
        ("empty RPC", empty),
        ("Exec of true", execs),
    ] {
        println!("{name:20} {:6} / {:6}", p50.as_micros(), p90.as_micros());
    }
    let ratio = execs.0.as_secs_f64() / (bare.0 + empty.0).as_secs_f64();
    println!("Exec / (bare + empty) at p50: {ratio:.2}");
    Ok(())
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args_os().skip(1);
    let first = args.next();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    if first.as_deref() == Some("serve".as_ref()) {
        let folder = args.next().ok_or("no folder")?;
        return runtime.block_on(serve(Path::new(&folder)));
    }
    let rounds = first
        .and_then(|rounds| rounds.to_str()?.parse().ok())
        .unwrap_or(3000);
    runtime.block_on(measure(rounds))
}
