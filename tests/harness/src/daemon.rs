//! A daemon that runs.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use rustix::process::Signal;
use sandbox_sdk::{Client, Token};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::UnixDatagram,
    process::{Child, ChildStdout, Command},
};

use crate::{
    HANG, Setup,
    ctl::Ctl,
    process::{self, Process},
    program, within,
};

/// A daemon and its folder. Dropping it kills it, and every sandbox process that is left.
#[derive(Debug)]
pub struct Daemon {
    setup: Setup,
    /// Holds everything unless the state was put elsewhere.
    home: TempDir,
    /// It tells us here what it would tell systemd.
    news: UnixDatagram,
    running: Option<Running>,
    /// It has served: what lies in its folder is its own, also where that is the test's.
    served: bool,
}

#[derive(Debug)]
struct Running {
    child: Child,
    process: Process,
    out: BufReader<ChildStdout>,
}

/// A daemon that did not want to start.
#[derive(Debug)]
pub struct Refused {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to stderr.
    pub stderr: String,
}

impl Daemon {
    fn new(setup: Setup) -> Self {
        let home = tempfile::Builder::new().prefix("sbx").tempdir().unwrap();
        let news = UnixDatagram::bind(home.path().join("news")).unwrap();
        Self {
            setup,
            home,
            news,
            running: None,
            served: false,
        }
    }

    pub(crate) async fn start(setup: Setup) -> Self {
        let mut daemon = Self::new(setup);
        daemon.start_again().await;
        daemon
    }

    pub(crate) async fn refused(setup: Setup) -> Refused {
        let mut daemon = Self::new(setup);
        daemon.refuses_again().await
    }

    /// Starts it on the same folder, as [`refuses_again`](Self::refuses_again) expects it.
    ///
    /// # Panics
    /// It serves, or it runs already.
    pub async fn refuses_again(&mut self) -> Refused {
        let before = self.log().len();
        match Box::pin(self.launch()).await {
            Ok(()) => panic!("the daemon serves"),
            Err(status) => Refused {
                status,
                stderr: self.log().split_off(before),
            },
        }
    }

    /// Starts it on the same folder once it has ended, and waits until it serves.
    ///
    /// # Panics
    /// It does not come up, or it runs already.
    pub async fn start_again(&mut self) {
        if let Err(status) = Box::pin(self.launch()).await {
            panic!("the daemon does not start ({status})");
        }
    }

    /// Starts it on the same folder with a failpoint that kills it in its start, or soon after, and waits until it has.
    ///
    /// # Panics
    /// It runs already, or lives on.
    pub async fn start_to_die(&mut self) -> ExitStatus {
        match self.launch().await {
            Ok(()) => self.ends().await,
            Err(status) => status,
        }
    }

    async fn launch(&mut self) -> Result<(), ExitStatus> {
        assert!(self.running.is_none(), "it runs already");
        let file = self.config_file();
        if !self.setup.dev {
            self.write_config();
        }
        let log = OpenOptions::new().create(true).append(true).open(self.log_file());
        let daemon = program("sandboxd-faults");
        let mut command = match self.setup.wrapper.split_first() {
            Some((wrapper, rest)) => {
                let mut command = Command::new(wrapper);
                command.args(rest).arg(daemon);
                command
            }
            None => Command::new(daemon),
        };
        command
            .args(self.setup.arguments(&self.dir(), &file))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home.path())
            .env("SANDBOXD_LOG", &self.setup.log)
            .env("SANDBOXD_FAULTS", &self.setup.failpoints)
            .env("NOTIFY_SOCKET", self.home.path().join("news"))
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.unwrap())
            .kill_on_drop(true);
        // What an earlier life said is of no interest to this one.
        let mut text = [0; 256];
        while self.news.try_recv(&mut text).is_ok() {}
        let mut child = command.spawn().unwrap();
        let process = Process::look(i32::try_from(child.id().unwrap()).unwrap());
        let ended = within(HANG, async {
            loop {
                tokio::select! {
                    biased;
                    said = self.news.recv(&mut text) => {
                        if said_line(&text, said.unwrap(), "READY=1") {
                            return None;
                        }
                    }
                    status = child.wait() => return Some(status.unwrap()),
                }
            }
        });
        match ended.await {
            Some(status) => Err(status),
            None => {
                self.served = true;
                self.running = Some(Running {
                    out: BufReader::new(child.stdout.take().unwrap()),
                    child,
                    process: process.expect("it lives"),
                });
                Ok(())
            }
        }
    }

    /// Waits until the daemon tells systemd this line.
    ///
    /// # Panics
    /// It does not.
    pub async fn says(&self, line: &str) {
        let mut text = [0; 256];
        within(HANG, async {
            loop {
                let length = self.news.recv(&mut text).await.unwrap();
                if said_line(&text, length, line) {
                    return;
                }
            }
        })
        .await;
    }

    /// The next line of its stdout.
    ///
    /// # Panics
    /// There is none.
    pub async fn line(&mut self) -> String {
        let mut line = String::new();
        let out = &mut self.running.as_mut().expect("it runs").out;
        within(HANG, out.read_line(&mut line)).await.unwrap();
        line
    }

    /// State, run directory and socket.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        let own = || self.home.path().join("d");
        self.setup.state_dir.clone().unwrap_or_else(own)
    }

    /// A folder for the test's own files, beside the daemon's.
    #[must_use]
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Where the configuration file is, in file mode.
    #[must_use]
    pub fn config_file(&self) -> PathBuf {
        self.home.path().join("sandboxd.toml")
    }

    fn write_config(&self) {
        fs::write(self.config_file(), self.setup.file(&self.dir(), &self.socket())).unwrap();
    }

    /// Puts other text in the place of what [`Setup::config`] gave; a reload or a new start reads it.
    ///
    /// # Panics
    /// In dev mode.
    pub fn configure(&mut self, toml: &str) {
        assert!(!self.setup.dev, "dev mode has no configuration file");
        self.setup.set_config(toml);
        self.write_config();
    }

    /// Changes what the next start is to be: `daemon.change(|setup| setup.warm(4).failpoints(""))`.
    pub fn change(&mut self, change: impl FnOnce(Setup) -> Setup) {
        self.setup = change(self.setup.clone());
    }

    fn log_file(&self) -> PathBuf {
        self.home.path().join("log")
    }

    /// What it has written to stderr, all its lives together.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    fn socket(&self) -> PathBuf {
        if self.setup.socket_outside {
            self.home.path().join("api.sock")
        } else {
            self.dir().join("api.sock")
        }
    }

    /// A client with the rights of this process, an operator's.
    ///
    /// # Panics
    /// The daemon is not there.
    pub async fn client(&self) -> Client {
        Client::connect(&self.address()).await.unwrap()
    }

    /// A client with a token.
    ///
    /// # Panics
    /// The daemon is not there.
    pub async fn client_as(&self, token: &str) -> Client {
        let options = Client::options().token(Token::new(token).unwrap());
        options.connect(&self.address()).await.unwrap()
    }

    /// `sandboxctl`, to talk to it.
    #[must_use]
    pub fn ctl(&self) -> Ctl {
        Ctl::new(&self.address())
    }

    /// The daemon's process.
    ///
    /// # Panics
    /// It does not run.
    #[must_use]
    pub fn process(&self) -> Process {
        self.running.as_ref().expect("it runs").process
    }

    /// Its sandboxes' processes that live, by the files in the run directory.
    #[must_use]
    pub fn sandbox_processes(&self) -> Vec<Process> {
        let found = process::sandboxes(&self.dir());
        found.into_iter().map(|(process, _)| process).collect()
    }

    /// Slots that something lies in, sorted.
    #[must_use]
    pub fn slot_dirs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir().join("run"))
            .into_iter()
            .flatten()
            .flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    /// Kills it as a crash would, and waits until it is dead.
    ///
    /// # Panics
    /// It does not run.
    pub async fn kill9(&mut self) {
        let mut running = self.running.take().expect("it runs");
        running.process.signal(Signal::KILL);
        within(HANG, running.child.wait()).await.unwrap();
    }

    /// Waits until it ends by itself (a failpoint kills it, say).
    ///
    /// # Panics
    /// It does not run, or does not end.
    pub async fn ends(&mut self) -> ExitStatus {
        let mut running = self.running.take().expect("it runs");
        within(HANG, running.child.wait()).await.unwrap()
    }

    /// Tells it to stop and waits until it has.
    ///
    /// # Panics
    /// It does not run, does not stop, or does not stop cleanly.
    pub async fn stop(&mut self) {
        self.process().signal(Signal::TERM);
        let status = self.ends().await;
        assert!(status.success(), "the daemon stopped with {status}");
    }
}

/// Whether a datagram holds this line.
fn said_line(text: &[u8], length: usize, line: &str) -> bool {
    let said = text.get(..length).unwrap_or_default();
    String::from_utf8_lossy(said).lines().any(|said| said == line)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "--- log of the daemon in {}\n{}---",
                self.dir().display(),
                self.log()
            );
        }
        if let Some(running) = self.running.take() {
            running.process.kill_now();
        }
        if !self.served && self.setup.state_dir.is_some() {
            // Another daemon's, who refused it.
            return;
        }
        for (process, group) in process::sandboxes(&self.dir()) {
            process.kill_now();
            // What the sandbox's programs left behind ends with its group, where there is one.
            if let Some(group) = &group {
                process::end_group(group);
            }
        }
        for process in process::users_of(&self.dir()) {
            process.kill_now();
        }
    }
}
