//! What a slot is doing, and when it may be somebody's again. Pure.
//!
//! ```text
//! absent --laid--> free --taken--> taken --bound--> bound --armed--> armed
//! absent --taken--> taken
//! taken, bound, armed --released--> draining --laid--> free
//! draining --10 s--> quarantined --laid--> free
//! ```
//! A released slot is laid anew, and by that free, only once its doors are shut and its VMM is dead, and then the kernel has
//! the last word: a TAP that anybody still holds cannot be attached. No edge leads to absent: a link is never deleted.

use std::time::Duration;

use crate::{clock::Tick, names::SlotNumber};

/// How long a released slot may take to be free; then it is told and looked at less often.
const DRAIN: Duration = Duration::from_secs(10);
/// Pause between two tries on a draining slot: the kernel tells nobody that a TAP was let go.
const AGAIN: Duration = Duration::from_millis(100);
/// The same on a quarantined one.
const SELDOM: Duration = Duration::from_secs(60);

/// What a slot is doing, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Laid, and nobody's.
    Free,
    /// Somebody's, without doors.
    Taken,
    /// Its doors listen, and deny.
    Bound,
    /// Its doors have a policy.
    Armed,
    /// Released, and not free yet.
    Draining,
    /// Not free in time: given to nobody, and tried again each minute.
    Quarantined,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Free,
        Self::Taken,
        Self::Bound,
        Self::Armed,
        Self::Draining,
        Self::Quarantined,
    ];

    /// Its text in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Taken => "taken",
            Self::Bound => "bound",
            Self::Armed => "armed",
            Self::Draining => "draining",
            Self::Quarantined => "quarantined",
        }
    }
}

/// How many slots are in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotCounts([usize; 6]);

impl SlotCounts {
    /// How many are in this state.
    #[must_use]
    pub fn get(&self, state: State) -> usize {
        self.0.get(state as usize).copied().unwrap_or(0)
    }
}

/// What happened to a slot that is somebody's, or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Bound,
    Armed,
    Released,
    /// Its listeners and every connection of theirs are closed, its policy dropped; or it never had any.
    DoorsShut,
    /// The VMM's pidfd has fired, or there never was one.
    VmmGone,
}

/// How laying a slot came out: TAP attached, attributes, link down and up, neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Laid {
    Done,
    /// Somebody holds the TAP, or the kernel failed.
    NotYet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Drain {
    since: Tick,
    next: Tick,
    doors_shut: bool,
    vmm_gone: bool,
    quarantined: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Absent,
    Free,
    Taken,
    Bound,
    Armed,
    Draining(Drain),
}

/// An event that the slot's state has no place for: a bug of the caller, which changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot} cannot take {event:?} now")]
pub(super) struct OutOfPlace {
    slot: SlotNumber,
    event: Event,
}

/// All slots of a lane.
#[derive(Debug)]
pub(super) struct Slots(Vec<Slot>);

impl Slots {
    /// As many as the lane may have, none laid.
    pub(super) fn new(count: u16) -> Self {
        Self(vec![Slot::Absent; usize::from(count)])
    }

    /// A link that was found at the start. Its sockets died with the daemon that had them; that no VMM has it must show.
    pub(super) fn found(&mut self, slot: SlotNumber, now: Tick) {
        self.put(slot, |_| {
            Slot::Draining(Drain {
                since: now,
                next: now,
                doors_shut: true,
                vmm_gone: true,
                quarantined: false,
            })
        });
    }

    /// One that a sandbox of an earlier daemon has: not free, whatever the kernel says, until it is given back.
    pub(super) fn hold(&mut self, slot: SlotNumber) {
        self.put(slot, |_| Slot::Taken);
    }

    /// The lowest numbers that must be laid so that `count` slots are.
    pub(super) fn missing(&self, count: usize) -> Vec<SlotNumber> {
        let laid = self.0.iter().filter(|slot| **slot != Slot::Absent).count();
        self.numbered()
            .filter(|(_, slot)| *slot == Slot::Absent)
            .map(|(number, _)| number)
            .take(count.saturating_sub(laid))
            .collect()
    }

    /// A free slot, or else one that is yet to be laid; now the caller's.
    pub(super) fn take(&mut self) -> Option<SlotNumber> {
        let of = |state| self.numbered().find(|(_, slot)| *slot == state);
        let (number, _) = of(Slot::Free).or_else(|| of(Slot::Absent))?;
        self.put(number, |_| Slot::Taken);
        Some(number)
    }

    /// Whether one is on its way to be free.
    pub(super) fn any_draining(&self) -> bool {
        let drains = |slot: &Slot| matches!(slot, Slot::Draining(drain) if !drain.quarantined);
        self.0.iter().any(drains)
    }

    /// Tells a slot what happened.
    pub(super) fn tell(&mut self, slot: SlotNumber, event: Event, now: Tick) -> Result<(), OutOfPlace> {
        let drain = Drain {
            since: now,
            next: now,
            doors_shut: false,
            vmm_gone: false,
            quarantined: false,
        };
        let mut done = false;
        self.put(slot, |before| {
            let after = match (before, event) {
                (Slot::Taken, Event::Bound) => Some(Slot::Bound),
                (Slot::Bound, Event::Armed) => Some(Slot::Armed),
                (Slot::Taken | Slot::Bound | Slot::Armed, Event::Released) => Some(Slot::Draining(drain)),
                (Slot::Draining(drain), Event::DoorsShut) => Some(Slot::Draining(Drain {
                    doors_shut: true,
                    next: now,
                    ..drain
                })),
                (Slot::Draining(drain), Event::VmmGone) => Some(Slot::Draining(Drain {
                    vmm_gone: true,
                    next: now,
                    ..drain
                })),
                (Slot::Absent | Slot::Free, _)
                | (Slot::Taken, Event::Armed | Event::DoorsShut | Event::VmmGone)
                | (Slot::Bound | Slot::Armed, Event::Bound | Event::DoorsShut | Event::VmmGone)
                | (Slot::Armed, Event::Armed)
                | (Slot::Draining(_), Event::Bound | Event::Armed | Event::Released) => None,
            };
            done = after.is_some();
            after.unwrap_or(before)
        });
        if done {
            Ok(())
        } else {
            Err(OutOfPlace { slot, event })
        }
    }

    /// Slots that are to be laid now: those whose doors and VMM are gone. Looks also whether any has taken too long.
    pub(super) fn due(&mut self, now: Tick) -> Vec<SlotNumber> {
        let mut due = Vec::new();
        for (at, slot) in self.0.iter_mut().enumerate() {
            let Slot::Draining(drain) = slot else { continue };
            if !drain.quarantined && now.since(drain.since) >= DRAIN {
                drain.quarantined = true;
            }
            if drain.doors_shut && drain.vmm_gone && drain.next <= now {
                due.extend(number(at));
            }
        }
        due
    }

    /// When to ask [`due`](Self::due) again, if nothing is told before.
    pub(super) fn next(&self) -> Option<Tick> {
        let time = |slot: &Slot| match slot {
            Slot::Draining(drain) => {
                let overdue = (!drain.quarantined).then(|| drain.since.plus(DRAIN));
                let again = (drain.doors_shut && drain.vmm_gone).then_some(drain.next);
                [overdue, again].into_iter().flatten().min()
            }
            Slot::Absent | Slot::Free | Slot::Taken | Slot::Bound | Slot::Armed => None,
        };
        self.0.iter().filter_map(time).min()
    }

    /// How laying a slot came out.
    pub(super) fn laid(&mut self, slot: SlotNumber, laid: Laid, now: Tick) {
        self.put(slot, |before| match (before, laid) {
            (Slot::Absent | Slot::Draining(_), Laid::Done) => Slot::Free,
            (Slot::Draining(drain), Laid::NotYet) => {
                let quarantined = drain.quarantined || now.since(drain.since) >= DRAIN;
                let pause = if quarantined { SELDOM } else { AGAIN };
                Slot::Draining(Drain {
                    next: now.plus(pause),
                    quarantined,
                    ..drain
                })
            }
            (Slot::Absent | Slot::Free | Slot::Taken | Slot::Bound | Slot::Armed, _) => before,
        });
    }

    /// Slots by state.
    pub(super) fn counts(&self) -> SlotCounts {
        let mut counts = SlotCounts::default();
        for slot in &self.0 {
            let state = match slot {
                Slot::Absent => continue,
                Slot::Free => State::Free,
                Slot::Taken => State::Taken,
                Slot::Bound => State::Bound,
                Slot::Armed => State::Armed,
                Slot::Draining(drain) if drain.quarantined => State::Quarantined,
                Slot::Draining(_) => State::Draining,
            };
            if let Some(count) = counts.0.get_mut(state as usize) {
                *count += 1;
            }
        }
        counts
    }

    fn numbered(&self) -> impl Iterator<Item = (SlotNumber, Slot)> {
        self.0
            .iter()
            .enumerate()
            .filter_map(|(at, slot)| Some((number(at)?, *slot)))
    }

    fn put(&mut self, slot: SlotNumber, change: impl FnOnce(Slot) -> Slot) {
        if let Some(place) = self.0.get_mut(usize::from(slot.0)) {
            *place = change(*place);
        }
    }
}

fn number(at: usize) -> Option<SlotNumber> {
    u16::try_from(at).ok().map(SlotNumber)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ZERO: SlotNumber = SlotNumber(0);

    fn at(seconds: u64) -> Tick {
        Tick::default().plus(Duration::from_secs(seconds))
    }

    fn one_taken() -> Slots {
        let mut slots = Slots::new(1);
        assert_eq!(slots.missing(5), [ZERO]);
        slots.laid(ZERO, Laid::Done, at(0));
        assert_eq!(slots.take(), Some(ZERO));
        slots
    }

    #[test]
    fn a_slot_is_free_again_only_by_all_three() {
        let mut slots = one_taken();
        assert_eq!(slots.take(), None);
        for event in [Event::Bound, Event::Armed, Event::Released] {
            slots.tell(ZERO, event, at(1)).unwrap();
        }
        assert_eq!(slots.due(at(1)), []);
        slots.tell(ZERO, Event::VmmGone, at(2)).unwrap();
        assert_eq!(slots.due(at(2)), []);
        slots.tell(ZERO, Event::DoorsShut, at(3)).unwrap();
        assert_eq!(slots.due(at(3)), [ZERO]);
        slots.laid(ZERO, Laid::NotYet, at(3));
        assert_eq!((slots.take(), slots.due(at(3))), (None, vec![]));
        assert_eq!(slots.next(), Some(at(3).plus(AGAIN)));
        assert_eq!(slots.due(at(4)), [ZERO]);
        slots.laid(ZERO, Laid::Done, at(4));
        assert_eq!((slots.next(), slots.take()), (None, Some(ZERO)));
    }

    #[test]
    fn one_that_is_not_free_in_time_is_quarantined_and_tried_each_minute() {
        let mut slots = one_taken();
        slots.tell(ZERO, Event::Released, at(0)).unwrap();
        assert_eq!(slots.next(), Some(at(10)));
        assert_eq!(slots.due(at(10)), []);
        assert_eq!(slots.counts().get(State::Quarantined), 1);
        slots.tell(ZERO, Event::VmmGone, at(20)).unwrap();
        slots.tell(ZERO, Event::DoorsShut, at(20)).unwrap();
        assert_eq!(slots.due(at(20)), [ZERO]);
        slots.laid(ZERO, Laid::NotYet, at(20));
        assert_eq!(slots.next(), Some(at(80)));
        assert_eq!((slots.due(at(79)), slots.take()), (vec![], None));
        assert_eq!(slots.due(at(80)), [ZERO]);
        slots.laid(ZERO, Laid::Done, at(80));
        assert_eq!(slots.counts().get(State::Free), 1);
    }

    #[test]
    fn what_was_found_is_freed_by_the_kernel_alone_and_what_is_out_of_place_changes_nothing() {
        let mut slots = Slots::new(2);
        slots.found(SlotNumber(1), at(0));
        // Higher than the lane goes: left as it is.
        slots.found(SlotNumber(9), at(0));
        assert_eq!(slots.missing(2), [ZERO]);
        assert_eq!(slots.due(at(0)), [SlotNumber(1)]);
        let before = slots.counts();
        for event in [Event::Bound, Event::Armed, Event::Released] {
            let outcome = slots.tell(SlotNumber(1), event, at(0));
            assert_eq!(
                outcome,
                Err(OutOfPlace {
                    slot: SlotNumber(1),
                    event
                })
            );
        }
        assert_eq!(slots.counts(), before);
    }

    #[derive(Debug, Clone, Copy)]
    enum Act {
        Take,
        Tell(u16, Event),
        Try(bool),
        Wait(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        let event = prop_oneof![
            Just(Event::Bound),
            Just(Event::Armed),
            Just(Event::Released),
            Just(Event::DoorsShut),
            Just(Event::VmmGone),
        ];
        prop_oneof![
            Just(Act::Take),
            (0_u16..3, event).prop_map(|(slot, event)| Act::Tell(slot, event)),
            any::<bool>().prop_map(Act::Try),
            (0_u64..30).prop_map(Act::Wait),
        ]
    }

    proptest! {
        /// Against a model that only remembers what each slot still lacks since it was last handed out.
        #[test]
        fn inv_11_a_slot_is_handed_out_only_after_all_three(acts in proptest::collection::vec(act(), 0..200)) {
            let mut slots = Slots::new(3);
            for number in slots.missing(3) {
                slots.laid(number, Laid::Done, at(0));
            }
            // (released, doors shut, VMM gone, laid since)
            let mut known = [(true, true, true, true); 3];
            let mut now = 0;
            for act in acts {
                match act {
                    Act::Take => if let Some(slot) = slots.take() {
                        prop_assert_eq!(known[usize::from(slot.0)], (true, true, true, true));
                        known[usize::from(slot.0)] = (false, false, false, false);
                    },
                    Act::Tell(slot, event) => {
                        let place = &mut known[usize::from(slot)];
                        if slots.tell(SlotNumber(slot), event, at(now)).is_ok() {
                            match event {
                                Event::Bound => place.1 = false,
                                Event::Armed => {}
                                Event::Released => place.0 = true,
                                Event::DoorsShut => place.1 = true,
                                Event::VmmGone => place.2 = true,
                            }
                        }
                    }
                    Act::Try(done) => for slot in slots.due(at(now)) {
                        let place = &mut known[usize::from(slot.0)];
                        prop_assert!(place.0 && place.1 && place.2);
                        place.3 = done;
                        slots.laid(slot, if done { Laid::Done } else { Laid::NotYet }, at(now));
                    },
                    Act::Wait(seconds) => now += seconds,
                }
                // None is ever lost.
                prop_assert_eq!(State::ALL.iter().map(|state| slots.counts().get(*state)).sum::<usize>(), 3);
            }
        }
    }
}
