//! A machine that is a QEMU process.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
    sync::Arc,
};

use tokio::sync::watch;

use super::{
    qmp::{Qmp, Seen},
    wire::{AddFd, Cont, RemoveFd, SaveDevices, Stop},
};
use crate::{
    engine::{
        BoxFuture, Captured, EngineError, ExitReport, Identity, Machine, Port, PortName, Pulse,
        capture::{RAM, STATE},
        ram,
        spawn::Housed,
    },
    image, tasks,
    telemetry::GuestText,
};

/// One VM.
#[derive(Debug)]
pub(super) struct QemuMachine {
    housed: Housed,
    qmp: Qmp,
    /// Its memory, where it was booted to be captured.
    memory: Option<Arc<OwnedFd>>,
}

impl QemuMachine {
    pub(super) fn new(housed: Housed, qmp: Qmp, memory: Option<OwnedFd>) -> Self {
        Self {
            housed,
            qmp,
            memory: memory.map(Arc::new),
        }
    }

    async fn exited(&self) -> ExitReport {
        let why = tokio::select! {
            report = self.housed.exited() => return report,
            why = dead(self.qmp.seen()) => why,
        };
        // It will never run again, and its process would stay for ever.
        if let Err(error) = self.housed.strike() {
            tracing::warn!(%error, "a dead machine's process cannot be killed");
        }
        let report = self.housed.exited().await;
        ExitReport {
            status: why.to_owned(),
            ..report
        }
    }

    async fn capture(&self, into: &Path) -> Result<Captured, EngineError> {
        let memory = self.memory.clone().ok_or(EngineError::Unsupported(
            "to capture a machine that was not booted as a template",
        ))?;
        let path = into.join(STATE);
        let state = create(&path)?;
        self.qmp.ask(Stop {}).await?;
        let what = AddFd { what: "device state" };
        let set = self.qmp.ask_with(what, Some(state.into())).await?.set;
        let save = SaveDevices {
            file: format!("/dev/fdset/{set}"),
            live: false,
        };
        let saved = self.qmp.ask(save).await;
        self.qmp.ask(RemoveFd { set }).await?;
        saved?;
        let used = create(&into.join(RAM))?;
        let copied = tasks::blocking("capture memory", move || {
            let from = File::from(memory.as_fd().try_clone_to_owned()?);
            let length = from.metadata()?.len();
            used.set_len(length)?;
            let ram = ram::copy_used(&from, &used, length)?;
            let state = image::sha256(&File::open(path)?)?;
            io::Result::Ok(Captured {
                ram: Some(ram),
                state: Some(state),
            })
        });
        copied
            .await
            .map_err(|_panicked| EngineError::Stopped)?
            .map_err(|error| EngineError::host("write the capture", error))
    }
}

fn create(path: &Path) -> Result<File, EngineError> {
    let mut options = OpenOptions::new();
    // Not readable through this: QEMU takes a descriptor only if it is open just as it would open the file.
    options.write(true).create_new(true).mode(0o600);
    options
        .open(path)
        .map_err(|error| EngineError::host(format!("make {}", path.display()), error))
}

/// Resolves once the connection has learned that the guest is dead.
pub(super) async fn dead(mut seen: watch::Receiver<Seen>) -> &'static str {
    let why = match seen.wait_for(|seen| seen.dead.is_some()).await {
        Ok(seen) => seen.dead,
        Err(_engine_stopped) => None,
    };
    match why {
        Some(why) => why,
        None => std::future::pending().await,
    }
}

impl Machine for QemuMachine {
    fn identity(&self) -> Identity {
        self.housed.identity()
    }

    fn connect(&self, port: PortName) -> BoxFuture<'_, Result<Port, EngineError>> {
        Box::pin(async move { self.housed.connect(port).await.map(Port::Stream) })
    }

    fn exited(&self) -> BoxFuture<'_, ExitReport> {
        Box::pin(self.exited())
    }

    fn pulse(&self) -> Pulse {
        self.housed.pulse()
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { self.qmp.ask(Stop {}).await.map(|_done| ()) })
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { self.qmp.ask(Cont {}).await.map(|_done| ()) })
    }

    fn capture<'a>(&'a self, into: &'a Path) -> BoxFuture<'a, Result<Captured, EngineError>> {
        Box::pin(self.capture(into))
    }

    fn console(&self) -> GuestText {
        self.housed.said()
    }

    fn kill(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.housed.kill())
    }
}
