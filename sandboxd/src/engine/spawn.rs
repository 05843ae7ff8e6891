//! The only starter of processes, and the one way in which each of them ends.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    net::UnixStream,
    sync::{OnceCell, oneshot},
    time::{sleep, timeout},
};

use super::{
    EngineError, ExitReport, Identity, PortName,
    cgroup::{self, Cgroups},
    process::{Process, Pulse, Unborn},
    slotdir::{CONSOLE, STDERR, SlotDir},
};
use crate::{
    names::{self, SlotNumber},
    sys::{self, ChildSetup},
    tasks,
    telemetry::GuestText,
};

/// From SIGKILL to proved death; the kernel needs milliseconds unless the process hangs in a driver.
const DEATH: Duration = Duration::from_secs(10);
/// Between two looks whether a port has room.
const ROOM: Duration = Duration::from_millis(1);
/// Bytes of a console or error file that are looked at.
const TAIL: u64 = 1024;

/// Where programs are, for what is started from here.
pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Which account a process gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A program to start in a run directory.
#[derive(Debug)]
pub(super) struct Spec {
    pub(super) program: PathBuf,
    pub(super) args: Vec<OsString>,
    /// Kept open in it under their own numbers.
    pub(super) keep: Vec<OwnedFd>,
    pub(super) account: Option<Account>,
    /// Bytes beyond which it can extend no file.
    pub(super) file_limit: Option<u64>,
    /// Whether its run directory is its working directory. Else it is `/`: another account cannot enter the first.
    pub(super) inside: bool,
}

/// A process in its run directory. Dropping it ends nothing.
#[derive(Debug)]
pub(super) struct Housed {
    process: Arc<Process>,
    dir: Arc<SlotDir>,
    cgroup: Option<PathBuf>,
    ended: OnceCell<()>,
    /// Asked for politely first, for that long; a guest is not asked.
    grace: Option<Duration>,
}

/// One that is being made: dropping it kills the process and leaves the directory.
#[derive(Debug)]
pub(super) struct Nascent {
    process: Unborn,
    dir: Arc<SlotDir>,
    cgroup: Option<PathBuf>,
}

/// Starts a program in a session of its own, with nothing of ours but what it was given. Cancelled, it leaves at most a
/// directory without a process.
pub(super) async fn start(
    dir: Arc<SlotDir>,
    spec: Spec,
    cgroups: Option<Arc<Cgroups>>,
) -> Result<Nascent, EngineError> {
    let (made, wanted) = oneshot::channel();
    let task = tasks::blocking("start a process", move || {
        let started = start_blocking(dir, spec, cgroups.as_deref());
        if let Err(Ok(unwanted)) = made.send(started) {
            unwanted.discard();
        }
    });
    let started = wanted.await.unwrap_or(Err(EngineError::Stopped));
    // It has nothing more to do; that it panicked was told as `Stopped`.
    drop(task.await);
    started
}

#[expect(clippy::disallowed_methods, reason = "the one starter of processes")]
fn start_blocking(dir: Arc<SlotDir>, spec: Spec, cgroups: Option<&Cgroups>) -> Result<Nascent, EngineError> {
    let host = |what: &'static str| move |error| EngineError::host(what, error);
    let (cgroup, group) = match cgroups {
        Some(cgroups) => group_of(&dir, cgroups),
        None => (None, None),
    };
    let identity = dir.lock_file(cgroup.as_deref());
    let (identity, lock) = identity.map_err(host("make the identity file"))?;
    let work = if spec.inside {
        dir.fd()
    } else {
        File::open("/").map(OwnedFd::from)
    };
    let setup = ChildSetup {
        dir: work.map_err(host("use the working directory"))?,
        lock,
        identity,
        group,
        keep: spec.keep,
        file_limit: spec.file_limit,
    };
    let stderr = dir.append(STDERR).map_err(host("make the error file"))?;
    let mut command = Command::new(&spec.program);
    command.args(&spec.args);
    // Nothing of the daemon's environment, which may hold secrets, but where programs are.
    command.env_clear().env("PATH", PATH);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    if let Some(account) = spec.account {
        command.uid(account.uid).gid(account.gid);
    }
    sys::set_up_child(&mut command, setup);
    let mut child = command
        .spawn()
        .map_err(|error| EngineError::host(format!("start {}", spec.program.display()), error))?;
    // Beyond this the handle of std is not needed: the pidfd watches, reaps and outlives it.
    let process = Process::of_child(child.id()).map_err(|error| {
        // Without a pidfd it cannot be kept, and is ended through what there is; the first error is the one to tell.
        drop(child.kill().and_then(|()| child.wait()));
        EngineError::host("watch the process just started", error)
    })?;
    if let Some(group) = &cgroup
        && process.ended().is_none()
        && !cgroup::is_populated(group)
    {
        tracing::warn!(group = %group.display(), "a machine could not enter its control group");
    }
    Ok(Nascent {
        process: Unborn::new(process),
        dir,
        cgroup,
    })
}

/// A group for the machine in this directory, and the way into it.
fn group_of(dir: &SlotDir, cgroups: &Cgroups) -> (Option<PathBuf>, Option<OwnedFd>) {
    let made = dir.inode().and_then(|inode| {
        let group = cgroups.of(inode);
        cgroup::make(&group).map(|procs| (group, procs))
    });
    match made {
        Ok((group, procs)) => (Some(group), Some(procs)),
        Err(error) => {
            tracing::warn!(%error, "a machine stays in the daemon's control group");
            (None, None)
        }
    }
}

impl Nascent {
    /// Ends it at once, with its group, for a starter who left. Blocks until it is dead.
    fn discard(self) {
        let Some(process) = self.process.get() else {
            return;
        };
        let ended = process.end_blocking(DEATH);
        let group = self.cgroup.as_deref().map_or(Ok(()), cgroup::remove);
        if let Err(error) = ended.and(group) {
            tracing::warn!(%error, "a process whose start was broken off is not gone");
        }
    }

    /// Moves it to its slot; `AlreadyExists` if that is taken.
    pub(super) fn rename(&self, to: &Path) -> io::Result<()> {
        self.dir.rename(to)
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<&str> {
        self.process.get().and_then(Process::ended)
    }

    /// Lives on from here: dropping ends nothing any more.
    pub(super) fn settle(self, grace: Option<Duration>) -> Result<Housed, EngineError> {
        let process = self.process.born().ok_or(EngineError::Stopped)?;
        Ok(Housed {
            process: Arc::new(process),
            dir: self.dir,
            cgroup: self.cgroup,
            ended: OnceCell::new(),
            grace,
        })
    }

    /// What it said before it ended, or while it lives.
    pub(super) fn report(&self) -> ExitReport {
        ExitReport {
            status: self.ended().unwrap_or("running").to_owned(),
            console: said(&self.dir),
        }
    }

    /// Resolves with its report once it has ended. Cancel safe.
    pub(super) async fn died(&self) -> ExitReport {
        match self.process.get() {
            Some(process) => {
                process.exited().await;
                self.report()
            }
            None => std::future::pending().await,
        }
    }
}

impl Housed {
    /// Takes over what an earlier daemon left in this directory: lock, pid and start time must all agree.
    pub(super) fn adopt(
        dir: Arc<SlotDir>,
        identity: Identity,
        grace: Option<Duration>,
    ) -> Result<Self, EngineError> {
        let look = dir
            .look()
            .map_err(|error| EngineError::host("read the identity file", error))?;
        let gone = |why: &str| EngineError::Gone { why: why.to_owned() };
        if !look.held {
            return Err(gone("no process holds its identity file"));
        }
        if look.identity != Some(identity) {
            return Err(gone("its directory belongs to another process"));
        }
        let process =
            Process::find(identity).map_err(|error| EngineError::host("open the process", error))?;
        let process = process.ok_or_else(|| gone("its process has ended"))?;
        Ok(Self {
            process: Arc::new(process),
            dir,
            cgroup: look.cgroup,
            ended: OnceCell::new(),
            grace,
        })
    }

    /// The same for a slot's directory.
    pub(super) fn attach(
        run_root: &Path,
        slot: SlotNumber,
        identity: Identity,
        grace: Option<Duration>,
    ) -> Result<Self, EngineError> {
        let dir = open(run_root, slot)?.ok_or_else(|| EngineError::Gone {
            why: "its run directory is gone".to_owned(),
        })?;
        Self::adopt(dir, identity, grace)
    }

    pub(super) fn identity(&self) -> Identity {
        self.process.identity()
    }

    /// Whether it lives, to be asked without this handle.
    pub(super) fn pulse(&self) -> Pulse {
        Pulse::of(&self.process)
    }

    /// Opens the host's end of a port, as soon as it has room. Whoever calls has a limit. Cancel safe.
    pub(super) async fn connect(&self, port: PortName) -> Result<UnixStream, EngineError> {
        loop {
            if let Some(status) = self.ended() {
                return Err(EngineError::Gone {
                    why: status.to_owned(),
                });
            }
            match self.dir.connect(port.socket()).await {
                Ok(stream) => return Ok(stream),
                // An emulator takes one connection at a time, and queues one. No event tells that there is room again.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(ROOM).await,
                Err(error) => return Err(EngineError::host(format!("open port {}", port.as_str()), error)),
            }
        }
    }

    pub(super) fn dir(&self) -> Arc<SlotDir> {
        Arc::clone(&self.dir)
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<&str> {
        self.process.ended()
    }

    /// SIGKILL, without waiting.
    pub(super) fn strike(&self) -> Result<(), EngineError> {
        let struck = self.process.signal(Signal::KILL);
        struck.map_err(|error| EngineError::host("kill the process", error))
    }

    /// Resolves once it has ended. Cancel safe.
    pub(super) async fn exited(&self) -> ExitReport {
        let status = self.process.exited().await.to_owned();
        ExitReport {
            status,
            console: self.said(),
        }
    }

    /// The last that guest and emulator said.
    pub(super) fn said(&self) -> GuestText {
        said(&self.dir())
    }

    /// Ends it, proves its death, removes group and directory. Concurrent callers share one teardown; after a failure the
    /// next call begins anew.
    pub(super) async fn kill(&self) -> Result<(), EngineError> {
        self.ended.get_or_try_init(|| self.end()).await.map(|_done| ())
    }

    async fn end(&self) -> Result<(), EngineError> {
        if let Some(grace) = self.grace.filter(|_| self.ended().is_none()) {
            let asked = self.process.signal(Signal::TERM);
            asked.map_err(|error| EngineError::host("ask the process to end", error))?;
            // Late is no failure: it is killed then.
            drop(timeout(grace, self.process.exited()).await.map(str::to_owned));
        }
        self.strike()?;
        let late = |_elapsed| EngineError::Late {
            what: "the death of the process",
            limit: DEATH,
        };
        timeout(DEATH, self.process.exited()).await.map_err(late)?;
        if let Some(group) = &self.cgroup {
            end_group(&self.dir, group).await?;
        }
        remove(self.dir()).await
    }
}

/// Ends whatever lives in a directory and removes it: the one teardown of what no [`Housed`] stands for.
pub(super) async fn reap(dir: Arc<SlotDir>, grace: Option<Duration>) -> Result<(), EngineError> {
    let look = dir
        .look()
        .map_err(|error| EngineError::host("read the identity file", error))?;
    if look.held {
        let Some(identity) = look.identity else {
            return Err(unproven(
                &dir,
                "its identity file is locked but says nothing".to_owned(),
            ));
        };
        match Housed::adopt(Arc::clone(&dir), identity, grace) {
            Ok(housed) => return housed.kill().await,
            // It may have ended since the first look: then nothing is left to be proved, and the lock has fallen.
            Err(EngineError::Gone { why }) => {
                let again = dir.look();
                if again.map_or(true, |look| look.held) {
                    return Err(unproven(&dir, why));
                }
            }
            Err(other) => return Err(other),
        }
    }
    if let Some(identity) = look.identity {
        // The lock falls a moment before the process can be reaped. After a reboot it may be a stranger's number: such
        // a one is neither signalled nor waited for long.
        if let Ok(Some(process)) = Process::find(identity) {
            drop(timeout(DEATH, process.exited()).await.map(str::to_owned));
        }
    }
    if let Some(group) = &look.cgroup {
        end_group(&dir, group).await?;
    }
    remove(dir).await
}

/// Ends whatever lives in a slot and frees it.
pub(super) async fn reap_slot(
    run_root: &Path,
    slot: SlotNumber,
    grace: Option<Duration>,
) -> Result<(), EngineError> {
    match open(run_root, slot)? {
        Some(dir) => reap(dir, grace).await,
        None => Ok(()),
    }
}

/// The directory of a slot; `None` if there is none.
fn open(run_root: &Path, slot: SlotNumber) -> Result<Option<Arc<SlotDir>>, EngineError> {
    match SlotDir::open(&names::run_dir(run_root, slot)) {
        Ok(dir) => Ok(Some(Arc::new(dir))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(EngineError::host("open a run directory", error)),
    }
}

fn unproven(dir: &SlotDir, why: String) -> EngineError {
    EngineError::Unproven { dir: dir.path(), why }
}

async fn end_group(dir: &SlotDir, group: &Path) -> Result<(), EngineError> {
    let inode = dir
        .inode()
        .map_err(|error| EngineError::host("look at the run directory", error))?;
    match timeout(DEATH, cgroup::end(group, inode)).await {
        Ok(ended) => ended.map_err(|error| EngineError::host("remove its control group", error)),
        Err(_elapsed) => Err(EngineError::Late {
            what: "the end of its control group",
            limit: DEATH,
        }),
    }
}

async fn remove(dir: Arc<SlotDir>) -> Result<(), EngineError> {
    let removed = tasks::blocking("remove a run directory", move || dir.remove()).await;
    removed
        .map_err(|_panicked| EngineError::Stopped)?
        .map_err(|error| EngineError::host("remove its run directory", error))
}

/// The last of the console, or of the error output where the console is empty.
fn said(dir: &SlotDir) -> GuestText {
    [CONSOLE, STDERR]
        .into_iter()
        .filter_map(|name| dir.tail(name, TAIL).ok())
        .find(|bytes| !bytes.is_empty())
        .map(|bytes| GuestText::tail(&bytes))
        .unwrap_or_default()
}
