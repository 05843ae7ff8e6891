//! Walks of a tree, by descriptors: no name is looked up twice, and no link leads anywhere.
//!
//! The walker holds one descriptor for each level that it is in, and nothing of what lies behind or before it.

use std::{ffi::CStr, os::fd::OwnedFd};

use rustix::{
    fs::{AtFlags, Dir, Stat, fstat, statat},
    io::Errno,
};
use sandbox_protocol::limits::PATH;

use super::open::{Found, open_child};

/// Something in the tree.
#[derive(Debug)]
pub(super) struct Seen {
    /// From the walk's beginning.
    pub(super) path: Vec<u8>,
    /// Its last name.
    pub(super) name: Vec<u8>,
    pub(super) stat: Stat,
    /// 1: in the directory that the walk began in.
    pub(super) depth: usize,
}

struct Level {
    dir: Dir,
    /// For lookups in it; `dir` reads.
    fd: OwnedFd,
    /// Bytes of the path up to here.
    path: usize,
    /// Device and inode.
    is: (u64, u64),
}

/// A walk that is under way. Directories are not entered unless asked for.
pub(super) struct Walk {
    levels: Vec<Level>,
    path: Vec<u8>,
    /// Directories that could not be opened or read to their end, and names too long to be told.
    pub(super) unreadable: u64,
}

impl std::fmt::Debug for Walk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Walk")
            .field("levels", &self.levels.len())
            .field("unreadable", &self.unreadable)
            .finish_non_exhaustive()
    }
}

impl Walk {
    /// A walk of this directory.
    pub(super) fn new(dir: OwnedFd) -> Result<Self, Errno> {
        let mut walk = Self {
            levels: Vec::new(),
            path: Vec::new(),
            unreadable: 0,
        };
        walk.push(dir)?;
        Ok(walk)
    }

    fn push(&mut self, fd: OwnedFd) -> Result<(), Errno> {
        let reads = fd.try_clone().map_err(|_full| Errno::MFILE)?;
        let stat = fstat(&fd)?;
        self.levels.push(Level {
            dir: Dir::new(reads)?,
            fd,
            path: self.path.len(),
            is: (stat.st_dev, stat.st_ino),
        });
        Ok(())
    }

    /// The next thing; `None` at the end. What vanishes while it is looked at was never there.
    pub(super) fn next(&mut self) -> Option<Seen> {
        loop {
            let depth = self.levels.len();
            let level = self.levels.last_mut()?;
            self.path.truncate(level.path);
            let entry = match level.dir.read() {
                None => {
                    self.levels.pop();
                    continue;
                }
                Some(Err(_unreadable)) => {
                    self.unreadable += 1;
                    self.levels.pop();
                    continue;
                }
                Some(Ok(entry)) => entry,
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Some(stat) = look(&level.fd, name) else {
                continue;
            };
            if !self.path.is_empty() {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(name.to_bytes());
            if self.path.len() > PATH {
                self.unreadable += 1;
                continue;
            }
            return Some(Seen {
                path: self.path.clone(),
                name: name.to_bytes().to_vec(),
                stat,
                depth,
            });
        }
    }

    /// The directory that holds what was seen last, while it was not entered.
    pub(super) fn dir(&self) -> Option<&OwnedFd> {
        self.levels.last().map(|level| &level.fd)
    }

    /// Levels that it is in.
    pub(super) fn depth(&self) -> usize {
        self.levels.len()
    }

    /// Goes into the directory that was seen last.
    pub(super) fn enter(&mut self, seen: &Seen) {
        if let Some(dir) = self.dir() {
            let opened = open_child(dir, &seen.name);
            self.entered(opened);
        }
    }

    /// Goes into a directory that the link leads to that was seen last.
    pub(super) fn enter_found(&mut self, found: &Found) {
        self.entered(open_child(&found.fd, b"."));
    }

    fn entered(&mut self, opened: Result<OwnedFd, Errno>) {
        match opened.and_then(|dir| self.push(dir)) {
            // Or gone meanwhile.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(_unreadable) => self.unreadable += 1,
        }
    }

    /// Whether this directory is one that the walk is in.
    pub(super) fn is_in(&self, stat: &Stat) -> bool {
        self.levels
            .iter()
            .any(|level| level.is == (stat.st_dev, stat.st_ino))
    }
}

fn look(dir: &OwnedFd, name: &CStr) -> Option<Stat> {
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()
}
