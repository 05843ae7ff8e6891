//! Run: one program, and all that it said in one answer.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex, PoisonError},
};

use sandbox_protocol::{
    limits::{RUN_OUTPUT_ALL, RUN_OUTPUT_DEFAULT, RUN_OUTPUT_MAX},
    reason::Reason,
    v1::{AgentRunReply, AgentRunRequest},
};
use tokio::task::JoinHandle;

use super::{
    ExecCtx, Kind, Runner,
    command::{self, Timeout},
    core::{Core, Ends, Event},
    detached,
    input::{self, Source, Stdin},
    job::Birth,
    log::Side,
    seat::Seat,
    time::Time,
};
use crate::{clock, gate::Permit, refusal::Refusal, tasks};

/// What all Runs hold together.
#[derive(Debug, Default)]
pub(super) struct Buffers(Arc<Mutex<u64>>);

impl Buffers {
    /// # Errors
    /// `RUN_BUFFER_FULL`.
    fn enter(&self) -> Result<Held, Refusal> {
        let held = Held {
            all: self.0.clone(),
            bytes: 0,
        };
        if held.room() == 0 {
            let message = format!("all Runs together hold {RUN_OUTPUT_ALL} bytes");
            return Err(Refusal::new(Reason::RunBufferFull, message));
        }
        Ok(held)
    }
}

#[cfg(test)]
impl Buffers {
    /// Holds all there is.
    pub(super) fn fill(&self) -> Held {
        let mut held = self.enter().unwrap();
        held.set(usize::try_from(held.room()).unwrap());
        held
    }
}

/// What one Run holds; given back when dropped.
#[derive(Debug)]
pub(super) struct Held {
    all: Arc<Mutex<u64>>,
    bytes: u64,
}

impl Held {
    fn room(&self) -> u64 {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        RUN_OUTPUT_ALL.saturating_sub(*all)
    }

    /// It holds so much now.
    fn set(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        *all = all.saturating_sub(self.bytes).saturating_add(bytes);
        self.bytes = bytes;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        *all = all.saturating_sub(self.bytes);
    }
}

/// One output, up to a cap.
#[derive(Debug, Default)]
struct Kept {
    data: Vec<u8>,
    cut: bool,
}

/// A Run under way. Dropped, it ends the program and all that it started; or leaves it, detached, where the sandbox goes
/// to sleep.
#[derive(Debug)]
struct Gathering {
    /// `None` once it has exited.
    core: Option<Box<Core>>,
    timeout: Option<Timeout>,
    stdout: Kept,
    stderr: Kept,
    most: usize,
    held: Held,
    pump: Option<JoinHandle<Result<(), Refusal>>>,
    permit: Permit,
}

impl Gathering {
    fn take(&mut self, side: Side, data: &[u8]) {
        let room = usize::try_from(self.held.room()).unwrap_or(usize::MAX);
        let kept = match side {
            Side::Stdout => &mut self.stdout,
            Side::Stderr => &mut self.stderr,
        };
        let room = room.min(self.most.saturating_sub(kept.data.len()));
        let head = data.get(..room).unwrap_or(data);
        kept.cut |= head.len() < data.len();
        kept.data.extend_from_slice(head);
        self.held
            .set(self.stdout.data.capacity() + self.stderr.data.capacity());
    }

    /// The answer, and how many reads it took.
    async fn finish(mut self) -> Result<(AgentRunReply, u64), Refusal> {
        let gone = || Refusal::new(Reason::AgentBug, "a Run without a program");
        let record = loop {
            let core = self.core.as_mut().ok_or_else(gone)?;
            match poll_fn(|cx| core.poll(cx)).await {
                Event::Said(side, data) => self.take(side, &data),
                Event::Exit(record) => break record,
            }
        };
        let reads = self.core.take().map_or(0, |core| core.reads());
        let (stdout, stderr) = (std::mem::take(&mut self.stdout), std::mem::take(&mut self.stderr));
        let reply = AgentRunReply {
            exit: Some(record.on_the_wire()),
            stdout: stdout.data.into(),
            stderr: stderr.data.into(),
            stdout_truncated: stdout.cut,
            stderr_truncated: stderr.cut,
        };
        Ok((reply, reads))
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        if let Some(pump) = &self.pump {
            // It holds nothing that needs more than being dropped; the runtime joins it.
            pump.abort();
        }
        if let Some(core) = self.core.take().filter(|_| self.permit.is_asleep()) {
            let said = [(Side::Stdout, &mut self.stdout), (Side::Stderr, &mut self.stderr)];
            let said = said.map(|(side, kept)| (side, std::mem::take(&mut kept.data)));
            detached::detach(*core, self.timeout, said.into());
        }
    }
}

impl Runner {
    /// Runs a program to its end and gives all that it said, up to a cap. Cancel safe: dropped, it ends the program.
    ///
    /// # Errors
    /// Why it did not start; `RUN_BUFFER_FULL` (nothing was started); `FIELD_INVALID`.
    pub async fn run(&self, ctx: ExecCtx, mut request: AgentRunRequest) -> Result<AgentRunReply, Refusal> {
        let shared = &self.shared;
        let arrived = clock::since_boot();
        let command = command::taken(&mut request.command)?;
        let most = match request.max_output {
            0 => RUN_OUTPUT_DEFAULT,
            most if most <= RUN_OUTPUT_MAX => most,
            _more => {
                let message = format!("max_output: at most {RUN_OUTPUT_MAX}");
                return Err(Refusal::new(Reason::FieldInvalid, message));
            }
        };
        let held = shared.buffers.enter()?;
        let user = shared.users().resolve(command::user_of(&command, &ctx.claim))?;
        let wanted = command::plan(&command, &ctx.base_env, &ctx.claim, user)?;
        let ends = Ends {
            stdin: !request.stdin.is_empty(),
            merge: wanted.merge,
            tty: wanted.tty,
        };
        let job = shared.admit(Birth::new(Kind::Exec, wanted.argv, wanted.uid, wanted.keep))?;
        let (core, stdin) = Core::start(shared, wanted.plan, ends, job.clone()).await?;
        let time = Time::new(wanted.timeout);
        let stdin = Stdin::new(Seat::first(&job, stdin)).typed(ends.stdin);
        let pump = (ends.stdin || stdin.has_more() || !time.is_over()).then(|| {
            let source = Source::whole(request.stdin);
            tasks::spawn(input::pump(job.clone(), source, stdin, time))
        });
        let trace = request.trace.then_some((arrived, pump.is_some()));
        let gathering = Gathering {
            core: Some(Box::new(core)),
            timeout: wanted.timeout,
            stdout: Kept::default(),
            stderr: Kept::default(),
            most: usize::try_from(most).unwrap_or(usize::MAX),
            held,
            pump,
            permit: ctx.gate,
        };
        let (mut reply, reads) = gathering.finish().await?;
        if let (Some(exit), Some((arrived, pumped))) = (&mut reply.exit, trace) {
            exit.work = Some(job.work(arrived, pumped, reads, exit.wall_us));
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_comes_back_and_a_full_budget_refuses() {
        let buffers = Buffers::default();
        let mut first = buffers.enter().unwrap();
        first.set(usize::try_from(RUN_OUTPUT_ALL).unwrap() - 1);
        let mut second = buffers.enter().unwrap();
        assert_eq!(second.room(), 1);
        second.set(1);
        assert_eq!(buffers.enter().unwrap_err().reason, Reason::RunBufferFull);
        second.set(0);
        assert!(buffers.enter().is_ok());
        drop((first, second));
        assert_eq!(buffers.enter().unwrap().room(), RUN_OUTPUT_ALL);
    }
}
