//! What is wrong with certificates or their files.

use std::{io, path::PathBuf};

use super::Fingerprint;

/// What is wrong with certificates or their files.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file is there that would be overwritten.
    #[error("{} is there already, and is not overwritten", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// There is no CA yet.
    #[error("there is no CA in {}: make one with `sandboxd ca init`, or copy its bundle.pem there", dir.display())]
    NoBundle {
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Unread {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Unwritten {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Others can read a key, or it belongs to somebody else.
    #[error("{} holds a key and {why}: it must be a plain file of root or the daemon's user with mode 0600 or 0400", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// In what way.
        why: String,
    },
    /// A file holds something else than it should.
    #[error("{}: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A key belongs to another certificate.
    #[error("{} is not the key of root {}", path.display(), root.short())]
    OtherKey {
        /// The key's file.
        path: PathBuf,
        /// The root.
        root: Fingerprint,
    },
    /// The intermediate was signed by no root of the bundle.
    #[error("{} was signed by no root of bundle.pem", path.display())]
    Unsigned {
        /// The intermediate's file.
        path: PathBuf,
    },
    /// The intermediate's dates do not hold now.
    #[error("{} is valid from {from} to {to} only: issue another with `sandboxd ca issue-node`", path.display())]
    Dates {
        /// The intermediate's file.
        path: PathBuf,
        /// Its beginning.
        from: crate::clock::WallTime,
        /// Its end.
        to: crate::clock::WallTime,
    },
    /// The old root still signs.
    #[error(
        "the node's intermediate is of the old root still: issue another with `sandboxd ca issue-node` first"
    )]
    StillUsed,
    /// A root that allows no cross-certificate below it.
    #[error("root {} allows one certificate below it, which is the intermediate: it cannot vouch for another root", root.short())]
    Shallow {
        /// The root.
        root: Fingerprint,
    },
    /// A certificate cannot be made.
    #[error("a certificate cannot be made")]
    Make(#[source] rcgen::Error),
}
