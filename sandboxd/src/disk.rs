//! Durable file writes: the one place that decides what a finished write is.
//!
//! May call: faults.
//! Never inside: what is written.
//! Cancel safety: everything here blocks and runs to its end.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Makes a directory (and its parents) with this mode; one that exists is left as it is.
///
/// # Errors
/// The kernel's.
pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// Puts a file in place whole and for good: written beside its name, synced, renamed, its folder synced. Whoever looks
/// sees the old content or the new, before and after a power loss.
///
/// # Errors
/// The kernel's; the old content stands then, and nothing lies beside it.
pub fn write_atomic(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut beside = std::ffi::OsString::from(".new-");
    beside.push(name);
    let beside = path.with_file_name(beside);
    let written = write_synced(&beside, bytes, mode).and_then(|()| rename_synced(&beside, path));
    if written.is_err() {
        // The first error is the one to tell; what is left over is replaced by the next write.
        drop(fs::remove_file(&beside));
    }
    written
}

fn write_synced(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Renames and syncs both folders.
///
/// # Errors
/// The kernel's.
#[expect(clippy::disallowed_methods, reason = "the one home of durable renames")]
pub fn rename_synced(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let folders = (from.parent(), to.parent());
    if let Some(parent) = folders.1 {
        sync_dir(parent)?;
    }
    match folders.0 {
        Some(parent) if folders.0 != folders.1 => sync_dir(parent),
        Some(_) | None => Ok(()),
    }
}

/// Lets two names of one file system change places at once, and syncs both folders.
///
/// # Errors
/// The kernel's; both are as they were then.
pub fn exchange_synced(a: &Path, b: &Path) -> io::Result<()> {
    rustix::fs::renameat_with(
        rustix::fs::CWD,
        a,
        rustix::fs::CWD,
        b,
        rustix::fs::RenameFlags::EXCHANGE,
    )?;
    [a, b].into_iter().filter_map(Path::parent).try_for_each(sync_dir)
}

/// Makes the names in a folder durable.
///
/// # Errors
/// The kernel's.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_replaces_whole_or_leaves_the_old() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write_atomic(&path, b"one", 0o600).unwrap();
        write_atomic(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        assert!(write_atomic(&folder, b"x", 0o600).is_err());
        let left: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }
}
