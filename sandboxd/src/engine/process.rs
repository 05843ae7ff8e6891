//! A process by pidfd: watched, signalled and, where it is our child, reaped through it.

use std::{
    fs, future, io,
    os::fd::OwnedFd,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::Identity;
use crate::sys;

/// One process; dropping this ends nothing.
#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    started: u64,
    pidfd: AsyncFd<OwnedFd>,
    status: OnceLock<String>,
}

impl Process {
    /// The process with this identity; `None` if it has ended (a zombie counts as living until it is reaped).
    pub(super) fn find(identity: Identity) -> io::Result<Option<Self>> {
        let Some(pid) = identity.pid else {
            return Ok(None);
        };
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let pidfd = match rustix::process::pidfd_open(number, PidfdFlags::NONBLOCK) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // Read after the pidfd was opened: if the start time is right now, the pidfd is that process's for good.
        match started(pid)? {
            Some(started) if started == identity.started => Ok(Some(Self {
                pid,
                started,
                pidfd: sys::watch(pidfd, Interest::READABLE)?,
                status: OnceLock::new(),
            })),
            Some(_) | None => Ok(None),
        }
    }

    /// The child that was started just now and cannot have been reaped yet.
    pub(super) fn of_child(pid: u32) -> io::Result<Self> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let started = started(pid)?.ok_or_else(gone)?;
        Self::find(Identity {
            pid: Some(pid),
            started,
        })?
        .ok_or_else(gone)
    }

    /// Its identity.
    pub(super) const fn identity(&self) -> Identity {
        Identity {
            pid: Some(self.pid),
            started: self.started,
        }
    }

    /// Waits for its end, reaps it if it is our child, and tells how it ended. Cancel safe.
    pub(super) async fn exited(&self) -> &str {
        if let Some(status) = self.status.get() {
            return status;
        }
        match self.pidfd.readable().await {
            Ok(mut ready) => ready.retain_ready(),
            // The runtime is going down; nobody will be told.
            Err(_shutdown) => future::pending().await,
        }
        self.status.get_or_init(|| self.reap())
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<&str> {
        self.ended_within(Duration::ZERO)
    }

    fn ended_within(&self, wait: Duration) -> Option<&str> {
        if let Some(status) = self.status.get() {
            return Some(status);
        }
        let mut poll = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let wait = Timespec::try_from(wait).ok();
        let ready = rustix::event::poll(&mut poll, wait.as_ref()).unwrap_or(0);
        (ready > 0).then(|| &**self.status.get_or_init(|| self.reap()))
    }

    /// SIGKILL, and waits for its death on this thread.
    pub(super) fn end_blocking(&self, wait: Duration) -> io::Result<()> {
        self.signal(Signal::KILL)?;
        match self.ended_within(wait) {
            Some(_status) => Ok(()),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn reap(&self) -> String {
        let id = WaitId::PidFd(std::os::fd::AsFd::as_fd(self.pidfd.get_ref()));
        match rustix::process::waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => format!("exit status {code}"),
                (None, Some(signal)) => format!("killed by signal {signal}"),
                (None, None) => "ended".to_owned(),
            },
            // Not our child: an earlier daemon started it, and init has its status.
            Ok(None) | Err(_) => "ended, with unknown status (started by an earlier daemon)".to_owned(),
        }
    }

    /// Sends a signal; to a process that has ended, none.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(self.pidfd.get_ref(), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether a machine's process still lives, asked of the kernel at this instant: one `poll` of its pidfd, no waiting. A
/// claim asks it, because the news of a death takes its way through the runtime and a claim can be faster. Keeps nothing
/// open: the rows of what is gone have one too.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Option<Weak<Process>>);

impl Pulse {
    pub(super) fn of(process: &Arc<Process>) -> Self {
        Self(Some(Arc::downgrade(process)))
    }

    /// Whether it has ended, or nobody here holds it any more. Of a machine without a process: no, its end is told in no
    /// other way than by [`Machine::exited`](super::Machine::exited).
    #[must_use]
    pub fn is_over(&self) -> bool {
        let Some(process) = &self.0 else { return false };
        process.upgrade().is_none_or(|process| process.ended().is_some())
    }
}

/// A process that is being made: dropping it kills it. What a cancelled start leaves is a directory without a process.
#[derive(Debug)]
pub(super) struct Unborn(Option<Process>);

impl Unborn {
    pub(super) const fn new(process: Process) -> Self {
        Self(Some(process))
    }

    /// The process, on which nothing hangs any more; `None` never happens before this was called.
    pub(super) fn born(mut self) -> Option<Process> {
        self.0.take()
    }

    pub(super) const fn get(&self) -> Option<&Process> {
        self.0.as_ref()
    }
}

impl Drop for Unborn {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            // Best effort: `reap` of the slot ends and tells what this could not.
            drop(process.signal(Signal::KILL));
            process.ended();
        }
    }
}

/// When a process started, in clock ticks since boot; `None` if there is none of that id.
fn started(pid: u32) -> io::Result<Option<u64>> {
    let stat = match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let started =
        sys::pid_and_start(&stat).and_then(|(_, started)| std::str::from_utf8(started).ok()?.parse().ok());
    started
        .map(Some)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}
