//! Exact counts of the work that one operation does.
//!
//! An operation that is traced runs inside [`traced`]; whoever does countable work says so with [`count`], which
//! costs a look at a task-local where nobody listens. Work that is done elsewhere on the operation's behalf (a task it
//! spawned) counts only if that place is inside the scope too.
//!
//! May call: nothing.
//! Never inside: a timing that decides something.

use std::{cell::RefCell, future::Future};

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Records given to the journal.
    JournalRecords,
    /// Their bytes, framing included.
    JournalBytes,
    /// Write calls on journal files.
    Writes,
    /// Sync calls on journal files.
    Syncs,
    /// Messages sent on netlink sockets.
    NetlinkMessages,
    /// Sockets bound.
    Binds,
    /// Commands sent to a VMM.
    QmpCommands,
    /// Calls to a guest that were waited for.
    GuestRoundTrips,
    /// Tasks and threads started.
    TasksSpawned,
}

/// The counts of one operation, and how long each of its steps took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    counts: [u64; 9],
    steps: Vec<(&'static str, u32)>,
}

impl Counts {
    /// How much was counted of this kind.
    #[must_use]
    pub fn get(&self, kind: Kind) -> u64 {
        self.counts.get(kind as usize).copied().unwrap_or(0)
    }

    /// As the API has it.
    #[must_use]
    pub fn to_proto(&self) -> sandbox_protocol::v1::Work {
        sandbox_protocol::v1::Work {
            journal_records: self.get(Kind::JournalRecords),
            journal_bytes: self.get(Kind::JournalBytes),
            writes: self.get(Kind::Writes),
            syncs: self.get(Kind::Syncs),
            netlink_messages: self.get(Kind::NetlinkMessages),
            binds: self.get(Kind::Binds),
            qmp_commands: self.get(Kind::QmpCommands),
            guest_round_trips: self.get(Kind::GuestRoundTrips),
            tasks_spawned: self.get(Kind::TasksSpawned),
            steps_us: self
                .steps
                .iter()
                .map(|(name, us)| ((*name).to_owned(), *us))
                .collect(),
        }
    }
}

tokio::task_local! {
    static COUNTS: RefCell<Counts>;
}

/// Counts work of the operation that runs here, if it is traced.
pub fn count(kind: Kind, n: u64) {
    // Outside a traced operation nobody asked.
    let add = |counts: &RefCell<Counts>| {
        if let Some(place) = counts.borrow_mut().counts.get_mut(kind as usize) {
            *place += n;
        }
    };
    COUNTS.try_with(add).unwrap_or(());
}

/// Notes how long a step of the operation took, in microseconds, if it is traced.
pub fn step(name: &'static str, us: u32) {
    COUNTS
        .try_with(|counts| counts.borrow_mut().steps.push((name, us)))
        .unwrap_or(());
}

/// Runs an operation and gives its counts too. Cancelling it loses the counts alone.
pub async fn traced<F: Future>(operation: F) -> (F::Output, Counts) {
    COUNTS
        .scope(RefCell::default(), async {
            let output = operation.await;
            (output, COUNTS.with(RefCell::take))
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_what_happens_inside_is_counted() {
        count(Kind::Writes, 5);
        let (output, counts) = traced(async {
            count(Kind::Writes, 1);
            tokio::task::yield_now().await;
            count(Kind::Writes, 1);
            step("take", 7);
            "done"
        })
        .await;
        count(Kind::Writes, 5);
        assert_eq!(
            (output, counts.get(Kind::Writes), counts.get(Kind::Syncs)),
            ("done", 2, 0)
        );
        assert_eq!(counts.to_proto().steps_us.get("take"), Some(&7));
    }
}
