//! The engine itself: boot, clone, attach, reap.

use super::{QemuOptions, accel, args, jail};
use std::{
    io,
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use super::blanks::Blanks;
use super::host::{self, Host, Started};
use super::machine::QemuMachine;
use super::qmp::{Qmp, Seen};
use super::wire::{self, GetFd, MigrateIncoming, Migration, QueryMigrate};
use tokio::{sync::watch, time::timeout};

use crate::engine::{
    BoxFuture, Capture, Engine, EngineError, Facts, Found, Identity, Machine, Place, Purpose, Stale, Tap,
    cgroup::Cgroups,
    slotdir::{self, SlotDir},
    spawn::{self, Housed},
};
use crate::{
    image::Image,
    names::{self, SlotNumber},
    tasks,
    words::{Accel, EngineKind, Lane},
};

/// For device state to be loaded; it takes 5 ms.
const LOAD: Duration = Duration::from_secs(30);

/// Virtual machines by QEMU.
#[derive(Debug)]
pub struct QemuEngine {
    host: Arc<Host>,
    blanks: Blanks,
    keep: usize,
    facts: Facts,
    accel_why: String,
    jail: String,
}

impl QemuEngine {
    /// Looks at the host: ends blank processes of an earlier daemon, asks QEMU for its version and decides upon the
    /// accelerator. `proof` is the image with which `accel = auto` proves KVM, once per (host kernel, QEMU, image); without
    /// one it is TCG. Takes 50 ms, with a proof as long as a boot.
    ///
    /// # Errors
    /// [`EngineError`] if QEMU does not start, `/dev/kvm` is demanded and closed, or something of an earlier daemon cannot
    /// be ended.
    pub async fn open(options: QemuOptions, proof: Option<&Image>) -> Result<Self, EngineError> {
        let hidden = slotdir::hidden(&options.run_root);
        for path in hidden.map_err(|error| EngineError::host("list run directories", error))? {
            let dir =
                SlotDir::open(&path).map_err(|error| EngineError::host("open a run directory", error))?;
            Box::pin(spawn::reap(Arc::new(dir), None)).await?;
        }
        let cgroups = Cgroups::find().map(Arc::new);
        if let Err(why) = &cgroups {
            tracing::warn!(why, "machines stay in the daemon's control group");
        }
        let account = jail::account(&options.vm_user, Accel::Tcg);
        let jail = match &account {
            Ok(_) => format!("VMMs run as user `{}`", options.vm_user),
            Err(why) => format!("VMMs run as the daemon's own user: {why}"),
        };
        let jailed = account.is_ok();
        let kvm_account = jail::account(&options.vm_user, Accel::Kvm);
        let host = Host {
            program: options.program,
            run_root: options.run_root,
            cgroups: cgroups.ok(),
            account: account.ok(),
            no_kvm: kvm_account.as_ref().err().filter(|_| jailed).cloned(),
            kvm_account: kvm_account.ok(),
            group: tasks::Group::new(),
            counter: AtomicU64::new(0),
        };
        let version = Box::pin(host.inquire()).await?;
        let decided = accel::decide(options.accel, &host, &version, proof, &options.state_dir);
        let (accel, accel_why) = Box::pin(decided).await?;
        Ok(Self {
            facts: Facts {
                engine: EngineKind::Qemu,
                accel,
                version,
                machine: args::MACHINE.to_owned(),
                cpu: accel::cpu_fact(accel, &accel::cpuinfo()),
            },
            host: Arc::new(host),
            blanks: Blanks::default(),
            keep: options.blanks,
            accel_why,
            jail,
        })
    }

    /// As whom VMMs run, and why, as one sentence for an operator.
    #[must_use]
    pub fn jail(&self) -> &str {
        &self.jail
    }

    #[cfg(test)]
    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    #[cfg(test)]
    pub(super) fn ready_blanks(&self, capture: &Capture) -> usize {
        self.blanks.ready(capture)
    }

    fn run_dir(&self, slot: SlotNumber) -> PathBuf {
        names::run_dir(&self.host.run_root, slot)
    }

    fn ready(&self) -> Result<(), EngineError> {
        if self.host.group.is_stopping() {
            return Err(EngineError::Stopped);
        }
        Ok(())
    }

    async fn boot(
        &self,
        image: &Image,
        place: Place,
        tap: Option<Tap>,
        purpose: Purpose,
    ) -> Result<Box<dyn Machine>, EngineError> {
        self.ready()?;
        place.fits(tap.as_ref())?;
        let path = self.run_dir(place.slot);
        let booted = self
            .host
            .boot(&path, self.facts.accel, image, place.size, tap)
            .await;
        let (started, memory) = booted.map_err(|error| taken(place.slot, error))?;
        let memory = match purpose {
            Purpose::Template => Some(memory),
            Purpose::Sandbox => None,
        };
        Box::pin(self.settle(started, memory)).await
    }

    async fn clone_of(
        &self,
        capture: &Capture,
        place: Place,
        tap: Option<Tap>,
    ) -> Result<Box<dyn Machine>, EngineError> {
        self.ready()?;
        place.fits(tap.as_ref())?;
        let fits = capture.fits(&self.facts).and_then(|()| same(capture, place));
        fits.map_err(|stale| EngineError::Capture(stale.into()))?;
        let path = self.run_dir(place.slot);
        let started = match self.blanks.take(capture).await {
            Some(blank) => match blank.nascent.rename(&path) {
                Ok(()) => blank,
                Err(error) => {
                    let error = EngineError::host("move a blank process to its slot", error);
                    return Err(taken(place.slot, self.host.undo(blank, error).await));
                }
            },
            None => {
                let blank = self.host.blank(&path, self.facts.accel, capture, tap).await;
                blank.map_err(|error| taken(place.slot, error))?
            }
        };
        match self.load(&started, capture).await {
            Ok(()) => Box::pin(self.settle(started, None)).await,
            Err(error) => Err(self.host.undo(started, error).await),
        }
    }

    /// Loads the device state; the guest runs when this returns.
    async fn load(&self, blank: &Started, capture: &Capture) -> Result<(), EngineError> {
        self.same_version(blank)?;
        let loaded = capture.load().await.map_err(EngineError::Capture)?;
        let state = host::state_of(loaded)?;
        let seen = blank.qmp.seen();
        blank.qmp.ask_with(GetFd { name: "state" }, Some(state)).await?;
        blank.qmp.ask(MigrateIncoming { uri: "fd:state" }).await?;
        let over = tokio::select! {
            over = timeout(LOAD, migrated(seen)) => over,
            report = blank.nascent.died() => return Err(EngineError::Died(report)),
        };
        match over {
            Ok(Some(Migration::Completed)) => Ok(()),
            Ok(Some(Migration::Active | Migration::Failed)) => {
                let info = blank.qmp.ask(QueryMigrate {}).await?;
                Err(EngineError::Refused {
                    command: "migrate-incoming",
                    reason: info.error.unwrap_or_else(|| "failed without a reason".to_owned()),
                })
            }
            Ok(None) => Err(EngineError::Stopped),
            Err(_elapsed) => Err(EngineError::Late {
                what: "loading device state",
                limit: LOAD,
            }),
        }
    }

    /// QEMU may be upgraded under a running daemon.
    fn same_version(&self, started: &Started) -> Result<(), EngineError> {
        if started.version == self.facts.version {
            return Ok(());
        }
        let stale = Stale {
            what: "emulator",
            then: self.facts.version.clone(),
            now: format!("{} (restart the daemon)", started.version),
        };
        Err(EngineError::Capture(stale.into()))
    }

    async fn settle(
        &self,
        started: Started,
        memory: Option<std::os::fd::OwnedFd>,
    ) -> Result<Box<dyn Machine>, EngineError> {
        if let Err(error) = self.same_version(&started) {
            return Err(self.host.undo(started, error).await);
        }
        let housed = started.nascent.settle(None)?;
        Ok(Box::new(QemuMachine::new(housed, started.qmp, memory)))
    }

    async fn attach(&self, place: Place, identity: Identity) -> Result<Box<dyn Machine>, EngineError> {
        self.ready()?;
        let housed = Housed::attach(&self.host.run_root, place.slot, identity, None)?;
        let qmp = Qmp::later(housed.dir(), &self.host.group);
        match qmp.ask(wire::QueryStatus {}).await {
            Ok(status) => match status.dead() {
                None => Ok(Box::new(QemuMachine::new(housed, qmp, None))),
                Some(why) => Err(EngineError::Gone { why: why.to_owned() }),
            },
            // A machine that does not answer here is not dead for that; its agent will tell.
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, slot = %place.slot, "an adopted machine does not answer QMP");
                Ok(Box::new(QemuMachine::new(housed, qmp, None)))
            }
        }
    }
}

/// A start that failed because its directory was there says so.
fn taken(slot: SlotNumber, error: EngineError) -> EngineError {
    let exists =
        matches!(&error, EngineError::Host { source, .. } if source.kind() == io::ErrorKind::AlreadyExists);
    if exists {
        EngineError::SlotTaken { slot }
    } else {
        error
    }
}

/// Waits for the end of a load; `None` if the connection's task has ended.
async fn migrated(mut seen: watch::Receiver<Seen>) -> Option<Migration> {
    let over = |seen: &Seen| match seen.migration {
        Some(Migration::Completed | Migration::Failed) => true,
        Some(Migration::Active) | None => false,
    };
    seen.wait_for(over).await.ok()?.migration
}

/// A capture fixes size and lane.
fn same(capture: &Capture, place: Place) -> Result<(), Stale> {
    let manifest = capture.manifest();
    if manifest.size != place.size || manifest.lane != place.lane {
        let text = |size: crate::words::Size, lane| {
            format!("{} x {} MiB, lane {lane}", size.vcpus.0, size.memory.mib())
        };
        return Err(Stale {
            what: "size",
            then: text(manifest.size, manifest.lane),
            now: text(place.size, place.lane),
        });
    }
    Ok(())
}

impl Engine for QemuEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    fn accel(&self) -> Accel {
        self.facts.accel
    }

    fn accel_why(&self) -> String {
        self.accel_why.clone()
    }

    fn version(&self) -> String {
        self.facts.version.clone()
    }

    fn facts(&self) -> Facts {
        self.facts.clone()
    }

    fn boot<'a>(
        &'a self,
        image: &'a Image,
        place: Place,
        tap: Option<Tap>,
        purpose: Purpose,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(self.boot(image, place, tap, purpose))
    }

    fn clone_of<'a>(
        &'a self,
        capture: &'a Capture,
        place: Place,
        tap: Option<Tap>,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(self.clone_of(capture, place, tap))
    }

    fn attach(
        &self,
        place: Place,
        identity: Identity,
    ) -> BoxFuture<'_, Result<Box<dyn Machine>, EngineError>> {
        Box::pin(self.attach(place, identity))
    }

    fn inventory(&self) -> io::Result<Vec<Found>> {
        slotdir::inventory(&self.host.run_root)
    }

    fn reap(&self, slot: SlotNumber) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async move { spawn::reap_slot(&self.host.run_root, slot, None).await })
    }

    fn warm_up(&self, capture: &Capture) {
        match capture.fits(&self.facts) {
            // Which TAP a clone gets is known when it is made, and a blank process needs it at its start.
            Ok(()) if capture.manifest().lane == Lane::Guarded => {}
            Ok(()) => self
                .blanks
                .warm_up(&self.host, self.facts.accel, capture, self.keep),
            Err(stale) => tracing::warn!(%stale, "no blank processes for this capture"),
        }
    }

    fn cool(&self, capture: &Capture) {
        self.blanks.cool(capture);
    }

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.host.group.stop())
    }
}
