//! Hooks: executables of the image that run to their end, as root, with the last of what they said.

use std::{
    collections::VecDeque, future::poll_fn, os::unix::ffi::OsStrExt as _, path::Path, sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use sandbox_protocol::v1::{Command, EnvVar, exit::How};

use super::{
    ClaimDefaults, Kind, RunError, Shared, command,
    core::{Core, Ends, Event},
    job::Birth,
};
use crate::{refusal::Refusal, sys};

/// How a hook ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookEnd {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Killed with its tree: its time was over.
    TimedOut,
}

/// What came of a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookOutcome {
    /// How it ended.
    pub end: HookEnd,
    /// The last 4 KiB that it said, both outputs in order.
    pub output: Vec<u8>,
}

/// Bytes of output that are kept: the last ones.
const TAIL: usize = 4 * 1024;
const KILL: i32 = 9;

/// Runs it. Cancel safe: dropped, it ends the hook with its tree.
pub(super) async fn run(
    shared: &Arc<Shared>,
    path: &Path,
    env: &[EnvVar],
    timeout: Duration,
) -> Result<HookOutcome, RunError> {
    let failed = |source: Refusal| RunError::Hook {
        path: path.to_owned(),
        source,
    };
    let command = Command {
        argv: vec![Bytes::copy_from_slice(path.as_os_str().as_bytes())],
        cwd: Bytes::from_static(b"/"),
        env: env.to_vec(),
        merge_output: true,
        ..Command::default()
    };
    let started = async {
        let user = shared.users().resolve(b"")?;
        let wanted = command::plan(&command, &[], &ClaimDefaults::default(), user)?;
        let job = shared.admit(Birth::new(Kind::Exec, wanted.argv, wanted.uid, wanted.keep))?;
        let ends = Ends {
            stdin: false,
            merge: true,
            tty: None,
        };
        Box::pin(Core::start(shared, wanted.plan, ends, job)).await
    };
    let over = tokio::time::sleep(timeout);
    tokio::pin!(over);
    let (mut core, _no_stdin) = started.await.map_err(failed)?;
    let mut tail = VecDeque::new();
    let exit = loop {
        tokio::select! {
            biased;
            event = poll_fn(|cx| core.poll(cx)) => match event {
                Event::Said(_side, bytes) => keep_last(&mut tail, &bytes),
                Event::Exit(record) => break record.on_the_wire(),
            },
            () = &mut over, if !over.is_elapsed() => {
                if let Some(kill) = sys::signal(KILL) {
                    core.job().time_out(kill);
                }
            }
        }
    };
    let end = match exit.how {
        _ if exit.timed_out => HookEnd::TimedOut,
        Some(How::Code(code)) => HookEnd::Code(code),
        Some(How::Signal(signal)) => HookEnd::Signal(signal),
        None => HookEnd::Signal(0),
    };
    Ok(HookOutcome {
        end,
        output: tail.into(),
    })
}

fn keep_last(tail: &mut VecDeque<u8>, bytes: &[u8]) {
    let last = bytes.get(bytes.len().saturating_sub(TAIL)..).unwrap_or_default();
    let excess = (tail.len() + last.len()).saturating_sub(TAIL);
    tail.drain(..excess.min(tail.len()));
    tail.extend(last);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_are_kept() {
        let mut tail = VecDeque::new();
        let all: Vec<u8> = (0..10_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
        for (upto, chunk) in [
            (3000, &all[..3000]),
            (5000, &all[3000..5000]),
            (10_000, &all[5000..]),
        ] {
            keep_last(&mut tail, chunk);
            let start = usize::saturating_sub(upto, TAIL);
            assert_eq!(Vec::from(tail.clone()), &all[start..upto]);
        }
    }
}
