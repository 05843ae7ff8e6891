//! Programs that nobody has to wait for: started, found again, waited for, signalled, forgotten.

use std::{sync::Arc, time::Duration};

use sandbox_protocol::{
    limits::{LOG_DEFAULT, LOG_MAX, REQUEST_KEY},
    reason::Reason,
    v1::{
        AgentForgetRequest, AgentKillReply, AgentKillRequest, AgentSpawnReply, AgentSpawnRequest,
        AgentWaitReply, AgentWaitRequest, Descendants, Process, ProcessRef, process_ref::Which,
    },
};

use super::{
    ExecCtx, Job, Kind, Runner, Scope, Shared,
    chores::Chore,
    command::{self, Timeout},
    core::{Core, Ends},
    entry::Record,
    input,
    job::Birth,
    log::Side,
    pty,
    pump::Pump,
    seat::Seat,
    shared::Refused,
    table::{Found, Name, Wanted},
    time::Time,
};
use crate::refusal::{Escaped, Refusal};

/// Seconds that an exited program is kept when nothing is asked for, and the most.
pub(super) const RETAIN: u32 = 600;
const RETAIN_MOST: u32 = 86_400;
/// Longest name.
const NAME: usize = 64;
/// Longest wait.
const WAIT_MOST_MS: u32 = 300_000;
const KILL: i32 = 9;

fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(Reason::FieldInvalid, message)
}

/// What a program that is kept is known by, and how much of it is kept for how long.
#[derive(Debug, Clone)]
pub(super) struct Naming {
    name: Name,
    key: Name,
    log_bytes: u64,
    retain: u32,
}

impl Default for Naming {
    /// No name, and what is taken where nothing is asked for.
    fn default() -> Self {
        Self {
            name: None,
            key: None,
            log_bytes: LOG_DEFAULT,
            retain: RETAIN,
        }
    }
}

impl Naming {
    /// Checks what a client wants; zeros and nothings are the defaults.
    ///
    /// # Errors
    /// `FIELD_INVALID`, naming the field.
    pub(super) fn of(name: &[u8], key: &str, log_bytes: u64, retain: u32) -> Result<Self, Refusal> {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        let digits = name.iter().all(u8::is_ascii_digit);
        if !name.is_empty() && (name.len() > NAME || digits || !name.iter().all(plain)) {
            let message = format!("name: expected 1 to {NAME} of A-Z a-z 0-9 . _ -, not digits alone");
            return Err(invalid(message));
        }
        let printable = key.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if key.len() > REQUEST_KEY || !printable {
            let message = format!("request_key: expected at most {REQUEST_KEY} printable ASCII characters");
            return Err(invalid(message));
        }
        if log_bytes > LOG_MAX {
            return Err(invalid(format!("log_bytes: at most {LOG_MAX}")));
        }
        if retain > RETAIN_MOST {
            return Err(invalid(format!("retain_secs: at most {RETAIN_MOST}")));
        }
        let some = |text: &[u8]| (!text.is_empty()).then(|| Box::from(text));
        Ok(Self {
            name: some(name),
            key: some(key.as_bytes()),
            log_bytes: if log_bytes == 0 { LOG_DEFAULT } else { log_bytes },
            retain: if retain == 0 { RETAIN } else { retain },
        })
    }
}

/// The entry of a program that is to be kept. Dropped before its log is, it leaves nothing.
#[derive(Debug)]
pub(super) struct Owned(Option<Arc<Job>>);

impl Owned {
    /// The program has begun: its output goes into its log from now on, and its time runs.
    pub(super) fn log(mut self, core: Core, time: Time) {
        self.0 = None;
        let shared = core.job().shared().clone();
        shared.chores().add(Chore::Log(Box::new(Pump::new(core, time))));
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(job) = &self.0 {
            job.shared().disown(job);
        }
    }
}

fn reserve(shared: &Arc<Shared>, birth: &Birth, naming: &Naming) -> Result<(Arc<Job>, Owned), Refused> {
    let birth = Birth {
        retain: Some(naming.retain),
        ..birth.clone()
    };
    let job = shared.admit_as(birth, naming.name.clone(), naming.key.clone())?;
    shared.logs.open(job.id(), 0, naming.log_bytes);
    let owned = Owned(Some(job.clone()));
    Ok((job, owned))
}

/// Makes the entry of a program that is about to be started, and its log. Without a key.
///
/// # Errors
/// `NOT_READY`, `PROCESS_LIMIT`, `NAME_TAKEN`.
pub(super) fn admit(
    shared: &Arc<Shared>,
    birth: &Birth,
    naming: &Naming,
) -> Result<(Arc<Job>, Owned), Refusal> {
    reserve(shared, birth, naming).map_err(|refused| match refused {
        Refused::Known(id) => Refusal::new(Reason::AgentBug, format!("process {id} has no key")),
        Refused::Because(refusal) => refusal,
    })
}

/// Leaves the program of a call that ends before it: it goes on with a log, which begins with what of its output the
/// call had read, but not passed on.
pub(super) fn detach(core: Core, timeout: Option<Timeout>, said: Vec<(Side, Vec<u8>)>) {
    let job = core.job().clone();
    let shared = job.shared().clone();
    let held: usize = said.iter().map(|(_, data)| data.len()).sum();
    let read: u64 = core.said().iter().sum();
    let from = read.saturating_sub(u64::try_from(held).unwrap_or(u64::MAX));
    shared.logs.open(job.id(), from, LOG_DEFAULT);
    for (side, data) in said {
        shared.logs.append(job.id(), side, &data);
    }
    job.detach(RETAIN);
    shared.put_back(&job);
    let ran = job.age();
    let left = timeout.map(|timeout| Timeout {
        after: timeout.after.saturating_sub(ran),
        ..timeout
    });
    let pump = Pump::new(core, Time::new(left));
    shared.chores().add(Chore::Log(Box::new(pump)));
}

/// A program that somebody asked for.
#[derive(Debug)]
pub(super) enum Target {
    Living(Arc<Job>),
    Exited {
        id: u64,
        pid: u32,
        record: Record,
        tty: bool,
    },
}

impl Target {
    /// Its number.
    pub(super) fn id(&self) -> u64 {
        match self {
            Self::Living(job) => job.id(),
            Self::Exited { id, .. } => *id,
        }
    }

    /// The end, if it has come and all output was read.
    pub(super) fn record(&self) -> Option<Record> {
        match self {
            Self::Living(job) => job.record(),
            Self::Exited { record, .. } => Some(*record),
        }
    }
}

/// Finds one.
///
/// # Errors
/// `PROCESS_NOT_FOUND`; `FIELD_INVALID` where none is named.
pub(super) fn find(shared: &Shared, wanted: Option<&ProcessRef>) -> Result<Target, Refusal> {
    let which = wanted.and_then(|wanted| wanted.which.as_ref());
    let which = which.ok_or_else(|| invalid("process: expected an id or a name"))?;
    let (wanted, called) = match which {
        Which::Id(id) => (Wanted::Id(*id), id.to_string()),
        Which::Name(name) => (Wanted::Name(name), Escaped(name, NAME).to_string()),
    };
    let jobs = shared.jobs();
    match jobs.table.find(wanted) {
        Some((_, Found::Living(job))) => Ok(Target::Living(job.clone())),
        Some((id, Found::Exited(exited))) => Ok(Target::Exited {
            id,
            pid: exited.pid,
            record: exited.record,
            tty: exited.tty,
        }),
        None => Err(Refusal::new(
            Reason::ProcessNotFound,
            format!("there is no process {called}"),
        )),
    }
}

impl Runner {
    /// Starts a program that nobody has to wait for; resolves once it has begun. The same request key, as long as the
    /// program is kept, gives the same program. Cancel safe: what was not answered does not run, or not for long.
    ///
    /// # Errors
    /// Why it did not start; `NAME_TAKEN`; `FIELD_INVALID`.
    pub async fn spawn(
        &self,
        ctx: ExecCtx,
        mut request: AgentSpawnRequest,
    ) -> Result<AgentSpawnReply, Refusal> {
        let shared = &self.shared;
        let mut command = command::taken(&mut request.command)?;
        if command.descendants == i32::from(Descendants::Unspecified) {
            command.descendants = Descendants::Keep.into();
        }
        let naming = Naming::of(
            &request.name,
            &request.request_key,
            request.log_bytes,
            request.retain_secs,
        )?;
        let user = shared.users().resolve(command::user_of(&command, &ctx.claim))?;
        let wanted = command::plan(&command, &ctx.base_env, &ctx.claim, user)?;
        let birth = Birth::new(Kind::Detached, wanted.argv, wanted.uid, wanted.keep);
        let (job, owned) = loop {
            match reserve(shared, &birth, &naming) {
                Ok(reserved) => break reserved,
                Err(Refused::Because(refusal)) => return Err(refusal),
                Err(Refused::Known(id)) => {
                    if let Some(reply) = self.known(id).await {
                        return Ok(reply);
                    }
                }
            }
        };
        let ends = Ends {
            stdin: request.keep_stdin,
            merge: wanted.merge,
            tty: wanted.tty,
        };
        let (core, stdin) = Core::start(shared, wanted.plan, ends, job.clone()).await?;
        if let Some(master) = stdin.as_ref().filter(|_| ends.tty.is_some() && !ends.stdin) {
            pty::nobody_types(master);
        }
        // Free at once, with the program's input in it.
        drop(Seat::first(&job, stdin));
        owned.log(core, Time::new(wanted.timeout));
        Ok(AgentSpawnReply {
            id: job.id(),
            pid: job.pid_u32(),
        })
    }

    /// The program of an earlier request, once that has begun; `None` if it failed to.
    async fn known(&self, id: u64) -> Option<AgentSpawnReply> {
        let which = Some(ProcessRef {
            which: Some(Which::Id(id)),
        });
        match find(&self.shared, which.as_ref()).ok()? {
            Target::Living(job) => job.has_begun().await.then(|| AgentSpawnReply {
                id,
                pid: job.pid_u32(),
            }),
            Target::Exited { id, pid, .. } => Some(AgentSpawnReply { id, pid }),
        }
    }

    /// Rows of the programs that silkd started and still knows of, in order of their ids: the first `most` of those
    /// above `after`. `running`: only those that run.
    #[must_use]
    pub fn list(&self, running: bool, after: u64, most: usize) -> Vec<Process> {
        let now = self.shared.now_ms();
        let jobs = self.shared.jobs();
        let extent = |id| self.shared.logs.extent(id).unwrap_or_default();
        let living = jobs.table.living(after).filter(|(_, job)| !running || job.runs());
        let living = living.map(|(id, job)| job.row(jobs.table.name(id), extent(id)));
        let exited = jobs.table.exited(after).filter(|_| !running);
        let exited = exited.map(|(id, exited)| exited.row(id, now, extent(id)));
        let mut rows: Vec<Process> = living.take(most).chain(exited.take(most)).collect();
        rows.sort_unstable_by_key(|row| row.id);
        rows.truncate(most);
        rows
    }

    /// Waits for the end of a program, and until all that it said itself is in its log. Cancel safe.
    ///
    /// # Errors
    /// `PROCESS_NOT_FOUND`, `STILL_RUNNING`, `FIELD_INVALID`.
    pub async fn wait(&self, request: AgentWaitRequest) -> Result<AgentWaitReply, Refusal> {
        if request.timeout_ms > WAIT_MOST_MS {
            return Err(invalid(format!("timeout_ms: at most {WAIT_MOST_MS}")));
        }
        let job = match find(&self.shared, request.process.as_ref())? {
            Target::Living(job) => job,
            Target::Exited { record, .. } => return Ok(ended(record)),
        };
        let time = Duration::from_millis(request.timeout_ms.into());
        match tokio::time::timeout(time, job.exit()).await {
            Ok(record) => Ok(ended(record)),
            Err(_elapsed) => {
                let message = format!("process {} has not ended", job.id());
                Err(Refusal::new(Reason::StillRunning, message))
            }
        }
    }

    /// Sends a signal to a program, its group or all that it started, also when it is gone itself. Twice is fine.
    ///
    /// # Errors
    /// `PROCESS_NOT_FOUND`, `INVALID_SIGNAL`, `FIELD_INVALID`.
    pub fn kill(&self, request: &AgentKillRequest) -> Result<AgentKillReply, Refusal> {
        let number = if request.signal == 0 { KILL } else { request.signal };
        let signal = input::number_of(number)?;
        let scope = input::scope_of(request.scope, Scope::Tree)?;
        Ok(match find(&self.shared, request.process.as_ref())? {
            Target::Living(job) => {
                let sent = job.signal(signal, scope);
                AgentKillReply {
                    already_exited: sent.already_exited,
                    signalled: sent.signalled,
                }
            }
            Target::Exited { .. } => AgentKillReply {
                already_exited: true,
                signalled: false,
            },
        })
    }

    /// Drops what is kept of a program that has exited.
    ///
    /// # Errors
    /// `PROCESS_NOT_FOUND`, `STILL_RUNNING`, `FIELD_INVALID`.
    pub fn forget(&self, request: &AgentForgetRequest) -> Result<(), Refusal> {
        match find(&self.shared, request.process.as_ref())? {
            Target::Living(job) => {
                let message = format!("process {} has not ended, or not all of it", job.id());
                Err(Refusal::new(Reason::StillRunning, message))
            }
            Target::Exited { id, .. } => {
                self.shared.jobs().table.forget(id);
                self.shared.logs.remove(id);
                Ok(())
            }
        }
    }
}

fn ended(record: Record) -> AgentWaitReply {
    AgentWaitReply {
        exit: Some(record.on_the_wire()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keys_and_sizes_are_checked() {
        let reason = |name: &[u8], key: &str, log, retain| {
            Naming::of(name, key, log, retain)
                .map(|_| ())
                .map_err(|refusal| refusal.message)
        };
        for good in [&b""[..], b"a", b"web-1.x_Y", b"1a", &[b'n'; 64]] {
            assert_eq!(reason(good, "", 0, 0), Ok(()));
        }
        for bad in [&b"17"[..], b"a b", b"a/b", b"\xff", &[b'n'; 65]] {
            assert!(reason(bad, "", 0, 0).unwrap_err().starts_with("name: "));
        }
        assert!(reason(b"", "\n", 0, 0).unwrap_err().starts_with("request_key: "));
        assert!(reason(b"", &"k".repeat(129), 0, 0).is_err());
        assert!(
            reason(b"", "", LOG_MAX + 1, 0)
                .unwrap_err()
                .starts_with("log_bytes: ")
        );
        assert!(
            reason(b"", "", LOG_MAX, RETAIN_MOST + 1)
                .unwrap_err()
                .starts_with("retain_secs: ")
        );
        let naming = Naming::of(b"", "", 0, 0).unwrap();
        assert_eq!((naming.log_bytes, naming.retain), (LOG_DEFAULT, RETAIN));
    }
}
