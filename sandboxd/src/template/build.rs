//! One build: boot, agent, warm-up, quiesce, capture, check. Whatever fails, nothing of it is left.

use std::{
    fmt,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use sandbox_protocol::id::{RequestId, SandboxId};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{Spec, TemplateError, Templates, catalog};
use crate::{
    admission::Reservation,
    agent::{self, Ended, RenewMode, RenewSpec},
    clock::Tick,
    disk,
    engine::{Capture, CaptureManifest, ImageRef, Machine, Place, Port, PortName, Purpose},
    faults,
    feed::{Feed, News, Reader},
    image::Image,
    link::{self, Link, LinkError, Opened},
    random, tasks,
    telemetry::chain,
    words::{PoolKey, Size},
};

/// A boot, up to the agent's answer; under software emulation on a busy host it takes tens of seconds.
const BOOT: Duration = Duration::from_secs(180);
/// A clone that checks the capture, up to the agent's answer.
const CHECK: Duration = Duration::from_secs(60);
/// Renewal, hooks included, and quiescing.
const CONTROL: Duration = Duration::from_secs(30);
/// Writing the device state.
const CAPTURE: Duration = Duration::from_secs(60);

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
    feed: Feed<BuildEvent>,
    outcome: OnceLock<Result<Capture, Arc<TemplateError>>>,
    wanted_by: AtomicUsize,
    cancelled: CancellationToken,
}

/// One who wants a build. The last one who drops it cancels the build.
#[derive(Debug)]
pub struct Build {
    building: Arc<Building>,
    events: Reader<BuildEvent>,
}

impl Building {
    pub(super) fn begin() -> (Arc<Self>, Build) {
        let building = Arc::new(Self {
            feed: Feed::default(),
            outcome: OnceLock::new(),
            wanted_by: AtomicUsize::new(0),
            cancelled: CancellationToken::new(),
        });
        let build = building.join();
        (building, build)
    }

    pub(super) fn join(self: &Arc<Self>) -> Build {
        self.wanted_by.fetch_add(1, Ordering::Relaxed);
        Build {
            events: self.feed.read(),
            building: Arc::clone(self),
        }
    }

    pub(super) fn cancel(&self) {
        self.cancelled.cancel();
    }

    pub(super) fn finish(&self, outcome: Result<Capture, TemplateError>) {
        // There is one task per build, hence one outcome.
        drop(self.outcome.set(outcome.map_err(Arc::new)));
        self.feed.tell(|| BuildEvent::Through);
    }
}

impl Build {
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
        if self.building.wanted_by.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.building.cancel();
        }
    }
}

/// What one build holds, to be given back whatever happens.
struct Bench<'a> {
    templates: &'a Templates,
    building: &'a Building,
    key: PoolKey,
    begun: Tick,
    step_begun: Tick,
    reservation: Reservation,
    staging: PathBuf,
    machine: Option<Box<dyn Machine>>,
    step: BuildStep,
}

/// Builds a variant.
pub(super) async fn run(
    templates: &Templates,
    spec: &Spec,
    key: &PoolKey,
    size: Size,
    building: &Building,
) -> Result<Capture, TemplateError> {
    let means = &templates.0.means;
    let reservation = means
        .admission
        .try_reserve(size)
        .map_err(TemplateError::Capacity)?;
    let staging = means
        .dir
        .join(format!("{}{}", catalog::STAGING, reservation.slot()));
    let begun = means.clock.tick();
    let mut bench = Bench {
        templates,
        building,
        key: key.clone(),
        begun,
        step_begun: begun,
        reservation,
        staging,
        machine: None,
        step: BuildStep::Boot,
    };
    let built = tokio::select! {
        biased;
        () = building.cancelled.cancelled() => Err(TemplateError::Cancelled),
        built = bench.build(spec, key, size) => built,
    };
    let progress = match &built {
        Ok(_) => {
            bench.step_over();
            Progress::Built(key.clone(), means.clock.tick().since(begun))
        }
        Err(error) => Progress::Failed(key.clone(), chain(error)),
    };
    templates.0.progress.tell(|| progress);
    let console = bench.machine.as_ref().map(|machine| machine.console());
    bench.clear().await;
    built.map_err(|error| match (error, console) {
        (TemplateError::Failed { step, why }, Some(console)) if !console.as_str().is_empty() => {
            TemplateError::Failed {
                step,
                why: format!("{why}; console: {console}"),
            }
        }
        (error, _) => error,
    })
}

impl Bench<'_> {
    /// A step is over and the next begins.
    fn enter(&mut self, step: BuildStep) {
        self.step_over();
        self.step = step;
        let elapsed = self.step_begun.since(self.begun);
        self.building.feed.tell(|| BuildEvent::Step(step, elapsed));
        tracing::debug!(%step, ?elapsed, "template build");
    }

    fn step_over(&mut self) {
        let now = self.templates.0.means.clock.tick();
        let (key, step, took) = (self.key.clone(), self.step, now.since(self.step_begun));
        self.templates.0.progress.tell(|| Progress::Done(key, step, took));
        self.step_begun = now;
    }

    fn failed(&self, why: impl fmt::Display) -> TemplateError {
        TemplateError::Failed {
            step: self.step,
            why: why.to_string(),
        }
    }

    /// Runs a step's wait within its limit.
    async fn within<T, E: std::error::Error + 'static>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, TemplateError> {
        match timeout(limit, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.failed(chain(&error))),
            Err(_elapsed) => Err(self.failed(format_args!("no answer within {limit:?}"))),
        }
    }

    async fn build(&mut self, spec: &Spec, key: &PoolKey, size: Size) -> Result<Capture, TemplateError> {
        let image = self.boot(spec, key, size).await?;
        let opened = self.greet(BOOT).await?;
        self.enter(BuildStep::Agent);
        let hello = opened.hello.clone();
        self.renew(&opened.link, RenewMode::Boot).await?;
        self.warm_up(spec, &opened.link).await?;

        self.enter(BuildStep::Quiesce);
        let resting = agent::quiesce(&opened.link, agent::Quiesce::Template, CONTROL);
        self.within(CONTROL, resting).await?;
        opened.link.close();
        drop(opened);

        self.enter(BuildStep::Capture);
        let staging = self.staging.clone();
        let machine = self.machine.as_ref().ok_or(TemplateError::Cancelled)?;
        let captured = self.within(CAPTURE, machine.capture(&staging)).await?;
        faults::passage("template.captured");
        self.stop_machine().await?;
        let means = &self.templates.0.means;
        let manifest = CaptureManifest {
            format: CaptureManifest::FORMAT,
            facts: means.engine.facts(),
            image: ImageRef::of(&image),
            size,
            lane: key.lane,
            proto_min: hello.proto_min,
            proto_max: hello.proto_max,
            warmup: spec.warmup.clone(),
            created_at: means.clock.wall(),
            ram: captured.ram,
            state: captured.state,
        };
        let capture = self.on_disk(move || Capture::seal(&staging, &manifest)).await?;
        faults::passage("template.sealed");
        self.check(&capture, size, key).await?;
        drop(capture);
        faults::passage("template.checked");
        let target = means.dir.join(key.template.as_str()).join(catalog::folder(key));
        let (staging, at) = (self.staging.clone(), target.clone());
        self.on_disk(move || catalog::put(&staging, &at)).await?;
        faults::passage("template.put");
        self.on_disk(move || Capture::open(&target)).await
    }

    /// An empty folder, the image, and a machine that boots it.
    async fn boot(&mut self, spec: &Spec, key: &PoolKey, size: Size) -> Result<Image, TemplateError> {
        let means = &self.templates.0.means;
        let staging = self.staging.clone();
        let disk_error = |source| TemplateError::Disk {
            path: staging.clone(),
            source,
        };
        catalog::clear_dir(&staging)
            .and_then(|()| disk::make_dir(&staging, 0o700))
            .map_err(disk_error)?;
        self.building
            .feed
            .tell(|| BuildEvent::Step(BuildStep::Boot, Duration::ZERO));
        let (templates, from) = (self.templates.clone(), spec.clone());
        let opening = tasks::blocking("image", move || templates.open_image(&from));
        let image = opening.await.map_err(|panicked| self.failed(panicked))??;
        let place = Place {
            slot: self.reservation.slot(),
            size,
            lane: key.lane,
        };
        let booting = means.engine.boot(&image, place, Purpose::Template);
        let booted = timeout(BOOT, booting).await;
        let booted = booted.map_err(|_elapsed| self.failed(format_args!("no machine within {BOOT:?}")))?;
        let machine = booted.map_err(|source| TemplateError::Engine {
            step: self.step,
            source,
        })?;
        self.machine = Some(machine);
        faults::passage("template.booted");
        Ok(image)
    }

    /// Work on the disk, off the runtime's threads.
    async fn on_disk<T: Send + 'static, E: std::error::Error + Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, TemplateError> {
        match tasks::blocking("template files", work).await {
            Ok(done) => done.map_err(|error| self.failed(chain(&error))),
            Err(panicked) => Err(self.failed(panicked)),
        }
    }

    async fn greet(&self, limit: Duration) -> Result<Opened, TemplateError> {
        let clock = self.templates.0.means.clock.clone();
        let machine = self.machine.as_ref().ok_or(TemplateError::Cancelled)?;
        let greeting = async {
            match self.within(limit, machine.connect(PortName::Agent)).await? {
                Port::Stream(stream) => {
                    match timeout(limit, link::open(stream, random::bytes(), clock)).await {
                        Ok(Ok(opened)) => Ok(opened),
                        Ok(Err(error @ LinkError::NoCommonProto { .. })) => {
                            Err(TemplateError::TooOld(error.to_string()))
                        }
                        Ok(Err(error)) => Err(self.failed(chain(&error))),
                        Err(_elapsed) => Err(self.failed(format_args!("no HELLO within {limit:?}"))),
                    }
                }
                Port::InProcess => Ok(agent::local_link(clock)),
            }
        };
        tokio::select! {
            biased;
            report = machine.exited() => Err(self.failed(format_args!("the machine ended: {report}"))),
            greeted = greeting => greeted,
        }
    }

    async fn renew(&self, link: &Link, mode: RenewMode) -> Result<(), TemplateError> {
        // The build has an identity of its own, which no clone keeps.
        let id = SandboxId::from_random(random::bytes());
        let renewal = RenewSpec {
            mode,
            renew_id: RequestId::from_random(random::bytes()).to_string(),
            seed: random::bytes(),
            sandbox: id,
            hostname: "template".into(),
        };
        self.within(
            CONTROL,
            agent::renew(link, renewal, &self.templates.0.means.clock),
        )
        .await
        .map(drop)
    }

    async fn warm_up(&mut self, spec: &Spec, link: &Link) -> Result<(), TemplateError> {
        if spec.warmup.is_empty() {
            return Ok(());
        }
        self.enter(BuildStep::Warmup);
        let limit = spec.warmup_timeout;
        // silkd ends it in time; a little later the host does.
        let argv: Vec<Bytes> = spec.warmup.iter().map(|arg| Bytes::from(arg.clone())).collect();
        let ran = self
            .within(limit + CONTROL, agent::exec_once(link, &argv, limit))
            .await?;
        match ran.ended {
            Ended::Code(0) => Ok(()),
            Ended::Code(code) => Err(self.failed(format_args!("exit code {code}: {}", ran.said()))),
            Ended::Signal(signal) => Err(self.failed(format_args!("signal {signal}: {}", ran.said()))),
            Ended::TimedOut => Err(self.failed(format_args!("not done within {limit:?}: {}", ran.said()))),
        }
    }

    /// A capture that no clone can be made of is none.
    async fn check(&mut self, capture: &Capture, size: Size, key: &PoolKey) -> Result<(), TemplateError> {
        self.enter(BuildStep::Check);
        let place = Place {
            slot: self.reservation.slot(),
            size,
            lane: key.lane,
        };
        let cloning = self.templates.0.means.engine.clone_of(capture, place);
        let machine = self.within(CHECK, cloning).await?;
        self.machine = Some(machine);
        let opened = self.greet(CHECK).await?;
        self.renew(&opened.link, RenewMode::Clone).await?;
        opened.link.close();
        self.stop_machine().await
    }

    async fn stop_machine(&mut self) -> Result<(), TemplateError> {
        match self.machine.take() {
            Some(machine) => machine.kill().await.map_err(|source| TemplateError::Engine {
                step: self.step,
                source,
            }),
            None => Ok(()),
        }
    }

    /// Gives back what the build holds; tried again for ever, like every teardown.
    async fn clear(self) {
        let engine = &self.templates.0.means.engine;
        let mut pause = Duration::from_millis(100);
        loop {
            let ended = match &self.machine {
                Some(machine) => machine.kill().await,
                None => engine.reap(self.reservation.slot()).await,
            };
            let Err(error) = ended else { break };
            tracing::warn!(slot = %self.reservation.slot(), error = %chain(&error), "a build's machine cannot be ended, will be tried again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(30));
        }
        if let Err(error) = catalog::clear_dir(&self.staging) {
            tracing::warn!(path = %self.staging.display(), %error, "a build's folder cannot be removed; the next start does");
        }
        drop(self.reservation);
    }
}
