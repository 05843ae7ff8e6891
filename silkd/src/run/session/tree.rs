//! What a command of a session started, and what was there before: background jobs of earlier commands are spared when
//! a command is ended.

use std::{collections::BTreeMap, sync::Arc};

use rustix::process::Signal;

use crate::run::job::Job;

/// A process, told from a later one with its number by when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Id {
    pid: i32,
    start: u64,
}

/// What is known of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    parent: i32,
    start: u64,
}

/// What belongs to one command.
#[derive(Debug)]
pub(super) struct Tree {
    job: Arc<Job>,
    older: Vec<Id>,
}

impl Tree {
    /// Of a command that begins now.
    pub(super) fn begin(job: &Arc<Job>) -> Self {
        let leader = job.number();
        let others = job.members().into_iter().filter(|pid| *pid != leader);
        let id = |pid| {
            Some(Id {
                pid,
                start: stat(pid)?.start,
            })
        };
        Self {
            older: others.filter_map(id).collect(),
            job: job.clone(),
        }
    }

    /// Sends a signal to all that the command started, and not to its shell.
    pub(super) fn signal(&self, signal: Signal) {
        let leader = self.job.number();
        let spared = if self.older.is_empty() {
            vec![leader]
        } else {
            let known = |pid| Some((pid, stat(pid)?));
            let now: BTreeMap<i32, Stat> = self.job.members().into_iter().filter_map(known).collect();
            spared(&now, leader, &self.older)
        };
        self.job.signal_others(signal, &spared);
    }
}

/// The leader, what is older than the command, and what that has started since. Pure.
fn spared(now: &BTreeMap<i32, Stat>, leader: i32, older: &[Id]) -> Vec<i32> {
    let is_older = |pid: i32| {
        let start = now.get(&pid).map(|stat| stat.start);
        start.is_some_and(|start| older.contains(&Id { pid, start }))
    };
    let descends = |pid: i32| {
        // No line is longer than all there are; what the kernel says while processes come and go may have a circle.
        let line = std::iter::successors(Some(pid), |pid| now.get(pid).map(|stat| stat.parent));
        line.take(now.len().saturating_add(1))
            .take_while(|pid| *pid != leader)
            .any(is_older)
    };
    let kept = now.keys().copied().filter(|pid| descends(*pid));
    std::iter::once(leader).chain(kept).collect()
}

fn stat(pid: i32) -> Option<Stat> {
    parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// The fourth and the 22nd field. The name in the second may hold anything, so fields count from its end.
fn parse(stat: &[u8]) -> Option<Stat> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 2..)?).ok()?;
    let mut fields = rest.split(' ').skip(1);
    Some(Stat {
        parent: fields.next()?.parse().ok()?,
        start: fields.nth(17)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_understood() {
        let own = stat(rustix::process::getpid().as_raw_nonzero().get()).unwrap();
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
        assert_eq!(own.parent, parent);
        let line = b"12 (a) b (c)) S 34 5 6 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2";
        let expected = Stat {
            parent: 34,
            start: 987_654,
        };
        assert_eq!(parse(line), Some(expected));
        for bad in [&b""[..], b")", b"1 (x) S", b"1 (x) S 2 3"] {
            assert_eq!(parse(bad), None);
        }
    }

    #[test]
    fn older_jobs_and_their_children_are_spared() {
        let tree = [
            // The shell, an older job with a child and a grandchild that are new.
            (10, 1, 100),
            (20, 10, 200),
            (30, 20, 900),
            (40, 30, 901),
            // New: a child of the shell, its child, an orphan.
            (50, 10, 900),
            (60, 50, 901),
            (70, 1, 902),
            // Its number was that of an older job.
            (80, 10, 903),
            // A circle, as seen while numbers change hands.
            (90, 91, 904),
            (91, 90, 905),
        ];
        let now = tree.iter().map(|(pid, parent, start)| {
            let stat = Stat {
                parent: *parent,
                start: *start,
            };
            (*pid, stat)
        });
        let older = [Id { pid: 20, start: 200 }, Id { pid: 80, start: 300 }];
        assert_eq!(spared(&now.collect(), 10, &older), [10, 20, 30, 40]);
    }
}
