//! Starting a process that nobody has to wait for.

use std::{future::IntoFuture, ops::Deref, pin::Pin, time::Duration};

use bytes::Bytes;
use sandbox_protocol::v1::{self, AgentSpawnRequest};

use super::ProcessHandle;
use crate::{
    client::via,
    command::{Wanted, command_setters, tty_setters},
    error::Error,
    guest, key,
    retry::Repeat,
    sandbox::SandboxHandle,
};

/// A process in the making; await it to start it. Made by [`SandboxHandle::spawn`].
///
/// What it starts lives on after it, and its output goes on into the log, until it is [killed](ProcessHandle::kill)
/// or the sandbox ends.
#[derive(Debug, Clone)]
#[must_use = "a process does nothing until it is awaited"]
pub struct Spawn {
    sandbox: SandboxHandle,
    wanted: Wanted,
    message: AgentSpawnRequest,
}

impl Spawn {
    pub(super) fn new<I>(sandbox: SandboxHandle, argv: I) -> Self
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        Self {
            sandbox,
            wanted: Wanted::new(argv),
            message: AgentSpawnRequest::default(),
        }
    }

    command_setters!();
    tty_setters!();

    /// Kills what the program started when it has ended. Default: it lives on.
    pub fn kill_descendants(mut self) -> Self {
        self.wanted.message.set_descendants(v1::Descendants::Kill);
        self
    }

    /// A name to find it by, 1 to 64 of `A-Za-z0-9._-` and not all digits.
    pub fn name(mut self, name: impl Into<Bytes>) -> Self {
        self.message.name = name.into();
        self
    }

    /// Bytes of its output that are kept; default 1 MiB, at most 16 MiB. Older output is gone, and readers are told.
    pub fn log_bytes(mut self, bytes: u64) -> Self {
        self.message.log_bytes = bytes;
        self
    }

    /// How long exit and output are kept once it has ended, in whole seconds (rounded up); default 10 min, at most a
    /// day.
    pub fn retain(mut self, time: Duration) -> Self {
        let secs = time.as_nanos().div_ceil(1_000_000_000);
        match u32::try_from(secs) {
            Ok(secs) if secs > 0 => self.message.retain_secs = secs,
            Ok(_) | Err(_) => self.wanted.wrong = Some(("retain_secs", "1 to 86400 seconds")),
        }
        self
    }

    /// Keeps its input open for those who [attach](super::Attach::input). Default: it reads `/dev/null`.
    pub fn keep_stdin(mut self) -> Self {
        self.message.keep_stdin = true;
        self
    }

    /// Makes a repeated start the same process, as long as that is kept: 1 to 128 printable ASCII characters. Random
    /// by default.
    pub fn request_key(mut self, key: impl Into<String>) -> Self {
        self.message.request_key = key.into();
        self
    }

    async fn start(mut self) -> Result<Process, Error> {
        self.message.command = Some(self.wanted.checked()?);
        if self.message.request_key.is_empty() {
            self.message.request_key = key::random()?;
        }
        let sandbox = &self.sandbox;
        // With its key, a start that is repeated is the same start.
        let terms = (Repeat::Harmless, None);
        let reply = guest::ask(sandbox, terms, &self.message, via!(agent_client.spawn)).await?;
        Ok(Process {
            handle: sandbox.process(reply.id),
            id: reply.id,
            pid: reply.pid,
        })
    }
}

impl IntoFuture for Spawn {
    type Output = Result<Process, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.start())
    }
}

/// A process that was started. Cheap to clone; dropping it leaves the process alone.
#[derive(Debug, Clone)]
pub struct Process {
    handle: ProcessHandle,
    id: u64,
    pid: u32,
}

impl Process {
    /// Never used again in the guest's life.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// In the guest; the kernel uses it again.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl Deref for Process {
    type Target = ProcessHandle;

    fn deref(&self) -> &ProcessHandle {
        &self.handle
    }
}
