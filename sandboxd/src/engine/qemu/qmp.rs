//! The connection to one QEMU: one task that speaks, and a handle that asks.
//!
//! Events arrive between replies and are noted; replies are matched by id. Each command has a deadline. A connection
//! that is lost, or on which a command came late, is given up and made anew for the next command: whether the machine
//! lives is the pidfd's to say.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::wire::{self, Capabilities, Command, Event, LINE_MOST, Line, Migration, QueryStatus, Status};
use crate::{engine::EngineError, engine::slotdir::SlotDir, tasks, work};

/// For a command to be answered. QEMU answers in well under a millisecond unless its main loop hangs or the host is
/// overloaded.
pub(super) const COMMAND: Duration = Duration::from_secs(10);
/// Commands that wait for the connection: one is spoken, and few callers share a machine.
const WAITING: usize = 4;
/// Name of its socket in the run directory.
pub(super) const SOCKET: &str = "qmp";

/// What was seen on the connection so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// The last news of a load of state.
    pub(super) migration: Option<Migration>,
    /// Why the guest will never run again.
    pub(super) dead: Option<&'static str>,
}

/// Asks one QEMU. The connection closes with the last handle.
#[derive(Debug, Clone)]
pub(super) struct Qmp {
    calls: mpsc::Sender<Call>,
    seen: watch::Receiver<Seen>,
}

#[derive(Debug)]
struct Call {
    name: &'static str,
    encode: Encode,
    fd: Option<OwnedFd>,
    reply: oneshot::Sender<Result<serde_json::Value, EngineError>>,
}

/// The line of a command, once its id is known.
struct Encode(Box<dyn Fn(u64) -> serde_json::Result<Vec<u8>> + Send + Sync>);

impl std::fmt::Debug for Encode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Encode")
    }
}

impl Qmp {
    /// Connects, and gives the handle with QEMU's version. A QEMU that is still starting is waited for.
    pub(super) async fn connect(
        dir: Arc<SlotDir>,
        group: &tasks::Group,
    ) -> Result<(Self, String), EngineError> {
        let (link, version) = within("qmp greeting", Link::open(&dir)).await?;
        Ok((Self::run(dir, group, Some(link)), version))
    }

    /// A handle that connects with its first command.
    pub(super) fn later(dir: Arc<SlotDir>, group: &tasks::Group) -> Self {
        Self::run(dir, group, None)
    }

    fn run(dir: Arc<SlotDir>, group: &tasks::Group, link: Option<Link>) -> Self {
        let (calls, inbox) = mpsc::channel(WAITING);
        let (tell, seen) = watch::channel(Seen::default());
        let speaker = Speaker {
            dir,
            link,
            tell,
            last_id: 0,
        };
        let stopping = group.clone();
        group.spawn("qmp", async move {
            tokio::select! {
                () = stopping.stopping() => {}
                () = speaker.speak(inbox) => {}
            }
        });
        Self { calls, seen }
    }

    /// Asks and waits for the answer. Cancelled, the command is done all the same.
    pub(super) async fn ask<C: Command + 'static>(&self, command: C) -> Result<C::Reply, EngineError> {
        self.ask_with(command, None).await
    }

    /// Asks, handing over a descriptor.
    pub(super) async fn ask_with<C: Command + 'static>(
        &self,
        command: C,
        fd: Option<OwnedFd>,
    ) -> Result<C::Reply, EngineError> {
        work::count(work::Kind::QmpCommands, 1);
        let (reply, answer) = oneshot::channel();
        let call = Call {
            name: C::NAME,
            encode: Encode(Box::new(move |id| wire::encode(id, &command))),
            fd,
            reply,
        };
        self.calls
            .send(call)
            .await
            .map_err(|_closed| EngineError::Stopped)?;
        let value = answer.await.map_err(|_dropped| EngineError::Stopped)??;
        serde_json::from_value(value)
            .map_err(|error| EngineError::host(format!("read the answer to `{}`", C::NAME), error))
    }

    /// News of the connection.
    pub(super) fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.clone()
    }
}

async fn within<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, EngineError> {
    timeout(COMMAND, work)
        .await
        .unwrap_or(Err(EngineError::Late { what, limit: COMMAND }))
}

/// The task: owns the connection.
#[derive(Debug)]
struct Speaker {
    dir: Arc<SlotDir>,
    link: Option<Link>,
    tell: watch::Sender<Seen>,
    last_id: u64,
}

impl Speaker {
    /// Until the last handle is gone.
    async fn speak(mut self, mut inbox: mpsc::Receiver<Call>) {
        loop {
            tokio::select! {
                biased;
                call = inbox.recv() => match call {
                    Some(call) => {
                        let answer = within(call.name, self.serve(call.name, &call.encode, call.fd)).await;
                        if !matches!(answer, Ok(_) | Err(EngineError::Refused { .. })) {
                            self.link = None;
                        }
                        // The asker may have left.
                        drop(call.reply.send(answer));
                    }
                    None => return,
                },
                line = next(&mut self.link) => match line {
                    Ok(line) => self.hear(line).await,
                    Err(error) => {
                        tracing::debug!(%error, "lost a QMP connection");
                        self.link = None;
                    }
                },
            }
        }
    }

    async fn serve(
        &mut self,
        name: &'static str,
        encode: &Encode,
        fd: Option<OwnedFd>,
    ) -> Result<serde_json::Value, EngineError> {
        let mut stopped = false;
        if self.link.is_none() {
            let (link, _version) = Link::open(&self.dir).await?;
            self.link = Some(link);
            // What happened meanwhile was told to nobody.
            stopped = true;
        }
        self.last_id += 1;
        let result = exchange(&mut self.link, self.last_id, encode, fd, &self.tell, &mut stopped).await;
        if stopped {
            self.ask_why().await;
        }
        result
            .map_err(|error| lost(name, error))?
            .map_err(|reason| EngineError::Refused {
                command: name,
                reason,
            })
    }

    /// A line outside any command.
    async fn hear(&mut self, line: Line) {
        let mut stopped = false;
        note(&line, &self.tell, &mut stopped);
        if stopped {
            self.ask_why().await;
        }
    }

    /// The processors stopped: for good?
    async fn ask_why(&mut self) {
        self.last_id += 1;
        let encode = Encode(Box::new(|id| wire::encode(id, &QueryStatus {})));
        let mut again = false;
        let asked = exchange(
            &mut self.link,
            self.last_id,
            &encode,
            None,
            &self.tell,
            &mut again,
        );
        let status = match timeout(COMMAND, asked).await {
            Ok(Ok(Ok(value))) => serde_json::from_value::<Status>(value).ok(),
            // Nothing was learned; a machine that is gone is noticed by its pidfd.
            Ok(Ok(Err(_)) | Err(_)) | Err(_) => None,
        };
        if let Some(why) = status.and_then(|status| status.dead()) {
            self.tell.send_modify(|seen| seen.dead = Some(why));
        }
    }
}

fn lost(name: &str, error: io::Error) -> EngineError {
    EngineError::host(format!("ask QEMU `{name}`"), error)
}

/// Sends one command and reads up to its reply.
async fn exchange(
    link: &mut Option<Link>,
    id: u64,
    encode: &Encode,
    fd: Option<OwnedFd>,
    tell: &watch::Sender<Seen>,
    stopped: &mut bool,
) -> io::Result<Result<serde_json::Value, String>> {
    let link = link.as_mut().ok_or(io::ErrorKind::NotConnected)?;
    let line = (encode.0)(id)?;
    link.send(&line, fd).await?;
    loop {
        match link.next().await? {
            Line::Reply { id: of, result } if of == Some(id) => return Ok(result),
            // A reply to a command that was given up.
            Line::Reply { .. } => {}
            other @ (Line::Event(_) | Line::Greeting(_)) => note(&other, tell, stopped),
        }
    }
}

fn note(line: &Line, tell: &watch::Sender<Seen>, stopped: &mut bool) {
    match line {
        Line::Event(Event::Stopped) => *stopped = true,
        Line::Event(Event::Migration(to)) => tell.send_modify(|seen| seen.migration = Some(*to)),
        Line::Event(Event::Other) | Line::Greeting(_) | Line::Reply { .. } => {}
    }
}

/// The next line of a connection; without one, never. Cancel safe.
async fn next(link: &mut Option<Link>) -> io::Result<Line> {
    match link {
        Some(link) => link.next().await,
        None => std::future::pending().await,
    }
}

/// One connection.
#[derive(Debug)]
struct Link {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Link {
    /// Connects and gets through the greeting.
    async fn open(dir: &SlotDir) -> Result<(Self, String), EngineError> {
        let open = async {
            let mut link = Self {
                stream: dir.connect(SOCKET).await?,
                buffer: Vec::new(),
            };
            let version = loop {
                if let Line::Greeting(version) = link.next().await? {
                    break version;
                }
            };
            link.send(&wire::encode(0, &Capabilities {})?, None).await?;
            loop {
                match link.next().await? {
                    Line::Reply {
                        id: Some(0),
                        result: Ok(_),
                    } => return Ok((link, version)),
                    Line::Reply { result: Err(why), .. } => return Err(io::Error::other(why)),
                    Line::Reply { .. } | Line::Event(_) | Line::Greeting(_) => {}
                }
            }
        };
        open.await
            .map_err(|error| EngineError::host("connect to QMP", error))
    }

    /// Sends a line, with a descriptor on its first byte.
    async fn send(&mut self, line: &[u8], fd: Option<OwnedFd>) -> io::Result<()> {
        let mut sent = 0;
        if let Some(fd) = fd {
            let stream = &self.stream;
            sent = stream
                .async_io(Interest::WRITABLE, || {
                    let fds = [fd.as_fd()];
                    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    control.push(SendAncillaryMessage::ScmRights(&fds));
                    let parts = [io::IoSlice::new(line)];
                    Ok(rustix::net::sendmsg(
                        stream,
                        &parts,
                        &mut control,
                        SendFlags::NOSIGNAL,
                    )?)
                })
                .await?;
        }
        self.stream.write_all(line.get(sent..).unwrap_or_default()).await
    }

    /// The next line. Cancel safe: what was read stays in the buffer.
    async fn next(&mut self) -> io::Result<Line> {
        loop {
            while let Some(line) = wire::take_line(&mut self.buffer) {
                if !line.is_empty() {
                    return Line::parse(&line).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData));
                }
            }
            if self.buffer.len() > LINE_MOST {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
        }
    }
}
