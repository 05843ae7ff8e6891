//! Leases that are over: an ordered set of deadlines in boot-time ticks and one timerfd, so that there is work only for
//! what is due, true through suspend and steps of the wall clock.

use std::{
    collections::BTreeSet,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use sandbox_protocol::id::SandboxId;
use tokio::{io::Interest, sync::Notify};

use crate::{
    clock::{Clock, Tick},
    sys,
};

/// The deadlines of all leases.
#[derive(Debug, Clone, Default)]
pub struct Reaper(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    due: Mutex<BTreeSet<(Tick, SandboxId)>>,
    /// The earliest deadline has changed.
    sooner: Notify,
}

impl Reaper {
    /// No deadlines yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the deadline of a sandbox, in place of `before` if it had one.
    pub fn set(&self, id: SandboxId, before: Option<Tick>, until: Tick) {
        let first = {
            let mut due = self.0.due.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(before) = before {
                due.remove(&(before, id));
            }
            due.insert((until, id));
            due.first().is_some_and(|(first, _)| *first == until)
        };
        if first {
            self.0.sooner.notify_one();
        }
    }

    /// Forgets the deadline of a sandbox.
    pub fn clear(&self, id: SandboxId, until: Tick) {
        self.0
            .due
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&(until, id));
    }

    /// Deadlines that are set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.due.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether none is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes what is due, and tells when the next will be.
    fn take_due(&self, now: Tick) -> (Vec<SandboxId>, Option<Tick>) {
        let mut due = self.0.due.lock().unwrap_or_else(PoisonError::into_inner);
        let mut over = vec![];
        while let Some(&(until, id)) = due.first().filter(|(until, _)| *until <= now) {
            due.remove(&(until, id));
            over.push(id);
        }
        (over, due.first().map(|(until, _)| *until))
    }

    /// Calls `over` for every lease that is over, for ever.
    ///
    /// # Errors
    /// The kernel's, when no timer can be had.
    pub async fn run(&self, clock: &Clock, mut over: impl FnMut(SandboxId)) -> io::Result<()> {
        let timer = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let timer = sys::watch(timer, Interest::READABLE)?;
        loop {
            let (due, next) = self.take_due(clock.tick());
            due.into_iter().for_each(&mut over);
            arm(timer.get_ref(), next)?;
            tokio::select! {
                () = self.0.sooner.notified() => {}
                ready = timer.readable() => ready?.clear_ready(),
            }
        }
    }
}

/// Sets the timer to an absolute tick; none disarms it. Setting it anew also clears what has fired.
fn arm(timer: &OwnedFd, at: Option<Tick>) -> io::Result<()> {
    let zero = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // A tick of zero would disarm the timer; one nanosecond after boot is as much in the past.
    let nanos = at.map_or(0, |tick| tick.as_nanos().max(1));
    let value = Timespec {
        tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(nanos % 1_000_000_000).unwrap_or(0),
    };
    timerfd_settime(
        timer,
        TimerfdTimerFlags::ABSTIME,
        &Itimerspec {
            it_interval: zero,
            it_value: value,
        },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, time::Duration};

    use super::*;

    fn id(n: u8) -> SandboxId {
        SandboxId::from_random([n; 16])
    }

    #[test]
    fn only_what_is_due_is_touched() {
        let reaper = Reaper::new();
        for n in 0..100 {
            reaper.set(id(n), None, Tick::from_nanos(1_000 + u64::from(n)));
        }
        reaper.set(id(3), Some(Tick::from_nanos(1_003)), Tick::from_nanos(9_000));
        reaper.clear(id(4), Tick::from_nanos(1_004));
        let (due, next) = reaper.take_due(Tick::from_nanos(1_005));
        assert_eq!(due, [id(0), id(1), id(2), id(5)]);
        assert_eq!(next, Some(Tick::from_nanos(1_006)));
        assert_eq!(reaper.len(), 95);
    }

    #[tokio::test]
    async fn a_sooner_deadline_wakes_the_reaper() {
        let (reaper, clock) = (Reaper::new(), Clock::host());
        let over = Cell::new(0);
        reaper.set(id(1), None, clock.tick().plus(Duration::from_secs(3600)));
        let run = reaper.run(&clock, |_| over.set(over.get() + 1));
        let set = async {
            tokio::task::yield_now().await;
            reaper.set(id(2), None, clock.tick().plus(Duration::from_millis(1)));
            std::future::pending::<()>().await;
        };
        let wait = async {
            while reaper.len() > 1 || over.get() == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), async {
            tokio::select! {
                ended = run => ended.unwrap(),
                () = set => {}
                () = wait => {}
            }
        })
        .await
        .unwrap();
        assert_eq!(reaper.len(), 1);
    }
}
