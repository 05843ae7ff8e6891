//! One build: boot, agent, warm-up, quiesce, capture, check. Whatever fails, nothing of it is left.

use std::{fmt, panic::AssertUnwindSafe, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use sandbox_protocol::{
    ca,
    id::{RequestId, SandboxId},
    v1::LinkHello,
};
use tokio::time::timeout;

use super::{
    Spec, TemplateError, Templates,
    building::{BuildEvent, BuildStep, Building, Progress},
    catalog, roots,
};
use crate::{
    admission::Reservation,
    agent::{self, Ended, RenewMode, RenewSpec},
    ca::Trust,
    clock::Tick,
    disk,
    engine::{Capture, CaptureManifest, Captured, ImageRef, Machine, Place, Port, PortName, Purpose, Tap},
    faults,
    image::Image,
    link::{self, Link, LinkError, Opened},
    net, random, tasks,
    telemetry::chain,
    words::{EngineKind, Lane, PoolKey, Size},
};

/// A boot, up to the agent's answer; under software emulation on a busy host it takes tens of seconds.
const BOOT: Duration = Duration::from_secs(180);
/// A clone that checks the capture, up to the agent's answer.
const CHECK: Duration = Duration::from_secs(60);
/// Renewal, hooks included, and quiescing.
const CONTROL: Duration = Duration::from_secs(30);
/// Writing the device state.
const CAPTURE: Duration = Duration::from_secs(60);

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
    /// The slot of the machine, on lane guarded.
    taken: Option<net::Taken>,
    /// What its guest is to trust, the same from the beginning to the end.
    trust: Option<Arc<Trust>>,
    step: BuildStep,
}

/// What there is of a template before it is sealed.
struct Taken {
    image: Image,
    hello: LinkHello,
    captured: Captured,
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
        taken: None,
        trust: templates.trust(),
        step: BuildStep::Boot,
    };
    // A panic ends the build like any other failure: its machine and its folder are given back below.
    let built = AssertUnwindSafe(Box::pin(bench.build(spec, key, size)))
        .catch_unwind()
        .await;
    let built = built.unwrap_or_else(|_panic| Err(bench.failed("it panicked")));
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
        self.building.tell(BuildEvent::Step(step, elapsed));
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

    /// Cancelled only where it can be: what writes in the build's folder runs to its end on a thread of its own, and is
    /// waited for, so that nothing appears in a folder that is being removed, and no variant that nobody knows of.
    async fn build(&mut self, spec: &Spec, key: &PoolKey, size: Size) -> Result<Capture, TemplateError> {
        let building = self.building;
        self.empty_folder().await?;
        let capturing = Box::pin(self.capture(spec, key, size));
        let taken = building.while_wanted(capturing).await?;
        let means = &self.templates.0.means;
        let manifest = CaptureManifest {
            format: CaptureManifest::FORMAT,
            facts: means.engine.facts(),
            image: ImageRef::of(&taken.image),
            size,
            lane: key.lane,
            proto_min: taken.hello.proto_min,
            proto_max: taken.hello.proto_max,
            warmup: spec.warmup.clone(),
            ca: self
                .trust
                .as_ref()
                .map(|trust| trust.roots.clone())
                .unwrap_or_default(),
            created_at: means.clock.wall(),
            ram: taken.captured.ram,
            state: taken.captured.state,
        };
        let staging = self.staging.clone();
        let capture = self.on_disk(move || Capture::seal(&staging, &manifest)).await?;
        faults::passage("template.sealed");
        let checking = Box::pin(self.check(&capture, size, key));
        building.while_wanted(checking).await?;
        drop(capture);
        faults::passage("template.checked");
        let target = means.dir.join(key.template.as_str()).join(catalog::folder(key));
        let (staging, at) = (self.staging.clone(), target.clone());
        self.on_disk(move || catalog::put(&staging, &at)).await?;
        faults::passage("template.put");
        self.on_disk(move || Capture::open(&target)).await
    }

    /// Boots the image and brings its guest to where clones begin.
    async fn capture(&mut self, spec: &Spec, key: &PoolKey, size: Size) -> Result<Taken, TemplateError> {
        let image = self.boot(spec, key, size).await?;
        let opened = self.greet(BOOT).await?;
        self.enter(BuildStep::Agent);
        let hello = opened.hello.clone();
        self.renew(&opened.link, RenewMode::Boot).await?;
        self.bring_roots(&opened.link).await?;
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
        Ok(Taken {
            image,
            hello,
            captured,
        })
    }

    async fn empty_folder(&self) -> Result<(), TemplateError> {
        let path = self.staging.clone();
        self.on_disk(move || {
            catalog::clear_dir(&path)
                .and_then(|()| disk::make_dir(&path, 0o700))
                .map_err(|source| TemplateError::Disk { path, source })
        })
        .await
    }

    /// The image, and a machine that boots it.
    async fn boot(&mut self, spec: &Spec, key: &PoolKey, size: Size) -> Result<Image, TemplateError> {
        let means = &self.templates.0.means;
        self.building
            .tell(BuildEvent::Step(BuildStep::Boot, Duration::ZERO));
        let image = self.templates.opened(spec.clone()).await?;
        let place = Place {
            slot: self.reservation.slot(),
            size,
            lane: key.lane,
        };
        let tap = self.card(key.lane).await?;
        let booting = means.engine.boot(&image, place, tap, Purpose::Template);
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
            // It has none yet.
            ask_doors: false,
        };
        self.within(
            CONTROL,
            agent::renew(link, renewal, &self.templates.0.means.clock),
        )
        .await
        .map(drop)
    }

    /// Puts the host's roots where the guest's programs look for those that they trust. The stub's guests have no files but
    /// the host's own.
    async fn bring_roots(&self, link: &Link) -> Result<(), TemplateError> {
        let Some(trust) = &self.trust else { return Ok(()) };
        if self.templates.0.means.engine.kind() == EngineKind::Stub {
            return Ok(());
        }
        let argv = [
            "/bin/sh",
            "-c",
            roots::SCRIPT,
            "sh",
            ca::ROOTS,
            ca::STORE,
            &trust.pem,
        ];
        let argv = argv.map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
        let ran = self
            .within(CONTROL, agent::exec_once(link, &argv, CONTROL))
            .await?;
        match ran.ended {
            Ended::Code(0) => Ok(()),
            Ended::Code(_) | Ended::Signal(_) | Ended::TimedOut => Err(self.failed(format_args!(
                "the host's roots cannot be put into the guest: {}",
                ran.said()
            ))),
        }
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
        let tap = self.card(key.lane).await?;
        let cloning = self.templates.0.means.engine.clone_of(capture, place, tap);
        let machine = self.within(CHECK, cloning).await?;
        self.machine = Some(machine);
        let opened = self.greet(CHECK).await?;
        self.renew(&opened.link, RenewMode::Clone).await?;
        opened.link.close();
        self.stop_machine().await
    }

    async fn stop_machine(&mut self) -> Result<(), TemplateError> {
        if let Some(machine) = self.machine.take() {
            machine.kill().await.map_err(|source| TemplateError::Engine {
                step: self.step,
                source,
            })?;
        }
        self.give_back();
        Ok(())
    }

    /// A slot of lane guarded for the next machine: no door listens there, so it reaches nothing.
    async fn card(&mut self, lane: Lane) -> Result<Option<Tap>, TemplateError> {
        let card = net::card(self.templates.0.means.net.as_deref(), lane);
        let (taken, tap) = card.await.map_err(TemplateError::Net)?.unzip();
        self.taken = taken;
        Ok(tap.map(Tap))
    }

    /// Gives the slot back whose machine is dead.
    fn give_back(&mut self) {
        let Some(draining) = self.taken.take().map(|taken| taken.release()) else {
            return;
        };
        if let Err(error) = draining.doors_shut().and_then(|()| draining.vmm_gone()) {
            tracing::error!(%error, "a network slot cannot be told that a build is over");
        }
    }

    /// Gives back what the build holds; tried again for ever, like every teardown.
    async fn clear(mut self) {
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
        self.give_back();
        let staging = self.staging.clone();
        match tasks::blocking("template files", move || catalog::clear_dir(&staging)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(path = %self.staging.display(), %error, "a build's folder cannot be removed; the next start does");
            }
            Err(panicked) => {
                tracing::warn!(path = %self.staging.display(), %panicked, "a build's folder cannot be removed; the next start does");
            }
        }
        drop(self.reservation);
    }
}
