//! The run directory of one machine: its sockets, its console, its identity.
//!
//! Everything in it is reached through a descriptor of the directory, so that the length of its path (sockets have 108
//! bytes) and a later rename do not matter.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            fs::{DirBuilderExt as _, OpenOptionsExt as _},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags};
use tokio::net::UnixStream;

use super::{Found, Identity};
use crate::names::{self, SlotNumber};

/// The identity file: `cgroup PATH\n` by the daemon, then `PID STARTED\n` by the process itself, which locks it while it
/// lives.
const LOCK: &str = "lock";
/// What the emulator itself had to say.
pub(super) const STDERR: &str = "stderr";
/// What the guest wrote to its console.
pub(super) const CONSOLE: &str = "console";
/// Directories below `run` that no slot names begin with this.
pub(super) const HIDDEN: &str = ".";
/// Longest identity file that is read.
const LOCK_MOST: u64 = 8 * 1024;

/// An open run directory.
#[derive(Debug)]
pub(super) struct SlotDir {
    path: Mutex<PathBuf>,
    fd: OwnedFd,
}

/// What an identity file tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Look {
    /// Whether a process holds the lock.
    pub(super) held: bool,
    /// Which process wrote it.
    pub(super) identity: Option<Identity>,
    /// Its control group.
    pub(super) cgroup: Option<PathBuf>,
}

impl SlotDir {
    /// Makes the directory, mode 0700; `AlreadyExists` if it is there. Its parent is made as needed.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700);
        match builder.create(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(parent) = path.parent() {
                    crate::disk::make_dir(parent, 0o711)?;
                }
                builder.create(path)?;
            }
            other => other?,
        }
        Self::open(path)
    }

    /// Opens one that exists.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(Self {
            path: Mutex::new(path.to_owned()),
            fd: rustix::fs::open(path, flags, Mode::empty())?,
        })
    }

    /// A path to something in it that is short and outlives a rename, for this process only.
    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.fd.as_raw_fd()))
    }

    /// Where it is now.
    pub(super) fn path(&self) -> PathBuf {
        self.path.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The directory's descriptor, once more.
    pub(super) fn fd(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// A listening socket in it, to be handed to the machine: connections wait until that one accepts.
    pub(super) fn listen(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(UnixListener::bind(self.at(name))?.into())
    }

    /// Connects to a socket in it.
    pub(super) async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        UnixStream::connect(self.at(name)).await
    }

    /// Makes an empty file to append to.
    pub(super) fn append(&self, name: &str) -> io::Result<OwnedFd> {
        let mut options = OpenOptions::new();
        options.append(true).create_new(true).mode(0o600);
        Ok(options.open(self.at(name))?.into())
    }

    /// Makes the identity file, noting the control group that the process will enter. Gives it open for appending, and once
    /// more to be locked.
    pub(super) fn lock_file(&self, cgroup: Option<&Path>) -> io::Result<(OwnedFd, OwnedFd)> {
        let mut options = OpenOptions::new();
        options.append(true).create_new(true).mode(0o600);
        let mut file = options.open(self.at(LOCK))?;
        if let Some(cgroup) = cgroup {
            writeln!(file, "cgroup {}", cgroup.display())?;
        }
        Ok((file.into(), File::open(self.at(LOCK))?.into()))
    }

    /// Its inode number, which no other directory has while it is there.
    pub(super) fn inode(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_ino)
    }

    /// Reads the identity file and tries its lock.
    pub(super) fn look(&self) -> io::Result<Look> {
        let mut file = match File::open(self.at(LOCK)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Look::default()),
            Err(error) => return Err(error),
        };
        let held = match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => false,
            Err(rustix::io::Errno::WOULDBLOCK) => true,
            Err(errno) => return Err(errno.into()),
        };
        let mut text = Vec::new();
        (&mut file).take(LOCK_MOST).read_to_end(&mut text)?;
        Ok(Look {
            held,
            ..Look::parse(&String::from_utf8_lossy(&text))
        })
    }

    /// The last `most` bytes of a file in it.
    pub(super) fn tail(&self, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let mut file = File::open(self.at(name))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Gives it another name beside or below; `AlreadyExists` if that is taken.
    pub(super) fn rename(&self, to: &Path) -> io::Result<()> {
        let mut path = self.path.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::fs::renameat_with(CWD, &*path, CWD, to, RenameFlags::NOREPLACE)?;
        to.clone_into(&mut path);
        Ok(())
    }

    /// Removes it with all that is in it; gone already is as good.
    pub(super) fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(self.path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl Look {
    fn parse(text: &str) -> Self {
        let mut look = Self::default();
        // Only lines with their end count: the process may be writing.
        for line in text
            .split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n'))
        {
            if let Some(path) = line.strip_prefix("cgroup ") {
                look.cgroup = Some(PathBuf::from(path));
            } else if let Some((pid, started)) = line.split_once(' ') {
                look.identity = match (pid.parse(), started.parse()) {
                    (Ok(pid), Ok(started)) => Some(Identity {
                        pid: Some(pid),
                        started,
                    }),
                    (Ok(_) | Err(_), _) => None,
                };
            }
        }
        look
    }
}

/// Every slot directory below `run_root`, told by its lock.
pub(super) fn inventory(run_root: &Path) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for name in list(run_root)? {
        // Hidden ones are the engine's own; anything else that is no slot is not ours to judge.
        if let Ok(slot) = name.parse::<SlotNumber>() {
            let look = SlotDir::open(&names::run_dir(run_root, slot))?.look()?;
            found.push(Found {
                slot,
                identity: look.identity,
                alive: look.held,
            });
        }
    }
    found.sort_by_key(|found| found.slot);
    Ok(found)
}

/// Names of the hidden directories: what an earlier engine kept for itself.
pub(super) fn hidden(run_root: &Path) -> io::Result<Vec<PathBuf>> {
    let names = list(run_root)?
        .into_iter()
        .filter(|name| name.starts_with(HIDDEN));
    Ok(names.map(|name| run_root.join("run").join(name)).collect())
}

fn list(run_root: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(run_root.join("run")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
    Ok(names
        .collect::<io::Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_that_is_cut_short_is_none() {
        let whole = Look::parse("12 345\ncgroup /a b\n");
        assert_eq!(
            whole.identity,
            Some(Identity {
                pid: Some(12),
                started: 345
            })
        );
        assert_eq!(whole.cgroup, Some(PathBuf::from("/a b")));
        for cut in ["", "12", "12 34", "12 \n", "x 5\n", "-1 5\n"] {
            assert_eq!(Look::parse(cut), Look::default(), "{cut:?}");
        }
    }

    #[tokio::test]
    async fn sockets_are_reached_through_long_paths_and_after_a_rename() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("d".repeat(120));
        let dir = SlotDir::create(&deep.join("run").join(".blank-1")).unwrap();
        let listener = dir.listen("agent.sock").unwrap();
        let slot = names::run_dir(&deep, SlotNumber(1));
        dir.rename(&slot).unwrap();
        dir.connect("agent.sock").await.unwrap();
        drop(listener);
        assert_eq!(
            SlotDir::create(&slot).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert_eq!(inventory(&deep).unwrap().len(), 1);
        dir.remove().unwrap();
        dir.remove().unwrap();
        assert_eq!(inventory(&deep).unwrap(), []);
    }
}
