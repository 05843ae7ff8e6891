//! The root file system, and the move into it.
//!
//! May call: boot/*.
//! Never inside: the initrd's files by name: after the move they are freed, whatever they were.

use std::{
    ffi::CString,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, chmod, fstat, openat, statat, unlinkat},
    mount::{MountFlags, mount, mount_move},
    process::{chdir, chroot},
};

use super::{
    BootError,
    cmdline::{Options, Root},
    mounts::make_dir,
    uevent::Uevents,
};

const LOWER: &str = "/.silkd/lower";
const MEMORY: &str = "/.silkd/memory";
const MERGED: &str = "/.silkd/root";
/// What moves along.
const KEPT: [&str; 5] = ["/proc", "/sys", "/dev", "/run", "/tmp"];
/// How deep an initrd's folders are followed when it is freed.
const DEPTH: usize = 64;

/// Makes the root of the guest what the command line says.
///
/// # Errors
/// The part that failed.
pub(super) fn enter(options: &Options) -> Result<(), BootError> {
    let serial = match &options.root {
        // The kernel makes its first root as it makes a /tmp: anybody may write.
        Root::Initramfs => {
            return chmod("/", Mode::from_raw_mode(0o755))
                .map_err(|errno| BootError::new("root: mode", errno));
        }
        Root::Disk(serial) => serial,
    };
    let device = find(serial, options)?;
    overlay(&device, options.upper_percent)?;
    switch().map_err(|error| BootError::new("root: switch", error))
}

fn find(serial: &str, options: &Options) -> Result<PathBuf, BootError> {
    let fail = |error: io::Error| BootError::new(format!("root: disk {serial}"), error);
    let found = Uevents::new()
        .and_then(|uevents| uevents.wait_for(options.timeout, || by_serial(Path::new("/sys/block"), serial)))
        .map_err(fail)?;
    let name = found.ok_or_else(|| {
        let seconds = options.timeout.as_secs();
        fail(io::Error::other(format!(
            "no such block device within {seconds} s"
        )))
    })?;
    Ok(Path::new("/dev").join(name))
}

/// The name of the block device with this serial.
fn by_serial(block: &Path, serial: &str) -> io::Result<Option<std::ffi::OsString>> {
    let devices = match fs::read_dir(block) {
        Ok(devices) => devices,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    for device in devices {
        let device = device?;
        // Most kinds have no serial; one that vanished meanwhile has none either.
        let theirs = fs::read_to_string(device.path().join("serial")).unwrap_or_default();
        if theirs.trim_end() == serial {
            return Ok(Some(device.file_name()));
        }
    }
    Ok(None)
}

fn overlay(device: &Path, percent: u8) -> Result<(), BootError> {
    let dirs = || -> io::Result<()> {
        for dir in ["/.silkd", LOWER, MEMORY, MERGED] {
            make_dir(Path::new(dir))?;
        }
        Ok(())
    };
    dirs().map_err(|error| BootError::new("root: mount points", error))?;
    mount(device, LOWER, "erofs", MountFlags::RDONLY, None)
        .map_err(|errno| BootError::new(format!("root: erofs on {}", device.display()), errno))?;
    let upper = || -> io::Result<()> {
        let size = CString::new(format!("mode=755,size={percent}%"))?;
        mount("tmpfs", MEMORY, "tmpfs", MountFlags::empty(), size.as_c_str())?;
        make_dir(&Path::new(MEMORY).join("upper"))?;
        make_dir(&Path::new(MEMORY).join("work"))
    };
    upper().map_err(|error| BootError::new("root: upper", error))?;
    let data = CString::new(format!(
        "lowerdir={LOWER},upperdir={MEMORY}/upper,workdir={MEMORY}/work,\
         redirect_dir=on,index=on,metacopy=on,xino=auto"
    ))
    .map_err(|error| BootError::new("root: overlay", error))?;
    mount("overlay", MERGED, "overlay", MountFlags::empty(), data.as_c_str())
        .map_err(|errno| BootError::new("root: overlay", errno))
}

/// Moves into the new root. silkd runs on from the initrd's memory: the agent is always the initrd's, whatever the
/// disk holds.
fn switch() -> io::Result<()> {
    let old = rustix::fs::open(
        "/",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    for dir in KEPT {
        let target = format!("{MERGED}{dir}");
        make_dir(Path::new(&target))?;
        mount_move(dir, &target)?;
    }
    chdir(MERGED)?;
    mount_move(".", "/")?;
    chroot(".")?;
    chdir("/")?;
    let device = fstat(&old)?.st_dev;
    free(old.as_fd(), device, DEPTH);
    Ok(())
}

/// Deletes what is in a folder and on its device. What cannot be deleted only keeps its memory.
fn free(dir: BorrowedFd<'_>, device: u64, depth: usize) {
    let Ok(entries) = Dir::read_from(dir) else {
        return;
    };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let Ok(stat) = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        if stat.st_dev != device {
            continue;
        }
        let folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if folder
            && depth > 0
            && let Ok(inner) = open_folder(dir, name)
        {
            free(inner.as_fd(), device, depth - 1);
        }
        let flags = if folder {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        unlinkat(dir, name, flags).ok();
    }
}

fn open_folder(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, text: &str) {
        let mut file = fs::File::create(path).unwrap();
        io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    }

    #[test]
    fn a_disk_is_found_by_its_whole_serial() {
        let block = tempfile::tempdir().unwrap();
        for (name, serial) in [("vda", "root-1"), ("vdb", "root"), ("loop0", "")] {
            let dir = block.path().join(name);
            fs::create_dir(&dir).unwrap();
            if !serial.is_empty() {
                put(&dir.join("serial"), &format!("{serial}\n"));
            }
        }
        assert_eq!(by_serial(block.path(), "root").unwrap().unwrap(), "vdb");
        assert_eq!(by_serial(block.path(), "roo").unwrap(), None);
        assert_eq!(by_serial(&block.path().join("absent"), "root").unwrap(), None);
    }

    #[test]
    fn freeing_deletes_all_and_follows_no_link() {
        let kept = tempfile::tempdir().unwrap();
        put(&kept.path().join("file"), "stays");
        let old = tempfile::tempdir().unwrap();
        fs::create_dir_all(old.path().join("a/b/c")).unwrap();
        put(&old.path().join("a/b/file"), "goes");
        std::os::unix::fs::symlink(kept.path(), old.path().join("a/link")).unwrap();
        let dir = fs::File::open(old.path()).unwrap();
        free(dir.as_fd(), fstat(&dir).unwrap().st_dev, DEPTH);
        assert_eq!(fs::read_dir(old.path()).unwrap().count(), 0);
        assert!(kept.path().join("file").exists());
    }
}
