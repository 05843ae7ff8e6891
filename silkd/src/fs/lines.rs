//! A file that is read for its lines: by blocks, and no further once nobody waits.

use std::{cell::Cell, io, os::fd::OwnedFd};

use grep_searcher::{BinaryDetection, Searcher, SearcherBuilder};
use rustix::io::{Errno, pread};

use super::workers::Cancel;

/// Longest line, and with it all that a search holds of a file.
const LINE: usize = 1024 * 1024;

/// What searches, with so many lines around each match.
pub(super) fn searcher(context: usize) -> Searcher {
    SearcherBuilder::new()
        .line_number(true)
        .bom_sniffing(false)
        .heap_limit(Some(LINE))
        .before_context(context)
        .after_context(context)
        .binary_detection(BinaryDetection::quit(0))
        .build()
}

/// What goes through files line by line, lines that do not match among them if `all`.
pub(super) fn liner(all: bool) -> Searcher {
    SearcherBuilder::new()
        .line_number(false)
        .bom_sniffing(false)
        .heap_limit(Some(LINE))
        .passthru(all)
        .binary_detection(BinaryDetection::quit(0))
        .build()
}

/// Bytes that are read on when there is something to tell.
const ON: u64 = 4 * 1024 * 1024;

/// How the reading of a file goes.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Reading fails, or nobody waits. Any other failure of a search is a line that is too long.
    pub(super) broken: Cell<bool>,
    /// There is something to tell.
    pub(super) found: Cell<bool>,
    /// Reading rests, so that it is told.
    pub(super) rests: Cell<bool>,
    read: Cell<u64>,
}

/// A file from an offset on.
#[derive(Debug)]
pub(super) struct Blocks<'a> {
    file: &'a OwnedFd,
    at: u64,
    cancel: &'a Cancel,
    pace: &'a Pace,
}

impl<'a> Blocks<'a> {
    pub(super) const fn new(file: &'a OwnedFd, at: u64, cancel: &'a Cancel, pace: &'a Pace) -> Self {
        Self {
            file,
            at,
            cancel,
            pace,
        }
    }

    fn stop(&self, why: &Cell<bool>) -> io::Error {
        why.set(true);
        io::ErrorKind::ConnectionAborted.into()
    }
}

impl io::Read for Blocks<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_set() {
            return Err(self.stop(&self.pace.broken));
        }
        if self.pace.found.get() && self.pace.read.get() > ON {
            return Err(self.stop(&self.pace.rests));
        }
        let read = loop {
            match pread(self.file, &mut *into, self.at) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break 0,
                other => break other.inspect_err(|_errno| self.pace.broken.set(true))?,
            }
        };
        let count = u64::try_from(read).unwrap_or(0);
        self.at = self.at.saturating_add(count);
        self.pace.read.set(self.pace.read.get().saturating_add(count));
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use grep_regex::RegexMatcher;
    use grep_searcher::{Sink, SinkMatch};

    use super::*;

    /// Cancels at the first match, and notes how far the file was read by then.
    struct Leaves<'a> {
        cancel: &'a Cancel,
        pace: &'a Pace,
        read: Option<u64>,
    }

    impl Sink for Leaves<'_> {
        type Error = io::Error;

        fn matched(&mut self, _searcher: &Searcher, _found: &SinkMatch<'_>) -> Result<bool, io::Error> {
            self.cancel.set();
            self.read.get_or_insert(self.pace.read.get());
            Ok(true)
        }
    }

    #[test]
    fn a_cancel_is_noticed_within_a_block() {
        use std::io::Write as _;
        let mut file = tempfile::tempfile().unwrap();
        let block = "a line of straw, and then a needle\n".repeat(8_000);
        for _ in 0..8 {
            file.write_all(block.as_bytes()).unwrap();
        }
        let size = 8 * u64::try_from(block.len()).unwrap();
        let file = OwnedFd::from(file);
        let search = |mut searcher: Searcher, cancels: bool| {
            let (cancel, pace) = (Cancel::default(), Pace::default());
            let unheard = Cancel::default();
            let mut sink = Leaves {
                cancel: if cancels { &cancel } else { &unheard },
                pace: &pace,
                read: None,
            };
            let blocks = Blocks::new(&file, 0, &cancel, &pace);
            let searched = searcher.search_reader(RegexMatcher::new("needle").unwrap(), blocks, &mut sink);
            let at = sink.read.unwrap();
            (searched.is_ok(), at, pace.read.get(), pace.broken.get())
        };
        for how in [|| searcher(0), || searcher(3), || liner(false), || liner(true)] {
            let (whole, at, read, broken) = search(how(), false);
            assert_eq!((whole, read, broken), (true, size, false));
            assert!(at < size, "it was seen before all was read: {at}");
            // Not one block more than there were when it came.
            assert_eq!(search(how(), true), (false, at, at, true));
        }
    }
}
