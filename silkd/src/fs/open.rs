//! From a request's path to a descriptor: where it may lead, and what it is once it is open.
//!
//! What a path is is judged on the open descriptor and never by name; whatever is changed is changed by a name in a
//! directory that is open. So whoever swaps names in between gains nothing.

use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, readlinkat, statat,
    },
    io::Errno,
};
use sandbox_protocol::{limits::PATH, reason::Reason, v1::Resolve};

use super::errno::{About, refuse, refused};
use crate::refusal::Refusal;

/// How often a lookup is tried again that a rename came across.
const RACES: usize = 64;
/// As mkdir has it: everything but what the mask of a login takes away.
const DIRECTORY: Mode = Mode::from_raw_mode(0o755);

/// A path of a request, checked, and the rule that it is followed by.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    path: Vec<u8>,
    beneath: Option<Vec<u8>>,
    no_follow: bool,
}

impl Wanted {
    /// Pure.
    ///
    /// # Errors
    /// `INVALID_PATH`, and `PATH_ESCAPES` when it does not even begin with the directory that it must stay below.
    pub(super) fn new(path: &[u8], resolve: Option<&Resolve>) -> Result<Self, Refusal> {
        let wanted = Self {
            path: checked(path)?,
            beneath: match resolve {
                Some(resolve) if !resolve.beneath.is_empty() => Some(checked(&resolve.beneath)?),
                Some(_) | None => None,
            },
            no_follow: resolve.is_some_and(|resolve| resolve.no_follow),
        };
        match &wanted.beneath {
            Some(root) if below(root, path).is_none() => Err(wanted.escapes()),
            Some(_) | None => Ok(wanted),
        }
    }

    fn escapes(&self) -> Refusal {
        refused(Reason::PathEscapes, "leads out of the directory", &self.path)
    }

    /// As the request has it.
    pub(super) fn path(&self) -> &[u8] {
        &self.path
    }

    /// A refusal of the lookup itself.
    pub(super) fn lost(&self, errno: Errno) -> Refusal {
        let about = if self.beneath.is_some() {
            About::Beneath
        } else {
            About::Path
        };
        refuse(errno, about, "reach", &self.path)
    }

    /// A refusal of what was done there.
    pub(super) fn failed(&self, tried: &str, errno: Errno) -> Refusal {
        refuse(errno, About::File, tried, &self.path)
    }

    /// Opens the directory that the path must stay below.
    pub(super) fn base(&self) -> Result<Base, Refusal> {
        let Some(root) = &self.beneath else {
            return Ok(Base {
                root: None,
                rest: self.path.clone(),
            });
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(CWD, root.as_slice(), flags, Mode::empty());
        let opened = opened.map_err(|errno| refuse(errno, About::Path, "reach", root))?;
        Ok(Base {
            root: Some(opened),
            rest: below(root, &self.path).ok_or_else(|| self.escapes())?,
        })
    }

    /// What the path leads to, opened as a name only: nothing was read, nothing woke up. Links at its end are followed
    /// unless the rule or `follow` says no; then the link itself is what is opened.
    ///
    /// # Errors
    /// Those of the lookup.
    pub(super) fn look(&self, follow: bool) -> Result<Found, Refusal> {
        let base = self.base()?;
        self.look_from(&base, follow)
    }

    fn look_from(&self, base: &Base, follow: bool) -> Result<Found, Refusal> {
        let mut flags = OFlags::PATH | OFlags::CLOEXEC;
        flags.set(OFlags::NOFOLLOW, self.no_follow || !follow);
        let fd = base.open(&base.rest, flags).map_err(|errno| self.lost(errno))?;
        let stat = fstat(&fd).map_err(|errno| self.lost(errno))?;
        Ok(Found { fd, stat })
    }

    /// Opens a plain file; `flags` say what for.
    ///
    /// # Errors
    /// `NOT_REGULAR_FILE`, `LINK_REFUSED`, those of the lookup, and `PATH_DENIED`.
    pub(super) fn open_file(&self, flags: OFlags) -> Result<(OwnedFd, Stat), Refusal> {
        let found = self.look(true)?;
        self.plain(&found.stat)?;
        let file = found.reopen(flags);
        Ok((file.map_err(|errno| self.failed("open", errno))?, found.stat))
    }

    /// Says that it is a plain file.
    ///
    /// # Errors
    /// `NOT_REGULAR_FILE`, `LINK_REFUSED`.
    pub(super) fn plain(&self, stat: &Stat) -> Result<(), Refusal> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(()),
            FileType::Symlink => Err(refused(Reason::LinkRefused, "is a link", &self.path)),
            FileType::Directory
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => Err(refused(Reason::NotRegularFile, "is not a plain file", &self.path)),
        }
    }

    /// Opens a directory to be read.
    ///
    /// # Errors
    /// `NOT_A_DIRECTORY`, `LINK_REFUSED`, those of the lookup, and `PATH_DENIED`.
    pub(super) fn open_dir(&self) -> Result<(OwnedFd, Stat), Refusal> {
        let found = self.look(true)?;
        match FileType::from_raw_mode(found.stat.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => return Err(refused(Reason::LinkRefused, "is a link", &self.path)),
            FileType::RegularFile
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => {
                return Err(refused(Reason::NotADirectory, "is not a directory", &self.path));
            }
        }
        let dir = open_child(&found.fd, b".");
        Ok((dir.map_err(|errno| self.failed("open", errno))?, found.stat))
    }

    /// The directory that holds the path's last name, and that name. Directories on the way are made if `parents`.
    ///
    /// # Errors
    /// `INVALID_PATH` for a path without a last name (`/`, `..`), those of the lookup and of making directories.
    pub(super) fn spot(&self, parents: bool) -> Result<Spot, Refusal> {
        let base = self.base()?;
        self.spot_from(&base, &base.rest, parents)
    }

    fn spot_from(&self, base: &Base, rest: &[u8], parents: bool) -> Result<Spot, Refusal> {
        let nameless = || refused(Reason::InvalidPath, "has no last name", &self.path);
        let (parent, name) = split(rest).ok_or_else(nameless)?;
        let parent = match base.open(parent, dir_flags()) {
            Err(Errno::NOENT) if parents => self.make_way(base, parent)?,
            other => other.map_err(|errno| self.lost(errno))?,
        };
        Ok(Spot {
            parent,
            name: name.to_vec(),
        })
    }

    /// Opens a directory, making what is missing on the way.
    fn make_way(&self, base: &Base, dir: &[u8]) -> Result<OwnedFd, Refusal> {
        let fail = |errno| self.failed("make a directory of", errno);
        let start: &[u8] = if dir.starts_with(b"/") { b"/" } else { b"." };
        let mut at = base.open(start, dir_flags()).map_err(fail)?;
        let mut end = 0;
        for part in dir.split_inclusive(|byte| *byte == b'/') {
            end += part.len();
            let name = part.strip_suffix(b"/").unwrap_or(part);
            if name.is_empty() {
                continue;
            }
            let so_far = dir.get(..end).unwrap_or(dir);
            let opened = match base.open(so_far, dir_flags()) {
                Err(Errno::NOENT) => {
                    make_dir(&at, name, DIRECTORY).map_err(fail)?;
                    base.open(so_far, dir_flags())
                }
                other => other,
            };
            at = opened.map_err(|errno| self.lost(errno))?;
        }
        Ok(at)
    }

    /// Where a write to this path really goes: through a last link, to the file that it leads to. What is there now
    /// comes with it.
    ///
    /// # Errors
    /// `LINK_REFUSED`, `PATH_NOT_FOUND` for a link that leads nowhere, and those of [`spot`](Self::spot).
    pub(super) fn target(&self, parents: bool) -> Result<(Spot, Option<Found>), Refusal> {
        let base = self.base()?;
        for _attempt in 0..RACES {
            let spot = self.spot_from(&base, &base.rest, parents)?;
            let found = match spot.look() {
                Err(Errno::NOENT) => return Ok((spot, None)),
                other => other.map_err(|errno| self.lost(errno))?,
            };
            if !found.is_link() {
                return Ok((spot, Some(found)));
            }
            if self.no_follow {
                return Err(refused(Reason::LinkRefused, "is a link", &self.path));
            }
            let found = self.look_from(&base, true)?;
            let (from, rest) = self.real(&base, &found)?;
            let spot = match split(&rest) {
                None => return Err(refused(Reason::NotRegularFile, "is not a plain file", &self.path)),
                Some(_) => self.spot_from(&from, &rest, false)?,
            };
            // The name that the kernel gave was true a moment ago.
            if spot.look().is_ok_and(|there| there.is(&found.stat)) {
                return Ok((spot, Some(found)));
            }
        }
        Err(self.lost(Errno::AGAIN))
    }

    /// The path of what was found, from the root of the promise.
    fn real(&self, base: &Base, found: &Found) -> Result<(Base, Vec<u8>), Refusal> {
        let named = |fd: &OwnedFd| name_of(fd).map_err(|errno| self.lost(errno));
        let real = named(&found.fd)?;
        let Some(root) = &base.root else {
            return Ok((
                Base {
                    root: None,
                    rest: real.clone(),
                },
                real,
            ));
        };
        let rest = below(&named(root)?, &real).ok_or_else(|| self.escapes())?;
        let root = root.try_clone().map_err(|_full| self.lost(Errno::MFILE))?;
        Ok((
            Base {
                root: Some(root),
                rest: rest.clone(),
            },
            rest,
        ))
    }
}

fn dir_flags() -> OFlags {
    OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC
}

/// Where a lookup begins.
#[derive(Debug)]
pub(super) struct Base {
    /// The directory that nothing may lead out of.
    root: Option<OwnedFd>,
    /// The path from there.
    rest: Vec<u8>,
}

impl Base {
    /// The path from the root on.
    pub(super) fn rest(&self) -> &[u8] {
        &self.rest
    }

    /// Opens a path from here, by the rule.
    pub(super) fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        self.open_mode(path, flags, Mode::empty())
    }

    fn open_mode(&self, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { b"." } else { path };
        let Some(root) = &self.root else {
            return openat(CWD, path, flags, mode);
        };
        let rule = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        // With `..` in the path and a rename anywhere the kernel cannot tell, and says so.
        for _attempt in 0..RACES {
            match openat2(root, path, flags, mode, rule) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }
}

/// What a path led to.
#[derive(Debug)]
pub(super) struct Found {
    /// A name only; see `O_PATH`.
    pub(super) fd: OwnedFd,
    pub(super) stat: Stat,
}

impl Found {
    pub(super) fn is_link(&self) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == FileType::Symlink
    }

    fn is(&self, other: &Stat) -> bool {
        (self.stat.st_dev, self.stat.st_ino) == (other.st_dev, other.st_ino)
    }

    /// Opens this very thing for use. Never blocks: not for the other end of a FIFO either, if it should be one.
    pub(super) fn reopen(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        openat(CWD, own_link(&self.fd), flags, Mode::empty())
    }

    /// Where a link leads.
    pub(super) fn link_target(&self) -> Result<Vec<u8>, Errno> {
        Ok(readlinkat(&self.fd, c"", Vec::new())?.into_bytes())
    }
}

/// A name in an open directory.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) parent: OwnedFd,
    pub(super) name: Vec<u8>,
}

impl Spot {
    /// What is there, a link itself.
    pub(super) fn look(&self) -> Result<Found, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = openat(&self.parent, self.name.as_slice(), flags, Mode::empty())?;
        let stat = fstat(&fd)?;
        Ok(Found { fd, stat })
    }

    /// The same, without opening.
    pub(super) fn stat(&self) -> Result<Stat, Errno> {
        statat(&self.parent, self.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Makes a directory with exactly this mode; one that is there already is good too.
pub(super) fn make_dir(parent: &OwnedFd, name: &[u8], mode: Mode) -> Result<bool, Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(false),
        Err(errno) => return Err(errno),
    }
    let dir = open_child(parent, name)?;
    rustix::fs::fchmod(dir, mode)?;
    Ok(true)
}

/// Opens a directory of a directory to be read; never through a link.
pub(super) fn open_child(parent: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}

/// The kernel's link to a descriptor of ours.
pub(super) fn own_link(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// The path that the kernel gives a descriptor now.
fn name_of(fd: &OwnedFd) -> Result<Vec<u8>, Errno> {
    let name = readlinkat(CWD, own_link(fd), Vec::new())?.into_bytes();
    if name.len() > PATH {
        return Err(Errno::NAMETOOLONG);
    }
    Ok(name)
}

fn checked(path: &[u8]) -> Result<Vec<u8>, Refusal> {
    let invalid = |what| Err(refused(Reason::InvalidPath, what, path));
    if path.len() > PATH {
        return invalid("is longer than 4095 bytes");
    }
    if path.contains(&0) {
        return invalid("holds a NUL");
    }
    if !path.starts_with(b"/") {
        return invalid("is not absolute");
    }
    Ok(path.to_vec())
}

/// What of `path` lies below `root`, relative; `None` where it does not begin with it. Pure: `..` are left to the kernel.
fn below(root: &[u8], path: &[u8]) -> Option<Vec<u8>> {
    let parts = |path: &[u8]| -> Vec<Vec<u8>> {
        let parts = path.split(|byte| *byte == b'/');
        parts
            .filter(|part| !part.is_empty() && *part != b".")
            .map(<[u8]>::to_vec)
            .collect()
    };
    let (root, parts_of) = (parts(root), parts(path));
    let rest = parts_of.strip_prefix(root.as_slice())?;
    let mut joined = rest.join(&b'/');
    // A path that names a directory goes on doing so.
    if path.ends_with(b"/") && !joined.is_empty() {
        joined.push(b'/');
    }
    Some(joined)
}

/// Directory and last name of a path; `None` where that is no name. Slashes at the end do not count. Pure.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = path.iter().rposition(|byte| *byte != b'/')? + 1;
    let path = path.get(..end)?;
    let at = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let (parent, name) = path.split_at_checked(at)?;
    (name != b"." && name != b"..").then_some((parent, name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_are_absolute_short_and_without_nul() {
        for bad in [&b""[..], b"a", b"./a", b"/a\0b", &[b'/'; PATH + 1]] {
            let refusal = Wanted::new(bad, None).unwrap_err();
            assert_eq!(refusal.reason, Reason::InvalidPath, "{bad:?}");
        }
        assert!(Wanted::new(&[b'/'; PATH], None).is_ok());
        let beneath = |root: &'static str| Resolve {
            beneath: root.as_bytes().into(),
            ..Resolve::default()
        };
        for (root, path, expected) in [
            ("/a", "/a/b", Ok("b")),
            ("/a/", "//a/./b/", Ok("b/")),
            ("/a", "/a", Ok("")),
            ("/", "/x/../y", Ok("x/../y")),
            ("/a", "/ab", Err(Reason::PathEscapes)),
            ("/a", "/", Err(Reason::PathEscapes)),
            ("/a", "/a/../b", Ok("../b")),
            ("a", "/a", Err(Reason::InvalidPath)),
        ] {
            let wanted = Wanted::new(path.as_bytes(), Some(&beneath(root)));
            let rest = wanted.map(|wanted| below(root.as_bytes(), wanted.path()).unwrap());
            let expected = expected.map(|rest| rest.as_bytes().to_vec());
            assert_eq!(rest.map_err(|refusal| refusal.reason), expected, "{root} {path}");
        }
    }

    #[test]
    fn the_last_name_is_a_name() {
        assert_eq!(split(b"/a/b"), Some((&b"/a/"[..], &b"b"[..])));
        assert_eq!(split(b"/a/b//"), Some((&b"/a/"[..], &b"b"[..])));
        assert_eq!(split(b"b"), Some((&b""[..], &b"b"[..])));
        for none in [&b"/"[..], b"", b"/a/..", b"/a/.", b"..//", b"."] {
            assert_eq!(split(none), None, "{none:?}");
        }
    }

    proptest! {
        /// A rest that is handed to the kernel is never absolute: it would begin at the machine's root.
        #[test]
        fn what_lies_below_is_relative(root in "[/a.]{0,8}", path in "[/a.]{0,16}") {
            if let Some(rest) = below(root.as_bytes(), path.as_bytes()) {
                prop_assert!(!rest.starts_with(b"/"));
            }
        }
    }
}
