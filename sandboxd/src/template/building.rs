//! A build under way, as those see it who want it.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use super::{Spec, TemplateError};
use crate::{
    engine::Capture,
    feed::{Feed, News, Reader},
    words::PoolKey,
};

/// A step of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildStep {
    /// The image boots.
    Boot,
    /// Its agent answers and is given an identity.
    Agent,
    /// The warm-up runs.
    Warmup,
    /// The guest comes to rest.
    Quiesce,
    /// Memory and device state are kept.
    Capture,
    /// A clone is made of it and answers.
    Check,
}

impl fmt::Display for BuildStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Boot => "boot",
            Self::Agent => "agent",
            Self::Warmup => "warm-up",
            Self::Quiesce => "quiesce",
            Self::Capture => "capture",
            Self::Check => "check",
        })
    }
}

/// What a build tells while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildEvent {
    /// A step has begun, that long after the build.
    Step(BuildStep, Duration),
    /// It is through, well or not.
    Through,
}

/// A line of news of one build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// A step is over, and took that long.
    Done(PoolKey, BuildStep, Duration),
    /// The variant is there, that long after its build began.
    Built(PoolKey, Duration),
    /// There is none.
    Failed(PoolKey, String),
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(key, step, took) => {
                write!(f, "template {}: {step} {:.3} s", key.template, took.as_secs_f64())
            }
            Self::Built(key, took) => {
                write!(
                    f,
                    "template {}: built in {:.3} s (lane {}, size {})",
                    key.template,
                    took.as_secs_f64(),
                    key.lane,
                    key.size
                )
            }
            Self::Failed(key, why) => write!(f, "template {}: failed: {why}", key.template),
        }
    }
}

/// A build under way, shared by all who want it.
#[derive(Debug)]
pub(super) struct Building {
    spec: Spec,
    feed: Feed<BuildEvent>,
    outcome: OnceLock<Result<Capture, Arc<TemplateError>>>,
    /// Under this lock a build is joined, and cancelled by the last one who leaves it: nobody joins one that is cancelled.
    wanted_by: Mutex<usize>,
    cancelled: CancellationToken,
}

/// One who wants a build. The last one who drops it cancels the build.
#[derive(Debug)]
pub struct Build {
    building: Arc<Building>,
    events: Reader<BuildEvent>,
}

impl Building {
    pub(super) fn begin(spec: Spec) -> (Arc<Self>, Build) {
        let building = Arc::new(Self {
            spec,
            feed: Feed::default(),
            outcome: OnceLock::new(),
            wanted_by: Mutex::new(1),
            cancelled: CancellationToken::new(),
        });
        let build = building.reader();
        (building, build)
    }

    /// One more who wants it; none once it is cancelled.
    pub(super) fn join(self: &Arc<Self>) -> Option<Build> {
        let mut wanted_by = self.wanted_by();
        if self.is_cancelled() {
            return None;
        }
        *wanted_by += 1;
        drop(wanted_by);
        Some(self.reader())
    }

    fn reader(self: &Arc<Self>) -> Build {
        Build {
            events: self.feed.read(),
            building: Arc::clone(self),
        }
    }

    fn wanted_by(&self) -> MutexGuard<'_, usize> {
        self.wanted_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) const fn spec(&self) -> &Spec {
        &self.spec
    }

    pub(super) fn tell(&self, event: BuildEvent) {
        self.feed.tell(|| event);
    }

    pub(super) fn cancel(&self) {
        self.cancelled.cancel();
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.is_cancelled()
    }

    /// Runs work for as long as somebody wants the build.
    pub(super) async fn while_wanted<T>(
        &self,
        work: impl Future<Output = Result<T, TemplateError>>,
    ) -> Result<T, TemplateError> {
        tokio::select! {
            biased;
            () = self.cancelled.cancelled() => Err(TemplateError::Cancelled),
            done = work => done,
        }
    }

    /// Waits until nothing of it is left, without wanting it. Cancel safe.
    pub(super) async fn over(&self) {
        // Subscribed before the look at the outcome, which is set before it is told.
        let mut events = self.feed.read();
        while self.outcome.get().is_none() && events.next().await != News::Closed {}
    }

    pub(super) fn finish(&self, outcome: Result<Capture, TemplateError>) {
        // There is one task per build, hence one outcome.
        drop(self.outcome.set(outcome.map_err(Arc::new)));
        self.tell(BuildEvent::Through);
    }
}

impl Build {
    #[cfg(test)]
    pub(super) fn is_cancelled(&self) -> bool {
        self.building.is_cancelled()
    }

    /// The next event; `Through` last. Steps that were too fast for the reader are passed over. Cancel safe.
    pub async fn next(&mut self) -> BuildEvent {
        loop {
            if self.building.outcome.get().is_some() {
                return BuildEvent::Through;
            }
            match self.events.next().await {
                News::Event(event) => return event,
                News::Lost(_) => {}
                News::Closed => return BuildEvent::Through,
            }
        }
    }

    /// Waits for the outcome. Cancel safe only in that the build is no longer wanted then.
    ///
    /// # Errors
    /// Why it failed.
    pub async fn done(mut self) -> Result<Capture, TemplateError> {
        while self.next().await != BuildEvent::Through {}
        match self.building.outcome.get() {
            Some(Ok(capture)) => Ok(capture.clone()),
            Some(Err(error)) => Err(TemplateError::Shared(Arc::clone(error))),
            None => Err(TemplateError::Cancelled),
        }
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        let mut wanted_by = self.building.wanted_by();
        *wanted_by = wanted_by.saturating_sub(1);
        if *wanted_by == 0 {
            self.building.cancel();
        }
    }
}
