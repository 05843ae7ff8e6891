//! An engine for tests: machines that are entries of a table, whose next steps fail or hang as the test says.

use std::{
    collections::BTreeMap,
    future::pending,
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use prost::Message as _;
use sandbox_protocol::v1;
use tokio::{
    net::UnixStream,
    sync::{Notify, watch},
};

use crate::{
    engine::{
        BoxFuture, Capture, Captured, Engine, EngineError, ExitReport, Facts, Found, Identity, Machine,
        Place, Port, PortName, Pulse, Purpose, Tap,
    },
    image::Image,
    link::fake::{greet, reply, status},
    names::SlotNumber,
    tasks,
    telemetry::GuestText,
    words::{Accel, EngineKind},
};

/// What can be told to go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Op {
    Boot,
    Clone,
    /// The agent's port; hanging, it is open and nobody answers.
    Hello,
    /// The first call on the link.
    Call,
    Kill,
    Reap,
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Fail,
    Hang,
    Panic,
}

/// The engine; clones are the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fake(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    script: Mutex<BTreeMap<Op, Act>>,
    begun: Mutex<BTreeMap<Op, u32>>,
    /// Something was begun.
    news: Notify,
    /// Machines that live; the value turns true when one ends by itself.
    living: Mutex<BTreeMap<SlotNumber, watch::Sender<bool>>>,
    numbers: AtomicU64,
    /// What guests say of their doors; none: they are no guests that could.
    doors: Mutex<Option<Option<v1::DoorsSaid>>>,
}

impl Fake {
    /// From now on this operation goes wrong, or goes well again.
    pub(crate) fn set(&self, op: Op, act: Option<Act>) {
        let mut script = self.0.script.lock().unwrap();
        match act {
            Some(act) => drop(script.insert(op, act)),
            None => drop(script.remove(&op)),
        }
    }

    /// From now on guests come to their doors by a connection of their own, and tell this of them when they are asked;
    /// `None`: nothing, as an agent that does not know the question.
    pub(crate) fn guests_say(&self, said: Option<v1::DoorsSaid>) {
        *self.0.doors.lock().unwrap() = Some(said);
    }

    /// How often an operation was begun.
    pub(crate) fn begun(&self, op: Op) -> u32 {
        self.0.begun.lock().unwrap().get(&op).copied().unwrap_or(0)
    }

    /// Waits until an operation was begun this often.
    pub(crate) async fn until_begun(&self, op: Op, times: u32) {
        loop {
            let news = self.0.news.notified();
            if self.begun(op) >= times {
                return;
            }
            news.await;
        }
    }

    /// Slots in which something lives.
    pub(crate) fn living(&self) -> Vec<SlotNumber> {
        self.0.living.lock().unwrap().keys().copied().collect()
    }

    /// The machine in this slot ends by itself; what it leaves is still there.
    pub(crate) fn die(&self, slot: SlotNumber) {
        self.0.living.lock().unwrap()[&slot].send_replace(true);
    }

    async fn begin(&self, op: Op) -> Result<(), EngineError> {
        *self.0.begun.lock().unwrap().entry(op).or_default() += 1;
        self.0.news.notify_waiters();
        let act = self.0.script.lock().unwrap().get(&op).copied();
        match act {
            None => Ok(()),
            Some(Act::Fail) => Err(EngineError::Scripted("fail")),
            Some(Act::Hang) => pending().await,
            Some(Act::Panic) => panic!("as scripted"),
        }
    }

    async fn make(&self, op: Op, place: Place) -> Result<Box<dyn Machine>, EngineError> {
        self.begin(op).await?;
        let (life, ended) = watch::channel(false);
        let mut living = self.0.living.lock().unwrap();
        if living.contains_key(&place.slot) {
            return Err(EngineError::SlotTaken { slot: place.slot });
        }
        living.insert(place.slot, life);
        Ok(Box::new(FakeMachine {
            engine: self.clone(),
            slot: place.slot,
            number: self.0.numbers.fetch_add(1, Ordering::Relaxed) + 1,
            ended,
        }))
    }

    async fn end(&self, op: Op, slot: SlotNumber) -> Result<(), EngineError> {
        self.begin(op).await?;
        if let Some(life) = self.0.living.lock().unwrap().remove(&slot) {
            life.send_replace(true);
        }
        Ok(())
    }
}

#[derive(Debug)]
struct FakeMachine {
    engine: Fake,
    slot: SlotNumber,
    number: u64,
    ended: watch::Receiver<bool>,
}

impl FakeMachine {
    async fn open(&self) -> Result<Port, EngineError> {
        match self.engine.begin(Op::Hello).now_or_hung().await? {
            Going::On => {}
            Going::Hung => return Ok(Port::Stream(mute())),
        }
        match self.engine.begin(Op::Call).now_or_hung().await? {
            Going::On => Ok(match self.engine.0.doors.lock().unwrap().clone() {
                Some(said) => Port::Stream(renewing(said)),
                None => Port::InProcess,
            }),
            Going::Hung => Ok(Port::Stream(silent())),
        }
    }
}

enum Going {
    On,
    Hung,
}

/// Turns an operation that hangs into news of that.
trait NowOrHung: Future<Output = Result<(), EngineError>> + Sized {
    async fn now_or_hung(self) -> Result<Going, EngineError> {
        match futures_util::FutureExt::now_or_never(self) {
            Some(done) => done.map(|()| Going::On),
            None => Ok(Going::Hung),
        }
    }
}

impl<F: Future<Output = Result<(), EngineError>>> NowOrHung for F {}

/// A port on which nobody answers.
fn mute() -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // Ends with the other end.
    drop(tasks::spawn("mute-guest", async move {
        let mut theirs = theirs;
        drop(tokio::io::copy(&mut theirs, &mut tokio::io::sink()).await);
    }));
    ours
}

/// A guest that says HELLO and then takes calls without answering any.
fn silent() -> UnixStream {
    let (ours, guest) = piped();
    drop(tasks::spawn("silent-guest", async move {
        let Ok(mut connection) = h2::server::handshake(greet(guest).await).await else {
            return;
        };
        let mut held = Vec::new();
        while let Some(Ok(call)) = connection.accept().await {
            held.push(call);
        }
    }));
    ours
}

/// A port and its far end, as the far end's side of a link is to have it.
fn piped() -> (UnixStream, tokio::io::DuplexStream) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (mut pipe, guest) = tokio::io::duplex(64 * 1024);
    // Ends with either end of the port.
    drop(tasks::spawn("guest-pipe", async move {
        drop(tokio::io::copy_bidirectional(&mut theirs, &mut pipe).await);
    }));
    (ours, guest)
}

/// A guest whose every answer is that it was renewed, and what its doors said.
fn renewing(doors: Option<v1::DoorsSaid>) -> UnixStream {
    let (ours, guest) = piped();
    let answer = v1::ControlRenewReply {
        generation: 1,
        guest_time: None,
        doors,
    }
    .encode_to_vec();
    drop(tasks::spawn("renewing-guest", async move {
        let mut connection = h2::server::handshake(greet(guest).await).await.unwrap();
        while let Some(Ok((_call, mut respond))) = connection.accept().await {
            let mut sent = respond.send_response(reply(), false).unwrap();
            let mut message = vec![0];
            message.extend(u32::try_from(answer.len()).unwrap().to_be_bytes());
            message.extend(&answer);
            sent.send_data(message.into(), false).unwrap();
            sent.send_trailers(status("0")).unwrap();
        }
    }));
    ours
}

/// A guest that has connected for its doors, and whose programs open none.
fn connecting() -> UnixStream {
    let (ours, guest) = piped();
    drop(tasks::spawn("connecting-guest", async move {
        let opened = h2::client::handshake(greet(guest).await).await;
        let (_open, connection) = opened.unwrap();
        drop(connection.await);
    }));
    ours
}

impl Machine for FakeMachine {
    fn identity(&self) -> Identity {
        Identity {
            pid: None,
            started: self.number,
        }
    }

    fn connect(&self, port: PortName) -> BoxFuture<'_, Result<Port, EngineError>> {
        match port {
            PortName::Agent => Box::pin(self.open()),
            PortName::Egress => {
                let connects = self.engine.0.doors.lock().unwrap().is_some();
                Box::pin(std::future::ready(Ok(if connects {
                    Port::Stream(connecting())
                } else {
                    // It has no programs that could come to its doors.
                    Port::InProcess
                })))
            }
        }
    }

    fn exited(&self) -> BoxFuture<'_, ExitReport> {
        Box::pin(async {
            let mut ended = self.ended.clone();
            // A sender that is gone has ended it.
            drop(ended.wait_for(|ended| *ended).await);
            ExitReport {
                status: "exit status 1".into(),
                console: GuestText::default(),
            }
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
        Box::pin(std::future::ready(Ok(Captured {
            ram: None,
            state: None,
        })))
    }

    fn console(&self) -> GuestText {
        GuestText::default()
    }

    fn kill(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.engine.end(Op::Kill, self.slot))
    }
}

impl Engine for Fake {
    fn kind(&self) -> EngineKind {
        EngineKind::Stub
    }

    fn accel(&self) -> Accel {
        Accel::None
    }

    fn accel_why(&self) -> String {
        "a fake".into()
    }

    fn version(&self) -> String {
        "fake".into()
    }

    fn facts(&self) -> Facts {
        Facts {
            engine: self.kind(),
            accel: self.accel(),
            version: self.version(),
            machine: "none".into(),
            cpu: "none".into(),
        }
    }

    fn boot<'a>(
        &'a self,
        _image: &'a Image,
        place: Place,
        _tap: Option<Tap>,
        _purpose: Purpose,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(self.make(Op::Boot, place))
    }

    fn clone_of<'a>(
        &'a self,
        _capture: &'a Capture,
        place: Place,
        _tap: Option<Tap>,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(self.make(Op::Clone, place))
    }

    fn attach(
        &self,
        _place: Place,
        _identity: Identity,
    ) -> BoxFuture<'_, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(std::future::ready(Err(EngineError::Gone {
            why: "fakes outlive no engine".into(),
        })))
    }

    fn inventory(&self) -> io::Result<Vec<Found>> {
        Ok(Vec::new())
    }

    fn reap(&self, slot: SlotNumber) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.end(Op::Reap, slot))
    }

    fn warm_up(&self, _capture: &Capture) {}

    fn cool(&self, _capture: &Capture) {}

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
