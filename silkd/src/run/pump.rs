//! What a program with a log says, on its way there; and its time. The janitor runs it: no call waits for it.

use std::future::poll_fn;

use super::{
    core::{Core, Event},
    time::Time,
};

/// See the module. Dropped before the program has exited, it ends the program.
#[derive(Debug)]
pub(super) struct Pump {
    core: Core,
    time: Time,
}

impl Pump {
    /// The log of the program is open already.
    pub(super) const fn new(core: Core, time: Time) -> Self {
        Self { core, time }
    }

    /// Until the program has exited, and all that it said is in its log.
    pub(super) async fn run(mut self) {
        let job = self.core.job().clone();
        let logs = job.shared().logs.clone();
        let id = job.id();
        loop {
            let core = &mut self.core;
            let event = poll_fn(|cx| {
                // The program waits for a reader that may lose nothing.
                std::task::ready!(logs.poll_room(id, cx));
                core.poll(cx)
            });
            tokio::select! {
                biased;
                signal = self.time.due() => {
                    job.time_out(signal);
                    self.time.sent(signal);
                }
                event = event => match event {
                    Event::Said(side, bytes) => logs.append(id, side, &bytes),
                    Event::Exit(_record) => break,
                },
            }
        }
        job.shared().retire(&job);
    }
}
