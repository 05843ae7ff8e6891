//! The calls of sessions.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use sandbox_protocol::{
    limits::{REQUEST_KEY, SESSION_COMMAND},
    reason::Reason,
    v1::{AgentSessionOpenReply, AgentSessionOpenRequest, Command, Session, SessionRunIn, SessionRunStart},
};
use tokio::sync::{mpsc, oneshot};
use tonic::Streaming;

use super::{
    Names, SessionStream,
    actor::{Actor, Entry, Order},
    script::Left,
    shell::Shell,
    sink::Late,
    stream::EVENTS,
    table::Place,
    tree::Tree,
};
use crate::{
    refusal::Refusal,
    run::{ExecCtx, Runner},
};

/// Ended after so long without a command, when nothing else is asked for.
const IDLE_SECS: u32 = 1800;
/// Longest name of a session.
const NAME: usize = 64;

/// A place that goes back unless a session came of it.
struct Reserved<'a> {
    names: &'a Names,
    name: &'a str,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.names.with(|core| core.release(self.name));
    }
}

fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(Reason::FieldInvalid, message)
}

fn check(request: &AgentSessionOpenRequest) -> Result<(), Refusal> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if request.session.len() > NAME || !request.session.bytes().all(plain) {
        return Err(invalid(format!(
            "session: expected at most {NAME} letters, digits, `.`, `_` and `-`"
        )));
    }
    let key = &request.request_key;
    if key.len() > REQUEST_KEY || !key.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Err(invalid(format!(
            "request_key: expected at most {REQUEST_KEY} printable characters of ASCII"
        )));
    }
    Ok(())
}

/// Ends a shell that nobody will know of.
struct Abandon<'a>(Option<&'a Entry>);

impl Abandon<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.0 {
            entry.job.abandon();
        }
    }
}

impl Runner {
    /// Opens a session, or finds the one that the same request has opened. Cancel safe.
    ///
    /// # Errors
    /// `SESSION_EXISTS`, `SESSION_LIMIT`; `PROGRAM_NOT_FOUND` without a bash; the reasons of every start.
    pub async fn session_open(
        &self,
        ctx: ExecCtx,
        mut request: AgentSessionOpenRequest,
    ) -> Result<AgentSessionOpenReply, Refusal> {
        check(&request)?;
        let (names, actors) = (&self.shared.sessions().names, &self.shared.sessions().actors);
        let reply = |name: String, entry: &Entry| AgentSessionOpenReply {
            session: name,
            process: entry.job.id(),
            pid: entry.job.pid_u32(),
        };
        let (name, _others_wait) = loop {
            let place = names.with(|core| core.reserve(&request.session, &request.request_key))?;
            match place {
                Place::Ours(name, sender) => break (name, sender),
                Place::Same(name, entry) => return Ok(reply(name, &entry)),
                // Only ever dropped, when the first one is open or given up.
                Place::Wait(mut over) => drop(over.changed().await),
            }
        };
        let reserved = Reserved { names, name: &name };
        let command = Command {
            cwd: std::mem::take(&mut request.cwd),
            env: std::mem::take(&mut request.env),
            clear_env: request.clear_env,
            user: std::mem::take(&mut request.user),
            ..Command::default()
        };
        let shell = Box::pin(Shell::start(&self.shared, &ctx, command)).await?;
        let job = shell.child.job().clone();
        let (entry, orders) = Entry::new(name.clone(), job, request.idle_secs.unwrap_or(IDLE_SECS));
        let actor = Actor {
            shell,
            entry: entry.clone(),
            orders,
            names: names.clone(),
            late: Late::default(),
            left: Left::default(),
            cwd: Vec::new(),
        };
        let (works, opened) = oneshot::channel();
        // From here on the task has the shell; it ends with it if nobody waits for the opening any more.
        let abandoned = Abandon(Some(&entry));
        actors.spawn(actor.run(works));
        let stopping = |_dropped| Refusal::new(Reason::NotReady, "silkd is stopping");
        opened.await.map_err(stopping)??;
        abandoned.keep();
        names.with(|core| core.open(&name, entry.clone()));
        drop(reserved);
        // Its end may have been news before its beginning.
        entry.look(names);
        Ok(reply(name.clone(), &entry))
    }

    /// Gives a session a command. `input` is what the client sends after its start.
    ///
    /// # Errors
    /// `INVALID_COMMAND`, `SESSION_NOT_FOUND`, `SESSION_ENDED`, `SESSION_BUSY`.
    pub fn session_run(
        &self,
        ctx: ExecCtx,
        start: SessionRunStart,
        input: Streaming<SessionRunIn>,
    ) -> Result<SessionStream, Refusal> {
        let refuse = |message: String| Refusal::new(Reason::InvalidCommand, message);
        let text: Bytes = start.command;
        if text.len() > SESSION_COMMAND {
            return Err(refuse(format!(
                "a command of {} bytes: {SESSION_COMMAND} are allowed",
                text.len()
            )));
        }
        if text.contains(&0) {
            return Err(refuse("the command holds NUL, which no shell takes".to_owned()));
        }
        let entry = self
            .shared
            .sessions()
            .names
            .with(|core| core.find(&start.session))?;
        let (events, read) = mpsc::channel(EVENTS);
        let mut tree = None;
        entry.order(|| Order {
            text,
            timeout: (start.timeout_ms > 0).then(|| Duration::from_millis(start.timeout_ms.into())),
            tree: tree.insert(Arc::new(Tree::begin(&entry.job))).clone(),
            events,
        })?;
        let tree = tree.ok_or_else(|| Refusal::new(Reason::AgentBug, "a command without a tree"))?;
        Ok(SessionStream::new(read, tree, input, ctx.gate))
    }

    /// Those that are open, by name.
    #[must_use]
    pub fn session_list(&self) -> Vec<Session> {
        self.shared
            .sessions()
            .names
            .with(|core| core.entries().map(|(_, entry)| entry.row()).collect())
    }

    /// Ends a session and all that runs in it; resolves when nothing is left. Cancel safe: it ends all the same.
    ///
    /// # Errors
    /// `SESSION_NOT_FOUND`, `SESSION_ENDED`.
    pub async fn session_close(&self, name: &str) -> Result<(), Refusal> {
        let entry = self.shared.sessions().names.with(|core| {
            let entry = core.find(name)?;
            core.remove(name, &entry);
            Ok::<_, Refusal>(entry)
        })?;
        entry.job.abandon();
        entry.job.exit().await;
        Ok(())
    }

    /// How many sessions there are.
    #[must_use]
    pub fn sessions(&self) -> u32 {
        u32::try_from(self.shared.sessions().count()).unwrap_or(u32::MAX)
    }
}
