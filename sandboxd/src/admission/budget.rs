//! The arithmetic of the budget, pure.

use std::collections::BTreeMap;

use crate::{names::SlotNumber, words::MemBytes};

/// What the node may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Memory for guests; each counts with its full size.
    pub memory: MemBytes,
    /// Sandboxes at most, whatever their state.
    pub sandboxes: u16,
    /// Whether guests use memory worth counting; those of the stub engine do not.
    pub counts_memory: bool,
}

/// What is used of the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Memory that guests may use at most.
    pub budget: MemBytes,
    /// Memory reserved for guests. Over the budget only by guests that were adopted.
    pub reserved: MemBytes,
    /// Slots held, those in quarantine included.
    pub sandboxes: u32,
    /// Slots at most.
    pub sandboxes_max: u16,
    /// Slots in quarantine.
    pub quarantined: u32,
}

/// What is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// Memory.
    #[error("the guest needs {} MiB, and {} of {} MiB are reserved", asked.mib(), reserved.mib(), budget.mib())]
    Memory {
        /// What the guest needs.
        asked: MemBytes,
        /// What is reserved.
        reserved: MemBytes,
        /// `node.memory`.
        budget: MemBytes,
    },
    /// Places.
    #[error("all {max} places are taken, {quarantined} of them in quarantine")]
    Sandboxes {
        /// `node.max_sandboxes`.
        max: u16,
        /// Slots in quarantine.
        quarantined: u32,
    },
}

impl Full {
    /// Whether no release can ever make enough room.
    #[must_use]
    pub const fn for_ever(&self) -> bool {
        match self {
            Self::Memory { asked, budget, .. } => asked.0 > budget.0,
            Self::Sandboxes { max, .. } => *max == 0,
        }
    }
}

/// A slot that is taken already, by a row or by what the host shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot} is held already")]
pub struct SlotHeld {
    /// The slot.
    pub slot: SlotNumber,
}

/// A bit per slot, set while it is held.
#[derive(Debug)]
struct Slots {
    words: Vec<u64>,
    held: u32,
}

impl Slots {
    fn new() -> Self {
        // All 65,536 slots are 8 KiB: adoption may meet any of them.
        Self {
            words: vec![0; 1024],
            held: 0,
        }
    }

    fn word(&mut self, slot: SlotNumber) -> (&mut u64, u64) {
        let word = self
            .words
            .get_mut(usize::from(slot.0 / 64))
            .expect("1024 words hold every u16");
        (word, 1 << (slot.0 % 64))
    }

    /// Whether it was free.
    fn set(&mut self, slot: SlotNumber) -> bool {
        let (word, bit) = self.word(slot);
        let was_free = *word & bit == 0;
        *word |= bit;
        self.held += u32::from(was_free);
        was_free
    }

    fn clear(&mut self, slot: SlotNumber) {
        let (word, bit) = self.word(slot);
        let was_held = *word & bit != 0;
        *word &= !bit;
        self.held -= u32::from(was_held);
    }

    /// The lowest free slot below `end`.
    fn lowest_free(&self, end: u16) -> Option<SlotNumber> {
        let (index, word) = self
            .words
            .iter()
            .enumerate()
            .find(|(_, word)| **word != u64::MAX)?;
        let number = u16::try_from(index).ok()? * 64 + u16::try_from(word.trailing_ones()).ok()?;
        (number < end).then_some(SlotNumber(number))
    }
}

#[derive(Debug)]
pub(super) struct Budget {
    limits: Limits,
    reserved: MemBytes,
    slots: Slots,
    quarantined: BTreeMap<SlotNumber, MemBytes>,
}

impl Budget {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            reserved: MemBytes(0),
            slots: Slots::new(),
            quarantined: BTreeMap::new(),
        }
    }

    fn charge(&self, memory: MemBytes) -> MemBytes {
        if self.limits.counts_memory {
            memory
        } else {
            MemBytes(0)
        }
    }

    fn quarantined_count(&self) -> u32 {
        u32::try_from(self.quarantined.len()).unwrap_or(u32::MAX)
    }

    /// A slot, and the memory that is charged for it.
    pub(super) fn reserve(&mut self, memory: MemBytes) -> Result<(SlotNumber, MemBytes), Full> {
        let memory = self.charge(memory);
        let after = self.reserved.0.saturating_add(memory.0);
        if memory.0 > 0 && after > self.limits.memory.0 {
            return Err(Full::Memory {
                asked: memory,
                reserved: self.reserved,
                budget: self.limits.memory,
            });
        }
        // Adopted slots may lie beyond the end, so the count is looked at as well.
        let slot = self
            .slots
            .lowest_free(self.limits.sandboxes)
            .filter(|_| self.slots.held < u32::from(self.limits.sandboxes))
            .ok_or(Full::Sandboxes {
                max: self.limits.sandboxes,
                quarantined: self.quarantined_count(),
            })?;
        self.slots.set(slot);
        self.reserved = MemBytes(after);
        Ok((slot, memory))
    }

    /// The memory that is charged, or `None` if the slot is held.
    pub(super) fn adopt(&mut self, slot: SlotNumber, memory: MemBytes) -> Option<MemBytes> {
        let memory = self.charge(memory);
        self.slots.set(slot).then(|| {
            self.reserved = MemBytes(self.reserved.0.saturating_add(memory.0));
            memory
        })
    }

    pub(super) fn free(&mut self, slot: SlotNumber, memory: MemBytes) {
        self.slots.clear(slot);
        self.reserved = MemBytes(self.reserved.0.saturating_sub(memory.0));
    }

    pub(super) fn quarantine(&mut self, slot: SlotNumber, memory: MemBytes) {
        self.quarantined.insert(slot, memory);
    }

    pub(super) fn readmit(&mut self, slot: SlotNumber) -> Option<MemBytes> {
        self.quarantined.remove(&slot)
    }

    pub(super) fn used(&self) -> Used {
        Used {
            budget: self.limits.memory,
            reserved: self.reserved,
            sandboxes: self.slots.held,
            sandboxes_max: self.limits.sandboxes,
            quarantined: self.quarantined_count(),
        }
    }
}
