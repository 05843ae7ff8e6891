//! What of `agent` moves bytes: files, terminals, ports. Over silkd's link, without a daemon between.
#![expect(clippy::large_futures, reason = "no code of a service")]

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use futures_util::StreamExt as _;
use sandbox_protocol::{
    limits::CHUNK_IN,
    v1::{
        AgentReadRequest, ExecIn, ExecStart, PortForwardIn, PortForwardOpen, Tty, WriteIn, WriteStart,
        exec_in, exec_out, port_forward_in, port_forward_out, read_out, write_in,
    },
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::mpsc,
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    arm::{Arm, millis, timed},
    guest::{Guest, command, memory_kib},
};

/// Bytes of the file.
const FILE: u64 = 256 << 20;
/// Round trips of each kind.
const TRIPS: usize = 2_000;

/// Rows of files, terminals and ports.
pub(crate) async fn rows(guest: &mut Guest) -> Result<Vec<(&'static str, Value)>> {
    Ok(vec![
        ("files", Box::pin(files(guest)).await?),
        ("pty_round_trip_us", Box::pin(terminal(guest)).await?.json()),
        ("forward_round_trip_us", Box::pin(forward(guest)).await?.json()),
    ])
}

/// A file written whole and read again, on the file system of the temporary directory.
async fn files(guest: &mut Guest) -> Result<Value> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("file").into_os_string().into_encoded_bytes();
    let chunk = Bytes::from_iter((0..CHUNK_IN).map(|n| u8::try_from(n % 251).unwrap_or(0)));
    let chunks = FILE / u64::try_from(CHUNK_IN)?;
    let start = write_in::M::Start(WriteStart {
        path: path.clone().into(),
        size: Some(FILE),
        ..WriteStart::default()
    });
    let data = futures_util::stream::iter(0..chunks).map({
        let chunk = chunk.clone();
        move |_| write_in::M::Data(chunk.clone())
    });
    let messages = futures_util::stream::iter([start]).chain(data);
    let messages = messages.map(|m| WriteIn { m: Some(m) });
    let (pushed, reply) = timed(guest.agent.write(messages)).await;
    ensure!(reply?.into_inner().bytes == FILE, "a short write");
    let began = Instant::now();
    let request = AgentReadRequest {
        path: path.into(),
        ..AgentReadRequest::default()
    };
    let mut output = guest.agent.read(request).await?.into_inner();
    let (mut sha, mut bytes) = (Sha256::new(), 0_u64);
    while let Some(message) = output.message().await? {
        if let Some(read_out::M::Data(data)) = message.m {
            bytes += u64::try_from(data.len())?;
            sha.update(&data);
        }
    }
    let pulled = began.elapsed();
    let mut expected = Sha256::new();
    (0..chunks).for_each(|_| expected.update(&chunk));
    ensure!(
        bytes == FILE && sha.finalize() == expected.finalize(),
        "other bytes came"
    );
    let rate = |took: Duration| -> Result<f64> {
        let mib = f64::from(u32::try_from(FILE >> 20)?);
        Ok((mib / took.as_secs_f64()).round())
    };
    Ok(json!({
        "mib": FILE >> 20,
        "write_ms": millis(pushed),
        "write_mib_per_s": rate(pushed)?,
        "read_ms": millis(pulled),
        "read_mib_per_s": rate(pulled)?,
        "silkd_peak_rss_kib": memory_kib(guest.pid()?, "status", "VmHWM:")?,
    }))
}

/// A byte typed at a terminal, until the program behind it has said it again.
async fn terminal(guest: &mut Guest) -> Result<Arm> {
    let (typed, messages) = mpsc::channel(4);
    let mut wanted = command(&["sh", "-c", "stty raw -echo; echo ready; exec cat"]);
    wanted.tty = Some(Tty {
        cols: 80,
        rows: 24,
        ..Tty::default()
    });
    let start = ExecStart {
        command: Some(wanted),
        stdin: true,
        ..ExecStart::default()
    };
    let send = |m| ExecIn { m: Some(m) };
    typed.send(send(exec_in::M::Start(start))).await?;
    let reply = guest.agent.exec(ReceiverStream::new(messages)).await?;
    let mut output = reply.into_inner();
    let mut next = async || -> Result<Option<Bytes>> {
        match output.message().await?.and_then(|message| message.m) {
            Some(exec_out::M::Stdout(chunk)) => Ok(Some(chunk.data)),
            Some(exec_out::M::Started(_)) => Ok(None),
            other => bail!("the terminal ended: {other:?}"),
        }
    };
    let mut said = Vec::new();
    while !said.ends_with(b"ready\n") {
        said.extend(next().await?.unwrap_or_default());
    }
    let mut arm = Arm::new()?;
    for _ in 0..TRIPS {
        let began = Instant::now();
        typed
            .send(send(exec_in::M::Stdin(Bytes::from_static(b"x"))))
            .await?;
        ensure!(next().await?.as_deref() == Some(b"x"), "something else came back");
        arm.add(began.elapsed());
    }
    arm.round();
    Ok(arm)
}

/// A byte sent to a port of the guest, until it comes back. Who sends it back is in the client's thread.
async fn forward(guest: &mut Guest) -> Result<Arm> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let echo = tokio::spawn(async move {
        let (mut stream, _address) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let mut byte = [0];
        while stream.read(&mut byte).await? == 1 {
            stream.write_all(&byte).await?;
        }
        anyhow::Ok(())
    });
    let (sent, messages) = mpsc::channel(4);
    let send = |m| PortForwardIn { m: Some(m) };
    let open = PortForwardOpen {
        port: port.into(),
        ..PortForwardOpen::default()
    };
    sent.send(send(port_forward_in::M::Open(open))).await?;
    let reply = guest.agent.port_forward(ReceiverStream::new(messages)).await?;
    let mut output = reply.into_inner();
    let mut next = async || {
        output
            .message()
            .await
            .map(|message| message.and_then(|message| message.m))
    };
    let ready = next().await?.context("no answer")?;
    ensure!(
        matches!(ready, port_forward_out::M::Ready(_)),
        "not ready: {ready:?}"
    );
    let mut arm = Arm::new()?;
    for _ in 0..TRIPS {
        let began = Instant::now();
        sent.send(send(port_forward_in::M::Data(Bytes::from_static(b"x"))))
            .await?;
        let back = next().await?.context("the port ended")?;
        ensure!(
            matches!(back, port_forward_out::M::Data(_)),
            "something else came back: {back:?}"
        );
        arm.add(began.elapsed());
    }
    arm.round();
    drop((sent, output));
    echo.abort();
    Ok(arm)
}
