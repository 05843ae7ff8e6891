//! The directories of a watch: which are armed, where they are, and how more come in.

use std::{
    collections::{HashMap, HashSet},
    os::fd::OwnedFd,
    sync::Arc,
};

use rustix::{
    fs::{
        AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags,
        inotify::{self, WatchFlags},
        openat2, statat,
    },
    io::Errno,
};
use sandbox_protocol::{limits::PATH, reason::Reason};

use super::{Plan, Seat, limit};
use crate::{
    fs::{
        errno::{About, refuse},
        globs::matches,
        open::own_link,
        stat::is_dir,
        workers::Cancel,
    },
    refusal::Refusal,
};

/// What is asked of the kernel for each directory.
const MASK: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);

/// A directory that is armed, by the kernel's number.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Armed {
    /// The number of the directory that holds it; the root has none.
    parent: Option<i32>,
    name: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Tree {
    plan: Plan,
    seat: Seat,
    notify: Arc<OwnedFd>,
    /// The root's number.
    root: i32,
    /// Device and inode of the root: another one in its place is not it.
    is: (u64, u64),
    /// The root is a directory.
    dir: bool,
    armed: HashMap<i32, Armed>,
    numbers: HashMap<(i32, Vec<u8>), i32>,
}

/// A directory that is to be armed.
struct Next {
    path: Vec<u8>,
    parent: Option<i32>,
    name: Vec<u8>,
    /// Somebody has told of it, or need not.
    told: bool,
}

impl Tree {
    /// Arms the whole tree.
    pub(super) fn arm(plan: Plan, seat: Seat, cancel: &Cancel) -> Result<Self, Refusal> {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let notify = inotify::init(flags).map_err(|errno| match errno {
            Errno::MFILE => limit("the kernel gives no more watches to this user"),
            errno => plan.wanted.failed("watch", errno),
        })?;
        let found = plan.wanted.look(true)?;
        let mut tree = Self {
            plan,
            seat,
            notify: Arc::new(notify),
            root: -1,
            is: (found.stat.st_dev, found.stat.st_ino),
            dir: is_dir(&found.stat),
            armed: HashMap::new(),
            numbers: HashMap::new(),
        };
        drop(found);
        tree.again(cancel)?;
        Ok(tree)
    }

    /// The kernel's queue.
    pub(super) fn notify(&self) -> &Arc<OwnedFd> {
        &self.notify
    }

    /// Directories that are armed.
    pub(super) fn count(&self) -> u64 {
        u64::try_from(self.armed.len()).unwrap_or(u64::MAX)
    }

    /// Whether this is the root's number.
    pub(super) const fn is_root(&self, number: i32) -> bool {
        self.root == number
    }

    /// Opens the root; `None` where it is not any more.
    fn open_root(&self) -> Result<Option<OwnedFd>, Refusal> {
        match self.plan.wanted.look(true) {
            Ok(found) if (found.stat.st_dev, found.stat.st_ino) == self.is => Ok(Some(found.fd)),
            Ok(_) => Ok(None),
            Err(refusal)
                if refusal.reason == Reason::PathNotFound || refusal.reason == Reason::NotADirectory =>
            {
                Ok(None)
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Arms all of it anew, once what the kernel had to say is lost. What is armed stays so meanwhile.
    ///
    /// # Errors
    /// `PATH_NOT_FOUND` when the root is gone; `WATCH_LIMIT`.
    pub(super) fn again(&mut self, cancel: &Cancel) -> Result<(), Refusal> {
        let before: HashSet<i32> = self.armed.drain().map(|(number, _)| number).collect();
        self.numbers.clear();
        self.seat.keep(0);
        let root = self.open_root()?;
        let root = root.ok_or_else(|| self.plan.wanted.lost(Errno::NOENT))?;
        let first = Next {
            path: Vec::new(),
            parent: None,
            name: Vec::new(),
            told: true,
        };
        self.arm_from(&root, first, cancel, None)?;
        for number in before {
            if !self.armed.contains_key(&number) {
                // It may be gone, which is as good.
                inotify::remove_watch(&self.notify, number).ok();
            }
        }
        Ok(())
    }

    /// Arms a directory that has come into the tree, or changed its place in it, with all that is below; tells what is
    /// in those that were not armed before.
    pub(super) fn come(
        &mut self,
        parent: i32,
        name: &[u8],
        cancel: &Cancel,
        found: &mut dyn FnMut(Vec<u8>, bool),
    ) -> Result<(), Refusal> {
        let Some(path) = self.path(parent, name) else {
            return Ok(());
        };
        if !self.plan.recursive || self.excludes(&path) {
            return Ok(());
        }
        let Some(root) = self.open_root()? else {
            return Ok(());
        };
        let next = Next {
            path,
            parent: Some(parent),
            name: name.to_vec(),
            told: true,
        };
        self.arm_from(&root, next, cancel, Some(found))
    }

    fn arm_from(
        &mut self,
        root: &OwnedFd,
        first: Next,
        cancel: &Cancel,
        mut found: Option<&mut dyn FnMut(Vec<u8>, bool)>,
    ) -> Result<(), Refusal> {
        let mut rest = vec![first];
        while let Some(next) = rest.pop() {
            cancel.check()?;
            let opened = match (next.parent, self.dir) {
                (None, false) => root.try_clone().map_err(|_full| Errno::MFILE),
                _ => open(root, &next.path),
            };
            let armed = opened.and_then(|dir| {
                let number = inotify::add_watch(&self.notify, own_link(&dir), MASK)?;
                Ok((dir, number))
            });
            let (dir, number) = match armed {
                Ok(armed) => armed,
                Err(errno) if next.parent.is_none() => return Err(self.refuse(errno, &next.path)),
                Err(errno @ (Errno::NOSPC | Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
                    return Err(self.refuse(errno, &next.path));
                }
                // Gone, or no directory any more, or not for this user to see.
                Err(_) => continue,
            };
            let known = self.armed.contains_key(&number);
            if !known {
                self.seat.more()?;
            }
            self.put(number, &next);
            if let Some(found) = found.as_mut().filter(|_| !known && !next.told) {
                found(next.path.clone(), true);
            }
            if self.dir && self.plan.recursive {
                // What was in the tree when the watch began is no news, nor what is in a directory that tells itself.
                let tells = found.as_mut().filter(|_| !known);
                self.scan(&dir, (number, &next.path), &mut rest, tells)?;
            }
        }
        Ok(())
    }

    /// Looks through a directory that is armed.
    fn scan(
        &self,
        dir: &OwnedFd,
        (number, path): (i32, &[u8]),
        rest: &mut Vec<Next>,
        mut found: Option<&mut &mut dyn FnMut(Vec<u8>, bool)>,
    ) -> Result<(), Refusal> {
        let mut entries = Dir::read_from(dir).map_err(|errno| self.refuse(errno, path))?;
        while let Some(Ok(entry)) = entries.read() {
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let kind = entry.file_type();
            let looked = || statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| is_dir(&stat));
            // Some file systems do not say.
            let is_dir = kind == FileType::Directory || kind == FileType::Unknown && looked();
            let path = join(path, name.to_bytes());
            if path.len() > PATH || self.excludes(&path) {
                continue;
            }
            if let Some(found) = &mut found {
                found(path.clone(), is_dir);
            }
            if is_dir && self.plan.recursive {
                if rest.len() >= sandbox_protocol::limits::WATCH_DIRECTORIES {
                    return Err(limit("more directories in one than may be watched"));
                }
                rest.push(Next {
                    path,
                    parent: Some(number),
                    name: name.to_bytes().to_vec(),
                    told: found.is_some(),
                });
            }
        }
        Ok(())
    }

    fn put(&mut self, number: i32, next: &Next) {
        let Some(parent) = next.parent else {
            self.root = number;
            self.armed.insert(
                number,
                Armed {
                    parent: None,
                    name: Vec::new(),
                },
            );
            return;
        };
        let armed = Armed {
            parent: Some(parent),
            name: next.name.clone(),
        };
        if let Some(Armed {
            parent: Some(parent),
            name,
        }) = self.armed.insert(number, armed)
        {
            self.numbers.remove(&(parent, name));
        }
        self.numbers.insert((parent, next.name.clone()), number);
    }

    /// The kernel has let go of a directory.
    pub(super) fn forget(&mut self, number: i32) {
        if let Some(Armed {
            parent: Some(parent),
            name,
        }) = self.armed.remove(&number)
            && self.numbers.get(&(parent, name.clone())) == Some(&number)
        {
            self.numbers.remove(&(parent, name));
        }
        self.seat.keep(self.armed.len());
    }

    /// A directory has left the tree: it and what is below is armed no longer.
    pub(super) fn leave(&mut self, parent: i32, name: &[u8]) {
        let Some(first) = self.numbers.get(&(parent, name.to_vec())).copied() else {
            return;
        };
        let gone: Vec<i32> = self
            .armed
            .keys()
            .copied()
            .filter(|number| self.is_below(*number, first))
            .collect();
        for number in gone {
            // The kernel may have let go of it already.
            inotify::remove_watch(&self.notify, number).ok();
            self.forget(number);
        }
    }

    fn is_below(&self, number: i32, above: i32) -> bool {
        let mut at = Some(number);
        // A circle of parents cannot be; and if it were, it would end here.
        for _ in 0..PATH {
            match at {
                Some(number) if number == above => return true,
                Some(number) => at = self.armed.get(&number).and_then(|armed| armed.parent),
                None => return false,
            }
        }
        false
    }

    /// A directory has changed its place.
    pub(super) fn rename(&mut self, from: (i32, &[u8]), to: (i32, &[u8])) {
        if let Some(number) = self.numbers.get(&(from.0, from.1.to_vec())).copied() {
            let next = Next {
                path: Vec::new(),
                parent: Some(to.0),
                name: to.1.to_vec(),
                told: true,
            };
            self.put(number, &next);
        }
    }

    /// The path of a name in an armed directory; `None` where that is armed no longer.
    pub(super) fn path(&self, number: i32, name: &[u8]) -> Option<Vec<u8>> {
        let mut parts = vec![name];
        let mut at = self.armed.get(&number)?;
        while let Some(parent) = at.parent {
            parts.push(&at.name);
            if parts.len() > PATH {
                return None;
            }
            at = self.armed.get(&parent)?;
        }
        parts.reverse();
        parts.retain(|part| !part.is_empty());
        Some(parts.join(&b'/'))
    }

    /// Whether the request leaves this path out.
    pub(super) fn excludes(&self, path: &[u8]) -> bool {
        matches(&self.plan.exclude, path)
    }

    fn refuse(&self, errno: Errno, path: &[u8]) -> Refusal {
        if errno == Errno::NOSPC {
            return limit(&format!(
                "the kernel gives no more watches to this user; this one has {}",
                self.armed.len()
            ))
            .with_errno(errno.raw_os_error());
        }
        refuse(errno, About::File, "watch", &join(self.plan.wanted.path(), path))
    }
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() || name.is_empty() {
        return [path, name].concat();
    }
    [path, name].join(&b'/')
}

/// Opens a directory of the tree: no link is a way.
fn open(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let rule = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(root, path, flags, Mode::empty(), rule)
}
