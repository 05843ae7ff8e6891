//! Replace: in all files, or in none.
//!
//! Every file that changes is written anew beside itself first. Then each changes places with its new content, one after
//! the other; when one of them cannot, those before it change back.

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::fd::OwnedFd,
};

use grep_matcher::{Captures as _, Matcher, NoError};
use grep_regex::RegexMatcher;
use grep_searcher::{Searcher, Sink, SinkContext, SinkFinish, SinkMatch};
use rustix::{
    fs::{AtFlags, Mode, OFlags, RenameFlags, ResolveFlags, Stat, fstat, openat2, renameat_with, unlinkat},
    io::Errno,
};
use sandbox_protocol::{
    reason::Reason,
    v1::{AgentReplaceRequest, FindSkipped, ReplaceDone, ReplaceFile, ReplaceOut, replace_out::M},
};

use super::{
    choose::Choice,
    errno::{About, field, refuse, refused},
    find::open_seen,
    lines::{Blocks, Pace, liner},
    open::{Spot, Wanted, open_child},
    pattern::compile,
    stat::{is_dir, is_plain, mtime},
    steps::{Made, Produce},
    temp::{PREFIX, Temp},
    walk::Walk,
    workers::{Cancel, as_silkd},
    write::like_old,
};
use crate::refusal::Refusal;

/// Files of one request that change.
const FILES: usize = 10_000;
/// Paths of one request.
const PATHS: usize = 256;
/// Longest replacement.
const REPLACEMENT: usize = 64 * 1024;
/// Bytes that wait to be written, at most: what one line may become.
const LINE_OUT: usize = 4 * 1024 * 1024;
/// Bytes of new content that are written at once.
const BLOCK: usize = 64 * 1024;

/// A request, checked but for its pattern, which takes a thread's time.
#[derive(Debug)]
pub(super) struct Plan {
    roots: Vec<Wanted>,
    request: AgentReplaceRequest,
    uid: u32,
}

impl Plan {
    /// Pure.
    pub(super) fn new(request: AgentReplaceRequest, uid: u32) -> Result<Self, Refusal> {
        if request.paths.is_empty() || request.paths.len() > PATHS {
            return Err(field("paths: 1 to 256"));
        }
        if request.replacement.len() > REPLACEMENT || request.replacement.contains(&b'\n') {
            return Err(field("replacement: at most 65,536 bytes, within one line"));
        }
        let roots = request.paths.iter();
        let roots = roots.map(|path| Wanted::new(path, request.resolve.as_ref()));
        Ok(Self {
            roots: roots.collect::<Result<_, _>>()?,
            request,
            uid,
        })
    }
}

/// A file that is going to change.
#[derive(Debug)]
struct Change {
    /// Below which root; its path from there.
    root: usize,
    path: Vec<u8>,
    /// The name of the new content, beside it. After the change, of the old one.
    temp: Vec<u8>,
    old: Box<Stat>,
    replacements: u64,
    /// The temp is there.
    staged: bool,
}

/// Directories that paths are told from; held open, so that they are what they were.
#[derive(Debug)]
struct Root {
    dir: OwnedFd,
    /// What a client knows it by, a slash at its end; for a file that was named, what it was named.
    shown: Vec<u8>,
    /// A file was named, and this is where it is.
    file: bool,
}

/// All that is staged. Dropped, what is beside the files is removed.
#[derive(Debug)]
struct Changes {
    roots: Vec<Root>,
    all: Vec<Change>,
    /// Device and inode of all that was looked at and changes: no file twice, by whatever path.
    files: HashSet<(u64, u64)>,
    skipped: FindSkipped,
}

/// The work, which is one step, and then what it has to tell.
#[derive(Debug)]
pub(super) struct Replacer {
    out: VecDeque<ReplaceOut>,
}

impl Replacer {
    pub(super) fn open(plan: &Plan, cancel: &Cancel) -> Result<Self, Refusal> {
        let request = &plan.request;
        let work = Work {
            matcher: compile(&request.pattern, request.fixed, request.ignore_case)?,
            replacement: &request.replacement,
            fixed: request.fixed,
            dry: request.dry_run,
            uid: plan.uid,
            cancel,
        };
        let mut changes = Changes {
            roots: Vec::new(),
            all: Vec::new(),
            files: HashSet::new(),
            skipped: FindSkipped::default(),
        };
        for wanted in &plan.roots {
            let mut choice = Choice::new(&request.globs, request.hidden, request.respect_gitignore)?;
            work.stage_root(wanted, &mut choice, &mut changes)?;
        }
        if !request.dry_run {
            changes.land()?;
        }
        Ok(Self { out: changes.told() })
    }
}

impl Produce for Replacer {
    type Item = ReplaceOut;

    fn next(&mut self, cancel: &Cancel) -> Result<Made<ReplaceOut>, Refusal> {
        cancel.check()?;
        Ok(self.out.pop_front().map_or(Made::End, Made::Item))
    }
}

struct Work<'a> {
    matcher: RegexMatcher,
    replacement: &'a [u8],
    fixed: bool,
    dry: bool,
    uid: u32,
    cancel: &'a Cancel,
}

impl Work<'_> {
    fn stage_root(&self, wanted: &Wanted, choice: &mut Choice, changes: &mut Changes) -> Result<(), Refusal> {
        let fail = |errno| wanted.failed("search", errno);
        let found = wanted.look(true)?;
        if !is_dir(&found.stat) {
            // Through a link, to the file itself.
            let (spot, found) = wanted.target(false)?;
            let found = found.ok_or_else(|| fail(Errno::NOENT))?;
            wanted.plain(&found.stat)?;
            changes.roots.push(Root {
                dir: open_child(&spot.parent, b".").map_err(fail)?,
                shown: wanted.path().to_vec(),
                file: true,
            });
            let file = found.reopen(OFlags::RDONLY).map_err(fail)?;
            return self.stage(&spot.name, &file, &spot.parent, &spot.name, changes);
        }
        let dir = open_child(&found.fd, b".").map_err(fail)?;
        choice.enter(&dir, b"", 0);
        let mut walk = Walk::new(open_child(&dir, b".").map_err(fail)?).map_err(fail)?;
        let mut shown = wanted.path().to_vec();
        shown.push(b'/');
        changes.roots.push(Root {
            dir,
            shown,
            file: false,
        });
        while let Some(seen) = choice.next(&mut walk) {
            self.cancel.check()?;
            if is_plain(&seen.stat) && !seen.name.starts_with(PREFIX.as_bytes()) {
                match (open_seen(&walk, &seen), walk.dir()) {
                    (Some(file), Some(dir)) => self.stage(&seen.path, &file, dir, &seen.name, changes)?,
                    (None, _) | (_, None) => changes.skipped.unreadable += 1,
                }
            }
        }
        changes.skipped.unreadable += walk.unreadable;
        Ok(())
    }

    /// Writes a file's new content beside it, if anything changes.
    fn stage(
        &self,
        path: &[u8],
        file: &OwnedFd,
        dir: &OwnedFd,
        name: &[u8],
        changes: &mut Changes,
    ) -> Result<(), Refusal> {
        let root = changes.roots.len() - 1;
        let fail = |tried: &str, errno, changes: &Changes| {
            refuse(errno, About::File, tried, &changes.shown(root, path))
        };
        let old = fstat(file).map_err(|errno| fail("look at", errno, changes))?;
        // The same file by another path.
        if changes.files.contains(&(old.st_dev, old.st_ino)) {
            return Ok(());
        }
        let replacements = match self.pass(file, None) {
            Outcome::Replaced(0) => return Ok(()),
            Outcome::Replaced(count) => count,
            outcome @ (Outcome::Binary | Outcome::Long | Outcome::Unreadable | Outcome::Full(_)) => {
                outcome.count(&mut changes.skipped);
                self.cancel.check()?;
                return Ok(());
            }
        };
        if changes.all.len() == FILES {
            return Err(field("more than 10,000 files would change"));
        }
        let mut change = Change {
            root,
            path: path.to_vec(),
            temp: Vec::new(),
            old: Box::new(old),
            replacements,
            staged: false,
        };
        if !self.dry {
            let parent = dir
                .try_clone()
                .map_err(|_full| fail("stage", Errno::MFILE, changes))?;
            let spot = Spot {
                parent,
                name: name.to_vec(),
            };
            may_write(&spot).map_err(|errno| fail("write to", errno, changes))?;
            let temp = Temp::beside(&spot);
            let mut temp = temp.map_err(|errno| fail("make a file beside", errno, changes))?;
            match self.pass(file, Some(&temp.file)) {
                Outcome::Replaced(count) => change.replacements = count,
                Outcome::Full(errno) => return Err(fail("write", errno, changes)),
                Outcome::Binary | Outcome::Long | Outcome::Unreadable => {
                    self.cancel.check()?;
                    return Err(changed(&changes.shown(root, path)));
                }
            }
            like_old(&temp.file, &change.old, self.uid)
                .map_err(|errno| fail("keep owner and mode of", errno, changes))?;
            // From here on the list knows it.
            temp.there = false;
            change.temp.clone_from(&temp.spot.name);
            change.staged = true;
        }
        changes.files.insert((old.st_dev, old.st_ino));
        changes.all.push(change);
        Ok(())
    }

    /// Goes through a file once, and writes what comes of it.
    fn pass(&self, file: &OwnedFd, to: Option<&OwnedFd>) -> Outcome {
        let pace = Pace::default();
        let mut lines = Lines {
            work: self,
            to,
            out: Vec::new(),
            count: 0,
            full: None,
            long: false,
            binary: false,
        };
        let blocks = Blocks::new(file, 0, self.cancel, &pace);
        // Lines that do not match come along only where they are wanted.
        let searched = liner(to.is_some()).search_reader(&self.matcher, blocks, &mut lines);
        let flushed = lines.flush();
        match (searched, lines.full) {
            (_, Some(errno)) => Outcome::Full(errno),
            _ if lines.binary => Outcome::Binary,
            _ if lines.long => Outcome::Long,
            (Err(_), None) if pace.broken.get() => Outcome::Unreadable,
            (Err(_), None) => Outcome::Long,
            (Ok(()), None) => match flushed {
                Ok(()) => Outcome::Replaced(lines.count),
                Err(errno) => Outcome::Full(errno),
            },
        }
    }
}

/// What came of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Replaced(u64),
    Binary,
    Long,
    Unreadable,
    /// The new content could not be written.
    Full(Errno),
}

impl Outcome {
    fn count(self, skipped: &mut FindSkipped) {
        match self {
            Self::Binary => skipped.binary += 1,
            Self::Long => skipped.line_too_long += 1,
            Self::Unreadable => skipped.unreadable += 1,
            Self::Replaced(_) | Self::Full(_) => {}
        }
    }
}

/// Takes the lines of one pass.
struct Lines<'a> {
    work: &'a Work<'a>,
    to: Option<&'a OwnedFd>,
    out: Vec<u8>,
    count: u64,
    full: Option<Errno>,
    /// A line would become longer than anything may.
    long: bool,
    binary: bool,
}

impl Lines<'_> {
    /// A line with its end, in which something matches.
    fn replace(&mut self, line: &[u8]) {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let (work, count, long) = (self.work, &mut self.count, &mut self.long);
        let mut fits = |out: &Vec<u8>| {
            *count += 1;
            *long = out.len() > LINE_OUT;
            !*long
        };
        let replaced = if work.fixed {
            work.matcher.replace(text, &mut self.out, |_, out| {
                out.extend_from_slice(work.replacement);
                fits(out)
            })
        } else {
            work.matcher.new_captures().and_then(|mut captures| {
                work.matcher
                    .replace_with_captures(text, &mut captures, &mut self.out, |captures, out| {
                        captures.interpolate(
                            |name| work.matcher.capture_index(name),
                            text,
                            work.replacement,
                            out,
                        );
                        fits(out)
                    })
            })
        };
        match replaced {
            Ok(()) => self
                .out
                .extend_from_slice(line.get(text.len()..).unwrap_or_default()),
            Err(never) => {
                let _: NoError = never;
            }
        }
    }

    /// Writes what is there, if there is somewhere to.
    fn flush(&mut self) -> Result<(), Errno> {
        let mut rest = self.out.as_slice();
        while let Some(to) = self.to.filter(|_| !rest.is_empty()) {
            match rustix::io::write(to, rest) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        self.out.clear();
        Ok(())
    }

    fn more(&mut self) -> bool {
        if self.out.len() >= BLOCK
            && let Err(errno) = self.flush()
        {
            self.full = Some(errno);
        }
        self.full.is_none() && !self.long
    }
}

impl Sink for Lines<'_> {
    type Error = io::Error;

    fn matched(&mut self, _searcher: &Searcher, found: &SinkMatch<'_>) -> Result<bool, io::Error> {
        self.replace(found.bytes());
        Ok(self.more())
    }

    /// A line that does not match.
    fn context(&mut self, _searcher: &Searcher, found: &SinkContext<'_>) -> Result<bool, io::Error> {
        self.out.extend_from_slice(found.bytes());
        Ok(self.more())
    }

    fn finish(&mut self, _searcher: &Searcher, end: &SinkFinish) -> Result<(), io::Error> {
        self.binary = end.binary_byte_offset().is_some();
        Ok(())
    }
}

impl Change {
    fn is(&self, stat: &Stat) -> bool {
        (self.old.st_dev, self.old.st_ino) == (stat.st_dev, stat.st_ino)
    }

    /// The same file, with the same content, as far as its times say.
    fn is_unchanged(&self, stat: &Stat) -> bool {
        self.is(stat) && (self.old.st_size, mtime(&self.old)) == (stat.st_size, mtime(stat))
    }
}

impl Changes {
    fn shown(&self, root: usize, path: &[u8]) -> Vec<u8> {
        let Some(root) = self.roots.get(root) else {
            return path.to_vec();
        };
        let mut shown = root.shown.clone();
        if !root.file {
            shown.extend_from_slice(path);
        }
        shown
    }

    /// The directory that holds a file, and the file's name.
    fn spot(&self, change: &Change) -> Result<Spot, Errno> {
        let root = self.roots.get(change.root).ok_or(Errno::NOENT)?;
        let at = change
            .path
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(0, |at| at + 1);
        let (parent, name) = change.path.split_at_checked(at).ok_or(Errno::NOENT)?;
        let parent = if parent.is_empty() { b"." } else { parent };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let rule = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Ok(Spot {
            parent: openat2(&root.dir, parent, flags, Mode::empty(), rule)?,
            name: name.to_vec(),
        })
    }

    /// Lets a file and its new content change places.
    fn swap(&self, change: &Change) -> Result<(), Errno> {
        let spot = self.spot(change)?;
        let (temp, name) = (change.temp.as_slice(), spot.name.as_slice());
        renameat_with(&spot.parent, temp, &spot.parent, name, RenameFlags::EXCHANGE)
    }

    fn land(&self) -> Result<(), Refusal> {
        for (at, change) in self.all.iter().enumerate() {
            if let Err(refusal) = self.land_one(change) {
                return Err(self.put_back(at, refusal));
            }
        }
        Ok(())
    }

    fn land_one(&self, change: &Change) -> Result<(), Refusal> {
        let path = self.shown(change.root, &change.path);
        let fail = |errno| refuse(errno, About::File, "replace", &path);
        let now = self.spot(change).and_then(|spot| spot.stat()).map_err(fail)?;
        if !change.is_unchanged(&now) {
            return Err(changed(&path));
        }
        self.swap(change).map_err(fail)
    }

    /// Those that have changed change back.
    fn put_back(&self, landed: usize, mut refusal: Refusal) -> Refusal {
        let stuck = self
            .all
            .iter()
            .take(landed)
            .filter(|change| self.swap(change).is_err());
        let stuck = stuck.count();
        if stuck > 0 {
            refusal.message = format!("{}; {stuck} files could not be put back", refusal.message);
        }
        refusal
    }

    fn told(&self) -> VecDeque<ReplaceOut> {
        let mut done = ReplaceDone {
            skipped: Some(self.skipped),
            ..ReplaceDone::default()
        };
        let mut out = VecDeque::with_capacity(self.all.len() + 1);
        for change in &self.all {
            done.files += 1;
            done.replacements += change.replacements;
            let file = ReplaceFile {
                path: self.shown(change.root, &change.path).into(),
                replacements: change.replacements,
            };
            out.push_back(ReplaceOut {
                m: Some(M::File(file)),
            });
        }
        out.push_back(ReplaceOut {
            m: Some(M::Done(done)),
        });
        out
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        for change in self.all.iter().filter(|change| change.staged) {
            let remove = || {
                let spot = self.spot(change)?;
                unlinkat(&spot.parent, change.temp.as_slice(), AtFlags::empty())
            };
            // Somebody else may have removed it, or the directory with it.
            as_silkd(remove).ok();
        }
    }
}

/// Replacing a file takes the right to write to it, and not only to its directory.
fn may_write(spot: &Spot) -> Result<(), Errno> {
    match spot.look()?.reopen(OFlags::WRONLY) {
        // A program that runs can be replaced, though not written to.
        Ok(_) | Err(Errno::TXTBSY) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn changed(path: &[u8]) -> Refusal {
    refused(Reason::MtimeChanged, "was changed meanwhile", path)
}
