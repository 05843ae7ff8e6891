//! One daemon per state directory: an flock on `lock`, with the holder's pid inside.
//!
//! A dead daemon's lock may outlive it for some milliseconds: a child that it was just starting has it until the exec.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, flock},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::tasks;

/// The state directory is this process's until the value is dropped, or the process ends however it ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// The lock was not to be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon has it.
    #[error("{} is held by another daemon{}", .dir.display(), .pid.map(|pid| format!(", pid {pid}")).unwrap_or_default())]
    Locked {
        /// The state directory.
        dir: PathBuf,
        /// Who has it, if it said so.
        pid: Option<u32>,
    },
    /// The lock file cannot be used.
    #[error("cannot lock {}", .path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
}

/// How long a holder that is being killed may take to be gone. One that lives is told of after as long.
const DYING: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 300_000_000,
};

/// How long a child of a dead daemon may hold its lock: from fork to exec on a host that is busy.
const ORPHANED: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Takes the lock of a state directory that exists. Waits shortly for a holder that is just dying: whoever starts a
/// daemon right after `kill -9` of the last one means it to start.
///
/// # Errors
/// [`LockError::Locked`] with the other's pid, or the kernel's refusal of the lock file.
pub fn lock_state_dir(dir: &Path) -> Result<Lock, LockError> {
    let path = dir.join("lock");
    let io = |source| LockError::Io {
        path: path.clone(),
        source,
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(io)?;
    if !try_lock(&file).map_err(io)? {
        let mut text = String::new();
        // The pid is for people and for the wait below; a holder that is just writing it is a holder all the same.
        drop((&mut file).take(32).read_to_string(&mut text));
        let pid = text.trim().parse().ok();
        if !(is_gone(pid) && wait_for(&file).map_err(io)?) {
            return Err(LockError::Locked {
                dir: dir.to_owned(),
                pid,
            });
        }
    }
    let pid = format!("{}\n", std::process::id());
    let told = file
        .set_len(0)
        .and_then(|()| file.write_all_at(pid.as_bytes(), 0));
    if let Err(error) = told {
        // On a full disk the lock holds all the same; only the pid is missing.
        tracing::warn!(path = %path.display(), %error, "the lock file does not name its holder");
    }
    Ok(Lock { _file: file })
}

fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Waits for the lock that a dead daemon's child has, for at most [`ORPHANED`]; whether it was got.
fn wait_for(file: &File) -> io::Result<bool> {
    if try_lock(file)? {
        return Ok(true);
    }
    // No event tells of a lock that falls, only a call that blocks. Where it blocks for too long its thread ends with
    // this process, which then refuses to start.
    let (got, alive) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let waiting = file.try_clone()?;
    let waiter = tasks::thread("state-lock", move || {
        let locked = flock(&waiting, FlockOperation::LockExclusive);
        drop(alive);
        locked
    })?;
    // The other end closes when the thread is through.
    let mut wait = [PollFd::new(&got, PollFlags::IN)];
    if poll(&mut wait, Some(&ORPHANED))? == 0 {
        return Ok(false);
    }
    match waiter.join() {
        Ok(locked) => Ok(locked.map(|()| true)?),
        Err(_panicked) => Err(io::Error::other("the wait for the lock broke off")),
    }
}

/// Whether the process with this number is dead, or dies within [`DYING`]. The lock, not the number, decides who holds it.
fn is_gone(pid: Option<u32>) -> bool {
    let pid = pid
        .and_then(|pid| i32::try_from(pid).ok())
        .and_then(Pid::from_raw);
    let Some(pid) = pid else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut wait = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut wait, Some(&DYING)).is_ok_and(|ready| ready > 0)
        }
        Err(errno) => errno == Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _, sync::Arc, thread};

    use super::*;

    /// Whether somebody waits for a lock on this file.
    fn is_waited_for(file: &File) -> bool {
        let inode = format!(":{} ", file.metadata().unwrap().ino());
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks
            .lines()
            .any(|line| line.contains("->") && line.contains(&inode))
    }

    /// Writes what a daemon of that number that holds the lock would have.
    fn held(dir: &Path, pid: &str) -> File {
        let file = File::create(dir.join("lock")).unwrap();
        file.write_all_at(pid.as_bytes(), 0).unwrap();
        assert!(try_lock(&file).unwrap());
        file
    }

    #[test]
    fn inv_22_a_dead_daemons_lock_is_waited_for_until_its_last_child_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        // No process can have this number.
        let childs = held(dir.path(), "2147483647");
        let path: Arc<Path> = dir.path().into();
        let next = tasks::thread("next daemon", {
            let path = Arc::clone(&path);
            move || lock_state_dir(&path).map(|lock| (lock, lock_state_dir(&path).is_err()))
        });
        let next = next.unwrap();
        while !next.is_finished() && !is_waited_for(&childs) {
            thread::yield_now();
        }
        drop(childs);
        let (_lock, second_refused) = next.join().unwrap().expect("it gets the lock");
        assert!(second_refused, "and holds it");
    }

    #[test]
    fn inv_22_a_living_daemons_lock_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _held = held(dir.path(), &std::process::id().to_string());
        match lock_state_dir(dir.path()) {
            Err(LockError::Locked { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
    }
}
