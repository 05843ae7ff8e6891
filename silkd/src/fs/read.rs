//! Read: a file's bytes, as they are on their way.

use std::os::fd::OwnedFd;

use bytes::Bytes;
use rustix::{
    buffer::spare_capacity,
    fs::{OFlags, Stat, fstat},
    io::{Errno, pread},
};
use sandbox_protocol::{
    limits::CHUNK_OUT,
    v1::{AgentReadRequest, ReadEnd, ReadOut, read_out::M},
};

use super::{
    errno::field,
    open::Wanted,
    stat::{mtime, wire},
    steps::{Made, Produce},
    workers::Cancel,
};
use crate::refusal::Refusal;

/// A file that is being read.
#[derive(Debug)]
pub(super) struct Reader {
    wanted: Wanted,
    file: OwnedFd,
    first: Stat,
    next: Next,
    at: u64,
    /// What may still be read.
    left: u64,
    sent: u64,
}

#[derive(Debug, Clone, Copy)]
enum Next {
    Head,
    Data,
    End,
    Nothing,
}

/// Pure.
pub(super) fn check(request: &AgentReadRequest) -> Result<Wanted, Refusal> {
    if i64::try_from(request.offset).is_err() {
        return Err(field("offset: no file is so long"));
    }
    Wanted::new(&request.path, request.resolve.as_ref())
}

impl Reader {
    pub(super) fn open(wanted: Wanted, offset: u64, length: Option<u64>) -> Result<Self, Refusal> {
        let (file, first) = wanted.open_file(OFlags::RDONLY)?;
        Ok(Self {
            wanted,
            file,
            first,
            next: Next::Head,
            at: offset,
            left: length.unwrap_or(u64::MAX),
            sent: 0,
        })
    }

    /// One block; empty at the end. Files of the kernel have no length to go by, so the end is where nothing comes.
    fn block(&self) -> Result<Vec<u8>, Refusal> {
        let want = usize::try_from(self.left).unwrap_or(CHUNK_OUT).min(CHUNK_OUT);
        if want == 0 {
            return Ok(Vec::new());
        }
        let mut data = Vec::with_capacity(want);
        loop {
            match pread(&self.file, spare_capacity(&mut data), self.at) {
                Err(Errno::INTR) => {}
                // A log of the kernel that has no more to say now.
                Ok(_) | Err(Errno::AGAIN) => break,
                Err(errno) => return Err(self.wanted.failed("read", errno)),
            }
        }
        // An allocator may give more room than it was asked for.
        data.truncate(want);
        Ok(data)
    }

    fn end(&self) -> Result<ReadEnd, Refusal> {
        let now = fstat(&self.file).map_err(|errno| self.wanted.failed("look at", errno))?;
        Ok(ReadEnd {
            bytes: self.sent,
            changed: (now.st_size, mtime(&now)) != (self.first.st_size, mtime(&self.first)),
        })
    }
}

impl Produce for Reader {
    type Item = ReadOut;

    fn next(&mut self, cancel: &Cancel) -> Result<Made<ReadOut>, Refusal> {
        cancel.check()?;
        let m = match self.next {
            Next::Head => {
                self.next = Next::Data;
                M::Head(wire(&self.first, Vec::new()))
            }
            Next::Data => {
                let data = self.block()?;
                let count = u64::try_from(data.len()).unwrap_or(u64::MAX);
                self.at = self.at.saturating_add(count);
                self.left = self.left.saturating_sub(count);
                self.sent = self.sent.saturating_add(count);
                if count == 0 {
                    self.next = Next::Nothing;
                    M::End(self.end()?)
                } else {
                    if self.left == 0 {
                        self.next = Next::End;
                    }
                    M::Data(Bytes::from(data))
                }
            }
            Next::End => {
                self.next = Next::Nothing;
                M::End(self.end()?)
            }
            Next::Nothing => return Ok(Made::End),
        };
        Ok(Made::Item(ReadOut { m: Some(m) }))
    }
}
