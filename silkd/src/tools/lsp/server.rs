//! One server: what is held for its client, and the task that reads and writes its pipes.

use std::{
    os::fd::OwnedFd,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use rustix::process::Signal;
use sandbox_protocol::{limits::CHUNK_OUT, reason::Reason, v1::Exit};
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, mpsc},
    time::Sleep,
};

use super::{
    header::{Malformed, Part, Reader},
    held::Held,
    input::Message,
};
use crate::{
    refusal::Refusal,
    run::{Child, Scope},
    tools::pipe,
};

/// What a pipe holds at most.
const PIPE: usize = 1024 * 1024;
/// From TERM to KILL.
const GRACE: Duration = Duration::from_secs(2);

/// What its task, its client and whoever ends it share.
#[derive(Debug)]
pub(super) struct Server {
    /// Its pipes are the task's.
    child: Child,
    input: mpsc::Sender<Message>,
    linger: Duration,
    state: Mutex<State>,
    /// The task is to look again.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    held: Held,
    /// It is to end.
    ending: bool,
    over: Option<Over>,
    waker: Option<Waker>,
}

/// How it ended.
#[derive(Debug, Clone)]
pub(super) enum Over {
    /// By itself, or because it was told to.
    Exit(Exit),
    /// It did not speak the protocol.
    Broken(Refusal),
}

/// What a client gets next.
#[derive(Debug)]
pub(super) enum Next {
    Part(Part),
    Over(Over),
}

impl Server {
    pub(super) fn new(child: Child, input: mpsc::Sender<Message>, linger: Duration) -> Self {
        Self {
            child,
            input,
            linger,
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its process's number in the table of programs.
    pub(super) fn id(&self) -> u64 {
        self.child.id()
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Where whole messages go.
    pub(super) const fn input(&self) -> &mpsc::Sender<Message> {
        &self.input
    }

    /// Resolves when it has ended. Cancel safe.
    pub(super) async fn exit(&self) -> Exit {
        self.child.exit().await
    }

    /// Makes somebody its client; says whether something is held for it.
    ///
    /// # Errors
    /// `LSP_BUSY`, `LSP_UNKNOWN` for one that ends.
    pub(super) fn attach(&self) -> Result<bool, Refusal> {
        let mut state = self.state();
        if state.ending || state.over.is_some() {
            let message = format!("language server {} ends", self.id());
            return Err(Refusal::new(Reason::LspUnknown, message));
        }
        if !state.held.attach() {
            let message = format!("language server {} has a client", self.id());
            return Err(Refusal::new(Reason::LspBusy, message));
        }
        let resumed = !state.held.is_empty();
        drop(state);
        self.changed.notify_one();
        Ok(resumed)
    }

    /// The client leaves. What it had got in part is not held for the next.
    pub(super) fn detach(&self) {
        let mut state = self.state();
        state.waker = None;
        state.held.detach();
        drop(state);
        self.changed.notify_one();
    }

    /// It is to end, politely first.
    pub(super) fn ask_to_end(&self) {
        self.state().ending = true;
        self.changed.notify_one();
    }

    /// What its client gets next.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<Next> {
        let mut state = self.state();
        if let Some(part) = state.held.take() {
            drop(state);
            self.changed.notify_one();
            return Poll::Ready(Next::Part(part));
        }
        if let Some(over) = &state.over {
            return Poll::Ready(Next::Over(over.clone()));
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn push(&self, part: Part) {
        let mut state = self.state();
        state.held.push(part);
        wake(state);
    }

    fn end(&self, over: Over) {
        let mut state = self.state();
        state.over.get_or_insert(over);
        wake(state);
    }
}

fn wake(mut state: MutexGuard<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    waker.into_iter().for_each(Waker::wake);
}

/// Our ends of a server's pipes; none: it has closed its own.
#[derive(Debug)]
pub(super) struct Pipes {
    stdin: Option<AsyncFd<OwnedFd>>,
    stdout: Option<AsyncFd<OwnedFd>>,
}

impl Pipes {
    pub(super) const fn of(child: &mut Child) -> Self {
        Self {
            stdin: child.stdin.take(),
            stdout: child.stdout.take(),
        }
    }
}

/// Serves it to its end. Dropped before, it leaves the child to whoever drops the server.
pub(super) async fn run(server: Arc<Server>, pipes: Pipes, messages: mpsc::Receiver<Message>) {
    let mut actor = Actor {
        pipes,
        messages,
        reader: Reader::default(),
        writing: None,
        timer: Timer::None,
        server,
    };
    let exit = actor.server.child.exit();
    let mut exit = std::pin::pin!(exit);
    loop {
        let room = actor.look();
        let has_input = actor.writing.is_none();
        tokio::select! {
            exit = &mut exit => return actor.over(exit),
            () = actor.server.changed.notified() => {}
            () = actor.timer.due() => actor.on_time(),
            message = actor.messages.recv(), if has_input => actor.writing = message.map(Writing::new),
            () = write(&mut actor.pipes.stdin, &mut actor.writing) => {}
            bytes = read(&mut actor.pipes.stdout), if room => actor.heard(bytes),
        }
    }
}

/// What is to happen when nothing else does.
enum Timer {
    None,
    /// Nobody comes back.
    Linger(Pin<Box<Sleep>>),
    /// It does not heed TERM.
    Grace(Pin<Box<Sleep>>),
    /// KILL was sent.
    Killed,
}

impl Timer {
    fn after(time: Duration) -> Pin<Box<Sleep>> {
        Box::pin(tokio::time::sleep(time))
    }

    async fn due(&mut self) {
        match self {
            Self::Linger(sleep) | Self::Grace(sleep) => sleep.await,
            Self::None | Self::Killed => std::future::pending().await,
        }
    }
}

/// A message on its way into the pipe.
struct Writing {
    message: Message,
    frame: Bytes,
}

impl Writing {
    fn new(mut message: Message) -> Self {
        let frame = message.frames.next().unwrap_or_default();
        Self { message, frame }
    }
}

struct Actor {
    server: Arc<Server>,
    pipes: Pipes,
    messages: mpsc::Receiver<Message>,
    reader: Reader,
    writing: Option<Writing>,
    timer: Timer,
}

impl Actor {
    /// Sees to the timer; says whether there is room for more of its output.
    fn look(&mut self) -> bool {
        let state = self.server.state();
        let (ending, attached, room) = (state.ending, state.held.attached(), state.held.has_room());
        drop(state);
        match (&self.timer, ending, attached) {
            (Timer::None | Timer::Linger(_), true, _) => {
                self.server.child.signal(Signal::TERM, Scope::Tree);
                self.timer = Timer::Grace(Timer::after(GRACE));
            }
            (Timer::Linger(_), false, true) => self.timer = Timer::None,
            (Timer::None, false, false) => self.timer = Timer::Linger(Timer::after(self.server.linger)),
            (Timer::None, false, true)
            | (Timer::Linger(_), false, false)
            | (Timer::Grace(_) | Timer::Killed, _, _) => {}
        }
        room
    }

    fn on_time(&mut self) {
        match self.timer {
            Timer::Linger(_) => self.server.ask_to_end(),
            Timer::Grace(_) => {
                self.server.child.kill();
                self.timer = Timer::Killed;
            }
            Timer::None | Timer::Killed => {}
        }
    }

    /// It said something.
    fn heard(&mut self, mut bytes: Bytes) {
        loop {
            match self.reader.next(&mut bytes) {
                Ok(Some(part)) => self.server.push(part),
                Ok(None) => return,
                Err(malformed) => {
                    self.pipes.stdout = None;
                    self.server.end(Over::Broken(broken(malformed)));
                    return self.server.child.kill();
                }
            }
        }
    }

    /// It has ended, and nothing is left of it that could write.
    fn over(mut self, exit: Exit) {
        if let Some(stdout) = self.pipes.stdout.take() {
            self.heard(pipe::left(&stdout, PIPE));
        }
        self.server.end(Over::Exit(exit));
    }
}

fn broken(malformed: Malformed) -> Refusal {
    let message = format!("the server does not speak the protocol: {malformed}");
    Refusal::new(Reason::LspBroken, message)
}

/// The next bytes of an output; never, when there is none any more. Cancel safe.
async fn read(pipe: &mut Option<AsyncFd<OwnedFd>>) -> Bytes {
    if let Some(open) = pipe {
        // A pipe that cannot be read has no more to say.
        let bytes = pipe::read(open, CHUNK_OUT).await.unwrap_or_default();
        if !bytes.is_empty() {
            return bytes;
        }
        *pipe = None;
    }
    std::future::pending().await
}

/// Writes some of a message; never resolves without one. What a server does not take that has closed its input is
/// dropped. Cancel safe.
async fn write(pipe: &mut Option<AsyncFd<OwnedFd>>, writing: &mut Option<Writing>) {
    let Some(now) = writing else {
        return std::future::pending().await;
    };
    let Some(open) = pipe else {
        *writing = None;
        return;
    };
    while !now.frame.has_remaining() {
        match now.message.frames.next() {
            Some(frame) => now.frame = frame,
            None => {
                *writing = None;
                return;
            }
        }
    }
    match pipe::write(open, &now.frame).await {
        Ok(written) => now.frame.advance(written),
        Err(_closed) => *pipe = None,
    }
}
