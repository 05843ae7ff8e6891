//! The task that owns one sandbox: makes or adopts it, keeps watch over its machine and its link, and tears it down.
//!
//! Invariant 21: ending always progresses; twice is harmless. Whatever is under way, the wish to end is looked at first;
//! a teardown step that fails is tried again for ever, with growing pauses, and is shown.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt as _;

use sandbox_protocol::id::SandboxId;
use tokio::{sync::oneshot, time::timeout};
use tracing::Instrument as _;

use super::{
    entry::{AgentFacts, ApplyError, Birth, Sandbox, Warm},
    life::{Event, Life, Why, WhyKind},
    meter::Meter,
    registry::Sandboxes,
    relinks::Relinks,
    row::Adoptable,
    steps::{DYING, StepError, open_link, renewal, within},
};
use crate::{
    admission::{Full, Reservation},
    agent::{self, RenewMode},
    engine::{Capture, CaptureError, EngineError, Identity, Machine, Place, Port, PortName, Purpose, Tap},
    faults,
    image::Image,
    journal::{AppendError, SandboxRow, Transition},
    link::Link,
    names::SlotNumber,
    net::{self, Draining, NetError, Taken},
    random,
    telemetry::{
        chain,
        metrics::{Outcome, RefillStep},
        span,
    },
    words::{Lane, Name, PoolKey, Size, Tier},
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
        self.own(&sandbox, actor.make(spec, tap.map(Tap), meter, answer));
        // The owner always answers; were it to panic, its sandbox would be one that was never made.
        made.await
            .unwrap_or_else(|_panicked| Err(MakeError::Failed(Why::of(WhyKind::MakeFailed))))
    }

    /// Puts a sandbox that an earlier daemon left in the registry, lease and all; nothing is done to it yet.
    pub fn admit(&self, row: Adoptable, reservation: Reservation) -> Admitted {
        let id = row.birth.id;
        let taken = self.held(id, row.tap);
        let actor = self.enter(row.birth, taken, Some(reservation));
        actor.sandbox.set_agent(row.agent);
        if let Life::Claimed(claim) = actor.sandbox.life() {
            actor.sandbox.arm(self, &claim);
            self.means().reaper.set(id, None, claim.lease.until);
        }
        Admitted {
            actor,
            identity: row.identity,
        }
    }

    /// Takes over a row whose life cannot go on: records why (`event`: it died, or is not to be trusted), and tears down
    /// what may be left of it. `rebooted`: the row is of an earlier boot of the host. Without a reservation its slot is
    /// another's by now, and is not touched.
    pub fn wind_up(
        &self,
        id: SandboxId,
        row: &SandboxRow,
        event: Option<Event>,
        reservation: Option<Reservation>,
        rebooted: bool,
    ) {
        let birth = super::row::birth(id, row, rebooted.then_some(&self.means().clock));
        let taken = self.held(id, row.holds_tap());
        let actor = self.enter(birth, taken, reservation);
        let sandbox = Arc::clone(&actor.sandbox);
        if let Some(event) = event {
            // A row that is ending or gone already needs no second reason.
            drop(sandbox.apply(self, event));
        }
        let life = sandbox.life();
        match life {
            Life::Ending { .. } => self.own(&sandbox, actor.end()),
            Life::Failed { claim, .. } => self.means().reaper.set(id, None, claim.lease.until),
            Life::Gone { .. } => self.retire_if_gone(&sandbox),
            Life::Making | Life::Warm | Life::Claimed(_) => {}
            Life::Quarantined { .. } => self.own(&sandbox, actor.guard()),
        }
    }

    /// The slot that a sandbox of an earlier daemon has on lane guarded. Without it the sandbox lives on and reaches nothing.
    fn held(&self, id: SandboxId, slot: Option<SlotNumber>) -> Option<Taken> {
        let slot = slot?;
        let lane = self.means().net.as_deref().ok_or(NetError::Off);
        let held = lane.and_then(|lane| lane.adopt(slot));
        held.inspect_err(|error| tracing::error!(sandbox = %id, %error, "its network slot cannot be taken up: it reaches nothing"))
            .ok()
    }

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

    /// Starts the task that owns a sandbox. Where it panics, that sandbox ends, and no other.
    fn own(&self, sandbox: &Arc<Sandbox>, owner: impl Future<Output = ()> + Send + 'static) {
        let (span, sandbox, sandboxes) = (span::sandbox(&sandbox.id), Arc::clone(sandbox), self.clone());
        let owned = async move {
            if AssertUnwindSafe(owner).catch_unwind().await.is_err() {
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

/// How often a guest's wall clock is looked after.
const CLOCK_EVERY: Duration = Duration::from_secs(600);

/// What became of a broken link.
enum Relinked {
    /// There is another.
    Up,
    /// The sandbox ends.
    Ends,
    /// The daemon stops; the next one sees to it.
    Left,
}

/// The guest's wall clock is set anew after [`CLOCK_EVERY`]. One that cannot be told the time is told again later, or
/// found to be lost by its link.
async fn next_clock_step(sandbox: &Sandbox, sandboxes: &Sandboxes) {
    tokio::time::sleep(CLOCK_EVERY).await;
    if let Some(link) = sandbox.link() {
        let means = sandboxes.means();
        let stepping = Box::pin(agent::clock(&link, &means.clock));
        drop(timeout(means.deadlines.hello, stepping).await);
    }
}

/// The stream of a guest's own news.
enum News {
    Unasked,
    Open(Box<agent::Events>),
    /// The guest has none, or ended it.
    Over,
}

impl News {
    /// The next condition; never, once there are no more. Cancel safe.
    async fn next(&mut self, link: &Link) -> agent::Condition {
        loop {
            match self {
                Self::Unasked => {
                    *self = agent::events(link)
                        .await
                        .map_or(Self::Over, |events| Self::Open(Box::new(events)))
                }
                Self::Open(events) => match events.next().await {
                    Ok(Some(agent::News::Condition(condition))) => return condition,
                    Ok(Some(agent::News::Log(line))) => tracing::debug!(guest = %line, "a guest's log"),
                    Ok(Some(agent::News::Dropped(count))) => {
                        tracing::debug!(count, "news of a guest were dropped")
                    }
                    Ok(None) | Err(_) => *self = Self::Over,
                },
                Self::Over => std::future::pending::<()>().await,
            }
        }
    }
}

/// A sandbox of an earlier daemon, in the registry and not taken up yet. Dropping it leaves it to the next daemon.
#[derive(Debug)]
#[must_use = "it is nobody's care until it is taken up"]
pub struct Admitted {
    actor: Actor,
    identity: Identity,
}

impl Admitted {
    /// Takes it up: proves its process, greets its agent. A warm one comes back as [`Warm`]. What cannot be taken up
    /// ends. Cancel safe: the taking up goes on; a warm one that nobody waits for any more ends.
    ///
    /// # Errors
    /// Why it could not be taken up.
    pub async fn take_up(self, size: Size) -> Result<Option<Warm>, Why> {
        let Self { actor, identity } = self;
        let (answer, adopted) = oneshot::channel();
        let (sandbox, sandboxes) = (Arc::clone(&actor.sandbox), actor.sandboxes.clone());
        sandboxes.own(&sandbox, actor.adopt(identity, size, answer));
        adopted
            .await
            .unwrap_or_else(|_panicked| Err(Why::of(WhyKind::LostOnRestart)))
    }
}

#[derive(Debug)]
struct Actor {
    sandbox: Arc<Sandbox>,
    sandboxes: Sandboxes,
    machine: Option<Arc<dyn Machine>>,
}

impl Actor {
    async fn make(
        mut self,
        spec: MakeSpec,
        tap: Option<Tap>,
        mut meter: Meter,
        answer: oneshot::Sender<Result<Warm, MakeError>>,
    ) {
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
                self.keep().await;
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
        within("doors", hello_limit, StepError::Engine, opening).await?;
        meter.done(RefillStep::Link);

        let renewing = agent::renew(&opened.link, renewal(mode, self.sandbox.id), &means.clock);
        let renewed = within("renew", limits.renew, StepError::Agent, renewing).await?;
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

    async fn adopt(
        mut self,
        identity: Identity,
        size: Size,
        answer: oneshot::Sender<Result<Option<Warm>, Why>>,
    ) {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        let taken = tokio::select! {
            biased;
            () = sandbox.wake.notified() => Err(Why::of(WhyKind::Released)),
            () = owners.stopping() => return,
            taken = Box::pin(self.take_up(identity, size)) => taken.map_err(|error| match &error {
                StepError::Engine(EngineError::Gone { .. }) | StepError::Exited(_) => Why::with(WhyKind::LostOnRestart, chain(&error)),
                StepError::Late { .. } | StepError::Engine(_) | StepError::Net(_) | StepError::Serve(_)
                | StepError::Link(_) | StepError::Agent(_)
                | StepError::NotReady(_) | StepError::Foreign => {
                    Why::with(WhyKind::AgentLost, chain(&error))
                }
            }),
        };
        match taken {
            Ok(()) => {
                let is_warm = self.sandbox.with_life(|life| matches!(life, Life::Warm));
                let warm = is_warm.then(|| Warm::new(Arc::clone(&self.sandbox), self.sandboxes.clone()));
                drop(answer.send(Ok(warm)));
                self.keep().await;
            }
            Err(why) => {
                drop(self.sandbox.apply(&self.sandboxes, Event::Died(why.clone())));
                drop(answer.send(Err(why)));
                Box::pin(self.end()).await;
            }
        }
    }

    async fn take_up(&mut self, identity: Identity, size: Size) -> Result<(), StepError> {
        let means = self.sandboxes.means();
        let limits = means.deadlines;
        let place = Place {
            slot: self.sandbox.slot,
            size,
            lane: self.sandbox.key.lane,
        };
        let is_warm = self.sandbox.with_life(|life| matches!(life, Life::Warm));
        let limit = if is_warm { limits.hello } else { limits.adopt };
        let attach = means.engine.attach(place, identity);
        let machine = within("attach", limits.attach, StepError::Engine, attach).await?;
        let machine = Arc::clone(self.machine.insert(Arc::from(machine)));
        // Without doors it reaches nothing, which is no reason to end somebody's work.
        if let Err(error) = Box::pin(self.bind_doors()).await {
            tracing::error!(sandbox = %self.sandbox.id, error = %chain(&error), "its doors cannot be opened again");
        }
        let opened = Box::pin(open_link(machine.as_ref(), &self.sandboxes, limit)).await?;
        // Its doors deny, or serve the claim of its record, already; a guest that does not come to them is served without.
        let opening = Box::pin(self.open_doors(&machine));
        if let Err(error) = within("doors", limits.hello, StepError::Engine, opening).await {
            tracing::warn!(sandbox = %self.sandbox.id, error = %chain(&error), "the guest has not connected for its doors yet");
        }
        let asking = agent::adopt(&opened.link);
        let adopted = within("adopt", limit, StepError::Agent, asking).await?;
        faults::passage("recover.greeted");
        if adopted.state != agent::State::Ready {
            return Err(StepError::NotReady(adopted.state));
        }
        if adopted.sandbox != Some(self.sandbox.id) {
            return Err(StepError::Foreign);
        }
        let stepping = agent::clock(&opened.link, &means.clock);
        within("clock", limit, StepError::Agent, stepping).await?;
        opened.link.pace(if is_warm {
            means.paces.warm
        } else {
            means.paces.claimed
        });
        let pid = machine.identity().pid;
        self.sandbox.set_pulse(machine.pulse());
        self.sandbox.set_agent(AgentFacts {
            proto: opened.proto,
            version: opened.hello.version,
            pid,
        });
        self.sandbox.set_link(Some(opened.link));
        Ok(())
    }

    /// Has the doors listen on the sandbox's TAP, where it has one: they deny unless its claim has armed them already.
    async fn bind_doors(&self) -> Result<(), StepError> {
        let Some(taken) = self.sandbox.taken() else {
            return Ok(());
        };
        let limit = self.sandboxes.means().deadlines.hello;
        let doors = within("bind", limit, StepError::Net, taken.bind()).await?;
        let served = self.sandbox.door().listen(doors.http, doors.socks5);
        let served = served.and_then(|()| self.sandbox.door().listen_dns(doors.dns, doors.dns_stream));
        served.map_err(StepError::Serve)?;
        self.sandbox.with_life(|life| match life {
            Life::Claimed(_) => taken.arm().map_err(StepError::Net),
            Life::Making
            | Life::Warm
            | Life::Ending { .. }
            | Life::Failed { .. }
            | Life::Quarantined { .. }
            | Life::Gone { .. } => Ok(()),
        })
    }

    /// Opens the guest's connection for its doors and has it kept. A guest in this process has none, and one of lane
    /// guarded comes by its TAP.
    async fn open_doors(&self, machine: &Arc<dyn Machine>) -> Result<(), EngineError> {
        if self.sandbox.key.lane == Lane::Guarded {
            return Ok(());
        }
        let Port::Stream(first) = machine.connect(PortName::Egress).await? else {
            return Ok(());
        };
        let door = self.sandbox.door();
        let machine = Arc::clone(machine);
        door.keep_link(first, move || {
            let machine = Arc::clone(&machine);
            async move {
                match machine.connect(PortName::Egress).await {
                    Ok(Port::Stream(stream)) => Some(stream),
                    Ok(Port::InProcess) | Err(_) => None,
                }
            }
        });
        door.linked().await;
        Ok(())
    }

    /// Keeps watch until the end, or until the daemon stops and leaves the machine to the next.
    async fn keep(self) {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        let sandboxes = self.sandboxes.clone();
        let (mut news, mut relinks) = (News::Unasked, Relinks::default());
        // Of its own, so that neither other news puts it off nor a mute guest holds the others up.
        let mut clock_due = std::pin::pin!(next_clock_step(&sandbox, &sandboxes));
        while let (Some(machine), Some(link)) = (&self.machine, sandbox.link()) {
            tokio::select! {
                biased;
                () = sandbox.wake.notified() => break,
                report = machine.exited() => {
                    // The wish to end may have come first.
                    drop(sandbox.apply(&self.sandboxes, Event::Died(Why::with(WhyKind::VmExited, report))));
                    break;
                }
                why = link.lost() => {
                    news = News::Unasked;
                    let may = relinks.may(why, self.sandboxes.means().clock.tick());
                    match Box::pin(self.relink(&why.to_string(), may)).await {
                        Relinked::Up => {}
                        Relinked::Ends => break,
                        Relinked::Left => {
                            sandbox.door().stop().await;
                            return;
                        }
                    }
                }
                () = owners.stopping() => {
                    link.close();
                    sandbox.door().stop().await;
                    return;
                }
                condition = news.next(&link), if machine.identity().pid.is_some() => sandboxes.noted(&sandbox, condition),
                () = &mut clock_due, if machine.identity().pid.is_some() => {
                    clock_due.set(next_clock_step(&sandbox, &sandboxes));
                }
            }
        }
        Box::pin(self.end()).await;
    }

    /// The link broke. That of a claimed one, if it `may` come back, must be back in time; a warm one ends.
    async fn relink(&self, lost: &str, may: bool) -> Relinked {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        let means = self.sandboxes.means();
        let Some(machine) = &self.machine else {
            return Relinked::Ends;
        };
        // From here on no claim is given it.
        sandbox.set_link(None);
        let opened = async {
            if may && sandbox.with_life(|life| matches!(life, Life::Claimed(_))) {
                let opening = open_link(machine.as_ref(), &self.sandboxes, means.deadlines.relink);
                return opening.await.map_err(|error| match &error {
                    StepError::Exited(report) => Why::with(WhyKind::VmExited, report),
                    StepError::Late { .. }
                    | StepError::Engine(_)
                    | StepError::Net(_)
                    | StepError::Serve(_)
                    | StepError::Link(_)
                    | StepError::Agent(_)
                    | StepError::NotReady(_)
                    | StepError::Foreign => {
                        Why::with(WhyKind::AgentLost, format_args!("{lost}; {}", chain(&error)))
                    }
                });
            }
            match timeout(DYING, machine.exited()).await {
                Ok(report) => Err(Why::with(WhyKind::VmExited, report)),
                Err(_lives) => Err(Why::with(WhyKind::AgentLost, lost)),
            }
        };
        let opened = tokio::select! {
            biased;
            () = sandbox.wake.notified() => return Relinked::Ends,
            () = owners.stopping() => return Relinked::Left,
            opened = opened => opened,
        };
        match opened {
            Ok(opened) => {
                opened.link.pace(means.paces.claimed);
                sandbox.set_link(Some(opened.link));
                Relinked::Up
            }
            Err(why) => {
                drop(sandbox.apply(&self.sandboxes, Event::Died(why)));
                Relinked::Ends
            }
        }
    }

    /// Quarantined: nothing is touched until somebody wants it ended.
    async fn guard(self) {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        tokio::select! {
            biased;
            () = sandbox.wake.notified() => Box::pin(self.end()).await,
            () = owners.stopping() => {}
        }
    }

    /// The one teardown list, for release, lease, failure and restart alike.
    async fn end(self) {
        let why = self
            .sandbox
            .with_life(|life| life.why().map(ToString::to_string))
            .unwrap_or_default();
        let span = span::end(&self.sandbox.id, &why);
        self.tear_down().instrument(span).await;
    }

    async fn tear_down(self) {
        let means = self.sandboxes.means();
        if let Some(link) = self.sandbox.link() {
            link.close();
        }
        self.sandbox.set_link(None);
        self.sandbox.door().stop().await;
        let draining = self.sandbox.taken().map(Taken::release);
        tell(draining.as_ref(), Draining::doors_shut);
        faults::passage("sandbox.before_kill");
        let (mut pause, mut stuck) = (Duration::from_millis(100), false);
        loop {
            let killing = async {
                match &self.machine {
                    Some(machine) => machine.kill().await,
                    None if self.sandbox.has_place() => means.engine.reap(self.sandbox.slot).await,
                    None => Ok(()),
                }
            };
            let killed = within("kill", means.deadlines.kill, StepError::Engine, killing).await;
            let Err(error) = killed else { break };
            if !stuck {
                stuck = true;
                means.metrics.sandbox.stuck(true);
            }
            tracing::warn!(sandbox = %self.sandbox.id, slot = %self.sandbox.slot, error = %chain(&error), "teardown failed, will be tried again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(30));
        }
        if stuck {
            means.metrics.sandbox.stuck(false);
        }
        drop(self.machine);
        faults::passage("sandbox.after_kill");
        let torn_down = self.sandbox.apply(&self.sandboxes, Event::TornDown);
        if let Err(error) = torn_down {
            tracing::error!(sandbox = %self.sandbox.id, %error, "a teardown without an end");
        }
        faults::passage("sandbox.gone");
        // Invariant 11. The VM is proved gone, and the record says so: a later one may name the slot. The other way
        // round a kill in between would leave two rows with one slot, and the end of the first would end the second.
        tell(draining.as_ref(), Draining::vmm_gone);
        drop(self.sandbox.give_place_back());
        if let Some(why) = self.sandbox.with_life(|life| life.why().cloned()) {
            means.metrics.sandbox.ended(why.kind.metric());
            tracing::info!(%why, "ended");
        }
        if let Life::Failed { claim, .. } = self.sandbox.life() {
            means.reaper.set(self.sandbox.id, None, claim.lease.until);
        }
        self.sandboxes.retire_if_gone(&self.sandbox);
    }
}

fn tell(draining: Option<&Draining>, news: impl FnOnce(&Draining) -> Result<(), NetError>) {
    if let Some(Err(error)) = draining.map(news) {
        tracing::error!(%error, "a network slot cannot be told what became of its sandbox");
    }
}
