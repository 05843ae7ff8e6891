//! All logs and the one budget that they share, and their readers. A reader is a cursor; nothing is built for a log
//! that nobody follows. The first follower makes the log's wake-up list, under the lock that every byte passes, so that
//! it misses none and sees none twice.
//!
//! Where memory runs out, the oldest pages go: those of programs that have exited, longest dead first, then those of
//! the running one that holds most. What a program waits to have read is spared. Every loss is a gap that readers are
//! told of.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use sandbox_protocol::{
    limits::{CHUNK_OUT, LOG_MAX},
    reason::Reason,
    v1::{LogFrom, log_from::At},
};

use super::log::{Arena, Log, Piece, Side};
use crate::{
    refusal::Refusal,
    sys::{PAGE, Pages},
};

/// Bytes that a reader for whom the program waits may be behind before the program waits: a chunk.
const HOLD: u64 = CHUNK_OUT as u64;

/// The logs of a runner.
#[derive(Debug)]
pub(super) struct Logs(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    arena: Arena,
    logs: BTreeMap<u64, Box<Entry>>,
    /// Those with pages whose programs have exited, in that order.
    dead: BTreeMap<u64, u64>,
    deaths: u64,
    rings_built: u64,
    /// For those who came once.
    last_reader: u64,
}

#[derive(Debug)]
struct Entry {
    log: Log,
    /// Pages that it may take.
    most: usize,
    /// Nothing more is to come; with its place among the dead.
    over: Option<u64>,
    ring: Option<Box<Ring>>,
}

/// Who follows a log.
#[derive(Debug, Default)]
struct Ring {
    readers: Vec<Slot>,
    /// Waits for a reader that it may not lose.
    writer: Option<Waker>,
}

#[derive(Debug)]
struct Slot {
    key: u64,
    cursor: u64,
    hold: bool,
    waker: Option<Waker>,
}

/// How a log stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) readers: u32,
}

/// What a reader gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item {
    Piece(Piece),
    /// These bytes are no longer held.
    Gap {
        from: u64,
        to: u64,
    },
    /// Nothing more is to come.
    End,
}

impl Ring {
    /// Up to where everything was read by those for whom the program waits.
    fn held(&self) -> u64 {
        let cursors = self
            .readers
            .iter()
            .filter(|slot| slot.hold)
            .map(|slot| slot.cursor);
        cursors.min().unwrap_or(u64::MAX)
    }

    fn wake_all(&mut self) -> Vec<Waker> {
        let readers = self.readers.iter_mut().filter_map(|slot| slot.waker.take());
        readers.chain(self.writer.take()).collect()
    }
}

impl Entry {
    fn held(&self) -> u64 {
        self.ring.as_ref().map_or(u64::MAX, |ring| ring.held())
    }

    fn readers(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.readers.len())
    }

    fn extent(&self) -> Extent {
        Extent {
            start: self.log.start(),
            end: self.log.end(),
            readers: u32::try_from(self.readers()).unwrap_or(u32::MAX),
        }
    }
}

impl Inner {
    /// A page, whoever has to give it.
    fn page(&mut self, id: u64) -> Option<u32> {
        let entry = self.logs.get_mut(&id)?;
        if entry.log.pages() >= entry.most && entry.log.evictable(entry.held()) {
            return entry.log.evict();
        }
        if let Some(number) = self.arena.take() {
            return Some(number);
        }
        let longest_dead = self.dead.iter().find(|(_, id)| {
            let entry = self.logs.get(id);
            entry.is_some_and(|entry| entry.log.evictable(entry.held()))
        });
        if let Some((place, dead)) = longest_dead.map(|(place, id)| (*place, *id)) {
            let entry = self.logs.get_mut(&dead)?;
            let page = entry.log.evict();
            if entry.log.pages() == 0 {
                self.dead.remove(&place);
            }
            return page;
        }
        let living = self.logs.values_mut().filter(|entry| entry.over.is_none());
        let able = living.filter(|entry| entry.log.evictable(entry.held()));
        able.max_by_key(|entry| entry.log.pages())?.log.evict()
    }

    fn append(&mut self, id: u64, side: Side, data: &[u8]) -> Vec<Waker> {
        let mut rest = data;
        while let Some(entry) = self.logs.get_mut(&id) {
            rest = entry.log.add(&mut self.arena, side, rest);
            if rest.is_empty() {
                break;
            }
            match self.page(id) {
                Some(number) => {
                    if let Some(entry) = self.logs.get_mut(&id) {
                        entry.log.grow(&mut self.arena, number);
                    }
                }
                None => {
                    if let Some(entry) = self.logs.get_mut(&id) {
                        entry.log.clear(&mut self.arena);
                        entry.log.skip(rest.len());
                    }
                    break;
                }
            }
        }
        let ring = self.logs.get_mut(&id).and_then(|entry| entry.ring.as_mut());
        ring.map_or_else(Vec::new, |ring| {
            ring.readers
                .iter_mut()
                .filter_map(|slot| slot.waker.take())
                .collect()
        })
    }

    fn remove(&mut self, id: u64) -> Vec<Waker> {
        let Some(mut entry) = self.logs.remove(&id) else {
            return Vec::new();
        };
        entry.log.clear(&mut self.arena);
        if let Some(place) = entry.over {
            self.dead.remove(&place);
        }
        entry.ring.as_mut().map_or_else(Vec::new, |ring| ring.wake_all())
    }

    /// An entry that holds nothing, and never will, is not kept.
    fn tidy(&mut self, id: u64) {
        let entry = self.logs.get(&id);
        if entry.is_some_and(|entry| entry.over.is_some() && entry.log.end() == 0 && entry.readers() == 0) {
            drop(self.remove(id));
        }
    }
}

impl Logs {
    /// Logs that take so many bytes together.
    ///
    /// # Errors
    /// The kernel's: no address space.
    pub(super) fn new(budget: u64) -> rustix::io::Result<Self> {
        let pages = usize::try_from(budget).unwrap_or(usize::MAX) / PAGE;
        Ok(Self(Mutex::new(Inner {
            arena: Arena::new(Pages::new(pages)?),
            logs: BTreeMap::new(),
            dead: BTreeMap::new(),
            deaths: 0,
            rings_built: 0,
            last_reader: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the log of a program, whose first byte is number `from`; it may hold so many bytes.
    pub(super) fn open(&self, id: u64, from: u64, bytes: u64) {
        // One more, since heads take a little of each.
        let most = usize::try_from(bytes.min(LOG_MAX))
            .unwrap_or(usize::MAX)
            .div_ceil(PAGE)
            + 1;
        let entry = Entry {
            log: Log::starting_at(from),
            most,
            over: None,
            ring: None,
        };
        self.lock().logs.insert(id, Box::new(entry));
    }

    /// Adds what a program said. What there is no room for becomes a gap.
    pub(super) fn append(&self, id: u64, side: Side, data: &[u8]) {
        let wakers = self.lock().append(id, side, data);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ready when no reader that the program waits for is too far behind.
    pub(super) fn poll_room(&self, id: u64, cx: &Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        let Some(entry) = inner.logs.get_mut(&id) else {
            return Poll::Ready(());
        };
        let end = entry.log.end();
        let Some(ring) = &mut entry.ring else {
            return Poll::Ready(());
        };
        if end.saturating_sub(ring.held()) < HOLD {
            return Poll::Ready(());
        }
        ring.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Nothing more is to come.
    pub(super) fn end(&self, id: u64) {
        let mut inner = self.lock();
        inner.deaths += 1;
        let place = inner.deaths;
        let Some(entry) = inner.logs.get_mut(&id) else {
            return;
        };
        entry.over = Some(place);
        entry.log.seal();
        let wakers = entry.ring.as_mut().map_or_else(Vec::new, |ring| ring.wake_all());
        if entry.log.pages() > 0 {
            inner.dead.insert(place, id);
        }
        inner.tidy(id);
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Drops a log; its readers come to their end.
    pub(super) fn remove(&self, id: u64) {
        let wakers = self.lock().remove(id);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Drops what is held of programs that run.
    pub(super) fn clear(&self) {
        let mut inner = self.lock();
        let Inner { arena, logs, .. } = &mut *inner;
        logs.values_mut().for_each(|entry| entry.log.clear(arena));
    }

    /// How the log of a program stands; `None` if it has none.
    pub(super) fn extent(&self, id: u64) -> Option<Extent> {
        self.lock().logs.get(&id).map(|entry| entry.extent())
    }

    /// Wake-up lists that were ever made.
    pub(super) fn rings_built(&self) -> u64 {
        self.lock().rings_built
    }

    /// Whether one was made for this log.
    pub(super) fn has_ring(&self, id: u64) -> bool {
        self.lock()
            .logs
            .get(&id)
            .is_some_and(|entry| entry.ring.is_some())
    }

    /// Bytes that all take, and how many they may.
    pub(super) fn usage(&self) -> (u64, u64) {
        let inner = self.lock();
        let inline: usize = inner.logs.values().map(|entry| entry.log.inline()).sum();
        let wide = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
        (wide(inner.arena.taken() + inline), wide(inner.arena.size()))
    }

    /// A reader of what a program said. One that follows is told of what comes; one that holds, the program waits for.
    ///
    /// # Errors
    /// `OFFSET_OUT_OF_RANGE`.
    pub(super) fn reader(
        self: &Arc<Self>,
        id: u64,
        from: Option<&LogFrom>,
        follow: Follow,
    ) -> Result<(Reader, Extent), Refusal> {
        let mut inner = self.lock();
        // One that held nothing is gone.
        let extent = inner
            .logs
            .get(&id)
            .map_or_else(Extent::default, |entry| entry.extent());
        let cursor = match from.and_then(|from| from.at) {
            None | Some(At::Oldest(_)) => extent.start,
            Some(At::Live(_)) => extent.end,
            Some(At::Offset(offset)) if offset <= extent.end => offset,
            Some(At::Offset(offset)) => {
                let message = format!("offset {offset}: the output has {} bytes", extent.end);
                return Err(Refusal::new(Reason::OffsetOutOfRange, message));
            }
        };
        let mut reader = Reader {
            logs: self.clone(),
            id,
            key: None,
            cursor,
            until: extent.end,
        };
        if let Follow::Gap | Follow::Hold = follow {
            reader.until = u64::MAX;
            reader.key = inner.follow(id, cursor, follow == Follow::Hold);
        }
        Ok((reader, extent))
    }
}

impl Inner {
    fn follow(&mut self, id: u64, cursor: u64, hold: bool) -> Option<u64> {
        let entry = self.logs.get_mut(&id)?;
        let rings_built = &mut self.rings_built;
        let ring = entry.ring.get_or_insert_with(|| {
            *rings_built += 1;
            Box::default()
        });
        self.last_reader += 1;
        ring.readers.push(Slot {
            key: self.last_reader,
            cursor,
            hold,
            waker: None,
        });
        Some(self.last_reader)
    }
}

/// How a reader goes on at the end of what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    /// Not at all.
    No,
    /// With what comes, as long as it is held.
    Gap,
    /// With what comes; the program waits for it.
    Hold,
}

/// A cursor into a log; nobody waits for it once it is dropped.
#[derive(Debug)]
pub(super) struct Reader {
    logs: Arc<Logs>,
    id: u64,
    /// Its place in the wake-up list.
    key: Option<u64>,
    cursor: u64,
    /// Where it ends, if it does not follow.
    until: u64,
}

impl Reader {
    /// What comes next, `max` bytes at most.
    pub(super) fn poll(&mut self, cx: &Context<'_>, max: usize) -> Poll<Item> {
        let logs = self.logs.clone();
        let mut inner = logs.lock();
        let Inner { arena, logs, .. } = &mut *inner;
        let Some(entry) = logs.get_mut(&self.id) else {
            return Poll::Ready(Item::End);
        };
        let left = usize::try_from(self.until.saturating_sub(self.cursor)).unwrap_or(usize::MAX);
        let start = entry.log.start();
        let item = if left == 0 {
            Item::End
        } else if self.cursor < start {
            Item::Gap {
                from: self.cursor,
                to: start,
            }
        } else if let Some(piece) = entry.log.read(arena, self.cursor, max.min(left).min(CHUNK_OUT)) {
            Item::Piece(piece)
        } else if entry.over.is_some() || self.key.is_none() {
            Item::End
        } else {
            let slot = entry.slot(self.key);
            if let Some(slot) = slot {
                slot.waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        };
        match &item {
            Item::Piece(piece) => self.cursor += u64::try_from(piece.data.len()).unwrap_or(0),
            Item::Gap { to, .. } => self.cursor = *to,
            Item::End => {}
        }
        if let Some(slot) = entry.slot(self.key) {
            slot.cursor = self.cursor;
        }
        let writer = entry.ring.as_mut().and_then(|ring| ring.writer.take());
        drop(inner);
        writer.into_iter().for_each(Waker::wake);
        Poll::Ready(item)
    }
}

impl Entry {
    fn slot(&mut self, key: Option<u64>) -> Option<&mut Slot> {
        let ring = self.ring.as_mut()?;
        ring.readers.iter_mut().find(|slot| Some(slot.key) == key)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let Some(key) = self.key else {
            return;
        };
        let mut inner = self.logs.lock();
        let ring = inner.logs.get_mut(&self.id).and_then(|entry| entry.ring.as_mut());
        let writer = ring.and_then(|ring| {
            ring.readers.retain(|slot| slot.key != key);
            ring.writer.take()
        });
        inner.tidy(self.id);
        drop(inner);
        writer.into_iter().for_each(Waker::wake);
    }
}
