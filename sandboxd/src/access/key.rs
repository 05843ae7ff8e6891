//! The host key: 32 random bytes, made at the first start and kept for good.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use zeroize::Zeroizing;

use super::AccessError;
use crate::disk;

/// Makes the tokens of claims. Zeroed when dropped, and never shown.
#[derive(Clone)]
pub struct HostKey(Zeroizing<[u8; 32]>);

impl HostKey {
    /// Name of its file in the state directory.
    pub const FILE: &'static str = "host.key";

    /// A key of these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Reads the key of a state directory, or makes it of the `fresh` bytes, durably and readable by nobody else. The
    /// caller holds the directory's lock. Blocks.
    ///
    /// # Errors
    /// All of [`AccessError`]. A key that is there is never replaced.
    pub fn open(state_dir: &Path, fresh: [u8; 32]) -> Result<Self, AccessError> {
        let path = state_dir.join(Self::FILE);
        let unread = |source| AccessError::KeyUnread {
            path: path.clone(),
            source,
        };
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                disk::write_atomic(&path, &fresh, 0o600)
                    .map_err(|source| AccessError::KeyUnwritten { path, source })?;
                return Ok(Self::from_bytes(fresh));
            }
            Err(error) => return Err(unread(error)),
        };
        let about = file.metadata().map_err(unread)?;
        let mode = about.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(AccessError::KeyExposed { path, mode });
        }
        if about.len() != 32 {
            return Err(AccessError::KeyDamaged { path });
        }
        let mut bytes = Zeroizing::new([0; 32]);
        file.read_exact(bytes.as_mut_slice()).map_err(unread)?;
        Ok(Self(bytes))
    }

    pub(super) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostKey(..)")
    }
}
