//! The load: GETs by wrk, and tunnels by hand.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
    time::{Instant, timeout},
};

use super::{
    peers::Running,
    world::{BLAST, HTTP, ORIGIN, SILENT},
};
use crate::arm::Arm;

/// Connections of wrk, and how long it asks.
const CONNECTIONS: &str = "16";
const LASTS: &str = "3s";
/// What takes longer hangs.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// How a proxy is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaks {
    Http,
    Socks5,
}

impl Speaks {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Socks5 => "socks5",
        }
    }
}

/// So many tunnels at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tunnels(pub(super) u64);

/// What wrk saw.
pub(super) struct Gets {
    pub(super) requests: f64,
    pub(super) per_second: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// GETs of 1 KiB on kept connections, by the absolute target.
pub(super) async fn gets(proxy: &Running) -> Result<Gets> {
    let dir = tempfile::tempdir()?;
    let script = dir.path().join("absolute.lua");
    let line = format!("wrk.path = \"http://{ORIGIN}:{HTTP}/\"\nwrk.headers[\"Host\"] = \"{ORIGIN}\"\n");
    tokio::fs::write(&script, line).await?;
    let run = Command::new("wrk")
        .args(["-t", "1", "-c", CONNECTIONS, "-d", LASTS, "--latency", "-s"])
        .arg(&script)
        .arg(format!("http://{}/", proxy.at))
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, run)
        .await
        .context("wrk hangs")?
        .context("wrk")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "wrk: {text}");
    ensure!(!text.contains("Non-2xx"), "refusals: {text}");
    let word = |label: &str, at: usize| {
        let line = text.lines().map(str::trim).find(|line| line.contains(label));
        line.and_then(|line| line.split_whitespace().nth(at))
    };
    let number = |label, at| word(label, at).and_then(|text| text.parse::<f64>().ok());
    Ok(Gets {
        requests: number("requests in", 0).with_context(|| format!("no count: {text}"))?,
        per_second: number("Requests/sec:", 1).with_context(|| format!("no rate: {text}"))?,
        p50_us: word("50%", 1).and_then(micros).context("no median")?,
        p99_us: word("99%", 1).and_then(micros).context("no p99")?,
    })
}

/// wrk's times: `12.00us`, `1.23ms`, `1.00s`.
fn micros(text: &str) -> Option<f64> {
    let at = text.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(at);
    let scale = match unit {
        "us" => 1.0,
        "ms" => 1_000.0,
        "s" => 1_000_000.0,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * scale)
}

/// A tunnel by CONNECT.
pub(super) async fn tunnel_to(proxy: SocketAddr, target: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(proxy).await?;
    stream.set_nodelay(true)?;
    let head = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let head = head_of(&mut stream).await?;
    ensure!(head.split(' ').nth(1) == Some("200"), "refused: {head}");
    Ok(stream)
}

/// A tunnel to a port of the origin.
async fn tunnel(proxy: &Running, port: u16) -> Result<TcpStream> {
    match proxy.speaks {
        Speaks::Http => tunnel_to(proxy.at, &format!("{ORIGIN}:{port}")).await,
        Speaks::Socks5 => {
            let mut stream = TcpStream::connect(proxy.at).await?;
            stream.set_nodelay(true)?;
            stream.write_all(&[5, 1, 0]).await?;
            let mut greeted = [0; 2];
            stream.read_exact(&mut greeted).await?;
            let [a, b, c, d] = Ipv4Addr::octets(&ORIGIN);
            let [high, low] = port.to_be_bytes();
            stream.write_all(&[5, 1, 0, 1, a, b, c, d, high, low]).await?;
            let mut reply = [0; 10];
            stream.read_exact(&mut reply).await?;
            ensure!(reply.get(1) == Some(&0), "refused: {reply:?}");
            Ok(stream)
        }
    }
}

/// A head, and nothing behind it.
async fn head_of(stream: &mut TcpStream) -> Result<String> {
    let mut head = Vec::new();
    let mut piece = [0; 512];
    while !head.ends_with(b"\r\n\r\n") {
        let n = stream.read(&mut piece).await?;
        if n == 0 {
            bail!("ended early: {}", head.escape_ascii());
        }
        head.extend_from_slice(piece.get(..n).unwrap_or_default());
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// Tunnels, one after another, from the dial to the proxy's word that it stands.
pub(super) async fn dials(proxy: &Running, n: usize, arm: &mut Arm) -> Result<()> {
    for _ in 0..n {
        let began = Instant::now();
        let stream = timeout(PATIENCE, tunnel(proxy, SILENT))
            .await
            .context("a dial hangs")??;
        arm.add(began.elapsed());
        drop(stream);
    }
    Ok(())
}

/// Bytes from the origin, through so many tunnels at once.
pub(super) async fn bytes(proxy: &Running, tunnels: Tunnels, all: u64) -> Result<Duration> {
    let each = all / tunnels.0;
    let began = Instant::now();
    let pulls = (0..tunnels.0).map(|_| pull(proxy, each));
    let pulled = futures_util::future::try_join_all(pulls);
    timeout(PATIENCE, pulled).await.context("a tunnel hangs")??;
    Ok(began.elapsed())
}

async fn pull(proxy: &Running, bytes: u64) -> Result<()> {
    let mut stream = tunnel(proxy, BLAST).await?;
    stream.write_u64(bytes).await?;
    let mut piece = vec![0; 256 << 10];
    let mut came = 0;
    while came < bytes {
        let n = stream.read(&mut piece).await?;
        ensure!(n > 0, "{came} of {bytes} bytes came");
        came += u64::try_from(n)?;
    }
    Ok(())
}

/// Requests that the door refuses, each on a connection of its own.
pub(super) async fn denials(door: &Running, n: usize, arm: &mut Arm) -> Result<()> {
    for _ in 0..n {
        let began = Instant::now();
        let mut stream = TcpStream::connect(door.at).await?;
        let head = "GET http://denied.example.org/ HTTP/1.1\r\nHost: denied.example.org\r\nConnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        arm.add(began.elapsed());
        ensure!(
            answer.starts_with(b"HTTP/1.1 403 host_not_allowed"),
            "{}",
            answer.escape_ascii()
        );
    }
    arm.round();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_wrk_are_read() {
        assert_eq!(micros("340.00us"), Some(340.0));
        assert_eq!(micros("1.50ms"), Some(1_500.0));
        assert_eq!(micros("2.00s"), Some(2_000_000.0));
        assert_eq!(micros("2.00m"), None);
    }
}
