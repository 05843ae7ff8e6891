//! Who gives input to a program: one at a time. The seat is a value that is moved, with our end of the program's
//! standard input in it; dropped, it is free again.

use std::{os::fd::OwnedFd, sync::Arc};

use sandbox_protocol::reason::Reason;
use tokio::io::unix::AsyncFd;

use super::Job;
use crate::refusal::Refusal;

/// Where the seat of a program is.
#[derive(Debug)]
pub(super) enum SeatState {
    /// Nobody has it. `None` inside: the program reads `/dev/null`, or its input was closed.
    Free(Option<AsyncFd<OwnedFd>>),
    Taken,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Seat {
    job: Arc<Job>,
    /// Dropped, it closes the program's input for good.
    pub(super) stdin: Option<AsyncFd<OwnedFd>>,
}

impl Seat {
    /// The first one of a program that has begun.
    pub(super) fn first(job: &Arc<Job>, stdin: Option<AsyncFd<OwnedFd>>) -> Self {
        job.lock().seat = SeatState::Taken;
        Self {
            job: job.clone(),
            stdin,
        }
    }

    /// Takes it, if it is free.
    ///
    /// # Errors
    /// `INPUT_BUSY`.
    pub(super) fn take(job: &Arc<Job>) -> Result<Self, Refusal> {
        match std::mem::replace(&mut job.lock().seat, SeatState::Taken) {
            SeatState::Free(stdin) => Ok(Self {
                job: job.clone(),
                stdin,
            }),
            SeatState::Taken => {
                let message = format!("another client gives input to process {}", job.id());
                Err(Refusal::new(Reason::InputBusy, message))
            }
        }
    }

    /// Whose it is.
    pub(super) const fn job(&self) -> &Arc<Job> {
        &self.job
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let stdin = self.stdin.take();
        // Nobody can take it any more from one that has ended: what is left of its input goes.
        let stdin = stdin.filter(|_| self.job.runs());
        self.job.lock().seat = SeatState::Free(stdin);
    }
}
