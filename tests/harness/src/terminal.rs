//! A terminal as a person has one: tmux with one window, typed into and read from the screen.
//!
//! Nothing here sleeps: a control client is told of each piece of output, and the screen is looked at again.

use std::{fmt::Write as _, process::Stdio};

use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::{Ctl, HANG, within};

/// Columns and rows at the start.
const SIZE: (u16, u16) = (80, 24);
/// The kind of terminal is one that every machine knows.
const CONFIG: &str = "set -g default-terminal screen\n";

/// A window in which a plain `sh` runs, which leaves the terminal's modes to the kernel. Dropping it ends all of it.
#[derive(Debug)]
pub struct Terminal {
    /// Holds the server's socket.
    _home: TempDir,
    /// The control client; with it the server ends.
    _client: Child,
    said: Lines<BufReader<ChildStdout>>,
    commands: ChildStdin,
}

impl Terminal {
    /// Opens one whose shell finds `sandboxctl`, the daemon and the token in `$ctl` and its environment.
    ///
    /// # Panics
    /// tmux is missing.
    pub async fn open(ctl: &Ctl) -> Self {
        let home = tempfile::Builder::new().prefix("term").tempdir().unwrap();
        let config = home.path().join("config");
        std::fs::write(&config, CONFIG).unwrap();
        let mut command = Command::new("tmux");
        let mut client = command
            .arg("-f")
            .arg(&config)
            .arg("-S")
            .arg(home.path().join("tmux"))
            .args([
                "-C",
                "new-session",
                "-x",
                &SIZE.0.to_string(),
                "-y",
                &SIZE.1.to_string(),
                "sh",
            ])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("LANG", "C.UTF-8")
            .env("TERM", "screen")
            .envs(ctl.environment())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("tmux is there: deploy/deps test");
        let mut terminal = Self {
            _home: home,
            said: BufReader::new(client.stdout.take().unwrap()).lines(),
            commands: client.stdin.take().unwrap(),
            _client: client,
        };
        // The answer to `new-session`.
        terminal.answer().await;
        // Only now: a server without clients would end before it has one, and tmux 3.3 does not start with the second.
        for option in ["exit-unattached on", "window-size manual", "status off"] {
            terminal.command(&format!("set-option -g {option}")).await;
        }
        terminal.resize(SIZE.0, SIZE.1).await;
        terminal.line("PS1='out> '; clear").await;
        terminal
            .until("its prompt", |screen| screen.starts_with("out>"))
            .await;
        terminal
    }

    /// Types a line.
    ///
    /// # Panics
    /// tmux has ended.
    pub async fn line(&mut self, text: &str) {
        self.keys(&format!("{text}\r")).await;
    }

    /// Types bytes as they are: `\x03` is Ctrl-C.
    ///
    /// # Panics
    /// tmux has ended.
    pub async fn keys(&mut self, keys: &str) {
        let mut command = String::from("send-keys -H");
        for byte in keys.bytes() {
            write!(command, " {byte:02x}").unwrap();
        }
        self.command(&command).await;
    }

    /// Makes the window another size, as a person does with the mouse.
    ///
    /// # Panics
    /// tmux has ended.
    pub async fn resize(&mut self, cols: u16, rows: u16) {
        self.command(&format!("resize-window -x {cols} -y {rows}")).await;
    }

    /// Waits until the screen is as `fits` wants it, and gives it: lines without spaces at their ends.
    ///
    /// # Panics
    /// It never is.
    pub async fn until(&mut self, what: &str, fits: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        let seen = tokio::time::timeout(HANG, async {
            loop {
                screen = self.command("capture-pane -p").await;
                if fits(&screen) {
                    return;
                }
                loop {
                    let line = self.said.next_line().await.unwrap().expect("tmux runs");
                    if line.starts_with("%output") {
                        break;
                    }
                }
            }
        });
        match seen.await {
            Ok(()) => screen,
            Err(_elapsed) => panic!("never on the screen: {what}\n{screen}"),
        }
    }

    async fn command(&mut self, command: &str) -> String {
        let line = format!("{command}\n");
        self.commands.write_all(line.as_bytes()).await.unwrap();
        within(HANG, self.answer()).await
    }

    /// The next answer of tmux: what stands between `%begin` and `%end`.
    async fn answer(&mut self) -> String {
        let mut answer: Option<String> = None;
        loop {
            let line = self.said.next_line().await.unwrap().expect("tmux runs");
            let answered = line.starts_with("%end ");
            assert!(!line.starts_with("%error "), "tmux refuses: {answer:?}");
            match &mut answer {
                None if line.starts_with("%begin ") => answer = Some(String::new()),
                None => {}
                Some(answer) if answered => return std::mem::take(answer),
                Some(answer) => {
                    answer.push_str(line.trim_end());
                    answer.push('\n');
                }
            }
        }
    }
}
