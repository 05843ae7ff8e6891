//! The file format: a header, then frames, then zeros. Pure: bytes in, findings out.
//!
//! Header (32 bytes): magic, version `u32`, reserved `u32`, first sequence number `u64`, crc32c of these `u32`, zeros.
//! Frame: length of the JSON `u32`, crc32c of all the rest of the frame `u32`, sequence number `u64`, JSON. Little endian.
//! A file is allocated whole before its first frame, so an append changes no file size.

use std::{cmp::Ordering, ops::Range};

use serde::de::IgnoredAny;

/// Length of the header.
pub(super) const HEADER: usize = 32;
/// Length of what stands before the JSON of a record.
pub(super) const FRAME: usize = 16;
/// Longest JSON of a record: a claim with every label at its limit and each character escaped stays below 40 KiB.
pub(super) const RECORD_MAX: usize = 256 * 1024;
/// Version of the format.
pub(super) const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"sbxlog\r\n";
/// `{}`: shorter is no record.
const RECORD_MIN: usize = 2;

/// What a file begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Header {
    /// Nothing but zeros, or nothing: allocated ahead and never used.
    Unused,
    /// Whole; the number of its first record.
    First(u64),
    /// Of a newer version.
    Newer(u32),
    /// Not a header.
    Damaged,
}

/// A stretch of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// A whole record.
    Record {
        /// Where its frame begins.
        offset: usize,
        /// Its number.
        seq: u64,
        /// Where its JSON stands.
        json: Range<usize>,
    },
    /// Bytes that are no record, with records behind them or whole to their end.
    Damaged(Range<usize>),
}

/// What a segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scan {
    /// In the order of the file.
    pub(super) found: Vec<Found>,
    /// Bytes of a last record that is not all there.
    pub(super) torn: Option<Range<usize>>,
}

/// The header of a segment.
pub(super) fn header(first: u64) -> [u8; HEADER] {
    let mut header = [0_u8; HEADER];
    let parts: [&[u8]; 4] = [MAGIC, &VERSION.to_le_bytes(), &[0; 4], &first.to_le_bytes()];
    let body = parts.concat();
    let sum = crc32c::crc32c(&body).to_le_bytes();
    for (place, byte) in header.iter_mut().zip(body.iter().chain(&sum)) {
        *place = *byte;
    }
    header
}

/// Reads the header.
pub(super) fn read_header(bytes: &[u8]) -> Header {
    if is_zero(bytes) {
        return Header::Unused;
    }
    let (Some(body), Some(sum)) = (bytes.get(..24), u32_at(bytes, 24)) else {
        return Header::Damaged;
    };
    let (Some(version), Some(first)) = (u32_at(bytes, 8), u64_at(bytes, 16)) else {
        return Header::Damaged;
    };
    if !body.starts_with(MAGIC) || crc32c::crc32c(body) != sum {
        return Header::Damaged;
    }
    if version > VERSION {
        Header::Newer(version)
    } else {
        Header::First(first)
    }
}

/// Appends the frame of a record.
pub(super) fn frame(seq: u64, json: &[u8], out: &mut Vec<u8>) {
    let len = u32::try_from(json.len()).expect("records are bounded by RECORD_MAX before they are framed");
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&checksum(seq, json).to_le_bytes());
    out.extend_from_slice(&seq.to_le_bytes());
    out.extend_from_slice(json);
}

fn checksum(seq: u64, json: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&seq.to_le_bytes()), json)
}

/// Reads frames from `from` on. Total: whatever the bytes are, each of them is accounted for.
pub(super) fn scan(bytes: &[u8], from: usize) -> Scan {
    let mut found = Vec::new();
    let mut at = from;
    loop {
        if let Some((seq, json)) = whole_frame(bytes, at) {
            let end = json.end;
            found.push(Found::Record {
                offset: at,
                seq,
                json,
            });
            at = end;
            continue;
        }
        let rest = bytes.get(at..).unwrap_or_default();
        if is_zero(rest) {
            return Scan { found, torn: None };
        }
        // Behind the last byte that is not zero nothing can begin.
        let end = at
            + rest
                .iter()
                .rposition(|byte| *byte != 0)
                .map_or(0, |last| last + 1);
        if let Some(next) = (at + 1..end).find(|next| whole_frame(bytes, *next).is_some()) {
            found.push(Found::Damaged(at..next));
            at = next;
            continue;
        }
        let torn = is_cut(bytes, at, end).then_some(at..end);
        if torn.is_none() {
            found.push(Found::Damaged(at..end));
        }
        return Scan { found, torn };
    }
}

/// A frame with a good checksum at this place.
fn whole_frame(bytes: &[u8], at: usize) -> Option<(u64, Range<usize>)> {
    let len = usize::try_from(u32_at(bytes, at)?).ok()?;
    if !(RECORD_MIN..=RECORD_MAX).contains(&len) {
        return None;
    }
    let start = at.checked_add(FRAME)?;
    let json = start..start.checked_add(len)?;
    let seq = u64_at(bytes, at + 8)?;
    let sum = checksum(seq, bytes.get(json.clone())?);
    (u32_at(bytes, at + 4)? == sum).then_some((seq, json))
}

/// Whether the last bytes of a log are a record that was cut while it was written, and not one that was changed later
/// or bytes of another kind. A write that is cut leaves a prefix, so at most one frame is not whole, and there is less of
/// it than it says, or zeros where JSON has none.
fn is_cut(bytes: &[u8], at: usize, end: usize) -> bool {
    let Some(json) = bytes.get(at + FRAME..end) else {
        return true;
    };
    let len = u32_at(bytes, at)
        .and_then(|len| usize::try_from(len).ok())
        .unwrap_or(0);
    if !(RECORD_MIN..=RECORD_MAX).contains(&len) {
        return false;
    }
    match json.len().cmp(&len) {
        Ordering::Less => serde_json::from_slice::<IgnoredAny>(json).is_err(),
        // A lost sector: a single zero byte is a changed one.
        Ordering::Equal => json.windows(4).any(|four| four == [0; 4]),
        Ordering::Greater => false,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    four.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let eight = bytes.get(at..at.checked_add(8)?)?;
    eight.try_into().ok().map(u64::from_le_bytes)
}

/// Whether there is nothing but zeros.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    bytes
        .chunks(ZEROS.len())
        .all(|chunk| ZEROS.get(..chunk.len()) == Some(chunk))
}
