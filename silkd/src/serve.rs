//! Start and stop of the agent: who runs, and in which order they end.
//!
//! May call: agent, clock, conditions, control, door, events, fs, gate, link, places, refusal, relay, run,
//! server, tasks, tools.
//! Never inside: a call's work.

use std::{io, path::PathBuf, time::Duration};

use bytes::Bytes;
use sandbox_protocol::{
    limits::{PROTO_MAX, PROTO_MIN},
    v1::{EnvVar, LinkHello},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinHandle,
};

use crate::{
    agent::{self, Agent, base::BaseEnv, info::VERSION},
    clock,
    conditions::{Conditions, Kind},
    control::{self, Control, Facts, machine::Machine},
    door::{Doors, Listeners},
    events::Events,
    fs::Files,
    gate::{Gate, State, Turn},
    link::{Link, Serves, Source},
    places::Places,
    refusal::chain,
    relay::Relay,
    run::{RunConfig, RunError, Runner},
    server::Server,
    tasks,
    tools::lsp::Lsp,
};

/// From TERM to KILL of the programs that run when silkd stops.
const GRACE: Duration = Duration::from_secs(2);
/// For open calls to hear of their end, once their programs are gone. Nobody waits for it who has heard.
const FAREWELL: Duration = Duration::from_secs(1);
/// Longest list of the image's variables.
const ENV: u64 = 64 * 1024;

/// What silkd runs on.
#[derive(Debug)]
pub struct Setup {
    /// Where its files are.
    pub places: Places,
    /// The machine, or its record.
    pub machine: Machine,
    /// Below which programs are contained.
    pub cgroup_root: Option<PathBuf>,
    /// False in test mode.
    pub pid1: bool,
    /// The ports, by name; what the first serves.
    pub ports: Vec<Port>,
    /// Where programs find the doors; none: nowhere.
    pub doors: Option<Listeners>,
}

/// A port and what it is for.
#[derive(Debug)]
pub struct Port {
    /// `silkd.agent` or `silkd.egress`.
    pub name: &'static str,
    /// Where it comes from.
    pub source: Source,
    /// True for the one that serves the agent.
    pub agent: bool,
}

/// Why the agent did not start, or ended of itself.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Programs cannot be run.
    #[error("programs cannot be run")]
    Run(#[source] RunError),
    /// Signals cannot be heard.
    #[error("signals cannot be heard")]
    Signals(#[source] io::Error),
    /// The image's environment.
    #[error("the image's environment, {path}")]
    Env {
        /// Which file.
        path: String,
        /// Why it cannot be used.
        #[source]
        source: io::Error,
    },
    /// The doors' listeners.
    #[error("the doors cannot be served")]
    Doors(#[source] io::Error),
    /// A part that should outlive every call ended.
    #[error("{0} ended: a bug")]
    Ended(&'static str),
}

/// Serves until SIGTERM, SIGINT or PowerOff, then stops in order. The caller powers off.
///
/// # Errors
/// When it cannot start, or when a part of it broke; it has stopped then too.
pub async fn serve(setup: Setup) -> Result<(), ServeError> {
    let mut term = signal(SignalKind::terminate()).map_err(ServeError::Signals)?;
    let mut int = signal(SignalKind::interrupt()).map_err(ServeError::Signals)?;
    let mut running = Running::start(setup)?;
    let outcome = tokio::select! {
        _heard = term.recv() => Ok("SIGTERM"),
        _heard = int.recv() => Ok("SIGINT"),
        outcome = running.until_over() => outcome,
    };
    let why = match &outcome {
        Ok(why) => (*why).to_owned(),
        Err(error) => chain(error),
    };
    running.events.log(&format!("stopping: {why}"));
    running.stop().await;
    outcome.map(|_why| ())
}

/// Everything that has to be stopped.
struct Running {
    events: Events,
    gate: Gate,
    runner: Runner,
    files: Files,
    power_off: watch::Receiver<bool>,
    /// True ends the links.
    links_end: watch::Sender<bool>,
    links: Vec<JoinHandle<()>>,
    actor: JoinHandle<()>,
    doors: Option<JoinHandle<()>>,
    follow: Option<JoinHandle<()>>,
}

impl Running {
    fn start(setup: Setup) -> Result<Self, ServeError> {
        let base_env = base_env(&setup)?;
        let events = Events::default();
        let gate = Gate::new();
        let conditions = Conditions::new(events.clone());
        let work = setup.cgroup_root.as_ref().map(|root| root.join("work"));
        let runner = Runner::start(&RunConfig {
            cgroup_root: setup.cgroup_root,
            pid1: setup.pid1,
        })
        .map_err(ServeError::Run)?;
        conditions.holds(Kind::NoContainment, !runner.contains());
        let (told, power_off) = watch::channel(false);
        let doors = Doors::default();
        let parts = control::Parts {
            gate: gate.clone(),
            runner: runner.clone(),
            machine: setup.machine,
            places: setup.places,
            events: events.clone(),
            conditions: conditions.clone(),
            doors: setup
                .doors
                .as_ref()
                .map(|listeners| listeners.probe(doors.clone())),
            power_off: told,
        };
        let (control, actor) = Control::new(parts.clone());
        let facts = control.facts().clone();
        let files = Files::default();
        let agent_parts = agent::Parts {
            lsp: Lsp::new(parts.places.etc_silkd.join("lsp.d")),
            control: parts,
            files: files.clone(),
            base_env,
            relay: Relay::default(),
            pid1: setup.pid1,
            started: clock::since_boot(),
        };
        let server = Server::new(Agent::new(agent_parts, facts.clone()), control);
        let listening = setup.doors.map(|listeners| doors.clone().listen(listeners));
        let listening = listening.transpose().map_err(ServeError::Doors)?;
        let links_end = watch::Sender::new(false);
        let links = setup.ports.into_iter().map(|port| {
            let (gate, facts) = (gate.clone(), facts.clone());
            let link = Link {
                name: port.name,
                source: port.source,
                serves: if port.agent {
                    Serves::Calls(server.clone())
                } else {
                    Serves::Doors(doors.clone())
                },
                hello: Box::new(move || hello(&gate, &facts)),
                stop: links_end.subscribe(),
                events: events.clone(),
            };
            tasks::spawn(link.run())
        });
        Ok(Self {
            links: links.collect(),
            actor: tasks::spawn(actor.run()),
            doors: listening.map(tasks::spawn),
            follow: work.map(|work| tasks::spawn(follow(conditions, work, events.clone()))),
            events,
            gate,
            runner,
            files,
            power_off,
            links_end,
        })
    }

    /// Resolves with the reason, when there is one to stop. Cancel safe.
    async fn until_over(&mut self) -> Result<&'static str, ServeError> {
        // A port that fails leaves silkd mute: nobody could ever reach it again.
        let link = futures_util::future::select_all(self.links.iter_mut());
        tokio::select! {
            _set = self.power_off.wait_for(|off| *off) => Ok("power off"),
            _joined = &mut self.actor => Err(ServeError::Ended("control")),
            _first = link => Err(ServeError::Ended("a port")),
        }
    }

    /// The stop order: no new programs, none left, everybody told, nobody left.
    async fn stop(self) {
        // Who is frozen hears no TERM.
        let grace = if self.gate.state() == State::Quiesced {
            Duration::ZERO
        } else {
            GRACE
        };
        // Every state leads to Stopping.
        drop(self.gate.turn(Turn::Stop));
        self.runner.stop(grace).await;
        self.events.close();
        self.links_end.send_replace(true);
        for link in self.links {
            end(link, FAREWELL).await;
        }
        self.files.stop().await;
        end(self.actor, Duration::ZERO).await;
        if let Some(doors) = self.doors {
            end(doors, Duration::ZERO).await;
        }
        if let Some(follow) = self.follow {
            end(follow, Duration::ZERO).await;
        }
    }
}

fn hello(gate: &Gate, facts: &Facts) -> LinkHello {
    LinkHello {
        proto_min: PROTO_MIN,
        proto_max: PROTO_MAX,
        version: VERSION.to_owned(),
        state: gate.state().on_the_wire().into(),
        generation: facts.generation(),
    }
}

/// Joins a task, and aborts it when it does not end in time.
async fn end<T>(mut task: JoinHandle<T>, limit: Duration) {
    if task.is_finished() {
        return;
    }
    if limit.is_zero() || tokio::time::timeout(limit, &mut task).await.is_err() {
        task.abort();
        // Cancelled, which is what was asked for.
        drop(task.await);
    }
}

async fn follow(conditions: Conditions, work: PathBuf, events: Events) {
    if let Err(error) = conditions.follow(work).await {
        events.log(&format!("conditions of programs are not followed: {error}"));
    }
}

/// What every program is told: where its doors are, and the image's own variables, which may know better.
fn base_env(setup: &Setup) -> Result<BaseEnv, ServeError> {
    let doors = setup.doors.as_ref().map(Listeners::env).unwrap_or_default();
    let image = image_env(&setup.places)?;
    Ok(BaseEnv::new(doors, image, &setup.places.etc_silkd))
}

/// `env` of the image: `KEY=VALUE` a line; no file, no variables.
fn image_env(places: &Places) -> Result<Vec<EnvVar>, ServeError> {
    use io::Read as _;
    let path = places.etc_silkd.join("env");
    let fail = |source| ServeError::Env {
        path: path.display().to_string(),
        source,
    };
    let mut text = Vec::new();
    match std::fs::File::open(&path) {
        Ok(file) => {
            file.take(ENV + 1).read_to_end(&mut text).map_err(fail)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(fail(error)),
    }
    if u64::try_from(text.len()).map_or(true, |length| length > ENV) {
        return Err(fail(io::ErrorKind::FileTooLarge.into()));
    }
    parse_env(&text).ok_or_else(|| fail(io::Error::other("expected KEY=VALUE on every line")))
}

/// Pure; `None` for a line that is neither empty, nor a comment, nor a variable.
fn parse_env(text: &[u8]) -> Option<Vec<EnvVar>> {
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty() && !line.starts_with(b"#"))
        .map(|line| {
            let at = line.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
            let (key, value) = line.split_at_checked(at)?;
            let value = value.strip_prefix(b"=")?;
            let clean = !line.contains(&0);
            clean.then(|| EnvVar {
                key: Bytes::copy_from_slice(key),
                value: Bytes::copy_from_slice(value),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_images_variables_are_bytes() {
        let env = parse_env(b"# image\nA=1\n\nB==\xff\nC=\n").unwrap();
        let pairs: Vec<_> = env.iter().map(|var| (&var.key[..], &var.value[..])).collect();
        assert_eq!(pairs, [(&b"A"[..], &b"1"[..]), (b"B", b"=\xff"), (b"C", b"")]);
        for bad in [&b"A"[..], b"=x", b"A=\0"] {
            assert!(parse_env(bad).is_none());
        }
    }
}
