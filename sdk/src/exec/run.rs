//! Run: one question, one answer with all that the program said.

use std::{future::IntoFuture, pin::Pin, time::Duration};

use bytes::Bytes;
use sandbox_protocol::{limits, v1};

use super::{
    Exit, Output,
    stream::{ask_for_work, work},
};
use crate::{
    command::{Wanted, command_setters},
    error::Error,
    guest,
    retry::Repeat,
    sandbox::SandboxHandle,
};

/// Largest answer: both outputs, and room for how it ended.
const ANSWER: usize = 17 * 1024 * 1024;
const _: () = assert!(ANSWER as u64 > 2 * limits::RUN_OUTPUT_MAX);

/// A program to be run in one exchange of messages; await it. Made by [`SandboxHandle::run`].
///
/// Each output is kept up to [`max_output`](Self::max_output); beyond, the program runs on and the rest is counted
/// and dropped. For more output, for input while it runs, or for signals, see [`SandboxHandle::exec`]. Dropping the
/// future kills the program.
#[derive(Debug, Clone)]
#[must_use = "a program does nothing until it is awaited"]
pub struct Run {
    sandbox: SandboxHandle,
    wanted: Wanted,
    stdin: Bytes,
    max_output: u64,
    trace: bool,
}

impl Run {
    pub(crate) fn new<I>(sandbox: SandboxHandle, argv: I) -> Self
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        Self {
            sandbox,
            wanted: Wanted::new(argv),
            stdin: Bytes::new(),
            max_output: 0,
            trace: false,
        }
    }

    /// What the program reads, less than 2 MiB with all else of the request. Default: nothing.
    pub fn stdin(mut self, bytes: impl Into<Bytes>) -> Self {
        self.stdin = bytes.into();
        self
    }

    command_setters!();

    /// Leaves what the program started alive when it has ended. Default: all of it is killed.
    pub fn keep_descendants(mut self) -> Self {
        self.wanted.message.set_descendants(v1::Descendants::Keep);
        self
    }

    /// Bytes of each output that are kept; default 1 MiB, at most 8 MiB.
    pub fn max_output(mut self, bytes: u64) -> Self {
        self.max_output = bytes;
        self
    }

    /// Exact counts: [`Exit::work`] and [`Exit::host_work`].
    pub fn trace(mut self) -> Self {
        self.trace = true;
        self
    }

    async fn answer(self) -> Result<Output, Error> {
        let message = v1::AgentRunRequest {
            command: Some(self.wanted.checked()?),
            stdin: self.stdin,
            max_output: self.max_output,
            trace: self.trace,
        };
        let (sandbox, trace) = (self.sandbox, self.trace);
        // The program's time is its own: without one it may run as long as the sandbox does.
        let terms = (Repeat::OnWord, Some(Duration::MAX));
        let (reply, host_work) = guest::ask(&sandbox, terms, &message, |client, mut request| {
            if trace {
                ask_for_work(request.metadata_mut());
            }
            async move {
                let mut agent = client.agent_client().max_decoding_message_size(ANSWER);
                let reply = Box::pin(agent.run(request)).await?;
                // The trailers of a unary call stand with its headers.
                let work = work(reply.metadata());
                Ok(reply.map(|reply| (reply, work)))
            }
        })
        .await?;
        let exit = reply
            .exit
            .ok_or_else(|| Error::unfinished("the answer has no exit"))?;
        let lost = |data: &Bytes, cut: bool, said: u64| {
            let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
            if cut { length >= said } else { length != said }
        };
        if lost(&reply.stdout, reply.stdout_truncated, exit.stdout_bytes)
            || lost(&reply.stderr, reply.stderr_truncated, exit.stderr_bytes)
        {
            return Err(Error::unfinished("part of the program's output was lost"));
        }
        Ok(Output {
            status: Exit::read(exit, host_work)?,
            stdout: reply.stdout.into(),
            stderr: reply.stderr.into(),
            stdout_truncated: reply.stdout_truncated,
            stderr_truncated: reply.stderr_truncated,
        })
    }
}

impl IntoFuture for Run {
    type Output = Result<Output, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.answer())
    }
}
