//! What comes from the client, and the program's time: a task beside the output, so that neither waits for the other.
//! It is made only for a call that may still bring something, or whose time can run out.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use rustix::{io::Errno, process::Signal as Number};
use sandbox_protocol::{
    limits::CHUNK_IN,
    reason::Reason,
    v1::{AttachIn, ExecIn, Signal, Size, attach_in, exec_in, signal},
};
use tonic::{Status, Streaming};

use super::{
    job::{Job, Scope},
    pty,
    seat::Seat,
    time::Time,
};
use crate::{refusal::Refusal, sys};

/// Bytes that wait for the program before no more are taken from the client; at most one chunk ([`CHUNK_IN`]) comes on
/// top. Signals behind so much input still get through; those behind more wait for the program to read.
const QUEUE: usize = 64 * 1024;

/// One message of a client, whatever the call.
#[derive(Debug)]
pub(super) enum Fed {
    Nothing,
    Start,
    /// A chunk.
    Stdin(Bytes),
    /// All there will be.
    Whole(Bytes),
    Close,
    Signal(Signal),
    Resize(Size),
}

impl From<ExecIn> for Fed {
    fn from(message: ExecIn) -> Self {
        match message.m {
            None => Self::Nothing,
            Some(exec_in::M::Start(_)) => Self::Start,
            Some(exec_in::M::Stdin(data)) => Self::Stdin(data),
            Some(exec_in::M::StdinClose(_)) => Self::Close,
            Some(exec_in::M::Signal(signal)) => Self::Signal(signal),
            Some(exec_in::M::Resize(size)) => Self::Resize(size),
        }
    }
}

impl From<AttachIn> for Fed {
    fn from(message: AttachIn) -> Self {
        match message.m {
            None => Self::Nothing,
            Some(attach_in::M::Start(_)) => Self::Start,
            Some(attach_in::M::Stdin(data)) => Self::Stdin(data),
            Some(attach_in::M::StdinClose(_)) => Self::Close,
            Some(attach_in::M::Signal(signal)) => Self::Signal(signal),
            Some(attach_in::M::Resize(size)) => Self::Resize(size),
        }
    }
}

impl From<Bytes> for Fed {
    fn from(whole: Bytes) -> Self {
        Self::Whole(whole)
    }
}

/// The client's half of a call.
#[derive(Debug)]
pub(super) struct Source<M> {
    /// Taken already, to see whether there is anything.
    early: Option<M>,
    /// `None`: it has ended.
    messages: Option<Streaming<M>>,
    /// What the end of it means.
    end: End,
}

/// What the end of a client's half means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// No more input for the program.
    ClosesStdin,
    /// Another client may go on.
    LeavesStdin,
}

impl<M: Into<Fed>> Source<M> {
    /// The client has closed it.
    pub(super) const fn over() -> Self {
        Self {
            early: None,
            messages: None,
            end: End::ClosesStdin,
        }
    }

    /// It is all here.
    pub(super) fn whole(all: M) -> Self {
        Self {
            early: Some(all),
            ..Self::over()
        }
    }

    /// Looks whether the client has closed its half already, as most have when a program has begun: then no task is
    /// needed for it.
    ///
    /// # Errors
    /// What the client sent is no message.
    pub(super) fn look(mut messages: Streaming<M>, end: End) -> Result<Self, Refusal> {
        use futures_util::FutureExt as _;
        let early = match messages.message().now_or_never() {
            Some(Ok(None)) => return Ok(Self { end, ..Self::over() }),
            Some(Ok(Some(early))) => Some(early),
            Some(Err(status)) => return Err(broken(&status)),
            None => None,
        };
        Ok(Self {
            early,
            messages: Some(messages),
            end,
        })
    }

    /// Whether nothing more can come.
    pub(super) const fn is_over(&self) -> bool {
        self.messages.is_none()
    }

    /// Cancel safe.
    async fn next(&mut self) -> Result<Option<Fed>, Status> {
        if let Some(early) = self.early.take() {
            return Ok(Some(early.into()));
        }
        match &mut self.messages {
            Some(messages) => Ok(messages.message().await?.map(Into::into)),
            None => Ok(None),
        }
    }
}

/// What the client sent is no message. Nobody reads this if it is gone.
pub(super) fn broken(status: &Status) -> Refusal {
    refuse(Reason::InvalidCommand, status.message())
}

/// Input on its way to the program: to a pipe, a terminal, or nowhere.
#[derive(Debug)]
pub(super) struct Stdin {
    seat: Seat,
    tty: bool,
    /// No more is to come. A terminal goes on for whoever types the next.
    shut: bool,
    queue: VecDeque<Item>,
    queued: usize,
}

#[derive(Debug)]
enum Item {
    Data(Bytes),
    /// A terminal's own sign of the end. Which one that is depends on when it is typed.
    End,
}

impl Item {
    /// What it counts in the queue.
    fn len(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::End => 1,
        }
    }
}

impl Stdin {
    pub(super) fn new(seat: Seat) -> Self {
        Self {
            tty: seat.job().is_tty(),
            seat,
            shut: false,
            queue: VecDeque::new(),
            queued: 0,
        }
    }

    /// Nobody types at it, if it is a terminal, unless `typed`.
    pub(super) fn typed(mut self, typed: bool) -> Self {
        if self.tty && !typed {
            self.shut();
        }
        self
    }

    /// No more comes, ever; a terminal is told by the [`pump`].
    pub(super) fn nobody_gives(&mut self) {
        self.seat.stdin.take_if(|_| !self.tty);
    }

    /// Whether there is anything to do even if the client brings nothing: a terminal has to be told that.
    pub(super) const fn has_more(&self) -> bool {
        self.tty
    }

    /// Whether there is nothing to do until the client brings something.
    fn is_idle(&self) -> bool {
        self.seat.stdin.is_none() || (self.queue.is_empty() && (self.tty || !self.shut))
    }

    fn push(&mut self, item: Item) {
        self.queued = self.queued.saturating_add(item.len());
        self.queue.push_back(item);
    }

    fn take(&mut self, data: Bytes, job: &Job) {
        if self.seat.stdin.is_none() || self.shut {
            job.discard(data.len());
        } else if !data.is_empty() {
            self.push(Item::Data(data));
        }
    }

    /// No more comes, for now.
    fn end(&mut self) {
        match self.tty {
            false => self.shut = true,
            true if self.shut => {}
            true => self.push(Item::End),
        }
    }

    /// No more comes.
    fn shut(&mut self) {
        self.end();
        self.shut = true;
    }

    /// Writes what it can of the queue. Resolves after progress; never, if there is nothing to write.
    async fn write(&mut self, job: &Job) {
        let (Some(pipe), Some(first)) = (&self.seat.stdin, self.queue.front_mut()) else {
            return std::future::pending().await;
        };
        let Ok(mut ready) = pipe.writable().await else {
            return self.close(job);
        };
        let end;
        let bytes = match first {
            Item::Data(data) => &data[..],
            Item::End => {
                end = pty::end_of_file(pipe);
                end.as_slice()
            }
        };
        job.wrote();
        match rustix::io::write(pipe, bytes) {
            Ok(n) => {
                let whole = n >= bytes.len();
                self.queued = self.queued.saturating_sub(match first {
                    Item::Data(data) => {
                        drop(data.split_to(n));
                        n
                    }
                    Item::End => first.len(),
                });
                if whole {
                    self.queue.pop_front();
                }
            }
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            // The program reads no more, as is its right.
            Err(_closed) => self.close(job),
        }
    }

    fn close(&mut self, job: &Job) {
        // Whoever opens the terminal anew reads what is typed then.
        self.seat.stdin.take_if(|_| !self.tty);
        self.queue.clear();
        job.discard(std::mem::take(&mut self.queued));
    }

    fn resize(&self, size: Size) -> Result<(), Refusal> {
        match &self.seat.stdin {
            Some(master) if self.tty => pty::resize(master, size),
            // Broken: its program is gone.
            None if self.tty => Ok(()),
            Some(_) | None => Err(refuse(Reason::NotATty, "the program has no terminal")),
        }
    }
}

impl Drop for Stdin {
    /// The seat goes back by itself; what was still on its way is lost, and counted.
    fn drop(&mut self) {
        let queued = std::mem::take(&mut self.queued);
        self.seat.job().discard(queued);
    }
}

/// Passes input and signals on and watches the time, until nothing more can come of either. To be dropped when the
/// call ends; what was not written by then is lost.
///
/// # Errors
/// What the client did wrong. The call ends with it; what becomes of the program is the caller's to say.
pub(super) async fn pump<M: Into<Fed>>(
    job: Arc<Job>,
    mut source: Source<M>,
    mut stdin: Stdin,
    mut time: Time,
) -> Result<(), Refusal> {
    let mut open = true;
    loop {
        if stdin.shut && stdin.queue.is_empty() && !stdin.tty {
            stdin.seat.stdin = None;
        }
        if !open && stdin.is_idle() && time.is_over() {
            return Ok(());
        }
        tokio::select! {
            biased;
            signal = time.due() => {
                job.time_out(signal);
                time.sent(signal);
            }
            message = source.next(), if open && stdin.queued < QUEUE => match message {
                Ok(Some(message)) => accept(message, &job, &mut stdin)?,
                Ok(None) => {
                    open = false;
                    match source.end {
                        End::ClosesStdin => stdin.shut(),
                        End::LeavesStdin => {}
                    }
                }
                Err(status) => return Err(broken(&status)),
            },
            () = stdin.write(&job) => {}
        }
    }
}

fn refuse(reason: Reason, message: impl Into<String>) -> Refusal {
    Refusal::new(reason, message)
}

/// Takes one message.
fn accept(message: Fed, job: &Arc<Job>, stdin: &mut Stdin) -> Result<(), Refusal> {
    match message {
        Fed::Nothing => Err(refuse(Reason::InvalidCommand, "a message without content")),
        Fed::Start => Err(refuse(Reason::InvalidCommand, "a second start in one call")),
        Fed::Stdin(data) if data.len() > CHUNK_IN => {
            let message = format!("a chunk of {} bytes: {CHUNK_IN} are allowed", data.len());
            Err(refuse(Reason::InvalidCommand, message))
        }
        Fed::Stdin(data) | Fed::Whole(data) => {
            stdin.take(data, job);
            Ok(())
        }
        Fed::Close => {
            stdin.end();
            Ok(())
        }
        Fed::Signal(signal) => {
            let (signal, scope) = wanted(signal)?;
            job.signal(signal, scope);
            Ok(())
        }
        Fed::Resize(size) => stdin.resize(size),
    }
}

/// A signal and whom it is for.
///
/// # Errors
/// `INVALID_SIGNAL`.
pub(super) fn wanted(wanted: Signal) -> Result<(Number, Scope), Refusal> {
    let number = number_of(wanted.number)?;
    Ok((number, scope_of(wanted.scope, Scope::Group)?))
}

/// The signal of this number.
///
/// # Errors
/// `INVALID_SIGNAL`.
pub(super) fn number_of(number: i32) -> Result<Number, Refusal> {
    let unknown = || refuse(Reason::InvalidSignal, format!("signal {number} is unknown"));
    sys::signal(number).ok_or_else(unknown)
}

/// Whom a signal is for; `otherwise` where nobody is named.
///
/// # Errors
/// `INVALID_SIGNAL`.
pub(super) fn scope_of(scope: i32, otherwise: Scope) -> Result<Scope, Refusal> {
    match signal::Scope::try_from(scope) {
        Ok(signal::Scope::Unspecified) => Ok(otherwise),
        Ok(signal::Scope::Group) => Ok(Scope::Group),
        Ok(signal::Scope::Leader) => Ok(Scope::Leader),
        Ok(signal::Scope::Tree) => Ok(Scope::Tree),
        Err(_unknown) => Err(refuse(Reason::InvalidSignal, format!("scope {scope} is unknown"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_scope_is_the_callers_and_strangers_are_refused() {
        assert_eq!(scope_of(0, Scope::Tree).unwrap(), Scope::Tree);
        assert_eq!(scope_of(2, Scope::Tree).unwrap(), Scope::Leader);
        assert_eq!(
            scope_of(9, Scope::Tree).unwrap_err().reason,
            Reason::InvalidSignal
        );
        assert_eq!(number_of(65).unwrap_err().reason, Reason::InvalidSignal);
    }
}
