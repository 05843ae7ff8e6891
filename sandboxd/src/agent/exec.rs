//! One program, run to its end: a template's warm-up.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use sandbox_protocol::v1::{self, exec_in, exec_out, exit};

use super::{
    AgentError,
    caller::{agent, asked, refused},
};
use crate::{link::Link, telemetry::GuestText};

/// Bytes of a program's output that are kept, the last ones.
pub const OUTPUT_KEPT: usize = 4 * 1024;
/// What the guest may take beyond a program's own time: its grace before KILL (2 s) and the reaping.
const GRACE: Duration = Duration::from_secs(10);

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Its time was over.
    TimedOut,
}

/// A program that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// How it ended.
    pub ended: Ended,
    /// The last [`OUTPUT_KEPT`] bytes that it wrote, output and errors as they came. A guest's bytes: to be escaped
    /// before they are shown.
    pub output: Vec<u8>,
}

impl Ran {
    /// The end of its output, fit to be shown.
    #[must_use]
    pub fn said(&self) -> GuestText {
        GuestText::tail(&self.output)
    }
}

/// Runs a program in a guest, without input, and waits for its end.
///
/// # Errors
/// [`AgentError::Late`] if the guest does not end it in `timeout` and some seconds of grace; see [`AgentError`]. That
/// the program failed is none: look at [`Ran::ended`].
///
/// Cancel safe: the guest kills what it started.
pub async fn exec_once(link: &Link, argv: &[Bytes], timeout: Duration) -> Result<Ran, AgentError> {
    const CALL: &str = "Exec";
    let after = timeout + GRACE;
    let start = v1::ExecStart {
        command: Some(v1::Command {
            argv: argv.to_vec(),
            merge_output: true,
            timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
            ..v1::Command::default()
        }),
        ..v1::ExecStart::default()
    };
    let start = v1::ExecIn {
        m: Some(exec_in::M::Start(start)),
    };
    // Boxed: it holds the stream of messages, and callers hold it in turn.
    let run = Box::pin(async {
        let mut agent = agent(link);
        let mut out = asked(CALL, agent.exec(tokio_stream::once(start))).await?;
        let mut tail = VecDeque::with_capacity(OUTPUT_KEPT);
        let mut exit = None;
        while let Some(message) = out.message().await.map_err(|status| refused(CALL, status))? {
            match message.m {
                Some(exec_out::M::Stdout(chunk) | exec_out::M::Stderr(chunk)) => keep(&mut tail, &chunk.data),
                Some(exec_out::M::Exit(how)) => exit = Some(how),
                Some(exec_out::M::Started(_)) | None => {}
            }
        }
        let ended = exit.as_ref().and_then(ended).ok_or(AgentError::Malformed {
            call: CALL,
            missing: "an exit",
        })?;
        Ok(Ran {
            ended,
            output: tail.into(),
        })
    });
    tokio::time::timeout(after, run)
        .await
        .map_err(|_elapsed| AgentError::Late { call: CALL, after })?
}

pub(super) fn keep(tail: &mut VecDeque<u8>, chunk: &[u8]) {
    let chunk = chunk
        .get(chunk.len().saturating_sub(OUTPUT_KEPT)..)
        .unwrap_or_default();
    let over = (tail.len() + chunk.len()).saturating_sub(OUTPUT_KEPT);
    tail.drain(..over);
    tail.extend(chunk);
}

fn ended(exit: &v1::Exit) -> Option<Ended> {
    if exit.timed_out {
        return Some(Ended::TimedOut);
    }
    Some(match exit.how? {
        exit::How::Code(code) => Ended::Code(code),
        exit::How::Signal(signal) => Ended::Signal(signal),
    })
}
