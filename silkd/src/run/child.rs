//! Programs that other rooms run: shells of sessions, git, language servers. They get pipes and say themselves what is
//! read from them; here they are started, listed, signalled and ended like any other.

use std::{ffi::c_int, os::fd::OwnedFd, sync::Arc};

use rustix::process::Signal;
use sandbox_protocol::v1::{Command, Exit};
use tokio::io::unix::AsyncFd;

use super::{
    ExecCtx, Kind, Shared, command,
    core::{Core, begin, no_descriptor, pipe},
    detached::{self, Naming},
    job::{Birth, Job, Scope},
    time::Time,
};
use crate::{refusal::Refusal, sys::Wire};

/// What the descriptors of a child are.
#[derive(Debug, Default)]
pub struct ChildEnds {
    /// False: `/dev/null`.
    pub stdin: bool,
    /// One pipe for both outputs.
    pub merge: bool,
    /// What it says aside goes into a log, to be read by Logs and Attach; its entry is kept for a while when it has
    /// exited. Not with `merge`.
    pub log: bool,
    /// Others, by the numbers under which the program gets them: above 2, each once.
    pub extra: Vec<(OwnedFd, i32)>,
}

/// A program of another room, with our ends of its pipes; none of them blocks. Dropped, it ends with all that it
/// started, at once.
#[derive(Debug)]
pub struct Child {
    job: Arc<Job>,
    /// Where it reads from, if it does; to be taken.
    pub stdin: Option<AsyncFd<OwnedFd>>,
    /// What it says; to be taken.
    pub stdout: Option<AsyncFd<OwnedFd>>,
    /// What it says aside, unless merged or logged; to be taken.
    pub stderr: Option<AsyncFd<OwnedFd>>,
}

impl Child {
    /// Starts one. Cancel safe: what was ordered and not awaited is not started, or ended at once.
    pub(super) async fn start(
        shared: &Arc<Shared>,
        ctx: &ExecCtx,
        command: &Command,
        kind: Kind,
        ends: ChildEnds,
    ) -> Result<Self, Refusal> {
        let user = shared.users().resolve(command::user_of(command, &ctx.claim))?;
        let wanted = command::plan(command, &ctx.base_env, &ctx.claim, user)?;
        let birth = Birth::new(kind, wanted.argv, wanted.uid, wanted.keep);
        let (job, owned) = if ends.log {
            let (job, owned) = detached::admit(shared, &birth, &Naming::default())?;
            (job, Some(owned))
        } else {
            (shared.admit(birth)?, None)
        };
        // From here on the job ends with this value, whatever happens.
        let mut child = Self {
            job,
            stdin: None,
            stdout: None,
            stderr: None,
        };
        let wires = child.wire(shared, &ends);
        let wires = wires.inspect_err(|_refusal| child.job.unborn())?;
        let logged = ends.log;
        // The program's copies have to be the only ones, so that an end of file is one.
        drop(ends);
        begin(shared, wanted.plan, wires, &child.job).await?;
        if let (Some(owned), Some(stderr)) = (owned, child.stderr.take_if(|_| logged)) {
            owned.log(Core::aside(child.job.clone(), stderr), Time::new(None));
        }
        Ok(child)
    }

    fn wire(&mut self, shared: &Shared, ends: &ChildEnds) -> Result<Vec<Wire>, Refusal> {
        // Above every number that the program is to find something under, so that no copy takes the place of another's
        // source.
        let above = ends.extra.iter().map(|(_, at)| at.saturating_add(1)).max();
        let above = above.unwrap_or(3).max(3);
        let copy = |fd: &OwnedFd| {
            rustix::io::fcntl_dupfd_cloexec(fd, above).map_err(|errno| no_descriptor("a pipe", errno))
        };
        let mut wires = Vec::with_capacity(3 + ends.extra.len());
        let mut give = |fd: &OwnedFd, at: c_int| -> Result<(), Refusal> {
            let from = copy(fd)?;
            wires.push(Wire { from, at });
            Ok(())
        };
        if ends.stdin {
            let (ours, theirs) = pipe(false)?;
            self.stdin = Some(ours);
            give(&theirs, 0)?;
        } else {
            give(shared.null(), 0)?;
        }
        let (ours, theirs) = pipe(true)?;
        self.stdout = Some(ours);
        give(&theirs, 1)?;
        if ends.merge {
            give(&theirs, 2)?;
        } else {
            let (ours, theirs) = pipe(true)?;
            self.stderr = Some(ours);
            give(&theirs, 2)?;
        }
        for (fd, at) in &ends.extra {
            give(fd, *at)?;
        }
        Ok(wires)
    }

    /// Its entry.
    pub(super) const fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Its number in the table: never reused in the guest's life.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.job.id()
    }

    /// The number of its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.job.pid_u32()
    }

    /// Resolves when it has ended and, unless the command keeps them, nothing is left of what it started; at once if
    /// that was long ago. It does not wait for anybody to read the pipes, and knows nothing of how much was. Cancel
    /// safe; may be awaited any number of times, also after the child was dropped.
    pub fn exit(&self) -> impl Future<Output = Exit> + Send + use<> {
        let job = self.job.clone();
        async move { job.exit().await.on_the_wire() }
    }

    /// Sends a signal; after its end a no-op.
    pub fn signal(&self, signal: Signal, scope: Scope) {
        self.job.signal(signal, scope);
    }

    /// Ends it and all that it started, at once.
    pub fn kill(&self) {
        self.job.abandon();
    }

    /// The processes of its tree, itself among them. Without cgroups, those of its session.
    #[must_use]
    pub fn members(&self) -> Vec<i32> {
        self.job.members()
    }

    /// Sends a signal to those processes of its tree that are not in `spared`, also to such as they start meanwhile.
    pub fn signal_others(&self, signal: Signal, spared: &[i32]) {
        self.job.signal_others(signal, spared);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.job.abandon();
    }
}
