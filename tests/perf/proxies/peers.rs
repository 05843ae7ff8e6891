//! The proxies: how each is configured, started on its core, and ended. None writes a log of requests but ours, which has its
//! audit.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::{sleep, timeout},
};

use super::{PROXY, load::Speaks, tls::Certificates};

/// A start or end that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks whether a proxy of others listens, which it does not tell.
const LOOK: Duration = Duration::from_millis(20);

/// A proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Door,
    /// Without its audit.
    DoorUnaudited,
    Tinyproxy,
    Squid,
    Dante,
    Microsocks,
}

impl Peer {
    pub(super) const ALL: [Self; 6] = [
        Self::Door,
        Self::DoorUnaudited,
        Self::Tinyproxy,
        Self::Squid,
        Self::Dante,
        Self::Microsocks,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Door => "door",
            Self::DoorUnaudited => "door_unaudited",
            Self::Tinyproxy => "tinyproxy",
            Self::Squid => "squid",
            Self::Dante => "dante",
            Self::Microsocks => "microsocks",
        }
    }

    pub(super) const fn speaks(self) -> &'static [Speaks] {
        match self {
            Self::Door => &[Speaks::Http, Speaks::Socks5],
            Self::DoorUnaudited | Self::Tinyproxy | Self::Squid => &[Speaks::Http],
            Self::Dante | Self::Microsocks => &[Speaks::Socks5],
        }
    }

    /// How it is started, and its configuration, which lies at `path`.
    fn recipe(self, port: u16, path: &str, certificates: Certificates<'_>) -> Result<(Vec<String>, String)> {
        Ok(match self {
            Self::Door | Self::DoorUnaudited => {
                let own = std::env::current_exe()?.display().to_string();
                let mut args = vec![own, "door".to_owned(), certificates.0.display().to_string()];
                if self == Self::Door {
                    let dir = Path::new(path).parent().context("no folder")?;
                    args.push(dir.display().to_string());
                }
                (args, String::new())
            }
            Self::Tinyproxy => (
                ["tinyproxy", "-d", "-c", path].map(str::to_owned).into(),
                format!(
                    "Port {port}\nListen 127.0.0.1\nTimeout 600\nMaxClients 600\nLogLevel Critical\nLogFile \"/dev/null\"\n"
                ),
            ),
            Self::Squid => (
                ["squid", "-N", "-f", path].map(str::to_owned).into(),
                format!(
                    "http_port 127.0.0.1:{port}\nhttp_access allow all\ncache deny all\naccess_log none\n\
                     cache_log /dev/null\ncache_store_log none\npid_filename none\ncoredump_dir /\n\
                     shutdown_lifetime 0 seconds\nnetdb_filename none\n"
                ),
            ),
            Self::Dante => (
                ["danted", "-f", path].map(str::to_owned).into(),
                format!(
                    "internal: 127.0.0.1 port = {port}\nexternal: 198.18.77.1\nsocksmethod: none\n\
                     clientmethod: none\nerrorlog: /dev/null\n\
                     client pass {{ from: 0/0 to: 0/0 }}\nsocks pass {{ from: 0/0 to: 0/0 }}\n"
                ),
            ),
            Self::Microsocks => (
                ["microsocks", "-i", "127.0.0.1", "-p", &port.to_string()]
                    .map(str::to_owned)
                    .into(),
                String::new(),
            ),
        })
    }
}

/// A proxy that runs.
pub(super) struct Running {
    child: Child,
    pub(super) speaks: Speaks,
    pub(super) at: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Running {
    /// Starts one that serves.
    pub(super) async fn start(peer: Peer, speaks: Speaks, certificates: Certificates<'_>) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("sbx-").tempdir()?;
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?.local_addr()?;
        let port = free.port();
        let file = dir.path().join("conf");
        let path = file.display().to_string();
        let (args, conf) = peer.recipe(port, &path, certificates)?;
        tokio::fs::write(&file, conf).await?;
        let mut child = Command::new("taskset")
            .args(["-c", &PROXY.to_string()])
            .args(&args)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("start a proxy with taskset")?;
        let at = if matches!(peer, Peer::Door | Peer::DoorUnaudited) {
            let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
            let line = lines.next_line().await?.context("the door ended early")?;
            let ports = line
                .split(' ')
                .map(str::parse::<u16>)
                .collect::<Result<Vec<_>, _>>()?;
            let port = ports
                .get(usize::from(speaks == Speaks::Socks5))
                .context("no port")?;
            SocketAddr::from((Ipv4Addr::LOCALHOST, *port))
        } else {
            // What it says is nobody's.
            drop(child.stdout.take());
            timeout(PATIENCE, listens(&mut child, free))
                .await
                .with_context(|| format!("{} does not listen", peer.name()))??;
            free
        };
        Ok(Self {
            child,
            speaks,
            at,
            _dir: dir,
        })
    }

    /// Processor time of it and of all that it started.
    pub(super) fn cpu(&self) -> Result<Duration> {
        let root = self.child.id().context("the proxy has ended")?;
        let mut family = vec![root];
        let mut ticks = 0;
        let all = processes()?;
        let mut at = 0;
        while let Some(parent) = family.get(at).copied() {
            family.extend(all.iter().filter(|one| one.parent == parent).map(|one| one.pid));
            at += 1;
        }
        for one in all.iter().filter(|one| family.contains(&one.pid)) {
            ticks += one.ticks;
        }
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        Ok(Duration::from_nanos(
            ticks.saturating_mul(1_000_000_000 / per_second),
        ))
    }

    /// Ends it, and what it started.
    pub(super) async fn stop(mut self) -> Result<()> {
        let root = self.child.id().context("the proxy has ended")?;
        let children: Vec<u32> = processes()?
            .into_iter()
            .filter(|one| one.parent == root)
            .map(|one| one.pid)
            .collect();
        for pid in children {
            if let Some(pid) = rustix::process::Pid::from_raw(i32::try_from(pid)?) {
                // It may have ended.
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap_or(());
            }
        }
        self.child.kill().await.context("end a proxy")
    }
}

async fn listens(child: &mut Child, at: SocketAddr) -> Result<()> {
    loop {
        if TcpStream::connect(at).await.is_ok() {
            return Ok(());
        }
        if let Some(ended) = child.try_wait()? {
            bail!("it ended with {ended}");
        }
        sleep(LOOK).await;
    }
}

struct Process {
    pid: u32,
    parent: u32,
    ticks: u64,
}

/// All processes; one that ends meanwhile is left out.
fn processes() -> Result<Vec<Process>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        // The name, in parentheses, may hold anything. Behind it: state, ppid, ..., utime and stime, those of children.
        let (_, rest) = stat.rsplit_once(')').context("a strange /proc/PID/stat")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
        let sum = [11, 12, 13, 14].map(number).into_iter().flatten().sum();
        let parent = number(1).context("a short /proc/PID/stat")?;
        ensure!(fields.len() > 14, "a short /proc/PID/stat");
        all.push(Process {
            pid,
            parent: u32::try_from(parent)?,
            ticks: sum,
        });
    }
    Ok(all)
}
