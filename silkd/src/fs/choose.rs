//! Which files of a tree are meant: hidden ones, globs, `.gitignore`.

use std::{ffi::OsStr, os::fd::OwnedFd, os::unix::ffi::OsStrExt as _, path::Path};

use ignore::{
    gitignore::{Gitignore, GitignoreBuilder},
    overrides::{Override, OverrideBuilder},
};
use rustix::{
    fs::{Mode, OFlags, openat},
    io::{Errno, read},
};

use super::{
    globs::{invalid, text},
    open::Found,
    stat::is_dir,
    walk::{Seen, Walk},
};
use crate::refusal::Refusal;

/// Globs of one request.
const GLOBS: usize = 256;
/// Bytes of a `.gitignore` that are read; what is behind them does not count.
const IGNORES: usize = 64 * 1024;
/// Files of that name that count at once, from the walk's root down.
const NESTED: usize = 32;

/// What a request says about the files that it means.
#[derive(Debug)]
pub(super) struct Choice {
    globs: Override,
    hidden: bool,
    gitignore: bool,
    /// Those that hold where the walk is, each with the depth of its directory.
    ignores: Vec<(usize, Gitignore)>,
}

impl Choice {
    /// Pure.
    ///
    /// # Errors
    /// `INVALID_PATTERN`.
    pub(super) fn new<T: AsRef<[u8]>>(globs: &[T], hidden: bool, gitignore: bool) -> Result<Self, Refusal> {
        if globs.len() > GLOBS {
            return Err(invalid(b"", "at most 256 globs"));
        }
        let mut builder = OverrideBuilder::new("");
        for glob in globs.iter().map(AsRef::as_ref) {
            let text = text(glob)?;
            builder.add(text).map_err(|bad| invalid(glob, &bad.to_string()))?;
        }
        Ok(Self {
            globs: builder.build().map_err(|bad| invalid(b"", &bad.to_string()))?,
            hidden,
            gitignore,
            ignores: Vec::new(),
        })
    }

    /// A walk begins, or goes into a directory: at `depth`, with this path.
    pub(super) fn enter(&mut self, dir: &OwnedFd, path: &[u8], depth: usize) {
        if !self.gitignore {
            return;
        }
        self.leave(depth);
        if self.ignores.len() == NESTED {
            return;
        }
        if let Some(lines) = read_ignores(dir) {
            let mut builder = GitignoreBuilder::new(OsStr::from_bytes(path));
            for line in lines.split(|byte| *byte == b'\n') {
                // A line that is no glob means nothing, to git as well.
                if let Ok(line) = std::str::from_utf8(line) {
                    drop(builder.add_line(None, line));
                }
            }
            if let Ok(ignores) = builder.build() {
                self.ignores.push((depth, ignores));
            }
        }
    }

    /// Lets go what held for directories at this depth and below.
    fn leave(&mut self, depth: usize) {
        while self.ignores.last().is_some_and(|(of, _)| *of >= depth) {
            self.ignores.pop();
        }
    }

    /// Whether what was seen is meant, or for a directory: may hold something that is.
    pub(super) fn wants(&mut self, seen: &Seen) -> bool {
        self.leave(seen.depth);
        if !self.hidden && seen.name.starts_with(b".") {
            return false;
        }
        let (path, dir) = (Path::new(OsStr::from_bytes(&seen.path)), is_dir(&seen.stat));
        let chosen = self.globs.matched(path, dir);
        if !chosen.is_none() {
            return !chosen.is_ignore();
        }
        // The nearest file that says anything decides.
        let said = self
            .ignores
            .iter()
            .rev()
            .map(|(_, ignores)| ignores.matched(path, dir));
        said.into_iter()
            .find(|said| !said.is_none())
            .is_none_or(|said| !said.is_ignore())
    }

    /// The next file of a walk that is meant; directories are entered on the way.
    pub(super) fn next(&mut self, walk: &mut Walk) -> Option<Seen> {
        loop {
            let seen = walk.next()?;
            if !self.wants(&seen) {
                continue;
            }
            if !is_dir(&seen.stat) {
                return Some(seen);
            }
            let before = walk.depth();
            walk.enter(&seen);
            if let Some(dir) = walk.dir().filter(|_| walk.depth() > before) {
                self.enter(dir, &seen.path, seen.depth);
            }
        }
    }
}

/// The bytes of a directory's `.gitignore`, if it has one that is a plain file.
fn read_ignores(dir: &OwnedFd) -> Option<Vec<u8>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = openat(dir, c".gitignore", flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    if !super::stat::is_plain(&stat) {
        return None;
    }
    let file = Found { fd, stat }.reopen(OFlags::RDONLY).ok()?;
    let mut lines = vec![0; IGNORES];
    let mut got = 0;
    while got < IGNORES {
        match read(&file, lines.get_mut(got..)?) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(_unreadable) => return None,
        }
    }
    lines.truncate(got);
    Some(lines)
}
