//! Between a program in a sandbox and this process: bytes both ways as they come, signals, sizes of the terminal.

use std::{io, pin::pin};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use sandbox_sdk::{
    Error, Event, ExecStream, Exit, Resizer, Signaller, StdinWriter,
    process::{AttachStream, LogEvent},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    signal::unix::{SignalKind, signal},
};

use crate::{
    fault::Fault,
    print::{self, Out},
    signals::Signals,
    terminal::{Keys, Raw},
};

/// Bytes that one read of stdin takes at most.
const PIECE: usize = 64 * 1024;
/// Bytes of each output that `--json` keeps.
const KEPT: usize = 8 * 1024 * 1024;

/// What a program says, whichever call brings it.
#[derive(Debug)]
pub(crate) enum Piece {
    Started,
    Stdout(Bytes),
    Stderr(Bytes),
    /// So many bytes are no longer held.
    Missing(u64),
    Exit(Box<Exit>),
}

impl From<Event> for Piece {
    fn from(event: Event) -> Self {
        match event {
            Event::Started { .. } => Self::Started,
            Event::Stdout(data) => Self::Stdout(data),
            Event::Stderr(data) => Self::Stderr(data),
            Event::Exit(exit) => Self::Exit(exit),
        }
    }
}

impl From<LogEvent> for Piece {
    fn from(event: LogEvent) -> Self {
        match event {
            LogEvent::Stdout { offset: _, data } => Self::Stdout(data),
            LogEvent::Stderr { offset: _, data } => Self::Stderr(data),
            LogEvent::Gap { from, to } => Self::Missing(to.saturating_sub(from)),
            LogEvent::Exit(exit) => Self::Exit(exit),
        }
    }
}

/// A program's call: what it says, and the ways to talk to it.
#[derive(Debug)]
pub(crate) struct Remote<S> {
    pieces: S,
    stdin: Option<StdinWriter>,
    signaller: Signaller,
    resizer: Resizer,
}

impl Remote<ExecStream> {
    pub(crate) fn exec(mut stream: ExecStream) -> Self {
        Self {
            stdin: stream.take_stdin(),
            signaller: stream.signaller(),
            resizer: stream.resizer(),
            pieces: stream,
        }
    }

    /// Waits until it runs, and gives its id.
    pub(crate) async fn started(&mut self) -> Result<u64, Fault> {
        match self.pieces.next().await {
            Some(Ok(Event::Started { id, pid: _ })) => Ok(id),
            Some(Err(error)) => Err(error.into()),
            Some(Ok(Event::Stdout(_) | Event::Stderr(_) | Event::Exit(_))) | None => Err(no_exit()),
        }
    }
}

impl Remote<AttachStream> {
    pub(crate) fn attach(mut stream: AttachStream) -> Self {
        Self {
            stdin: stream.take_stdin(),
            signaller: stream.signaller(),
            resizer: stream.resizer(),
            pieces: stream,
        }
    }
}

/// A program that has ended, and what it said if that was kept.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) exit: Exit,
    pub(crate) stdout: Kept,
    pub(crate) stderr: Kept,
}

/// Output for `--json`.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub(crate) bytes: Vec<u8>,
    pub(crate) cut: bool,
}

impl Kept {
    pub(crate) fn push(&mut self, data: &[u8]) {
        let room = KEPT.saturating_sub(self.bytes.len());
        let fits = data.get(..room).unwrap_or(data);
        self.cut |= fits.len() < data.len();
        self.bytes.extend_from_slice(fits);
    }
}

/// How an interactive verb came to its end.
#[derive(Debug)]
pub(crate) enum Left {
    Ended(Box<Done>),
    /// The keys were typed.
    Detached,
    /// This process got a signal.
    Signal(u8),
}

enum Never {}

impl<S, E> Remote<S>
where
    S: Stream<Item = Result<E, Error>> + Unpin,
    E: Into<Piece>,
{
    /// Passes everything on until the program has ended, signals too.
    pub(crate) async fn relay(self, signals: &mut Signals, out: Out) -> Result<Done, Fault> {
        tokio::select! {
            done = output(self.pieces, out) => done,
            never = input(self.stdin) => match never {},
            never = forward(signals, self.signaller) => match never {},
        }
    }

    /// The same without a way to talk to the program: a signal ends this verb.
    pub(crate) async fn listen(self, signals: &mut Signals, out: Out) -> Result<Done, Fault> {
        tokio::select! {
            done = output(self.pieces, out) => done,
            number = signals.next() => Err(Fault::Signal(number)),
        }
    }

    /// Shows a program on a terminal that nothing is typed for; sizes and signals go to it.
    pub(crate) async fn show(self, signals: &mut Signals, out: Out) -> Result<Done, Fault> {
        tokio::select! {
            done = output(self.pieces, out) => done,
            never = sizes(&self.resizer, || ()) => match never? {},
            never = forward(signals, self.signaller) => match never {},
        }
    }

    /// Puts the local terminal before the program until it has ended, the keys are typed, or a signal comes. On every
    /// way out the terminal is as it was.
    pub(crate) async fn interact(self, keys: Keys, signals: &mut Signals, out: Out) -> Result<Left, Fault> {
        let raw = Raw::enter()?;
        // Dropped after the call: whoever leaves does not end the program's input.
        let mut stdin = self.stdin;
        let left = tokio::select! {
            done = output(self.pieces, out) => done.map(|done| Left::Ended(Box::new(done))),
            () = typed(stdin.as_mut(), keys) => Ok(Left::Detached),
            number = signals.next() => Ok(Left::Signal(number)),
            never = sizes(&self.resizer, || raw.again()) => match never? {},
        };
        drop(raw);
        left
    }
}

/// Ends only by being dropped, as do [`forward`] and [`sizes`]: it is the program's end that ends a call.
async fn input(stdin: Option<StdinWriter>) -> Never {
    if let Some(mut stdin) = stdin {
        let mut local = tokio::io::stdin();
        let mut piece = vec![0; PIECE];
        // A stdin that cannot be read has ended, as for any program.
        while let Ok(length @ 1..) = local.read(&mut piece).await {
            let data = piece.get(..length).unwrap_or_default().to_vec();
            if stdin.write(data).await.is_err() {
                break;
            }
        }
    }
    std::future::pending().await
}

/// Passes on what is typed until the keys that leave are.
async fn typed(stdin: Option<&mut StdinWriter>, mut keys: Keys) {
    if let Some(stdin) = stdin {
        let mut local = tokio::io::stdin();
        let mut piece = vec![0; PIECE];
        while let Ok(length @ 1..) = local.read(&mut piece).await {
            let typed = keys.typed(piece.get(..length).unwrap_or_default());
            let wrote = stdin.write(typed.pass).await;
            if typed.leave {
                return;
            }
            if wrote.is_err() {
                break;
            }
        }
    }
    std::future::pending().await
}

async fn forward(signals: &mut Signals, signaller: Signaller) -> Never {
    loop {
        let number = signals.next().await;
        signaller.signal(number.into()).await;
    }
}

/// Tells the program of each new size. `resumed` runs when this process was stopped and goes on.
async fn sizes(resizer: &Resizer, resumed: impl Fn()) -> Result<Never, Fault> {
    let catch = |kind| signal(kind).map_err(|error| Fault::io("signals", error));
    let mut changed = catch(SignalKind::window_change())?;
    // SIGCONT.
    let mut resume = catch(SignalKind::from_raw(18))?;
    // It may have changed since the program was started.
    let mut last = None;
    loop {
        let size = crate::terminal::size();
        if last.replace(size) != Some(size) {
            resizer.resize(size.0, size.1).await;
        }
        tokio::select! {
            _ = changed.recv() => {}
            _ = resume.recv() => {
                resumed();
                last = None;
            }
        }
    }
}

async fn output<E: Into<Piece>>(
    pieces: impl Stream<Item = Result<E, Error>>,
    out: Out,
) -> Result<Done, Fault> {
    let mut pieces = pin!(pieces);
    let (mut stdout, mut stderr) = (Kept::default(), Kept::default());
    let (mut to_stdout, mut to_stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some(piece) = pieces.next().await {
        match piece?.into() {
            Piece::Started => {}
            Piece::Stdout(data) if out.json => stdout.push(&data),
            Piece::Stderr(data) if out.json => stderr.push(&data),
            Piece::Stdout(data) => write(&mut to_stdout, &data)
                .await
                .map_err(|error| Fault::io("stdout", error))?,
            // A command goes on when nobody reads its complaints.
            Piece::Stderr(data) => drop(write(&mut to_stderr, &data).await),
            Piece::Missing(bytes) => missing(bytes),
            Piece::Exit(exit) => {
                return Ok(Done {
                    exit: *exit,
                    stdout,
                    stderr,
                });
            }
        }
    }
    Err(no_exit())
}

/// Tells of output that the guest no longer holds.
pub(crate) fn missing(bytes: u64) {
    print::stderr(&format!("sandboxctl: {bytes} bytes of output are no longer held"));
}

pub(crate) fn no_exit() -> Fault {
    Fault::Io(
        "exec",
        io::Error::other("the call ended without the command's exit"),
    )
}

pub(crate) async fn write(to: &mut (impl AsyncWrite + Unpin), data: &[u8]) -> io::Result<()> {
    to.write_all(data).await?;
    to.flush().await
}
