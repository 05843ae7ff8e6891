//! Where values of secrets come from, and what is no such place.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;
use zeroize::Zeroizing;

use crate::policy::{SecretSource, SecretTerms};

/// Longest value.
const VALUE: usize = 8 * 1024;
/// A line's end, which editors put behind a value, and a byte more, by which a longer one is known.
const END: usize = 3;
/// Where systemd puts credentials.
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// Why a secret has no value. Nothing of a value is in it.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The variable is not set.
    #[error("the environment has no {0}")]
    NotSet(String),
    /// The file cannot be read.
    #[error("read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A folder, a pipe, a device, a link.
    #[error("{}: not a regular file of one name", .0.display())]
    NotRegular(PathBuf),
    /// Somebody else could change it.
    #[error("{}: owned by uid {uid}; root's or the daemon's own is taken", .path.display())]
    Owner {
        /// Which.
        path: PathBuf,
        /// Whose.
        uid: u32,
    },
    /// Somebody else could read it.
    #[error("{}: mode {mode:04o}; 0600 or 0400 is taken", .path.display())]
    Mode {
        /// Which.
        path: PathBuf,
        /// As it is.
        mode: u32,
    },
    /// No value, one that is too long, or one with a byte that no field may have.
    #[error("its value is no header text of 1 byte to 8 KiB")]
    NotText,
}

/// The field's whole text: prefix and value.
pub(super) fn read(
    terms: &SecretTerms,
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<Zeroizing<Vec<u8>>, SecretError> {
    let prefix = terms.prefix.as_bytes();
    // As long as it ever gets: what grows leaves a copy behind.
    let mut text = Zeroizing::new(Vec::with_capacity(prefix.len() + VALUE + END));
    text.extend_from_slice(prefix);
    match &terms.source {
        SecretSource::Env(name) => {
            let value = var(name).ok_or_else(|| SecretError::NotSet(name.clone()))?;
            let value = Zeroizing::new(value.into_encoded_bytes());
            let most = value.len().min(VALUE + END);
            text.extend_from_slice(value.get(..most).unwrap_or_default());
        }
        SecretSource::File(path) => from_file(path, &mut text)?,
        SecretSource::Credential(name) => {
            let folder = var(CREDENTIALS).ok_or_else(|| SecretError::NotSet(CREDENTIALS.to_owned()))?;
            from_file(&Path::new(&folder).join(name), &mut text)?;
        }
    }
    for end in [b'\n', b'\r'] {
        if text.len() > prefix.len() && text.last() == Some(&end) {
            text.pop();
        }
    }
    let length = text.len() - prefix.len();
    let is_text = text
        .iter()
        .all(|byte| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f));
    if (1..=VALUE).contains(&length) && is_text {
        Ok(text)
    } else {
        Err(SecretError::NotText)
    }
}

/// Everything is asked of the descriptor that is read: a path may lead elsewhere a moment later.
fn from_file(path: &Path, text: &mut Vec<u8>) -> Result<(), SecretError> {
    let failed = |source: io::Error| {
        // What O_NOFOLLOW says of a link.
        if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
            SecretError::NotRegular(path.to_owned())
        } else {
            SecretError::Read {
                path: path.to_owned(),
                source,
            }
        }
    };
    // A pipe without a writer would be waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let flags = i32::try_from(flags.bits()).map_err(|error| failed(io::Error::other(error)))?;
    let mut file = File::options()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(failed)?;
    let is = file.metadata().map_err(failed)?;
    if !is.is_file() || is.nlink() != 1 {
        return Err(SecretError::NotRegular(path.to_owned()));
    }
    is_private(
        path,
        is.uid(),
        is.mode() & 0o7777,
        rustix::process::geteuid().as_raw(),
    )?;
    let (mut at, most) = (text.len(), text.len() + VALUE + END);
    text.resize(most, 0);
    while let Some(rest) = text.get_mut(at..).filter(|rest| !rest.is_empty()) {
        match file.read(rest) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    text.truncate(at);
    Ok(())
}

/// Whether nobody but root and the daemon, who is `me`, could read or change a file.
pub(super) fn is_private(path: &Path, uid: u32, mode: u32, me: u32) -> Result<(), SecretError> {
    let path = || path.to_owned();
    if uid != 0 && uid != me {
        return Err(SecretError::Owner { path: path(), uid });
    }
    if mode != 0o600 && mode != 0o400 {
        return Err(SecretError::Mode { path: path(), mode });
    }
    Ok(())
}
