//! The table of programs: those that live, and what is kept of those that have exited. Pure.
//!
//! Numbers are never used twice. A name, and a request's key, belongs to one that lives or is kept.

use std::collections::{BTreeMap, VecDeque};

use super::entry::Exited;

/// A name or a key, if there is one.
pub(super) type Name = Option<Box<[u8]>>;

/// See the module. `L` is what is known of a living one.
#[derive(Debug)]
pub(super) struct Table<L> {
    last: u64,
    living: BTreeMap<u64, Living<L>>,
    exited: BTreeMap<u64, Box<Exited>>,
    /// Those that have exited, the first one first; some may be gone already.
    order: VecDeque<u64>,
    /// None has to go before.
    next_expiry: u64,
    names: BTreeMap<Box<[u8]>, u64>,
    keys: BTreeMap<Box<[u8]>, u64>,
    /// Exited ones that are kept at most.
    most: usize,
}

#[derive(Debug)]
struct Living<L> {
    value: L,
    name: Name,
    key: Name,
}

/// How a program is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted<'a> {
    Id(u64),
    Name(&'a [u8]),
}

/// What there is of a program.
#[derive(Debug)]
pub(super) enum Found<'a, L> {
    Living(&'a L),
    Exited(&'a Exited),
}

/// Why a place is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// Another program has the name.
    Name(u64),
    /// The request was made before; this is its program.
    Key(u64),
}

impl<L> Table<L> {
    pub(super) const fn new(most: usize) -> Self {
        Self {
            last: 0,
            living: BTreeMap::new(),
            exited: BTreeMap::new(),
            order: VecDeque::new(),
            next_expiry: u64::MAX,
            names: BTreeMap::new(),
            keys: BTreeMap::new(),
            most,
        }
    }

    /// Whether a program of this name and key may be added.
    pub(super) fn vacant(&self, name: &Name, key: &Name) -> Result<(), Taken> {
        if let Some(id) = key.as_ref().and_then(|key| self.keys.get(key)) {
            return Err(Taken::Key(*id));
        }
        match name.as_ref().and_then(|name| self.names.get(name)) {
            Some(id) => Err(Taken::Name(*id)),
            None => Ok(()),
        }
    }

    /// Adds one that is about to be started, where there is a vacancy.
    pub(super) fn add(&mut self, name: Name, key: Name, value: impl FnOnce(u64) -> L) -> &L {
        self.last += 1;
        let id = self.last;
        if let Some(name) = &name {
            self.names.insert(name.clone(), id);
        }
        if let Some(key) = &key {
            self.keys.insert(key.clone(), id);
        }
        let value = value(id);
        let living = Living { value, name, key };
        &self.living.entry(id).or_insert(living).value
    }

    /// Puts one that lives back, if it is not there: somebody wants it kept after all.
    pub(super) fn put_back(&mut self, id: u64, value: L) {
        self.living.entry(id).or_insert(Living {
            value,
            name: None,
            key: None,
        });
    }

    /// Takes one that lives out, with nothing left of it.
    pub(super) fn remove(&mut self, id: u64) {
        if let Some(living) = self.living.remove(&id) {
            self.let_go(&living.name, &living.key);
        }
    }

    fn let_go(&mut self, name: &Name, key: &Name) {
        if let Some(name) = name {
            self.names.remove(name);
        }
        if let Some(key) = key {
            self.keys.remove(key);
        }
    }

    /// One has exited; it keeps its name and key. Gives those that are kept no longer.
    pub(super) fn retire(&mut self, id: u64, exited: impl FnOnce(Name, Name) -> Exited) -> Vec<u64> {
        let Some(Living { name, key, .. }) = self.living.remove(&id) else {
            return Vec::new();
        };
        let exited = exited(name, key);
        self.next_expiry = self.next_expiry.min(exited.until);
        self.exited.insert(id, Box::new(exited));
        self.order.push_back(id);
        let mut gone = Vec::new();
        while self.exited.len() > self.most
            && let Some(oldest) = self.order.pop_front()
        {
            if self.forget(oldest) {
                gone.push(oldest);
            }
        }
        if self.order.len() > self.most.saturating_mul(2) {
            self.order.retain(|id| self.exited.contains_key(id));
        }
        gone
    }

    /// Drops what is kept of one; gives whether there was something.
    pub(super) fn forget(&mut self, id: u64) -> bool {
        let Some(exited) = self.exited.remove(&id) else {
            return false;
        };
        self.let_go(&exited.name, &exited.key);
        true
    }

    /// Drops what is kept of all; gives which.
    pub(super) fn forget_all(&mut self) -> Vec<u64> {
        self.expire(u64::MAX)
    }

    /// Drops what is due to go at this time; gives which.
    pub(super) fn expire(&mut self, now: u64) -> Vec<u64> {
        if now < self.next_expiry {
            return Vec::new();
        }
        let due = self.exited.iter().filter(|(_, exited)| exited.until <= now);
        let due: Vec<u64> = due.map(|(id, _)| *id).collect();
        for id in &due {
            self.forget(*id);
        }
        let left = self.exited.values().map(|exited| exited.until).min();
        self.next_expiry = left.unwrap_or(u64::MAX);
        due
    }

    /// What there is of a program, with its number.
    pub(super) fn find(&self, wanted: Wanted<'_>) -> Option<(u64, Found<'_, L>)> {
        let id = match wanted {
            Wanted::Id(id) => id,
            Wanted::Name(name) => *self.names.get(name)?,
        };
        let living = self.living.get(&id).map(|living| Found::Living(&living.value));
        let found = living.or_else(|| self.exited.get(&id).map(|exited| Found::Exited(exited)));
        found.map(|found| (id, found))
    }

    /// The name of one that lives.
    pub(super) fn name(&self, id: u64) -> Option<&[u8]> {
        self.living.get(&id)?.name.as_deref()
    }

    /// Those that live and whose numbers are above `after`, in order of these.
    pub(super) fn living(&self, after: u64) -> impl Iterator<Item = (u64, &L)> {
        let living = self.living.range(after.saturating_add(1)..);
        living.map(|(id, living)| (*id, &living.value))
    }

    /// How many live.
    pub(super) fn count(&self) -> usize {
        self.living.len()
    }

    /// Those that have exited and are kept, as [`living`](Self::living) gives them.
    pub(super) fn exited(&self, after: u64) -> impl Iterator<Item = (u64, &Exited)> {
        let exited = self.exited.range(after.saturating_add(1)..);
        exited.map(|(id, exited)| (*id, &**exited))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        run::{
            Kind,
            entry::{Argv, Facts, Record},
        },
        sys::{Dead, How, Usage},
    };

    fn exited(name: Name, key: Name, until: u64) -> Exited {
        let dead = Dead {
            how: How::Code(0),
            usage: Usage::default(),
        };
        Exited {
            pid: 1,
            uid: 0,
            kind: Kind::Detached,
            name,
            key,
            argv: Argv::default(),
            started: 0,
            ended: 0,
            until,
            record: Record::new(dead, Facts::default()),
            tty: false,
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Add(Option<u8>, Option<u8>),
        Remove(u64),
        Retire(u64, u64),
        Forget(u64),
        Expire(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let id = 1..40_u64;
        let few = || proptest::option::of(0..3_u8);
        let step = prop_oneof![
            3 => (few(), few()).prop_map(|(name, key)| Step::Add(name, key)),
            1 => id.clone().prop_map(Step::Remove),
            3 => (id.clone(), 0..100_u64).prop_map(|(id, until)| Step::Retire(id, until)),
            1 => id.prop_map(Step::Forget),
            1 => (0..100_u64).prop_map(Step::Expire),
        ];
        proptest::collection::vec(step, 0..120)
    }

    proptest! {
        /// No number comes twice; a name and a key belong to one at a time, as long as it lives or is kept; no more
        /// are kept than allowed, and what is dropped is told.
        #[test]
        fn names_and_keys_belong_to_one(steps in steps()) {
            let most = 5;
            let mut table: Table<u64> = Table::new(most);
            let mut added = 0;
            let mut kept = std::collections::BTreeSet::new();
            for step in steps {
                match step {
                    Step::Add(name, key) => {
                        let name = name.map(|name| Box::from([name]));
                        let key = key.map(|key| Box::from([key]));
                        match table.vacant(&name, &key) {
                            Ok(()) => {
                                let id = *table.add(name, key, |id| id);
                                prop_assert!(id > added);
                                added = id;
                            }
                            Err(Taken::Name(id)) => {
                                let found = table.find(Wanted::Name(name.as_deref().unwrap()));
                                prop_assert_eq!(found.unwrap().0, id);
                            }
                            Err(Taken::Key(id)) => prop_assert!(table.find(Wanted::Id(id)).is_some()),
                        }
                    }
                    Step::Remove(id) => table.remove(id),
                    Step::Retire(id, until) => {
                        let lived = table.living(0).any(|(living, _)| living == id);
                        let gone = table.retire(id, |name, key| exited(name, key, until));
                        if lived {
                            kept.insert(id);
                        }
                        for id in gone {
                            prop_assert!(kept.remove(&id));
                        }
                    }
                    Step::Forget(id) => prop_assert_eq!(table.forget(id), kept.remove(&id)),
                    Step::Expire(now) => {
                        for id in table.expire(now) {
                            prop_assert!(kept.remove(&id));
                        }
                        prop_assert!(table.exited(0).all(|(_, exited)| exited.until > now));
                    }
                }
                prop_assert!(kept.len() <= most && table.order.len() <= 2 * most + 1);
                let there: Vec<u64> = table.exited(0).map(|(id, _)| id).collect();
                prop_assert_eq!(&there, &kept.iter().copied().collect::<Vec<_>>());
                for id in table.names.values().chain(table.keys.values()) {
                    prop_assert!(table.find(Wanted::Id(*id)).is_some());
                }
            }
            for id in table.forget_all() {
                prop_assert!(kept.remove(&id));
            }
            prop_assert!(kept.is_empty());
        }
    }

    #[test]
    fn the_one_that_exited_first_goes_first() {
        let mut table: Table<()> = Table::new(2);
        for _ in 0..3 {
            table.add(None, None, |_id| ());
        }
        let mut retire = |id| table.retire(id, |name, key| exited(name, key, u64::MAX));
        assert!(retire(3).is_empty() && retire(1).is_empty());
        assert_eq!(retire(2), [3]);
    }
}
