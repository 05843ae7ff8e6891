//! Which daemon a test wants.

use std::path::{Path, PathBuf};

use crate::{
    daemon::{Daemon, Refused},
    programs::{image, program},
};

/// What answers for the stub engine's guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agent {
    /// A silkd per sandbox.
    Process,
    /// The daemon itself.
    InProcess,
}

/// A daemon that is wanted. Made by [`Setup::stub`] and its neighbours.
#[derive(Debug, Clone)]
pub struct Setup {
    pub(crate) dev: bool,
    engine: Engine,
    warm: Option<u32>,
    keep: bool,
    config: String,
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) socket_outside: bool,
    pub(crate) failpoints: String,
    pub(crate) log: String,
    /// A program and its first arguments, which starts the daemon in its own place.
    pub(crate) wrapper: Vec<String>,
}

#[derive(Debug, Clone)]
enum Engine {
    Stub { agent: Agent, faults: String },
    Qemu { image: PathBuf },
}

impl Setup {
    fn new(engine: Engine, dev: bool) -> Self {
        Self {
            dev,
            engine,
            warm: None,
            keep: false,
            config: String::new(),
            state_dir: None,
            socket_outside: false,
            failpoints: String::new(),
            log: "info".to_owned(),
            wrapper: Vec::new(),
        }
    }

    /// Engine stub by a configuration file, with a silkd per sandbox. The only pool is `default`.
    #[must_use]
    pub fn stub() -> Self {
        let faults = String::new();
        Self::new(
            Engine::Stub {
                agent: Agent::Process,
                faults,
            },
            false,
        )
    }

    /// Engine stub in dev mode, with a silkd per sandbox.
    #[must_use]
    pub fn dev() -> Self {
        Self {
            dev: true,
            ..Self::stub()
        }
    }

    /// Virtual machines of the busybox image, in dev mode.
    ///
    /// # Panics
    /// The image was not built.
    #[must_use]
    pub fn qemu() -> Self {
        Self::qemu_of("busybox")
    }

    /// Virtual machines of this image, in dev mode.
    ///
    /// # Panics
    /// The image was not built.
    #[must_use]
    pub fn qemu_of(name: &str) -> Self {
        Self::new(Engine::Qemu { image: image(name) }, true)
    }

    /// Virtual machines by a configuration file, so that [`config`](Self::config) and
    /// [`Daemon::configure`] can be used.
    #[must_use]
    pub fn from_file(mut self) -> Self {
        self.dev = false;
        self
    }

    /// Warm sandboxes of pool `default`; in dev mode also its ceiling.
    #[must_use]
    pub fn warm(mut self, warm: u32) -> Self {
        self.warm = Some(warm);
        self
    }

    /// Answers for the guests of the stub engine within the daemon.
    #[must_use]
    pub fn in_process(mut self) -> Self {
        if let Engine::Stub { agent, .. } = &mut self.engine {
            *agent = Agent::InProcess;
        }
        self
    }

    /// Faults of the stub engine (`fail clone 1-3,die 5,mute 6`).
    #[must_use]
    pub fn stub_faults(mut self, script: &str) -> Self {
        if let Engine::Stub { faults, .. } = &mut self.engine {
            script.clone_into(faults);
        }
        self
    }

    /// Failpoints of the daemon, `name=kill@N` or `name=error`.
    #[must_use]
    pub fn failpoints(mut self, script: &str) -> Self {
        script.clone_into(&mut self.failpoints);
        self
    }

    /// More of the configuration file. It follows dotted keys of the root, so it may go on with such.
    ///
    /// # Panics
    /// In dev mode.
    #[must_use]
    pub fn config(mut self, toml: &str) -> Self {
        assert!(!self.dev, "dev mode has no configuration file");
        self.config.push_str(toml);
        self.config.push('\n');
        self
    }

    /// Dev mode: leave sandboxes at a clean stop.
    #[must_use]
    pub fn keep(mut self) -> Self {
        self.keep = true;
        self
    }

    /// State, run directory and socket here, not in a folder of the daemon's own.
    #[must_use]
    pub fn state_dir(mut self, dir: &Path) -> Self {
        self.state_dir = Some(dir.to_owned());
        self
    }

    /// The API's socket beside the state, where it can be reached though the state lies on a disk of the daemon's own.
    #[must_use]
    pub fn socket_outside(mut self) -> Self {
        self.socket_outside = true;
        self
    }

    /// Filter of the log; `info` unless set.
    #[must_use]
    pub fn log(mut self, filter: &str) -> Self {
        filter.clone_into(&mut self.log);
        self
    }

    /// A program that puts the daemon in its own place (`exec`): its name and first arguments.
    #[must_use]
    pub fn wrapped(mut self, program: &[&str]) -> Self {
        self.wrapper = program.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Starts it and waits until it serves.
    ///
    /// # Panics
    /// It does not come up.
    pub async fn start(self) -> Daemon {
        Box::pin(Daemon::start(self)).await
    }

    /// Starts it and waits until it has given up.
    ///
    /// # Panics
    /// It serves.
    pub async fn refused(self) -> Refused {
        Box::pin(Daemon::refused(self)).await
    }

    /// The command line after the program's name.
    pub(crate) fn arguments(&self, dir: &Path, file: &Path) -> Vec<String> {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        if !self.dev {
            return vec!["serve".into(), "--config".into(), text(file)];
        }
        let mut line: Vec<String> = ["serve", "--dev", "--state-dir"].map(Into::into).into();
        line.push(text(dir));
        match &self.engine {
            Engine::Stub { agent, faults } => {
                line.extend(["--engine", "stub", "--stub-silkd"].map(Into::into));
                line.push(text(&program("silkd-under-test")));
                if *agent == Agent::InProcess {
                    line.extend(["--stub-agent", "in-process"].map(Into::into));
                }
                if !faults.is_empty() {
                    line.extend(["--stub-faults".into(), faults.clone()]);
                }
            }
            Engine::Qemu { image } => {
                line.extend(["--engine", "qemu", "--image"].map(Into::into));
                line.push(text(image));
            }
        }
        if let Some(warm) = self.warm {
            line.extend(["--warm".into(), warm.to_string()]);
        }
        if self.keep {
            line.push("--keep".into());
        }
        line
    }

    /// The configuration file.
    pub(crate) fn file(&self, dir: &Path, socket: &Path) -> String {
        let mut lines = vec![
            format!("node.state_dir = {dir:?}"),
            format!("node.run_dir = {dir:?}"),
            format!("listen.unix = {socket:?}"),
            "log.format = \"text\"".to_owned(),
        ];
        if !self.config.contains("listen.metrics") {
            lines.push("listen.metrics = \"\"".to_owned());
        }
        match &self.engine {
            Engine::Stub { agent, faults } => {
                let agent = match agent {
                    Agent::Process => "process",
                    Agent::InProcess => "in_process",
                };
                lines.push("engine.kind = \"stub\"".to_owned());
                lines.push("engine.isolates_nothing = true".to_owned());
                lines.push(format!("engine.stub.agent = {agent:?}"));
                lines.push(format!("engine.stub.silkd = {:?}", program("silkd-under-test")));
                lines.push(format!("engine.stub.faults = {faults:?}"));
            }
            Engine::Qemu { image } => {
                lines.push("engine.kind = \"qemu\"".to_owned());
                lines.push(format!("template.default.image = {image:?}"));
            }
        }
        lines.extend(self.warm.map(|warm| format!("pool.default.warm = {warm}")));
        lines.push(self.config.clone());
        lines.join("\n")
    }

    pub(crate) fn set_config(&mut self, toml: &str) {
        toml.clone_into(&mut self.config);
    }
}
