//! What of `agent` moves bytes: files, terminals, ports. Over silkd's link, without a daemon between.

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use sandbox_protocol::v1::{
    ExecIn, ExecStart, PortForwardIn, PortForwardOpen, Tty, exec_in, exec_out, port_forward_in,
    port_forward_out,
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::mpsc,
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    agent_files,
    arm::Arm,
    guest::{Guest, command},
};

/// Round trips of each kind.
const TRIPS: usize = 2_000;

/// Rows of files, terminals and ports.
pub(crate) async fn rows(guest: &mut Guest) -> Result<Vec<(&'static str, Value)>> {
    Ok(vec![
        ("files", Box::pin(agent_files::alone(guest)).await?),
        ("pty_round_trip_us", Box::pin(terminal(guest)).await?.json()),
        ("forward_round_trip_us", Box::pin(forward(guest)).await?.json()),
    ])
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
