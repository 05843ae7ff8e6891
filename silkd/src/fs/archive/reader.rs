//! A tar archive, read as it comes: a machine without I/O that is fed bytes and tells entries.
//!
//! The fields of a header are read by the crate `tar`. Its own reader wants to block for more bytes and buffers extension
//! headers whole; this one rests in the middle of anything, and holds one block and one name, whatever comes.

use bytes::{Buf as _, Bytes};
use sandbox_protocol::limits::PATH;
use tar::{EntryType, Header};

use super::pax::{BadPax, Pax, PaxReader};

/// A block of an archive.
const BLOCK: usize = 512;
/// Longest extension header, in bytes.
pub const EXTENSION: u64 = 1024 * 1024;
/// Parts of a sparse file, 16 bytes each while it is read.
const PARTS: usize = 4096;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A plain file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// Another name of an entry of the archive.
    HardLink,
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// As the archive has it.
    pub path: Vec<u8>,
    /// Where a link leads.
    pub link: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Bytes of the file, holes included.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u64,
    /// Group.
    pub gid: u64,
    /// Seconds since 1970.
    pub mtime: i64,
}

/// What the archive says next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An entry begins.
    Entry(Entry),
    /// Bytes of it, at this offset.
    Data(u64, Bytes),
    /// All of it was told.
    Over,
}

/// An archive that is none, or says what it may not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadArchive {
    /// No header where one should be.
    #[error("there is no header where one should be")]
    Header,
    /// A field of a header.
    #[error("the {0} of its header is no number")]
    Field(&'static str),
    /// An extension header beyond bounds.
    #[error("its extension header is too long")]
    Extension,
    /// Pax records.
    #[error(transparent)]
    Pax(#[from] BadPax),
    /// A device, a FIFO, or a kind that nobody here knows.
    #[error("it is of kind `{}`", .0.escape_ascii())]
    Kind(u8),
    /// A sparse file in a form that is not read, or with too many parts, or that contradicts itself.
    #[error("it is sparse in a way that is not read")]
    Sparse,
    /// The archive ends before its end.
    #[error("the archive ends in the middle")]
    Short,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Reader {
    at: At,
    /// Bytes of a block that is not whole yet.
    block: Vec<u8>,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    pax: Pax,
    /// The name of the entry, for whoever tells what is wrong.
    name: Vec<u8>,
}

#[derive(Debug, Default)]
enum At {
    #[default]
    Header,
    /// A header of zeros came; another one is the end.
    Zeros,
    /// In an extension header.
    Extension { what: Extension, left: u64, pad: u64 },
    /// In more parts of this sparse entry.
    Parts {
        entry: Entry,
        parts: Vec<Part>,
        stored: u64,
    },
    /// In the bytes of an entry.
    Data { parts: Vec<Part>, left: u64, pad: u64 },
    /// Bytes that nobody wants.
    Pass { left: u64 },
    /// The end has come.
    End,
}

#[derive(Debug)]
enum Extension {
    Name(Vec<u8>),
    Link(Vec<u8>),
    Pax(PaxReader),
    Global,
}

/// Bytes of a sparse file that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    offset: u64,
    length: u64,
}

impl Reader {
    /// The entry that came last, or begins to.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Takes bytes off `data` until there is something to tell; `None` when all of them are taken.
    ///
    /// # Errors
    /// [`BadArchive`]; nothing more can be read then.
    pub fn next(&mut self, data: &mut Bytes) -> Result<Option<Event>, BadArchive> {
        loop {
            match &mut self.at {
                At::End => {
                    // Zeros fill the archive's last record; whatever else comes is no part of it either.
                    data.clear();
                    return Ok(None);
                }
                At::Header | At::Zeros | At::Parts { .. } => {
                    let Some(block) = self.whole(data) else {
                        return Ok(None);
                    };
                    if let Some(event) = self.block(&block)? {
                        return Ok(Some(event));
                    }
                }
                At::Pass { left } => {
                    if !pass(data, left) {
                        return Ok(None);
                    }
                    self.at = At::Header;
                }
                At::Extension { what, left, pad } => {
                    if *left > 0 {
                        if data.is_empty() {
                            return Ok(None);
                        }
                        let part = take(data, *left);
                        *left -= long(part.len());
                        what.feed(&part)?;
                    } else if !pass(data, pad) {
                        return Ok(None);
                    } else {
                        self.extend()?;
                    }
                }
                At::Data { parts, left, pad } => {
                    if let Some(event) = give(data, parts, left) {
                        return Ok(event);
                    }
                    if !pass(data, pad) {
                        return Ok(None);
                    }
                    self.at = At::Header;
                    return Ok(Some(Event::Over));
                }
            }
        }
    }

    /// All bytes have come.
    ///
    /// # Errors
    /// [`BadArchive::Short`]: not all that the archive promised.
    pub fn finish(&self) -> Result<(), BadArchive> {
        if matches!(self.at, At::End | At::Zeros) && self.block.is_empty() {
            Ok(())
        } else {
            Err(BadArchive::Short)
        }
    }

    /// A whole block, once there is one.
    fn whole(&mut self, data: &mut Bytes) -> Option<[u8; BLOCK]> {
        let part = take(data, long(BLOCK - self.block.len()));
        self.block.extend_from_slice(&part);
        let whole = self.block.as_slice().try_into().ok()?;
        self.block.clear();
        Some(whole)
    }

    fn block(&mut self, block: &[u8; BLOCK]) -> Result<Option<Event>, BadArchive> {
        if let At::Parts { entry, parts, stored } = &mut self.at {
            let more = more_parts(block, parts)?;
            if more {
                return Ok(None);
            }
            let (entry, parts, stored) = (entry.clone(), std::mem::take(parts), *stored);
            return self.begin(entry, parts, stored).map(Some);
        }
        if block.iter().all(|byte| *byte == 0) {
            self.at = if matches!(self.at, At::Zeros) {
                At::End
            } else {
                At::Zeros
            };
            return Ok(None);
        }
        self.at = At::Header;
        let header = Header::from_byte_slice(block);
        let sum = header.cksum().map_err(|_text| BadArchive::Header)?;
        if sum != checksum(block) {
            return Err(BadArchive::Header);
        }
        self.header(header)
    }

    fn header(&mut self, header: &Header) -> Result<Option<Event>, BadArchive> {
        let raw = header.as_old();
        let size = number(&raw.size, header.entry_size(), "size")?;
        let what = extension(header.entry_type());
        if let Some(what) = what {
            if size > EXTENSION {
                return Err(BadArchive::Extension);
            }
            self.at = At::Extension {
                what,
                left: size,
                pad: padding(size),
            };
            return Ok(None);
        }
        let pax = std::mem::take(&mut self.pax);
        let long_name = self.long_name.take();
        let long_link = self.long_link.take();
        self.name = long_name
            .or(pax.path)
            .unwrap_or_else(|| header.path_bytes().into_owned());
        if pax.sparse {
            return Err(BadArchive::Sparse);
        }
        let link = long_link.or(pax.link);
        let link = link.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
        let stored = pax.size.unwrap_or(size);
        let mut entry = Entry {
            path: self.name.clone(),
            link: link.unwrap_or_default(),
            kind: kind(header, &self.name, stored)?,
            size: stored,
            mode: number(&raw.mode, header.mode(), "mode")? & 0o7777,
            uid: match pax.uid {
                Some(uid) => uid,
                None => number(&raw.uid, header.uid(), "uid")?,
            },
            gid: match pax.gid {
                Some(gid) => gid,
                None => number(&raw.gid, header.gid(), "gid")?,
            },
            mtime: match pax.mtime {
                Some(mtime) => mtime,
                None => i64::try_from(number(&raw.mtime, header.mtime(), "mtime")?).unwrap_or(0),
            },
        };
        if header.entry_type() == EntryType::GNUSparse {
            let gnu = header.as_gnu().ok_or(BadArchive::Sparse)?;
            entry.size = gnu.real_size().map_err(|_text| BadArchive::Sparse)?;
            let mut parts = Vec::new();
            add_parts(&gnu.sparse, &mut parts)?;
            if gnu.is_extended() {
                self.at = At::Parts { entry, parts, stored };
                return Ok(None);
            }
            return self.begin(entry, parts, stored).map(Some);
        }
        let whole = Part {
            offset: 0,
            length: stored,
        };
        self.begin(entry, vec![whole], stored).map(Some)
    }

    fn begin(&mut self, entry: Entry, mut parts: Vec<Part>, stored: u64) -> Result<Event, BadArchive> {
        parts.retain(|part| part.length > 0);
        if entry.kind != Kind::File {
            // What some write behind a directory or a link is no content.
            self.at = At::Pass {
                left: stored.saturating_add(padding(stored)),
            };
            return Ok(Event::Entry(entry));
        }
        let (mut sum, mut end) = (0_u64, 0_u64);
        for part in &parts {
            let after = part.offset.checked_add(part.length).ok_or(BadArchive::Sparse)?;
            if part.offset < end || after > entry.size {
                return Err(BadArchive::Sparse);
            }
            (sum, end) = (sum.saturating_add(part.length), after);
        }
        if sum != stored {
            return Err(BadArchive::Sparse);
        }
        parts.reverse();
        self.at = At::Data {
            parts,
            left: stored,
            pad: padding(stored),
        };
        Ok(Event::Entry(entry))
    }

    /// An extension header is whole.
    fn extend(&mut self) -> Result<(), BadArchive> {
        if let At::Extension { what, .. } = std::mem::take(&mut self.at) {
            match what {
                Extension::Name(name) => self.long_name = Some(name),
                Extension::Link(link) => self.long_link = Some(link),
                Extension::Pax(reader) => self.pax = reader.finish()?,
                Extension::Global => {}
            }
        }
        Ok(())
    }
}

impl Extension {
    fn feed(&mut self, part: &[u8]) -> Result<(), BadArchive> {
        match self {
            Self::Name(name) | Self::Link(name) => {
                // It ends with a NUL, or several.
                name.extend(part.iter().filter(|byte| **byte != 0));
                if name.len() > PATH {
                    return Err(BadArchive::Extension);
                }
            }
            Self::Pax(reader) => reader.feed(part)?,
            Self::Global => {}
        }
        Ok(())
    }
}

fn kind(header: &Header, name: &[u8], size: u64) -> Result<Kind, BadArchive> {
    let raw = header.entry_type();
    match raw.as_byte() {
        // Before there was a kind for it, a directory was an empty file whose name ended so.
        0 | b'0' if name.ends_with(b"/") && size == 0 => Ok(Kind::Directory),
        0 | b'0' | b'7' | b'S' => Ok(Kind::File),
        b'1' => Ok(Kind::HardLink),
        b'2' => Ok(Kind::Link),
        b'5' => Ok(Kind::Directory),
        other => Err(BadArchive::Kind(other)),
    }
}

/// What an extension header extends; `None` for an entry.
fn extension(kind: EntryType) -> Option<Extension> {
    match kind.as_byte() {
        b'L' => Some(Extension::Name(Vec::new())),
        b'K' => Some(Extension::Link(Vec::new())),
        b'x' => Some(Extension::Pax(PaxReader::default())),
        b'g' => Some(Extension::Global),
        _ => None,
    }
}

/// A number of a header; one that was left blank is 0.
fn number<T: Default>(raw: &[u8], read: std::io::Result<T>, what: &'static str) -> Result<T, BadArchive> {
    match read {
        Ok(number) => Ok(number),
        Err(_blank) if raw.iter().all(|byte| matches!(byte, 0 | b' ')) => Ok(T::default()),
        Err(_text) => Err(BadArchive::Field(what)),
    }
}

/// Bytes of a file, or what to do next: `None` when all have come.
#[expect(clippy::option_option, reason = "the inner one is the answer of `next`")]
fn give(data: &mut Bytes, parts: &mut Vec<Part>, left: &mut u64) -> Option<Option<Event>> {
    let part = parts.last_mut()?;
    if data.is_empty() {
        return Some(None);
    }
    let bytes = take(data, part.length);
    let (offset, count) = (part.offset, long(bytes.len()));
    part.offset += count;
    part.length -= count;
    *left -= count;
    if part.length == 0 {
        parts.pop();
    }
    Some(Some(Event::Data(offset, bytes)))
}

fn add_parts(headers: &[tar::GnuSparseHeader], parts: &mut Vec<Part>) -> Result<(), BadArchive> {
    for header in headers.iter().filter(|header| !header.is_empty()) {
        if parts.len() == PARTS {
            return Err(BadArchive::Sparse);
        }
        parts.push(Part {
            offset: header.offset().map_err(|_text| BadArchive::Sparse)?,
            length: header.length().map_err(|_text| BadArchive::Sparse)?,
        });
    }
    Ok(())
}

/// Reads a block of parts; whether another one follows.
fn more_parts(block: &[u8; BLOCK], parts: &mut Vec<Part>) -> Result<bool, BadArchive> {
    let mut extended = tar::GnuExtSparseHeader::new();
    extended.as_mut_bytes().copy_from_slice(block);
    add_parts(extended.sparse(), parts)?;
    Ok(extended.is_extended())
}

/// Of a block, its own sum counted as spaces.
fn checksum(block: &[u8; BLOCK]) -> u32 {
    let bytes = block.iter().enumerate();
    bytes
        .map(|(at, byte)| u32::from(if (148..156).contains(&at) { b' ' } else { *byte }))
        .sum()
}

const fn padding(size: u64) -> u64 {
    let block = BLOCK as u64;
    (block - size % block) % block
}

fn long(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// At most `most` bytes.
fn take(data: &mut Bytes, most: u64) -> Bytes {
    let count = usize::try_from(most).unwrap_or(usize::MAX).min(data.len());
    data.split_to(count)
}

/// Passes bytes over; whether all of them.
fn pass(data: &mut Bytes, left: &mut u64) -> bool {
    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(data.len());
    data.advance(count);
    *left -= long(count);
    *left == 0
}
