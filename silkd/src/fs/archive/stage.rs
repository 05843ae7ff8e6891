//! Entries of an archive, put into a directory of their own beside where they are going to be.

use std::os::fd::OwnedFd;

use bytes::{Buf as _, Bytes};
use rustix::{
    fs::{
        AtFlags, Gid, Mode, OFlags, ResolveFlags, SeekFrom, Timespec, Timestamps, Uid, fchmod, fchown,
        ftruncate, futimens, linkat, mkdirat, openat2, seek, symlinkat, utimensat,
    },
    io::Errno,
};
use sandbox_protocol::reason::Reason;

use super::{
    names::place,
    reader::{Entry, Event, Kind},
};
use crate::{
    fs::{
        errno::{About, refuse},
        open::{Spot, open_child},
        remove::{Failure, Shut, clear},
        temp::random_name,
        workers::{Cancel, as_silkd},
    },
    refusal::{Escaped, Refusal},
};

/// Entries of one archive.
const ENTRIES: u64 = 1_000_000;
/// Directories whose own owner may not write to them: their mode waits for the end. So many, 4 KiB each.
const SHUT: usize = 64;
/// What an owner needs to put things into a directory.
const OWNER: u32 = 0o700;
/// Set-user, set-group.
const SET_ID: u32 = 0o6000;
/// Mode of a directory that the archive does not name.
const IMPLIED: u32 = 0o755;

/// The directory. Dropped, it is removed with all that is in it.
#[derive(Debug)]
pub(super) struct Stage {
    /// Where it is.
    pub(super) spot: Spot,
    /// Open.
    pub(super) dir: OwnedFd,
    /// False once it is what it was made for.
    pub(super) there: bool,
    rules: Rules,
    file: Option<Open>,
    shut: Vec<(Vec<u8>, u32)>,
    /// Entries that were put.
    pub(super) entries: u64,
    /// Bytes of files, holes included.
    pub(super) bytes: u64,
}

/// How entries are put.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Parts of names that are dropped.
    pub(super) strip: u32,
    /// Owners and set-id bits come along.
    pub(super) keep_owner: bool,
}

/// A file that is being written.
#[derive(Debug)]
struct Open {
    file: OwnedFd,
    entry: Entry,
    at: u64,
}

/// An entry that cannot be.
pub(super) fn refused(name: &[u8], what: &str) -> Refusal {
    let message = format!("`{}`: {what}", Escaped(name, 128));
    Refusal::new(Reason::ArchiveRefused, message).with_path(name)
}

impl Stage {
    /// Makes one in this directory, for its owner only.
    pub(super) fn within(parent: &OwnedFd, rules: Rules) -> Result<Self, Errno> {
        let parent = parent.try_clone().map_err(|_full| Errno::MFILE)?;
        let name = random_name(".silkd-push-")?;
        mkdirat(&parent, name.as_slice(), Mode::RWXU)?;
        let spot = Spot { parent, name };
        let opened = open_child(&spot.parent, &spot.name).inspect_err(|_errno| {
            // Empty, and of no use.
            rustix::fs::unlinkat(&spot.parent, spot.name.as_slice(), AtFlags::REMOVEDIR).ok();
        });
        Ok(Self {
            dir: opened?,
            spot,
            there: true,
            rules,
            file: None,
            shut: Vec::new(),
            entries: 0,
            bytes: 0,
        })
    }

    /// Puts what the archive says next.
    pub(super) fn put(&mut self, event: Event) -> Result<(), Refusal> {
        match event {
            Event::Entry(entry) => self.begin(entry),
            Event::Data(offset, data) => self.write(offset, data),
            Event::Over => self.close(),
        }
    }

    fn begin(&mut self, entry: Entry) -> Result<(), Refusal> {
        let name = entry.path.clone();
        self.entries += 1;
        if self.entries > ENTRIES {
            return Err(refused(&name, "the archive holds more than 1,000,000 entries"));
        }
        let placed = place(&name, self.rules.strip).map_err(|bad| refused(&name, &bad.to_string()))?;
        // The directory itself, or what was stripped away.
        let Some(path) = placed else { return Ok(()) };
        match self.make(&path, entry) {
            Err(Errno::NOENT) => Err(refused(&name, "it leads to no entry of the archive")),
            other => other.map_err(|errno| cannot(errno, &name)),
        }
    }

    fn make(&mut self, path: &[u8], entry: Entry) -> Result<(), Errno> {
        let (parent, name) = self.way(path)?;
        match entry.kind {
            Kind::File => {
                let flags =
                    OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = beneath(&parent, name, flags, Mode::RUSR | Mode::WUSR)?;
                self.file = Some(Open { file, entry, at: 0 });
            }
            Kind::Directory => {
                match mkdirat(&parent, name, Mode::RWXU) {
                    // Told twice, or after what is in it.
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno),
                }
                let dir = beneath(&parent, name, dir_flags(), Mode::empty())?;
                self.own(&dir, &entry)?;
                let mode = self.mode(&entry);
                if mode & OWNER != OWNER {
                    if self.shut.len() == SHUT {
                        return Err(Errno::MFILE);
                    }
                    self.shut.push((path.to_vec(), mode));
                }
                fchmod(dir, Mode::from_raw_mode(mode | OWNER))?;
            }
            Kind::Link => {
                symlinkat(entry.link.as_slice(), &parent, name)?;
                if self.rules.keep_owner {
                    let (uid, gid) = ids(&entry)?;
                    rustix::fs::chownat(&parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
                }
                utimensat(&parent, name, &times(&entry), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Kind::HardLink => {
                let target = place(&entry.link, self.rules.strip)
                    .ok()
                    .flatten()
                    .ok_or(Errno::NOENT)?;
                let (from, of) = self.existing(&target)?;
                linkat(&from, of, &parent, name, AtFlags::empty())?;
            }
        }
        Ok(())
    }

    fn mode(&self, entry: &Entry) -> u32 {
        entry.mode & if self.rules.keep_owner { 0o7777 } else { !SET_ID }
    }

    fn own(&self, file: &OwnedFd, entry: &Entry) -> Result<(), Errno> {
        if self.rules.keep_owner {
            let (uid, gid) = ids(entry)?;
            fchown(file, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// The directory of a path, made if the archive did not, and the path's last name.
    fn way<'p>(&self, path: &'p [u8]) -> Result<(OwnedFd, &'p [u8]), Errno> {
        let (dir, name) = split(path);
        if dir.is_empty() {
            return Ok((self.dir.try_clone().map_err(|_full| Errno::MFILE)?, name));
        }
        match beneath(&self.dir, dir, dir_flags(), Mode::empty()) {
            Err(Errno::NOENT) => {
                let (above, last) = self.way(dir)?;
                mkdirat(&above, last, Mode::RWXU)?;
                let made = beneath(&above, last, dir_flags(), Mode::empty())?;
                fchmod(&made, Mode::from_raw_mode(IMPLIED))?;
                Ok((made, name))
            }
            opened => Ok((opened?, name)),
        }
    }

    /// The directory of a path that is there, and the path's last name.
    fn existing<'p>(&self, path: &'p [u8]) -> Result<(OwnedFd, &'p [u8]), Errno> {
        let (dir, name) = split(path);
        let dir = if dir.is_empty() { b"." } else { dir };
        Ok((beneath(&self.dir, dir, dir_flags(), Mode::empty())?, name))
    }

    fn write(&mut self, offset: u64, mut data: Bytes) -> Result<(), Refusal> {
        // Of an entry that was stripped away.
        let Some(open) = &mut self.file else { return Ok(()) };
        let fail = |errno| cannot(errno, &open.entry.path);
        if open.at != offset {
            seek(&open.file, SeekFrom::Start(offset)).map_err(fail)?;
        }
        open.at = offset.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        while data.has_remaining() {
            match rustix::io::write(&open.file, &data) {
                Ok(n) => data.advance(n),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(fail(errno)),
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), Refusal> {
        let Some(open) = self.file.take() else {
            return Ok(());
        };
        self.bytes = self.bytes.saturating_add(open.entry.size);
        let done = || {
            if open.at < open.entry.size {
                ftruncate(&open.file, open.entry.size)?;
            }
            self.own(&open.file, &open.entry)?;
            fchmod(&open.file, Mode::from_raw_mode(self.mode(&open.entry)))?;
            futimens(&open.file, &times(&open.entry))
        };
        done().map_err(|errno| cannot(errno, &open.entry.path))
    }

    /// Shuts the directories below `path` that the archive has shut, now that they are where they are going to be: below
    /// `root`. The last to come are the deepest.
    pub(super) fn shut(&self, root: &OwnedFd, path: &[u8]) -> Result<(), Refusal> {
        let below = |dir: &[u8]| {
            let rest = dir.strip_prefix(path);
            path.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        };
        for (path, mode) in self.shut.iter().rev().filter(|(dir, _)| below(dir)) {
            let dir = beneath(root, path, dir_flags(), Mode::empty());
            let set = dir.and_then(|dir| fchmod(dir, Mode::from_raw_mode(*mode)));
            set.map_err(|errno| cannot(errno, path))?;
        }
        Ok(())
    }

    /// Removes it, or what has taken its place.
    pub(super) fn remove(&mut self, cancel: &Cancel) -> Result<(), Errno> {
        self.there = false;
        match clear(&self.spot.parent, &self.spot.name, Shut::Opens, cancel) {
            Ok(_) | Err(Failure::Cancelled(_)) => Ok(()),
            Err(Failure::At(_, errno)) => Err(errno),
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.there {
            // As silkd: the archive may have shut its directories. What cannot be removed (a mount that somebody has
            // put there) stays.
            as_silkd(|| self.remove(&Cancel::default())).ok();
        }
    }
}

/// The refusal of an entry that the kernel did not make.
fn cannot(errno: Errno, name: &[u8]) -> Refusal {
    let what = match errno {
        Errno::EXIST => "it is in the archive twice",
        Errno::LOOP | Errno::XDEV | Errno::NOTDIR => "its name leads through something else than a directory",
        Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => "no file system has such a name",
        Errno::ISDIR => "it is a directory, and something else",
        Errno::MLINK => "it has too many names",
        // The disk's matter and not the archive's.
        errno => return refuse(errno, About::File, "unpack", name),
    };
    refused(name, what).with_errno(errno.raw_os_error())
}

fn dir_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Opens below a directory of ours: no link is a way, and no mount.
fn beneath(dir: &OwnedFd, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let rule = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    openat2(dir, path, flags, mode, rule)
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (
            path.get(..at).unwrap_or_default(),
            path.get(at + 1..).unwrap_or_default(),
        ),
        None => (b"", path),
    }
}

fn ids(entry: &Entry) -> Result<(Uid, Gid), Errno> {
    let id = |id: u64| {
        u32::try_from(id)
            .ok()
            .filter(|id| *id != u32::MAX)
            .ok_or(Errno::INVAL)
    };
    Ok((Uid::from_raw(id(entry.uid)?), Gid::from_raw(id(entry.gid)?)))
}

fn times(entry: &Entry) -> Timestamps {
    let at = Timespec {
        tv_sec: entry.mtime,
        tv_nsec: 0,
    };
    Timestamps {
        last_access: at,
        last_modification: at,
    }
}
