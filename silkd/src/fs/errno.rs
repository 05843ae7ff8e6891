//! Kernel errors as refusals: the one table.

use rustix::io::Errno;
use sandbox_protocol::reason::Reason;

use crate::refusal::{Escaped, Refusal};

/// Longest path in a message; the metadata has more.
const SHOWN: usize = 128;

/// What a system call was about. The same number means different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum About {
    /// Following a path wherever it leads.
    Path,
    /// Following a path that must stay below a directory.
    Beneath,
    /// A name in a directory that is open, or an open file.
    File,
}

/// Which reason an error number is. Whatever is in no line is the kernel's or the disk's fault (`EIO`), and not one that
/// a client could mend: `AGENT_BUG`, with the number.
pub(super) const fn reason(errno: Errno, about: About) -> Reason {
    match (errno, about) {
        (Errno::XDEV | Errno::AGAIN, About::Beneath) => Reason::PathEscapes,
        (Errno::NOENT | Errno::STALE, _) => Reason::PathNotFound,
        (
            Errno::ACCESS
            | Errno::PERM
            | Errno::ROFS
            | Errno::BUSY
            | Errno::TXTBSY
            | Errno::OPNOTSUPP
            | Errno::NOSYS,
            _,
        ) => Reason::PathDenied,
        (Errno::EXIST, _) => Reason::PathExists,
        (Errno::NOTEMPTY, _) => Reason::DirectoryNotEmpty,
        (Errno::NOTDIR, _) => Reason::NotADirectory,
        (Errno::ISDIR | Errno::NXIO | Errno::NODEV, _) => Reason::NotRegularFile,
        (Errno::LOOP, _) => Reason::LinkRefused,
        (Errno::XDEV, _) => Reason::CrossDevice,
        (Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::MLINK, _) => Reason::NoSpace,
        (Errno::NOMEM, _) => Reason::MemoryExhausted,
        (Errno::MFILE | Errno::NFILE, _) => Reason::FdLimit,
        (Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ, _) => Reason::InvalidPath,
        _ => Reason::AgentBug,
    }
}

/// The refusal of a system call: what was tried, at which path.
pub(super) fn refuse(errno: Errno, about: About, tried: &str, path: &[u8]) -> Refusal {
    let message = format!("cannot {tried} `{}`: {errno}", Escaped(path, SHOWN));
    Refusal::new(reason(errno, about), message)
        .with_errno(errno.raw_os_error())
        .with_path(path)
}

/// A refusal that is ours and not the kernel's.
pub(super) fn refused(reason: Reason, what: &str, path: &[u8]) -> Refusal {
    Refusal::new(reason, format!("`{}` {what}", Escaped(path, SHOWN))).with_path(path)
}

/// A request that says something that cannot be meant.
pub(super) fn field(what: &str) -> Refusal {
    Refusal::new(Reason::FieldInvalid, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_its_reason() {
        use About::{Beneath, File, Path};
        let table = [
            (Errno::NOENT, Path, Reason::PathNotFound),
            (Errno::ACCESS, Path, Reason::PathDenied),
            (Errno::PERM, File, Reason::PathDenied),
            (Errno::ROFS, File, Reason::PathDenied),
            (Errno::LOOP, Path, Reason::LinkRefused),
            (Errno::LOOP, Beneath, Reason::LinkRefused),
            (Errno::NOTDIR, Path, Reason::NotADirectory),
            (Errno::ISDIR, File, Reason::NotRegularFile),
            (Errno::NXIO, File, Reason::NotRegularFile),
            (Errno::XDEV, File, Reason::CrossDevice),
            (Errno::XDEV, Path, Reason::CrossDevice),
            (Errno::XDEV, Beneath, Reason::PathEscapes),
            (Errno::AGAIN, Beneath, Reason::PathEscapes),
            (Errno::NOSPC, File, Reason::NoSpace),
            (Errno::DQUOT, File, Reason::NoSpace),
            (Errno::FBIG, File, Reason::NoSpace),
            (Errno::EXIST, File, Reason::PathExists),
            (Errno::NOTEMPTY, File, Reason::DirectoryNotEmpty),
            (Errno::NAMETOOLONG, Path, Reason::InvalidPath),
            (Errno::NOMEM, File, Reason::MemoryExhausted),
            (Errno::MFILE, Path, Reason::FdLimit),
            (Errno::IO, File, Reason::AgentBug),
        ];
        for (errno, about, expected) in table {
            let refusal = refuse(errno, about, "open", b"/a\n");
            assert_eq!(refusal.reason, expected, "{errno:?} {about:?}");
            assert_eq!(refusal.errno, Some(errno.raw_os_error()));
            assert_eq!(refusal.path.as_deref(), Some(&b"/a\n"[..]));
            assert!(refusal.message.contains("`/a\\n`"), "{}", refusal.message);
        }
    }
}
