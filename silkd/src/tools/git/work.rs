//! One git after the other for a call, each to its end.

use std::{future::Future, os::fd::OwnedFd, pin::Pin, time::Duration};

use bytes::Bytes;
use sandbox_protocol::{
    reason::Reason,
    v1::{Command, EnvVar, Exit, GitContext, exit::How},
};
use tokio::{io::unix::AsyncFd, time::Sleep};

use super::{
    porcelain::Want,
    verbs::{self, Args},
};
use crate::{
    refusal::Refusal,
    run::{Child, ChildEnds, ExecCtx, Kind, Runner},
    tools::pipe,
};

/// Largest read.
const ROOM: usize = 16 * 1024;
/// What a pipe holds at most.
const PIPE: usize = 1024 * 1024;
/// Of what git said at its end, the last bytes are kept.
const TAIL: usize = 4 * 1024;
/// And so many are told: what a forwarded status has room for.
const TOLD: usize = 900;
/// Longest name of a commit.
const NAME: usize = 256;

/// Over what the request says: git is run by a machine.
const ENV: [(&str, &str); 5] = [
    ("LC_ALL", "C"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_OPTIONAL_LOCKS", "0"),
    ("GIT_EDITOR", ":"),
    ("GIT_SEQUENCE_EDITOR", ":"),
];

/// What the gits of one call have in common.
#[derive(Debug)]
pub(super) struct Git {
    runner: Runner,
    ctx: ExecCtx,
    path: Bytes,
    user: Bytes,
    env: Vec<EnvVar>,
    deadline: Deadline,
}

/// When the call's time is over.
#[derive(Debug)]
pub(super) struct Deadline {
    after_ms: u32,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    /// Resolves when it is; never without one. Cancel safe.
    async fn over(&mut self) -> Refusal {
        match &mut self.timer {
            Some(timer) => timer.await,
            None => std::future::pending().await,
        }
        let message = format!("git was ended: it took longer than {} ms", self.after_ms);
        Refusal::new(Reason::Deadline, message)
    }
}

impl Git {
    pub(super) fn new(runner: &Runner, ctx: ExecCtx, context: GitContext) -> Self {
        let after_ms = context.timeout_ms;
        let after = Duration::from_millis(after_ms.into());
        let mut git = Self {
            runner: runner.clone(),
            ctx,
            path: context.path,
            user: context.user,
            env: context.env,
            deadline: Deadline {
                after_ms,
                timer: (after_ms > 0).then(|| Box::pin(tokio::time::sleep(after))),
            },
        };
        git.env(ENV.map(|(key, value)| EnvVar {
            key: Bytes::from_static(key.as_bytes()),
            value: Bytes::from_static(value.as_bytes()),
        }));
        git
    }

    /// Over what there is.
    pub(super) fn env(&mut self, more: impl IntoIterator<Item = EnvVar>) {
        self.env.extend(more);
    }

    pub(super) const fn deadline(&mut self) -> &mut Deadline {
        &mut self.deadline
    }

    /// Starts one in the work tree; `merge` puts its errors among its words.
    pub(super) async fn start(&self, args: &Args, merge: bool) -> Result<Running, Refusal> {
        self.begin(self.path.clone(), args, merge).await
    }

    /// Starts one elsewhere, merged.
    pub(super) async fn start_at(&self, cwd: &'static [u8], args: &Args) -> Result<Running, Refusal> {
        self.begin(Bytes::from_static(cwd), args, true).await
    }

    async fn begin(&self, cwd: Bytes, args: &Args, merge: bool) -> Result<Running, Refusal> {
        let command = Command {
            argv: args.0.clone(),
            cwd,
            env: self.env.clone(),
            user: self.user.clone(),
            ..Command::default()
        };
        let ends = ChildEnds {
            merge,
            ..ChildEnds::default()
        };
        let started = self.runner.child(&self.ctx, &command, Kind::Git, ends).await;
        started.map(Running::new).map_err(|mut refusal| {
            if refusal.reason == Reason::ProgramNotFound {
                refusal.reason = Reason::GitMissing;
            }
            refusal
        })
    }

    /// Runs one that only has to succeed.
    pub(super) async fn obey(&mut self, args: &Args) -> Result<(), Refusal> {
        let mut running = self.start(args, true).await?;
        loop {
            match running.next(&mut self.deadline).await? {
                Said::Out(_kept) => {}
                Said::Exit(exit) => return running.well(&exit),
            }
        }
    }

    /// Runs one for what it says. Its reader may have enough before its end, which ends it.
    pub(super) async fn read(
        &mut self,
        args: &Args,
        mut reads: impl FnMut(&[u8]) -> Result<Want, Refusal> + Send,
    ) -> Result<(), Refusal> {
        let mut running = self.start(args, false).await?;
        loop {
            match running.next(&mut self.deadline).await? {
                Said::Out(bytes) => match reads(&bytes)? {
                    Want::More => {}
                    Want::Enough => return Ok(()),
                },
                Said::Exit(exit) => return running.well(&exit),
            }
        }
    }

    /// The commit that HEAD is at; empty: none yet.
    pub(super) async fn head(&mut self) -> Result<String, Refusal> {
        let mut running = self.start(&verbs::head(), false).await?;
        let mut name = Vec::new();
        let exit = loop {
            match running.next(&mut self.deadline).await? {
                Said::Out(bytes) => name.extend(bytes.into_iter().take(NAME - name.len())),
                Said::Exit(exit) => break exit,
            }
        };
        if exit.how == Some(How::Code(1)) {
            return Ok(String::new());
        }
        running.well(&exit)?;
        let name = name.trim_ascii();
        let hexadecimal = !name.is_empty() && name.iter().all(u8::is_ascii_hexdigit);
        let name = std::str::from_utf8(name).ok().filter(|_| hexadecimal);
        name.map(str::to_owned)
            .ok_or_else(|| Refusal::new(Reason::GitFailed, "git's name of HEAD cannot be read"))
    }
}

/// What a git says next.
#[derive(Debug)]
pub(super) enum Said {
    /// Bytes of its output.
    Out(Bytes),
    /// The last.
    Exit(Exit),
}

/// A git that runs. Dropped, it ends with all that it started.
pub(super) struct Running {
    child: Child,
    exit: Pin<Box<dyn Future<Output = Exit> + Send>>,
    ended: Option<Exit>,
    tail: Vec<u8>,
}

impl Running {
    fn new(child: Child) -> Self {
        Self {
            exit: Box::pin(child.exit()),
            child,
            ended: None,
            tail: Vec::new(),
        }
    }

    /// Cancel safe.
    ///
    /// # Errors
    /// The deadline's; git is to be dropped then.
    pub(super) async fn next(&mut self, deadline: &mut Deadline) -> Result<Said, Refusal> {
        loop {
            if let Some(exit) = self.ended {
                return Ok(Said::Exit(exit));
            }
            let out = tokio::select! {
                biased;
                refusal = deadline.over() => return Err(refusal),
                out = said(&mut self.child.stdout) => out,
                errors = said(&mut self.child.stderr) => {
                    self.keep(&errors);
                    continue;
                }
                exit = &mut self.exit => {
                    self.ended = Some(exit);
                    // Nothing is left of it that could write, so this is all there will be.
                    let last = |pipe: Option<AsyncFd<OwnedFd>>| pipe.map(|pipe| pipe::left(&pipe, PIPE));
                    let errors = last(self.child.stderr.take());
                    self.keep(&errors.unwrap_or_default());
                    last(self.child.stdout.take()).unwrap_or_default()
                }
            };
            if !out.is_empty() {
                self.keep_merged(&out);
                return Ok(Said::Out(out));
            }
        }
    }

    /// Where both outputs are one, its end says what went wrong.
    fn keep_merged(&mut self, bytes: &[u8]) {
        if self.child.stderr.is_none() {
            self.keep(bytes);
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        let excess = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..excess);
    }

    /// # Errors
    /// `GIT_FAILED`, with how it ended and the end of what it said.
    pub(super) fn well(&self, exit: &Exit) -> Result<(), Refusal> {
        let how = match exit.how {
            Some(How::Code(0)) => return Ok(()),
            Some(How::Code(code)) => format!("git exited with {code}"),
            Some(How::Signal(signal)) => format!("git was ended by signal {signal}"),
            None => "git ended".to_owned(),
        };
        Err(Refusal::new(
            Reason::GitFailed,
            format!("{how}: {}", told(&self.tail)),
        ))
    }
}

/// The next bytes of an output; never, when there is none any more.
async fn said(pipe: &mut Option<AsyncFd<OwnedFd>>) -> Bytes {
    if let Some(open) = pipe {
        // A pipe that cannot be read has no more to say.
        let bytes = pipe::read(open, ROOM).await.unwrap_or_default();
        if !bytes.is_empty() {
            return bytes;
        }
        *pipe = None;
    }
    std::future::pending().await
}

/// The end of what git said, on one harmless line.
fn told(tail: &[u8]) -> String {
    let lines = tail.split(|byte| matches!(byte, b'\n' | b'\r'));
    let lines: Vec<&[u8]> = lines
        .map(<[u8]>::trim_ascii)
        .filter(|line| !line.is_empty())
        .collect();
    let text = lines.join(&b"; "[..]).escape_ascii().to_string();
    // ASCII, so that every cut is one between characters.
    let from = text.len().saturating_sub(TOLD);
    text.get(from..).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_told_harmlessly_and_within_what_a_status_holds() {
        assert_eq!(
            told(b"a: 1%\rb: \x1b[31m\n\nfatal: \xff\n"),
            "a: 1%; b: \\x1b[31m; fatal: \\xff"
        );
        let long = told(&[&[b'x'; 5000][..], b"end"].concat());
        assert!(long.len() == TOLD && long.ends_with("end"));
    }
}
