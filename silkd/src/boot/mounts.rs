//! The kernel's file systems and those in memory.
//!
//! May call: boot, control/files.
//! Never inside: the root file system.

use std::{ffi::CStr, fs, io, os::unix::fs::symlink, path::Path};

use rustix::{
    fs::{Mode, chmod},
    io::Errno,
    mount::{MountFlags, mount, mount_bind},
};

use super::BootError;

struct Mount {
    target: &'static str,
    kind: &'static str,
    data: &'static CStr,
    flags: MountFlags,
    mode: u32,
}

/// Where the unified cgroup tree is.
pub(super) const CGROUP: &str = "/sys/fs/cgroup";

/// In this order. silkd's own two have 2 MiB each of their own, so that a full `/tmp` or `/run` starves neither.
fn table() -> [Mount; 10] {
    let tight = MountFlags::NOSUID | MountFlags::NODEV;
    let tighter = tight | MountFlags::NOEXEC;
    let device = MountFlags::NOSUID | MountFlags::NOEXEC;
    let row = |target, kind, data, flags, mode| Mount {
        target,
        kind,
        data,
        flags,
        mode,
    };
    [
        row("/proc", "proc", c"", tighter, 0o555),
        row("/sys", "sysfs", c"", tighter, 0o555),
        row("/dev", "devtmpfs", c"mode=755", device, 0o755),
        row(
            "/dev/pts",
            "devpts",
            c"newinstance,gid=5,mode=620,ptmxmode=666",
            device,
            0o755,
        ),
        row("/dev/shm", "tmpfs", c"mode=1777", tight, 0o1777),
        row("/tmp", "tmpfs", c"mode=1777,size=50%", tight, 0o1777),
        row("/run", "tmpfs", c"mode=755", tight, 0o755),
        row("/run/silkd", "tmpfs", c"mode=700,size=2m", tighter, 0o700),
        row("/run/sandbox", "tmpfs", c"mode=755,size=2m", tighter, 0o755),
        row(
            CGROUP,
            "cgroup2",
            c"nsdelegate,memory_recursiveprot",
            tighter,
            0o755,
        ),
    ]
}

/// Mounts all of them.
///
/// # Errors
/// The mount that failed. A kernel without cgroup2 boots all the same.
pub(super) fn early() -> Result<(), BootError> {
    for row in table() {
        let step = || format!("mounts: {}", row.target);
        make_dir(Path::new(row.target)).map_err(|error| BootError::new(step(), error))?;
        match mount(row.kind, row.target, row.kind, row.flags, row.data) {
            // The kernel mounts devtmpfs itself where it is built to.
            Ok(()) | Err(Errno::BUSY) => {}
            Err(Errno::NODEV) if row.kind == "cgroup2" => continue,
            Err(errno) => return Err(BootError::new(step(), errno)),
        }
        // /proc and /sys refuse, and need none.
        chmod(row.target, Mode::from_raw_mode(row.mode)).ok();
    }
    ptmx().map_err(|error| BootError::new("mounts: /dev/ptmx", error))?;
    links();
    Ok(())
}

/// The devtmpfs node would open the first instance of devpts, not ours.
fn ptmx() -> io::Result<()> {
    match fs::remove_file("/dev/ptmx") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    symlink("pts/ptmx", "/dev/ptmx")
}

/// Names that programs expect; who misses one loses that name only.
fn links() {
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        drop(symlink(target, link));
    }
}

/// Makes a directory that may be there.
pub(super) fn make_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Clones share their kernel's boot id: a file of ours is bound over it, and written at each renewal.
///
/// # Errors
/// The kernel's.
pub(super) fn bind_boot_id(ours: &Path) -> Result<(), BootError> {
    let theirs = "/proc/sys/kernel/random/boot_id";
    let bind = || -> io::Result<()> {
        let first = fs::read(theirs)?;
        crate::control::files::put_in_place(ours, &first)?;
        chmod(ours, Mode::from_raw_mode(0o444))?;
        mount_bind(ours, theirs)?;
        Ok(())
    };
    bind().map_err(|error| BootError::new("mounts: boot_id", error))
}
