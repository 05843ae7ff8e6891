//! One daemon per state directory: an flock on `lock`, with the holder's pid inside.

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
        if !(is_gone(pid) && try_lock(&file).map_err(io)?) {
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
