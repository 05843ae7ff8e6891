//! Sessions: shells that keep directory, variables, functions and jobs between commands.
//!
//! May call: sandbox, guest, client, retry, error, command (milliseconds), input, exec (how something ends), process, key.
//! Never inside: an invented success: without the exit message and an orderly end, a command is an error.
//! Cancel safety: dropping a command's stream or future cancels the command, and the session stays. Dropping an
//! [`Open`] under way may leave a session that nobody knows; the same request key finds it, and idleness ends it.

mod run;

use std::{future::IntoFuture, ops::Deref, pin::Pin, time::Duration};

use bytes::Bytes;
use sandbox_protocol::v1::{
    self, AgentSessionCloseRequest, AgentSessionListRequest, AgentSessionOpenRequest, EnvVar,
};

pub use run::{Run, SessionEvent, SessionExit, SessionOutput, SessionStream};

use crate::{
    client::via, error::Error, guest, key, process::ProcessHandle, retry::Repeat, sandbox::SandboxHandle,
};

/// A session by id. Cheap to clone; dropping it leaves the session alone. Made by [`SandboxHandle::session_by_id`].
#[derive(Debug, Clone)]
pub struct SessionHandle {
    sandbox: SandboxHandle,
    id: String,
}

impl SandboxHandle {
    /// Opens a session: a bash of its own. Await the builder, or set more first.
    pub fn session(&self) -> Open {
        Open {
            sandbox: self.clone(),
            message: AgentSessionOpenRequest::default(),
            wrong: None,
        }
    }

    /// A session that was opened before.
    #[must_use]
    pub fn session_by_id(&self, id: impl Into<String>) -> SessionHandle {
        SessionHandle {
            sandbox: self.clone(),
            id: id.into(),
        }
    }

    /// The sessions that are open.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, SANDBOX_FAILED, AGENT_LOST.
    pub async fn sessions(&self) -> Result<Vec<v1::Session>, Error> {
        let terms = (Repeat::Harmless, None);
        let message = AgentSessionListRequest {};
        let reply = guest::ask(self, terms, &message, via!(agent_client.session_list)).await?;
        Ok(reply.sessions)
    }
}

/// A session in the making; await it to open it. Made by [`SandboxHandle::session`].
#[derive(Debug, Clone)]
#[must_use = "a session is not open until this is awaited"]
pub struct Open {
    sandbox: SandboxHandle,
    message: AgentSessionOpenRequest,
    wrong: Option<(&'static str, &'static str)>,
}

impl Open {
    /// Its id, 1 to 64 of `A-Za-z0-9._-`. Default: one that the guest makes.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.message.session = id.into();
        self
    }

    /// An environment variable, over those of the claim and the image.
    pub fn env(mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        let (key, value) = (key.into(), value.into());
        self.message.env.push(EnvVar { key, value });
        self
    }

    /// Starts from this request's variables alone.
    pub fn clear_env(mut self) -> Self {
        self.message.clear_env = true;
        self
    }

    /// Working directory at the start, absolute. Default: the user's home, else `/`.
    pub fn cwd(mut self, path: impl Into<Bytes>) -> Self {
        self.message.cwd = path.into();
        self
    }

    /// Name or number, `[:group]`. Default: the claim's, else root.
    pub fn user(mut self, user: impl Into<Bytes>) -> Self {
        self.message.user = user.into();
        self
    }

    /// How long it may be without a command before it is ended, in whole seconds (rounded up); none: for ever.
    /// Default: 30 min.
    pub fn idle(mut self, time: Option<Duration>) -> Self {
        let secs = time.map_or(0, |time| time.as_nanos().div_ceil(1_000_000_000));
        match (u32::try_from(secs), time) {
            (Ok(0), Some(_)) | (Err(_), _) => self.wrong = Some(("idle_secs", "1 to 2^32 - 1 seconds")),
            (Ok(secs), _) => self.message.idle_secs = Some(secs),
        }
        self
    }

    /// Makes a repeated opening the same session: 1 to 128 printable ASCII characters. Random by default.
    pub fn request_key(mut self, key: impl Into<String>) -> Self {
        self.message.request_key = key.into();
        self
    }

    async fn open(mut self) -> Result<Session, Error> {
        if let Some((field, allowed)) = self.wrong {
            return Err(Error::invalid(field, allowed.to_owned()));
        }
        if self.message.request_key.is_empty() {
            self.message.request_key = key::random()?;
        }
        let sandbox = &self.sandbox;
        // With its key, an opening that is repeated is the same opening.
        let terms = (Repeat::Harmless, None);
        let reply = guest::ask(sandbox, terms, &self.message, via!(agent_client.session_open)).await?;
        Ok(Session {
            handle: sandbox.session_by_id(reply.session),
            process: sandbox.process(reply.process),
            pid: reply.pid,
        })
    }
}

impl IntoFuture for Open {
    type Output = Result<Session, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.open())
    }
}

/// A session that was opened. Cheap to clone; dropping it leaves the session open until it is
/// [closed](SessionHandle::close) or idle for too long.
#[derive(Debug, Clone)]
pub struct Session {
    handle: SessionHandle,
    process: ProcessHandle,
    pid: u32,
}

impl Session {
    /// Its shell, as a process.
    #[must_use]
    pub fn process(&self) -> &ProcessHandle {
        &self.process
    }

    /// Of its shell, in the guest.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl Deref for Session {
    type Target = SessionHandle;

    fn deref(&self) -> &SessionHandle {
        &self.handle
    }
}

impl SessionHandle {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// A command for its shell, at most 1 MiB of text without NUL; one at a time runs.
    pub fn run(&self, text: impl AsRef<[u8]>) -> Run {
        Run::new(self.clone(), Bytes::copy_from_slice(text.as_ref()))
    }

    /// Ends the shell and all that it started.
    ///
    /// # Errors
    /// SESSION_NOT_FOUND.
    pub async fn close(&self) -> Result<(), Error> {
        let message = AgentSessionCloseRequest {
            session: self.id.clone(),
        };
        let terms = (Repeat::OnWord, None);
        let reply = guest::ask(&self.sandbox, terms, &message, via!(agent_client.session_close)).await;
        reply.map(drop)
    }
}
