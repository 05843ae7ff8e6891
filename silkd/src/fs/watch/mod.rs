//! Watches: what changes below a directory, told as it comes, and every loss told too.
//!
//! The kernel tells of one directory at a time, so each directory of a tree is armed by itself (`tree`), and always
//! before it is looked through: what comes into being meanwhile is told at least once. What the kernel says becomes
//! messages in steps (`events`), which a task takes out of its queue whether the client reads or not (`stream`): an
//! unread watch holds neither our memory nor the kernel's.
//!
//! May call: fs/*, refusal, sys, tasks.
//! Never inside: a directory that is held open between steps: the kernel tells of its removal when nobody has it open.

mod events;
mod stream;
mod tree;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use globset::GlobSet;
use sandbox_protocol::{
    limits::{WATCH_DIRECTORIES, WATCHES},
    reason::Reason,
    v1::AgentWatchRequest,
};

pub(super) use self::stream::watch;
use super::{globs::globs, open::Wanted};
use crate::refusal::Refusal;

/// A request, checked.
#[derive(Debug)]
pub(super) struct Plan {
    wanted: Wanted,
    recursive: bool,
    exclude: GlobSet,
}

impl Plan {
    /// Pure.
    pub(super) fn new(request: &AgentWatchRequest) -> Result<Self, Refusal> {
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            recursive: request.recursive,
            exclude: globs(&request.exclude)?,
        })
    }
}

/// What all watches of a guest take.
#[derive(Debug, Clone, Default)]
pub(super) struct Taken(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    watches: AtomicUsize,
    directories: AtomicUsize,
}

impl Taken {
    /// A place for a watch.
    ///
    /// # Errors
    /// `WATCH_LIMIT`.
    pub(super) fn seat(&self) -> Result<Seat, Refusal> {
        if !grow(&self.0.watches, WATCHES) {
            return Err(limit(&format!("{WATCHES} watches are open")));
        }
        Ok(Seat {
            taken: self.clone(),
            directories: 0,
        })
    }
}

fn grow(count: &AtomicUsize, most: usize) -> bool {
    let more = |now: usize| (now < most).then_some(now + 1);
    count
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
        .is_ok()
}

fn limit(what: &str) -> Refusal {
    Refusal::new(Reason::WatchLimit, what)
}

/// The place of one watch, with its directories; free again when dropped.
#[derive(Debug)]
pub(super) struct Seat {
    taken: Taken,
    directories: usize,
}

impl Seat {
    /// One directory more.
    fn more(&mut self) -> Result<(), Refusal> {
        if !grow(&self.taken.0.directories, WATCH_DIRECTORIES) {
            return Err(limit(&format!("{WATCH_DIRECTORIES} directories are watched")));
        }
        self.directories += 1;
        Ok(())
    }

    /// So many are left.
    fn keep(&mut self, directories: usize) {
        let gone = self.directories.saturating_sub(directories);
        self.taken.0.directories.fetch_sub(gone, Ordering::AcqRel);
        self.directories -= gone;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.keep(0);
        self.taken.0.watches.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_run_out_and_come_back() {
        let taken = Taken::default();
        let mut seats: Vec<Seat> = (0..WATCHES).map(|_| taken.seat().unwrap()).collect();
        assert_eq!(taken.seat().unwrap_err().reason, Reason::WatchLimit);
        let (first, second) = seats.split_at_mut(1);
        for _ in 0..WATCH_DIRECTORIES {
            first[0].more().unwrap();
        }
        assert_eq!(second[0].more().unwrap_err().reason, Reason::WatchLimit);
        first[0].keep(10);
        second[0].more().unwrap();
        seats.clear();
        let mut seat = taken.seat().unwrap();
        for _ in 0..WATCH_DIRECTORIES {
            seat.more().unwrap();
        }
    }
}
