//! Find: lines that match, from any number of files of any size.
//!
//! A batch of lines ends a search in the middle of its file; the next one begins again at the last match, so that a
//! client that rests holds no thread.

use std::{cell::Cell, collections::VecDeque, io, os::fd::OwnedFd};

use grep_matcher::Matcher as _;
use grep_regex::RegexMatcher;
use grep_searcher::{Searcher, Sink, SinkContext, SinkFinish, SinkMatch};
use rustix::fs::{Mode, OFlags, fstat, openat};
use sandbox_protocol::v1::{AgentFindRequest, FindDone, FindLine, FindOut, FindSkipped, find_out::M};

use super::{
    choose::Choice,
    errno::field,
    lines::{Blocks, Pace, searcher},
    open::{Found, Wanted, open_child},
    pattern::compile,
    stat::{is_dir, is_plain},
    steps::{Made, Produce},
    walk::{Seen, Walk},
    workers::Cancel,
};
use crate::refusal::Refusal;

/// Lines around a match.
const CONTEXT: u32 = 10;
/// Bytes of a line that are told.
const TEXT: usize = 4096;
/// Bytes of lines after which a search rests; the lines before the next match come on top.
const BATCH: usize = 16 * 1024;

/// A request, checked but for its pattern, which takes a thread's time.
#[derive(Debug)]
pub(super) struct Plan {
    wanted: Wanted,
    request: AgentFindRequest,
}

impl Plan {
    /// Pure.
    pub(super) fn new(request: AgentFindRequest) -> Result<Self, Refusal> {
        if request.context > CONTEXT {
            return Err(field("context: at most 10"));
        }
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            request,
        })
    }
}

/// A search that is under way.
#[derive(Debug)]
pub(super) struct Finder {
    root: Vec<u8>,
    matcher: RegexMatcher,
    searcher: Searcher,
    choice: Choice,
    walk: Option<Walk>,
    file: Option<Searching>,
    ready: VecDeque<FindLine>,
    left: u64,
    /// `None` once it was told.
    done: Option<FindDone>,
    skipped: FindSkipped,
    over: bool,
}

/// A file that is being searched.
#[derive(Debug)]
struct Searching {
    file: OwnedFd,
    far: Far,
}

/// How far a file was searched.
#[derive(Debug)]
struct Far {
    path: Vec<u8>,
    /// Where the search begins again, and the number of the line there.
    from: u64,
    line: u64,
    /// Offset behind the beginning of the last line that was told.
    told: u64,
}

impl Finder {
    pub(super) fn open(plan: Plan) -> Result<Self, Refusal> {
        let request = plan.request;
        let matcher = compile(&request.pattern, request.fixed, request.ignore_case)?;
        let mut choice = Choice::new(&request.globs, request.hidden, request.respect_gitignore)?;
        let found = plan.wanted.look(true)?;
        let fail = |errno| plan.wanted.failed("search", errno);
        let mut root = plan.wanted.path().to_vec();
        let (walk, file) = if is_dir(&found.stat) {
            let dir = open_child(&found.fd, b".").map_err(fail)?;
            choice.enter(&dir, b"", 0);
            root.push(b'/');
            (Some(Walk::new(dir).map_err(fail)?), None)
        } else {
            plan.wanted.plain(&found.stat)?;
            let file = found.reopen(OFlags::RDONLY).map_err(fail)?;
            (None, Some(Searching::new(file, root.clone())))
        };
        Ok(Self {
            root,
            matcher,
            searcher: searcher(usize::try_from(request.context).unwrap_or(0)),
            choice,
            walk,
            file,
            ready: VecDeque::new(),
            left: match request.max_matches {
                0 => u64::MAX,
                most => most,
            },
            done: Some(FindDone::default()),
            skipped: FindSkipped::default(),
            over: false,
        })
    }

    /// Searches on until a batch is full, or a file is through.
    fn search(&mut self, mut at: Searching, cancel: &Cancel) -> Result<(), Refusal> {
        let pace = Pace::default();
        let mut done = self.done.take().unwrap_or_default();
        let mut lines = Lines {
            matcher: &self.matcher,
            from: (at.far.from, at.far.line),
            at: &mut at.far,
            ready: &mut self.ready,
            bytes: 0,
            left: &mut self.left,
            matches: &mut done.matches,
            rests: None,
            found: &pace.found,
            binary: false,
        };
        let blocks = Blocks::new(&at.file, lines.from.0, cancel, &pace);
        let searched = self.searcher.search_reader(&self.matcher, blocks, &mut lines);
        let (rests, binary) = (lines.rests, lines.binary);
        cancel.check()?;
        let done = self.done.insert(done);
        match (searched, rests) {
            (_, Some(Rest::Batch)) => {
                self.file = Some(at);
                return Ok(());
            }
            (Err(_rests), None) if pace.rests.get() => {
                self.file = Some(at);
                return Ok(());
            }
            (_, Some(Rest::Enough)) => {
                done.truncated = true;
                self.over = true;
            }
            (Ok(()), None) => {}
            (Err(_unreadable), None) if pace.broken.get() => self.skipped.unreadable += 1,
            (Err(_too_long), None) => self.skipped.line_too_long += 1,
        }
        self.skipped.binary += u64::from(binary);
        done.searched += 1;
        Ok(())
    }

    /// Goes on to the next file; false when there is none.
    fn advance(&mut self) -> bool {
        let Some(walk) = &mut self.walk else { return false };
        let Some(seen) = self.choice.next(walk) else {
            self.skipped.unreadable += walk.unreadable;
            return false;
        };
        if !is_plain(&seen.stat) {
            return true;
        }
        match open_seen(walk, &seen) {
            Some(file) => {
                let mut path = self.root.clone();
                path.extend_from_slice(&seen.path);
                self.file = Some(Searching::new(file, path));
            }
            None => self.skipped.unreadable += 1,
        }
        true
    }
}

/// Opens a file that was seen; `None` where that is not to be, or it is no plain file any more.
pub(super) fn open_seen(walk: &Walk, seen: &Seen) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = openat(walk.dir()?, seen.name.as_slice(), flags, Mode::empty()).ok()?;
    let stat = fstat(&fd).ok()?;
    if !is_plain(&stat) {
        return None;
    }
    Found { fd, stat }.reopen(OFlags::RDONLY).ok()
}

impl Searching {
    const fn new(file: OwnedFd, path: Vec<u8>) -> Self {
        let far = Far {
            path,
            from: 0,
            line: 1,
            told: 0,
        };
        Self { file, far }
    }
}

impl Produce for Finder {
    type Item = FindOut;

    fn next(&mut self, cancel: &Cancel) -> Result<Made<FindOut>, Refusal> {
        cancel.check()?;
        if let Some(line) = self.ready.pop_front() {
            return Ok(Made::Item(FindOut {
                m: Some(M::Line(line)),
            }));
        }
        if self.over {
            return Ok(self.done.take().map_or(Made::End, |mut done| {
                done.skipped = Some(self.skipped);
                Made::Item(FindOut {
                    m: Some(M::Done(done)),
                })
            }));
        }
        match self.file.take() {
            Some(file) => self.search(file, cancel)?,
            None => self.over = !self.advance(),
        }
        Ok(Made::Nothing)
    }
}

/// Why a search rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    Batch,
    Enough,
}

/// Takes the lines of one search.
struct Lines<'a> {
    matcher: &'a RegexMatcher,
    at: &'a mut Far,
    /// Where this search began: offset, line.
    from: (u64, u64),
    ready: &'a mut VecDeque<FindLine>,
    bytes: usize,
    left: &'a mut u64,
    matches: &'a mut u64,
    rests: Option<Rest>,
    found: &'a Cell<bool>,
    binary: bool,
}

impl Lines<'_> {
    /// Tells a line, unless an earlier search has.
    fn tell(&mut self, offset: u64, line: Option<u64>, bytes: &[u8], context: bool) -> bool {
        let offset = self.from.0.saturating_add(offset);
        if offset < self.at.told {
            return false;
        }
        self.at.told = offset + 1;
        let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let column = match self.matcher.find(text) {
            Ok(Some(found)) if !context => u64::try_from(found.start() + 1).unwrap_or(0),
            Ok(_) => 0,
            Err(never) => {
                let _: grep_matcher::NoError = never;
                0
            }
        };
        let cut = text.get(..TEXT);
        let told = FindLine {
            path: self.at.path.clone().into(),
            line: self.number(line),
            column,
            offset,
            text: bytes::Bytes::copy_from_slice(cut.unwrap_or(text)),
            cut: cut.is_some() && text.len() > TEXT,
            context,
        };
        self.bytes += told.text.len() + told.path.len();
        self.ready.push_back(told);
        true
    }

    fn number(&self, line: Option<u64>) -> u64 {
        self.from.1.saturating_add(line.unwrap_or(1)).saturating_sub(1)
    }
}

impl Sink for Lines<'_> {
    type Error = io::Error;

    fn matched(&mut self, _searcher: &Searcher, found: &SinkMatch<'_>) -> Result<bool, io::Error> {
        let offset = found.absolute_byte_offset();
        if !self.tell(offset, found.line_number(), found.bytes(), false) {
            return Ok(true);
        }
        self.at.from = self.from.0.saturating_add(offset);
        self.at.line = self.number(found.line_number());
        self.found.set(true);
        *self.matches += 1;
        *self.left -= 1;
        if *self.left == 0 {
            self.rests = Some(Rest::Enough);
        } else if self.bytes >= BATCH {
            self.rests = Some(Rest::Batch);
        }
        Ok(self.rests.is_none())
    }

    fn context(&mut self, _searcher: &Searcher, found: &SinkContext<'_>) -> Result<bool, io::Error> {
        self.tell(
            found.absolute_byte_offset(),
            found.line_number(),
            found.bytes(),
            true,
        );
        Ok(true)
    }

    fn finish(&mut self, _searcher: &Searcher, end: &SinkFinish) -> Result<(), io::Error> {
        self.binary = end.binary_byte_offset().is_some();
        Ok(())
    }
}
