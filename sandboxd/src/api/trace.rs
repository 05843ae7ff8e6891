//! Exact counts and step times of one call, for who asked by `sandbox-trace`.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message as _;
use sandbox_protocol::metadata::SANDBOX_WORK;

use crate::{
    clock::{Clock, Tick},
    work::{self, Counts},
};

/// A call being watched; without a wish for it, nothing is read or kept.
#[derive(Debug)]
pub(super) struct Trace(Option<Watched>);

#[derive(Debug)]
struct Watched {
    clock: Clock,
    last: Tick,
    counts: Counts,
    steps: Vec<(&'static str, u32)>,
}

impl Trace {
    pub(super) fn begin(clock: &Clock, wanted: bool) -> Self {
        Self(wanted.then(|| Watched {
            clock: clock.clone(),
            last: clock.tick(),
            counts: Counts::default(),
            steps: Vec::new(),
        }))
    }

    /// Ends a step.
    pub(super) fn step(&mut self, name: &'static str) {
        if let Some(watched) = &mut self.0 {
            watched.step(name);
        }
    }

    /// Runs a step of the call that does countable work.
    pub(super) async fn run<F: Future>(&mut self, name: &'static str, step: F) -> F::Output {
        let Some(watched) = &mut self.0 else {
            return step.await;
        };
        let (output, counts) = Box::pin(work::traced(step)).await;
        watched.counts = counts;
        watched.step(name);
        output
    }

    /// Writes what was counted, in `sandbox-work-bin`.
    pub(super) fn end(&mut self, to: &mut HeaderMap) {
        const NAME: HeaderName = HeaderName::from_static(SANDBOX_WORK);
        let Some(mut watched) = self.0.take() else {
            return;
        };
        watched.step("body");
        let mut work = watched.counts.to_proto();
        let steps = watched.steps.into_iter().map(|(name, us)| (name.to_owned(), us));
        work.steps_us.extend(steps);
        let text = STANDARD_NO_PAD.encode(work.encode_to_vec());
        to.insert(NAME, HeaderValue::try_from(text).expect("base64 is plain text"));
    }
}

impl Watched {
    fn step(&mut self, name: &'static str) {
        let now = self.clock.tick();
        self.steps.push((name, micros(now.since(self.last))));
        self.last = now;
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
