//! Agent's calls through the daemon: every method, much input, ends of one direction, readers that stall, clients that
//! vanish.

use std::path::{Path, PathBuf};

use harness::{Daemon, HANG, Setup, agent::Calls, process::Process, tour::Tour, within};
use sandbox_protocol::v1::{
    AgentInfoRequest, AgentReadRequest, LspIn, LspStart, PortForwardEof, PortForwardIn, PortForwardOpen,
    PortForwardOut, ReadOut, WriteIn, WriteStart, lsp_in, lsp_out, lsp_start, port_forward_in,
    port_forward_out, read_out, write_in,
};
use sandbox_sdk::{Sandbox, v1::State};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// A daemon, a claimed sandbox of it, and calls to that.
struct Claimed {
    calls: Calls,
    sandbox: Sandbox,
    daemon: Daemon,
}

async fn claimed() -> Claimed {
    let daemon = Setup::stub().warm(1).start().await;
    let sandbox = daemon.client().await.claim("default").await.unwrap();
    let calls = Box::pin(calls(&daemon, &sandbox, &[])).await;
    Claimed {
        calls,
        sandbox,
        daemon,
    }
}

async fn calls(daemon: &Daemon, sandbox: &Sandbox, more: &[(&'static str, &str)]) -> Calls {
    let token = sandbox.token().unwrap().expose().to_owned();
    Box::pin(daemon.calls(sandbox.id(), &token, more)).await
}

impl Claimed {
    /// The guest's silkd; guests of the stub engine are processes here.
    async fn silkd(&self) -> Process {
        let rows = self.daemon.rows(&[State::Claimed]).await;
        let pid = rows.first().and_then(|row| row.pid).unwrap();
        Process::look(pid.try_into().unwrap()).unwrap()
    }

    /// Where the guest's languages are: below the folder of its socket.
    async fn languages(&self) -> PathBuf {
        let silkd = self.silkd().await;
        let args = std::fs::read(format!("/proc/{}/cmdline", silkd.pid)).unwrap();
        let socket = args.split(|byte| *byte == 0).nth(2).unwrap();
        let socket = std::str::from_utf8(socket).unwrap();
        let cwd = std::fs::read_link(format!("/proc/{}/cwd", silkd.pid)).unwrap();
        let etc = cwd.join(format!("{socket}.d")).join("etc/silkd");
        assert!(etc.is_dir(), "{} is no folder", etc.display());
        etc.join("lsp.d")
    }
}

/// KiB of memory that a process has.
fn resident(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_rpc_through_sandboxd() {
    let guest = Box::pin(claimed()).await;
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("tour").to_str().unwrap().to_owned();
    let languages = guest.languages().await.to_str().unwrap().to_owned();
    Box::pin(Tour::new(guest.calls.clone(), base, languages).walk()).await;
}

/// Bytes in an order that no frame size divides.
fn bytes(length: usize) -> Vec<u8> {
    (0..u32::try_from(length).unwrap())
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0])
        .collect()
}

async fn write(calls: &mut Calls, path: &Path, data: &[u8]) -> Result<u64, Status> {
    let start = WriteStart {
        path: path.to_str().unwrap().to_owned().into(),
        size: Some(data.len().try_into().unwrap()),
        ..WriteStart::default()
    };
    let chunks = data
        .chunks(256 * 1024)
        .map(|chunk| write_in::M::Data(chunk.to_vec().into()));
    let messages: Vec<WriteIn> = std::iter::once(write_in::M::Start(start))
        .chain(chunks)
        .map(|m| WriteIn { m: Some(m) })
        .collect();
    let reply = within(HANG, calls.write(tokio_stream::iter(messages))).await?;
    Ok(reply.into_inner().bytes)
}

async fn read(calls: &mut Calls, path: &Path) -> Streaming<ReadOut> {
    let request = AgentReadRequest {
        path: path.to_str().unwrap().to_owned().into(),
        ..AgentReadRequest::default()
    };
    within(HANG, calls.read(request)).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn f04_much_goes_in_and_out_and_grows_neither_process() {
    const LENGTH: usize = 64 * 1024 * 1024;
    let mut guest = Box::pin(claimed()).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("much");
    let data = bytes(LENGTH);
    // The first call makes what the others find.
    write(&mut guest.calls, &dir.path().join("first"), &data[..1024 * 1024])
        .await
        .unwrap();
    let pids = [guest.daemon.process().pid, guest.silkd().await.pid];
    let before = pids.map(resident);
    let written = write(&mut guest.calls, &path, &data).await.unwrap();
    assert_eq!(written, u64::try_from(LENGTH).unwrap());
    assert!(std::fs::read(&path).unwrap() == data, "another content arrived");

    // One reader stalls, another reads it all: the first has cost nothing and still gets every byte.
    let mut stalled = read(&mut guest.calls, &path).await;
    let mut got = Vec::new();
    let mut reader = read(&mut guest.calls, &path).await;
    while let Some(out) = within(HANG, reader.message()).await.unwrap() {
        if let Some(read_out::M::Data(data)) = out.m {
            got.extend_from_slice(&data);
        }
    }
    assert!(got == data, "{} bytes came back otherwise", got.len());
    for (pid, before) in pids.into_iter().zip(before) {
        let grown = resident(pid).saturating_sub(before);
        assert!(grown < 24 * 1024, "process {pid} grew by {grown} KiB");
    }
    let mut count = 0;
    while let Some(out) = within(HANG, stalled.message()).await.unwrap() {
        if let Some(read_out::M::Data(part)) = out.m {
            assert!(part[..] == data[count..count + part.len()]);
            count += part.len();
        }
    }
    assert_eq!(count, LENGTH);
}

async fn accept(listener: &TcpListener) -> TcpStream {
    within(HANG, listener.accept()).await.unwrap().0
}

/// A forward that is accepted, and its input.
async fn forward(calls: &mut Calls, port: u16) -> (mpsc::Sender<PortForwardIn>, Streaming<PortForwardOut>) {
    let (input, rest) = mpsc::channel(4);
    let open = PortForwardOpen {
        port: port.into(),
        address: 0,
    };
    input.send(said(port_forward_in::M::Open(open))).await.unwrap();
    let mut output = within(HANG, calls.port_forward(ReceiverStream::new(rest)))
        .await
        .unwrap()
        .into_inner();
    let first = within(HANG, output.message()).await.unwrap().unwrap();
    assert!(matches!(first.m, Some(port_forward_out::M::Ready(_))));
    (input, output)
}

const fn said(m: port_forward_in::M) -> PortForwardIn {
    PortForwardIn { m: Some(m) }
}

#[tokio::test(flavor = "multi_thread")]
async fn f09_each_direction_of_a_forward_ends_alone_through_sandboxd() {
    let mut guest = Box::pin(claimed()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    for by_message in [true, false] {
        let (input, mut output) = forward(&mut guest.calls, port).await;
        let mut program = accept(&listener).await;
        input
            .send(said(port_forward_in::M::Data("ping".into())))
            .await
            .unwrap();
        if by_message {
            input
                .send(said(port_forward_in::M::Eof(PortForwardEof {})))
                .await
                .unwrap();
        }
        drop(input);
        let mut got = Vec::new();
        within(HANG, program.read_to_end(&mut got)).await.unwrap();
        assert_eq!(got, b"ping");
        program.write_all(b"pong").await.unwrap();
        drop(program);
        let mut seen = Vec::new();
        while let Some(out) = within(HANG, output.message()).await.unwrap() {
            seen.push(out.m.unwrap());
        }
        assert_eq!(
            seen,
            [
                port_forward_out::M::Data("pong".into()),
                port_forward_out::M::Eof(PortForwardEof {})
            ]
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn f10_a_client_that_vanishes_resets_its_forward_and_leaves_no_process() {
    let guest = Box::pin(claimed()).await;
    let languages = guest.languages().await;
    std::fs::create_dir_all(&languages).unwrap();
    std::fs::write(languages.join("echo"), "cat\n").unwrap();
    // A connection of its own, which goes without a word.
    let mut vanishing = Box::pin(calls(&guest.daemon, &guest.sandbox, &[])).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let forwarded = forward(&mut vanishing, port).await;
    let mut program = accept(&listener).await;
    let (input, rest) = mpsc::channel(1);
    let start = LspStart {
        which: Some(lsp_start::Which::Language("echo".to_owned())),
        linger_secs: Some(0),
        ..LspStart::default()
    };
    let start = LspIn {
        m: Some(lsp_in::M::Start(start)),
    };
    input.send(start).await.unwrap();
    let mut server = within(HANG, vanishing.lsp_open(ReceiverStream::new(rest)))
        .await
        .unwrap()
        .into_inner();
    let started = within(HANG, server.message()).await.unwrap().unwrap();
    let Some(lsp_out::M::Started(started)) = started.m else {
        panic!("{started:?}");
    };
    let process = Process::look(started.pid.try_into().unwrap()).unwrap();
    drop((vanishing, forwarded, input, server));
    // What it had open is broken off: an end, or a reset where its half was still open.
    let ended = within(HANG, program.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    process.gone().await;
    assert!(
        guest
            .sandbox
            .exec(["true"])
            .output()
            .await
            .unwrap()
            .status
            .success()
    );
}

#[tokio::test]
async fn inv_19_a_call_that_needs_a_newer_agent_is_refused_by_the_host() {
    let guest = Box::pin(claimed()).await;
    let mut newer = Box::pin(calls(&guest.daemon, &guest.sandbox, &[("agent-proto-min", "99")])).await;
    let refused = within(HANG, newer.info(AgentInfoRequest {})).await.unwrap_err();
    let written = write(&mut newer, Path::new("/nowhere"), b"x").await.unwrap_err();
    for refused in [refused, written] {
        assert_eq!(refused.code(), Code::FailedPrecondition);
        let details = String::from_utf8_lossy(refused.details()).into_owned();
        assert!(details.contains("AGENT_TOO_OLD"), "{details}");
        assert_eq!(refused.metadata().get("sandbox-origin").unwrap(), "host");
    }
}
