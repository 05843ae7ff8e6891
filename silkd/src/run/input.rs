//! What comes from the client, and the program's time: a task beside the output, so that neither waits for the other.
//! It is made only for a call that may still bring something, or whose time can run out.

use std::{collections::VecDeque, os::fd::OwnedFd, pin::Pin, sync::Arc};

use bytes::Bytes;
use rustix::{io::Errno, process::Signal as Number};
use sandbox_protocol::{
    limits::CHUNK_IN,
    reason::Reason,
    v1::{ExecIn, Signal, exec_in::M, signal},
};
use tokio::{io::unix::AsyncFd, time::Sleep};
use tonic::{Status, Streaming};

use super::{
    command::Timeout,
    job::{Job, Scope},
    pty,
};
use crate::{refusal::Refusal, sys};

/// Bytes that wait for the program before no more are taken from the client; at most one chunk ([`CHUNK_IN`]) comes on
/// top. Signals behind so much input still get through; those behind more wait for the program to read.
const QUEUE: usize = 64 * 1024;

/// The client's half of a call.
#[derive(Debug)]
pub(super) struct Source {
    /// Taken already, to see whether there is anything.
    early: Option<ExecIn>,
    /// `None`: it has ended.
    messages: Option<Streaming<ExecIn>>,
}

impl Source {
    /// The client has closed it.
    pub(super) const fn over() -> Self {
        Self {
            early: None,
            messages: None,
        }
    }

    /// More may come, after `early`.
    pub(super) const fn open(early: Option<ExecIn>, messages: Streaming<ExecIn>) -> Self {
        Self {
            early,
            messages: Some(messages),
        }
    }

    /// Whether nothing more can come.
    pub(super) const fn is_over(&self) -> bool {
        self.messages.is_none()
    }

    /// Cancel safe.
    async fn next(&mut self) -> Result<Option<ExecIn>, Status> {
        if let Some(early) = self.early.take() {
            return Ok(Some(early));
        }
        match &mut self.messages {
            Some(messages) => messages.message().await,
            None => Ok(None),
        }
    }
}

/// What the client sent is no message. Nobody reads this if it is gone.
pub(super) fn broken(status: &Status) -> Refusal {
    refuse(Reason::InvalidCommand, status.message())
}

/// The program's time.
struct Time {
    next: Option<(Pin<Box<Sleep>>, Number)>,
    timeout: Option<Timeout>,
}

impl Time {
    fn new(timeout: Option<Timeout>) -> Self {
        let after = |timeout: Timeout| {
            let signal = sys::signal(timeout.signal)?;
            Some((Box::pin(tokio::time::sleep(timeout.after)), signal))
        };
        Self {
            next: timeout.and_then(after),
            timeout,
        }
    }

    /// Resolves with the signal that is due; never, if none is.
    async fn due(&mut self) -> Number {
        match &mut self.next {
            Some((sleep, signal)) => {
                sleep.await;
                *signal
            }
            None => std::future::pending().await,
        }
    }

    /// That signal was sent: KILL comes after the grace, and nothing after KILL.
    fn sent(&mut self, signal: Number) {
        let grace = self.timeout.map(|timeout| timeout.grace);
        self.next = grace
            .filter(|_| signal != Number::KILL)
            .map(|grace| (Box::pin(tokio::time::sleep(grace)), Number::KILL));
    }
}

/// The program's standard input: a pipe, a terminal, or nothing.
#[derive(Debug)]
pub(super) struct Stdin {
    pipe: Option<AsyncFd<OwnedFd>>,
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
    pub(super) const fn pipe(pipe: Option<AsyncFd<OwnedFd>>) -> Self {
        Self {
            pipe,
            tty: false,
            shut: false,
            queue: VecDeque::new(),
            queued: 0,
        }
    }

    /// Nobody types at it unless `typed`.
    pub(super) fn terminal(master: Option<AsyncFd<OwnedFd>>, typed: bool) -> Self {
        let mut stdin = Self {
            tty: true,
            ..Self::pipe(master)
        };
        if !typed {
            stdin.shut();
        }
        stdin
    }

    /// Whether there is anything to do even if the client brings nothing: a terminal has to be told that.
    pub(super) const fn has_more(&self) -> bool {
        self.tty
    }

    fn is_over(&self) -> bool {
        self.pipe.is_none() || (self.tty && self.queue.is_empty())
    }

    fn push(&mut self, item: Item) {
        self.queued = self.queued.saturating_add(item.len());
        self.queue.push_back(item);
    }

    fn take(&mut self, data: Bytes, job: &Job) {
        if self.pipe.is_none() || self.shut {
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
        let (Some(pipe), Some(first)) = (&self.pipe, self.queue.front_mut()) else {
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
        self.pipe.take_if(|_| !self.tty);
        self.queue.clear();
        job.discard(std::mem::take(&mut self.queued));
    }
}

/// Passes input and signals on and watches the time, until nothing more can come of either. To be dropped when the
/// call ends; what was not written by then is lost with the program.
pub(super) async fn pump(job: Arc<Job>, mut source: Source, mut stdin: Stdin, timeout: Option<Timeout>) {
    let mut time = Time::new(timeout);
    let mut open = true;
    loop {
        if stdin.shut && stdin.queue.is_empty() && !stdin.tty {
            stdin.pipe = None;
        }
        if !open && stdin.is_over() && time.next.is_none() {
            return;
        }
        tokio::select! {
            biased;
            signal = time.due() => {
                job.time_out(signal);
                time.sent(signal);
            }
            message = source.next(), if open && stdin.queued < QUEUE => match message {
                Ok(Some(message)) => if let Err(refusal) = accept(message, &job, &mut stdin) {
                    return job.fail(refusal);
                },
                Ok(None) => {
                    open = false;
                    stdin.shut();
                }
                Err(status) => return job.fail(broken(&status)),
            },
            () = stdin.write(&job) => {}
        }
    }
}

fn refuse(reason: Reason, message: impl Into<String>) -> Refusal {
    Refusal::new(reason, message)
}

/// Takes one message.
fn accept(message: ExecIn, job: &Arc<Job>, stdin: &mut Stdin) -> Result<(), Refusal> {
    let empty = || refuse(Reason::InvalidCommand, "a message without content");
    match message.m.ok_or_else(empty)? {
        M::Start(_) => Err(refuse(Reason::InvalidCommand, "a second start in one call")),
        M::Stdin(data) if data.len() > CHUNK_IN => {
            let message = format!("a chunk of {} bytes: {CHUNK_IN} are allowed", data.len());
            Err(refuse(Reason::InvalidCommand, message))
        }
        M::Stdin(data) => {
            stdin.take(data, job);
            Ok(())
        }
        M::StdinClose(_) => {
            stdin.end();
            Ok(())
        }
        M::Signal(signal) => {
            let (signal, scope) = wanted(signal)?;
            job.signal(signal, scope);
            Ok(())
        }
        M::Resize(size) => match &stdin.pipe {
            Some(master) if stdin.tty => pty::resize(master, size),
            // Broken: its program is gone.
            None if stdin.tty => Ok(()),
            Some(_) | None => Err(refuse(Reason::NotATty, "the program has no terminal")),
        },
    }
}

fn wanted(wanted: Signal) -> Result<(Number, Scope), Refusal> {
    let unknown = |what| refuse(Reason::InvalidSignal, format!("{what} is unknown"));
    let number = sys::signal(wanted.number);
    let number = number.ok_or_else(|| unknown(format!("signal {}", wanted.number)))?;
    let scope = match signal::Scope::try_from(wanted.scope) {
        Ok(signal::Scope::Unspecified | signal::Scope::Group) => Scope::Group,
        Ok(signal::Scope::Leader) => Scope::Leader,
        Ok(signal::Scope::Tree) => Scope::Tree,
        Err(_unknown) => return Err(unknown(format!("scope {}", wanted.scope))),
    };
    Ok((number, scope))
}
