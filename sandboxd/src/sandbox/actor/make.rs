//! Making a sandbox: the intent, then machine, link and identity.

use std::sync::Arc;

use sandbox_protocol::id::SandboxId;
use tokio::sync::oneshot;

use super::{
    Actor,
    steps::{StepError, open_link, within},
};
use crate::{
    admission::Full,
    agent::RenewMode,
    engine::{Capture, CaptureError, EngineError, Place, Purpose, Tap},
    faults,
    image::Image,
    journal::{AppendError, Transition},
    net::{self, NetError, Taken},
    random,
    sandbox::{
        entry::{AgentFacts, ApplyError, Birth, Warm},
        life::{Event, Life, Why, WhyKind},
        meter::Meter,
        registry::Sandboxes,
    },
    telemetry::{
        chain,
        metrics::{Outcome, RefillStep},
    },
    words::{Name, PoolKey, Size, Tier},
};

/// What a sandbox is made from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A template's capture.
    Clone(Capture),
    /// An image.
    Boot(Image),
}

/// What is to be made.
#[derive(Debug, Clone)]
pub struct MakeSpec {
    /// Template, lane and size.
    pub key: PoolKey,
    /// For which pool.
    pub pool: Option<Name>,
    /// What the size stands for.
    pub size: Size,
    /// How it is made: `Warm` for stock, else on demand.
    pub tier: Tier,
    /// From what.
    pub source: Source,
}

/// Why nothing was made. Nothing is left behind; what must be torn down is being torn down.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// There is no room on this node.
    #[error("the node has no room: {0}")]
    Capacity(Full),
    /// Its lane cannot be had, or has no slot for it now.
    #[error("{0}")]
    Net(NetError),
    /// The intent cannot be recorded.
    #[error("the making cannot be recorded")]
    Journal(#[source] AppendError),
    /// The capture cannot be loaded, now or later: its template is to be built anew.
    #[error("{0}")]
    Capture(String),
    /// The host has run out of descriptors, processes, memory or disk.
    #[error("{0}")]
    Exhausted(Why),
    /// A step failed.
    #[error("{0}")]
    Failed(Why),
}

impl MakeError {
    /// What a failed step is to whoever asked for the making.
    fn of(error: &StepError) -> Self {
        let is_capture = matches!(
            error,
            // An error of the host may pass; a capture that is not what it says it is does not.
            StepError::Engine(EngineError::Capture(
                CaptureError::Missing { .. } | CaptureError::Damaged { .. } | CaptureError::Stale(_)
            ))
        );
        if is_capture {
            Self::Capture(chain(error))
        } else if matches!(error, StepError::Engine(error) if error.is_exhaustion()) {
            Self::Exhausted(Why::with(WhyKind::MakeFailed, chain(error)))
        } else {
            Self::Failed(Why::with(WhyKind::MakeFailed, chain(error)))
        }
    }

    /// The reason for which the half-made sandbox ends.
    fn why(&self) -> Why {
        match self {
            Self::Failed(why) | Self::Exhausted(why) => why.clone(),
            Self::Capacity(_) | Self::Net(_) | Self::Journal(_) | Self::Capture(_) => {
                Why::with(WhyKind::MakeFailed, chain(self))
            }
        }
    }
}

impl Sandboxes {
    /// Makes a sandbox warm: reserves, records the intent, starts the machine, waits for its agent, renews its identity.
    ///
    /// Cancel safe: what nobody waits for any more is ended.
    ///
    /// # Errors
    /// See [`MakeError`].
    pub async fn make(&self, spec: MakeSpec) -> Result<Warm, MakeError> {
        let mut meter = Meter::begin(self.means(), &spec);
        let reservation = self
            .means()
            .admission
            .try_reserve(spec.size)
            .map_err(MakeError::Capacity)?;
        let card = net::card(self.means().net.as_deref(), spec.key.lane);
        let (taken, tap) = Box::pin(card).await.map_err(MakeError::Net)?.unzip();
        let id = SandboxId::from_random(random::bytes());
        let digest = match &spec.source {
            Source::Clone(capture) => capture.digest(),
            Source::Boot(image) => image.digest(),
        };
        let digest: Arc<str> = digest.to_string().into();
        let created_at = self.means().clock.wall();
        let intent = Transition::Making {
            slot: reservation.slot(),
            key: spec.key.clone(),
            tap: taken.as_ref().map(Taken::slot),
            pool: spec.pool.clone(),
            tier: spec.tier,
            engine: self.means().engine.kind(),
            accel: self.means().engine.accel(),
            template_digest: digest.to_string(),
            created_at,
        };
        // Written is enough: nothing waits for the disk.
        drop(
            self.means()
                .record(Some(id), &intent)
                .map_err(MakeError::Journal)?,
        );
        meter.done(RefillStep::Reserve);
        faults::passage("sandbox.making_recorded");
        let birth = Birth {
            id,
            slot: reservation.slot(),
            key: spec.key.clone(),
            pool: spec.pool.clone(),
            made_as: spec.tier,
            digest,
            created_at,
            life: Life::Making,
        };
        let (answer, made) = oneshot::channel();
        let actor = self.enter(birth, taken, Some(reservation));
        let sandbox = Arc::clone(&actor.sandbox);
        self.own_from(&sandbox, actor.make(spec, tap.map(Tap), meter, answer));
        // The owner always answers; were it to panic, its sandbox would be one that was never made.
        made.await
            .unwrap_or_else(|_panicked| Err(MakeError::Failed(Why::of(WhyKind::MakeFailed))))
    }
}

impl Actor {
    async fn make(
        mut self,
        spec: MakeSpec,
        tap: Option<Tap>,
        mut meter: Meter,
        answer: oneshot::Sender<Result<Warm, MakeError>>,
    ) -> Option<Self> {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        let made = tokio::select! {
            biased;
            () = sandbox.wake.notified() => Err(None),
            () = owners.stopping() => Err(Some(MakeError::Failed(Why::of(WhyKind::Stopped)))),
            made = Box::pin(self.bring_up(&spec, tap, &mut meter)) => made.map_err(|error| Some(MakeError::of(&error))),
        };
        let made = made.and_then(|record| {
            let made = self.sandbox.apply(&self.sandboxes, Event::Made(Box::new(record)));
            made.map(drop).map_err(|error| match error {
                // The wish to end came first.
                ApplyError::Refused => None,
                ApplyError::Journal(error) => Some(MakeError::Journal(error)),
            })
        });
        match made {
            Ok(()) => {
                meter.done(RefillStep::Stock);
                meter.over(Outcome::Ok);
                faults::passage("sandbox.warmed");
                let warm = Warm::new(Arc::clone(&self.sandbox), self.sandboxes.clone());
                // Whoever asked may have left: the Warm is dropped then, and that ends it.
                drop(answer.send(Ok(warm)));
                Some(self)
            }
            Err(error) => {
                let wish = || self.sandbox.with_life(|life| life.why().cloned());
                let error = error
                    .unwrap_or_else(|| MakeError::Failed(wish().unwrap_or(Why::of(WhyKind::MakeFailed))));
                let why = error.why();
                meter.over(if why.kind == WhyKind::MakeFailed {
                    Outcome::Failed
                } else {
                    Outcome::Left
                });
                // It may be ending already, by the wish that interrupted the making.
                self.sandboxes.end(&self.sandbox, why);
                drop(answer.send(Err(error)));
                Box::pin(self.end()).await;
                None
            }
        }
    }

    /// Machine, link, identity: the chain of a making.
    async fn bring_up(
        &mut self,
        spec: &MakeSpec,
        tap: Option<Tap>,
        meter: &mut Meter,
    ) -> Result<Transition, StepError> {
        let means = self.sandboxes.means();
        let limits = means.deadlines;
        let place = Place {
            slot: self.sandbox.slot,
            size: spec.size,
            lane: spec.key.lane,
        };
        // They deny before its first instruction.
        Box::pin(self.bind_doors()).await?;
        faults::passage("sandbox.doors_bound");
        let (machine, hello_limit, mode) = match &spec.source {
            Source::Clone(capture) => {
                let clone = means.engine.clone_of(capture, place, tap);
                (
                    within("clone", limits.clone, StepError::Engine, clone).await?,
                    limits.hello,
                    RenewMode::Clone,
                )
            }
            Source::Boot(image) => {
                let boot = means.engine.boot(image, place, tap, Purpose::Sandbox);
                (
                    within("boot", limits.boot, StepError::Engine, boot).await?,
                    limits.boot,
                    RenewMode::Boot,
                )
            }
        };
        let machine = Arc::clone(self.machine.insert(Arc::from(machine)));
        faults::passage("sandbox.started");
        meter.done(RefillStep::Start);

        let opened = Box::pin(open_link(machine.as_ref(), &self.sandboxes, hello_limit)).await?;
        faults::passage("sandbox.linked");
        opened.link.pace(means.paces.warm);
        self.sandbox.set_link(Some(opened.link.clone()));
        let opening = self.open_doors(&machine);
        let inside = within("doors", hello_limit, StepError::Engine, opening).await?;
        meter.done(RefillStep::Link);

        let renewed = Box::pin(self.renew(&opened.link, mode, inside)).await?;
        faults::passage("sandbox.renewed_guest");
        meter.done(RefillStep::Renew);

        let identity = machine.identity();
        self.sandbox.set_pulse(machine.pulse());
        self.sandbox.set_agent(AgentFacts {
            proto: opened.proto,
            version: opened.hello.version.clone(),
            pid: identity.pid,
        });
        Ok(Transition::Warmed {
            pid: identity.pid,
            started: identity.started,
            generation: renewed.generation,
            proto: opened.proto,
            agent_version: opened.hello.version,
        })
    }
}
