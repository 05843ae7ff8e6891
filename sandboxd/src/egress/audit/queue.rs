//! Entries that wait to be written, numbered in their order. It has a bound, and what finds no room leaves its number to a
//! line that says so. Pure.

use std::collections::VecDeque;

use super::entry::Entry;

/// The queue.
#[derive(Debug)]
pub(super) struct Queue {
    most: usize,
    next: u64,
    items: VecDeque<(u64, Entry)>,
}

impl Queue {
    /// An empty one, for so many entries, whose first gets this number.
    pub(super) const fn new(most: usize, next: u64) -> Self {
        Self {
            most,
            next,
            items: VecDeque::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.items.len() >= self.most
    }

    /// Puts what `entry` makes of its number, and gives what it gives beside it. Number 0: there is no room, and what is made
    /// is lost, for which a number stands.
    pub(super) fn push<T>(&mut self, entry: impl FnOnce(u64) -> (Entry, T)) -> T {
        if self.is_full() {
            self.lose(1);
            return entry(0).1;
        }
        let seq = self.next;
        self.next += 1;
        let (entry, beside) = entry(seq);
        self.items.push_back((seq, entry));
        beside
    }

    /// So many entries are lost at this place.
    pub(super) fn lose(&mut self, count: u64) {
        let first = self.next;
        let last = first + count.saturating_sub(1);
        self.next = last + 1;
        match self.items.back_mut() {
            Some((seq, Entry::Lost { .. })) => *seq = last,
            // One more than fits: there is one at most for each time that the queue was emptied.
            Some(_) | None => self.items.push_back((last, Entry::Lost { from: first })),
        }
    }

    /// Moves all that waits behind what is in `into`, whose room is kept for later.
    pub(super) fn take(&mut self, into: &mut VecDeque<(u64, Entry)>) {
        if into.is_empty() {
            std::mem::swap(&mut self.items, into);
        } else {
            into.append(&mut self.items);
        }
    }
}
