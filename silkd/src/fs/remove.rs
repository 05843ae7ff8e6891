//! Remove: a name, or all that is below it on the same file system.

use std::os::fd::OwnedFd;

use rustix::{
    fs::{AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, chmodat, openat2, unlinkat},
    io::Errno,
};
use sandbox_protocol::v1::{AgentRemoveReply, AgentRemoveRequest};

use super::{
    open::{Wanted, own_link},
    stat::is_dir,
    workers::Cancel,
};
use crate::refusal::Refusal;

/// A Remove, checked.
#[derive(Debug)]
pub(super) struct Remove {
    wanted: Wanted,
    recursive: bool,
    missing_ok: bool,
}

impl Remove {
    /// Pure.
    pub(super) fn new(request: &AgentRemoveRequest) -> Result<Self, Refusal> {
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            recursive: request.recursive,
            missing_ok: request.missing_ok,
        })
    }

    pub(super) fn act(&self, cancel: &Cancel) -> Result<AgentRemoveReply, Refusal> {
        let missing = |refusal: &Refusal| refusal.errno == Some(Errno::NOENT.raw_os_error());
        match self.remove(cancel) {
            Err(refusal) if self.missing_ok && missing(&refusal) => Ok(AgentRemoveReply { removed: 0 }),
            other => other.map(|removed| AgentRemoveReply { removed }),
        }
    }

    fn remove(&self, cancel: &Cancel) -> Result<u64, Refusal> {
        let spot = self.wanted.spot(false)?;
        let fail = |errno| self.wanted.failed("remove", errno);
        let stat = spot.stat().map_err(fail)?;
        if !is_dir(&stat) {
            unlinkat(&spot.parent, spot.name.as_slice(), AtFlags::empty()).map_err(fail)?;
            return Ok(1);
        }
        if !self.recursive {
            unlinkat(&spot.parent, spot.name.as_slice(), AtFlags::REMOVEDIR).map_err(fail)?;
            return Ok(1);
        }
        clear(&spot.parent, &spot.name, Shut::Stays, cancel).map_err(|failure| match failure {
            Failure::Cancelled(refusal) => refusal,
            Failure::At(path, errno) => {
                let mut full = self.wanted.path().to_vec();
                full.extend_from_slice(&path);
                super::errno::refuse(errno, super::errno::About::File, "remove", &full)
            }
        })
    }
}

/// Why a tree was not removed.
pub(super) enum Failure {
    /// Nobody waits.
    Cancelled(Refusal),
    /// At this path, below the tree's own.
    At(Vec<u8>, Errno),
}

struct Level {
    fd: OwnedFd,
    dir: Dir,
    name: Vec<u8>,
    /// Bytes of the path before its name.
    path: usize,
    /// Removed in this reading of it.
    removed: u64,
}

/// What becomes of directories that their own owner may not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shut {
    /// They end the removal, as `rm` has it.
    Stays,
    /// They are opened up first, as far as the user may.
    Opens,
}

/// Removes a directory with all that is in it, by descriptors, deepest first. A mount below it ends the removal.
pub(super) fn clear(parent: &OwnedFd, name: &[u8], shut: Shut, cancel: &Cancel) -> Result<u64, Failure> {
    let mut path = Vec::new();
    let first = open(parent, name, shut).and_then(|fd| level(fd, name.to_vec(), 0));
    let mut levels = vec![first.map_err(|errno| Failure::At(Vec::new(), errno))?];
    let mut removed = 0;
    while let Some(at) = levels.last_mut() {
        cancel.check().map_err(Failure::Cancelled)?;
        let entry = match at.dir.read() {
            Some(entry) => entry.map_err(|errno| Failure::At(path.clone(), errno))?,
            // Read to its end. Some file systems lose their place when they are changed while being read.
            None if at.removed > 0 => {
                at.removed = 0;
                at.dir.rewind();
                continue;
            }
            None => {
                let Some(done) = levels.pop() else { break };
                let above = levels.last_mut();
                let from = above.as_ref().map_or(parent, |above| &above.fd);
                unlink(from, &done.name, AtFlags::REMOVEDIR)
                    .map_err(|errno| Failure::At(path.clone(), errno))?;
                removed += 1;
                path.truncate(done.path);
                if let Some(above) = above {
                    above.removed += 1;
                }
                continue;
            }
        };
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let before = path.len();
        path.push(b'/');
        path.extend_from_slice(name);
        match unlink(&at.fd, name, AtFlags::empty()) {
            Ok(()) => {
                at.removed += 1;
                removed += 1;
                path.truncate(before);
            }
            // A directory: Linux says ISDIR, POSIX PERM.
            Err(why @ (Errno::ISDIR | Errno::PERM)) => {
                let below = open(&at.fd, name, shut).and_then(|fd| level(fd, name.to_vec(), before));
                let below = below.map_err(|errno| if errno == Errno::NOTDIR { why } else { errno });
                levels.push(below.map_err(|errno| Failure::At(path.clone(), errno))?);
            }
            Err(errno) => return Err(Failure::At(path, errno)),
        }
    }
    Ok(removed)
}

fn level(fd: OwnedFd, name: Vec<u8>, path: usize) -> Result<Level, Errno> {
    let reads = fd.try_clone().map_err(|_full| Errno::MFILE)?;
    Ok(Level {
        dir: Dir::new(reads)?,
        fd,
        name,
        path,
        removed: 0,
    })
}

/// What is gone already is as good as removed.
fn unlink(dir: &OwnedFd, name: &[u8], flags: AtFlags) -> Result<(), Errno> {
    match unlinkat(dir, name, flags) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// Opens a directory in another, on the same mount and never through a link.
fn open(parent: &OwnedFd, name: &[u8], shut: Shut) -> Result<OwnedFd, Errno> {
    let rule = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let open = |flags| {
        let flags = flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat2(parent, name, flags, Mode::empty(), rule)
    };
    if shut == Shut::Opens {
        let dir = open(OFlags::PATH)?;
        // Whoever may not do this is told by what comes next.
        chmodat(CWD, own_link(&dir), Mode::RWXU, AtFlags::empty()).ok();
    }
    open(OFlags::RDONLY | OFlags::NONBLOCK)
}
