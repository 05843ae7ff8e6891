//! Images: kernel, initrd and root filesystem of a guest, described by `manifest.json` (docs: deploy/image).
//!
//! [`Image::open`] reads the manifest, opens the files it names and checks their digests through the very
//! descriptors that a VM is later given: what runs is what was checked, wherever its name points by then.
//!
//! May call: nothing.
//! Never inside: a guess. What the manifest does not say, or says wrongly, is an error.
//! Cancel safety: everything here blocks (reading and hashing tens of MiB) and runs to its end; callers use
//! `tasks::blocking`.

mod catalog;
mod digest;
mod manifest;
mod open;

use std::{io, path::PathBuf};

pub use catalog::Catalog;
pub use digest::{Digest, DigestError, sha256};
pub use manifest::{Manifest, Part, Rootfs};
pub use open::Image;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// No such image; `IMAGE_NOT_FOUND`.
    #[error("no image `{name}`: {} has no manifest.json", dir.display())]
    NotFound {
        /// As it was asked for.
        name: String,
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// Its content is not what its manifest says; `IMAGE_DAMAGED`.
    #[error("image in {} is damaged: {file}: {why}", dir.display())]
    Damaged {
        /// Its directory.
        dir: PathBuf,
        /// The file that is wrong.
        file: String,
        /// In what way.
        why: String,
    },
    /// The host could not read it.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests;
