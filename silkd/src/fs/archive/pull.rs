//! Pull: a tree as an archive, well-formed whatever its files do meanwhile.

use std::os::fd::OwnedFd;

use globset::GlobSet;
use rustix::{
    fs::{FileType, OFlags, Stat, fstat, readlinkat},
    io::{Errno, pread},
};
use sandbox_protocol::{
    limits::CHUNK_OUT,
    v1::{AgentPullRequest, FileStat, PullEnd, PullOut, pull_out::M},
};
use tar::{EntryType, Header};

use crate::{
    fs::{
        globs::{globs, matches},
        open::{Base, Found, Wanted, open_child},
        stat::{MODE, is_dir},
        steps::{Made, Produce},
        walk::{Seen, Walk},
        workers::Cancel,
    },
    refusal::Refusal,
};

/// A block of an archive.
const BLOCK: usize = 512;
/// What a header with its long names may add to a message.
const HEADERS: usize = 12 * 1024;

/// A request, checked.
#[derive(Debug)]
pub(in crate::fs) struct Plan {
    wanted: Wanted,
    exclude: GlobSet,
    follow: bool,
}

impl Plan {
    /// Pure.
    ///
    /// # Errors
    /// `INVALID_PATTERN`, and those of a path.
    pub(in crate::fs) fn new(request: &AgentPullRequest) -> Result<Self, Refusal> {
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            exclude: globs(&request.exclude)?,
            follow: request.follow,
        })
    }
}

/// An archive that is being made.
#[derive(Debug)]
pub(in crate::fs) struct Puller {
    plan: Plan,
    /// Links are followed from there.
    base: Base,
    head: Option<FileStat>,
    /// Put before anything else: the first entry.
    first: Option<First>,
    walk: Option<Walk>,
    file: Option<Open>,
    end: PullEnd,
    next: Next,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Entries,
    End,
    Nothing,
}

#[derive(Debug)]
enum First {
    Directory(Stat),
    File(Found, Vec<u8>),
}

/// A file whose bytes are on their way.
#[derive(Debug)]
struct Open {
    file: OwnedFd,
    at: u64,
    size: u64,
    /// It ended early; zeros follow.
    shrunk: bool,
}

impl Puller {
    pub(in crate::fs) fn open(plan: Plan) -> Result<Self, Refusal> {
        let base = plan.wanted.base()?;
        let found = plan.wanted.look(true)?;
        let fail = |errno| plan.wanted.failed("read", errno);
        let head = crate::fs::stat::found(&found).map_err(fail)?;
        let (walk, first) = if is_dir(&found.stat) {
            let dir = open_child(&found.fd, b".").and_then(Walk::new).map_err(fail)?;
            (Some(dir), First::Directory(found.stat))
        } else {
            plan.wanted.plain(&found.stat)?;
            (None, First::File(found, plan.wanted.spot(false)?.name))
        };
        Ok(Self {
            plan,
            base,
            head: Some(head),
            first: Some(first),
            walk,
            file: None,
            end: PullEnd::default(),
            next: Next::Entries,
        })
    }

    /// Adds to a message; false at the archive's end.
    fn add(&mut self, out: &mut Vec<u8>) -> Result<bool, Refusal> {
        if self.file.is_some() {
            self.add_data(out)?;
            return Ok(true);
        }
        match self.first.take() {
            Some(First::Directory(stat)) => {
                self.header(out, b"./", &stat, EntryType::Directory, &[]);
                return Ok(true);
            }
            Some(First::File(found, name)) => {
                let file = found.reopen(OFlags::RDONLY);
                let file = file.map_err(|errno| self.plan.wanted.failed("open", errno))?;
                self.begin_file(out, &name, file);
                return Ok(true);
            }
            None => {}
        }
        let Some(walk) = &mut self.walk else {
            return Ok(false);
        };
        let Some(seen) = walk.next() else {
            self.end.skipped += walk.unreadable;
            return Ok(false);
        };
        if !matches(&self.plan.exclude, &seen.path) {
            self.entry(out, &seen);
        }
        Ok(true)
    }

    fn entry(&mut self, out: &mut Vec<u8>, seen: &Seen) {
        let mut name = b"./".to_vec();
        name.extend_from_slice(&seen.path);
        match FileType::from_raw_mode(seen.stat.st_mode) {
            FileType::Directory => self.directory(out, name, &seen.stat, |walk| walk.enter(seen)),
            FileType::RegularFile => match self.open_file(seen) {
                Some(file) => self.begin_file(out, &name, file),
                None => self.end.skipped += 1,
            },
            FileType::Symlink if self.plan.follow => self.followed(out, name, seen),
            FileType::Symlink => {
                let target = self.walk.as_ref().and_then(Walk::dir);
                let target = target.and_then(|dir| readlinkat(dir, seen.name.as_slice(), Vec::new()).ok());
                match target {
                    Some(target) => {
                        self.header(out, &name, &seen.stat, EntryType::Symlink, target.as_bytes())
                    }
                    None => self.end.skipped += 1,
                }
            }
            FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => self.end.skipped += 1,
        }
    }

    fn directory(
        &mut self,
        out: &mut Vec<u8>,
        mut name: Vec<u8>,
        stat: &Stat,
        enter: impl FnOnce(&mut Walk),
    ) {
        name.push(b'/');
        self.header(out, &name, stat, EntryType::Directory, &[]);
        if let Some(walk) = &mut self.walk {
            enter(walk);
        }
    }

    /// What a link leads to, in its place. A directory that the walk is in already would never end.
    fn followed(&mut self, out: &mut Vec<u8>, name: Vec<u8>, seen: &Seen) {
        let mut path = self.base.rest().to_vec();
        path.push(b'/');
        path.extend_from_slice(&seen.path);
        let found = self.base.open(&path, OFlags::PATH | OFlags::CLOEXEC);
        let found = found.and_then(|fd| {
            let stat = fstat(&fd)?;
            Ok(Found { fd, stat })
        });
        let Ok(found) = found else {
            self.end.skipped += 1;
            return;
        };
        match FileType::from_raw_mode(found.stat.st_mode) {
            FileType::Directory if self.walk.as_ref().is_some_and(|walk| !walk.is_in(&found.stat)) => {
                self.directory(out, name, &found.stat, |walk| walk.enter_found(&found));
            }
            FileType::RegularFile => match found.reopen(OFlags::RDONLY) {
                Ok(file) => self.begin_file(out, &name, file),
                Err(_unreadable) => self.end.skipped += 1,
            },
            FileType::Directory
            | FileType::Symlink
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => self.end.skipped += 1,
        }
    }

    /// Opens a file that was seen; `None` where that is not to be, or it is no plain file any more.
    fn open_file(&self, seen: &Seen) -> Option<OwnedFd> {
        let dir = self.walk.as_ref()?.dir()?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, seen.name.as_slice(), flags, rustix::fs::Mode::empty()).ok()?;
        let stat = fstat(&fd).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        Found { fd, stat }.reopen(OFlags::RDONLY).ok()
    }

    fn begin_file(&mut self, out: &mut Vec<u8>, name: &[u8], file: OwnedFd) {
        let Ok(stat) = fstat(&file) else {
            self.end.skipped += 1;
            return;
        };
        self.header(out, name, &stat, EntryType::Regular, &[]);
        self.file = Some(Open {
            file,
            at: 0,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            shrunk: false,
        });
    }

    /// Adds bytes of the open file: exactly as many as its header says.
    fn add_data(&mut self, out: &mut Vec<u8>) -> Result<(), Refusal> {
        let Some(open) = &mut self.file else { return Ok(()) };
        let left = usize::try_from(open.size - open.at).unwrap_or(usize::MAX);
        let want = left.min(CHUNK_OUT.saturating_sub(out.len()));
        let from = out.len();
        out.resize(from + want, 0);
        let mut got = 0;
        while got < want && !open.shrunk {
            let room = out.get_mut(from + got..).unwrap_or_default();
            let at = open.at + u64::try_from(got).unwrap_or(0);
            match pread(&open.file, room, at) {
                Err(Errno::INTR) => {}
                Ok(0) | Err(Errno::AGAIN) => {
                    open.shrunk = true;
                    self.end.shrunk += 1;
                }
                Ok(n) => got += n,
                Err(errno) => return Err(self.plan.wanted.failed("read a file of", errno)),
            }
        }
        open.at += u64::try_from(want).unwrap_or(0);
        if open.at == open.size {
            let now = fstat(&open.file).map_or(0, |stat| stat.st_size);
            self.end.grown += u64::from(u64::try_from(now).unwrap_or(0) > open.size);
            self.end.bytes = self.end.bytes.saturating_add(open.size);
            self.file = None;
            out.resize(out.len().next_multiple_of(BLOCK), 0);
        }
        Ok(())
    }

    fn header(&mut self, out: &mut Vec<u8>, name: &[u8], stat: &Stat, kind: EntryType, link: &[u8]) {
        self.end.entries += 1;
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(stat.st_mode & MODE);
        header.set_uid(stat.st_uid.into());
        header.set_gid(stat.st_gid.into());
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(if kind == EntryType::Regular {
            u64::try_from(stat.st_size).unwrap_or(0)
        } else {
            0
        });
        let old = header.as_old_mut();
        if !fits(&mut old.linkname, link) {
            long(out, EntryType::GNULongLink, link);
        }
        if !fits(&mut old.name, name) {
            long(out, EntryType::GNULongName, name);
        }
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
    }
}

/// Writes as much as there is room for; whether all of it.
fn fits(field: &mut [u8], text: &[u8]) -> bool {
    for (to, from) in field.iter_mut().zip(text) {
        *to = *from;
    }
    text.len() <= field.len()
}

/// A name that a header has no room for, before it.
fn long(out: &mut Vec<u8>, kind: EntryType, name: &[u8]) {
    let mut header = Header::new_gnu();
    fits(&mut header.as_old_mut().name, b"././@LongLink");
    header.set_entry_type(kind);
    header.set_mode(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(u64::try_from(name.len() + 1).unwrap_or(0));
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(name);
    out.push(0);
    // The header is a whole block, and so is what came before.
    out.resize(out.len().next_multiple_of(BLOCK), 0);
}

impl Produce for Puller {
    type Item = PullOut;

    fn next(&mut self, cancel: &Cancel) -> Result<Made<PullOut>, Refusal> {
        if let Some(head) = self.head.take() {
            return Ok(Made::Item(PullOut {
                m: Some(M::Head(head)),
            }));
        }
        let m = match self.next {
            Next::Nothing => return Ok(Made::End),
            Next::End => {
                self.next = Next::Nothing;
                M::End(self.end)
            }
            Next::Entries => {
                // Whole blocks end each message, except within a file.
                let mut out = Vec::with_capacity(CHUNK_OUT);
                while out.len() + HEADERS <= CHUNK_OUT {
                    cancel.check()?;
                    if !self.add(&mut out)? {
                        out.resize(out.len() + 2 * BLOCK, 0);
                        self.next = Next::End;
                        break;
                    }
                }
                M::Data(out.into())
            }
        };
        Ok(Made::Item(PullOut { m: Some(m) }))
    }
}
