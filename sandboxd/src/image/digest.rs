//! SHA-256 digests as values.

use std::{fmt, fs::File, io, os::unix::fs::FileExt as _, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Bytes read at a time.
const CHUNK: usize = 256 * 1024;

/// Text that is not 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a SHA-256 digest: expected 64 lower-case hexadecimal digits")]
pub struct DigestError;

/// A SHA-256 digest; as text, 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of what was fed to a hasher.
    #[must_use]
    pub fn finish(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }

    /// The 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The digest of a whole file, whatever its position. Blocks.
///
/// # Errors
/// The kernel's.
pub fn sha256(file: &File) -> io::Result<Digest> {
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let n = match file.read_at(&mut chunk, at) {
            Ok(0) => return Ok(Digest::finish(hasher)),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.update(chunk.get(..n).unwrap_or_default());
        at += n as u64;
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let mut bytes = [0; 32];
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(DigestError);
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            for digit in pair {
                let value = match digit {
                    b'0'..=b'9' => digit - b'0',
                    b'a'..=b'f' => digit - b'a' + 10,
                    _ => return Err(DigestError),
                };
                *byte = *byte << 4 | value;
            }
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
