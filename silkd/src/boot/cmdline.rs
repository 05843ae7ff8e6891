//! The kernel's command line: silkd's own keys. Pure.
//!
//! May call: nothing.
//! Never inside: reading it. A key that is not known is fatal: a typing error boots nothing else.

use std::time::Duration;

/// What the command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Options {
    /// `silkd.root`: the root file system.
    pub(super) root: Root,
    /// `silkd.upper`: percent of RAM that edits of a disk root may take, 1 to 100; default 50.
    pub(super) upper_percent: u8,
    /// `silkd.timeout`: how long to wait for the root disk and for the ports, 1 to 120 s; default 10.
    pub(super) timeout: Duration,
}

/// Where the root file system comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Root {
    /// The initrd stays.
    Initramfs,
    /// The block device with this serial, erofs, under a writable overlay in memory.
    Disk(String),
}

/// Why the command line is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CmdlineError {
    /// No such key.
    #[error("unknown option {0:?}")]
    Unknown(String),
    /// The value of a known key is not allowed.
    #[error("{key}={value}: expected {expected}")]
    Value {
        /// Which key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// A key stands twice.
    #[error("{0} stands twice")]
    Twice(&'static str),
}

const ROOT: &str = "silkd.root";
const UPPER: &str = "silkd.upper";
const TIMEOUT: &str = "silkd.timeout";
/// virtio-blk gives a serial 20 bytes.
const SERIAL: usize = 20;

/// Reads the words of a command line; those of others are passed over.
///
/// # Errors
/// See [`CmdlineError`]; the first mistake is told.
pub(super) fn parse(line: &str) -> Result<Options, CmdlineError> {
    let (mut root, mut upper, mut timeout) = (None, None, None);
    for word in line
        .split_ascii_whitespace()
        .filter(|word| word.starts_with("silkd."))
    {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            ROOT => once(&mut root, ROOT, parse_root(value))?,
            UPPER => once(&mut upper, UPPER, number(UPPER, value, 1..=100, "1 to 100"))?,
            TIMEOUT => once(&mut timeout, TIMEOUT, number(TIMEOUT, value, 1..=120, "1 to 120"))?,
            _ => return Err(CmdlineError::Unknown(key.to_owned())),
        }
    }
    Ok(Options {
        root: root.unwrap_or(Root::Initramfs),
        upper_percent: upper.unwrap_or(50),
        timeout: Duration::from_secs(timeout.unwrap_or(10).into()),
    })
}

fn once<T>(
    place: &mut Option<T>,
    key: &'static str,
    value: Result<T, CmdlineError>,
) -> Result<(), CmdlineError> {
    if place.replace(value?).is_some() {
        return Err(CmdlineError::Twice(key));
    }
    Ok(())
}

fn parse_root(value: &str) -> Result<Root, CmdlineError> {
    let plain = |serial: &&str| {
        let fits = (1..=SERIAL).contains(&serial.len());
        fits && serial
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if value == "initramfs" {
        return Ok(Root::Initramfs);
    }
    value
        .strip_prefix("disk:")
        .filter(plain)
        .map(|serial| Root::Disk(serial.to_owned()))
        .ok_or_else(|| CmdlineError::Value {
            key: ROOT,
            value: value.to_owned(),
            expected: "initramfs, or disk: and a serial of 1 to 20 letters, digits, - and _",
        })
}

fn number(
    key: &'static str,
    value: &str,
    range: std::ops::RangeInclusive<u8>,
    expected: &'static str,
) -> Result<u8, CmdlineError> {
    let fits = value.parse().ok().filter(|number| range.contains(number));
    fits.ok_or_else(|| CmdlineError::Value {
        key,
        value: value.to_owned(),
        expected,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_and_other_peoples_words() {
        let line = "console=ttyS0 quiet silkd.root=disk:root-1 silkd.upper=25 silkd.timeout=120 panic=-1\n";
        let options = Options {
            root: Root::Disk("root-1".to_owned()),
            upper_percent: 25,
            timeout: Duration::from_secs(120),
        };
        assert_eq!(parse(line), Ok(options));
        assert_eq!(parse("ro").unwrap().root, Root::Initramfs);
        assert_eq!(parse("silkd.root=initramfs").unwrap().upper_percent, 50);
    }

    #[test]
    fn unknown_option_is_fatal_by_name() {
        for (line, names) in [
            ("silkd.rooot=initramfs", "silkd.rooot"),
            ("silkd.", "silkd."),
            ("silkd.debug", "silkd.debug"),
        ] {
            assert_eq!(parse(line), Err(CmdlineError::Unknown(names.to_owned())));
        }
    }

    #[test]
    fn values_out_of_range_and_repetitions_are_refused() {
        for line in [
            "silkd.root",
            "silkd.root=",
            "silkd.root=disk:",
            "silkd.root=disk:../x",
            "silkd.root=disk:aaaaaaaaaaaaaaaaaaaaa",
            "silkd.root=nfs",
            "silkd.upper=0",
            "silkd.upper=101",
            "silkd.upper=",
            "silkd.timeout=121",
            "silkd.timeout=-1",
        ] {
            assert!(matches!(parse(line), Err(CmdlineError::Value { .. })), "{line}");
        }
        assert_eq!(
            parse("silkd.upper=5 silkd.upper=5"),
            Err(CmdlineError::Twice(UPPER))
        );
    }
}
