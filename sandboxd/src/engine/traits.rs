//! What an engine and a machine can do.

use std::{fmt, future::Future, io, path::Path, pin::Pin};

use super::{
    Capture, Captured, EngineError, ExitReport, Facts, Found, Identity, Place, Port, PortName, Pulse,
    Purpose, Tap,
};
use crate::{
    image::Image,
    names::SlotNumber,
    telemetry::GuestText,
    words::{Accel, EngineKind},
};

/// A future behind a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What runs guests.
pub trait Engine: Send + Sync + fmt::Debug + 'static {
    /// Which engine it is.
    fn kind(&self) -> EngineKind;
    /// What its guests run on.
    fn accel(&self) -> Accel;
    /// Why they run on that, as one sentence for an operator.
    fn accel_why(&self) -> String;
    /// Version of the emulator; of this program for the stub.
    fn version(&self) -> String;
    /// What a capture must have in common with this host.
    fn facts(&self) -> Facts;

    /// Starts a machine from an image; its guest runs when this returns, its agent is not up yet. It has a network card
    /// just where it is given a TAP, which its lane must have.
    ///
    /// # Errors
    /// [`EngineError`]; no process and no directory is left.
    fn boot<'a>(
        &'a self,
        image: &'a Image,
        place: Place,
        tap: Option<Tap>,
        purpose: Purpose,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>>;

    /// Starts a machine from a capture; its guest runs on from where it was captured when this returns.
    ///
    /// # Errors
    /// [`EngineError`]; no process and no directory is left. [`EngineError::Capture`] asks for the template to be rebuilt.
    fn clone_of<'a>(
        &'a self,
        capture: &'a Capture,
        place: Place,
        tap: Option<Tap>,
    ) -> BoxFuture<'a, Result<Box<dyn Machine>, EngineError>>;

    /// Takes over a machine of an earlier daemon in this slot, once its identity is proved.
    ///
    /// # Errors
    /// [`EngineError::Gone`] if that machine no longer runs: [`reap`](Self::reap) the slot then.
    fn attach(
        &self,
        place: Place,
        identity: Identity,
    ) -> BoxFuture<'_, Result<Box<dyn Machine>, EngineError>>;

    /// Every slot directory there is, with or without a living process; for recovery.
    ///
    /// # Errors
    /// The kernel's. A directory that cannot be read is an error: unreadable is never absent.
    fn inventory(&self) -> io::Result<Vec<Found>>;

    /// Ends whatever lives in that slot's directory and removes it. Of an empty slot: nothing to do. May be repeated.
    ///
    /// # Errors
    /// [`EngineError::Unproven`] if something holds the directory that cannot be identified: nothing was killed.
    fn reap(&self, slot: SlotNumber) -> BoxFuture<'_, Result<(), EngineError>>;

    /// Starts keeping blank processes ready for clones of this capture; one that is warmed already stays so.
    fn warm_up(&self, capture: &Capture);
    /// Ends that; its blank processes end soon.
    fn cool(&self, capture: &Capture);

    /// Ends blank processes and own tasks. Machines run on, and can no longer be made.
    fn stop(&self) -> BoxFuture<'_, ()>;
}

/// One guest and what runs it. Dropping it ends nothing: [`kill`](Self::kill) ends it, otherwise it runs on and a later
/// [`Engine::attach`] takes it over.
pub trait Machine: Send + Sync + fmt::Debug {
    /// What to write into a record, for [`Engine::attach`].
    fn identity(&self) -> Identity;

    /// Opens the host's end of a port. The one before it should be closed: a machine serves one host per port.
    ///
    /// # Errors
    /// [`EngineError::Gone`] if the machine no longer runs.
    fn connect(&self, port: PortName) -> BoxFuture<'_, Result<Port, EngineError>>;

    /// Resolves when the machine has ended by itself or was killed, at once if it has already.
    fn exited(&self) -> BoxFuture<'_, ExitReport>;

    /// Whether it lives, to be asked without this handle.
    fn pulse(&self) -> Pulse;

    /// Stops the guest's processors.
    ///
    /// # Errors
    /// [`EngineError`].
    fn pause(&self) -> BoxFuture<'_, Result<(), EngineError>>;

    /// Lets them go on.
    ///
    /// # Errors
    /// [`EngineError`].
    fn resume(&self) -> BoxFuture<'_, Result<(), EngineError>>;

    /// Writes memory and device state into the directory, read-only, synced by [`Capture::seal`]. For a machine that was
    /// booted for [`Purpose::Template`], with both ports closed; pauses it, and it stays paused.
    ///
    /// # Errors
    /// [`EngineError`]; what was written so far is left for the caller, whose directory it is.
    fn capture<'a>(&'a self, into: &'a Path) -> BoxFuture<'a, Result<Captured, EngineError>>;

    /// The last of what the guest wrote to its console.
    fn console(&self) -> GuestText;

    /// Ends the machine, waits until it is dead, and removes its directory. May be repeated and raced: every caller
    /// returns after the one teardown.
    ///
    /// # Errors
    /// [`EngineError`] if death is not proved or the directory remains: call again.
    fn kill(&self) -> BoxFuture<'_, Result<(), EngineError>>;
}
