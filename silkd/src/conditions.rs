//! Conditions: trouble of the guest, told and not hidden, each with count and last time.
//!
//! May call: clock, events, sys.
//! Never inside: a remedy.
//! Two kinds are counted by the kernel in the files of the group `work` and learned from inotify; pressure is looked at
//! when somebody asks.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::{
    fs::{inotify, statvfs},
    io::Errno,
    process::{Resource, getrlimit},
};
use sandbox_protocol::v1::Condition;
use tokio::io::Interest;

use crate::{clock, events::Events, sys};

/// The closed set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The kernel killed a program for want of memory.
    OomKill,
    /// A program could not be started: the group's limit of processes.
    PidsLimit,
    /// silkd has nine tenths of its descriptors in use.
    FdPressure,
    /// `/tmp` has less than a hundredth left.
    TmpFull,
    /// There is no cgroup to contain programs.
    NoContainment,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 5] = [
        Self::OomKill,
        Self::PidsLimit,
        Self::FdPressure,
        Self::TmpFull,
        Self::NoContainment,
    ];

    /// As the wire has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OomKill => "OOM_KILL",
            Self::PidsLimit => "PIDS_LIMIT",
            Self::FdPressure => "FD_PRESSURE",
            Self::TmpFull => "TMP_FULL",
            Self::NoContainment => "NO_CONTAINMENT",
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Entry {
    /// How often, as told to the host.
    count: u64,
    /// Is it so now? Only a change to yes counts again.
    holds: bool,
    last_at: Option<prost_types::Timestamp>,
}

/// The handle.
#[derive(Debug, Clone)]
pub struct Conditions {
    table: Arc<Mutex<[Entry; Kind::ALL.len()]>>,
    events: Events,
}

impl Conditions {
    /// An empty table; changes are told by `events`.
    #[must_use]
    pub fn new(events: Events) -> Self {
        Self {
            table: Arc::default(),
            events,
        }
    }

    fn change(&self, kind: Kind, change: impl FnOnce(&mut Entry) -> bool) {
        let told = {
            let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(entry) = table.get_mut(kind as usize) else {
                return;
            };
            if !change(entry) {
                return;
            }
            entry.last_at = Some(clock::timestamp(clock::wall()));
            condition(kind, entry)
        };
        self.events.condition(told);
    }

    /// The kernel's count of something; only growth is news.
    pub fn counted(&self, kind: Kind, total: u64) {
        self.change(kind, |entry| {
            let grown = total > entry.count;
            entry.count = entry.count.max(total);
            grown
        });
    }

    /// Whether something holds now.
    pub fn holds(&self, kind: Kind, now: bool) {
        self.change(kind, |entry| {
            let begins = now && !entry.holds;
            entry.holds = now;
            entry.count += u64::from(begins);
            begins
        });
    }

    /// Looks at what only a look can tell, then lists what was ever so.
    #[must_use]
    pub fn list(&self) -> Vec<Condition> {
        if let Some((used, of)) = descriptors() {
            self.holds(Kind::FdPressure, used.saturating_mul(10) >= of.saturating_mul(9));
        }
        if let Ok(tmp) = statvfs("/tmp") {
            // A file system without a size has nothing to fill.
            let full = tmp.f_blocks > 0 && tmp.f_bavail.saturating_mul(100) < tmp.f_blocks;
            self.holds(Kind::TmpFull, full);
        }
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        Kind::ALL
            .iter()
            .zip(table.iter())
            .filter(|(_, entry)| entry.count > 0)
            .map(|(kind, entry)| condition(*kind, entry))
            .collect()
    }

    /// Follows the counts of a group until dropped; ends early only where the kernel offers none.
    ///
    /// # Errors
    /// The kernel's, when it cannot be watched.
    pub async fn follow(self, work: PathBuf) -> io::Result<()> {
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        let files = [
            (work.join("memory.events"), "oom_kill", Kind::OomKill),
            (work.join("pids.events"), "max", Kind::PidsLimit),
        ];
        for (path, ..) in files.iter().filter(|(path, ..)| path.exists()) {
            inotify::add_watch(&watch, path.as_path(), inotify::WatchFlags::MODIFY)?;
        }
        let watch = sys::watch(watch, Interest::READABLE)?;
        loop {
            for (path, key, kind) in &files {
                if let Some(total) = count_in(path, key) {
                    self.counted(*kind, total);
                }
            }
            let mut ready = watch.readable().await?;
            drain(watch.get_ref())?;
            ready.clear_ready();
        }
    }
}

/// What the events say is read from the files; here they only have to go.
fn drain(watch: &OwnedFd) -> io::Result<()> {
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut reader = inotify::Reader::new(watch, &mut buffer);
    loop {
        match reader.next() {
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn condition(kind: Kind, entry: &Entry) -> Condition {
    Condition {
        name: kind.name().to_owned(),
        count: entry.count,
        last_at: entry.last_at,
    }
}

fn count_in(path: &Path, key: &str) -> Option<u64> {
    keyed(&std::fs::read_to_string(path).ok()?, key)
}

/// The number behind `key` in a flat keyed file of a cgroup. Pure.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find_map(|(name, number)| (name == key).then(|| number.trim().parse().ok())?)
}

/// Descriptors in use, and how many there may be.
fn descriptors() -> Option<(u64, u64)> {
    let of = getrlimit(Resource::Nofile).current?;
    let used = match std::fs::read_dir("/proc/self/fd") {
        Ok(numbers) => numbers.count().try_into().ok()?,
        // To look takes one, and there is none.
        Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => of,
        Err(_) => return None,
    };
    Some((used, of))
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, StreamExt as _};
    use sandbox_protocol::v1::control_event::Event;

    use super::*;

    #[test]
    fn keyed_files_are_read_by_their_whole_key() {
        let text = "low 0\noom 4\noom_kill 2\noom_group_kill 9\n";
        assert_eq!(keyed(text, "oom_kill"), Some(2));
        assert_eq!(keyed(text, "kill"), None);
        assert_eq!(keyed("max x\n", "max"), None);
    }

    #[test]
    fn what_holds_counts_once_and_what_grows_counts_again() {
        let events = Events::default();
        let conditions = Conditions::new(events.clone());
        let mut news = Box::pin(events.subscribe());
        let mut told = move || match news.next().now_or_never()??.event? {
            Event::Condition(condition) => Some((condition.name, condition.count)),
            Event::LogLine(_) | Event::Dropped(_) => None,
        };
        conditions.holds(Kind::NoContainment, true);
        conditions.holds(Kind::NoContainment, true);
        assert_eq!(told(), Some(("NO_CONTAINMENT".into(), 1)));
        assert_eq!(told(), None);
        conditions.counted(Kind::OomKill, 0);
        conditions.counted(Kind::OomKill, 3);
        conditions.counted(Kind::OomKill, 3);
        assert_eq!(told(), Some(("OOM_KILL".into(), 3)));
        assert_eq!(told(), None);
        let listed = conditions.list();
        assert!(listed.iter().all(|c| c.last_at.is_some()));
        assert!(listed.iter().any(|c| c.name == "OOM_KILL"));
    }

    #[tokio::test]
    async fn a_changed_count_is_told_without_being_asked() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.events");
        put(&file, "oom_kill 0\n");
        let events = Events::default();
        let mut news = Box::pin(events.subscribe());
        let follow = Conditions::new(events).follow(dir.path().to_owned());
        let change = async {
            tokio::task::yield_now().await;
            put(&file, "oom_kill 1\n");
            news.next().await.unwrap().event
        };
        tokio::select! {
            ended = follow => panic!("{ended:?}"),
            told = change => {
                let Some(Event::Condition(condition)) = told else { panic!("{told:?}") };
                assert_eq!((condition.name.as_str(), condition.count), ("OOM_KILL", 1));
            }
        }
    }

    fn put(path: &Path, text: &str) {
        use std::io::Write as _;
        let mut file = std::fs::File::create(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }
}
