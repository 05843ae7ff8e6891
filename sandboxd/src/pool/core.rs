//! The stock itself, pure: last in, first out for takers, first come, first served for waiters.
//!
//! Values move: what [`Core::take`] gives is no longer here, so nothing can be given twice. Taking and putting cost the
//! same whatever the stock holds, and taking allocates nothing unless something spoiled was in the way.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::oneshot;

use crate::clock::Tick;

/// Waiters in line at most. Each is an open call of a client, so this bounds what clients can make us keep, not what
/// an honest burst needs: at 4,096 in line the last one would wait for as many clones.
pub const WAITERS: usize = 4096;

/// Whether a piece of stock may be given away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usable {
    /// It answered of late.
    Yes,
    /// It lives, but has not answered of late: one probe tells.
    Stale,
    /// It is ending; nobody may have it.
    Ending,
}

/// What a pool keeps.
pub trait Stock {
    /// Whether it may be given away now.
    fn usable(&self, now: Tick) -> Usable;
}

/// What a take found. Whatever is in `stale` and `ending` has left the stock.
#[derive(Debug)]
#[must_use = "spoiled stock needs a probe or an end"]
pub struct Taken<G, W> {
    /// What the taker gets.
    pub got: G,
    /// What lay in the way and did not answer of late: probe each, then tell [`Core::rechecked`].
    pub stale: Vec<W>,
    /// What lay in the way and is ending.
    pub ending: Vec<W>,
}

/// What a taker gets that is willing to wait.
#[derive(Debug)]
pub enum Served<W> {
    /// The newest that is usable.
    Piece(W),
    /// A place in line.
    InLine(InLine<W>),
    /// Neither.
    Refused(LineError),
}

/// A place in line. Whoever stops waiting says so with [`Core::leave`], and drops what may have arrived.
#[derive(Debug)]
pub struct InLine<W> {
    /// Its number.
    pub turn: Turn,
    /// Where the piece arrives; an error says that the pool was closed.
    pub arrives: oneshot::Receiver<W>,
}

/// Where a piece went.
#[derive(Debug)]
#[must_use = "refused stock needs an end"]
pub enum Placed<W> {
    /// To the waiter that had waited longest.
    Handed,
    /// Into the stock.
    Stocked,
    /// Nowhere: the pool is closed, or the piece is ending.
    Refused(W),
}

/// The number of a place in line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Turn(u64);

/// The line has [`WAITERS`] in it, or the pool is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// It is as long as it may be.
    #[error("{WAITERS} claims wait in line already")]
    Full,
    /// There will be no more stock.
    #[error("the pool is closed")]
    Closed,
}

/// How much there is of what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// In stock.
    pub warm: u32,
    /// Begun, and neither in stock nor failed.
    pub making: u32,
    /// Out of the stock for a probe.
    pub checking: u32,
    /// Claims in line.
    pub waiting: u32,
}

/// The stock, the line and the counts of one pool.
#[derive(Debug)]
pub struct Core<W> {
    /// Oldest first.
    stock: VecDeque<W>,
    /// By the time they came.
    line: BTreeMap<Turn, oneshot::Sender<W>>,
    next_turn: u64,
    making: u32,
    checking: u32,
    closed: bool,
}

impl<W: Stock> Core<W> {
    /// An empty pool that keeps `expected` pieces without allocating again.
    #[must_use]
    pub fn new(expected: usize) -> Self {
        Self {
            stock: VecDeque::with_capacity(expected),
            line: BTreeMap::new(),
            next_turn: 0,
            making: 0,
            checking: 0,
            closed: false,
        }
    }

    /// Takes the newest that is usable, and clears what lay in its way.
    pub fn take(&mut self, now: Tick) -> Taken<Option<W>, W> {
        let mut taken = Taken {
            got: None,
            stale: Vec::new(),
            ending: Vec::new(),
        };
        while let Some(piece) = self.stock.pop_back() {
            match piece.usable(now) {
                Usable::Yes => {
                    taken.got = Some(piece);
                    break;
                }
                Usable::Stale => {
                    self.checking += 1;
                    taken.stale.push(piece);
                }
                Usable::Ending => taken.ending.push(piece),
            }
        }
        taken
    }

    /// Takes, or stands in line. One step and not two: a piece that came between them would lie in stock beside
    /// somebody who waits for it.
    pub fn take_or_join(&mut self, now: Tick) -> Taken<Served<W>, W> {
        let Taken { got, stale, ending } = self.take(now);
        let got = match got {
            Some(piece) => Served::Piece(piece),
            None => match self.join() {
                Ok(place) => Served::InLine(place),
                Err(refused) => Served::Refused(refused),
            },
        };
        Taken { got, stale, ending }
    }

    /// Adds a piece that was not begun here (one that was re-adopted, say).
    pub fn put(&mut self, piece: W, now: Tick) -> Placed<W> {
        if self.closed || piece.usable(now) == Usable::Ending {
            return Placed::Refused(piece);
        }
        let mut piece = piece;
        while let Some((_, waiter)) = self.line.pop_first() {
            match waiter.send(piece) {
                Ok(()) => return Placed::Handed,
                // That one left just now; the next one gets it.
                Err(back) => piece = back,
            }
        }
        self.stock.push_back(piece);
        Placed::Stocked
    }

    /// Counts pieces that refill begins.
    pub fn begin(&mut self, count: u32) {
        self.making += count;
    }

    /// Adds a piece that refill began.
    pub fn made(&mut self, piece: W, now: Tick) -> Placed<W> {
        self.making = self.making.saturating_sub(1);
        self.put(piece, now)
    }

    /// A piece that refill began came to nothing.
    pub fn failed(&mut self) {
        self.making = self.making.saturating_sub(1);
    }

    /// The outcome of the probe of one stale piece: back into the stock, or `None` if it is lost.
    pub fn rechecked(&mut self, piece: Option<W>, now: Tick) -> Option<Placed<W>> {
        self.checking = self.checking.saturating_sub(1);
        piece.map(|piece| self.put(piece, now))
    }

    fn join(&mut self) -> Result<InLine<W>, LineError> {
        if self.closed {
            return Err(LineError::Closed);
        }
        if self.line.len() >= WAITERS {
            return Err(LineError::Full);
        }
        let (give, arrives) = oneshot::channel();
        let turn = Turn(self.next_turn);
        self.next_turn += 1;
        self.line.insert(turn, give);
        Ok(InLine { turn, arrives })
    }

    /// Leaves the line. Harmless after the turn has come: the piece is then in the receiver, and belongs to whoever
    /// holds that.
    pub fn leave(&mut self, turn: Turn) {
        self.line.remove(&turn);
    }

    /// Takes out the oldest, `count` at most.
    pub fn shrink(&mut self, count: u32) -> Vec<W> {
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.stock.len());
        self.stock.drain(..count).collect()
    }

    /// Takes out what is ending. Looks at all of the stock, so it is for the news of a death, not for a take.
    pub fn sweep(&mut self, now: Tick) -> Vec<W> {
        self.take_out(|piece| piece.usable(now) == Usable::Ending)
    }

    /// Takes out what `is_bad`. Looks at all of the stock.
    pub fn take_out(&mut self, is_bad: impl Fn(&W) -> bool) -> Vec<W> {
        if !self.stock.iter().any(&is_bad) {
            return Vec::new();
        }
        let (gone, kept) = self.stock.drain(..).partition::<Vec<_>, _>(is_bad);
        self.stock.extend(kept);
        gone
    }

    /// Ends the pool: gives all its stock, and tells every waiter that nothing will come. Repeatable.
    pub fn close(&mut self) -> Vec<W> {
        self.closed = true;
        self.line.clear();
        self.stock.drain(..).collect()
    }

    /// Whether nothing more is taken in.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.closed
    }

    /// How much there is of what.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Counts {
            warm: count(self.stock.len()),
            making: self.making,
            checking: self.checking,
            waiting: count(self.line.len()),
        }
    }
}
