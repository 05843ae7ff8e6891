//! `sandboxd serve`: builds the rooms in order, takes up what an earlier daemon left, serves, and stops in order.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::Instrument as _;

use super::{
    args::Environment,
    behind::{finish_recovery, progress, reloads, watch_journal},
    notify::{News, Notify},
    print::{Printer, Refusal, StartReason},
    start::{Rooms, Started, start},
};
use crate::{
    config::Config,
    journal::Journal,
    telemetry::{admin::Phase, chain, log::Logging, span},
};

/// A stop may take this long in all; what is not done then, the next start does.
const STOP: Duration = Duration::from_secs(20);
/// Of it, what open calls may take once nothing new is taken.
const CALLS: Duration = Duration::from_secs(5);
/// Behind it, what the journal may take to be brought to the disk; a next start replays it else. Both together stay
/// Behind it, what the audit may take to write what is queued; the next start says that it did not.
const AUDIT: Duration = Duration::from_secs(3);
/// Behind that, what the journal may take to be brought to the disk; a next start replays it else. All together stay
/// below systemd's limit, 40 s (deploy/systemd/sandboxd.service).
const CLOSE: Duration = Duration::from_secs(15);

/// How the daemon is to run.
#[derive(Debug)]
pub(super) struct Serving {
    /// The configuration.
    pub(super) config: Config,
    /// Where it came from; none in dev mode, which has nothing to reload.
    pub(super) file: Option<std::path::PathBuf>,
    /// End every sandbox at a clean stop.
    pub(super) end_at_stop: bool,
    /// Print the one line of dev mode when ready, and progress before.
    pub(super) dev: bool,
}

/// Runs the daemon until it is told to stop.
///
/// # Errors
/// Why it could not start; what was built so far is left as after `kill -9`, which the next start takes up.
pub(super) async fn serve(
    serving: Serving,
    environment: &Environment,
    logging: Weak<Logging>,
    printer: Printer,
) -> Result<(), Refusal> {
    let failed = |error: &dyn std::error::Error| Refusal::new(StartReason::HostFault, None, error);
    let mut signals = Signals::new().map_err(|error| failed(&error))?;
    let hangup = signal(SignalKind::hangup()).map_err(|error| failed(&error))?;
    let notify = Notify::new(environment.notify_socket.as_deref()).map_err(|error| failed(&error))?;
    let notify = Arc::new(notify);
    let (dev, end_at_stop) = (serving.dev, serving.end_at_stop);
    let Started { rooms, behind } = tokio::select! {
        biased;
        () = signals.stop() => return Ok(()),
        started = start(serving, environment, logging) => started?,
    };
    ready(&rooms);
    let tasks = &rooms.tasks;
    if dev {
        let templates = rooms.claims.templates.clone();
        tasks.spawn("progress", progress(templates, printer, tasks.clone()));
    }
    let (claims, engine) = (rooms.claims.clone(), Arc::clone(&rooms.engine));
    tasks.spawn(
        "behind",
        finish_recovery(claims, engine, behind).instrument(span::recover()),
    );
    let (host, readiness) = (Arc::clone(&rooms.host), rooms.readiness.clone());
    tasks.spawn("reload", reloads(hangup, host, Arc::clone(&notify), readiness));
    notify.say(News::Ready);
    if dev {
        let (kind, accel) = (rooms.engine.kind(), rooms.engine.accel());
        let text = format!("ready: {} engine={kind} accel={accel}", rooms.address);
        let value = serde_json::json!({ "addr": rooms.address, "engine": kind, "accel": accel });
        // Whoever read our output may be gone; the daemon serves all the same.
        drop(printer.result(&value, &text));
    }
    watch(&mut signals, &notify, environment.watchdog).await;
    notify.say(News::Stopping);
    stop(rooms, end_at_stop, &mut signals)
        .instrument(span::drain())
        .await;
    Ok(())
}

/// Claims are taken up: calls are served from here on. Only now may a failed journal speak of itself, since its phase
/// stands behind [`Phase::Starting`].
fn ready(rooms: &Rooms) {
    rooms.readiness.advance(Phase::Ready);
    rooms.metrics.node.ready(rooms.readiness.phase() == Phase::Ready);
    let watching = watch_journal(
        rooms.journal.clone(),
        rooms.readiness.clone(),
        Arc::clone(&rooms.metrics),
        rooms.tasks.clone(),
    );
    rooms.tasks.spawn("journal health", watching);
}

/// Serves until a signal says stop. Nothing else is awaited here: the watchdog tells systemd that this loop runs.
async fn watch(signals: &mut Signals, notify: &Notify, watchdog: Option<Duration>) {
    // systemd kills a daemon that it has not heard of for the whole time; twice in it is the usual half.
    let mut beat = tokio::time::interval(watchdog.map_or(Duration::from_secs(3600), |time| time / 2));
    loop {
        tokio::select! {
            biased;
            () = signals.stop() => return,
            _ = beat.tick() => if watchdog.is_some() {
                notify.say(News::Watchdog);
            },
        }
    }
}

/// The stop, read top to bottom. A second signal, or the end of its time, jumps to the journal.
async fn stop(rooms: Rooms, end: bool, signals: &mut Signals) {
    let Rooms {
        journal,
        engine,
        lane,
        claims,
        readiness,
        metrics,
        server,
        admin,
        tasks,
        ..
    } = rooms;
    tracing::info!(end_sandboxes = end, "stopping");
    readiness.advance(Phase::Draining);
    metrics.node.ready(false);
    let audit = claims.sandboxes.means().egress.audit().clone();
    let orderly = async {
        claims.pools.stop(end).await;
        server.stop(CALLS).await;
        claims.templates.stop().await;
        claims.sandboxes.stop(end).await;
        engine.stop().await;
        if let Some(lane) = lane {
            // Table and TAPs stay, for guests that live on.
            lane.stop().await;
        }
        tasks.stop().await;
    };
    tokio::select! {
        biased;
        () = signals.stop() => tracing::warn!("told twice: the rest of the stop is left to the next start"),
        done = tokio::time::timeout(STOP, orderly) => if done.is_err() {
            tracing::warn!(limit = ?STOP, "the stop took too long: the rest of it is left to the next start");
        },
    }
    // Nobody decides any more; the journal gets its last heads.
    if tokio::time::timeout(AUDIT, audit.stop()).await.is_err() {
        tracing::error!(limit = ?AUDIT, "the disk is too slow for the audit's last lines; the next start says so in it");
    }
    close(&journal).await;
    if let Some(admin) = admin {
        admin.stop();
    }
}

async fn close(journal: &Journal) {
    match tokio::time::timeout(CLOSE, journal.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::error!(error = %chain(&error), "the journal could not be closed; the next start replays it");
        }
        Err(_elapsed) => {
            tracing::error!(limit = ?CLOSE, "the disk is too slow to close the journal; the next start replays it");
        }
    }
}

/// The signals that say stop.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Resolves when the daemon is told to stop. Cancel safe.
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
