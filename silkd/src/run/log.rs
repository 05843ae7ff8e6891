//! What one program said: up to 256 bytes beside its entry, beyond that in pages of the arena. Pure, but for the memory.
//!
//! Both outputs have one numbering: an offset counts the bytes of both so far. Blocks (the 256 bytes, or a page) hold
//! records: two bytes that say which output and how many, then the bytes. What is held is one piece, from `start` to
//! `end`; it is dropped from the front only, block by block.

use std::collections::VecDeque;

use crate::sys::{PAGE, Pages};

/// Bytes that need no page, the records' heads among them.
const INLINE: usize = 256;
/// Bytes of a record's head.
const HEAD: usize = 2;
/// In a head: these are of stderr.
const STDERR: u16 = 0x8000;
/// In a head: how many.
const LENGTH: u16 = 0x7fff;

/// Which output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Stdout,
    Stderr,
}

/// Pages, and which of them are taken.
#[derive(Debug)]
pub(super) struct Arena {
    pages: Pages,
    /// Given back.
    free: Vec<u32>,
    /// Beyond it none was ever taken.
    fresh: u32,
}

impl Arena {
    pub(super) const fn new(pages: Pages) -> Self {
        Self {
            pages,
            free: Vec::new(),
            fresh: 0,
        }
    }

    /// Bytes of all pages.
    pub(super) fn size(&self) -> usize {
        self.pages.count() * PAGE
    }

    /// Bytes of those that are taken.
    pub(super) fn taken(&self) -> usize {
        (index(self.fresh) - self.free.len()) * PAGE
    }

    /// A page, if there is one.
    pub(super) fn take(&mut self) -> Option<u32> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        let number = self.fresh;
        (index(number) < self.pages.count()).then(|| {
            self.fresh += 1;
            number
        })
    }

    /// Takes a page back, and its memory goes back to the kernel.
    pub(super) fn put(&mut self, number: u32) {
        self.pages.release(index(number));
        self.free.push(number);
    }
}

/// Numbers of pages are counts of memory, which fit.
fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// How far a block is filled.
#[derive(Debug, Clone, Copy, Default)]
struct Fill {
    used: u16,
    /// Where the last record's head is.
    last: u16,
}

impl Fill {
    /// Adds what fits of `data`; gives how much did.
    fn add(&mut self, block: &mut [u8], side: Side, data: &[u8]) -> usize {
        let used = usize::from(self.used);
        let mark = match side {
            Side::Stdout => 0,
            Side::Stderr => STDERR,
        };
        let last = usize::from(self.last);
        let head = head_at(block, last).filter(|head| used > 0 && head & STDERR == mark);
        let (at, before) = match head {
            Some(head) => (last, head & LENGTH),
            None => (used, 0),
        };
        let begin = at + HEAD + usize::from(before);
        let room = block
            .len()
            .saturating_sub(begin)
            .min(usize::from(LENGTH - before));
        let take = room.min(data.len());
        let (Some(target), Some(source)) = (block.get_mut(begin..begin + take), data.get(..take)) else {
            return 0;
        };
        if take == 0 {
            return 0;
        }
        target.copy_from_slice(source);
        // Both are below the size of a block.
        let short = |count: usize| u16::try_from(count).unwrap_or(LENGTH);
        if let Some(head) = block.get_mut(at..at + HEAD) {
            head.copy_from_slice(&(mark | (before + short(take))).to_le_bytes());
        }
        *self = Self {
            used: short(begin + take),
            last: short(at),
        };
        take
    }
}

fn head_at(block: &[u8], at: usize) -> Option<u16> {
    let head = block.get(at..at + HEAD)?.try_into().ok()?;
    Some(u16::from_le_bytes(head))
}

/// The records of a block, in order.
fn records(block: &[u8], fill: Fill) -> impl Iterator<Item = (Side, &[u8])> {
    let mut rest = block.get(..usize::from(fill.used)).unwrap_or_default();
    std::iter::from_fn(move || {
        let head = head_at(rest, 0)?;
        let (data, after) = rest.get(HEAD..)?.split_at_checked(usize::from(head & LENGTH))?;
        rest = after;
        let side = if head & STDERR == 0 {
            Side::Stdout
        } else {
            Side::Stderr
        };
        Some((side, data))
    })
}

#[derive(Debug, Clone, Copy)]
struct Page {
    /// Offset of its first byte.
    start: u64,
    number: u32,
    fill: Fill,
}

/// Bytes of one output that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) side: Side,
    pub(super) offset: u64,
    pub(super) data: Vec<u8>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Log {
    start: u64,
    end: u64,
    inline: Vec<u8>,
    inline_fill: Fill,
    pages: VecDeque<Page>,
}

impl Log {
    /// An empty one, whose first byte is number `from`.
    pub(super) fn starting_at(from: u64) -> Self {
        Self {
            start: from,
            end: from,
            ..Self::default()
        }
    }

    /// The oldest byte that is held.
    pub(super) const fn start(&self) -> u64 {
        self.start
    }

    /// The number of the next byte.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// Pages that it takes.
    pub(super) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Bytes that it takes outside of pages.
    pub(super) fn inline(&self) -> usize {
        self.inline.capacity()
    }

    /// Adds what fits without another page; gives what does not.
    pub(super) fn add<'a>(&mut self, arena: &mut Arena, side: Side, data: &'a [u8]) -> &'a [u8] {
        let added = match self.pages.back_mut() {
            Some(page) => match arena.pages.get_mut(index(page.number)) {
                Some(block) => page.fill.add(block, side, data),
                None => 0,
            },
            None => {
                if self.inline.is_empty() && data.len() + HEAD <= INLINE {
                    self.inline.resize(INLINE, 0);
                }
                let fits = data.len() + HEAD + usize::from(self.inline_fill.used) <= INLINE;
                // A part of it here and the rest in a page would only be moved twice.
                match fits {
                    true => self.inline_fill.add(&mut self.inline, side, data),
                    false => 0,
                }
            }
        };
        self.end += wide(added);
        data.get(added..).unwrap_or_default()
    }

    /// Goes on in this page.
    pub(super) fn grow(&mut self, arena: &mut Arena, number: u32) {
        let mut page = Page {
            start: self.end,
            number,
            fill: Fill::default(),
        };
        if self.pages.is_empty() && self.inline_fill.used > 0 {
            if let Some(block) = arena.pages.get_mut(index(number))
                && let Some(target) = block.get_mut(..self.inline.len())
            {
                target.copy_from_slice(&self.inline);
            }
            page.start = self.start;
            page.fill = std::mem::take(&mut self.inline_fill);
        }
        self.inline = Vec::new();
        self.pages.push_back(page);
    }

    /// Whether its oldest page may go: nobody whom the program waits for still needs it.
    pub(super) fn evictable(&self, held: u64) -> bool {
        let end = self.pages.get(1).map_or(self.end, |page| page.start);
        !self.pages.is_empty() && end <= held
    }

    /// Drops the oldest page; it is the caller's.
    pub(super) fn evict(&mut self) -> Option<u32> {
        let page = self.pages.pop_front()?;
        self.start = self.pages.front().map_or(self.end, |page| page.start);
        Some(page.number)
    }

    /// Bytes that are not kept at all: there was no memory for them.
    pub(super) fn skip(&mut self, bytes: usize) {
        self.end += wide(bytes);
        self.start = self.end;
        self.inline = Vec::new();
        self.inline_fill = Fill::default();
    }

    /// Drops all that is held.
    pub(super) fn clear(&mut self, arena: &mut Arena) {
        for page in std::mem::take(&mut self.pages) {
            arena.put(page.number);
        }
        self.skip(0);
    }

    /// Nothing more is to come: takes no more room than it needs.
    pub(super) fn seal(&mut self) {
        self.inline.truncate(usize::from(self.inline_fill.used));
        self.inline.shrink_to_fit();
        self.pages.shrink_to_fit();
    }

    /// The bytes of one output from `at` on, `max` at most. `None` where none are held.
    pub(super) fn read(&self, arena: &Arena, at: u64, max: usize) -> Option<Piece> {
        if at < self.start || at >= self.end {
            return None;
        }
        let first = self
            .pages
            .partition_point(|page| page.start <= at)
            .saturating_sub(1);
        let pages = self.pages.iter().skip(first).filter_map(|page| {
            let block = arena.pages.get(index(page.number))?;
            Some((page.start, &block[..], page.fill))
        });
        let inline = (self.inline_fill.used > 0).then_some((self.start, &self.inline[..], self.inline_fill));
        let blocks = inline.into_iter().chain(pages);
        let pieces = blocks.flat_map(|(start, block, fill)| {
            records(block, fill).scan(start, |offset, (side, data)| {
                let begin = *offset;
                *offset += wide(data.len());
                Some((begin, side, data))
            })
        });
        let mut piece: Option<Piece> = None;
        for (begin, side, data) in pieces {
            let skip = usize::try_from(at.saturating_sub(begin)).unwrap_or(usize::MAX);
            let Some(data) = data.get(skip..).filter(|data| !data.is_empty()) else {
                continue;
            };
            let piece = piece.get_or_insert_with(|| Piece {
                side,
                offset: at,
                data: Vec::with_capacity(data.len()),
            });
            let room = max.saturating_sub(piece.data.len());
            if piece.side != side || room == 0 {
                break;
            }
            piece.data.extend_from_slice(data.get(..room).unwrap_or(data));
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All that is held, byte by byte.
    fn held(log: &Log, arena: &Arena, max: usize) -> Vec<(Side, u8)> {
        let mut at = log.start();
        let mut bytes = Vec::new();
        while let Some(piece) = log.read(arena, at, max) {
            assert!(piece.offset == at && piece.data.len() <= max && !piece.data.is_empty());
            at += wide(piece.data.len());
            bytes.extend(piece.data.iter().map(|byte| (piece.side, *byte)));
        }
        assert_eq!(at, log.end());
        bytes
    }

    fn side(stderr: bool) -> Side {
        if stderr { Side::Stderr } else { Side::Stdout }
    }

    proptest! {
        /// Whatever is written, in whatever pieces, is read as it came, from any offset, and what was dropped is
        /// missing from the front alone.
        #[test]
        fn what_is_said_is_kept_in_order(
            writes in proptest::collection::vec((any::<bool>(), 0..3000_usize), 0..40),
            most in 1..6_usize,
            max in 1..9000_usize,
        ) {
            let mut arena = Arena::new(Pages::new(64).unwrap());
            let mut log = Log::starting_at(7);
            let mut said = Vec::new();
            for (place, (stderr, length)) in writes.into_iter().enumerate() {
                let data: Vec<u8> = (0..length).map(|n| u8::try_from((n + place) % 251).unwrap()).collect();
                said.extend(data.iter().map(|byte| (side(stderr), *byte)));
                let mut rest = &data[..];
                loop {
                    rest = log.add(&mut arena, side(stderr), rest);
                    if rest.is_empty() {
                        break;
                    }
                    let number = match log.pages() >= most {
                        true => log.evict().unwrap(),
                        false => arena.take().unwrap(),
                    };
                    log.grow(&mut arena, number);
                }
                prop_assert!(log.pages() <= most && log.inline() <= INLINE);
            }
            prop_assert_eq!(log.end(), 7 + wide(said.len()));
            let kept = held(&log, &arena, max);
            prop_assert!(said.ends_with(&kept));
            prop_assert_eq!(log.end() - log.start(), wide(kept.len()));
            if log.pages() > 0 {
                // Heads take less than the bytes that follow them, but for single bytes.
                prop_assert!(kept.len() >= (log.pages() - 1) * PAGE / 3);
            }
            log.seal();
            prop_assert_eq!(held(&log, &arena, max), kept);
            log.clear(&mut arena);
            prop_assert_eq!((arena.taken(), log.start()), (0, log.end()));
        }
    }

    #[test]
    fn little_needs_no_page_and_a_page_more_moves_it_there() {
        let mut arena = Arena::new(Pages::new(2).unwrap());
        let mut log = Log::default();
        assert!(log.add(&mut arena, Side::Stdout, &[1; 200]).is_empty());
        assert!(log.add(&mut arena, Side::Stderr, &[2; 40]).is_empty());
        assert_eq!(arena.taken(), 0);
        assert_eq!(log.add(&mut arena, Side::Stderr, &[3; 40]).len(), 40);
        log.grow(&mut arena, 0);
        assert!(log.add(&mut arena, Side::Stderr, &[3; 40]).is_empty());
        assert_eq!(
            (log.pages(), log.inline(), log.start(), log.end()),
            (1, 0, 0, 280)
        );
        assert_eq!(held(&log, &arena, 9000).len(), 280);
    }

    #[test]
    fn pages_run_out_and_come_back_empty() {
        let mut arena = Arena::new(Pages::new(2).unwrap());
        let both = [arena.take().unwrap(), arena.take().unwrap()];
        assert_eq!(
            (arena.take(), arena.taken(), arena.size()),
            (None, 2 * PAGE, 2 * PAGE)
        );
        arena.pages.get_mut(0).unwrap()[9] = 7;
        both.into_iter().for_each(|number| arena.put(number));
        assert_eq!(arena.taken(), 0);
        assert_eq!(arena.pages.get(0).unwrap()[9], 0);
        assert!(arena.pages.get(2).is_none());
    }
}
