//! The calls of AgentControl, and Info.

use std::time::Duration;

use sandbox_protocol::{
    id::SandboxId,
    v1::{self, control_event::Event},
};

use super::{
    AgentError, Condition, State,
    caller::{agent, asked, control, refused},
};
use crate::{
    clock::{Clock, Tick},
    link::Link,
    telemetry::GuestText,
};

/// A round trip longer than this leaves the guest's clock too unsure: the step is repeated. Half a second is promised.
const CLOCK_SURE: Duration = Duration::from_millis(400);
/// Steps of the clock that are tried for a sure one; a host too slow for all of them has slower troubles.
const CLOCK_TRIES: u32 = 5;

/// What kind of new life a guest gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenewMode {
    /// It has just booted.
    Boot,
    /// It is a clone of a template.
    Clone,
    /// It was asleep; its identity stays.
    Wake,
}

/// A new identity.
#[derive(Clone)]
pub struct RenewSpec {
    /// Kind.
    pub mode: RenewMode,
    /// Names this renewal: repeating it only answers again.
    pub renew_id: String,
    /// The host's entropy, fresh for each renewal.
    pub seed: [u8; 32],
    /// Who it is from now on.
    pub sandbox: SandboxId,
    /// Its host name.
    pub hostname: String,
    /// Whether it is to tell what its doors say to it.
    pub ask_doors: bool,
}

impl std::fmt::Debug for RenewSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RenewSpec")
            .field("mode", &self.mode)
            .field("renew_id", &self.renew_id)
            .field("sandbox", &self.sandbox)
            .field("hostname", &self.hostname)
            .finish_non_exhaustive()
    }
}

/// A guest after its renewal.
#[derive(Debug, Clone, PartialEq)]
pub struct Renewed {
    /// Its generation.
    pub generation: u64,
    /// The round trip of the last clock step: the guest's clock is behind by no more.
    pub clock_within: Duration,
    /// What its doors said to it; none: it was not asked, or an agent that does not know the question was.
    pub doors: Option<v1::DoorsSaid>,
}

/// A clock step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stepped {
    /// Whether the guest's clock was off far enough to be stepped.
    pub stepped: bool,
    /// The round trip: the guest's clock is behind by no more.
    pub within: Duration,
}

/// Gives a guest its identity and opens its gate. Runs the image's renewal hooks, 10 s of them at most.
///
/// # Errors
/// A failing hook is [`AgentError::Refused`], by name; that guest is to be destroyed.
pub async fn renew(link: &Link, spec: RenewSpec, clock: &Clock) -> Result<Renewed, AgentError> {
    let mode = match spec.mode {
        RenewMode::Boot => v1::control_renew_request::Mode::Boot,
        RenewMode::Clone => v1::control_renew_request::Mode::Clone,
        RenewMode::Wake => v1::control_renew_request::Mode::Wake,
    };
    let asked_at = clock.tick();
    let request = v1::ControlRenewRequest {
        mode: mode.into(),
        renew_id: spec.renew_id,
        seed: spec.seed.to_vec().into(),
        host_time: Some(clock.wall().to_proto()),
        sandbox_id: spec.sandbox.to_string(),
        hostname: spec.hostname,
        ask_doors: spec.ask_doors,
    };
    let reply = asked("Renew", control(link).renew(request)).await?;
    let took = clock.tick().since(asked_at);
    let clock_within = if took <= CLOCK_SURE {
        took
    } else {
        self::clock(link, clock).await?.within
    };
    Ok(Renewed {
        generation: reply.generation,
        clock_within,
        doors: reply.doors,
    })
}

/// Steps a guest's clock to the host's; again, if the round trip left it unsure.
///
/// # Errors
/// See [`AgentError`].
pub async fn clock(link: &Link, clock: &Clock) -> Result<Stepped, AgentError> {
    let mut stepped = false;
    let mut tries = 0;
    loop {
        let asked_at = clock.tick();
        let request = v1::ControlClockRequest {
            host_time: Some(clock.wall().to_proto()),
        };
        let reply = asked("Clock", control(link).clock(request)).await?;
        stepped |= reply.stepped;
        tries += 1;
        let within = clock.tick().since(asked_at);
        if within <= CLOCK_SURE || tries >= CLOCK_TRIES {
            return Ok(Stepped { stepped, within });
        }
    }
}

/// For what a guest is brought to rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiesce {
    /// To become a template: nothing of a user may be open.
    Template,
    /// To sleep: its streams end.
    Hibernate,
    /// To be copied: its streams are left alone.
    Checkpoint,
}

/// Brings a guest to rest for a capture, within `deadline` or not at all.
///
/// # Errors
/// [`AgentError::Refused`] with `QUIESCE_BUSY` and the list of what is open.
pub async fn quiesce(link: &Link, purpose: Quiesce, deadline: Duration) -> Result<(), AgentError> {
    let mode = match purpose {
        Quiesce::Template => v1::control_quiesce_request::Mode::Template,
        Quiesce::Hibernate => v1::control_quiesce_request::Mode::Hibernate,
        Quiesce::Checkpoint => v1::control_quiesce_request::Mode::Checkpoint,
    };
    let request = v1::ControlQuiesceRequest {
        mode: mode.into(),
        deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
    };
    let v1::ControlQuiesceReply {} = asked("Quiesce", control(link).quiesce(request)).await?;
    Ok(())
}

/// Ends a rest after which nothing was captured, or that of a checkpoint's source.
///
/// # Errors
/// See [`AgentError`].
pub async fn resume(link: &Link) -> Result<(), AgentError> {
    let request = v1::ControlResumeRequest {};
    let v1::ControlResumeReply {} = asked("Resume", control(link).resume(request)).await?;
    Ok(())
}

/// What a guest tells a restarted host.
#[derive(Debug, Clone, PartialEq)]
pub struct Adopted {
    /// Where it is.
    pub state: State,
    /// Its generation.
    pub generation: u64,
    /// Who it believes to be.
    pub sandbox: Option<SandboxId>,
    /// Its troubles.
    pub conditions: Vec<Condition>,
}

/// Asks a guest how things stand; changes nothing.
///
/// # Errors
/// See [`AgentError`].
pub async fn adopt(link: &Link) -> Result<Adopted, AgentError> {
    const CALL: &str = "Adopt";
    let reply = asked(CALL, control(link).adopt(v1::ControlAdoptRequest {})).await?;
    Ok(Adopted {
        state: state(CALL, reply.state)?,
        generation: reply.generation,
        sandbox: reply.sandbox_id.parse().ok(),
        conditions: Condition::list(&reply.conditions),
    })
}

/// Sets a claim's environment and default user (name or uid, `[:group]`); once per claim, and only if it has any.
///
/// # Errors
/// See [`AgentError`].
pub async fn set_claim(link: &Link, env: Vec<v1::EnvVar>, user: bytes::Bytes) -> Result<(), AgentError> {
    let request = v1::ControlSetClaimRequest {
        env,
        default_user: user,
    };
    let v1::ControlSetClaimReply {} = asked("SetClaim", control(link).set_claim(request)).await?;
    Ok(())
}

/// Asks a guest to stop all work and power off; the answer, if any, comes before it does.
///
/// # Errors
/// See [`AgentError`].
pub async fn power_off(link: &Link) -> Result<(), AgentError> {
    let request = v1::ControlPowerOffRequest {};
    let v1::ControlPowerOffReply {} = asked("PowerOff", control(link).power_off(request)).await?;
    Ok(())
}

/// What a guest says of itself; works with its gate shut.
#[derive(Debug, Clone, PartialEq)]
pub struct Info {
    /// Version of its silkd.
    pub version: GuestText,
    /// Where it is.
    pub state: State,
    /// Its generation.
    pub generation: u64,
    /// Programs that run in it.
    pub processes: u32,
    /// Its troubles.
    pub conditions: Vec<Condition>,
    /// When the host had the answer.
    pub at: Tick,
}

/// Asks a guest about itself; also the probe that shows that it answers.
///
/// # Errors
/// See [`AgentError`].
pub async fn info(link: &Link, clock: &Clock) -> Result<Info, AgentError> {
    const CALL: &str = "Info";
    let reply = asked(CALL, agent(link).info(v1::AgentInfoRequest {})).await?;
    Ok(Info {
        version: GuestText::head(reply.version.as_bytes()),
        state: state(CALL, reply.state)?,
        generation: reply.generation,
        processes: reply.processes,
        conditions: Condition::list(&reply.conditions),
        at: clock.tick(),
    })
}

fn state(call: &'static str, state: i32) -> Result<State, AgentError> {
    State::from_wire(state).ok_or(AgentError::Malformed {
        call,
        missing: "a state",
    })
}

/// Conditions and log lines of one guest, as they come.
#[derive(Debug)]
pub struct Events(tonic::Streaming<v1::ControlEvent>);

/// What a guest tells unasked.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// Trouble.
    Condition(Condition),
    /// A line of its log.
    Log(GuestText),
    /// That many were dropped in the guest because the host was slow.
    Dropped(u64),
}

/// Opens the stream of a guest's news.
///
/// # Errors
/// See [`AgentError`].
pub async fn events(link: &Link) -> Result<Events, AgentError> {
    asked("Events", control(link).events(v1::ControlEventsRequest {}))
        .await
        .map(Events)
}

impl Events {
    /// The next news; none when the guest ended the stream. What this build does not know is passed over. Cancel safe.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn next(&mut self) -> Result<Option<News>, AgentError> {
        loop {
            let Some(event) = self
                .0
                .message()
                .await
                .map_err(|status| refused("Events", status))?
            else {
                return Ok(None);
            };
            let news = match event.event {
                Some(Event::Condition(condition)) => Condition::from_wire(&condition).map(News::Condition),
                Some(Event::LogLine(line)) => Some(News::Log(GuestText::head(&line))),
                Some(Event::Dropped(count)) => Some(News::Dropped(count)),
                None => None,
            };
            if news.is_some() {
                return Ok(news);
            }
        }
    }
}
