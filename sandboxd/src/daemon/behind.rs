//! What runs beside the calls: the rest of a restart's work, leases, health, progress, reloads.

use std::{sync::Arc, time::Duration};

use tokio::{signal::unix::Signal, sync::watch};

use super::{
    host::DaemonHost,
    notify::{News, Notify},
    print::Printer,
};
use crate::{
    api::{
        Health,
        desk::{Host as _, Reloaded},
    },
    claim::Claims,
    egress::audit::Audit,
    engine::Engine,
    feed,
    journal::{self, Journal},
    net::Status,
    recover,
    sandbox::{Reaper, Sandboxes},
    tasks::{self, Group},
    telemetry::{
        admin::{Phase, Readiness},
        metrics::Metrics,
    },
    template::Templates,
};

/// What a restarted daemon does behind its first calls.
pub(super) struct Behind {
    pub(super) later: recover::Later,
    pub(super) strays: recover::Strays,
    pub(super) damaged: bool,
}

/// Warm stock and strays; then refill begins, so that it makes nothing that is already there.
pub(super) async fn finish_recovery(claims: Claims, engine: Arc<dyn Engine>, behind: Behind) {
    let recover::Later { claimed, warm } = behind.later;
    let stock = async {
        let warm = recover::warm(&claims, warm).await;
        claims.pools.start();
        let strays = recover::strays(&engine, behind.strays, behind.damaged).await;
        tracing::info!(
            warm = warm.warm,
            ended = warm.ended,
            strays,
            "warm stock taken up"
        );
    };
    tokio::join!(stock, recover::late(claimed));
}

/// Ends sandboxes whose lease is over, until the daemon stops.
pub(super) async fn reap(reaper: Reaper, sandboxes: Sandboxes, tasks: Group) {
    let clock = sandboxes.means().clock.clone();
    tokio::select! {
        biased;
        () = tasks.stopping() => {}
        ended = reaper.run(&clock, |id| sandboxes.lease_due(id)) => {
            if let Err(error) = ended {
                tracing::error!(%error, "no timer for leases: they are not ended by this daemon");
            }
        }
    }
}

/// The health service says what readiness says.
pub(super) async fn tell_health(health: Health, readiness: Readiness, tasks: Group) {
    let mut phase = readiness.watch();
    loop {
        let serving = *phase.borrow_and_update() == Phase::Ready;
        health.set(serving).await;
        tokio::select! {
            biased;
            () = tasks.stopping() => return,
            changed = phase.changed() => if changed.is_err() { return },
        }
    }
}

/// Tells the audit when somebody else changed the packet filter of lane guarded.
pub(super) async fn watch_lane(mut status: watch::Receiver<Status>, audit: Audit, tasks: Group) {
    let mut told = 0;
    loop {
        let tampered = status.borrow_and_update().tampered;
        if tampered > told {
            audit.lane_lock_lost(tampered - told);
            told = tampered;
        }
        tokio::select! {
            biased;
            () = tasks.stopping() => return,
            changed = status.changed() => if changed.is_err() { return },
        }
    }
}

/// A journal that failed turns readiness red, for good.
pub(super) async fn watch_journal(
    journal: Journal,
    readiness: Readiness,
    metrics: Arc<Metrics>,
    tasks: Group,
) {
    let mut health = journal.health();
    loop {
        let now = *health.borrow_and_update();
        match now {
            journal::Health::Ok => {}
            journal::Health::Full => {
                tracing::warn!("the journal is full: changes are refused until there is room")
            }
            journal::Health::Failed => {
                tracing::error!("the journal failed: changes are refused until the daemon is started again");
                metrics.journal.failed();
                metrics.node.ready(false);
                readiness.advance(Phase::JournalFailed);
                return;
            }
        }
        tokio::select! {
            biased;
            () = tasks.stopping() => return,
            changed = health.changed() => if changed.is_err() { return },
        }
    }
}

/// Tells what template builds do, for whoever sits before the terminal.
pub(super) async fn progress(templates: Templates, printer: Printer, tasks: Group) {
    let mut news = templates.progress();
    loop {
        tokio::select! {
            biased;
            () = tasks.stopping() => return,
            event = news.next() => match event {
                feed::News::Event(event) => printer.progress(&event.to_string()),
                feed::News::Lost(_) => {}
                feed::News::Closed => return,
            },
        }
    }
}

/// Reads the configuration again at each hangup, until the daemon stops. A task of its own: a reload reads files, and
/// opens images.
pub(super) async fn reloads(
    mut hangup: Signal,
    host: Arc<DaemonHost>,
    notify: Arc<Notify>,
    readiness: Readiness,
) {
    let mut phase = readiness.watch();
    loop {
        tokio::select! {
            biased;
            // A daemon that is gone has stopped too.
            _ = phase.wait_for(|phase| *phase == Phase::Draining) => return,
            heard = hangup.recv() => if heard.is_none() { return },
        }
        reload(Arc::clone(&host), &notify).await;
    }
}

async fn reload(host: Arc<DaemonHost>, notify: &Notify) {
    let monotonic = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    notify.say(News::Reloading {
        monotonic: Duration::try_from(monotonic).unwrap_or_default(),
    });
    match tasks::blocking("reload", move || host.reload()).await {
        Ok(Ok(Reloaded {
            changed,
            needs_restart,
        })) => {
            tracing::info!(?changed, ?needs_restart, "configuration reloaded");
        }
        Ok(Err(mistakes)) => {
            tracing::error!(%mistakes, "configuration not reloaded; the old one stays in force")
        }
        Err(error) => tracing::error!(%error, "the reload broke off"),
    }
    notify.say(News::Ready);
}
