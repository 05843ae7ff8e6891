//! From a local directory to tar.

use std::{
    ffi::OsString,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use rustix::fs::OFlags;
use sandbox_protocol::limits;
use tar::{Builder, EntryType, Header, HeaderMode};
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::mpsc,
};

use crate::tasks;

/// Pieces of 256 KiB that wait for their reader: one is sent while the next is made.
const PIECES: usize = 1;

/// What is in a local directory as a tar archive, made on a thread of its own as it is read.
///
/// Names are relative to the directory; `./` is the directory itself. Modes, owners and times of change are kept, and
/// links stay links. Hard links become files of their own. Sockets, devices and pipes are left out and
/// [counted](TarSource::skipped). A file that grows meanwhile is cut; one that shrinks, or cannot be read, fails the
/// archive. Nothing is read before the reader is polled within a tokio runtime.
#[must_use]
pub fn pack(local: impl AsRef<Path>) -> TarSource {
    TarSource {
        state: State::Waiting(local.as_ref().to_owned()),
        piece: Bytes::new(),
        skipped: Skipped::default(),
    }
}

/// How many local files were left out.
#[derive(Debug, Clone, Default)]
pub struct Skipped(Arc<AtomicU64>);

impl Skipped {
    /// As counted so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A tar archive of a local directory. Made by [`pack`]; dropping it ends the packing.
#[derive(Debug)]
pub struct TarSource {
    state: State,
    piece: Bytes,
    skipped: Skipped,
}

#[derive(Debug)]
enum State {
    Waiting(PathBuf),
    Running(mpsc::Receiver<io::Result<Bytes>>),
}

impl TarSource {
    /// Sockets, devices and pipes that were left out; complete once the archive was read to its end.
    #[must_use]
    pub fn skipped(&self) -> Skipped {
        self.skipped.clone()
    }

    fn start(local: PathBuf, skipped: Skipped) -> mpsc::Receiver<io::Result<Bytes>> {
        let (pieces, receiver) = mpsc::channel(PIECES);
        // It ends once the receiver is gone; nobody has to wait for it.
        drop(tasks::blocking(move || {
            let out = Pieces {
                pieces: pieces.clone(),
                held: BytesMut::new(),
            };
            if let Err(error) = whole(&local, out, &skipped) {
                // The reader has gone, and with it whoever wanted to know.
                drop(pieces.blocking_send(Err(error)));
            }
        }));
        receiver
    }
}

impl AsyncRead for TarSource {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let State::Waiting(local) = &mut self.state {
            let local = std::mem::take(local);
            self.state = State::Running(Self::start(local, self.skipped.clone()));
        }
        if self.piece.is_empty()
            && let State::Running(pieces) = &mut self.state
        {
            match ready!(pieces.poll_recv(cx)) {
                Some(Ok(piece)) => self.piece = piece,
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Ok(())),
            }
        }
        let length = self.piece.len().min(into.remaining());
        into.put_slice(&self.piece.split_to(length));
        Poll::Ready(Ok(()))
    }
}

/// Gathers what is written into pieces for the reader.
struct Pieces {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    held: BytesMut,
}

impl Pieces {
    fn send(&mut self) -> io::Result<()> {
        let piece = self.held.split().freeze();
        self.pieces
            .blocking_send(Ok(piece))
            .map_err(|_unsent| io::Error::new(io::ErrorKind::BrokenPipe, "the archive's reader has gone"))
    }
}

impl Write for Pieces {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let room = limits::CHUNK_IN.saturating_sub(self.held.len());
        let taken = data.get(..room).unwrap_or(data);
        self.held.extend_from_slice(taken);
        if self.held.len() >= limits::CHUNK_IN {
            self.send()?;
        }
        Ok(taken.len())
    }

    /// Only at the end: the archive's writer flushes for no other reason.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn named<T>(path: &Path, outcome: io::Result<T>) -> io::Result<T> {
    outcome.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

fn whole(local: &Path, out: Pieces, skipped: &Skipped) -> io::Result<()> {
    let mut archive = Builder::new(out);
    let root = named(local, fs::metadata(local))?;
    if !root.is_dir() {
        return named(local, Err(io::ErrorKind::NotADirectory.into()));
    }
    add_dir(&mut archive, Path::new("./"), &root)?;
    // Directories that are still to be looked into, relative to the first.
    let mut waiting = vec![PathBuf::new()];
    while let Some(directory) = waiting.pop() {
        let full = local.join(&directory);
        for name in names(&full)? {
            let name = directory.join(name);
            let path = local.join(&name);
            let stat = named(&path, fs::symlink_metadata(&path))?;
            let kind = stat.file_type();
            if kind.is_dir() {
                add_dir(&mut archive, &name, &stat)?;
                waiting.push(name);
            } else if kind.is_symlink() {
                let target = named(&path, fs::read_link(&path))?;
                let mut header = header(&stat, EntryType::Symlink, 0);
                named(&path, archive.append_link(&mut header, &name, target))?;
            } else if kind.is_file() {
                add_file(&mut archive, &name, &path, skipped)?;
            } else {
                skipped.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    let mut out = archive.into_inner()?;
    if out.held.has_remaining() {
        out.send()?;
    }
    Ok(())
}

/// Sorted, so that an archive of the same tree is the same archive.
fn names(directory: &Path) -> io::Result<Vec<OsString>> {
    let entries = named(directory, fs::read_dir(directory))?;
    let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.file_name())).collect();
    let mut names = named(directory, names)?;
    names.sort_unstable();
    Ok(names)
}

fn header(stat: &Metadata, kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_metadata_in_mode(stat, HeaderMode::Complete);
    header.set_entry_type(kind);
    header.set_mode(stat.mode() & 0o7777);
    header.set_size(size);
    header
}

fn add_dir(archive: &mut Builder<Pieces>, name: &Path, stat: &Metadata) -> io::Result<()> {
    let mut header = header(stat, EntryType::Directory, 0);
    named(name, archive.append_data(&mut header, name, io::empty()))
}

fn add_file(archive: &mut Builder<Pieces>, name: &Path, path: &Path, skipped: &Skipped) -> io::Result<()> {
    let mut options = File::options();
    // What was a file a moment ago may be a pipe or a link now.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.read(true).custom_flags(flags.bits().cast_signed());
    let file = named(path, options.open(path))?;
    let stat = named(path, file.metadata())?;
    if !stat.is_file() {
        skipped.0.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
    let mut header = header(&stat, EntryType::Regular, stat.len());
    let content = Exactly {
        inner: file,
        left: stat.len(),
    };
    named(path, archive.append_data(&mut header, name, content))
}

/// As many bytes as were announced: no more, and less is an error.
struct Exactly {
    inner: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = (&mut self.inner).take(self.left).read(into)?;
        if count == 0 && self.left > 0 && !into.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it shrank while it was read",
            ));
        }
        self.left = self.left.saturating_sub(u64::try_from(count).unwrap_or(u64::MAX));
        Ok(count)
    }
}
