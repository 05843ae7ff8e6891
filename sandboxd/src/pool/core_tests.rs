use std::collections::{HashSet, VecDeque};

use proptest::prelude::*;
use tokio::sync::oneshot;

use super::core::{Core, InLine, LineError, Placed, Served, Stock, Usable, WAITERS};
use crate::clock::Tick;

/// Not `Clone`, like what the pool really keeps.
#[derive(Debug)]
struct Piece {
    id: u32,
    usable: fn() -> Usable,
}

impl Piece {
    fn new(id: u32) -> Self {
        Self {
            id,
            usable: || Usable::Yes,
        }
    }

    fn stale(id: u32) -> Self {
        Self {
            id,
            usable: || Usable::Stale,
        }
    }

    fn ending(id: u32) -> Self {
        Self {
            id,
            usable: || Usable::Ending,
        }
    }
}

impl Stock for Piece {
    fn usable(&self, _now: Tick) -> Usable {
        (self.usable)()
    }
}

const NOW: Tick = Tick::from_nanos(0);

fn ids(pieces: &[Piece]) -> Vec<u32> {
    pieces.iter().map(|piece| piece.id).collect()
}

fn join(core: &mut Core<Piece>) -> Result<InLine<Piece>, LineError> {
    match core.take_or_join(NOW).got {
        Served::Piece(piece) => panic!("{piece:?} was in stock"),
        Served::InLine(place) => Ok(place),
        Served::Refused(refused) => Err(refused),
    }
}

fn stocked(core: &mut Core<Piece>, piece: Piece) {
    assert!(matches!(core.put(piece, NOW), Placed::Stocked));
}

#[test]
fn the_newest_usable_is_taken_and_what_lay_in_the_way_comes_along() {
    let mut core = Core::new(8);
    for piece in [Piece::new(0), Piece::new(1), Piece::stale(2)] {
        stocked(&mut core, piece);
    }
    let taken = core.take(NOW);
    assert_eq!(taken.got.unwrap().id, 1);
    assert_eq!((ids(&taken.stale), ids(&taken.ending)), (vec![2], vec![]));
    let counts = core.counts();
    assert_eq!((counts.warm, counts.checking), (1, 1));

    assert!(matches!(
        core.rechecked(Some(Piece::new(2)), NOW),
        Some(Placed::Stocked)
    ));
    assert_eq!(core.counts().checking, 0);
    assert_eq!(core.take(NOW).got.unwrap().id, 2);
}

#[test]
fn what_ends_is_refused_and_swept() {
    let mut core = Core::new(8);
    assert!(matches!(
        core.put(Piece::ending(1), NOW),
        Placed::Refused(Piece { id: 1, .. })
    ));
    stocked(&mut core, Piece::new(2));
    thread_local!(static DEAD: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    stocked(
        &mut core,
        Piece {
            id: 3,
            usable: || {
                if DEAD.get() { Usable::Ending } else { Usable::Yes }
            },
        },
    );
    stocked(&mut core, Piece::new(4));
    assert!(core.sweep(NOW).is_empty());
    DEAD.set(true);
    assert_eq!(ids(&core.sweep(NOW)), [3]);
    assert_eq!(core.take(NOW).got.unwrap().id, 4);
    assert_eq!(core.take(NOW).got.unwrap().id, 2);
}

#[tokio::test]
async fn whoever_waited_longest_is_served_first_and_who_left_is_skipped() {
    let mut core = Core::new(8);
    let left = join(&mut core).unwrap();
    let second = join(&mut core).unwrap();
    let third = join(&mut core).unwrap();
    drop(left.arrives);
    let fourth = join(&mut core).unwrap();
    core.leave(fourth.turn);
    drop(fourth);
    core.begin(3);
    assert_eq!(core.counts().waiting, 3);
    assert!(matches!(core.made(Piece::new(1), NOW), Placed::Handed));
    assert!(matches!(core.made(Piece::new(2), NOW), Placed::Handed));
    assert!(matches!(core.made(Piece::new(3), NOW), Placed::Stocked));
    assert_eq!(
        (second.arrives.await.unwrap().id, third.arrives.await.unwrap().id),
        (1, 2)
    );
    core.leave(left.turn);
    let counts = core.counts();
    assert_eq!((counts.waiting, counts.making, counts.warm), (0, 0, 1));
}

#[test]
fn the_line_has_an_end() {
    let mut core = Core::<Piece>::new(0);
    let line: Vec<_> = (0..WAITERS).map(|_| join(&mut core).unwrap()).collect();
    assert_eq!(join(&mut core).unwrap_err(), LineError::Full);
    core.leave(line[7].turn);
    assert!(join(&mut core).is_ok());
}

#[test]
fn a_closed_pool_gives_its_stock_and_frees_its_line() {
    let mut core = Core::new(4);
    stocked(&mut core, Piece::new(1));
    stocked(&mut core, Piece::new(2));
    let taken = (core.take(NOW), core.take(NOW));
    let mut waiting = join(&mut core).unwrap();
    drop(taken);
    assert!(core.close().is_empty());
    assert_eq!(
        waiting.arrives.try_recv().unwrap_err(),
        oneshot::error::TryRecvError::Closed
    );
    assert_eq!(join(&mut core).unwrap_err(), LineError::Closed);
    assert!(matches!(core.put(Piece::new(3), NOW), Placed::Refused(_)));
    assert!(core.is_closed());
}

#[test]
fn the_oldest_go_first() {
    let mut core = Core::new(4);
    for id in 0..4 {
        stocked(&mut core, Piece::new(id));
    }
    assert_eq!(ids(&core.shrink(2)), [0, 1]);
    assert_eq!(ids(&core.shrink(9)), [2, 3]);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Put,
    PutStale,
    Made,
    Take,
    Join,
    Leave(usize),
    Vanish(usize),
    Receive(usize),
    Recheck(bool),
    Gone,
    Shrink(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Put),
        1 => Just(Step::PutStale),
        3 => Just(Step::Made),
        5 => Just(Step::Take),
        3 => Just(Step::Join),
        1 => (0usize..8).prop_map(Step::Leave),
        1 => (0usize..8).prop_map(Step::Vanish),
        2 => (0usize..8).prop_map(Step::Receive),
        1 => any::<bool>().prop_map(Step::Recheck),
        2 => Just(Step::Gone),
        1 => (0u32..3).prop_map(Step::Shrink),
    ];
    prop::collection::vec(step, 1..120)
}

/// What the world outside the pool holds.
#[derive(Debug, Default)]
struct World {
    next: u32,
    /// Whoever waits, in the order they came; what arrived lies in the receiver.
    line: VecDeque<InLine<Piece>>,
    claimed: Vec<Piece>,
    given: HashSet<u32>,
    checking: Vec<Piece>,
    ended: usize,
}

impl World {
    fn piece(&mut self) -> Piece {
        self.next += 1;
        Piece::new(self.next)
    }

    fn claim(&mut self, piece: Piece) -> Result<(), TestCaseError> {
        prop_assert!(self.given.insert(piece.id), "{} was given twice", piece.id);
        self.claimed.push(piece);
        Ok(())
    }

    fn take_or_join(&mut self, core: &mut Core<Piece>) -> Result<(), TestCaseError> {
        let taken = core.take_or_join(NOW);
        self.checking.extend(taken.stale);
        match taken.got {
            Served::Piece(piece) => self.claim(piece)?,
            Served::InLine(place) => self.line.push_back(place),
            Served::Refused(refused) => prop_assert!(false, "{refused}"),
        }
        Ok(())
    }

    fn placed(&mut self, placed: Placed<Piece>) -> Result<(), TestCaseError> {
        match placed {
            Placed::Handed | Placed::Stocked => {}
            Placed::Refused(piece) => prop_assert!(false, "{} was refused", piece.id),
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn inv_01_one_claim(steps in steps()) {
        let mut core = Core::new(4);
        let mut world = World::default();
        for step in steps {
            apply(step, &mut core, &mut world)?;
            let counts = core.counts();
            prop_assert_eq!(counts.checking as usize, world.checking.len());
            // Whoever waits and is still there has nothing while there is stock.
            let starving = world.line.iter_mut().any(|place| place.arrives.is_empty() && !place.arrives.is_terminated());
            prop_assert!(!(starving && counts.warm > 0), "someone starves beside {counts:?}");
        }
        // Everything that came in is somewhere, once.
        let mut seen = HashSet::new();
        let in_line = world.line.iter_mut().filter_map(|place| place.arrives.try_recv().ok());
        let all = world.claimed.into_iter().chain(world.checking).chain(in_line).chain(core.close());
        for piece in all {
            prop_assert!(seen.insert(piece.id), "{} is in two places", piece.id);
        }
        prop_assert_eq!(seen.len() + world.ended, world.next as usize, "something was lost");
    }
}

fn apply(step: Step, core: &mut Core<Piece>, world: &mut World) -> Result<(), TestCaseError> {
    match step {
        Step::Put => {
            let piece = world.piece();
            let placed = core.put(piece, NOW);
            world.placed(placed)?;
        }
        Step::PutStale => {
            world.next += 1;
            let placed = core.put(Piece::stale(world.next), NOW);
            world.placed(placed)?;
        }
        Step::Made => {
            core.begin(1);
            let piece = world.piece();
            let placed = core.made(piece, NOW);
            world.placed(placed)?;
        }
        Step::Take => {
            let taken = core.take(NOW);
            world.checking.extend(taken.stale);
            if let Some(piece) = taken.got {
                world.claim(piece)?;
            }
        }
        Step::Join => world.take_or_join(core)?,
        Step::Leave(which) if which < world.line.len() => {
            let mut place = world.line.remove(which).unwrap();
            core.leave(place.turn);
            if let Ok(piece) = place.arrives.try_recv() {
                world.claim(piece)?;
            }
        }
        Step::Vanish(which) if which < world.line.len() => {
            // Gone without a word; a piece that had arrived is dropped, which ends it.
            let mut place = world.line.remove(which).unwrap();
            if let Ok(piece) = place.arrives.try_recv() {
                world.claim(piece)?;
            }
        }
        Step::Receive(which) if which < world.line.len() => {
            if let Ok(piece) = world.line[which].arrives.try_recv() {
                world.line.remove(which);
                world.claim(piece)?;
            }
        }
        Step::Recheck(alive) => {
            if let Some(piece) = world.checking.pop() {
                world.ended += usize::from(!alive);
                let back = alive.then(|| Piece::new(piece.id));
                if let Some(placed) = core.rechecked(back, NOW) {
                    world.placed(placed)?;
                }
            }
        }
        Step::Gone => {
            if world.claimed.pop().is_some() {
                world.ended += 1;
            }
        }
        Step::Shrink(count) => world.ended += core.shrink(count).len(),
        Step::Leave(_) | Step::Vanish(_) | Step::Receive(_) => {}
    }
    Ok(())
}
