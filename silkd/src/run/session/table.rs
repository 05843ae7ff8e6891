//! The sessions of a guest by name: which there are, which have ended, whose request is whose. Pure, but for the clock
//! that it is told.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use sandbox_protocol::{limits::SESSIONS, reason::Reason};
use tokio::sync::watch;

use crate::refusal::Refusal;

/// Names of ended sessions that are remembered, so that their next command is told so.
const ENDED: usize = SESSIONS;

/// A session, or one that is being opened.
#[derive(Debug)]
enum Slot<T> {
    /// Whoever opens it drops its sender when that is over.
    Opening {
        key: String,
        over: watch::Receiver<()>,
    },
    Open {
        key: String,
        entry: Arc<T>,
    },
}

impl<T> Slot<T> {
    fn key(&self) -> &str {
        match self {
            Self::Opening { key, .. } | Self::Open { key, .. } => key,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Core<T> {
    slots: BTreeMap<String, Slot<T>>,
    ended: VecDeque<String>,
    made: u64,
}

impl<T> Default for Core<T> {
    fn default() -> Self {
        Self {
            slots: BTreeMap::new(),
            ended: VecDeque::new(),
            made: 0,
        }
    }
}

/// What comes of a wish for a session.
#[derive(Debug)]
pub(super) enum Place<T> {
    /// It is to be opened under this name; until the sender is dropped others wait.
    Ours(String, watch::Sender<()>),
    /// The same request has opened this one.
    Same(String, Arc<T>),
    /// The same request is opening one: ask again when this has ended.
    Wait(watch::Receiver<()>),
}

impl<T> Core<T> {
    /// A place for a new session; an empty name: any.
    ///
    /// # Errors
    /// `SESSION_EXISTS`, `SESSION_LIMIT`.
    pub(super) fn reserve(&mut self, name: &str, key: &str) -> Result<Place<T>, Refusal> {
        let same = |slot: &Slot<T>| !key.is_empty() && slot.key() == key;
        match self.slots.iter().find(|(_, slot)| same(slot)) {
            Some((name, Slot::Open { entry, .. })) => return Ok(Place::Same(name.clone(), entry.clone())),
            Some((_, Slot::Opening { over, .. })) => return Ok(Place::Wait(over.clone())),
            None => {}
        }
        if self.slots.contains_key(name) {
            let message = format!("there is a session `{name}`");
            return Err(Refusal::new(Reason::SessionExists, message));
        }
        if self.slots.len() >= SESSIONS {
            let message = format!("{SESSIONS} sessions are open");
            return Err(Refusal::new(Reason::SessionLimit, message));
        }
        let name = if name.is_empty() {
            self.unused()
        } else {
            name.to_owned()
        };
        let (sender, over) = watch::channel(());
        let slot = Slot::Opening {
            key: key.to_owned(),
            over,
        };
        self.slots.insert(name.clone(), slot);
        Ok(Place::Ours(name, sender))
    }

    fn unused(&mut self) -> String {
        loop {
            self.made += 1;
            let name = format!("s{}", self.made);
            if !self.slots.contains_key(&name) && !self.ended.contains(&name) {
                return name;
            }
        }
    }

    /// The session of a place that was reserved.
    pub(super) fn open(&mut self, name: &str, entry: Arc<T>) {
        self.ended.retain(|ended| ended != name);
        if let Some(slot) = self.slots.get_mut(name) {
            let key = slot.key().to_owned();
            *slot = Slot::Open { key, entry };
        }
    }

    /// Gives a place back that nothing came of.
    pub(super) fn release(&mut self, name: &str) {
        if let Some(Slot::Opening { .. }) = self.slots.get(name) {
            self.slots.remove(name);
        }
    }

    /// The session of this name.
    ///
    /// # Errors
    /// `SESSION_ENDED`, `SESSION_NOT_FOUND`.
    pub(super) fn find(&self, name: &str) -> Result<Arc<T>, Refusal> {
        match self.slots.get(name) {
            Some(Slot::Open { entry, .. }) => Ok(entry.clone()),
            // Its opener does not know its name yet, and nobody else can.
            Some(Slot::Opening { .. }) | None if self.ended.iter().any(|ended| ended == name) => {
                let message = format!("the shell of `{name}` has ended");
                Err(Refusal::new(Reason::SessionEnded, message))
            }
            Some(Slot::Opening { .. }) | None => {
                let message = format!("there is no session `{}`", name.escape_default());
                Err(Refusal::new(Reason::SessionNotFound, message))
            }
        }
    }

    /// It has ended by itself: remembered for a while.
    pub(super) fn ended(&mut self, name: &str, entry: &Arc<T>) {
        if self.remove(name, entry) {
            if self.ended.len() >= ENDED {
                self.ended.pop_front();
            }
            self.ended.push_back(name.to_owned());
        }
    }

    /// Nobody asks for it any more. Gives whether it was there.
    pub(super) fn remove(&mut self, name: &str, entry: &Arc<T>) -> bool {
        let there = match self.slots.get(name) {
            Some(Slot::Open { entry: known, .. }) => Arc::ptr_eq(known, entry),
            Some(Slot::Opening { .. }) | None => false,
        };
        if there {
            self.slots.remove(name);
        }
        there
    }

    /// Takes all that are open, and forgets the ended ones.
    pub(super) fn take_all(&mut self) -> Vec<Arc<T>> {
        self.ended.clear();
        let open = self.entries().map(|(_, entry)| entry.clone()).collect();
        self.slots.retain(|_, slot| matches!(slot, Slot::Opening { .. }));
        open
    }

    /// Those that are open, by name.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&String, &Arc<T>)> {
        self.slots.iter().filter_map(|(name, slot)| match slot {
            Slot::Open { entry, .. } => Some((name, entry)),
            Slot::Opening { .. } => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(core: &mut Core<u32>, name: &str, key: &str) -> (String, watch::Sender<()>) {
        match core.reserve(name, key).unwrap() {
            Place::Ours(name, sender) => (name, sender),
            place @ (Place::Same(..) | Place::Wait(_)) => panic!("{place:?}"),
        }
    }

    fn opened(core: &mut Core<u32>, name: &str, key: &str) -> Arc<u32> {
        let (name, _sender) = ours(core, name, key);
        let entry = Arc::new(0);
        core.open(&name, entry.clone());
        entry
    }

    #[test]
    fn names_are_given_once_and_again_after_the_end() {
        let mut core = Core::default();
        let first = opened(&mut core, "a", "");
        assert_eq!(core.reserve("a", "").unwrap_err().reason, Reason::SessionExists);
        assert!(Arc::ptr_eq(&core.find("a").unwrap(), &first));
        core.ended("a", &first);
        assert_eq!(core.find("a").unwrap_err().reason, Reason::SessionEnded);
        let second = opened(&mut core, "a", "");
        // News of the first one's end comes late.
        core.ended("a", &first);
        assert!(Arc::ptr_eq(&core.find("a").unwrap(), &second));
        assert!(core.remove("a", &second) && !core.remove("a", &second));
        assert_eq!(core.find("a").unwrap_err().reason, Reason::SessionNotFound);
        assert_eq!(ours(&mut core, "", "").0, "s1");
        assert_eq!(ours(&mut core, "", "").0, "s2");
    }

    #[test]
    fn one_request_opens_one() {
        let mut core = Core::default();
        let (name, sender) = ours(&mut core, "", "k");
        let Place::Wait(over) = core.reserve("other", "k").unwrap() else {
            panic!("the first is still at it");
        };
        core.release(&name);
        drop(sender);
        assert!(over.has_changed().is_err());
        let entry = opened(&mut core, "b", "k");
        let Place::Same(name, same) = core.reserve("", "k").unwrap() else {
            panic!("it is open");
        };
        assert!(name == "b" && Arc::ptr_eq(&same, &entry));
        core.release("b");
        assert!(core.find("b").is_ok(), "what is open is not given back");
    }

    #[test]
    fn there_are_so_many_and_so_many_are_remembered() {
        let mut core = Core::default();
        let entries: Vec<_> = (0..SESSIONS)
            .map(|n| opened(&mut core, &format!("n{n}"), ""))
            .collect();
        assert_eq!(core.reserve("", "").unwrap_err().reason, Reason::SessionLimit);
        assert_eq!(core.entries().count(), SESSIONS);
        for (n, entry) in entries.iter().enumerate() {
            core.ended(&format!("n{n}"), entry);
        }
        let one_more = opened(&mut core, "m", "");
        core.ended("m", &one_more);
        assert_eq!(core.find("n0").unwrap_err().reason, Reason::SessionNotFound);
        assert_eq!(core.find("n1").unwrap_err().reason, Reason::SessionEnded);
        opened(&mut core, "x", "");
        assert_eq!(core.take_all().len(), 1);
        assert_eq!(core.find("n1").unwrap_err().reason, Reason::SessionNotFound);
    }
}
