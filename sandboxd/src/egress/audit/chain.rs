//! The chain of lines: each ends with a hash over the hash before it and its own text, so that what is changed, taken out or
//! moved shows. Pure.
//!
//! Numbers count up by one. A line `lost` stands for a stretch of them and has the last one; the first line of a file,
//! `open`, repeats the number before it and has the hash that it follows. So every number is accounted for.

use std::{fmt, str::FromStr};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

/// Longest line: twice what the longest fields come to when every byte of them is escaped.
pub(super) const LINE: usize = 32 * 1024;
/// What stands between a line's text and its hash.
const MARK: &str = r#","hash":""#;
/// The mark, 64 digits, a quote and a brace.
const TAIL: usize = MARK.len() + 64 + 2;

/// A hash of the chain.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Hash([u8; 32]);

impl Hash {
    fn follow(self, body: &[u8]) -> Self {
        let mut sha = Sha256::new();
        sha.update(self.0);
        sha.update(body);
        Self(sha.finalize().into())
    }

    /// In lower-case hexadecimal.
    fn digits(self) -> [u8; 64] {
        let digit = |half: u8| match half {
            0..=9 => b'0' + half,
            _ => b'a' + half - 10,
        };
        let mut digits = [0; 64];
        for (pair, byte) in digits.as_chunks_mut::<2>().0.iter_mut().zip(self.0) {
            *pair = [digit(byte >> 4), digit(byte & 15)];
        }
        digits
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.digits();
        f.write_str(std::str::from_utf8(&digits).map_err(|_not_ascii| fmt::Error)?)
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is no hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("64 lower-case hexadecimal digits")]
pub struct NoHash;

impl FromStr for Hash {
    type Err = NoHash;

    fn from_str(text: &str) -> Result<Self, NoHash> {
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
            return Err(NoHash);
        };
        let pairs: &[[u8; 2]; 32] = pairs.try_into().map_err(|_length| NoHash)?;
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(NoHash),
        };
        let mut hash = [0; 32];
        for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Ok(Self(hash))
    }
}

/// How far a chain has come: the last number, and the hash of its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Head {
    /// The number.
    pub seq: u64,
    /// The hash.
    pub hash: Hash,
}

/// Writes a line whose text, a JSON object with something in it, follows `before`; gives its hash.
pub(super) fn seal(before: Hash, body: &[u8], out: &mut Vec<u8>) -> Hash {
    let hash = before.follow(body);
    out.extend_from_slice(body.strip_suffix(b"}").unwrap_or(body));
    out.extend_from_slice(MARK.as_bytes());
    out.extend_from_slice(&hash.digits());
    out.extend_from_slice(b"\"}\n");
    hash
}

/// What a line says of itself, as far as the chain cares.
#[derive(Debug, Deserialize)]
struct Said {
    seq: u64,
    kind: String,
    #[serde(default)]
    time: String,
    /// Of `open`: the hash that it follows.
    prev: Option<String>,
    /// Of `deleted`: the last number.
    to: Option<u64>,
    /// Of `lost`: the first number, and how many.
    from: Option<u64>,
    count: Option<u64>,
    /// Of `start`: what lay before.
    after: Option<String>,
}

/// The numbers that a line stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// None: it repeats the one before it, and what it follows.
    Open(Head),
    /// This one.
    At(u64),
    /// All of these.
    Lost { from: u64, to: u64 },
}

/// A line that can be read, whether it is in its place or not.
#[derive(Debug)]
pub(super) struct Read {
    place: Place,
    pub(super) seq: u64,
    pub(super) hash: Hash,
    pub(super) kind: String,
    pub(super) time: String,
    is_after_cut: bool,
    /// Up to this number it says that lines were deleted.
    deleted: Option<u64>,
    body: Vec<u8>,
}

impl Read {
    /// Whether it has a number of its own.
    pub(super) const fn is_numbered(&self) -> bool {
        !matches!(self.place, Place::Open(_))
    }
}

/// Reads a line, without its end.
pub(super) fn read(line: &[u8]) -> Option<Read> {
    let (text, tail) = line.split_at_checked(line.len().checked_sub(TAIL)?)?;
    let tail = std::str::from_utf8(tail).ok()?;
    let hash = tail.strip_prefix(MARK)?.strip_suffix("\"}")?.parse().ok()?;
    let mut body = text.to_vec();
    body.push(b'}');
    let said: Said = serde_json::from_slice(&body).ok()?;
    // Nobody has written so many, and one more must still have a number.
    let seq = Some(said.seq).filter(|seq| *seq < u64::MAX / 2)?;
    let place = match said.kind.as_str() {
        "open" => Place::Open(Head {
            seq,
            hash: said.prev?.parse().ok()?,
        }),
        "lost" => {
            let from = said.from.filter(|from| (1..=seq).contains(from))?;
            if said.count? != seq - from + 1 {
                return None;
            }
            Place::Lost { from, to: seq }
        }
        _ if seq > 0 => Place::At(seq),
        _ => return None,
    };
    Some(Read {
        place,
        seq,
        hash,
        is_after_cut: said.kind == "start" && said.after.as_deref() == Some("cut"),
        deleted: said.to.filter(|_| said.kind == "deleted"),
        kind: said.kind,
        time: said.time,
        body,
    })
}

/// What is wrong at a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It is no line of a chain.
    Unreadable,
    /// Its hash does not follow from the line before it and its own text.
    Edited,
    /// Numbers before it are nowhere.
    Removed {
        /// The first.
        from: u64,
        /// The last.
        to: u64,
    },
    /// Its number was there before, or belongs further up.
    Reordered,
    /// The journal knows another line of this number.
    Rewritten,
    /// The journal knows of lines behind the last one.
    CutTail {
        /// The last number that it knows.
        known: u64,
    },
}

impl Fault {
    /// Its word.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Edited => "edited",
            Self::Removed { .. } => "removed",
            Self::Reordered => "reordered",
            Self::Rewritten => "rewritten",
            Self::CutTail { .. } => "cut tail",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        match self {
            Self::Unreadable => f.write_str(": no line of a chain"),
            Self::Edited => {
                f.write_str(": its hash does not follow from the line before it and its own text")
            }
            Self::Removed { from, to } => write!(f, ": numbers {from} to {to} are nowhere before it"),
            Self::Reordered => f.write_str(": its number belongs further up"),
            Self::Rewritten => f.write_str(": the journal knows another line of this number"),
            Self::CutTail { known } => write!(f, ": the journal knows lines up to number {known}"),
        }
    }
}

/// Follows a chain line by line. Behind a fault it goes on with what the lines say, so that each fault is told once.
#[derive(Debug, Default)]
pub(super) struct Checker {
    /// None before the first line.
    last: Option<Head>,
    /// What the journal knows.
    known: Option<Head>,
    /// The first number that is there.
    pub(super) first: u64,
    /// Numbers that stand for what was lost.
    pub(super) lost: u64,
    /// Starts that were not behind a stop.
    pub(super) unclean: u64,
    /// Up to this number lines say that they were deleted; 0: none says so.
    pub(super) deleted: u64,
}

impl Checker {
    pub(super) fn new(known: Option<Head>) -> Self {
        Self {
            known,
            ..Self::default()
        }
    }

    /// The last number.
    pub(super) fn last(&self) -> u64 {
        self.last.map_or(0, |last| last.seq)
    }

    /// Takes the next line, without its end; gives its number, and what is wrong with it.
    pub(super) fn take(&mut self, line: &[u8]) -> (Option<u64>, Option<Fault>) {
        let Some(read) = read(line) else {
            return (None, Some(Fault::Unreadable));
        };
        let Read { place, seq, hash, .. } = read;
        let (from, follows) = match place {
            Place::Open(before) => (before.seq.saturating_add(1), Some(before)),
            Place::At(seq) => (seq, None),
            Place::Lost { from, .. } => (from, None),
        };
        // A chain begins with what its first line says, which is `open`.
        let begins = follows.unwrap_or_else(|| Head {
            seq: from.saturating_sub(1),
            hash: Hash::default(),
        });
        let before = self.last.unwrap_or(begins);
        if self.last.is_none() {
            self.first = from;
        }
        let expected = before.seq.saturating_add(1);
        let fault = if from > expected {
            Some(Fault::Removed {
                from: expected,
                to: from - 1,
            })
        } else if from < expected {
            Some(Fault::Reordered)
        } else if before.hash.follow(&read.body) != hash || follows.is_some_and(|said| said != before) {
            Some(Fault::Edited)
        } else {
            let known = self.known.filter(|known| known.seq == seq && follows.is_none());
            known
                .filter(|known| known.hash != hash)
                .map(|_other| Fault::Rewritten)
        };
        if fault == Some(Fault::Reordered) {
            // What follows belongs behind what came before it.
            self.last = Some(before);
            return (Some(seq), fault);
        }
        self.last = Some(Head { seq, hash });
        if let Place::Lost { from, to } = place {
            self.lost = self.lost.saturating_add((to - from).saturating_add(1));
        }
        self.unclean += u64::from(read.is_after_cut);
        self.deleted = self.deleted.max(read.deleted.unwrap_or(0));
        (Some(seq), fault)
    }

    /// What is wrong with where it ends.
    pub(super) fn end(&self) -> Option<Fault> {
        let known = self.known?.seq;
        (known > self.last()).then_some(Fault::CutTail { known })
    }
}
