//! The daemon under test: a process of its own, started from a configuration file as an operator would.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{StreamExt as _, future::LocalBoxFuture};
use rustix::process::{Pid, Signal, kill_process};
use sandbox_sdk::{Client, admin::SandboxFilter, v1::State};
use tokio::{
    net::UnixDatagram,
    process::{Child, Command},
    time::{Instant, timeout},
};

use crate::Bench;

/// A start or a stop that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Releases that run at once.
const RELEASES: usize = 16;
/// All states that are not the last.
const LIVING: [State; 6] = [
    State::Making,
    State::Warm,
    State::Claimed,
    State::Ending,
    State::Failed,
    State::Quarantined,
];

/// What runs the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guests {
    /// Nothing: the daemon answers for them.
    InProcess,
    /// A silkd process each.
    Silkd,
    /// QEMU.
    Vm,
}

/// How the daemon is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) guests: Guests,
    /// Every record reaches the disk before its answer.
    pub(crate) sync_always: bool,
    /// With a policy `bench` of this many rules and so many network slots.
    pub(crate) doors: Option<Doors>,
}

/// What a daemon has for doors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Doors {
    pub(crate) rules: u16,
    pub(crate) slots: u16,
}

impl Doors {
    /// The network namespace of this process's daemons.
    pub(crate) fn namespace() -> String {
        format!("sbxbench{}", std::process::id())
    }
}

/// A running daemon.
pub(crate) struct Daemon {
    setup: Setup,
    program: PathBuf,
    /// State on the disk that is measured.
    _state: tempfile::TempDir,
    /// Sockets; their paths must be short.
    run: tempfile::TempDir,
    child: Child,
}

/// Starts a daemon, does `work` with it, and ends it and all its guests, whatever came of the work.
pub(crate) fn with<'a, T: 'a>(
    bench: &'a Bench,
    setup: Setup,
    work: impl AsyncFnOnce(&mut Daemon) -> Result<T> + 'a,
) -> LocalBoxFuture<'a, Result<T>> {
    Box::pin(async move {
        let mut daemon = Daemon::start(bench, setup).await?;
        let outcome = tokio::select! {
            outcome = work(&mut daemon) => outcome,
            interrupted = tokio::signal::ctrl_c() => match interrupted {
                Ok(()) => Err(anyhow::anyhow!("interrupted")),
                Err(error) => Err(error.into()),
            },
        };
        let stopped = Box::pin(daemon.stop()).await;
        let outcome = outcome?;
        stopped?;
        Ok(outcome)
    })
}

impl Daemon {
    async fn start(bench: &Bench, setup: Setup) -> Result<Self> {
        let state = tempfile::Builder::new()
            .prefix("state-")
            .tempdir_in(&bench.out)
            .context("make a state directory")?;
        let run = tempfile::Builder::new()
            .prefix("sbx-")
            .tempdir()
            .context("make a run directory")?;
        let program = bench.bin.join("sandboxd");
        tokio::fs::write(
            run.path().join("sandboxd.toml"),
            config(bench, setup, state.path(), run.path()),
        )
        .await
        .context("write the configuration")?;
        let (child, _took) = launch(&program, run.path()).await?;
        Ok(Self {
            setup,
            program,
            _state: state,
            run,
            child,
        })
    }

    /// A client with a connection of its own.
    pub(crate) async fn client(&self) -> Result<Client> {
        let address = format!("unix:{}", self.run.path().join("api.sock").display());
        Client::connect(&address).await.context("connect to the daemon")
    }

    /// Its number.
    pub(crate) fn pid(&self) -> Result<u32> {
        self.child.id().context("the daemon has ended")
    }

    /// Its resident memory, KiB.
    pub(crate) fn rss_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()?))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.context("the kernel tells no VmRSS")
    }

    /// Processor time that all its threads have used.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()?))?;
        // The name, in parentheses, may hold anything; utime and stime are the 12th and 13th field behind it.
        let fields = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.split_whitespace().skip(11));
        let mut fields = fields.context("a strange /proc/PID/stat")?;
        let mut ticks = || -> Result<u64> { Ok(fields.next().context("a short /proc/PID/stat")?.parse()?) };
        let sum = ticks()? + ticks()?;
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        Ok(Duration::from_nanos(
            sum.saturating_mul(1_000_000_000 / per_second),
        ))
    }

    /// Kills the daemon alone, as `kill -9` does, and starts it again. Gives the time from its start to READY.
    pub(crate) async fn crash(&mut self) -> Result<Duration> {
        self.child.kill().await.context("kill the daemon")?;
        let (child, took) = launch(&self.program, self.run.path()).await?;
        self.child = child;
        Ok(took)
    }

    async fn stop(mut self) -> Result<()> {
        // Guests in its process end with it.
        if self.setup.guests != Guests::InProcess && self.pid().is_ok() {
            timeout(PATIENCE, self.end_guests())
                .await
                .context("guests did not end")??;
        }
        if let Some(pid) = self
            .child
            .id()
            .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
        {
            kill_process(pid, Signal::TERM).context("stop the daemon")?;
        }
        match timeout(PATIENCE, self.child.wait()).await {
            Ok(ended) => {
                let ended = ended.context("wait for the daemon")?;
                ensure!(
                    ended.success(),
                    "the daemon ended with {ended}\n{}",
                    log_end(self.run.path())
                );
                Ok(())
            }
            Err(_elapsed) => {
                self.child.kill().await.context("kill the daemon")?;
                bail!("the daemon did not stop\n{}", log_end(self.run.path()))
            }
        }
    }

    async fn end_guests(&self) -> Result<()> {
        let client = self.client().await?;
        for pool in client.pools().list().await? {
            client.pools().delete(pool.spec.unwrap_or_default().name).await?;
        }
        let all = SandboxFilter {
            states: LIVING.to_vec(),
            ..SandboxFilter::default()
        };
        let mut changes = client
            .claims()
            .watch(&SandboxFilter {
                states: LIVING.into_iter().chain([State::Gone]).collect(),
                ..SandboxFilter::default()
            })
            .await?;
        let left = client.claims().list(&all).await?;
        let mut releases = futures_util::stream::iter(left)
            .map(|row| client.sandbox(row.sandbox, None))
            .map(|sandbox| async move { sandbox.release().await })
            .buffer_unordered(RELEASES);
        while let Some(released) = releases.next().await {
            released?;
        }
        loop {
            let states = client.node().info().await?.sandboxes;
            if states.iter().all(|(state, count)| state == "gone" || *count == 0) {
                return Ok(());
            }
            changes.next().await.context("the daemon ended the watch")??;
        }
    }
}

/// Starts the program and waits until it says that it serves.
async fn launch(program: &Path, run: &Path) -> Result<(Child, Duration)> {
    let socket = run.join("notify");
    // The one of the last start is in the way.
    drop(std::fs::remove_file(&socket));
    let notify = UnixDatagram::bind(&socket).context("bind the notify socket")?;
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(run.join("log"))
        .context("open the daemon's log")?;
    let began = Instant::now();
    let mut child = Command::new(program)
        .arg("serve")
        .arg("--config")
        .arg(run.join("sandboxd.toml"))
        .env("NOTIFY_SOCKET", &socket)
        .env_remove("SANDBOXD_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    let ready = async {
        let mut news = vec![0; 4096];
        loop {
            let len = notify.recv(&mut news).await?;
            let text = String::from_utf8_lossy(news.get(..len).unwrap_or_default()).into_owned();
            if text.lines().any(|line| line == "READY=1") {
                return anyhow::Ok(());
            }
        }
    };
    tokio::select! {
        ready = timeout(PATIENCE, ready) => ready.context("the daemon is not ready")??,
        ended = child.wait() => bail!("the daemon ended with {}\n{}", ended?, log_end(run)),
    }
    Ok((child, began.elapsed()))
}

/// The last lines of the daemon's log.
fn log_end(run: &Path) -> String {
    // It explains a failure; without it the failure still stands.
    let log = std::fs::read_to_string(run.join("log")).unwrap_or_default();
    let from = log.lines().count().saturating_sub(20);
    log.lines().skip(from).collect::<Vec<_>>().join("\n")
}

/// The defaults of a packaged daemon, but for where it lives and what runs the guests.
fn config(bench: &Bench, setup: Setup, state: &Path, run: &Path) -> String {
    let sync = if setup.sync_always { "always" } else { "auto" };
    let engine = match setup.guests {
        Guests::InProcess => "kind = \"stub\"\nisolates_nothing = true\nstub = { agent = \"in_process\" }",
        Guests::Silkd => "kind = \"stub\"\nisolates_nothing = true",
        Guests::Vm => "kind = \"qemu\"\nvm_user = \"\"",
    };
    let doors = setup.doors.map_or_else(String::new, |doors| {
        let rules =
            (0..doors.rules).map(|n| format!("  {{ id = \"r{n}\", host = [\"h{n}.example.org\"] }},\n"));
        format!(
            "[net]\nnamespace = \"{}\"\nslots = {}\n[egress.policy.bench]\nrules = [\n{}]\n",
            Doors::namespace(),
            doors.slots,
            rules.collect::<String>(),
        )
    });
    format!(
        "[node]\nstate_dir = {state:?}\nrun_dir = {run:?}\nmax_sandboxes = 20000\n\
         [listen]\nmetrics = \"\"\n\
         [access]\noperator_group = \"\"\n\
         [journal]\nsync = \"{sync}\"\n\
         [engine]\n{engine}\n\
         [template.default]\nimage = {image:?}\n{doors}",
        image = bench.image,
    )
}
