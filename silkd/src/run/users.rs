//! Users and groups of the guest: our own bounded reader of `/etc/passwd` and `/etc/group`, since a static libc's
//! would load the guest's libraries into PID 1. The parser is pure; the files are read again only when they changed.

use std::{
    io::Read as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use sandbox_protocol::reason::Reason;

use crate::{
    refusal::{Escaped, Refusal},
    sys::Ids,
};

/// Bytes of a passwd or group file that are read; what is behind them does not count.
const FILE: usize = 1024 * 1024;
/// Supplementary groups that a user can have, as the kernel has it.
const GROUPS: usize = 65_536;
/// Longest `user[:group]`.
const SPEC: usize = 512;

/// One line of a passwd file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry<'a> {
    pub(super) name: &'a [u8],
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) home: &'a [u8],
    pub(super) shell: &'a [u8],
}

/// Who a program runs as, and what its environment says about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name; the number where it has none.
    pub name: Vec<u8>,
    /// Home directory.
    pub home: Vec<u8>,
    /// Login shell.
    pub shell: Vec<u8>,
    /// `None`: nobody was asked for, so silkd's own.
    pub ids: Option<Ids>,
}

fn number(text: &[u8]) -> Option<u32> {
    // The kernel's "no id".
    let number: u32 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (number != u32::MAX && text.first() != Some(&b'+')).then_some(number)
}

fn lines(file: &[u8]) -> impl Iterator<Item = impl Iterator<Item = &[u8]>> {
    let lines = file.split(|byte| *byte == b'\n');
    lines.map(|line| line.split(|byte| *byte == b':'))
}

/// The well-formed lines of a passwd file.
pub(super) fn passwd(file: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    lines(file).filter_map(|mut fields| {
        let name = fields.next().filter(|name| !name.is_empty())?;
        let _password = fields.next()?;
        let (uid, gid) = (number(fields.next()?)?, number(fields.next()?)?);
        let _comment = fields.next()?;
        let (home, shell) = (fields.next()?, fields.next().unwrap_or_default());
        Some(Entry {
            name,
            uid,
            gid,
            home,
            shell,
        })
    })
}

/// The well-formed lines of a group file: name, number, members.
fn groups(file: &[u8]) -> impl Iterator<Item = (&[u8], u32, &[u8])> {
    lines(file).filter_map(|mut fields| {
        let name = fields.next().filter(|name| !name.is_empty())?;
        let _password = fields.next()?;
        Some((name, number(fields.next()?)?, fields.next().unwrap_or_default()))
    })
}

/// The user that `spec` (name or number, then perhaps `:` and a group by name or number) means. A name that looks
/// like a number is a name first. A number that no line has is taken as it is, with a group of the same number.
///
/// # Errors
/// `USER_NOT_FOUND`.
pub fn find(spec: &[u8], passwd_file: &[u8], group_file: &[u8]) -> Result<User, Refusal> {
    let unknown = |what: &str, name: &[u8]| {
        let message = format!("no {what} `{}` here", Escaped(name, 64));
        Refusal::new(Reason::UserNotFound, message)
    };
    if spec.len() > SPEC {
        return Err(unknown("user", spec));
    }
    let mut parts = spec.splitn(2, |byte| *byte == b':');
    let (wanted, wanted_group) = (parts.next().unwrap_or_default(), parts.next());
    let by_name = passwd(passwd_file).find(|entry| entry.name == wanted);
    let as_number = number(wanted);
    let entry = by_name.or_else(|| passwd(passwd_file).find(|entry| Some(entry.uid) == as_number));
    let (mut user, uid, mut gid) = match (entry, as_number) {
        (Some(entry), _) => (described(&entry), entry.uid, entry.gid),
        (None, Some(uid)) => (nameless(uid), uid, uid),
        (None, None) => return Err(unknown("user", wanted)),
    };
    let mut more: Vec<u32> = groups(group_file)
        .filter(|(_, _, members)| {
            members
                .split(|byte| *byte == b',')
                .any(|member| member == user.name)
        })
        .map(|(_, gid, _)| gid)
        .take(GROUPS)
        .collect();
    if let Some(wanted) = wanted_group {
        let by_name = groups(group_file).find(|(name, ..)| *name == wanted);
        let found = by_name.map(|(_, gid, _)| gid).or_else(|| number(wanted));
        gid = found.ok_or_else(|| unknown("group", wanted))?;
        // A group that was asked for stands alone.
        more.clear();
    }
    more.push(gid);
    more.sort_unstable();
    more.dedup();
    user.ids = Some(Ids {
        uid,
        gid,
        groups: more,
    });
    Ok(user)
}

/// The user with this number, for what the environment says when nobody was asked for.
pub(super) fn own(uid: u32, passwd_file: &[u8]) -> User {
    match passwd(passwd_file).find(|entry| entry.uid == uid) {
        Some(entry) => described(&entry),
        None => nameless(uid),
    }
}

fn described(entry: &Entry<'_>) -> User {
    let or = |text: &[u8], other: &[u8]| {
        if text.is_empty() {
            other.to_vec()
        } else {
            text.to_vec()
        }
    };
    User {
        name: entry.name.to_vec(),
        home: or(entry.home, b"/"),
        shell: or(entry.shell, b"/bin/sh"),
        ids: None,
    }
}

fn nameless(uid: u32) -> User {
    let (name, home): (_, &[u8]) = match uid {
        0 => (b"root".to_vec(), b"/root"),
        uid => (uid.to_string().into_bytes(), b"/"),
    };
    User {
        name,
        home: home.to_vec(),
        shell: b"/bin/sh".to_vec(),
        ids: None,
    }
}

/// What tells whether a file changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, u32),
    changed: (i64, u32),
}

#[derive(Debug, Default)]
struct Cached(Option<(Stamp, Arc<[u8]>)>);

/// The two files, as they were when last looked at.
#[derive(Debug, Default)]
pub(super) struct Users {
    passwd: Mutex<Cached>,
    group: Mutex<Cached>,
}

impl Users {
    /// The user of `spec`; an empty one means silkd's own.
    ///
    /// # Errors
    /// `USER_NOT_FOUND`.
    pub(super) fn resolve(&self, spec: &[u8]) -> Result<User, Refusal> {
        let passwd_file = look(&self.passwd, Path::new("/etc/passwd"));
        if spec.is_empty() {
            return Ok(own(rustix::process::getuid().as_raw(), &passwd_file));
        }
        find(spec, &passwd_file, &look(&self.group, Path::new("/etc/group")))
    }

    /// Lets the copies go.
    pub(super) fn forget(&self) {
        for cached in [&self.passwd, &self.group] {
            *cached.lock().unwrap_or_else(PoisonError::into_inner) = Cached::default();
        }
    }
}

/// The file's bytes; none where it is missing, unreadable, or no regular file.
fn look(cached: &Mutex<Cached>, path: &Path) -> Arc<[u8]> {
    let Some(stamp) = stamp(path) else {
        return Arc::default();
    };
    let mut cached = cached.lock().unwrap_or_else(PoisonError::into_inner);
    match &cached.0 {
        Some((known, bytes)) if *known == stamp => bytes.clone(),
        Some(_) | None => {
            let bytes = read(path).unwrap_or_default();
            cached.0 = Some((stamp, bytes.clone()));
            bytes
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let stat = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS).ok()?;
    Some(Stamp {
        inode: stat.stx_ino,
        size: stat.stx_size,
        modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
        changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
    })
}

fn read(path: &Path) -> Option<Arc<[u8]>> {
    // A FIFO in its place must hold up nobody.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    let limit = u64::try_from(FILE).unwrap_or(u64::MAX);
    file.take(limit).read_to_end(&mut bytes).ok()?;
    Some(bytes.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/bash\nbroken\n:x:9:9::/:\nann:x:1000:1001::/home/ann:\n\
        1000:x:77:77::/n:/bin/n\nbad:x:-1:0::/:\nmax:x:4294967295:0::/:\nlast:x:5:6::/last";
    const GROUP: &[u8] = b"root:x:0:\nwheel:x:10:bob,ann\nstaff:x:50:annette\nusers:x:100:ann\n";

    fn ids(spec: &[u8]) -> Ids {
        find(spec, PASSWD, GROUP).unwrap().ids.unwrap()
    }

    #[test]
    fn names_numbers_and_groups() {
        let ann = find(b"ann", PASSWD, GROUP).unwrap();
        assert_eq!(
            (&*ann.name, &*ann.home, &*ann.shell),
            (&b"ann"[..], &b"/home/ann"[..], &b"/bin/sh"[..])
        );
        assert_eq!(
            ann.ids.unwrap(),
            Ids {
                uid: 1000,
                gid: 1001,
                groups: vec![10, 100, 1001]
            }
        );
        assert_eq!((ids(b"ann:wheel").gid, ids(b"ann:wheel").groups), (10, vec![10]));
        assert_eq!(ids(b"ann:7").gid, 7);
        assert_eq!(ids(b"1000").uid, 77, "a name that looks like a number is a name");
        assert_eq!(ids(b"5").gid, 6);
        assert_eq!((ids(b"4711").uid, ids(b"4711").gid), (4711, 4711));
        assert_eq!(ids(b"last").uid, 5);
        for bad in [
            &b"bob"[..],
            b"broken",
            b"bad",
            b"max",
            b"-1",
            b"+5",
            b"ann:nogroup",
            b"4294967295",
            b":",
            &[b'a'; 600],
        ] {
            let refusal = find(bad, PASSWD, GROUP).unwrap_err();
            assert_eq!(refusal.reason, Reason::UserNotFound, "{bad:?}");
        }
        assert_eq!(own(0, PASSWD).shell, b"/bin/bash");
        assert_eq!(own(0, b"").home, b"/root");
        assert_eq!(own(0, b"").ids, None);
    }

    #[test]
    fn a_fifo_or_a_missing_file_holds_up_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("passwd");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(look(&Mutex::default(), &fifo).is_empty());
        assert!(look(&Mutex::default(), &dir.path().join("missing")).is_empty());
    }

    proptest! {
        #[test]
        fn whatever_the_files_hold_reading_them_ends_well(file in proptest::collection::vec(any::<u8>(), 0..400), spec in proptest::collection::vec(any::<u8>(), 0..20)) {
            for entry in passwd(&file) {
                prop_assert!(!entry.name.is_empty());
                prop_assert!(find(entry.name, &file, &file).is_ok());
            }
            drop(find(&spec, &file, &file));
        }
    }
}
