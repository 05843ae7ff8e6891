//! Starting QEMU: what every machine, blank process and proof has in common.

use std::{
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::timeout;

use super::{
    args::{self, Fds, Outward, Start},
    qmp::{self, Qmp},
    wire::{Capability, MigrateCapabilities},
};
use crate::{
    engine::{
        Capture, EngineError, PortName, Tap,
        capture::Loaded,
        cgroup::Cgroups,
        slotdir::{CONSOLE, SlotDir},
        spawn::{self, Account, Nascent, Spec},
    },
    image::{Image, Rootfs},
    tasks,
    words::{Accel, Size},
};

/// Bytes that a VMM may write to any one file: its console and its own complaints. A guest that floods its console
/// loses the rest of it and disturbs nobody.
const CLONE_FILES: u64 = 256 * 1024;
/// The same for a VMM that also writes the state of its devices: 105 KiB for a small guest.
const TEMPLATE_FILES: u64 = 64 * 1024 * 1024;

/// For a process whose sockets broke to be seen to have ended.
const DYING: Duration = Duration::from_secs(1);

/// What starting needs to know of the host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) program: PathBuf,
    pub(super) run_root: PathBuf,
    pub(super) cgroups: Option<Arc<Cgroups>>,
    /// As whom VMMs run, where not as the daemon.
    pub(super) account: Option<Account>,
    /// The same for one that needs `/dev/kvm`.
    pub(super) kvm_account: Option<Account>,
    /// Why such a one cannot be, where VMMs have an account of their own.
    pub(super) no_kvm: Option<String>,
    pub(super) group: tasks::Group,
    pub(super) counter: AtomicU64,
}

/// A QEMU that answers QMP and is nobody's yet.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) nascent: Nascent,
    pub(super) qmp: Qmp,
    pub(super) version: String,
    pub(super) dir: Arc<SlotDir>,
}

/// What to start.
struct Recipe<'a> {
    accel: Accel,
    size: Size,
    start: Start<'a>,
    memory: OwnedFd,
    image: Vec<OwnedFd>,
    rootfs: Option<(OwnedFd, &'a Rootfs)>,
    tap: Option<Tap>,
    file_limit: u64,
}

impl Host {
    /// A directory of the engine's own.
    pub(super) fn hidden(&self, what: &str) -> PathBuf {
        let number = self.counter.fetch_add(1, Ordering::Relaxed);
        self.run_root.join("run").join(format!(".{what}-{number}"))
    }

    /// Boots an image; the memory file is readable from here.
    pub(super) async fn boot(
        &self,
        path: &Path,
        accel: Accel,
        image: &Image,
        size: Size,
        tap: Option<Tap>,
    ) -> Result<(Started, OwnedFd), EngineError> {
        let (Some(kernel), Some(initrd)) = (image.kernel(), image.initrd()) else {
            return Err(EngineError::Unsupported("a VM without an image"));
        };
        let own = |fd: BorrowedFd<'_>| again(fd).map_err(|error| EngineError::host("use the image", error));
        let (kernel, initrd) = (own(kernel)?, own(initrd)?);
        let rootfs = match (image.rootfs(), &image.manifest().rootfs) {
            (Some(fd), Some(rootfs)) => Some((own(fd)?, rootfs)),
            (Some(_) | None, _) => None,
        };
        let memory = crate::engine::ram::memory_file("sandbox", size.memory.0);
        let memory = memory.map_err(|error| EngineError::host("make memory for a guest", error))?;
        let shared = again(memory.as_fd()).map_err(|error| EngineError::host("share memory", error))?;
        let recipe = Recipe {
            accel,
            size,
            start: Start::Boot {
                kernel: kernel.as_raw_fd(),
                initrd: initrd.as_raw_fd(),
                cmdline: &image.manifest().cmdline,
            },
            memory: shared,
            image: vec![kernel, initrd],
            rootfs,
            tap,
            file_limit: TEMPLATE_FILES,
        };
        let started = self.start(path, |dir| self.spec(dir, recipe)).await?;
        Ok((started, memory))
    }

    /// Starts a process that waits for the device state of this capture, with everything done that can be done before.
    pub(super) async fn blank(
        &self,
        path: &Path,
        accel: Accel,
        capture: &Capture,
        tap: Option<Tap>,
    ) -> Result<Started, EngineError> {
        let loaded = capture.load().await.map_err(EngineError::Capture)?;
        let manifest = capture.manifest();
        let own =
            |fd: &OwnedFd| again(fd.as_fd()).map_err(|error| EngineError::host("share a template", error));
        let rootfs = match (&loaded.rootfs, &manifest.image.rootfs) {
            (Some(fd), Some(rootfs)) => Some((own(fd)?, rootfs)),
            (Some(_) | None, _) => None,
        };
        let recipe = Recipe {
            accel,
            size: manifest.size,
            start: Start::Load,
            memory: own(&loaded.ram)?,
            image: Vec::new(),
            rootfs,
            tap,
            file_limit: CLONE_FILES,
        };
        let started = self.start(path, |dir| self.spec(dir, recipe)).await?;
        let events = MigrateCapabilities {
            capabilities: vec![Capability {
                capability: "events",
                state: true,
            }],
        };
        match started.qmp.ask(events).await {
            Ok(_done) => Ok(started),
            Err(error) => Err(self.undo(started, error).await),
        }
    }

    /// Asks the program for its version, which also proves that it starts under its jail.
    pub(super) async fn inquire(&self) -> Result<String, EngineError> {
        let spec = |dir: &SlotDir| {
            let qmp = dir.listen(qmp::SOCKET)?;
            Ok(Spec {
                program: self.program.clone(),
                args: args::inquiry(qmp.as_raw_fd()),
                keep: vec![qmp],
                account: self.account,
                file_limit: Some(CLONE_FILES),
                inside: false,
            })
        };
        let started = self.start(&self.hidden("inquiry"), spec).await?;
        let version = started.version.clone();
        started.end().await?;
        Ok(version)
    }

    fn spec(&self, dir: &SlotDir, recipe: Recipe<'_>) -> std::io::Result<Spec> {
        let has_card = recipe.tap.is_some();
        let qmp = dir.listen(qmp::SOCKET)?;
        let agent = dir.listen(PortName::Agent.socket())?;
        let outward: OwnedFd = match recipe.tap {
            Some(Tap(queue)) => queue,
            None => dir.listen(PortName::Egress.socket())?,
        };
        let number = outward.as_raw_fd();
        let console = dir.append(CONSOLE)?;
        let fds = Fds {
            memory: recipe.memory.as_raw_fd(),
            qmp: qmp.as_raw_fd(),
            agent: agent.as_raw_fd(),
            outward: if has_card {
                Outward::Card(number)
            } else {
                Outward::Port(number)
            },
            console: console.as_raw_fd(),
        };
        let rootfs = recipe
            .rootfs
            .as_ref()
            .map(|(fd, rootfs)| (fd.as_raw_fd(), *rootfs));
        let args = args::machine(recipe.accel, recipe.size, &recipe.start, fds, rootfs);
        let mut keep = recipe.image;
        keep.extend([recipe.memory, qmp, agent, outward, console]);
        keep.extend(recipe.rootfs.map(|(fd, _)| fd));
        Ok(Spec {
            program: self.program.clone(),
            args,
            keep,
            account: match recipe.accel {
                Accel::Kvm => self.kvm_account,
                Accel::Tcg | Accel::None => self.account,
            },
            file_limit: Some(recipe.file_limit),
            inside: false,
        })
    }

    /// Starts a process in a new directory and waits until it answers QMP. After an error nothing is left.
    async fn start(
        &self,
        path: &Path,
        spec: impl FnOnce(&SlotDir) -> std::io::Result<Spec>,
    ) -> Result<Started, EngineError> {
        let dir = SlotDir::create(path).map_err(|error| EngineError::host("make a run directory", error))?;
        let dir = Arc::new(dir);
        let started = async {
            let spec = spec(&dir).map_err(|error| EngineError::host("fill a run directory", error))?;
            let nascent = spawn::start(Arc::clone(&dir), spec, self.cgroups.clone()).await?;
            let (qmp, version) = tokio::select! {
                biased;
                report = nascent.died() => return Err(EngineError::Died(report)),
                answered = Qmp::connect(Arc::clone(&dir), &self.group) => match answered {
                    Ok(answered) => answered,
                    // The socket of a process that ends breaks before its end can be seen.
                    Err(error) => return Err(match timeout(DYING, nascent.died()).await {
                        Ok(report) => EngineError::Died(report),
                        Err(_alive) => error,
                    }),
                },
            };
            Ok(Started {
                nascent,
                qmp,
                version,
                dir: Arc::clone(&dir),
            })
        };
        match Box::pin(started).await {
            Ok(started) => Ok(started),
            Err(error) => Err(undo(dir, error).await),
        }
    }

    /// Ends what was started, and gives the error back; one of a machine that has died tells how.
    pub(super) async fn undo(&self, started: Started, error: EngineError) -> EngineError {
        let error = match started.nascent.ended() {
            Some(_) => EngineError::Died(started.nascent.report()),
            None => error,
        };
        let dir = Arc::clone(&started.dir);
        drop(started);
        undo(dir, error).await
    }
}

/// Takes back what a failed start made. The first error is the one to tell; what cannot be taken back is told in the
/// log, and the directory stands for it.
async fn undo(dir: Arc<SlotDir>, error: EngineError) -> EngineError {
    if let Err(left) = spawn::reap(dir, None).await {
        tracing::warn!(error = %left, "a machine that failed to start is not gone yet");
    }
    error
}

impl Started {
    /// Ends it without a trace.
    pub(super) async fn end(self) -> Result<(), EngineError> {
        let dir = Arc::clone(&self.dir);
        drop(self);
        spawn::reap(dir, None).await
    }
}

/// The same descriptor under a number of its own.
fn again(fd: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    fd.try_clone_to_owned()
}

/// The device state with a position of its own: clones read it at the same time.
pub(super) fn state_of(loaded: &Loaded) -> Result<OwnedFd, EngineError> {
    use rustix::fs::{Mode, OFlags};
    let path = format!("/proc/self/fd/{}", loaded.state.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| EngineError::host("open the device state", error))
}
