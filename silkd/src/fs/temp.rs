//! A file beside the one that it is going to be, gone again unless it becomes it.

use std::os::fd::OwnedFd;

use rustix::{
    fs::{AtFlags, Mode, OFlags, openat, unlinkat},
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};

use super::{open::Spot, workers::as_silkd};

/// How their names begin.
pub(super) const PREFIX: &str = ".silkd-write-";
/// Tries for a name that nobody has; one is enough unless somebody plays.
const NAMES: usize = 16;

/// A new file. Dropped, it is removed.
#[derive(Debug)]
pub(super) struct Temp {
    /// Where it is.
    pub(super) spot: Spot,
    pub(super) file: OwnedFd,
    /// False once it is what it was made for.
    pub(super) there: bool,
}

impl Temp {
    /// Makes one in the directory of `beside`, for its owner only.
    pub(super) fn beside(beside: &Spot) -> Result<Self, Errno> {
        let parent = beside.parent.try_clone().map_err(|_full| Errno::MFILE)?;
        let flags = OFlags::CREATE
            | OFlags::EXCL
            | OFlags::RDWR
            | OFlags::NOFOLLOW
            | OFlags::CLOEXEC
            | OFlags::NOCTTY;
        for _attempt in 0..NAMES {
            let name = random_name(PREFIX)?;
            match openat(&parent, name.as_slice(), flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
                Ok(file) => {
                    return Ok(Self {
                        spot: Spot { parent, name },
                        file,
                        there: true,
                    });
                }
            }
        }
        Err(Errno::EXIST)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if self.there {
            // Somebody else may have removed it, or the directory with it.
            let remove = || unlinkat(&self.spot.parent, self.spot.name.as_slice(), AtFlags::empty());
            as_silkd(remove).ok();
        }
    }
}

/// `prefix` and 16 random digits.
pub(super) fn random_name(prefix: &str) -> Result<Vec<u8>, Errno> {
    let mut random = [0; 8];
    getrandom(random.as_mut_slice(), GetRandomFlags::empty())?;
    Ok(format!("{prefix}{:016x}", u64::from_ne_bytes(random)).into_bytes())
}
