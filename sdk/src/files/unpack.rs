//! From tar to a local directory, where whoever made the archive is an enemy.
//!
//! Each entry is made relative to the descriptor of its parent, which was reached name by name from the directory's own
//! descriptor and through no link: there is no path that an archive, or somebody who moves directories meanwhile, could
//! lead astray. Links are made and never followed. Names that are absolute or hold `..`, hard links that lead out,
//! devices and pipes are refused; extension headers are bounded before they are read.

use std::{
    fs::{self, File, FileTimes, Permissions},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::{Buf as _, Bytes, BytesMut};
use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, Uid},
    io::Errno,
};
use sandbox_protocol::limits;
use tar::{Archive, Entry, PaxExtensions};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    sync::mpsc,
};

use crate::{error::Error, tasks};

/// Pieces of 256 KiB that wait for the thread that unpacks.
const PIECES: usize = 1;
/// Entries of one archive.
const ENTRIES: u64 = 1_000_000;
/// Bytes of one extension header (a long name, say).
const EXTENSION: u64 = 1024 * 1024;
/// Bytes of names of directories whose owner may not write there, which get their modes at the end.
const LATE: usize = 16 * 1024 * 1024;
/// Bytes that may follow the archive's own end (padding).
const TRAILING: u64 = 1024 * 1024;

/// What was unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Unpacked {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes of files.
    pub bytes: u64,
}

/// Unpacks a tar archive below a local directory, as [`Unpack`] with its defaults.
///
/// # Errors
/// As [`Unpack::reader`].
pub async fn unpack(archive: impl AsyncRead + Unpin, local: impl AsRef<Path>) -> Result<Unpacked, Error> {
    Unpack::new(local).reader(archive).await
}

/// Where and how an archive is unpacked.
#[derive(Debug, Clone)]
#[must_use = "nothing is unpacked until `reader` is called"]
pub struct Unpack {
    local: PathBuf,
    keep_owner: bool,
}

impl Unpack {
    /// Below this directory, which is made if missing; its parent is not.
    pub fn new(local: impl AsRef<Path>) -> Self {
        Self {
            local: local.as_ref().to_owned(),
            keep_owner: false,
        }
    }

    /// Keeps owners and set-id bits of the archive; for root.
    pub fn keep_owner(mut self) -> Self {
        self.keep_owner = true;
        self
    }

    /// Unpacks what a reader gives, to its end. Modes and times of files are kept, links stay links. Files and links
    /// that are there are replaced; a directory that is there stays and is merged into. What was unpacked before an
    /// error, or before the future was dropped, stays.
    ///
    /// # Errors
    /// ARCHIVE_REFUSED for what would land elsewhere, is no file, directory or link, or is no archive; kind `Local`
    /// where this side fails; the reader's own error.
    pub async fn reader(self, mut archive: impl AsyncRead + Unpin) -> Result<Unpacked, Error> {
        let (pieces, receiver) = mpsc::channel(PIECES);
        let worker = tasks::blocking(move || self.run(receiver));
        let fed = feed(&mut archive, &pieces).await;
        drop(pieces);
        let unpacked = worker
            .await
            .map_err(|error| Error::local("unpacking", io::Error::other(error)))?;
        match fed {
            // What the reader says is why there was no more to unpack.
            Err(error) => Err(Error::local("the archive cannot be read", error)),
            Ok(true) => unpacked,
            Ok(false) => {
                let unpacked = unpacked?;
                drain(archive).await?;
                Ok(unpacked)
            }
        }
    }

    fn run(self, pieces: mpsc::Receiver<Fed>) -> Result<Unpacked, Error> {
        let feed = Feed {
            pieces,
            piece: Bytes::new(),
            ended: false,
        };
        let mut tree = Tree::open(&self.local, self.keep_owner)?;
        tree.unpack(feed)?;
        Ok(tree.done)
    }
}

/// Passes the archive on to the thread. False: that has ended first.
async fn feed(archive: &mut (impl AsyncRead + Unpin), pieces: &mpsc::Sender<Fed>) -> io::Result<bool> {
    let mut piece = BytesMut::new();
    loop {
        piece.reserve(limits::CHUNK_IN);
        if archive.read_buf(&mut piece).await? == 0 {
            // A thread that has ended needs no end.
            pieces.send(Fed::End).await.ok();
            return Ok(true);
        }
        if pieces.send(Fed::Data(piece.split().freeze())).await.is_err() {
            return Ok(false);
        }
    }
}

/// Reads what follows an archive's own end, so that the reader's end is seen.
async fn drain(mut archive: impl AsyncRead + Unpin) -> Result<(), Error> {
    let mut piece = vec![0; 64 * 1024];
    let mut count = 0;
    loop {
        let read = archive.read(&mut piece).await;
        match read.map_err(|error| Error::local("the archive cannot be read", error))? {
            0 => return Ok(()),
            more => count += u64::try_from(more).unwrap_or(u64::MAX),
        }
        if count > TRAILING {
            return Err(Error::archive("it goes on behind its end".to_owned()));
        }
    }
}

#[derive(Debug)]
enum Fed {
    Data(Bytes),
    End,
}

/// The archive as the thread reads it. A feed that stops without its end was given up.
#[derive(Debug)]
struct Feed {
    pieces: mpsc::Receiver<Fed>,
    piece: Bytes,
    ended: bool,
}

impl io::Read for Feed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Fed::Data(piece)) => self.piece = piece,
                Some(Fed::End) => self.ended = true,
                None => return Err(io::Error::new(io::ErrorKind::BrokenPipe, "it was given up")),
            }
        }
        let count = self.piece.len().min(into.len());
        self.piece
            .copy_to_slice(into.get_mut(..count).unwrap_or_default());
        Ok(count)
    }
}

/// Part of a name of a stranger's, for a message.
fn shown(name: &[u8]) -> String {
    name.get(..256).unwrap_or(name).escape_ascii().to_string()
}

fn refused(name: &[u8], why: &str) -> Error {
    Error::archive(format!("entry \"{}\": {why}", shown(name)))
}

fn failed(name: &[u8], source: impl Into<io::Error>) -> Error {
    Error::local(format!("entry \"{}\"", shown(name)), source.into())
}

/// The names of a path, one by one; none for the directory itself.
fn components(path: &[u8]) -> Result<Vec<&[u8]>, Error> {
    if path.first() == Some(&b'/') {
        return Err(refused(path, "absolute names are refused"));
    }
    if path.len() > limits::PATH || path.contains(&0) {
        return Err(refused(path, "names have at most 4095 bytes, without NUL"));
    }
    let names = path.split(|byte| *byte == b'/');
    let names: Vec<&[u8]> = names.filter(|name| !name.is_empty() && *name != b".").collect();
    if names.contains(&&b".."[..]) {
        return Err(refused(path, "names with `..` are refused"));
    }
    Ok(names)
}

/// What extension headers said of the next entry.
#[derive(Debug, Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
}

impl Extended {
    /// Takes an extension header in, if the entry is one.
    fn take(&mut self, entry: &mut Entry<'_, Feed>) -> Result<bool, Error> {
        let kind = entry.header().entry_type();
        let extension = kind.is_gnu_longname()
            || kind.is_gnu_longlink()
            || kind.is_pax_local_extensions()
            || kind.is_pax_global_extensions();
        if !extension {
            return Ok(false);
        }
        if entry.size() > EXTENSION {
            return Err(Error::archive(
                "an extension header has more than 1 MiB".to_owned(),
            ));
        }
        let mut text = Vec::new();
        entry
            .read_to_end(&mut text)
            .map_err(|error| Error::local("the archive cannot be read", error))?;
        if kind.is_gnu_longname() {
            self.path = Some(without_nul(text));
        } else if kind.is_gnu_longlink() {
            self.link = Some(without_nul(text));
        } else if kind.is_pax_local_extensions() {
            self.pax(&text)?;
        }
        // Else a comment on the whole archive, of which nothing is wanted.
        Ok(true)
    }

    fn pax(&mut self, text: &[u8]) -> Result<(), Error> {
        for extension in PaxExtensions::new(text) {
            let extension =
                extension.map_err(|error| Error::archive(format!("an extension header: {error}")))?;
            match extension.key_bytes() {
                b"path" => self.path = Some(extension.value_bytes().to_vec()),
                b"linkpath" => self.link = Some(extension.value_bytes().to_vec()),
                b"size" => {
                    let size = extension.value().ok().and_then(|size| size.parse().ok());
                    let wrong = || Error::archive("an extension header: a size that is none".to_owned());
                    self.size = Some(size.ok_or_else(wrong)?);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn without_nul(mut text: Vec<u8>) -> Vec<u8> {
    if text.last() == Some(&0) {
        text.pop();
    }
    text
}

/// What an entry's file or directory shall be beside its content.
#[derive(Debug, Clone, Copy)]
struct Looks {
    mode: u32,
    owner: Option<(u32, u32)>,
    mtime: Option<SystemTime>,
}

impl Looks {
    fn of(entry: &Entry<'_, Feed>, keep_owner: bool) -> Result<Self, Error> {
        let wrong = |error: io::Error| Error::archive(error.to_string());
        let header = entry.header();
        // The sticky bit is of use on directories only, and harms nobody there.
        let kept = match (keep_owner, header.entry_type().is_dir()) {
            (true, _) => 0o7777,
            (false, true) => 0o1777,
            (false, false) => 0o777,
        };
        let id = |id: io::Result<u64>| {
            let id = u32::try_from(id.map_err(wrong)?);
            // The highest number stands for nobody at all.
            let id = id.ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| Error::archive("an owner that is none".to_owned()))
        };
        let owner = if keep_owner {
            Some((id(header.uid())?, id(header.gid())?))
        } else {
            None
        };
        let mtime = Duration::from_secs(header.mtime().map_err(wrong)?);
        Ok(Self {
            mode: header.mode().map_err(wrong)? & kept,
            owner,
            mtime: UNIX_EPOCH.checked_add(mtime),
        })
    }

    /// Owner first: a change of owner takes set-id bits away.
    fn put_on(self, file: &File, mode: u32) -> io::Result<()> {
        if let Some((user, group)) = self.owner {
            std::os::unix::fs::fchown(file, Some(user), Some(group))?;
        }
        file.set_permissions(Permissions::from_mode(mode))
    }
}

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const NEW_FILE: OFlags = OFlags::WRONLY
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// The directory that is unpacked into.
#[derive(Debug)]
struct Tree {
    root: Rc<OwnedFd>,
    /// It was made for this, so its mode is the archive's too.
    made: bool,
    root_mode: Option<u32>,
    keep_owner: bool,
    /// The parent of the entry before; the next one mostly has the same.
    parent: Option<(Vec<u8>, Rc<OwnedFd>)>,
    /// Directories whose modes would be in the way of what comes into them.
    late: Vec<(Vec<u8>, u32)>,
    late_bytes: usize,
    buffer: Vec<u8>,
    done: Unpacked,
}

impl Tree {
    fn open(local: &Path, keep_owner: bool) -> Result<Self, Error> {
        let wrong = |error: io::Error| Error::local(local.display(), error);
        let made = match fs::create_dir(local) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(wrong(error)),
        };
        // The caller's own path: links in it are the caller's too.
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(local, flags, Mode::empty()).map_err(|error| wrong(error.into()))?;
        Ok(Self {
            root: Rc::new(root),
            made,
            root_mode: None,
            keep_owner,
            parent: None,
            late: Vec::new(),
            late_bytes: 0,
            buffer: vec![0; 64 * 1024],
            done: Unpacked::default(),
        })
    }

    fn unpack(&mut self, feed: Feed) -> Result<(), Error> {
        let unreadable = |error: io::Error| {
            if error.kind() == io::ErrorKind::BrokenPipe {
                Error::local("the archive", error)
            } else {
                Error::archive(error.to_string())
            }
        };
        let mut archive = Archive::new(feed);
        let mut extended = Extended::default();
        // Raw: what extends a header comes as it is, so that it is bounded before it is read.
        for entry in archive.entries().map_err(unreadable)?.raw(true) {
            let mut entry = entry.map_err(unreadable)?;
            if extended.take(&mut entry)? {
                continue;
            }
            self.done.entries += 1;
            if self.done.entries > ENTRIES {
                return Err(Error::archive("it has more than 1,000,000 entries".to_owned()));
            }
            self.add(&mut entry, std::mem::take(&mut extended))?;
        }
        self.finish()
    }

    fn add(&mut self, entry: &mut Entry<'_, Feed>, extended: Extended) -> Result<(), Error> {
        let path = extended.path;
        let name = path.unwrap_or_else(|| entry.header().path_bytes().into_owned());
        if extended.size.is_some_and(|size| size != entry.size()) {
            return Err(refused(&name, "its two sizes differ"));
        }
        let names = components(&name)?;
        let kind = entry.header().entry_type();
        if kind.is_dir() {
            let looks = Looks::of(entry, self.keep_owner)?;
            return self.directory(&name, &names, looks);
        }
        let Some((last, above)) = names.split_last() else {
            return Err(refused(&name, "it stands for the directory itself"));
        };
        let parent = self.enter(above, &name)?;
        if kind.is_file() || kind.is_contiguous() {
            let looks = Looks::of(entry, self.keep_owner)?;
            return self.file(entry, (&parent, last), &name, looks);
        }
        let target = extended.link;
        let target = target.or_else(|| entry.header().link_name_bytes().map(std::borrow::Cow::into_owned));
        let target = target.unwrap_or_default();
        if kind.is_symlink() {
            if target.is_empty() || target.len() > limits::PATH || target.contains(&0) {
                return Err(refused(&name, "a link leads to 1 to 4095 bytes, without NUL"));
            }
            clear(&parent, last, &name)?;
            rustix::fs::symlinkat(target.as_slice(), &parent, *last).map_err(|error| failed(&name, error))?;
            self.own_link(entry, (&parent, last), &name)
        } else if kind.is_hard_link() {
            let names = components(&target)?;
            let Some((target_last, above)) = names.split_last() else {
                return Err(refused(&name, "a hard link leads to a file of the archive"));
            };
            let from = self.enter(above, &target)?;
            clear(&parent, last, &name)?;
            // Of a link, the link itself.
            rustix::fs::linkat(&from, *target_last, &parent, *last, AtFlags::empty())
                .map_err(|error| failed(&name, error))
        } else {
            Err(refused(&name, "only files, directories and links are unpacked"))
        }
    }

    /// The directory of these names, reached through no link; made if missing.
    fn enter(&mut self, names: &[&[u8]], whole: &[u8]) -> Result<Rc<OwnedFd>, Error> {
        let key = names.join(&b'/');
        if let Some((known, parent)) = &self.parent
            && *known == key
        {
            return Ok(Rc::clone(parent));
        }
        let mut at = Rc::clone(&self.root);
        for name in names {
            let below = match rustix::fs::openat(&at, *name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => {
                    rustix::fs::mkdirat(&at, *name, Mode::from_raw_mode(0o755))
                        .map_err(|error| failed(whole, error))?;
                    rustix::fs::openat(&at, *name, DIRECTORY, Mode::empty())
                }
                opened => opened,
            };
            at = Rc::new(below.map_err(|error| match error {
                Errno::LOOP | Errno::NOTDIR => refused(whole, "it leads through a link or a file"),
                other => failed(whole, other),
            })?);
        }
        self.parent = Some((key, Rc::clone(&at)));
        Ok(at)
    }

    fn directory(&mut self, name: &[u8], names: &[&[u8]], looks: Looks) -> Result<(), Error> {
        let Some((last, above)) = names.split_last() else {
            self.root_mode = self.made.then_some(looks.mode);
            return Ok(());
        };
        let parent = self.enter(above, name)?;
        let made = match rustix::fs::mkdirat(&parent, *last, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(failed(name, error)),
        };
        let directory = rustix::fs::openat(&parent, *last, DIRECTORY, Mode::empty());
        let directory = directory.map_err(|error| match error {
            Errno::LOOP | Errno::NOTDIR => failed(name, io::Error::from(io::ErrorKind::NotADirectory)),
            other => failed(name, other),
        })?;
        // One that was there is the caller's and stays as it is.
        if !made {
            return Ok(());
        }
        let now = looks.mode | 0o700;
        looks
            .put_on(&File::from(directory), now)
            .map_err(|error| failed(name, error))?;
        if now != looks.mode {
            self.late_bytes = self.late_bytes.saturating_add(name.len());
            if self.late_bytes > LATE {
                return Err(refused(name, "too many directories that nobody may write to"));
            }
            self.late.push((name.to_owned(), looks.mode));
        }
        Ok(())
    }

    fn file(
        &mut self,
        entry: &mut Entry<'_, Feed>,
        (parent, last): (&OwnedFd, &[u8]),
        name: &[u8],
        looks: Looks,
    ) -> Result<(), Error> {
        clear(parent, last, name)?;
        let file = rustix::fs::openat(parent, last, NEW_FILE, Mode::RUSR | Mode::WUSR);
        let file = File::from(file.map_err(|error| failed(name, error))?);
        let written = self.content(entry, &file, name).and_then(|()| {
            let dressed = looks.put_on(&file, looks.mode).and_then(|()| match looks.mtime {
                Some(mtime) => file.set_times(FileTimes::new().set_modified(mtime)),
                None => Ok(()),
            });
            dressed.map_err(|error| failed(name, error))
        });
        if written.is_err() {
            // A part of a file is no file; the error is told in any case.
            rustix::fs::unlinkat(parent, last, AtFlags::empty()).ok();
        }
        written
    }

    fn content(&mut self, entry: &mut Entry<'_, Feed>, mut file: &File, name: &[u8]) -> Result<(), Error> {
        let mut left = entry.size();
        while left > 0 {
            let count = entry
                .read(&mut self.buffer)
                .map_err(|error| Error::local("the archive cannot be read", error))?;
            if count == 0 {
                return Err(refused(name, "the archive ends in the middle of it"));
            }
            let piece = self.buffer.get(..count).unwrap_or_default();
            file.write_all(piece).map_err(|error| failed(name, error))?;
            let count = u64::try_from(count).unwrap_or(u64::MAX);
            left = left.saturating_sub(count);
            self.done.bytes = self.done.bytes.saturating_add(count);
        }
        Ok(())
    }

    fn own_link(
        &self,
        entry: &Entry<'_, Feed>,
        (parent, last): (&OwnedFd, &[u8]),
        name: &[u8],
    ) -> Result<(), Error> {
        let Some((user, group)) = Looks::of(entry, self.keep_owner)?.owner else {
            return Ok(());
        };
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        rustix::fs::chownat(parent, last, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| failed(name, error))
    }

    /// Modes that were put off, what lies deeper first.
    fn finish(&mut self) -> Result<(), Error> {
        for (name, mode) in std::mem::take(&mut self.late).into_iter().rev() {
            let names = components(&name)?;
            let directory = self.enter(&names, &name)?;
            rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode))
                .map_err(|error| failed(&name, error))?;
        }
        if let Some(mode) = self.root_mode {
            rustix::fs::fchmod(&self.root, Mode::from_raw_mode(mode)).map_err(|error| failed(b".", error))?;
        }
        Ok(())
    }
}

/// Makes room for a file or link: what has its name goes, unless it is a directory.
fn clear(parent: &OwnedFd, last: &[u8], name: &[u8]) -> Result<(), Error> {
    match rustix::fs::unlinkat(parent, last, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(failed(name, error)),
    }
}
