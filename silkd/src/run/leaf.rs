//! Leaves: one cgroup per process tree, `work/l<n>`, ready before it is needed. A program is born into its leaf, so
//! nothing it starts can leave it, and one write ends all of it. A leaf is given back only when the kernel says that
//! it is empty.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::Errno,
    process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, setrlimit},
};
use tokio::io::Interest;

use super::RunError;
use crate::sys;

/// Leaves that stand ready: more than programs usually run at once. Making one takes up to a millisecond under
/// emulation.
const READY: usize = 32;
/// Bytes of `cgroup.events`, of which the first lines matter.
const EVENTS: usize = 256;
/// Bytes of `cgroup.procs` that are read: 65,536 processes of 7 digits.
const PROCS: u64 = 512 * 1024;
/// Rounds of signalling a tree that goes on forking meanwhile. A signal other than KILL promises no more.
const ROUNDS: usize = 4;
/// Descriptors beyond the limit for an end that would else not come: one is needed, and other threads may be quicker.
const BEYOND: u64 = 64;
/// Handles of processes that are held at once.
const HANDLES: usize = 256;

/// `work` and its leaves.
#[derive(Debug)]
pub(super) struct Work {
    path: PathBuf,
    dir: OwnedFd,
    free: Mutex<Vec<Leaf>>,
    made: AtomicU64,
}

/// One cgroup, owned by whoever may put processes there.
#[derive(Debug)]
pub(super) struct Leaf {
    number: u64,
    /// It can be used no more, see [`Work::put`].
    killed: AtomicBool,
    dir: Arc<OwnedFd>,
    events: OwnedFd,
}

impl Work {
    /// Makes `work` below an existing cgroup2 directory, and its first leaves.
    ///
    /// # Errors
    /// The kernel's, by the step that failed.
    pub(super) fn open(root: &Path) -> Result<Self, RunError> {
        let path = root.join("work");
        let failed = |step: &'static str| {
            let path = path.clone();
            move |errno: Errno| RunError::Cgroup {
                step,
                path,
                source: errno.into(),
            }
        };
        match rustix::fs::mkdir(&path, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed("make")(errno)),
        }
        let dir = open_dir(rustix::fs::CWD, &path).map_err(failed("open"))?;
        let work = Self {
            dir,
            free: Mutex::default(),
            made: AtomicU64::new(0),
            path: path.clone(),
        };
        // Whoever is in it was left by a silkd that did not stop cleanly.
        work.kill().map_err(failed("kill what is in"))?;
        let ready: Result<Vec<Leaf>, _> = (0..READY).map(|_| work.make()).collect();
        *work.free() = ready.map_err(failed("make a leaf of"))?;
        Ok(work)
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<Leaf>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self) -> rustix::io::Result<Leaf> {
        loop {
            let number = self.made.fetch_add(1, Ordering::Relaxed);
            let name = format!("l{number}");
            match rustix::fs::mkdirat(&self.dir, &name, Mode::from_raw_mode(0o755)) {
                Ok(()) => {}
                // Left by a silkd that did not stop cleanly.
                Err(Errno::EXIST) => continue,
                Err(errno) => return Err(errno),
            }
            let dir = Arc::new(open_dir(self.dir.as_fd(), &name)?);
            return Ok(Leaf {
                number,
                killed: AtomicBool::new(false),
                events: open_events(dir.as_fd())?,
                dir,
            });
        }
    }

    /// An empty leaf.
    ///
    /// # Errors
    /// The kernel's, where none stood ready and none could be made.
    pub(super) fn take(&self) -> rustix::io::Result<Leaf> {
        let ready = self.free().pop();
        ready.map_or_else(|| self.make(), Ok)
    }

    /// Takes back a leaf that is empty.
    ///
    /// One that was killed makes room for a fresh one. Linux since 6.14 compares a count of kills of the cgroup that
    /// a child is born into with that of the parent's own (it means to notice a kill during the fork), so a child born
    /// into a cgroup that was ever killed is itself killed at birth. Seen on 6.18.
    pub(super) fn put(&self, leaf: Leaf) {
        let fresh = match leaf.killed.load(Ordering::Relaxed) {
            false => Some(leaf),
            true => {
                self.unmake(&leaf);
                drop(leaf);
                // Where none can be made now, the next start tries again and tells.
                self.make().ok()
            }
        };
        let mut free = self.free();
        match fresh {
            Some(leaf) if free.len() < READY => free.push(leaf),
            Some(leaf) => {
                drop(free);
                self.unmake(&leaf);
            }
            None => {}
        }
    }

    fn unmake(&self, leaf: &Leaf) {
        // One that cannot be removed costs a directory and nothing else; its number is never used again.
        rustix::fs::unlinkat(&self.dir, format!("l{}", leaf.number), AtFlags::REMOVEDIR).ok();
    }

    /// Stops everything in it, or lets it go on, and waits until the kernel has done so. Cancel safe: what was
    /// written takes effect all the same.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) async fn freeze(&self, freeze: bool) -> io::Result<()> {
        let word: &[u8] = if freeze { b"1" } else { b"0" };
        write(self.dir.as_fd(), c"cgroup.freeze", word)?;
        self.until(b"frozen", freeze).await
    }

    /// Ends everything in it.
    pub(super) fn kill(&self) -> rustix::io::Result<()> {
        write(self.dir.as_fd(), c"cgroup.kill", b"1")
    }

    async fn until(&self, key: &[u8], wanted: bool) -> io::Result<()> {
        // A description of its own, since several may wait at once.
        let events = open_events(self.dir.as_fd())?;
        until(events, key, wanted).await
    }

    /// Where the kernel counts the processes that it killed for want of memory; missing without a memory controller.
    pub(super) fn memory_events(&self) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&self.dir, c"memory.events", flags, Mode::empty()).ok()
    }

    /// Removes it and its leaves, as far as they are empty.
    pub(super) fn remove(&self) {
        self.free().clear();
        let leaves = std::fs::read_dir(&self.path).into_iter().flatten();
        for leaf in leaves.filter_map(|leaf| Some(leaf.ok()?.path())) {
            // The files among them cannot be removed, nor need to. A leaf that holds something stays, and `work`
            // with it: the next start takes it.
            rustix::fs::rmdir(&leaf).ok();
        }
        rustix::fs::rmdir(&self.path).ok();
    }
}

impl Leaf {
    /// For the clone that is to be born there.
    pub(super) fn dir(&self) -> Arc<OwnedFd> {
        self.dir.clone()
    }

    /// Whether a process is in it. What the kernel does not tell counts as yes.
    pub(super) fn populated(&self) -> bool {
        !says(&self.events, b"populated", false).unwrap_or(false)
    }

    /// Ends everything in it, which the kernel does one by one after this returns.
    pub(super) fn kill(&self) -> rustix::io::Result<()> {
        self.killed.store(true, Ordering::Relaxed);
        write(self.dir.as_fd(), c"cgroup.kill", b"1")
    }

    /// The processes in it.
    pub(super) fn members(&self) -> Vec<i32> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(fd) = rustix::fs::openat(&self.dir, c"cgroup.procs", flags, Mode::empty()) else {
            return Vec::new();
        };
        let mut text = String::new();
        // What was read before an error counts.
        drop(std::fs::File::from(fd).take(PROCS).read_to_string(&mut text));
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Sends a signal to everything in it that is not spared.
    pub(super) fn signal(&self, signal: Signal, spared: &BTreeSet<i32>) {
        let mut done = spared.clone();
        for _round in 0..ROUNDS {
            let new: Vec<i32> = self
                .members()
                .into_iter()
                .filter(|pid| done.insert(*pid))
                .collect();
            if new.is_empty() {
                return;
            }
            for some in new.chunks(HANDLES) {
                let held: Vec<(i32, OwnedFd)> =
                    some.iter().filter_map(|pid| Some((*pid, pidfd(*pid)?))).collect();
                // A number that is listed now belongs to who held it when the handle was made, or the handle reaches
                // nobody: no stranger is hit.
                let still: BTreeSet<i32> = self.members().into_iter().collect();
                for (_, handle) in held.iter().filter(|(pid, _)| still.contains(pid)) {
                    // It may have ended meanwhile.
                    rustix::process::pidfd_send_signal(handle, signal).ok();
                }
            }
        }
    }

    /// Resolves when the leaf is empty.
    pub(super) fn emptied(&self) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let events = self.events.try_clone();
        async move { until(events?, b"populated", false).await }
    }
}

/// A handle of a process by its number.
pub(super) fn pidfd(pid: i32) -> Option<OwnedFd> {
    rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::NONBLOCK).ok()
}

fn open_dir(at: BorrowedFd<'_>, path: impl AsRef<Path>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(at, path.as_ref(), flags, Mode::empty())
}

fn open_events(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::openat(dir, c"cgroup.events", flags, Mode::empty())
}

fn write(dir: BorrowedFd<'_>, name: &std::ffi::CStr, word: &[u8]) -> rustix::io::Result<()> {
    let open = || rustix::fs::openat(dir, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    let fd = match open() {
        // What is written here ends programs, and so gives back what they hold: it cannot wait for that.
        Err(Errno::MFILE) => beyond_limit(open),
        opened => opened,
    };
    rustix::io::write(fd?, word).map(|_whole| ())
}

/// Opens something though no descriptor is left: the soft limit is moved for that long, towards the hard one.
fn beyond_limit<T>(open: impl FnOnce() -> T) -> T {
    // Who came second would put back what the first had moved.
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.map(|current| current.saturating_add(BEYOND));
    let moved = Rlimit {
        current: current.min(limit.maximum.or(current)),
        ..limit
    };
    // Where it cannot be moved, the opening fails as before.
    setrlimit(Resource::Nofile, moved).ok();
    let opened = open();
    // It was so before, and to lower it is anybody's right.
    setrlimit(Resource::Nofile, limit).ok();
    drop(turn);
    opened
}

/// Whether the line `key` says `wanted` now.
fn says(events: &OwnedFd, key: &[u8], wanted: bool) -> io::Result<bool> {
    let mut text = [0; EVENTS];
    let n = rustix::io::pread(events, &mut text, 0)?;
    let text = text.get(..n).unwrap_or_default();
    let value = text
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(key));
    let missing = || {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("cgroup.events lacks {}", key.escape_ascii()),
        )
    };
    let value = value.ok_or_else(missing)?;
    Ok((value == b" 1") == wanted)
}

/// Waits until the line `key` says `wanted`; the kernel tells of every change.
async fn until(events: OwnedFd, key: &[u8], wanted: bool) -> io::Result<()> {
    if says(&events, key, wanted)? {
        return Ok(());
    }
    // Registered before it is read again, so that no change falls between.
    let changes = sys::watch(events, Interest::PRIORITY)?;
    while !says(changes.get_ref(), key, wanted)? {
        changes.ready(Interest::PRIORITY).await?.clear_ready();
    }
    Ok(())
}

/// The processes of a session: all that is left to go by without cgroups. `/proc` is walked, once.
pub(super) fn session(leader: i32) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let numbers = entries.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<i32>().ok()
    });
    numbers
        .filter(|pid| *pid != leader && session_of(*pid) == Some(leader))
        .collect()
}

/// The session of a process that has not ended.
fn session_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The name in the second field may hold anything, so fields count from its end: state, parent, group, session.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = OsStr::from_bytes(stat.get(end + 2..)?).to_str()?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let session = fields.nth(2)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(session)
}

/// Ends the processes of a session and resolves when none is left. Cancel safe.
pub(super) async fn end_session(leader: i32) -> io::Result<()> {
    loop {
        let members = session(leader);
        if members.is_empty() {
            return Ok(());
        }
        for handle in members.into_iter().filter_map(pidfd) {
            // It may have ended meanwhile.
            rustix::process::pidfd_send_signal(&handle, Signal::KILL).ok();
            // A pidfd is readable once its process has ended.
            drop(sys::watch(handle, Interest::READABLE)?.readable().await?);
        }
    }
}

/// Sends a signal to the processes of a session, the leader included, that are not spared.
pub(super) fn signal_session(leader: i32, signal: Signal, spared: &BTreeSet<i32>) {
    let members = session(leader).into_iter().chain([leader]);
    for handle in members.filter(|pid| !spared.contains(pid)).filter_map(pidfd) {
        // It may have ended meanwhile.
        rustix::process::pidfd_send_signal(&handle, signal).ok();
    }
}

/// The count of processes that the kernel killed for want of memory.
pub(super) fn oom_kills(memory_events: &OwnedFd) -> u64 {
    let mut text = [0; EVENTS];
    let n = rustix::io::pread(memory_events, &mut text, 0).unwrap_or(0);
    let text = std::str::from_utf8(text.get(..n).unwrap_or_default()).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}
