//! A control group (v2) of its own for each machine, where the host allows it: what a process starts ends with it, and
//! the service manager's limits on the daemon's own group do not hit it first.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use tokio::io::Interest;

use crate::sys;

/// Group names begin with this; the inode number of the machine's run directory follows.
const PREFIX: &str = "sbx-";

/// Where groups can be made.
#[derive(Debug, Clone)]
pub(super) struct Cgroups {
    base: PathBuf,
}

impl Cgroups {
    /// Groups below this process's own, if that can be written; else why not.
    pub(super) fn find() -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let base = own_group(&mounts, &own).ok_or("no cgroup v2 is mounted")?;
        let unwritable = |error: io::Error| format!("{} cannot be written: {error}", base.display());
        // A process moves from one group to another only if the nearest common one is writable.
        let procs = base.join("cgroup.procs");
        File::options().write(true).open(procs).map_err(unwritable)?;
        let probe = base.join(format!("{PREFIX}probe-{}", std::process::id()));
        fs::create_dir(&probe).map_err(unwritable)?;
        fs::remove_dir(&probe).map_err(unwritable)?;
        Ok(Self { base })
    }

    /// The group of the machine in the run directory with this inode number.
    pub(super) fn of(&self, inode: u64) -> PathBuf {
        self.base.join(name(inode))
    }
}

fn name(inode: u64) -> String {
    format!("{PREFIX}{inode:x}")
}

/// Makes a group, and gives the file through which a process enters it.
pub(super) fn make(group: &Path) -> io::Result<OwnedFd> {
    fresh(group)?;
    let procs = File::options().write(true).open(group.join("cgroup.procs"))?;
    Ok(procs.into())
}

/// A new group in the place of one that may be left over from a machine whose directory had the same inode number. Such
/// a one is not used again: since Linux 6.14 what is born below a group that ever was killed is killed at birth, and
/// silkd's leaves are such.
fn fresh(group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            remove(group)?;
            fs::create_dir(group)
        }
        made => made,
    }
}

/// Whether anything is in a group.
pub(super) fn is_populated(group: &Path) -> bool {
    fs::read_to_string(group.join("cgroup.events")).is_ok_and(|events| !is_empty(&events))
}

fn is_empty(events: &str) -> bool {
    events.lines().any(|line| line == "populated 0")
}

/// The group of this process in the v2 tree: mount point and path below it.
fn own_group(mounts: &str, own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mount = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4))?
    })?;
    Some(Path::new(mount).join(path))
}

/// Kills what is left in the group of a machine, waits until nothing is, and removes it. Gone already is as good; a group
/// that is not that machine's is an error. Cancel safe: may be called again.
pub(super) async fn end(group: &Path, inode: u64) -> io::Result<()> {
    if group.file_name() != Some(name(inode).as_ref()) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    match File::options().write(true).open(group.join("cgroup.kill")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(mut kill) => kill.write_all(b"1")?,
    }
    unpopulated(group).await?;
    remove(group)
}

async fn unpopulated(group: &Path) -> io::Result<()> {
    let events = match File::open(group.join("cgroup.events")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut reader = events.try_clone()?;
    let changed = sys::watch(OwnedFd::from(events), Interest::PRIORITY)?;
    loop {
        let mut text = String::new();
        reader.rewind()?;
        reader.read_to_string(&mut text)?;
        if is_empty(&text) {
            return Ok(());
        }
        // The kernel signals a change of this file as priority; reading it took note of the state so far.
        changed.ready(Interest::PRIORITY).await?.clear_ready();
    }
}

/// Removes a group and those that its processes made in it, innermost first.
pub(super) fn remove(group: &Path) -> io::Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_on_hybrid_and_unified_hosts() {
        let hybrid = "30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 20 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        let own = "9:name=systemd:/x\n0::/system.slice/sandboxd.service\n";
        assert_eq!(
            own_group(hybrid, own).unwrap(),
            Path::new("/sys/fs/cgroup/unified/system.slice/sandboxd.service")
        );
        assert_eq!(
            own_group(hybrid, "0::/\n").unwrap(),
            Path::new("/sys/fs/cgroup/unified/")
        );
        assert_eq!(own_group("1 2 0:1 / / rw - ext4 /dev/vda rw\n", own), None);
    }

    #[test]
    fn a_group_that_is_left_over_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("sbx-1");
        fs::create_dir_all(group.join("work/l0")).unwrap();
        fresh(&group).unwrap();
        assert_eq!(fs::read_dir(&group).unwrap().count(), 0);
        // Here a file stands for what the kernel refuses to remove.
        crate::disk::write_atomic(&group.join("lives"), b"", 0o600).unwrap();
        fresh(&group).unwrap_err();
        assert!(group.join("lives").exists());
    }

    #[tokio::test]
    async fn a_foreign_group_is_never_killed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["sbx-12", "system.slice", "sbx-ffx"] {
            let group = dir.path().join(name);
            fs::create_dir(&group).unwrap();
            crate::disk::write_atomic(&group.join("cgroup.kill"), b"", 0o600).unwrap();
            end(&group, 255).await.unwrap_err();
            assert_eq!(fs::read(group.join("cgroup.kill")).unwrap(), b"");
        }
        end(&dir.path().join("sbx-ff"), 255).await.unwrap();
    }
}
