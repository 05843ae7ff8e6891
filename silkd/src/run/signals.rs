//! Signals to a program and to what it started.

use std::{collections::BTreeSet, sync::Arc};

use rustix::process::Signal;

use super::{
    Job, Scope,
    chores::Chore,
    job::{Doom, Hold, Phase, State},
    leaf,
};
use crate::reap;

/// What became of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sent {
    /// The leader had ended.
    pub(super) already_exited: bool,
    /// Somebody got it.
    pub(super) signalled: bool,
}

impl Job {
    /// Asks the whole tree to end, also what outlived its leader.
    pub(super) fn terminate(&self) {
        self.signal_tree(&mut self.lock(), Signal::TERM);
    }

    pub(super) fn kill_tree(&self, state: &mut State) {
        state.killed_by_us = true;
        match &state.hold {
            Hold::Leaf(leaf) => {
                // It fails only where the directory is gone, and with it the processes.
                leaf.kill().ok();
            }
            Hold::Session => self.signal_session(state, Signal::KILL),
            Hold::Gone => {}
        }
    }

    fn signal_session(&self, state: &State, signal: Signal) {
        if let Some(leader) = &state.pidfd {
            // It may have ended meanwhile.
            rustix::process::pidfd_send_signal(leader, signal).ok();
        }
        leaf::signal_session(self.number(), signal, &BTreeSet::new());
    }

    /// Ends the whole tree at once, started or not: whoever wanted it is gone.
    pub(super) fn abandon(&self) {
        let mut state = self.lock();
        state.doom = Some(Doom::Abandoned);
        state.unread = true;
        self.kill_tree(&mut state);
    }

    /// It has a terminal.
    pub(super) fn has_terminal(&self) {
        self.lock().terminal = true;
    }

    /// Its caller is gone: [`abandon`](Self::abandon), but with a terminal as whoever sits at one expects it: SIGHUP,
    /// and time to act on it.
    pub(super) fn forsake(self: &Arc<Self>) {
        let mut state = self.lock();
        state.unread = true;
        match (state.terminal, state.phase, state.doom) {
            (true, Phase::Running, None | Some(Doom::TimedOut)) => {
                state.doom = Some(Doom::HungUp);
                self.signal_tree(&mut state, Signal::HUP);
                // Who is stopped learns of it too.
                self.signal_tree(&mut state, Signal::CONT);
                drop(state);
                self.shared().chores().add(Chore::HungUp(self.clone()));
            }
            (true, Phase::Running, Some(Doom::HungUp)) => {}
            (true, Phase::Running, Some(Doom::Abandoned))
            | (true, Phase::Starting | Phase::Ended(_), _)
            | (false, _, _) => {
                state.doom = Some(Doom::Abandoned);
                self.kill_tree(&mut state);
            }
        }
    }

    /// Its time is over: the signal goes to the whole tree. Nothing happens after its end.
    pub(super) fn time_out(&self, signal: Signal) {
        let mut state = self.lock();
        match state.phase {
            Phase::Ended(_) => {}
            Phase::Starting | Phase::Running => {
                state.doom = Some(Doom::TimedOut);
                state.timed_out = true;
                self.signal_tree(&mut state, signal);
            }
        }
    }

    fn signal_tree(&self, state: &mut State, signal: Signal) {
        if signal == Signal::KILL {
            let Hold::Leaf(leaf) = &state.hold else {
                return self.kill_tree(state);
            };
            if !state.killed_by_us {
                let leader = self.number();
                let others = leaf.members().into_iter().filter(|pid| *pid != leader).count();
                state.descendants_killed = u32::try_from(others).unwrap_or(u32::MAX);
            }
            return self.kill_tree(state);
        }
        match &state.hold {
            Hold::Leaf(leaf) => leaf.signal(signal, &BTreeSet::new()),
            Hold::Session => self.signal_session(state, signal),
            Hold::Gone => {}
        }
    }

    /// Sends a signal. Once the leader has ended, only the tree of one that is kept can still get it.
    pub(super) fn signal(self: &Arc<Self>, signal: Signal, scope: Scope) -> Sent {
        let mut sent = Sent {
            already_exited: !self.runs(),
            signalled: false,
        };
        match scope {
            // The group has the leader's number, which is its own until it is reaped. A group that is gone needs no
            // signal.
            Scope::Group => reap::unreaped(self, |pid| {
                sent.signalled = rustix::process::kill_process_group(pid, signal).is_ok();
            }),
            Scope::Leader => {
                let state = self.lock();
                // It may have ended meanwhile.
                let reaches = |pidfd| rustix::process::pidfd_send_signal(pidfd, signal).is_ok();
                sent.signalled = state.pidfd.as_ref().is_some_and(reaches);
            }
            Scope::Tree => {
                let drains = self.drains();
                let mut state = self.lock();
                let there = match state.phase {
                    Phase::Starting | Phase::Running => true,
                    Phase::Ended(_) => drains,
                };
                sent.signalled = there && !matches!(state.hold, Hold::Gone);
                if sent.signalled {
                    self.signal_tree(&mut state, signal);
                }
            }
        }
        sent
    }

    /// The processes of its tree. Without cgroups, those of its session.
    pub(super) fn members(&self) -> Vec<i32> {
        match &self.lock().hold {
            Hold::Leaf(leaf) => leaf.members(),
            Hold::Session => leaf::session(self.number())
                .into_iter()
                .chain([self.number()])
                .collect(),
            Hold::Gone => Vec::new(),
        }
    }

    /// Sends a signal to those of its tree that are not in `spared`, also to such as they start meanwhile.
    pub(super) fn signal_others(&self, signal: Signal, spared: &[i32]) {
        let spared: BTreeSet<i32> = spared.iter().copied().collect();
        match &self.lock().hold {
            Hold::Leaf(leaf) => leaf.signal(signal, &spared),
            Hold::Session => leaf::signal_session(self.number(), signal, &spared),
            Hold::Gone => {}
        }
    }
}
