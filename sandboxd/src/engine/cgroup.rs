//! A control group (v2) of its own for each machine, where the host allows it: what a process starts ends with it, and
//! the service manager's limits on the daemon's own group do not hit it first.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use tokio::io::Interest;

use super::Identity;
use crate::sys;

/// Group names begin with this.
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
        let probe = base.join(format!("{PREFIX}probe-{}", std::process::id()));
        fs::create_dir(&probe).map_err(|error| format!("{} cannot be written: {error}", base.display()))?;
        fs::remove_dir(&probe).map_err(|error| error.to_string())?;
        Ok(Self { base })
    }

    /// Moves a process that was started just now into a group of its own.
    pub(super) fn enter(&self, identity: Identity) -> io::Result<PathBuf> {
        let pid = identity.pid.unwrap_or_default();
        let group = self.base.join(format!("{PREFIX}{pid}-{}", identity.started));
        fs::create_dir(&group)?;
        match put(&group.join("cgroup.procs"), &pid.to_string()) {
            Ok(()) => Ok(group),
            Err(error) => {
                // An empty group does no harm, and the first error is the one to tell.
                drop(fs::remove_dir(&group));
                Err(error)
            }
        }
    }
}

fn put(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    File::options().write(true).open(path)?.write_all(text.as_bytes())
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

/// Whether this group was made for that process: nothing else is ever killed by group.
fn is_of(group: &Path, identity: Identity) -> bool {
    let name = format!(
        "{PREFIX}{}-{}",
        identity.pid.unwrap_or_default(),
        identity.started
    );
    group.file_name().is_some_and(|found| found == name.as_str())
}

/// Kills what is left in the group of a process, waits until nothing is, and removes it. Gone already is as good.
/// Cancel safe: may be called again.
pub(super) async fn end(group: &Path, identity: Identity) -> io::Result<()> {
    if !is_of(group, identity) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    match put(&group.join("cgroup.kill"), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
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
        if text.lines().any(|line| line == "populated 0") {
            return Ok(());
        }
        // The kernel signals a change of this file as priority; reading it took note of the state so far.
        changed.ready(Interest::PRIORITY).await?.clear_ready();
    }
}

/// Removes a group and those that its processes made in it, innermost first.
fn remove(group: &Path) -> io::Result<()> {
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

    #[tokio::test]
    async fn a_foreign_group_is_never_killed() {
        let identity = Identity {
            pid: Some(12),
            started: 34,
        };
        let dir = tempfile::tempdir().unwrap();
        for name in ["sbx-12-35", "system.slice", "sbx-12-34x"] {
            let group = dir.path().join(name);
            fs::create_dir(&group).unwrap();
            crate::disk::write_atomic(&group.join("cgroup.kill"), b"", 0o600).unwrap();
            end(&group, identity).await.unwrap_err();
            assert_eq!(fs::read(group.join("cgroup.kill")).unwrap(), b"");
        }
        end(&dir.path().join("sbx-12-34"), identity).await.unwrap();
    }
}
