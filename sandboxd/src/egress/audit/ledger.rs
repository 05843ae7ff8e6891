//! Files of one chain in a folder: gone on with, appended to in batches, turned over, synced.
//!
//! A write that fails leaves nothing of its batch behind, and the same lines can be tried again. A file that somebody
//! deletes is not gone on with: the next one says what it follows.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::{
    chain::{self, Hash, Head, LINE},
    entry::{self, After, Entry},
    keep::{Outlived, Stored, outlived},
};
use crate::{
    clock::{Clock, WallTime},
    disk,
    policy::Keep,
};

/// A file that is this long is followed by another.
const FILE_BYTES: u64 = 64 << 20;
/// And one that is so old: seconds.
const FILE_AGE: u64 = 24 * 60 * 60;
/// Bytes of one write.
const BATCH: usize = 256 * 1024;

/// What was found when a chain was taken up.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) after: After,
    /// Bytes behind the last line that can be read.
    pub(super) torn: u64,
    /// When the last line was written; 0: nobody knows.
    pub(super) last_at: WallTime,
}

/// The file that is written to.
#[derive(Debug)]
struct Current {
    path: PathBuf,
    /// Behind its last whole line.
    len: u64,
    /// Seconds since 1970.
    begun: u64,
    /// More than its first line.
    has_lines: bool,
    /// None: to be opened.
    file: Option<File>,
}

impl Current {
    /// Opens it where it is not open; false: somebody deleted it.
    fn is_there(&mut self) -> io::Result<bool> {
        if let Some(file) = &self.file {
            return Ok(file.metadata()?.nlink() > 0);
        }
        let mut file = match OpenOptions::new().write(true).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        file.set_len(self.len)?;
        file.seek(SeekFrom::Start(self.len))?;
        self.file = Some(file);
        Ok(true)
    }

    /// Writes at its end, all or nothing.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.file else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if let Err(error) = file.write_all(bytes) {
            // It is cut to its last whole line when it is opened the next time.
            self.file = None;
            return Err(error);
        }
        self.len += u64::try_from(bytes.len()).unwrap_or(0);
        Ok(())
    }
}

/// A chain on the disk.
#[derive(Debug)]
pub(super) struct Ledger {
    dir: PathBuf,
    name: &'static str,
    clock: Clock,
    /// Bytes of the disk that are left to others.
    spare: u64,
    file_bytes: u64,
    /// Of the last line.
    chained: Hash,
    /// Of the last line with a number.
    head: Head,
    /// How far the disk has it.
    synced: Head,
    /// The first number that may not be on the disk.
    unsynced: Option<u64>,
    current: Option<Current>,
    body: Vec<u8>,
    out: Vec<u8>,
}

/// A sync that failed: lines from this number on may not be on the disk.
#[derive(Debug, thiserror::Error)]
#[error("the lines from number {from} on may not be on the disk")]
pub(super) struct Unsynced {
    pub(super) from: u64,
    #[source]
    source: io::Error,
}

/// The files of a chain, in their order.
///
/// # Errors
/// The kernel's; a folder that is not there has none.
pub(super) fn files(dir: &Path, name: &str) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if numbers(&path, name).is_some() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The number that a file begins behind, and when it was begun, by its name.
fn numbers(path: &Path, name: &str) -> Option<(u64, u64)> {
    let rest = path
        .file_name()?
        .to_str()?
        .strip_prefix(name)?
        .strip_prefix('-')?;
    let (seq, secs) = rest.strip_suffix(".jsonl")?.split_once('-')?;
    let is_ours = seq.len() == 20 && secs.len() == 12;
    is_ours.then_some((seq.parse().ok()?, secs.parse().ok()?))
}

fn seconds(at: WallTime) -> u64 {
    at.as_micros() / 1_000_000
}

impl Ledger {
    /// Takes up what lies in the folder; `known`: how far the journal knows it. What cannot be read is not gone on with.
    pub(super) fn open(
        dir: PathBuf,
        name: &'static str,
        known: Option<Head>,
        spare: u64,
        clock: Clock,
    ) -> (Self, Found) {
        let mut ledger = Self {
            dir,
            name,
            clock,
            spare,
            file_bytes: FILE_BYTES,
            chained: known.unwrap_or_default().hash,
            head: known.unwrap_or_default(),
            synced: known.unwrap_or_default(),
            unsynced: None,
            current: None,
            body: Vec::new(),
            out: Vec::new(),
        };
        let last = files(&ledger.dir, name).map(|mut files| files.pop());
        let found = match last {
            Ok(Some(path)) => ledger.take_up(path),
            Ok(None) if known.is_none() => Ok(Found {
                after: After::New,
                torn: 0,
                last_at: WallTime::default(),
            }),
            Ok(None) => Ok(Found {
                after: After::Cut,
                torn: 0,
                last_at: WallTime::default(),
            }),
            Err(error) => Err(error),
        };
        let found = found.unwrap_or_else(|error| {
            tracing::error!(dir = %ledger.dir.display(), %error, "earlier lines cannot be read: a new file is begun");
            Found {
                after: After::Cut,
                torn: 0,
                last_at: WallTime::default(),
            }
        });
        (ledger, found)
    }

    fn take_up(&mut self, path: PathBuf) -> io::Result<Found> {
        let mut file = File::open(&path)?;
        let len = file.metadata()?.len();
        let reach = 2 * u64::try_from(LINE).unwrap_or(u64::MAX);
        let from = len.saturating_sub(reach);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(reach).read_to_end(&mut bytes)?;
        let mut end = bytes.len();
        while end > 0 {
            let before = bytes.get(..end - 1).unwrap_or_default();
            let start = before
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map_or(0, |at| at + 1);
            let line = bytes.get(start..end).unwrap_or_default();
            let read = line.strip_suffix(b"\n").and_then(chain::read);
            let Some(read) = read else {
                end = start;
                continue;
            };
            let torn = u64::try_from(bytes.len() - end).unwrap_or(u64::MAX);
            self.chained = read.hash;
            self.head = Head {
                seq: read.seq,
                hash: read.hash,
            };
            let (_, begun) = numbers(&path, self.name).unwrap_or_default();
            self.current = Some(Current {
                path,
                len: len - torn,
                begun,
                has_lines: read.is_numbered(),
                file: None,
            });
            let after = if read.kind == "stop" && torn == 0 {
                After::Stop
            } else {
                After::Cut
            };
            let at = humantime::parse_rfc3339(&read.time).ok();
            let at = at.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
            return Ok(Found {
                after,
                torn,
                last_at: WallTime::default().plus(at.unwrap_or_default()),
            });
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "its end has no line of a chain",
        ))
    }

    /// The last number.
    pub(super) const fn head(&self) -> Head {
        self.head
    }

    /// How far the disk has it.
    pub(super) const fn synced(&self) -> Head {
        self.synced
    }

    /// Whether the next append begins another file.
    pub(super) fn is_full(&self) -> bool {
        let age = |begun| seconds(self.clock.wall()).saturating_sub(begun);
        self.current.as_ref().is_some_and(|current| {
            current.has_lines && (current.len >= self.file_bytes || age(current.begun) >= FILE_AGE)
        })
    }

    /// Writes the first of these lines, as many as make a batch, and takes them out; all or none.
    ///
    /// # Errors
    /// The kernel's, or too little room on the disk; nothing of them is in the file then.
    pub(super) fn append(&mut self, items: &mut VecDeque<(u64, Entry)>) -> io::Result<()> {
        self.ready()?;
        let (mut chained, mut head, now) = (self.chained, self.head, self.clock.wall());
        self.out.clear();
        let mut count = 0;
        for (seq, item) in items.iter() {
            entry::body(*seq, item, now, &mut self.body);
            chained = chain::seal(chained, &self.body, &mut self.out);
            head = Head {
                seq: *seq,
                hash: chained,
            };
            count += 1;
            if self.out.len() >= BATCH {
                break;
            }
        }
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        current.write(&self.out)?;
        current.has_lines = true;
        (self.chained, self.head) = (chained, head);
        if let Some((first, _)) = items.front() {
            self.unsynced.get_or_insert(*first);
        }
        items.drain(..count);
        Ok(())
    }

    /// There is a file to write to, and room for it.
    fn ready(&mut self) -> io::Result<()> {
        if self.is_full() {
            self.current = None;
        }
        let is_there = match &mut self.current {
            Some(current) => current.is_there()?,
            None => false,
        };
        if is_there {
            return self.has_room();
        }
        self.current = None;
        self.begin()
    }

    fn has_room(&self) -> io::Result<()> {
        let fs = rustix::fs::statvfs(&self.dir)?;
        if fs.f_bavail.saturating_mul(fs.f_frsize) < self.spare {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    /// Begins a file that follows what was written last.
    fn begin(&mut self) -> io::Result<()> {
        disk::make_dir(&self.dir, 0o700)?;
        self.has_room()?;
        let now = self.clock.wall();
        let begun = seconds(now);
        let path = self.dir.join(format!(
            "{}-{:020}-{begun:012}.jsonl",
            self.name,
            self.head.seq.saturating_add(1)
        ));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        entry::open(self.head, self.chained, now, &mut self.body);
        self.out.clear();
        let chained = chain::seal(self.chained, &self.body, &mut self.out);
        let written = file.write_all(&self.out).and_then(|()| disk::sync_dir(&self.dir));
        if let Err(error) = written {
            // A name that stays is another file's beginning, which the next try does not take.
            drop(fs::remove_file(&path));
            return Err(error);
        }
        self.chained = chained;
        self.current = Some(Current {
            path,
            len: u64::try_from(self.out.len()).unwrap_or(0),
            begun,
            has_lines: false,
            file: Some(file),
        });
        Ok(())
    }

    /// Files that have outlived what is kept: every line of theirs is on the disk, and another file follows them.
    ///
    /// # Errors
    /// The kernel's, when it cannot be told what lies there.
    pub(super) fn outlived(&self, keep: Keep) -> io::Result<Option<Outlived>> {
        let Some(current) = &self.current else {
            return Ok(None);
        };
        let mut stored = Vec::new();
        for path in files(&self.dir, self.name)? {
            let Some((first, begun)) = numbers(&path, self.name) else {
                continue;
            };
            let len = fs::symlink_metadata(&path)?.len();
            stored.push(Stored {
                path,
                first,
                begun,
                len,
            });
        }
        // Whatever lies behind the file that is written to is not ours.
        if stored.last().is_none_or(|last| last.path != current.path) {
            return Ok(None);
        }
        Ok(outlived(
            &stored,
            keep,
            seconds(self.clock.wall()),
            self.synced.seq,
        ))
    }

    /// Deletes these, from the oldest on. What is gone already is.
    ///
    /// # Errors
    /// The kernel's; the rest stay.
    pub(super) fn delete(&self, outlived: &Outlived) -> io::Result<()> {
        for path in &outlived.files {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        disk::sync_dir(&self.dir)
    }

    /// Brings what is written to the disk.
    ///
    /// # Errors
    /// The kernel's, which is final for that file: another one is begun.
    pub(super) fn sync(&mut self) -> Result<(), Unsynced> {
        let Some(from) = self.unsynced.take() else {
            return Ok(());
        };
        let file = self.current.as_ref().and_then(|current| current.file.as_ref());
        match file.map_or(Ok(()), File::sync_data) {
            Ok(()) => {
                self.synced = self.head;
                Ok(())
            }
            Err(source) => {
                self.current = None;
                Err(Unsynced { from, source })
            }
        }
    }

    #[cfg(test)]
    pub(super) const fn turn_over_at(&mut self, bytes: u64) {
        self.file_bytes = bytes;
    }
}
