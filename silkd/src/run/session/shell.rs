//! One shell: what is written to it, what it reports, what it and its programs say.

use std::{collections::VecDeque, os::fd::OwnedFd, pin::Pin, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use rustix::{io::Errno, process::Signal};
use sandbox_protocol::{
    reason::Reason,
    v1::{Command, Exit},
};
use tokio::{io::unix::AsyncFd, time::Instant};

use super::{
    report::{Nonsense, Reader, Report},
    script::{self, Nonce},
    sink::{Progress, Sink},
    tree::Tree,
};
use crate::{
    refusal::Refusal,
    run::{Child, ChildEnds, ExecCtx, Kind, Shared, core::pipe, output::Output},
};

/// How long a shell has to report once its command is ended; then it is ended too.
pub(super) const GRACE: Duration = Duration::from_secs(2);
/// Until a command that is being ended is looked at again: its shell may have gone on to the next program of the same
/// text, and nothing tells of that.
const AGAIN: Duration = Duration::from_millis(50);

/// See the module. Dropped, it ends with all that runs in it.
pub(super) struct Shell {
    pub(super) child: Child,
    /// Resolves once.
    exit: Pin<Box<dyn Future<Output = Exit> + Send>>,
    control: AsyncFd<OwnedFd>,
    /// `None`: the shell has closed it.
    report: Option<AsyncFd<OwnedFd>>,
    outputs: [Output; 2],
    /// The output that is asked first, so that a chatty one does not hide the other.
    turn: usize,
}

/// How a command came to its end.
#[derive(Debug)]
pub(super) enum Outcome {
    Reported(Report),
    /// The shell has ended.
    Ended(Exit),
}

/// Why a command was ended before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    TimedOut,
    Cancelled,
}

/// What is left of a command's time.
struct Time {
    cut: Option<Cut>,
    /// The next thing to do, and when.
    next: Option<Pin<Box<tokio::time::Sleep>>>,
    /// When the shell itself is ended.
    last: Option<Instant>,
}

impl Time {
    fn new(timeout: Option<Duration>) -> Self {
        Self {
            cut: None,
            next: timeout.map(|after| Box::pin(tokio::time::sleep(after))),
            last: None,
        }
    }

    /// Resolves when something is due; never, if nothing is.
    async fn due(&mut self) {
        match &mut self.next {
            Some(sleep) => sleep.await,
            None => std::future::pending().await,
        }
    }

    fn cut(&mut self, cut: Cut) {
        if self.cut.is_none() {
            self.cut = Some(cut);
            self.last = Some(Instant::now() + GRACE);
        }
    }

    /// Does what is due. The first time that is what ends the command.
    fn act(&mut self, shell: &Child, tree: &Tree, reports: bool) {
        self.cut(Cut::TimedOut);
        // A shell that has closed its report never will.
        if !reports || self.last.is_some_and(|last| Instant::now() >= last) {
            shell.kill();
            self.next = None;
        } else {
            tree.signal(Signal::KILL);
            self.next = Some(Box::pin(tokio::time::sleep(AGAIN)));
        }
    }
}

impl Shell {
    /// Starts bash with our pipes. Cancel safe.
    ///
    /// # Errors
    /// Those of every start; `PROGRAM_NOT_FOUND` without a bash.
    pub(super) async fn start(
        shared: &Arc<Shared>,
        ctx: &ExecCtx,
        mut command: Command,
    ) -> Result<Self, Refusal> {
        command.argv = script::argv();
        let (control, script) = pipe(false)?;
        let (report, reports) = pipe(true)?;
        // It opens its script by name, which only the pipe's owner may.
        if let Some(ids) = shared
            .users()
            .resolve(crate::run::command::user_of(&command, &ctx.claim))?
            .ids
        {
            let uid = rustix::fs::Uid::from_raw(ids.uid);
            rustix::fs::fchown(&script, Some(uid), None).map_err(|errno| {
                Refusal::new(Reason::AgentBug, format!("a pipe cannot be given away: {errno}"))
                    .with_errno(errno.raw_os_error())
            })?;
        }
        let ends = ChildEnds {
            stdin: false,
            merge: false,
            extra: vec![(script, script::SCRIPT), (reports, script::REPORT)],
            log: false,
        };
        let mut child = Child::start(shared, ctx, &command, Kind::Session, ends).await?;
        let missing = || Refusal::new(Reason::AgentBug, "a child without its outputs");
        let outputs = [
            Output::new(child.stdout.take().ok_or_else(missing)?),
            Output::new(child.stderr.take().ok_or_else(missing)?),
        ];
        Ok(Self {
            exit: Box::pin(child.exit()),
            child,
            control,
            report: Some(report),
            outputs,
            turn: 0,
        })
    }

    /// Has the shell do what is written, until it reports or ends. Its output goes to `sink`, or waits for it.
    pub(super) async fn drive(
        &mut self,
        pieces: impl IntoIterator<Item = Bytes>,
        nonce: Nonce,
        (tree, timeout): (&Tree, Option<Duration>),
        sink: &mut Sink<'_>,
    ) -> (Outcome, Option<Cut>) {
        let mut queue: VecDeque<Bytes> = pieces.into_iter().collect();
        let mut reader = Reader::new(nonce);
        let mut time = Time::new(timeout);
        loop {
            let Self {
                child,
                exit,
                control,
                report,
                outputs,
                turn,
            } = self;
            let free = sink.is_free();
            tokio::select! {
                biased;
                exit = &mut *exit => return (Outcome::Ended(exit), time.cut),
                found = listen(report, &mut reader) => match found {
                    Ok(Some(report)) => return (Outcome::Reported(report), time.cut),
                    Ok(None) => {}
                    Err(Nonsense) => child.kill(),
                },
                () = time.due() => time.act(child, tree, report.is_some()),
                () = write(control, &mut queue) => {}
                progress = sink.progress() => match progress {
                    Progress::Passed => {}
                    Progress::Gone if time.cut.is_some() => {}
                    Progress::Gone => {
                        time.cut(Cut::Cancelled);
                        time.act(child, tree, report.is_some());
                    }
                },
                (place, bytes) = said(outputs, turn), if free => sink.take(place, bytes),
            }
        }
    }

    /// Passes on what was said until now: all that a command which has ended said is in the pipes.
    pub(super) async fn flush(&mut self, sink: &mut Sink<'_>) {
        self.outputs.iter_mut().for_each(Output::only_what_is_there);
        loop {
            let free = sink.is_free();
            let over = self.outputs.iter().all(Output::is_over);
            if over && free {
                break;
            }
            let Self { outputs, turn, .. } = self;
            tokio::select! {
                biased;
                // Who is gone by now missed nothing but the end.
                Progress::Passed | Progress::Gone = sink.progress() => {}
                (place, bytes) = said(outputs, turn), if free => sink.take(place, bytes),
            }
        }
        self.outputs.iter_mut().for_each(Output::go_on);
    }

    /// What is said while no command runs; `None` when it has ended, once. Cancel safe.
    pub(super) async fn news(&mut self) -> Option<(usize, Bytes)> {
        tokio::select! {
            biased;
            _exit = &mut self.exit => None,
            piece = said(&mut self.outputs, &mut self.turn) => Some(piece),
        }
    }
}

/// The next piece of either output; never, once both are over.
async fn said(outputs: &mut [Output; 2], turn: &mut usize) -> (usize, Bytes) {
    std::future::poll_fn(|cx| {
        for place in [*turn, 1 - *turn] {
            let Some(output) = outputs.get_mut(place) else {
                continue;
            };
            if let Poll::Ready(Some(bytes)) = output.poll(cx) {
                *turn = 1 - place;
                return Poll::Ready((place, bytes));
            }
        }
        Poll::Pending
    })
    .await
}

/// Reads what the shell reports; resolves after each piece, and never once it is closed.
async fn listen(
    report: &mut Option<AsyncFd<OwnedFd>>,
    reader: &mut Reader,
) -> Result<Option<Report>, Nonsense> {
    let Some(pipe) = report else {
        return std::future::pending().await;
    };
    let Ok(mut ready) = pipe.readable().await else {
        *report = None;
        return Ok(None);
    };
    let mut buffer = [0; 1024];
    match rustix::io::read(&*pipe, &mut buffer) {
        Ok(0) => *report = None,
        Ok(n) => return reader.feed(buffer.get(..n).unwrap_or_default()),
        Err(Errno::AGAIN) => ready.clear_ready(),
        Err(Errno::INTR) => {}
        Err(_broken) => *report = None,
    }
    Ok(None)
}

/// Writes what it can; never resolves if there is nothing to write.
async fn write(control: &AsyncFd<OwnedFd>, queue: &mut VecDeque<Bytes>) {
    let Some(first) = queue.front_mut() else {
        return std::future::pending().await;
    };
    if first.is_empty() {
        queue.pop_front();
        return;
    }
    let Ok(mut ready) = control.writable().await else {
        queue.clear();
        return;
    };
    match rustix::io::write(control, first) {
        Ok(n) => drop(first.split_to(n)),
        Err(Errno::AGAIN) => ready.clear_ready(),
        Err(Errno::INTR) => {}
        // The shell reads no more: its end will be told.
        Err(_closed) => queue.clear(),
    }
}
