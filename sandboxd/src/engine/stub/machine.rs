//! Machines of the stub.

use std::{
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use rustix::fs::inotify;
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::faults::Fate;
use crate::{
    engine::{
        BoxFuture, Captured, EngineError, ExitReport, Identity, Machine, Port, PortName, Pulse,
        slotdir::SlotDir, spawn::Housed,
    },
    sys,
    telemetry::GuestText,
};

/// For a silkd to make its sockets; it needs milliseconds.
const OPEN: Duration = Duration::from_secs(20);
/// Between a socket's name and its listener.
const LISTENING: Duration = Duration::from_millis(1);

/// What the stub writes as a capture: nothing, since a clone of it is a new process.
const NOTHING: Captured = Captured {
    ram: None,
    state: None,
};

/// A port that nobody answers on: the other end is kept open. The one before it closes.
#[derive(Debug, Default)]
struct Mute(Mutex<[Option<UnixStream>; 2]>);

impl Mute {
    fn connect(&self, port: PortName) -> Result<Port, EngineError> {
        let (ours, theirs) =
            UnixStream::pair().map_err(|error| EngineError::host("make a mute port", error))?;
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [agent, egress] = &mut *held;
        match port {
            PortName::Agent => *agent = Some(theirs),
            PortName::Egress => *egress = Some(theirs),
        }
        Ok(Port::Stream(ours))
    }
}

/// A silkd process.
#[derive(Debug)]
pub(super) struct ServedProcess {
    housed: Housed,
    mute: Option<Mute>,
    /// The connection that showed that the agent's port is there.
    first: Mutex<Option<UnixStream>>,
}

impl ServedProcess {
    pub(super) fn new(housed: Housed, mute: bool, first: Option<UnixStream>) -> Self {
        Self {
            housed,
            mute: mute.then(Mute::default),
            first: Mutex::new(first),
        }
    }

    async fn connect(&self, port: PortName) -> Result<Port, EngineError> {
        if let Some(mute) = &self.mute {
            return mute.connect(port);
        }
        if port == PortName::Agent {
            let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let (Some(stream), None) = (first, self.housed.ended()) {
                return Ok(Port::Stream(stream));
            }
        }
        let dir = self.housed.dir();
        let stream = tokio::select! {
            stream = open(&dir, port) => stream?,
            report = self.housed.exited() => return Err(EngineError::Gone { why: report.to_string() }),
        };
        Ok(Port::Stream(stream))
    }
}

/// Opens a port of a silkd that may be starting.
pub(super) async fn open(dir: &SlotDir, port: PortName) -> Result<UnixStream, EngineError> {
    let opened = timeout(OPEN, Box::pin(wait_and_connect(dir, port.socket()))).await;
    match opened {
        Ok(opened) => {
            opened.map_err(|error| EngineError::host(format!("open port {}", port.as_str()), error))
        }
        Err(_elapsed) => Err(EngineError::Late {
            what: "opening a port of silkd",
            limit: OPEN,
        }),
    }
}

async fn wait_and_connect(dir: &SlotDir, name: &str) -> io::Result<UnixStream> {
    let mut watch = None;
    loop {
        match (dir.connect(name).await, &watch) {
            (Ok(stream), _) => return Ok(stream),
            // Looked for once more behind it, so that no name comes unseen. A user has few watches (128 where the kernel's
            // default stands), and each silkd has one: with none left the name is looked for again and again.
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => match names_in(dir) {
                Ok(made) => watch = Some(made),
                Err(_none_left) => sleep(LISTENING).await,
            },
            (Err(error), Some(watch)) if error.kind() == io::ErrorKind::NotFound => changed(watch).await?,
            // Its name is there, its listener is not yet, and no event tells of that: `bind` and `listen` are two calls.
            (Err(error), _) if error.kind() == io::ErrorKind::ConnectionRefused => sleep(LISTENING).await,
            // More have come than it has taken yet, and no event tells that there is room again.
            (Err(error), _) if error.kind() == io::ErrorKind::WouldBlock => sleep(LISTENING).await,
            (Err(error), _) => return Err(error),
        }
    }
}

/// Tells of new names in the folder.
fn names_in(dir: &SlotDir) -> io::Result<AsyncFd<OwnedFd>> {
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    let news = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&watch, dir.path(), news)?;
    sys::watch(watch, Interest::READABLE)
}

/// Waits for a new name and forgets about it.
async fn changed(watch: &AsyncFd<OwnedFd>) -> io::Result<()> {
    // One event with the longest name fits.
    let mut events = [0; 512];
    watch
        .async_io(Interest::READABLE, |watch| {
            Ok(rustix::io::read(watch, &mut events)?)
        })
        .await
        .map(|_bytes| ())
}

impl Machine for ServedProcess {
    fn identity(&self) -> Identity {
        self.housed.identity()
    }

    fn connect(&self, port: PortName) -> BoxFuture<'_, Result<Port, EngineError>> {
        Box::pin(self.connect(port))
    }

    fn exited(&self) -> BoxFuture<'_, ExitReport> {
        Box::pin(self.housed.exited())
    }

    fn pulse(&self) -> Pulse {
        self.housed.pulse()
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn capture<'a>(&'a self, _into: &'a Path) -> BoxFuture<'a, Result<Captured, EngineError>> {
        Box::pin(std::future::ready(Ok(NOTHING)))
    }

    fn console(&self) -> GuestText {
        self.housed.said()
    }

    fn kill(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.housed.kill())
    }
}

/// No guest at all.
#[derive(Debug)]
pub(super) struct InProcess {
    ended: CancellationToken,
    /// Held while it lives.
    tap: Mutex<Option<OwnedFd>>,
    mute: Option<Mute>,
    status: &'static str,
}

impl InProcess {
    pub(super) fn new(fate: Fate, tap: Option<OwnedFd>) -> Self {
        let ended = CancellationToken::new();
        if fate.die {
            ended.cancel();
        }
        Self {
            ended,
            tap: Mutex::new(tap.filter(|_| !fate.die)),
            mute: fate.mute.then(Mute::default),
            status: if fate.die {
                "died by the fault script"
            } else {
                "killed"
            },
        }
    }

    fn report(&self) -> ExitReport {
        ExitReport {
            status: self.status.to_owned(),
            console: GuestText::default(),
        }
    }
}

impl Machine for InProcess {
    fn identity(&self) -> Identity {
        Identity {
            pid: None,
            started: 0,
        }
    }

    fn connect(&self, port: PortName) -> BoxFuture<'_, Result<Port, EngineError>> {
        let connected = match &self.mute {
            _ if self.ended.is_cancelled() => Err(EngineError::Gone {
                why: self.status.to_owned(),
            }),
            Some(mute) => mute.connect(port),
            None => Ok(Port::InProcess),
        };
        Box::pin(std::future::ready(connected))
    }

    fn exited(&self) -> BoxFuture<'_, ExitReport> {
        Box::pin(async {
            self.ended.cancelled().await;
            self.report()
        })
    }

    fn pulse(&self) -> Pulse {
        Pulse::default()
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn capture<'a>(&'a self, _into: &'a Path) -> BoxFuture<'a, Result<Captured, EngineError>> {
        Box::pin(std::future::ready(Ok(NOTHING)))
    }

    fn console(&self) -> GuestText {
        GuestText::default()
    }

    fn kill(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        self.ended.cancel();
        drop(self.tap.lock().unwrap_or_else(PoisonError::into_inner).take());
        Box::pin(std::future::ready(Ok(())))
    }
}
