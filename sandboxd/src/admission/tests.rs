use std::{collections::HashSet, thread};

use proptest::prelude::*;

use super::*;
use crate::words::Vcpus;

fn size(mib: u64) -> Size {
    Size {
        vcpus: Vcpus(1),
        memory: MemBytes::from_mib(mib),
    }
}

fn node(mib: u64, sandboxes: u16) -> Admission {
    Admission::new(Limits {
        memory: MemBytes::from_mib(mib),
        sandboxes,
        counts_memory: true,
    })
}

#[test]
fn inv_22_herd_stays_within_the_budget() {
    let node = node(1_000, 64);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut held = Vec::new();
                for round in 0..2_000 {
                    match node.try_reserve(size(100)) {
                        Ok(place) => held.push(place),
                        Err(full) => assert!(matches!(full, Full::Memory { .. }), "{full}"),
                    }
                    let used = node.used();
                    assert!(used.reserved <= used.budget && used.sandboxes <= 10, "{used:?}");
                    if round % 3 == 0 {
                        held.pop();
                    }
                }
            });
        }
    });
    let used = node.used();
    assert_eq!((used.reserved, used.sandboxes), (MemBytes(0), 0));
}

#[test]
fn slots_are_the_lowest_free_and_never_shared() {
    let node = node(1_000_000, 3);
    let places: Vec<_> = (0..3).map(|_| node.try_reserve(size(1)).unwrap()).collect();
    assert_eq!(
        places.iter().map(|place| place.slot().0).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    let full = node.try_reserve(size(1)).unwrap_err();
    assert_eq!(
        full,
        Full::Sandboxes {
            max: 3,
            quarantined: 0
        }
    );
    assert!(!full.for_ever());
    let mut places = places;
    drop(places.remove(1));
    assert_eq!(node.try_reserve(size(1)).unwrap().slot(), SlotNumber(1));
}

#[test]
fn what_lives_is_adopted_over_the_budget_and_then_nothing_starts() {
    let node = node(100, 2);
    let far = node.adopt(SlotNumber(900), size(80)).unwrap();
    assert_eq!(
        node.adopt(SlotNumber(900), size(1)).unwrap_err().slot,
        SlotNumber(900)
    );
    let near = node.adopt(SlotNumber(0), size(80)).unwrap();
    assert!(matches!(node.try_reserve(size(1)), Err(Full::Memory { .. })));
    drop(near);
    assert_eq!(node.try_reserve(size(20)).unwrap().slot(), SlotNumber(0));
    // Two places are all there are, wherever the held one lies.
    let one = node.try_reserve(size(10)).unwrap();
    assert!(matches!(node.try_reserve(size(1)), Err(Full::Sandboxes { .. })));
    drop((far, one));
    assert_eq!(node.used().reserved, MemBytes(0));
}

#[test]
fn what_can_never_fit_says_so() {
    let full = node(100, 4).try_reserve(size(101)).unwrap_err();
    assert!(full.for_ever());
    assert_eq!(
        full.to_string(),
        "the guest needs 101 MiB, and 0 of 100 MiB are reserved"
    );
}

#[test]
fn a_stub_costs_a_place_and_no_memory() {
    let node = Admission::new(Limits {
        memory: MemBytes(0),
        sandboxes: 2,
        counts_memory: false,
    });
    let held = (
        node.try_reserve(size(4096)).unwrap(),
        node.try_reserve(size(4096)).unwrap(),
    );
    assert_eq!(node.used().reserved, MemBytes(0));
    drop(held);
}

#[test]
fn quarantine_keeps_the_place_until_it_is_taken_up_again() {
    let node = node(100, 1);
    node.try_reserve(size(60)).unwrap().quarantine();
    assert_eq!(
        node.try_reserve(size(1)).unwrap_err(),
        Full::Sandboxes {
            max: 1,
            quarantined: 1
        }
    );
    assert_eq!(node.used().reserved, MemBytes::from_mib(60));
    assert!(node.readmit(SlotNumber(7)).is_none());
    let again = node.readmit(SlotNumber(0)).unwrap();
    assert!(node.readmit(SlotNumber(0)).is_none());
    drop(again);
    assert_eq!(node.try_reserve(size(100)).unwrap().slot(), SlotNumber(0));
}

#[tokio::test]
async fn room_wakes_who_waits_and_is_not_missed_by_who_was_away() {
    let node = node(100, 1);
    let place = node.try_reserve(size(1)).unwrap();
    let mut vacancy = node.vacancy();
    drop(place);
    vacancy.appeared().await;
    let place = node.try_reserve(size(1)).unwrap();
    let mut waiting = Box::pin(vacancy.appeared());
    assert!(futures_util::poll!(&mut waiting).is_pending());
    place.quarantine();
    assert!(futures_util::poll!(&mut waiting).is_pending());
    drop(node.readmit(SlotNumber(0)));
    waiting.await;
}

proptest! {
    #[test]
    fn the_books_balance(steps in prop::collection::vec((0u8..5, 0usize..16, 1u64..40), 1..200)) {
        let node = node(256, 12);
        let mut held: Vec<(Reservation, u64)> = Vec::new();
        let mut locked: Vec<(SlotNumber, u64)> = Vec::new();
        for (what, which, mib) in steps {
            match what {
                0 | 1 => {
                    let before = node.used();
                    match node.try_reserve(size(mib)) {
                        Ok(place) => held.push((place, mib)),
                        Err(Full::Memory { .. }) => {
                            prop_assert!(before.reserved.mib() + mib > 256);
                        }
                        Err(Full::Sandboxes { .. }) => prop_assert_eq!(before.sandboxes, 12),
                    }
                }
                2 if !held.is_empty() => drop(held.remove(which % held.len())),
                3 if !held.is_empty() => {
                    let (place, mib) = held.remove(which % held.len());
                    locked.push((place.slot(), mib));
                    place.quarantine();
                }
                4 if !locked.is_empty() => {
                    let (slot, mib) = locked.remove(which % locked.len());
                    held.push((node.readmit(slot).unwrap(), mib));
                }
                _ => {}
            }
            let slots: HashSet<_> = held
                .iter()
                .map(|(place, _)| place.slot())
                .chain(locked.iter().map(|(slot, _)| *slot))
                .collect();
            prop_assert_eq!(slots.len(), held.len() + locked.len());
            let sum: u64 = held.iter().map(|(_, mib)| mib).chain(locked.iter().map(|(_, mib)| mib)).sum();
            let used = node.used();
            prop_assert_eq!(used.reserved, MemBytes::from_mib(sum));
            prop_assert_eq!(used.sandboxes as usize, slots.len());
            prop_assert!(sum <= 256 && slots.len() <= 12);
        }
    }
}
