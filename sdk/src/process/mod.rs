//! Processes that outlive the call that started them: start, list, read, end.
//!
//! May call: sandbox, guest, client, retry, error, command, input, exec (what an end is), key.
//! Never inside: a second start by a repeated call: each start has a request key. Output that is missing in silence:
//! what the guest no longer holds is told, and what got lost is an error.
//! Cancel safety: dropping a reader leaves the process alone; dropping a [`Spawn`] under way may leave a process that
//! nobody knows, which the same request key finds.

mod attach;
mod list;
mod logs;
mod reader;
mod spawn;

use std::time::Duration;

use bytes::Bytes;
use sandbox_protocol::{
    reason::Reason,
    v1::{self, AgentForgetRequest, AgentKillRequest, AgentWaitRequest, process_ref::Which, signal::Scope},
};

pub use attach::{Attach, AttachStream, Attached};
pub use list::ProcessList;
pub use logs::{LogStream, Logs};
pub use reader::{LogEvent, LogFrom};
pub use spawn::{Process, Spawn};

use crate::{
    client::via, command::millis, error::Error, exec::Exit, guest, retry::Repeat, sandbox::SandboxHandle,
};

/// Longest wait that one call of the agent allows.
const WAIT: Duration = Duration::from_secs(300);
/// SIGKILL, by its number.
const KILL: i32 = 9;

/// Which process of a sandbox: its id, which is never used again in the guest's life, or the name that it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessRef {
    /// Of [`Process::id`] or [`Event::Started`](crate::Event::Started).
    Id(u64),
    /// Of one that runs or is kept.
    Name(Bytes),
}

impl From<u64> for ProcessRef {
    fn from(id: u64) -> Self {
        Self::Id(id)
    }
}

/// Digits are an id: no name is all digits.
impl From<&str> for ProcessRef {
    fn from(text: &str) -> Self {
        match text.parse() {
            Ok(id) if text.bytes().all(|byte| byte.is_ascii_digit()) => Self::Id(id),
            Ok(_) | Err(_) => Self::Name(Bytes::copy_from_slice(text.as_bytes())),
        }
    }
}

impl ProcessRef {
    fn message(&self) -> v1::ProcessRef {
        let which = match self {
            Self::Id(id) => Which::Id(*id),
            Self::Name(name) => Which::Name(name.clone()),
        };
        v1::ProcessRef { which: Some(which) }
    }
}

/// What a [`kill`](ProcessHandle::kill) did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Killed {
    /// It had ended before.
    pub already_exited: bool,
    /// A signal was sent to something: to the process, or to what it left behind.
    pub signalled: bool,
}

/// A process by id or name. Cheap to clone; dropping it leaves the process alone. Made by [`SandboxHandle::process`].
#[derive(Debug, Clone)]
pub struct ProcessHandle {
    sandbox: SandboxHandle,
    which: ProcessRef,
}

impl SandboxHandle {
    /// A process that was started before: by [`spawn`](Self::spawn), or by an [`exec`](Self::exec) that is detached.
    #[must_use]
    pub fn process(&self, which: impl Into<ProcessRef>) -> ProcessHandle {
        ProcessHandle {
            sandbox: self.clone(),
            which: which.into(),
        }
    }

    /// Starts a program that nobody has to wait for; its output goes to a log. Await the builder, or set more first.
    pub fn spawn<I>(&self, argv: I) -> Spawn
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        Spawn::new(self.clone(), argv)
    }

    /// What the agent started and still knows of, oldest first. `running`: only what runs.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, SANDBOX_FAILED, AGENT_LOST.
    pub async fn processes(&self, running: bool) -> Result<ProcessList, Error> {
        ProcessList::open(self, running).await
    }
}

impl ProcessHandle {
    /// Its id or name, as the handle was made.
    #[must_use]
    pub fn which(&self) -> &ProcessRef {
        &self.which
    }

    /// Its output as it comes and, if asked for, its input.
    pub fn attach(&self) -> Attach {
        Attach::new(self.clone())
    }

    /// Its output so far, or [followed](Logs::follow).
    pub fn logs(&self) -> Logs {
        Logs::new(self.clone())
    }

    /// Waits for its end, however long that takes. Cancel safe.
    ///
    /// # Errors
    /// PROCESS_NOT_FOUND: unknown, or no longer kept.
    pub async fn wait(&self) -> Result<Exit, Error> {
        loop {
            if let Some(exit) = self.wait_step(WAIT).await? {
                return Ok(exit);
            }
        }
    }

    /// Waits for its end, at most so long; nothing if it runs on. A time of zero only looks. Cancel safe.
    ///
    /// # Errors
    /// See [`wait`](Self::wait).
    pub async fn wait_timeout(&self, timeout: Duration) -> Result<Option<Exit>, Error> {
        let mut left = timeout;
        loop {
            let step = left.min(WAIT);
            let exit = self.wait_step(step).await?;
            left = left.saturating_sub(step);
            if exit.is_some() || left.is_zero() {
                return Ok(exit);
            }
        }
    }

    async fn wait_step(&self, step: Duration) -> Result<Option<Exit>, Error> {
        let message = AgentWaitRequest {
            process: Some(self.which.message()),
            timeout_ms: millis(step).unwrap_or(u32::MAX),
        };
        let sandbox = &self.sandbox;
        let limit = step.saturating_add(sandbox.client().timeout());
        let terms = (Repeat::Harmless, Some(limit));
        let reply = guest::ask(sandbox, terms, &message, via!(agent_client.wait)).await;
        match reply {
            Ok(reply) => {
                let exit = reply
                    .exit
                    .ok_or_else(|| Error::unfinished("the answer has no exit"))?;
                Exit::read(exit, None).map(Some)
            }
            Err(error) if error.is(Reason::StillRunning) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Kills it and all that it started. What has ended already is no error.
    ///
    /// # Errors
    /// PROCESS_NOT_FOUND.
    pub async fn kill(&self) -> Result<Killed, Error> {
        self.signal(KILL, Scope::Tree).await
    }

    /// Sends a signal to the leader, its group, or all that descends from it, also once the leader has ended.
    ///
    /// # Errors
    /// PROCESS_NOT_FOUND, INVALID_SIGNAL.
    pub async fn signal(&self, number: i32, scope: Scope) -> Result<Killed, Error> {
        let message = AgentKillRequest {
            process: Some(self.which.message()),
            signal: number,
            scope: scope.into(),
        };
        // Killed twice is killed; what another signal means twice is the program's matter.
        let repeat = if number == KILL {
            Repeat::Harmless
        } else {
            Repeat::OnWord
        };
        let terms = (repeat, None);
        let reply = guest::ask(&self.sandbox, terms, &message, via!(agent_client.kill)).await?;
        Ok(Killed {
            already_exited: reply.already_exited,
            signalled: reply.signalled,
        })
    }

    /// Drops what is kept of it, its output and its exit, once it has ended.
    ///
    /// # Errors
    /// PROCESS_NOT_FOUND, STILL_RUNNING.
    pub async fn forget(&self) -> Result<(), Error> {
        let message = AgentForgetRequest {
            process: Some(self.which.message()),
        };
        let terms = (Repeat::OnWord, None);
        let reply = guest::ask(&self.sandbox, terms, &message, via!(agent_client.forget)).await;
        reply.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_an_id_and_all_else_a_name() {
        assert_eq!(ProcessRef::from("17"), ProcessRef::Id(17));
        for name in ["web", "+17", "1.7", "", "99999999999999999999999"] {
            assert_eq!(
                ProcessRef::from(name),
                ProcessRef::Name(Bytes::copy_from_slice(name.as_bytes()))
            );
        }
    }
}
