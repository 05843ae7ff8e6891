//! Names on the host, made from a slot and never from an id or from anything that a guest says (interface names have
//! 15 bytes, socket paths 108).
//!
//! May call: nothing.
//! Never inside: I/O.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// The number of a sandbox's place on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SlotNumber(pub u16);

impl fmt::Display for SlotNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

/// Text that is not four lower-case hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a slot: expected four lower-case hexadecimal digits")]
pub struct SlotError;

impl FromStr for SlotNumber {
    type Err = SlotError;

    fn from_str(text: &str) -> Result<Self, SlotError> {
        let number = u16::from_str_radix(text, 16)
            .map(Self)
            .map_err(|_digits| SlotError)?;
        if number.to_string() == text {
            Ok(number)
        } else {
            Err(SlotError)
        }
    }
}

/// The run directory of a slot below the daemon's `run_dir`.
#[must_use]
pub fn run_dir(run_root: &Path, slot: SlotNumber) -> PathBuf {
    run_root.join("run").join(slot.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_one_spelling() {
        assert_eq!("00ff".parse(), Ok(SlotNumber(255)));
        assert_eq!(run_dir(Path::new("/r"), SlotNumber(16)), Path::new("/r/run/0010"));
        for bad in ["", "ff", "00FF", "+0ff", "0x10", "00ff0", " 0ff"] {
            assert_eq!(bad.parse::<SlotNumber>(), Err(SlotError), "{bad:?}");
        }
    }
}
