//! All servers of a guest: started, found, ended.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::Stream;
use sandbox_protocol::{
    limits::LSP_SERVERS,
    reason::Reason,
    v1::{Command, Exit, LspIn, LspStart, lsp_start::Which},
};
use tokio::sync::{Semaphore, mpsc};
use tonic::Status;

use super::{
    input, invalid, language,
    server::{self, Pipes, Server},
    stream::LspStream,
};
use crate::{
    refusal::Refusal,
    run::{ChildEnds, ExecCtx, Kind, Runner},
    tasks::{self, Group},
};

/// How long a server stays without a client, when nothing is asked for, and the most.
const LINGER: u32 = 300;
const LINGER_MAX: u32 = 3600;

/// All servers of a guest; a handle. Dropping the last one ends them.
#[derive(Debug, Clone)]
pub struct Lsp(Arc<Servers>);

#[derive(Debug)]
struct Servers {
    /// What there is of languages.
    dir: PathBuf,
    table: Mutex<BTreeMap<u64, Arc<Server>>>,
    /// One permit for each that runs.
    seats: Arc<Semaphore>,
    /// See [`input::BUDGET`].
    budget: Arc<Semaphore>,
    tasks: Group,
}

impl Lsp {
    /// Servers of the languages that have a file in this folder.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self(Arc::new(Servers {
            dir,
            table: Mutex::default(),
            seats: Arc::new(Semaphore::new(LSP_SERVERS)),
            budget: Arc::new(Semaphore::new(input::BUDGET)),
            tasks: Group::new(),
        }))
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Server>>> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a server, or comes back to one. `input` is what the client sends after `start`. Cancel safe: a server that
    /// was started and not told ends.
    ///
    /// # Errors
    /// `LSP_UNKNOWN`, `LSP_BUSY`, `FIELD_INVALID`, `STREAM_LIMIT`, and those of a start.
    pub async fn open<S>(
        &self,
        runner: &Runner,
        ctx: ExecCtx,
        start: LspStart,
        input: S,
    ) -> Result<LspStream, Refusal>
    where
        S: Stream<Item = Result<LspIn, Status>> + Send + Unpin + 'static,
    {
        let seat = ctx.gate.input()?;
        let server = match &start.which {
            Some(Which::Language(language)) => self.start(runner, &ctx, language, &start).await?,
            Some(Which::Server(id)) => {
                let of_a_start = !start.root.is_empty()
                    || !start.user.is_empty()
                    || !start.env.is_empty()
                    || start.linger_secs.is_some();
                if of_a_start {
                    let message =
                        "root, user, env and linger_secs are those that the server was started with";
                    return Err(invalid(message));
                }
                self.find(*id)?
            }
            None => {
                return Err(invalid(
                    "say which: a language to start, or a server to come back to",
                ));
            }
        };
        LspStream::attach(server, input, &self.0.budget, (ctx.gate, seat))
    }

    /// Ends a server: TERM, 2 s, KILL. Cancel safe: it ends all the same.
    ///
    /// # Errors
    /// `LSP_UNKNOWN`.
    pub async fn stop(&self, id: u64) -> Result<Exit, Refusal> {
        let server = self.find(id)?;
        server.ask_to_end();
        Ok(server.exit().await)
    }

    fn find(&self, id: u64) -> Result<Arc<Server>, Refusal> {
        let found = self.table().get(&id).cloned();
        found.ok_or_else(|| Refusal::new(Reason::LspUnknown, format!("no language server {id}")))
    }

    async fn start(
        &self,
        runner: &Runner,
        ctx: &ExecCtx,
        language: &str,
        start: &LspStart,
    ) -> Result<Arc<Server>, Refusal> {
        let linger = start.linger_secs.unwrap_or(LINGER);
        if linger > LINGER_MAX {
            return Err(invalid(&format!("linger_secs is at most {LINGER_MAX}")));
        }
        let seat = Arc::clone(&self.0.seats).try_acquire_owned().map_err(|_full| {
            Refusal::new(
                Reason::ProcessLimit,
                format!("{LSP_SERVERS} language servers run"),
            )
        })?;
        let (dir, name) = (self.0.dir.clone(), language.to_owned());
        let argv = tasks::blocking(move || language::argv(&dir, &name)).await;
        let argv = argv.map_err(|panic| Refusal::new(Reason::AgentBug, panic.to_string()))??;
        let command = Command {
            argv,
            cwd: start.root.clone(),
            env: start.env.clone(),
            user: start.user.clone(),
            ..Command::default()
        };
        let ends = ChildEnds {
            stdin: true,
            // What it says aside can be read by Logs and Attach.
            log: true,
            ..ChildEnds::default()
        };
        let mut child = runner.child(ctx, &command, Kind::Lsp, ends).await?;
        let pipes = Pipes::of(&mut child);
        // One message waits while the one before is written.
        let (input, messages) = mpsc::channel(1);
        let server = Arc::new(Server::new(child, input, Duration::from_secs(linger.into())));
        self.table().insert(server.id(), server.clone());
        let (table, running) = (Arc::downgrade(&self.0), server.clone());
        self.0.tasks.spawn(async move {
            let id = running.id();
            server::run(running, pipes, messages).await;
            drop(seat);
            if let Some(servers) = table.upgrade() {
                Self(servers).table().remove(&id);
            }
        });
        Ok(server)
    }
}
