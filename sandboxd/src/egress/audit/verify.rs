//! `sandboxd audit verify`: follows the chains that lie in a folder, beside a daemon that writes to them or not.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
};

use super::{
    AUDIT, USAGE,
    chain::{Checker, Fault, Head, LINE},
    folders,
    ledger::files,
};
use crate::journal::{HeadRow, Heads};

/// Faults that are told one by one, of each chain.
const TOLD: usize = 1_000;

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The file.
    pub file: PathBuf,
    /// Its line, from 1.
    pub line: u64,
    /// The line's number, where it can be read.
    pub seq: Option<u64>,
    /// What is wrong.
    pub fault: Fault,
}

/// What became of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// `audit` or `usage`.
    pub name: &'static str,
    /// Its files.
    pub files: usize,
    /// Lines that can be read.
    pub lines: u64,
    /// The first number that is there, and the last; both 0: there is none.
    pub numbers: (u64, u64),
    /// Numbers that stand for what was lost.
    pub lost: u64,
    /// Up to this number the chain itself says that lines were deleted, having outlived what is kept; 0: it does not.
    pub deleted: u64,
    /// Ends of a daemon that were no clean stop: up to 50 ms before each are in no line.
    pub unclean: u64,
    /// Bytes behind the last line: of one that is being written, or was when its daemon was killed.
    pub torn: u64,
    /// How far the journal knows it; none: nothing to compare with, so that a cut tail would not show.
    pub known: Option<u64>,
    /// What is wrong, at most a thousand.
    pub findings: Vec<Finding>,
    /// All that is wrong.
    pub faults: u64,
}

/// The head that a row of the journal has.
pub(super) fn head(row: &HeadRow) -> Option<Head> {
    let hash = row.hash.parse().ok()?;
    Some(Head { seq: row.seq, hash })
}

/// Follows the chains below `dir`: those of a state directory, or of files that were moved elsewhere. `heads`: how far the
/// journal knows them; read it before, so that a living daemon is never ahead of its files.
///
/// # Errors
/// The kernel's.
pub fn verify(dir: &Path, heads: &Heads) -> io::Result<Vec<Chain>> {
    let mut chains = Vec::new();
    for (name, below) in folders(dir) {
        let row = match name {
            AUDIT => heads.audit.as_ref(),
            _ => heads.usage.as_ref(),
        };
        let known = row.and_then(head);
        if below.is_dir() || known.is_some() {
            chains.push(chain(name, &below, known)?);
        }
    }
    if chains.is_empty() {
        for name in [AUDIT, USAGE] {
            let found = chain(name, dir, None)?;
            if found.files > 0 {
                chains.push(found);
            }
        }
    }
    Ok(chains)
}

fn chain(name: &'static str, dir: &Path, known: Option<Head>) -> io::Result<Chain> {
    let mut walk = Walk::new(known);
    let files = files(dir, name)?;
    for (at, path) in files.iter().enumerate() {
        walk.file(path, File::open(path)?, at + 1 == files.len())?;
    }
    Ok(walk.end(name, dir, files))
}

/// Follows the chain of one file, whose bytes may be anybody's.
///
/// # Errors
/// None but of memory: the bytes are there.
pub fn check(bytes: &[u8]) -> io::Result<Chain> {
    let mut walk = Walk::new(None);
    let path = PathBuf::from("input");
    walk.file(&path, bytes, true)?;
    Ok(walk.end(AUDIT, Path::new(""), vec![path]))
}

/// The way along a chain.
#[derive(Debug)]
struct Walk {
    checker: Checker,
    known: Option<Head>,
    lines: u64,
    torn: u64,
    findings: Vec<Finding>,
    faults: u64,
    /// The last line.
    last: u64,
}

impl Walk {
    fn new(known: Option<Head>) -> Self {
        Self {
            checker: Checker::new(known),
            known,
            lines: 0,
            torn: 0,
            findings: Vec::new(),
            faults: 0,
            last: 0,
        }
    }

    fn file(&mut self, path: &Path, file: impl io::Read, is_last: bool) -> io::Result<()> {
        let mut reader = BufReader::new(file);
        let most = u64::try_from(LINE).unwrap_or(u64::MAX);
        let mut line = Vec::new();
        self.last = 0;
        loop {
            line.clear();
            let n = reader.by_ref().take(most).read_until(b'\n', &mut line)?;
            if n == 0 {
                return Ok(());
            }
            self.last += 1;
            let whole = line.strip_suffix(b"\n");
            if whole.is_none() && n < LINE && is_last {
                self.torn = u64::try_from(n).unwrap_or(u64::MAX);
                return Ok(());
            }
            let (seq, fault) = self.checker.take(whole.unwrap_or(&line));
            self.lines += u64::from(seq.is_some());
            if let Some(fault) = fault {
                self.find(path, seq, fault);
            }
        }
    }

    fn find(&mut self, path: &Path, seq: Option<u64>, fault: Fault) {
        if let (Fault::Reordered, Some(seq)) = (&fault, seq) {
            self.is_there(seq);
        }
        self.faults += 1;
        if self.findings.len() < TOLD {
            self.findings.push(Finding {
                file: path.to_owned(),
                line: self.last,
                seq,
                fault,
            });
        }
    }

    /// A number that was missed turns up: it was moved, and not removed.
    fn is_there(&mut self, seq: u64) {
        let before = self.findings.len();
        self.findings.retain_mut(|finding| match &mut finding.fault {
            Fault::Removed { from, to } if *from == seq && *to == seq => false,
            Fault::Removed { from, .. } if *from == seq => {
                *from += 1;
                true
            }
            Fault::Removed { to, .. } if *to == seq => {
                *to -= 1;
                true
            }
            Fault::Removed { .. }
            | Fault::Unreadable
            | Fault::Edited
            | Fault::Reordered
            | Fault::Rewritten
            | Fault::CutTail { .. } => true,
        });
        let gone = before - self.findings.len();
        self.faults -= u64::try_from(gone).unwrap_or(0);
    }

    fn end(mut self, name: &'static str, dir: &Path, mut files: Vec<PathBuf>) -> Chain {
        if let Some(fault) = self.checker.end() {
            let count = files.len();
            let last = files.pop().unwrap_or_else(|| dir.to_owned());
            self.find(&last, None, fault);
            if count > 0 {
                files.push(last);
            }
        }
        Chain {
            name,
            files: files.len(),
            lines: self.lines,
            numbers: (self.checker.first.min(self.checker.last()), self.checker.last()),
            lost: self.checker.lost,
            deleted: self.checker.deleted,
            unclean: self.checker.unclean,
            torn: self.torn,
            known: self.known.map(|known| known.seq),
            findings: self.findings,
            faults: self.faults,
        }
    }
}
