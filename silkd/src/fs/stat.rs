//! What a file is, for the wire.

use rustix::{
    fs::{FileType, Stat},
    io::Errno,
};
use sandbox_protocol::v1::{FileKind, FileStat};

use super::open::Found;

/// Bits of a mode that are not the kind.
pub(super) const MODE: u32 = 0o7777;

/// The kind.
pub(super) fn kind(mode: u32) -> FileKind {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => FileKind::Regular,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Link,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::BlockDevice => FileKind::Block,
        FileType::CharacterDevice => FileKind::Char,
        FileType::Unknown => FileKind::Unspecified,
    }
}

/// Whether it is a directory.
pub(super) fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Whether it is a plain file.
pub(super) fn is_plain(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// When it was changed last, in nanoseconds since 1970.
pub(super) fn mtime(stat: &Stat) -> i64 {
    let nanos = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// As messages have it; `target` of a link.
pub(super) fn wire(stat: &Stat, target: Vec<u8>) -> FileStat {
    FileStat {
        kind: kind(stat.st_mode).into(),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & MODE,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_ns: mtime(stat),
        target: target.into(),
        inode: stat.st_ino,
        links: stat.st_nlink,
        // The kernel counts in 512 bytes, whatever the disk does.
        allocated: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
    }
}

/// What was found, with the target if it is a link.
pub(super) fn found(found: &Found) -> Result<FileStat, Errno> {
    let target = if found.is_link() {
        found.link_target()?
    } else {
        Vec::new()
    };
    Ok(wire(&found.stat, target))
}
