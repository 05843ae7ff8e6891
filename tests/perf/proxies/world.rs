//! The far side: a network namespace with an origin, reached by a link of its own. Gone with the bench.

use std::{net::Ipv4Addr, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream, UdpSocket},
    process::{Child, Command},
};
use tokio_rustls::TlsAcceptor;

use super::tls::Certificates;

/// The origin, of a range that is nobody's.
pub(crate) const ORIGIN: Ipv4Addr = Ipv4Addr::new(198, 18, 77, 2);
/// Serves GET.
pub(crate) const HTTP: u16 = 80;
/// Takes connections and says nothing.
pub(crate) const SILENT: u16 = 9_000;
/// Sends as many bytes as it is asked for.
pub(crate) const BLAST: u16 = 9_001;
/// Speaks TLS by a certificate of the bench.
pub(crate) const TLS: u16 = 443;
/// Answers for names.
pub(crate) const DNS: u16 = 53;
/// Body of an answer.
const BODY: usize = 1024;

/// The namespace and its origin.
pub(super) struct World {
    namespace: String,
    origin: Option<Child>,
}

impl World {
    pub(super) async fn make(certificates: Certificates<'_>) -> Result<Self> {
        let id = std::process::id();
        let namespace = format!("sbxorigin{id}");
        // An interface's name has at most 15 bytes.
        let (near, far) = (format!("sbo{id}"), format!("sbp{id}"));
        let mut world = Self {
            namespace: namespace.clone(),
            origin: None,
        };
        let outcome = async {
            ip(&["netns", "add", &namespace]).await?;
            ip(&[
                "link", "add", &near, "type", "veth", "peer", "name", &far, "netns", &namespace,
            ])
            .await?;
            ip(&["addr", "add", "198.18.77.1/30", "dev", &near]).await?;
            ip(&["link", "set", &near, "up"]).await?;
            ip(&["-n", &namespace, "addr", "add", "198.18.77.2/30", "dev", &far]).await?;
            ip(&["-n", &namespace, "link", "set", &far, "up"]).await?;
            let mut child = Command::new("ip")
                .args(["netns", "exec", &namespace])
                .arg(std::env::current_exe()?)
                .arg("origin")
                .arg(certificates.0)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .context("start the origin")?;
            let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
            let line = lines.next_line().await?;
            ensure!(line.as_deref() == Some("ready"), "the origin said {line:?}");
            world.origin = Some(child);
            anyhow::Ok(())
        };
        match outcome.await {
            Ok(()) => Ok(world),
            Err(error) => {
                // What failed is the news.
                drop(world.remove().await);
                Err(error)
            }
        }
    }

    /// Ends the origin and removes the namespace, its link with it.
    pub(super) async fn remove(mut self) -> Result<()> {
        if let Some(mut origin) = self.origin.take() {
            origin.kill().await.context("end the origin")?;
        }
        ip(&["netns", "del", &self.namespace]).await
    }
}

async fn ip(args: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(args).output().await.context("ip")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {said}", args.join(" "));
    Ok(())
}

/// The origin's own process: serves until it is killed.
#[expect(
    clippy::print_stdout,
    reason = "the printer of a program that its parent reads"
)]
pub(crate) async fn origin(certificates: Certificates<'_>) -> Result<()> {
    let http = TcpListener::bind((ORIGIN, HTTP)).await?;
    let silent = TcpListener::bind((ORIGIN, SILENT)).await?;
    let blast = TcpListener::bind((ORIGIN, BLAST)).await?;
    let tls = TcpListener::bind((ORIGIN, TLS)).await?;
    let acceptor = certificates.acceptor()?;
    let dns = UdpSocket::bind((ORIGIN, DNS)).await?;
    drop(tokio::spawn(harness::names(dns, ORIGIN, |_name| {})));
    println!("ready");
    loop {
        // Whoever leaves early is no fault of the origin's.
        tokio::select! {
            accepted = http.accept() => drop(tokio::spawn(answer(accepted?.0))),
            accepted = silent.accept() => drop(tokio::spawn(hold(accepted?.0))),
            accepted = blast.accept() => drop(tokio::spawn(send(accepted?.0))),
            accepted = tls.accept() => drop(tokio::spawn(shake(accepted?.0, acceptor.clone()))),
        }
    }
}

async fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {BODY}\r\n\r\n").into_bytes();
    reply.resize(reply.len() + BODY, b'x');
    let mut head = Vec::new();
    let mut piece = vec![0; 16 << 10];
    loop {
        let n = stream.read(&mut piece).await?;
        if n == 0 {
            return Ok(());
        }
        head.extend_from_slice(piece.get(..n).unwrap_or_default());
        while let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") {
            head.drain(..end + 4);
            stream.write_all(&reply).await?;
        }
    }
}

async fn hold(mut stream: TcpStream) -> Result<()> {
    let mut piece = [0; 64];
    while stream.read(&mut piece).await? > 0 {}
    Ok(())
}

async fn shake(stream: TcpStream, acceptor: TlsAcceptor) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut tls = Box::pin(acceptor.accept(stream)).await?;
    let mut piece = [0; 64];
    while tls.read(&mut piece).await? > 0 {}
    Ok(())
}

async fn send(mut stream: TcpStream) -> Result<()> {
    let mut left = stream.read_u64().await?;
    let piece = vec![7; 256 << 10];
    while left > 0 {
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        stream.write_all(piece.get(..n).unwrap_or_default()).await?;
        left -= u64::try_from(n)?;
    }
    stream.shutdown().await?;
    Ok(())
}
