//! The node's budget: memory, number of sandboxes, slots. Nothing starts without a [`Reservation`].
//!
//! May call: names, words.
//! Never inside: I/O, an await under the lock, a decision about who gets the place.
//! Invariant 22: the node budget is never exceeded (the other half, one daemon per state directory, is
//! `journal/lock`'s).
//! Cancel safety: nothing here waits but [`Vacancy::appeared`], which may be dropped and called again.

mod budget;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use self::budget::Budget;
pub use self::budget::{Full, Limits, SlotHeld, Used};
use crate::{
    names::SlotNumber,
    words::{MemBytes, Size},
};

/// The budget of this node; clones share it.
#[derive(Debug, Clone)]
pub struct Admission(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    budget: Mutex<Budget>,
    /// Counts the times that room appeared; a reader that was away sees that it missed one.
    vacancies: watch::Sender<u64>,
}

impl Admission {
    /// A budget of which nothing is used.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared {
            budget: Mutex::new(Budget::new(limits)),
            vacancies: watch::Sender::new(0),
        }))
    }

    /// Reserves the lowest free slot and the memory of a guest of this size. Never waits.
    ///
    /// # Errors
    /// Which part of the budget is used up; [`vacancy`](Self::vacancy) tells when to try again.
    pub fn try_reserve(&self, size: Size) -> Result<Reservation, Full> {
        let (slot, memory) = self.0.lock().reserve(size.memory)?;
        Ok(self.hold(slot, memory))
    }

    /// Reserves a slot that a guest from before this daemon has, within the budget or not: what lives is counted,
    /// and nothing new starts until it fits again.
    ///
    /// # Errors
    /// The slot is held already.
    pub fn adopt(&self, slot: SlotNumber, size: Size) -> Result<Reservation, SlotHeld> {
        let memory = self.0.lock().adopt(slot, size.memory).ok_or(SlotHeld { slot })?;
        Ok(self.hold(slot, memory))
    }

    /// Takes a slot out of quarantine, for whoever will now prove that its guest is gone. `None`: it is not there.
    #[must_use = "dropping the reservation frees the slot"]
    pub fn readmit(&self, slot: SlotNumber) -> Option<Reservation> {
        let memory = self.0.lock().readmit(slot)?;
        Some(self.hold(slot, memory))
    }

    /// What is used of the budget.
    #[must_use]
    pub fn used(&self) -> Used {
        self.0.lock().used()
    }

    /// News of room, from now on.
    #[must_use]
    pub fn vacancy(&self) -> Vacancy {
        Vacancy(self.0.vacancies.subscribe())
    }

    fn hold(&self, slot: SlotNumber, memory: MemBytes) -> Reservation {
        Reservation {
            shared: Arc::clone(&self.0),
            place: Some((slot, memory)),
            slot,
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Budget> {
        // Each change of the budget is whole or not begun, so a panic elsewhere leaves it right.
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One guest's part of the budget. Dropping it gives slot and memory back, so it is kept until the guest is proved gone.
#[derive(Debug)]
#[must_use = "dropping it frees the slot"]
pub struct Reservation {
    shared: Arc<Shared>,
    place: Option<(SlotNumber, MemBytes)>,
    slot: SlotNumber,
}

impl Reservation {
    /// The slot.
    #[must_use]
    pub const fn slot(&self) -> SlotNumber {
        self.slot
    }

    /// Keeps slot and memory for good: the guest's end cannot be proved. [`Admission::readmit`] takes it up again.
    pub fn quarantine(mut self) {
        if let Some((slot, memory)) = self.place.take() {
            self.shared.lock().quarantine(slot, memory);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some((slot, memory)) = self.place.take() {
            self.shared.lock().free(slot, memory);
            self.shared
                .vacancies
                .send_modify(|count| *count = count.wrapping_add(1));
        }
    }
}

/// News that something was given back.
#[derive(Debug)]
pub struct Vacancy(watch::Receiver<u64>);

impl Vacancy {
    /// Resolves once something was given back since this was made or last resolved; at once if it already was. For
    /// ever pending when the budget is gone. Cancel safe.
    pub async fn appeared(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
