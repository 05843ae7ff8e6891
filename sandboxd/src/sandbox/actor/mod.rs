//! The task that owns one sandbox: makes or adopts it, keeps watch over its machine and its link, and tears it down.
//!
//! [`make`] and [`adopt`] begin a life, each by [`steps`] that have a limit, its way to its [`doors`] among them; [`watch`] goes on until there is a reason to
//! end; [`end`] is the one teardown.
//!
//! Invariant 21: ending always progresses; twice is harmless. Whatever is under way, the wish to end is looked at first;
//! a teardown step that fails is tried again for ever, with growing pauses, and is shown.

mod adopt;
mod doors;
mod end;
mod make;
mod steps;
mod watch;

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt as _;
use tracing::Instrument as _;

pub use self::{
    adopt::Admitted,
    make::{MakeError, MakeSpec, Source},
};
use super::{
    entry::{Birth, Sandbox},
    life::{Event, Why, WhyKind},
    registry::Sandboxes,
};
use crate::{admission::Reservation, engine::Machine, net::Taken, telemetry::span};

#[derive(Debug)]
struct Actor {
    sandbox: Arc<Sandbox>,
    sandboxes: Sandboxes,
    machine: Option<Arc<dyn Machine>>,
}

impl Sandboxes {
    fn enter(&self, birth: Birth, taken: Option<Taken>, reservation: Option<Reservation>) -> Actor {
        let door = self.means().egress.door(birth.id);
        let sandbox = Arc::new(Sandbox::new(birth, taken, reservation, door));
        self.insert(Arc::clone(&sandbox));
        Actor {
            sandbox,
            sandboxes: self.clone(),
            machine: None,
        }
    }

    /// Starts the task that owns a sandbox, and that keeps watch over what `begin` brings up. Where it panics, that
    /// sandbox ends, and no other.
    fn own_from(&self, sandbox: &Arc<Sandbox>, begin: impl Future<Output = Option<Actor>> + Send + 'static) {
        let begin = Box::pin(begin);
        self.own(sandbox, async move {
            // Its beginning holds far more than the watch, and is dropped before that.
            if let Some(actor) = begin.await {
                actor.keep().await;
            }
        });
    }

    /// Starts the task that owns a sandbox. Where it panics, that sandbox ends, and no other.
    fn own(&self, sandbox: &Arc<Sandbox>, owner: impl Future<Output = ()> + Send + 'static) {
        let (span, sandbox, sandboxes) = (span::sandbox(&sandbox.id), Arc::clone(sandbox), self.clone());
        let owner = AssertUnwindSafe(Box::pin(owner)).catch_unwind();
        let owned = async move {
            if owner.await.is_err() {
                // Its panic was logged where it happened. It may be ending already.
                drop(sandbox.apply(&sandboxes, Event::Died(Why::of(WhyKind::OwnerPanicked))));
                let actor = Actor {
                    sandbox,
                    sandboxes,
                    machine: None,
                };
                Box::pin(actor.end()).await;
            }
        };
        self.owners().spawn("sandbox", owned.instrument(span));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn size_of_future<A, F>(_of: fn(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_task_of_a_living_sandbox_is_small() {
        let keep = size_of_future(Actor::keep);
        assert!(keep <= 768, "{keep} bytes for each sandbox");
    }
}
