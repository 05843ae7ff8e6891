//! A cgroup of test mode's own, held by a lock, and the end of those whose holder is gone.
//!
//! A silkd in a guest is gone when its machine is. In test mode it may be killed while its programs run on; the next
//! one ends them: a group that nobody locks belongs to nobody.
//!
//! May call: nothing.
//! Never inside: a guest's cgroups (`boot::protect`).

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};

const PREFIX: &str = "silkd-";

/// A group; removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// Its lock says that somebody lives.
    _held: OwnedFd,
}

impl Scratch {
    /// Makes one below the group that this process is in. `None` where there is no cgroup2, or no right to make one.
    #[must_use]
    pub fn new(pid: i32) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        Self::below(&group_of(&mounts, &own)?, pid).ok()
    }

    fn below(parent: &Path, pid: i32) -> io::Result<Self> {
        sweep(parent);
        let path = parent.join(format!("{PREFIX}{pid}"));
        fs::create_dir(&path)?;
        // A sweep of somebody else may have come between: then the lock or the directory is not to be had, and this
        // run does without a group.
        let held = lock(&path)?;
        fs::metadata(&path)?;
        Ok(Self { path, _held: held })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        end(&self.path);
    }
}

fn lock(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = rustix::fs::open(path, flags, Mode::empty())?;
    flock(&dir, FlockOperation::NonBlockingLockExclusive)?;
    Ok(dir)
}

/// Ends the groups that nobody holds. What cannot be ended now is left to the next.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let ours = number.is_some_and(|number| number.parse::<i32>().is_ok());
        if ours && let Ok(_held) = lock(&entry.path()) {
            end(&entry.path());
        }
    }
}

/// Kills what is in a group and removes it with the groups below, as far as they are empty by then.
fn end(group: &Path) {
    // A group without anybody in it has nothing to kill, one without the file cannot.
    drop(put(&group.join("cgroup.kill"), "1"));
    remove(group, 3);
}

/// `work` and its leaves are two levels.
fn remove(group: &Path, depth: u8) {
    if depth > 0 {
        for entry in fs::read_dir(group).into_iter().flatten().filter_map(Result::ok) {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove(&entry.path(), depth - 1);
            }
        }
    }
    // Whoever still dies in it keeps it until the next sweep.
    drop(fs::remove_dir(group));
}

fn put(path: &Path, text: &str) -> io::Result<()> {
    use io::Write as _;
    fs::OpenOptions::new()
        .write(true)
        .open(path)?
        .write_all(text.as_bytes())
}

/// Where this process's cgroup2 is, by `mountinfo` and `cgroup` of `/proc/self`. Pure.
fn group_of(mounts: &str, own: &str) -> Option<PathBuf> {
    let mount = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4))?
    })?;
    let inner = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // A process outside of its namespace's root has no folder here.
    (!inner.starts_with("..")).then(|| Path::new(mount).join(inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unified_group_is_found_on_both_kinds_of_host() {
        let hybrid = "33 32 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      34 32 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        let own = "4:memory:/a\n0::/user.slice\n";
        let expected = PathBuf::from("/sys/fs/cgroup/unified/user.slice");
        assert_eq!(group_of(hybrid, own), Some(expected));
        let root = group_of("30 1 0:2 / /sys/fs/cgroup rw - cgroup2 none rw", "0::/");
        assert_eq!(root, Some(PathBuf::from("/sys/fs/cgroup/")));
        assert_eq!(group_of("", own), None);
        assert_eq!(group_of(hybrid, "0::/../x"), None);
    }

    #[test]
    fn groups_without_a_holder_are_swept_and_no_other() {
        let parent = tempfile::tempdir().unwrap();
        let stale = parent.path().join("silkd-1");
        fs::create_dir_all(stale.join("work/l0")).unwrap();
        for other in ["silkd-x", "user.slice"] {
            fs::create_dir(parent.path().join(other)).unwrap();
        }
        let first = Scratch::below(parent.path(), 2).unwrap();
        assert!(!stale.exists());
        let second = Scratch::below(parent.path(), 3).unwrap();
        assert!(first.path().exists() && second.path().exists());
        assert!(Scratch::below(parent.path(), 3).is_err());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
        assert!(parent.path().join("silkd-x").exists() && parent.path().join("user.slice").exists());
    }
}
