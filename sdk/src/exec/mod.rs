//! Running a program in a sandbox.
//!
//! May call: sandbox, guest, client, retry, error, command, input.
//! Never inside: an invented success: without the exit message and an orderly end, a call is an error (docs/failures.md
//! E7). Bytes in, bytes out: nothing here is text unless asked for (E11).
//! Cancel safety: dropping any future or stream of here drops both halves of the call, and the guest kills the
//! program and what it started, unless it was to be [detached](Exec::detach_on_disconnect).

mod run;
mod stream;
mod text;

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use sandbox_protocol::v1::{self, AgentWork, OnDisconnect, Rusage, Work};

pub use run::Run;
pub use stream::{Event, ExecStream};
pub use text::TextDecoder;

pub use crate::input::{Resizer, Signaller, StdinClosed, StdinWriter};
use crate::{
    command::{Wanted, command_setters, tty_setters},
    error::Error,
    input::Stdin,
    sandbox::SandboxHandle,
};

/// Bytes of each of standard output and error that [`Exec::output`] keeps, unless set.
const OUTPUT_LIMIT: usize = 8 * 1024 * 1024;

/// A command in the making. Made by [`SandboxHandle::exec`].
#[derive(Debug, Clone)]
#[must_use = "a command does nothing until `output` or `stream` is called"]
pub struct Exec {
    sandbox: SandboxHandle,
    wanted: Wanted,
    stdin: Stdin,
    detach: Option<Detach>,
    trace: bool,
    limit: usize,
}

/// What becomes of a program that outlives its caller.
#[derive(Debug, Clone, Default)]
struct Detach {
    name: Bytes,
    log_bytes: u64,
}

impl Exec {
    pub(crate) fn new<I>(sandbox: SandboxHandle, argv: I) -> Self
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        Self {
            sandbox,
            wanted: Wanted::new(argv),
            stdin: Stdin::Null,
            detach: None,
            trace: false,
            limit: OUTPUT_LIMIT,
        }
    }

    /// What the program reads, before its input ends. Default: `/dev/null`.
    pub fn stdin(mut self, bytes: impl Into<Bytes>) -> Self {
        self.stdin = Stdin::Fixed(bytes.into());
        self
    }

    /// Input comes later, through [`ExecStream::take_stdin`].
    pub fn piped_stdin(mut self) -> Self {
        self.stdin = Stdin::Piped;
        self
    }

    command_setters!();
    tty_setters!();

    /// When this call ends before the program does, by whatever cause, the program goes on, detached. Find it again
    /// by the id of [`Event::Started`] with [`SandboxHandle::process`]; its output is in its log from the first byte.
    /// Default: it is killed.
    pub fn detach_on_disconnect(mut self) -> Self {
        self.detach.get_or_insert_default();
        self
    }

    /// A name for the program, 1 to 64 of `A-Za-z0-9._-` and not all digits; it may be
    /// [detached](Self::detach_on_disconnect) then.
    pub fn name(mut self, name: impl Into<Bytes>) -> Self {
        self.detach.get_or_insert_default().name = name.into();
        self
    }

    /// Bytes of its output that are kept; default 1 MiB, at most 16 MiB. It may be
    /// [detached](Self::detach_on_disconnect) then.
    pub fn log_bytes(mut self, bytes: u64) -> Self {
        self.detach.get_or_insert_default().log_bytes = bytes;
        self
    }

    /// Leaves what the program started alive when it has ended. Default: all of it is killed.
    pub fn keep_descendants(mut self) -> Self {
        self.wanted.message.set_descendants(v1::Descendants::Keep);
        self
    }

    /// Exact counts: [`Exit::work`] and [`Exit::host_work`].
    pub fn trace(mut self) -> Self {
        self.trace = true;
        self
    }

    /// Bytes that [`output`](Self::output) keeps of each stream; default 8 MiB.
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    fn start(&self) -> Result<v1::ExecStart, Error> {
        let mut start = v1::ExecStart {
            command: Some(self.wanted.clone().checked()?),
            stdin: !matches!(self.stdin, Stdin::Null),
            trace: self.trace,
            ..v1::ExecStart::default()
        };
        if let Some(detach) = self.detach.clone() {
            start.set_on_disconnect(OnDisconnect::Detach);
            (start.name, start.log_bytes) = (detach.name, detach.log_bytes);
        }
        Ok(start)
    }

    /// Starts the program; events come as they happen, and a reader that pauses makes the program wait.
    ///
    /// # Errors
    /// SANDBOX_NOT_FOUND, SANDBOX_FAILED; PROGRAM_NOT_FOUND, NOT_EXECUTABLE, CWD_NOT_FOUND and the other reasons of
    /// a start, here or as the first event.
    pub async fn stream(self) -> Result<ExecStream, Error> {
        Box::pin(ExecStream::open(self, true)).await
    }

    /// Runs the program to its end and collects what it says. Beyond the limit the program runs on, and the rest
    /// is dropped and [told](Output::truncated). Piped input is at its end at once.
    ///
    /// # Errors
    /// As [`stream`](Self::stream); a program that fails is not an error, see [`Output::status`].
    pub async fn output(self) -> Result<Output, Error> {
        Box::pin(self.collect()).await
    }

    async fn collect(mut self) -> Result<Output, Error> {
        if matches!(self.stdin, Stdin::Piped) {
            self.stdin = Stdin::Fixed(Bytes::new());
        }
        let limit = self.limit;
        let mut stream = Box::pin(ExecStream::open(self, false)).await?;
        let (mut stdout, mut stderr) = (Kept::new(limit), Kept::new(limit));
        loop {
            match stream.next().await {
                Some(Ok(Event::Started { .. })) => {}
                Some(Ok(Event::Stdout(data))) => stdout.push(&data),
                Some(Ok(Event::Stderr(data))) => stderr.push(&data),
                Some(Ok(Event::Exit(status))) => {
                    return Ok(Output {
                        status: *status,
                        stdout_truncated: stdout.cut,
                        stderr_truncated: stderr.cut,
                        stdout: stdout.bytes,
                        stderr: stderr.bytes,
                    });
                }
                Some(Err(error)) => return Err(error),
                None => return Err(Error::unfinished("the call ended without the program's exit")),
            }
        }
    }
}

/// Output up to a limit.
pub(crate) struct Kept {
    pub(crate) bytes: Vec<u8>,
    limit: usize,
    pub(crate) cut: bool,
}

impl Kept {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            cut: false,
        }
    }

    pub(crate) fn push(&mut self, data: &[u8]) {
        let room = self.limit.saturating_sub(self.bytes.len());
        let fits = data.get(..room).unwrap_or(data);
        self.cut |= fits.len() < data.len();
        self.bytes.extend_from_slice(fits);
    }
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// The end of a program.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Exit {
    /// Code or signal.
    pub how: How,
    /// Its time was over.
    pub timed_out: bool,
    /// The guest's memory ran out while it ran.
    pub oom_suspected: bool,
    /// From start to reaping.
    pub wall: Duration,
    /// What it used.
    pub usage: Option<Rusage>,
    /// Bytes that it wrote to standard output (all of them, merged output included).
    pub stdout_bytes: u64,
    /// Bytes that it wrote to standard error.
    pub stderr_bytes: u64,
    /// Bytes of input that it did not read.
    pub stdin_discarded: u64,
    /// Programs that it had started and that were killed after it.
    pub descendants_killed: u32,
    /// The agent's exact counts, if traced.
    pub work: Option<AgentWork>,
    /// The host's exact counts, if traced.
    pub host_work: Option<Work>,
}

impl Exit {
    /// Code 0, within its time.
    #[must_use]
    pub fn success(&self) -> bool {
        self.how == How::Code(0) && !self.timed_out
    }

    pub(crate) fn read(exit: v1::Exit, host_work: Option<Work>) -> Result<Self, Error> {
        let how = match exit.how {
            Some(v1::exit::How::Code(code)) => How::Code(code),
            Some(v1::exit::How::Signal(signal)) => How::Signal(signal),
            None => {
                return Err(Error::unfinished(
                    "the exit message names neither code nor signal",
                ));
            }
        };
        Ok(Self {
            how,
            timed_out: exit.timed_out,
            oom_suspected: exit.oom_suspected,
            wall: Duration::from_micros(exit.wall_us),
            usage: exit.rusage,
            stdout_bytes: exit.stdout_bytes,
            stderr_bytes: exit.stderr_bytes,
            stdin_discarded: exit.stdin_discarded,
            descendants_killed: exit.descendants_killed,
            work: exit.work,
            host_work,
        })
    }
}

/// A program's end and what it said.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Output {
    /// How it ended.
    pub status: Exit,
    /// What it wrote to standard output, as bytes.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error, as bytes.
    pub stderr: Vec<u8>,
    /// Standard output went on beyond the limit.
    pub stdout_truncated: bool,
    /// Standard error went on beyond the limit.
    pub stderr_truncated: bool,
}

impl Output {
    /// One of the two went on beyond the limit.
    #[must_use]
    pub fn truncated(&self) -> bool {
        self.stdout_truncated || self.stderr_truncated
    }

    /// Standard output as text; what is not UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn stdout_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout)
    }

    /// Standard error as text; what is not UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_without_how_is_no_success() {
        let error = Exit::read(v1::Exit::default(), None).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unfinished);
    }

    #[test]
    fn output_is_cut_at_the_limit_and_says_so() {
        let mut kept = Kept::new(5);
        kept.push(b"abc");
        kept.push(b"de");
        assert!(!kept.cut);
        kept.push(b"");
        assert!(!kept.cut);
        kept.push(b"f");
        assert!(kept.cut);
        assert_eq!(kept.bytes, b"abcde");
    }
}
