//! A guest in test mode, and a host's end of its link.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![expect(
    clippy::disallowed_methods,
    reason = "starts the binary under test; tests own their tasks"
)]
#![expect(dead_code, reason = "each test binary uses its part")]
#![expect(
    clippy::indexing_slicing,
    clippy::large_futures,
    reason = "no code of a service"
)]

use std::{
    future::Future,
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::TokioIo;
use sandbox_protocol::{
    limits::{HOST_CONNECTION_WINDOW, STREAM_WINDOW},
    link::{HelloReader, Nonce, encode_break},
    metadata::door,
    v1::{
        self, AgentInfoReply, AgentInfoRequest, ControlQuiesceRequest, ControlRenewReply,
        ControlRenewRequest, ExecIn, ExecOut, ExecStart, LinkHello, agent_client::AgentClient,
        agent_control_client::AgentControlClient, control_quiesce_request, control_renew_request, exec_in,
        exec_out, exit,
    },
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::UnixStream,
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, body::Body};

/// Bound against hangs, for whatever a test waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// A `silkd --serve`, ended when dropped.
pub(crate) struct Guest {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Guest {
    /// Starts one and waits until it serves.
    pub(crate) fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap())
    }

    pub(crate) fn start_in(dir: tempfile::TempDir) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_silkd")), dir)
    }

    /// Starts one by a command that passes its arguments on to silkd.
    pub(crate) fn start_by(mut command: Command, dir: tempfile::TempDir) -> Self {
        let mut child = command
            .arg("--serve")
            .arg(dir.path().join("s"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("silkd: serving ") {
            assert!(stderr.read_line(&mut said).unwrap() > 0, "ended early: {said}");
        }
        Self { dir, child, stderr }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// A file of its `<socket>.d`.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("s.d").join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.file(name)).unwrap()
    }

    /// Puts an executable hook into place.
    pub(crate) fn hook(&self, name: &str, script: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = self.file("etc/sandbox/renew.d");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(name), script).unwrap();
        std::fs::set_permissions(dir.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for its end; gives what it said.
    pub(crate) fn join(mut self) -> (ExitStatus, String, tempfile::TempDir) {
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).unwrap();
        let status = self.child.wait().unwrap();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        (status, said, dir)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // This thread waits, so the test's own end of the link answers nothing more. Another host takes its place and is
        // gone: silkd has nobody left to say farewell to.
        drop(std::os::unix::net::UnixStream::connect(self.socket()));
        // In order where it can, so that nothing is left; gone already is as good.
        if rustix::process::kill_process(pid, rustix::process::Signal::TERM).is_ok()
            && let Ok(ended) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        {
            let patience = rustix::event::Timespec {
                tv_sec: 10,
                tv_nsec: 0,
            };
            let mut ended = [rustix::event::PollFd::new(&ended, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut ended, Some(&patience)).ok();
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A host's connection, past HELLO.
pub(crate) struct Host {
    pub(crate) hello: LinkHello,
    pub(crate) agent: AgentClient<Calls>,
    pub(crate) control: AgentControlClient<Calls>,
    pub(crate) calls: Calls,
    pub(crate) tasks: Tasks,
    pub(crate) ended: tokio::task::JoinHandle<()>,
}

impl Host {
    /// Connects as a host does: BREAK once, then wait for HELLO.
    pub(crate) async fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).await.unwrap();
        Self::over(stream, fresh_nonce()).await
    }

    pub(crate) async fn over<S>(mut stream: S, nonce: Nonce) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let sent = stream.write_all(&encode_break(nonce)).await;
        assert!(sent.is_ok(), "{sent:?}");
        let (hello, behind) = read_hello(&mut stream, nonce).await;
        Self::past_hello(stream, hello, behind).await
    }

    pub(crate) async fn past_hello<S>(stream: S, hello: LinkHello, behind: Vec<u8>) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let tasks = Tasks::default();
        let io = TokioIo::new(Prefixed {
            first: behind,
            stream,
        });
        let (sender, connection) = http2::Builder::new(tasks.clone())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(HOST_CONNECTION_WINDOW)
            .handshake(io)
            .await
            .unwrap();
        let ended = tokio::spawn(async move {
            drop(connection.await);
        });
        let calls = Calls(sender);
        Self {
            hello,
            agent: AgentClient::new(calls.clone()),
            control: AgentControlClient::new(calls.clone()),
            calls,
            tasks,
            ended,
        }
    }

    /// Ends the connection without a farewell: neither GOAWAY nor a shutdown of the socket.
    pub(crate) async fn cut(self) {
        let mut tasks = std::mem::take(&mut *self.tasks.0.lock().unwrap());
        tasks.shutdown().await;
    }

    /// The status of an empty call on any path.
    pub(crate) async fn call(&mut self, path: &str) -> Status {
        use tower_service::Service as _;
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = path.parse().unwrap();
        request
            .headers_mut()
            .insert("content-type", "application/grpc".parse().unwrap());
        let response = self.calls.call(request).await.unwrap();
        Status::from_header_map(response.headers()).unwrap()
    }

    pub(crate) async fn info(&mut self) -> AgentInfoReply {
        self.agent.info(AgentInfoRequest {}).await.unwrap().into_inner()
    }

    pub(crate) async fn renew(
        &mut self,
        mode: control_renew_request::Mode,
        id: &str,
    ) -> Result<ControlRenewReply, Status> {
        self.control
            .renew(renewal(mode, id))
            .await
            .map(tonic::Response::into_inner)
    }

    pub(crate) async fn quiesce(&mut self, mode: control_quiesce_request::Mode) -> Result<(), Status> {
        let request = ControlQuiesceRequest {
            mode: mode.into(),
            deadline_ms: 0,
        };
        self.control.quiesce(request).await.map(drop)
    }
}

pub(crate) fn renewal(mode: control_renew_request::Mode, id: &str) -> ControlRenewRequest {
    let now = std::time::SystemTime::now();
    let since = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    ControlRenewRequest {
        mode: mode.into(),
        renew_id: id.into(),
        seed: vec![7; 32].into(),
        host_time: Some(prost_types::Timestamp {
            seconds: since.as_secs().try_into().unwrap(),
            nanos: since.subsec_nanos().try_into().unwrap(),
        }),
        sandbox_id: format!("sb_{id}"),
        hostname: format!("host-{id}"),
        ask_doors: false,
    }
}

/// A host's end of the doors that refuses whatever comes, as one that was armed for no claim.
pub(crate) async fn refusing(socket: PathBuf) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let nonce = fresh_nonce();
    stream.write_all(&encode_break(nonce)).await.unwrap();
    let (_hello, first) = read_hello(&mut stream, nonce).await;
    let mut connection = h2::server::handshake(Prefixed { first, stream }).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let words: &[u8] = match request.uri().to_string().as_str() {
            door::HTTP => b"HTTP/1.1 403 not_armed\r\n\r\n",
            door::SOCKS5 => &[5, 0xff],
            other => panic!("{other}"),
        };
        let mut send = respond.send_response(Response::new(()), false).unwrap();
        send.send_data(bytes::Bytes::copy_from_slice(words), true)
            .unwrap();
        // A body that is dropped before its end resets the stream.
        let mut body = request.into_body();
        drop(tokio::spawn(async move {
            while let Some(Ok(_)) = body.data().await {}
        }));
    }
}

pub(crate) fn fresh_nonce() -> Nonce {
    let mut nonce = Nonce::default();
    let n = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty()).unwrap();
    assert_eq!(n, nonce.len());
    nonce
}

pub(crate) async fn read_hello<S: AsyncRead + Unpin>(stream: &mut S, nonce: Nonce) -> (LinkHello, Vec<u8>) {
    let mut reader = HelloReader::new(nonce);
    let mut buffer = [0; 4096];
    loop {
        let n = within(stream.read(&mut buffer)).await.unwrap();
        assert!(n > 0, "the port ended before HELLO");
        if let Some(found) = reader.feed(&buffer[..n]).unwrap() {
            return found;
        }
    }
}

/// Fails a test that hangs.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_elapsed) => panic!("nothing happened within {PATIENCE:?}"),
    }
}

/// The reason in a status.
pub(crate) fn reason(status: &Status) -> String {
    use tonic_types::StatusExt as _;
    let details = status.get_error_details();
    details
        .error_info()
        .map(|info| info.reason.clone())
        .unwrap_or_default()
}

/// What hyper spawns for a connection, so that it can be cut.
#[derive(Clone, Default)]
pub(crate) struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, future: F) {
        self.0.lock().unwrap().spawn(future);
    }
}

/// Requests as tonic makes them over hyper's connection.
#[derive(Clone)]
pub(crate) struct Calls(http2::SendRequest<Body>);

impl tower_service::Service<Request<Body>> for Calls {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path_and_query().unwrap().clone();
        *request.uri_mut() = format!("http://guest{path}").parse().unwrap();
        Box::pin(self.0.send_request(request))
    }
}

/// A stream with bytes before its own.
pub(crate) struct Prefixed<S> {
    pub(crate) first: Vec<u8>,
    pub(crate) stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, into);
        }
        let n = into.remaining().min(self.first.len());
        into.put_slice(&self.first.drain(..n).collect::<Vec<_>>());
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// One Exec, as its caller sees it.
pub(crate) struct Running {
    input: Option<mpsc::Sender<ExecIn>>,
    output: tonic::Streaming<ExecOut>,
}

impl Host {
    /// Starts a program with its input open.
    pub(crate) async fn exec(&mut self, argv: &[&str]) -> Result<Running, Status> {
        let (input, rest) = mpsc::channel(4);
        let command = v1::Command {
            argv: argv.iter().map(|arg| arg.to_string().into()).collect(),
            ..v1::Command::default()
        };
        let start = ExecStart {
            command: Some(command),
            stdin: true,
            ..ExecStart::default()
        };
        let start = ExecIn {
            m: Some(exec_in::M::Start(start)),
        };
        input.send(start).await.unwrap();
        let output = within(self.agent.exec(ReceiverStream::new(rest))).await?;
        Ok(Running {
            input: Some(input),
            output: output.into_inner(),
        })
    }
}

impl Running {
    pub(crate) async fn write(&mut self, bytes: &'static [u8]) {
        let message = ExecIn {
            m: Some(exec_in::M::Stdin(bytes.into())),
        };
        self.input.as_ref().unwrap().send(message).await.unwrap();
    }

    /// No more input.
    pub(crate) fn close(&mut self) {
        self.input = None;
    }

    /// What it wrote to its stdout, and its exit code.
    pub(crate) async fn output(mut self) -> (String, i32) {
        let (mut text, mut code) = (Vec::new(), None);
        while let Some(message) = within(self.output.message()).await.unwrap() {
            match message.m.unwrap() {
                exec_out::M::Stdout(chunk) => text.extend_from_slice(&chunk.data),
                exec_out::M::Exit(exit) => code = exit.how,
                exec_out::M::Started(_) | exec_out::M::Stderr(_) => {}
            }
        }
        match code.unwrap() {
            exit::How::Code(code) => (String::from_utf8(text).unwrap(), code),
            exit::How::Signal(signal) => panic!("ended by signal {signal}"),
        }
    }

    pub(crate) async fn code(self) -> i32 {
        self.output().await.1
    }

    /// The error that it ends with.
    pub(crate) async fn failure(mut self) -> Status {
        loop {
            match within(self.output.message()).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended well"),
                Err(status) => return status,
            }
        }
    }
}
