//! Files that programs hold open, watch or map: written in place, never replaced.
//!
//! May call: places.
//! Never inside: durability; they are in memory.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use rustix::fs::{Mode, OFlags};

use crate::places::Places;

/// Writes the whole content over the old one; held descriptors, watches and mappings see it.
///
/// # Errors
/// The kernel's.
pub fn put_in_place(path: &Path, content: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(nofollow())
        .open(path)?;
    write(&file, content)
}

/// A link in the place of such a file leads silkd nowhere.
fn nofollow() -> i32 {
    // The constant fits: it is the kernel's own int.
    i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0)
}

fn write(file: &File, content: &[u8]) -> io::Result<()> {
    file.write_all_at(content, 0)?;
    file.set_len(u64::try_from(content.len()).map_err(io::Error::other)?)
}

/// Tells programs of a renewal: the word that is mapped first, then the text that is watched.
///
/// # Errors
/// The kernel's.
pub fn tell_generation(places: &Places, generation: u64, sandbox: &str) -> io::Result<()> {
    put_in_place(&places.id(), format!("{sandbox}\n").as_bytes())?;
    put_in_place(&places.generation_bin(), &generation.to_le_bytes())?;
    put_in_place(&places.generation(), format!("{generation}\n").as_bytes())
}

/// Makes the folders of test mode; a guest has them from its boot.
///
/// # Errors
/// The kernel's.
pub fn make_folders(places: &Places) -> io::Result<()> {
    for (dir, mode) in [
        (&places.run_silkd, 0o700),
        (&places.run_sandbox, 0o755),
        (&places.etc_silkd, 0o755),
        (&places.etc_sandbox, 0o755),
    ] {
        std::fs::create_dir_all(dir)?;
        rustix::fs::chmod(dir, Mode::from_raw_mode(mode))?;
    }
    Ok(())
}

/// Longest `/etc/hosts` that is edited.
const HOSTS: u64 = 1024 * 1024;
/// Marks the one line of `/etc/hosts` that is silkd's.
const MARK: &str = "# by silkd";

/// Puts the host name into `/etc/hosts`, on a line of silkd's own.
///
/// # Errors
/// The kernel's, or a file beyond 1 MiB.
pub fn name_in_hosts(hosts: &Path, hostname: &str) -> io::Result<()> {
    use io::Read as _;
    let mut old = Vec::new();
    match File::open(hosts) {
        Ok(file) => {
            file.take(HOSTS + 1).read_to_end(&mut old)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if u64::try_from(old.len()).map_or(true, |length| length > HOSTS) {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    put_in_place(hosts, &hosts_with(&old, hostname))
}

/// The file with silkd's line in it, once. Pure.
fn hosts_with(old: &[u8], hostname: &str) -> Vec<u8> {
    let mut new = Vec::with_capacity(old.len() + hostname.len() + 32);
    for line in old.split_inclusive(|byte| *byte == b'\n') {
        if !line.trim_ascii_end().ends_with(MARK.as_bytes()) {
            new.extend_from_slice(line);
        }
    }
    if new.last().is_some_and(|byte| *byte != b'\n') {
        new.push(b'\n');
    }
    new.extend_from_slice(format!("127.0.1.1 {hostname} {MARK}\n").as_bytes());
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_replaced_under_the_same_inode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("generation");
        put_in_place(&path, b"1000\n").unwrap();
        let held = File::open(&path).unwrap();
        put_in_place(&path, b"7\n").unwrap();
        let mut buffer = [0; 16];
        let n = held.read_at(&mut buffer, 0).unwrap();
        assert_eq!(&buffer[..n], b"7\n");
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::os::unix::fs::symlink(&victim, dir.path().join("id")).unwrap();
        assert!(put_in_place(&dir.path().join("id"), b"x").is_err());
        assert!(!victim.exists());
    }

    #[test]
    fn hosts_get_one_line_however_often() {
        let once = hosts_with(b"127.0.0.1 localhost", "a");
        assert_eq!(once, b"127.0.0.1 localhost\n127.0.1.1 a # by silkd\n");
        assert_eq!(
            hosts_with(&once, "b"),
            b"127.0.0.1 localhost\n127.0.1.1 b # by silkd\n"
        );
        assert_eq!(hosts_with(b"", "b"), b"127.0.1.1 b # by silkd\n");
    }
}
