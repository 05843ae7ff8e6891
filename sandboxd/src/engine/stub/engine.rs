//! The engine itself.

use super::{StubAgent, StubOptions};
use std::{io, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use super::faults::{Op, Script, Verdict};
use super::machine::{self, InProcess, ServedProcess};

use crate::engine::{
    BoxFuture, Capture, Engine, EngineError, Facts, Found, Identity, Machine, Place, PortName, Purpose, Tap,
    cgroup::Cgroups,
    slotdir::{self, SlotDir},
    spawn::{self, Housed, Spec},
};
use crate::{
    image::Image,
    names::{self, SlotNumber},
    words::{Accel, EngineKind},
};

/// For a silkd to end after SIGTERM: it ends its programs first (2 s), which a SIGKILL would leave behind.
const GRACE: Duration = Duration::from_secs(4);

/// Where a guest's programs find its doors. All guests are on this host, so each takes ports that are free, and tells its
/// programs which.
const DOORS: &str = "127.0.0.1:0,127.0.0.1:0";

/// No isolation.
#[derive(Debug)]
pub struct StubEngine {
    run_root: PathBuf,
    agent: StubAgent,
    script: Script,
    cgroups: Option<Arc<Cgroups>>,
}

impl StubEngine {
    /// An engine; nothing is started.
    #[must_use]
    pub fn new(options: StubOptions) -> Self {
        let cgroups = match &options.agent {
            StubAgent::Process(_) => Cgroups::find().map(Arc::new),
            StubAgent::InProcess => Err("no processes".to_owned()),
        };
        Self {
            run_root: options.run_root,
            agent: options.agent,
            script: Script::new(options.faults),
            cgroups: cgroups.ok(),
        }
    }

    async fn make(&self, op: Op, place: Place, tap: Option<Tap>) -> Result<Box<dyn Machine>, EngineError> {
        place.fits(tap.as_ref())?;
        let tap = tap.map(|Tap(queue)| queue);
        match self.script.operation(op) {
            Verdict::Go => {}
            Verdict::Fail => return Err(EngineError::Scripted("fail")),
            Verdict::Hang => std::future::pending().await,
        }
        let fate = self.script.machine();
        match &self.agent {
            StubAgent::InProcess => Ok(Box::new(InProcess::new(fate, tap))),
            StubAgent::Process(silkd) => {
                let (housed, first) = self.serve(silkd.clone(), place.slot, tap).await?;
                if fate.die {
                    housed.strike()?;
                }
                Ok(Box::new(ServedProcess::new(housed, fate.mute, Some(first))))
            }
        }
    }

    /// Starts a silkd and waits until its port can be opened; after an error nothing is left. It has the TAP of its lane
    /// as a VMM would, for its whole life and not in its programs, and nobody is behind it.
    async fn serve(
        &self,
        silkd: PathBuf,
        slot: SlotNumber,
        tap: Option<OwnedFd>,
    ) -> Result<(Housed, tokio::net::UnixStream), EngineError> {
        let created = SlotDir::create(&names::run_dir(&self.run_root, slot));
        let dir = created.map_err(|error| {
            if error.kind() == io::ErrorKind::AlreadyExists {
                EngineError::SlotTaken { slot }
            } else {
                EngineError::host("make a run directory", error)
            }
        })?;
        let dir = Arc::new(dir);
        let served = async {
            let spec = Spec {
                program: silkd,
                // Relative to its working directory, which is this one: however long its path is.
                args: vec![
                    "--serve".into(),
                    PortName::Agent.socket().into(),
                    "--doors".into(),
                    DOORS.into(),
                ],
                keep: tap.into_iter().collect(),
                account: None,
                file_limit: None,
                inside: true,
            };
            let nascent = spawn::start(Arc::clone(&dir), spec, self.cgroups.clone()).await?;
            let first = tokio::select! {
                first = machine::open(&dir, PortName::Agent) => first?,
                report = nascent.died() => return Err(EngineError::Died(report)),
            };
            Ok((nascent.settle(Some(GRACE))?, first))
        };
        match Box::pin(served).await {
            Ok(served) => Ok(served),
            Err(error) => {
                if let Err(left) = spawn::reap(dir, Some(GRACE)).await {
                    tracing::warn!(error = %left, "a machine that failed to start is not gone yet");
                }
                Err(error)
            }
        }
    }

    fn attach(&self, place: Place, identity: Identity) -> Result<Box<dyn Machine>, EngineError> {
        match &self.agent {
            StubAgent::InProcess => Err(EngineError::Gone {
                why: "it lived in the daemon's process".to_owned(),
            }),
            StubAgent::Process(_) => {
                let housed = Housed::attach(&self.run_root, place.slot, identity, Some(GRACE))?;
                Ok(Box::new(ServedProcess::new(housed, false, None)))
            }
        }
    }
}

impl Engine for StubEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Stub
    }

    fn accel(&self) -> Accel {
        Accel::None
    }

    fn accel_why(&self) -> String {
        "the stub engine runs no virtual machine and isolates nothing".to_owned()
    }

    fn version(&self) -> String {
        env!("CARGO_PKG_VERSION").to_owned()
    }

    fn facts(&self) -> Facts {
        Facts {
            engine: self.kind(),
            accel: self.accel(),
            version: self.version(),
            machine: "none".to_owned(),
            cpu: "none".to_owned(),
        }
    }

    fn boot<'a>(
        &'a self,
        _image: &'a Image,
        place: Place,
        tap: Option<Tap>,
        _purpose: Purpose,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(self.make(Op::Boot, place, tap))
    }

    fn clone_of<'a>(
        &'a self,
        capture: &'a Capture,
        place: Place,
        tap: Option<Tap>,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(async move {
            let fits = capture.fits(&self.facts());
            fits.map_err(|stale| EngineError::Capture(stale.into()))?;
            self.make(Op::Clone, place, tap).await
        })
    }

    fn attach(
        &self,
        place: Place,
        identity: Identity,
    ) -> BoxFuture<'_, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(async move { self.attach(place, identity) })
    }

    fn inventory(&self) -> io::Result<Vec<Found>> {
        match &self.agent {
            StubAgent::InProcess => Ok(Vec::new()),
            StubAgent::Process(_) => slotdir::inventory(&self.run_root),
        }
    }

    fn reap(&self, slot: SlotNumber) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async move {
            match &self.agent {
                StubAgent::InProcess => Ok(()),
                StubAgent::Process(_) => spawn::reap_slot(&self.run_root, slot, Some(GRACE)).await,
            }
        })
    }

    fn warm_up(&self, _capture: &Capture) {}

    fn cool(&self, _capture: &Capture) {}

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
