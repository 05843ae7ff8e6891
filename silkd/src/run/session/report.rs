//! The reader of a shell's reports: pure, and fed with bytes that a guest may write as it likes.
//!
//! A report is the command's nonce, `$?`, `$-` and `$PWD`, each ended by NUL. What comes before the nonce is nobody's
//! word and is dropped; held are a field at most.

use std::collections::VecDeque;

use super::script::{Left, Nonce};

/// Bytes of `$-`: each option is a letter.
const FLAGS: usize = 64;
/// Bytes of `$PWD`, which a user may set to anything.
const CWD: usize = sandbox_protocol::limits::PATH;

/// What a shell says after a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// `$?`.
    pub status: u8,
    /// `$-`.
    pub flags: Vec<u8>,
    /// `$PWD`, as far as it can be a path.
    pub cwd: Vec<u8>,
}

impl Report {
    pub(super) fn left(&self) -> Left {
        Left {
            status: self.status,
            traces: self.flags.contains(&b'x'),
            echoes: self.flags.contains(&b'v'),
        }
    }
}

/// A report that has the nonce and makes no sense: whoever wrote it is no shell of ours any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a report that no shell writes")]
pub struct Nonsense;

/// See the module.
#[derive(Debug)]
pub struct Reader {
    nonce: Nonce,
    /// The last bytes, one more than a nonce has at most.
    tail: VecDeque<u8>,
    at: At,
}

#[derive(Debug)]
enum At {
    Nonce,
    Status(Vec<u8>),
    Flags(u8, Vec<u8>),
    Cwd(u8, Vec<u8>, Vec<u8>),
    Over,
}

impl Reader {
    /// Waits for the report with this nonce.
    #[must_use]
    pub fn new(nonce: Nonce) -> Self {
        Self {
            nonce,
            tail: VecDeque::with_capacity(nonce.len()),
            at: At::Nonce,
        }
    }

    /// Takes bytes as they come; gives the report when it is whole. What comes behind it is dropped.
    ///
    /// # Errors
    /// [`Nonsense`]; nothing is understood from then on.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Option<Report>, Nonsense> {
        for byte in bytes {
            if let Some(report) = self.take(*byte)? {
                return Ok(Some(report));
            }
        }
        Ok(None)
    }

    fn take(&mut self, byte: u8) -> Result<Option<Report>, Nonsense> {
        self.at = match (std::mem::replace(&mut self.at, At::Over), byte) {
            (At::Nonce, 0) if self.tail.iter().eq(&self.nonce) => At::Status(Vec::new()),
            (At::Nonce, byte) => {
                if self.tail.len() == self.nonce.len() {
                    self.tail.pop_front();
                }
                self.tail.push_back(byte);
                At::Nonce
            }
            (At::Status(digits), 0) => At::Flags(status(&digits).ok_or(Nonsense)?, Vec::new()),
            (At::Status(mut digits), byte) => {
                if digits.len() >= 3 {
                    return Err(Nonsense);
                }
                digits.push(byte);
                At::Status(digits)
            }
            (At::Flags(status, flags), 0) => At::Cwd(status, flags, Vec::new()),
            (At::Flags(status, mut flags), byte) => {
                if flags.len() >= FLAGS {
                    return Err(Nonsense);
                }
                flags.push(byte);
                At::Flags(status, flags)
            }
            (At::Cwd(status, flags, cwd), 0) => return Ok(Some(Report { status, flags, cwd })),
            (At::Cwd(status, flags, mut cwd), byte) => {
                if cwd.len() < CWD {
                    cwd.push(byte);
                }
                At::Cwd(status, flags, cwd)
            }
            (At::Over, _) => At::Over,
        };
        Ok(None)
    }
}

fn status(digits: &[u8]) -> Option<u8> {
    let plain = digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| plain)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::script, *};

    fn written(nonce: Nonce, report: &Report) -> Vec<u8> {
        let status = report.status.to_string();
        let fields = [&nonce[..], status.as_bytes(), &report.flags, &report.cwd];
        fields
            .iter()
            .flat_map(|field| [field, &b"\0"[..]].concat())
            .collect()
    }

    fn read(reader: &mut Reader, bytes: &[u8], sizes: &[usize]) -> Result<Option<Report>, Nonsense> {
        let (mut rest, mut sizes) = (bytes, sizes.iter().cycle());
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
            if let Some(report) = reader.feed(now)? {
                return Ok(Some(report));
            }
            rest = later;
        }
        Ok(None)
    }

    #[test]
    fn nobody_reports_without_the_nonce() {
        let report = Report {
            status: 0,
            flags: b"hB".to_vec(),
            cwd: b"/".to_vec(),
        };
        let mut reader = Reader::new(script::nonce(1));
        for bits in [0, 2, u128::MAX] {
            let forged = written(script::nonce(bits), &report);
            assert_eq!(reader.feed(&forged).unwrap(), None);
        }
        let own = written(script::nonce(1), &report);
        assert_eq!(reader.feed(&own).unwrap(), Some(report));
    }

    #[test]
    fn nonsense_under_the_nonce_is_told_and_bounded() {
        for fields in [&b"256\0"[..], b"\0", b"x\0", b"-1\0", b"0000", b"+1\0"] {
            let mut reader = Reader::new(script::nonce(7));
            let bytes = [&script::nonce(7)[..], b"\0", fields].concat();
            assert_eq!(reader.feed(&bytes), Err(Nonsense), "{fields:?}");
            assert_eq!(reader.feed(b"0\0h\0/\0"), Ok(None));
        }
        let mut reader = Reader::new(script::nonce(7));
        let bytes = [&script::nonce(7)[..], b"\x000\0", &[b'h'; FLAGS + 1]].concat();
        assert_eq!(reader.feed(&bytes), Err(Nonsense));
        let mut reader = Reader::new(script::nonce(7));
        let bytes = [&script::nonce(7)[..], b"\x000\0h\0", &[b'/'; 3 * CWD], b"\0"].concat();
        assert_eq!(reader.feed(&bytes).unwrap().unwrap().cwd.len(), CWD);
    }

    proptest! {
        /// Whatever lies before it, and however it is cut.
        #[test]
        fn a_report_is_found_behind_any_rubbish(
            rubbish in proptest::collection::vec(prop_oneof![Just(0), Just(b'0'), Just(b'a'), any::<u8>()], 0..200),
            bits in prop_oneof![Just(0), any::<u128>()],
            status: u8,
            flags in "[a-zA-Z]{0,12}",
            cwd in proptest::collection::vec(1..=u8::MAX, 0..60),
            sizes in proptest::collection::vec(1..9_usize, 1..20),
        ) {
            let nonce = script::nonce(bits);
            let report = Report { status, flags: flags.into_bytes(), cwd };
            let bytes = [&rubbish[..], b"\n", &written(nonce, &report)].concat();
            // Rubbish that has the nonce by itself is no rubbish.
            prop_assume!(!rubbish.windows(33).any(|part| part[..32] == nonce && part[32] == 0));
            let mut reader = Reader::new(nonce);
            prop_assert_eq!(read(&mut reader, &bytes, &sizes), Ok(Some(report)));
        }

        #[test]
        fn no_bytes_do_harm(bytes in proptest::collection::vec(any::<u8>(), 0..400), with: bool) {
            let nonce = script::nonce(9);
            let mut reader = Reader::new(nonce);
            let start: &[u8] = if with { &nonce } else { b"" };
            drop(reader.feed(&[start, b"\0", &bytes].concat()));
            prop_assert!(reader.tail.len() <= nonce.len());
        }
    }
}
