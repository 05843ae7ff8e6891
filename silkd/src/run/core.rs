//! A started program as its caller sees it: output, then the exit, lossless and without a timer.
//!
//! The reaper ends what the leader left behind (unless that is kept). Once nothing is left that could still write for
//! it, exactly what is in the pipes is read, then the exit is told. No end of file is waited for: whoever else in the
//! guest holds the pipe cannot hold up the news.

use std::{
    ffi::c_int,
    os::fd::OwnedFd,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use rustix::{io::Errno, pipe::PipeFlags};
use sandbox_protocol::reason::Reason;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::oneshot,
};

use super::{
    Shared,
    command::Plan,
    entry::Record,
    job::Job,
    log::Side,
    output::Output,
    pty::{Pty, Screen},
    shared::lost,
    spawn::Order,
};
use crate::{
    refusal::Refusal,
    sys::{self, Wire},
};

/// What a program's standard descriptors are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    /// False: `/dev/null`.
    pub(super) stdin: bool,
    /// One pipe for both outputs.
    pub(super) merge: bool,
    /// A terminal for all of them instead; what is typed reaches it whatever `stdin` says.
    pub(super) tty: Option<Screen>,
}

/// A program and our ends of its outputs. Dropped before the exit was told, it ends the whole tree.
#[derive(Debug)]
pub(super) struct Core {
    job: Arc<Job>,
    outputs: Vec<Output>,
    /// The output that is asked first, so that a chatty one does not hide the other.
    turn: usize,
    /// Reads of outputs that are gone.
    reads: u64,
    /// Only what it says aside is read here.
    aside: bool,
    /// What each output has to come to for all that the leader said, once it has left others behind.
    owed: Option<[u64; 2]>,
    told: bool,
}

/// What happens to a program.
#[derive(Debug)]
pub(super) enum Event {
    /// Of one output or the other.
    Said(Side, Bytes),
    /// The last.
    Exit(Record),
}

pub(super) fn no_descriptor(what: &str, errno: Errno) -> Refusal {
    let (reason, message) = match errno {
        Errno::NOMEM => (Reason::MemoryExhausted, format!("no memory for {what}")),
        _ => (Reason::FdLimit, format!("no descriptor for {what} is left")),
    };
    Refusal::new(reason, message).with_errno(errno.raw_os_error())
}

/// Has the program of an entry started, with these descriptors, and resolves once it has begun. Cancel safe only for
/// whoever ends the entry when it is dropped.
///
/// # Errors
/// The reason of the failed start; nothing is left of it then.
pub(super) async fn begin(
    shared: &Shared,
    plan: Plan,
    wires: Vec<Wire>,
    job: &Arc<Job>,
) -> Result<(), Refusal> {
    let (reply, started) = oneshot::channel();
    let order = Order {
        plan,
        wires,
        job: job.clone(),
        reply,
    };
    shared.order(order).inspect_err(|_refusal| job.unborn())?;
    match started.await {
        Ok(started) => started,
        Err(_dropped) => {
            // Dropped with the queue: the thread never came to it. Else the reaper has it.
            if job.pid_u32() == 0 {
                job.unborn();
            }
            Err(lost())
        }
    }
}

/// A pipe: our end, which does not block, and the program's, which does. `ours` is the reading end if `read`.
pub(super) fn pipe(read: bool) -> Result<(AsyncFd<OwnedFd>, OwnedFd), Refusal> {
    let (reader, writer) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|errno| no_descriptor("a pipe", errno))?;
    let (ours, theirs, interest) = match read {
        true => (reader, writer, Interest::READABLE),
        false => (writer, reader, Interest::WRITABLE),
    };
    rustix::io::ioctl_fionbio(&ours, true).map_err(|errno| no_descriptor("a pipe", errno))?;
    let ours = sys::watch(ours, interest)
        .map_err(|error| Refusal::new(Reason::FdLimit, format!("a pipe cannot be watched: {error}")))?;
    Ok((ours, theirs))
}

impl Core {
    /// Starts a program. Gives our end of its standard input too. Cancel safe: what was ordered and not awaited is
    /// not started, or ended at once.
    ///
    /// # Errors
    /// The reason of the failed start; nothing is left of it then.
    pub(super) async fn start(
        shared: &Arc<Shared>,
        plan: Plan,
        ends: Ends,
        job: Arc<Job>,
    ) -> Result<(Self, Option<AsyncFd<OwnedFd>>), Refusal> {
        // From here on the job ends with this value, whatever happens.
        let mut core = Self::of(job.clone());
        let (wires, stdin) = core.wire(shared, ends).inspect_err(|_refusal| job.unborn())?;
        // Boxed: what a start holds would make every future around it large.
        Box::pin(begin(shared, plan, wires, &job)).await?;
        Ok((core, stdin))
    }

    fn of(job: Arc<Job>) -> Self {
        Self {
            job,
            outputs: Vec::with_capacity(2),
            turn: 0,
            reads: 0,
            aside: false,
            owed: None,
            told: false,
        }
    }

    /// Of a program that another room runs: only what it says aside is read here, from this pipe.
    pub(super) fn aside(job: Arc<Job>, stderr: AsyncFd<OwnedFd>) -> Self {
        let mut core = Self::of(job);
        core.aside = true;
        core.outputs.push(Output::new(stderr));
        core
    }

    fn wire(
        &mut self,
        shared: &Shared,
        ends: Ends,
    ) -> Result<(Vec<Wire>, Option<AsyncFd<OwnedFd>>), Refusal> {
        let copy = |fd: &OwnedFd| {
            rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|errno| no_descriptor("a pipe", errno))
        };
        let numbered = |fds: [OwnedFd; 3]| {
            let wires = fds.into_iter().zip(0 as c_int..);
            wires.map(|(from, at)| Wire { from, at }).collect()
        };
        if let Some(screen) = ends.tty {
            let pty = Pty::open(shared.ttys(), screen)?;
            let wires = numbered([copy(&pty.terminal)?, copy(&pty.terminal)?, pty.terminal]);
            self.job.has_terminal();
            self.outputs.push(Output::of_tty(pty.output, pty.seat));
            return Ok((wires, Some(pty.input)));
        }
        let (stdin, read_by_it) = match ends.stdin {
            true => pipe(false).map(|(ours, theirs)| (Some(ours), theirs))?,
            false => (None, copy(shared.null())?),
        };
        let (stdout, written_by_it) = pipe(true)?;
        self.outputs.push(Output::new(stdout));
        let errors = match ends.merge {
            true => copy(&written_by_it)?,
            false => {
                let (stderr, theirs) = pipe(true)?;
                self.outputs.push(Output::new(stderr));
                theirs
            }
        };
        Ok((numbered([read_by_it, written_by_it, errors]), stdin))
    }

    /// The program's entry.
    pub(super) const fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Reads made so far.
    pub(super) fn reads(&self) -> u64 {
        self.reads + self.outputs.iter().map(Output::reads).sum::<u64>()
    }

    /// Bytes read so far, of stdout and of stderr.
    pub(super) fn said(&self) -> [u64; 2] {
        self.each(Output::total)
    }

    /// A number of each output, of stdout and of stderr.
    fn each(&self, number: impl Fn(&Output) -> u64) -> [u64; 2] {
        let of = |place: usize| self.outputs.get(place).map_or(0, &number);
        if self.aside { [0, of(0)] } else { [of(0), of(1)] }
    }

    /// The next event; nothing comes after [`Event::Exit`].
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        let ended = self.job.look(cx.waker());
        let settled = ended.is_some_and(|ended| ended.settled);
        if settled {
            self.outputs.iter_mut().for_each(Output::only_what_is_there);
        } else if ended.is_some() {
            self.tell_of_leader();
        }
        let count = self.outputs.len();
        for place in (self.turn..count).chain(0..self.turn) {
            let Some(output) = self.outputs.get_mut(place) else {
                continue;
            };
            if let Poll::Ready(Some(bytes)) = output.poll(cx) {
                self.turn = (place + 1) % count;
                let first = place == 0 && !self.aside;
                let side = if first { Side::Stdout } else { Side::Stderr };
                return Poll::Ready(Event::Said(side, bytes));
            }
        }
        if !settled && ended.is_some() {
            // A terminal may have been found empty just now.
            self.tell_of_leader();
        }
        if !settled || !self.outputs.iter().all(Output::is_over) {
            return Poll::Pending;
        }
        match self.job.publish(self.said()) {
            Some(record) => {
                self.told = true;
                self.leave();
                Poll::Ready(Event::Exit(record))
            }
            None => Poll::Pending,
        }
    }

    /// The leader has ended, what it left behind goes on: its end is told once all that it said was read.
    fn tell_of_leader(&mut self) {
        let [out, err] = self.said();
        if self.owed.is_none() {
            let [more_out, more_err] = self.each(Output::pending);
            self.owed = Some([out + more_out, err + more_err]);
            self.outputs.iter_mut().for_each(Output::probe);
        }
        let owed = self.owed.unwrap_or([out, err]);
        let over = self.outputs.iter().all(Output::is_over);
        let read = out >= owed[0] && err >= owed[1] && !self.outputs.iter().any(Output::probes);
        if (read || over) && self.job.record().is_none() {
            self.job.publish([out, err]);
        }
    }

    /// What is kept goes on writing to somebody.
    fn leave(&mut self) {
        self.reads = self.reads();
        let outputs = std::mem::take(&mut self.outputs);
        if self.job.keeps() && !self.job.is_kept() {
            let chores = outputs.into_iter().filter_map(Output::into_chore);
            chores.for_each(|chore| self.job.shared().chores().add(chore));
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if !self.told {
            self.job.forsake();
        }
    }
}
