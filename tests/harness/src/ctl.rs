//! `sandboxctl`, as a user runs it.

use std::{
    ffi::{OsStr, OsString},
    process::Stdio,
};

use serde_json::Value;
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::{HANG, program, within};

/// A command line to be.
#[derive(Debug, Clone)]
pub struct Ctl {
    address: String,
    token: Option<String>,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: String,
}

impl Ctl {
    /// For the daemon at this address.
    #[must_use]
    pub fn new(address: &str) -> Self {
        Self {
            address: address.to_owned(),
            token: None,
        }
    }

    /// With a token, through the environment.
    #[must_use]
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// Variables of a shell that types `$ctl` for `sandboxctl`.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![
            ("ctl", program("sandboxctl-under-test").into_os_string()),
            ("SANDBOXD_ADDR", self.address.clone().into()),
        ];
        if let Some(token) = &self.token {
            variables.push(("SANDBOXD_TOKEN", token.into()));
        }
        variables
    }

    /// The command, to be started by the caller.
    pub fn command<I>(&self, args: I) -> Command
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut command = Command::new(program("sandboxctl-under-test"));
        command
            .env_clear()
            .env("SANDBOXD_ADDR", &self.address)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(token) = &self.token {
            command.env("SANDBOXD_TOKEN", token);
        }
        command
    }

    /// Runs it to its end.
    ///
    /// # Panics
    /// It does not end, or by a signal.
    pub async fn run<I>(&self, args: I) -> Ran
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        Ran::of(within(HANG, self.command(args).output()).await.unwrap())
    }

    /// The same, with input.
    ///
    /// # Panics
    /// It does not end, or by a signal.
    pub async fn run_with<I>(&self, args: I, input: &[u8]) -> Ran
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let (wrote, output) = within(HANG, async {
            tokio::join!(
                async {
                    let wrote = stdin.write_all(input).await;
                    drop(stdin);
                    wrote
                },
                child.wait_with_output()
            )
        })
        .await;
        // A command that does not read its input is in its right.
        drop(wrote);
        Ran::of(output.unwrap())
    }

    /// Runs it with `--json`, expects success, and reads its one object.
    ///
    /// # Panics
    /// It fails.
    pub async fn json<I>(&self, args: I) -> Value
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let args = args.into_iter().map(|arg| arg.as_ref().to_owned());
        let args: Vec<_> = std::iter::once("--json".into()).chain(args).collect();
        let ran = self.run(&args).await;
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
        ran.value()
    }

    /// Runs it with `--json`, expects exit code 1, and reads the error.
    ///
    /// # Panics
    /// It succeeds, or ends otherwise.
    pub async fn error<I>(&self, args: I) -> Value
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let args = args.into_iter().map(|arg| arg.as_ref().to_owned());
        let args: Vec<_> = std::iter::once("--json".into()).chain(args).collect();
        let ran = self.run(&args).await;
        assert_eq!(ran.code, 1, "{args:?}: {}", ran.stderr);
        ran.fault()
    }
}

/// Runs `sandboxd` for a command that does not serve.
///
/// # Panics
/// It does not end, or by a signal.
pub async fn sandboxd<I>(args: I) -> Ran
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    let mut command = Command::new(program("sandboxd-faults"));
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .args(args)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    Ran::of(within(HANG, command.output()).await.unwrap())
}

impl Ran {
    fn of(output: std::process::Output) -> Self {
        Self {
            code: output.status.code().expect("it ended by itself"),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard output as one JSON value.
    ///
    /// # Panics
    /// It is none.
    #[must_use]
    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error that `--json` put on standard error.
    ///
    /// # Panics
    /// There is none.
    #[must_use]
    pub fn fault(&self) -> Value {
        let line = self.stderr.lines().last().unwrap_or_default();
        let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {self:?}"));
        value.get("error").cloned().unwrap_or_else(|| panic!("{self:?}"))
    }
}
