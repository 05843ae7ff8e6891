//! Processes by pid and start time, which together are never reused.

use std::{
    fs,
    io::{Read as _, Seek as _},
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags, Signal},
};
use tokio::io::Interest;

/// A process that is not this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Clock ticks from the host's boot to its start.
    pub started: u64,
}

impl Process {
    /// The process that has this number now; none if nobody has it, or it is dead and not reaped yet.
    #[must_use]
    pub fn look(pid: i32) -> Option<Self> {
        let (process, is_dead) = Self::read(pid)?;
        (!is_dead).then_some(process)
    }

    /// Who has this number, and whether its first thread is dead.
    fn read(pid: i32) -> Option<(Self, bool)> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name stands in brackets and may hold anything.
        let (_, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let started = fields.get(19)?.parse().ok()?;
        Some((Self { pid, started }, matches!(*fields.first()?, "Z" | "X")))
    }

    /// Whether it lives.
    #[must_use]
    pub fn lives(self) -> bool {
        Self::look(self.pid) == Some(self)
    }

    fn handle(self) -> Option<OwnedFd> {
        let handle = rustix::process::pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // Looked at after the handle was made: it is that process or none. One whose first thread is dead may have others
        // that still die.
        Self::read(self.pid)
            .is_some_and(|(process, _)| process == self)
            .then_some(handle)
    }

    /// Sends a signal; harmless if it is gone.
    ///
    /// # Panics
    /// The signal is refused.
    pub fn signal(self, signal: Signal) {
        if let Some(handle) = self.handle() {
            match rustix::process::pidfd_send_signal(&handle, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => panic!("cannot signal {self:?}: {error}"),
            }
        }
    }

    /// Waits until it is dead.
    ///
    /// # Panics
    /// It lives on beyond [`HANG`](crate::HANG).
    pub async fn gone(self) {
        if let Some(handle) = self.handle() {
            let handle = sandboxd::sys::watch(handle, Interest::READABLE).unwrap();
            drop(crate::within(crate::HANG, handle.readable()).await.unwrap());
        }
    }

    /// Kills it and waits for its death, without a runtime. Gives up after a while: it is for clearing up.
    pub fn kill_now(self) {
        let Some(handle) = self.handle() else { return };
        // It may have died just now.
        rustix::process::pidfd_send_signal(&handle, Signal::KILL).ok();
        let limit = Timespec::try_from(Duration::from_secs(10)).unwrap();
        let mut dead = [PollFd::new(&handle, PollFlags::IN)];
        if !matches!(rustix::event::poll(&mut dead, Some(&limit)), Ok(1)) {
            eprintln!("{self:?} does not die");
        }
    }

    /// How many descriptors it has open.
    ///
    /// # Panics
    /// It is gone, or another user's.
    #[must_use]
    pub fn descriptors(self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap().count()
    }

    /// What its descriptors are, for messages.
    #[must_use]
    pub fn open_files(self) -> Vec<String> {
        let Ok(all) = fs::read_dir(format!("/proc/{}/fd", self.pid)) else {
            return Vec::new();
        };
        let links = all.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        links.map(|link| link.display().to_string()).collect()
    }

    /// Ports on which it listens, lowest first.
    ///
    /// # Panics
    /// It is gone, or another user's.
    #[must_use]
    pub fn listening_ports(self) -> Vec<u16> {
        let own: Vec<String> = self.open_files();
        let mut ports = Vec::new();
        for table in ["tcp", "tcp6"] {
            let text = fs::read_to_string(format!("/proc/{}/net/{table}", self.pid)).unwrap_or_default();
            for line in text.lines().skip(1) {
                let fields: Vec<&str> = line.split_whitespace().collect();
                // Local address, state (0A: listening), inode.
                let (Some(local), Some(&"0A"), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9))
                else {
                    continue;
                };
                let port = local
                    .rsplit_once(':')
                    .and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
                if own.contains(&format!("socket:[{inode}]")) {
                    ports.extend(port);
                }
            }
        }
        ports.sort_unstable();
        ports
    }
}

/// The sandbox processes below a run directory, by the identity files that they lock, with their control groups.
#[must_use]
pub fn sandboxes(run_dir: &Path) -> Vec<(Process, Option<std::path::PathBuf>)> {
    let slots = fs::read_dir(run_dir.join("run")).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for slot in slots {
        let text = fs::read_to_string(slot.path().join("lock")).unwrap_or_default();
        let group = text.lines().find_map(|line| line.strip_prefix("cgroup "));
        let who = text.lines().find_map(|line| {
            let (pid, started) = line.split_once(' ')?;
            Some(Process {
                pid: pid.parse().ok()?,
                started: started.parse().ok()?,
            })
        });
        if let Some(who) = who.filter(|who| who.lives()) {
            found.push((who, group.map(Into::into)));
        }
    }
    found.sort();
    found
}

/// Processes that work in a folder or have something of it open. Those that a daemon was starting when it was killed
/// have said nothing of themselves yet.
pub(crate) fn users_of(dir: &Path) -> Vec<Process> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse::<i32>() else { continue };
        if name == own {
            continue;
        }
        let works_there = fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(dir));
        if let Some(process) = Process::look(pid)
            && (works_there
                || process
                    .open_files()
                    .iter()
                    .any(|file| Path::new(file).starts_with(dir)))
        {
            found.push(process);
        }
    }
    found
}

/// Kills what is in a control group, waits until nothing is, and removes it with the groups below it. Gives up after a
/// while: it is for clearing up.
pub(crate) fn end_group(group: &Path) {
    let Ok(mut events) = fs::File::open(group.join("cgroup.events")) else {
        return;
    };
    fs::write(group.join("cgroup.kill"), "1").ok();
    let limit = Timespec::try_from(Duration::from_secs(10)).unwrap();
    loop {
        let mut text = String::new();
        // A group that is gone cannot be read.
        let read = events.rewind().and_then(|()| events.read_to_string(&mut text));
        let empty = read.is_err() || text.contains("populated 0");
        // The kernel signals a change of this file as priority.
        let mut changed = [PollFd::new(&events, PollFlags::PRI)];
        if empty || !matches!(rustix::event::poll(&mut changed, Some(&limit)), Ok(1)) {
            break;
        }
    }
    // Whoever else clears up may have been first.
    if let Err(error) = remove_group(group)
        && group.exists()
    {
        eprintln!("{} is left: {error}", group.display());
    }
}

fn remove_group(group: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_group(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}
