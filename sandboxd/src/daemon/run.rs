//! `sandboxd serve`: builds the rooms in order, takes up what an earlier daemon left, serves, and stops in order.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::Instrument as _;

use super::{
    args::Environment,
    engines,
    host::DaemonHost,
    listen,
    notify::{News, Notify},
    print::{Printer, Refusal, StartReason},
};
use crate::{
    access::HostKey,
    admission::{Admission, Limits},
    api::{
        Health, RequestIds, Server,
        desk::{Desk, Host as _, Inner, Reloaded},
        routes,
    },
    claim::{Claims, Keys},
    clock::Clock,
    config::Config,
    disk,
    engine::Engine,
    faults, feed, image,
    journal::{self, Journal, OpenError, Opened, Transition},
    link,
    names::SlotNumber,
    pool::Pools,
    random, recover,
    sandbox::{Deadlines, Means, Paces, Reaper, Sandboxes},
    tasks::{self, Group},
    telemetry::{
        admin::{Admin, Phase, Readiness},
        chain,
        log::Logging,
        metrics::Metrics,
        span,
    },
    template::{self, Templates},
    words::{EngineKind, Name, PoolKey},
};

/// A stop may take this long in all; what is not done then, the next start does.
const STOP: Duration = Duration::from_secs(20);
/// Of it, what open calls may take once nothing new is taken.
const CALLS: Duration = Duration::from_secs(5);

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

/// Everything that runs.
struct Rooms {
    journal: Journal,
    engine: Arc<dyn Engine>,
    claims: Claims,
    readiness: Readiness,
    metrics: Arc<Metrics>,
    host: Arc<DaemonHost>,
    server: Server,
    admin: Option<Admin>,
    tasks: Group,
    address: String,
}

/// What a restarted daemon does behind its first calls.
struct Behind {
    later: recover::Later,
    strays: recover::Strays,
    damaged: bool,
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
    let notify = Notify::new(environment.notify_socket.as_deref()).map_err(|error| failed(&error))?;
    let (dev, end_at_stop) = (serving.dev, serving.end_at_stop);
    let (rooms, behind) = tokio::select! {
        biased;
        () = signals.stop() => return Ok(()),
        started = start(serving, environment, logging) => started?,
    };
    if dev {
        rooms.tasks.spawn(
            "progress",
            progress(rooms.claims.templates.clone(), printer, rooms.tasks.clone()),
        );
    }
    let (claims, engine) = (rooms.claims.clone(), Arc::clone(&rooms.engine));
    rooms.tasks.spawn(
        "behind",
        finish_recovery(claims, engine, behind).instrument(span::recover()),
    );
    rooms.readiness.advance(Phase::Ready);
    rooms.metrics.node.ready(true);
    tell(&notify, News::Ready);
    if dev {
        let (kind, accel) = (rooms.engine.kind(), rooms.engine.accel());
        let text = format!("ready: {} engine={kind} accel={accel}", rooms.address);
        let value = serde_json::json!({ "addr": rooms.address, "engine": kind, "accel": accel });
        // Whoever read our output may be gone; the daemon serves all the same.
        drop(printer.result(&value, &text));
    }
    watch(&rooms, &mut signals, &notify, environment.watchdog).await;
    tell(&notify, News::Stopping);
    stop(rooms, end_at_stop, &mut signals)
        .instrument(span::drain())
        .await;
    Ok(())
}

/// Builds the rooms and takes up the claims of an earlier daemon.
async fn start(
    serving: Serving,
    environment: &Environment,
    logging: Weak<Logging>,
) -> Result<(Rooms, Behind), Refusal> {
    let Serving { config, file, .. } = serving;
    let clock = Clock::host();
    let readiness = Readiness::new();
    let metrics = Arc::new(Metrics::new());
    let (journal, opened) = open_journal(&config, &clock)?;
    let engine = engines::build(&config).await?;
    metrics.node.build(engine.kind(), engine.accel());
    let claims = domain(&config, &clock, &journal, &engine, &metrics)?;
    let access = Arc::new(ArcSwap::from_pointee(listen::access(&config.access)));
    let host = Arc::new(DaemonHost::new(
        config,
        file,
        logging,
        claims.clone(),
        Arc::clone(&access),
        Arc::clone(&engine),
    ));
    let desk = Desk::new(Inner {
        claims: claims.clone(),
        access,
        tenants: ArcSwap::from_pointee(host.tenants()),
        readiness: readiness.clone(),
        host: Arc::clone(&host) as Arc<dyn crate::api::desk::Host>,
        engine: Arc::clone(&engine),
    });
    host.attach(desk.clone());

    // Early calls get an answer: STARTING, until the claims are taken up.
    let tasks = Group::new();
    let (routes, health) = routes(desk).await;
    tasks.spawn("health", tell_health(health, readiness.clone(), tasks.clone()));
    tasks.spawn(
        "journal health",
        watch_journal(
            journal.clone(),
            readiness.clone(),
            Arc::clone(&metrics),
            tasks.clone(),
        ),
    );
    let config = host.config();
    let (listeners, address, certificates) = listen::open(&config, environment)?;
    host.present(certificates);
    let server = Server::start(listeners, routes, RequestIds::new(random::bytes()));
    let admin = admin(&config, &metrics, &readiness)?;
    let reaper = claims.sandboxes.means().reaper.clone();
    tasks.spawn("leases", reap(reaper, claims.sandboxes.clone(), tasks.clone()));
    let behind = take_up(&claims, &engine, &config, &opened)
        .instrument(span::recover())
        .await?;
    let rooms = Rooms {
        journal,
        engine,
        claims,
        readiness,
        metrics,
        host,
        server,
        admin,
        tasks,
        address,
    };
    Ok((rooms, behind))
}

/// The listener for operators, if one is wanted.
fn admin(config: &Config, metrics: &Arc<Metrics>, readiness: &Readiness) -> Result<Option<Admin>, Refusal> {
    let addr = config.listen.metrics;
    addr.map(|addr| Admin::start(addr, Arc::clone(metrics), readiness.clone()))
        .transpose()
        .map_err(|error| Refusal::new(StartReason::HostFault, None, &error))
}

fn open_journal(config: &Config, clock: &Clock) -> Result<(Journal, Opened), Refusal> {
    let dir = &config.node.state_dir;
    let sync = match config.journal.sync {
        crate::config::Sync::Auto => journal::SyncMode::Auto,
        crate::config::Sync::Always => journal::SyncMode::Always,
    };
    disk::make_dir(dir, 0o700)
        .and_then(|()| disk::make_dir(&config.node.run_dir.join("run"), 0o700))
        .map_err(|error| Refusal::new(StartReason::HostFault, Some(dir.clone()), &error))?;
    let options = journal::Options {
        dir: dir.clone(),
        sync,
        segment_bytes: journal::SEGMENT_BYTES,
        clock: clock.clone(),
    };
    let (journal, opened) = Journal::open(options)
        .map_err(|error| Refusal::new(open_reason(&error), Some(dir.clone()), &error))?;
    for damage in &opened.damage {
        tracing::error!(
            ?damage,
            "a record is damaged; its sandbox is quarantined, all others live on"
        );
    }
    if let Some(torn) = &opened.torn {
        tracing::warn!(
            ?torn,
            "the log ends in a torn record, which nobody was answered for"
        );
    }
    Ok((journal, opened))
}

/// Why a journal cannot be opened, as it is printed.
pub(super) const fn open_reason(error: &OpenError) -> StartReason {
    match error {
        OpenError::Locked { .. } => StartReason::StateLocked,
        OpenError::Newer { .. } => StartReason::StateNewer,
        OpenError::Damaged { .. } => StartReason::JournalDamaged,
        OpenError::Io { .. } => StartReason::HostFault,
    }
}

/// The rooms between the journal and the front desk.
fn domain(
    config: &Config,
    clock: &Clock,
    journal: &Journal,
    engine: &Arc<dyn Engine>,
    metrics: &Arc<Metrics>,
) -> Result<Claims, Refusal> {
    let admission = Admission::new(Limits {
        memory: config.node.memory,
        sandboxes: config.node.max_sandboxes,
        counts_memory: engine.kind() != EngineKind::Stub,
    });
    metrics
        .node
        .budget(config.node.memory.0, u32::from(config.node.max_sandboxes));
    let state_dir = &config.node.state_dir;
    let failed =
        |error: &dyn std::error::Error| Refusal::new(StartReason::HostFault, Some(state_dir.clone()), error);
    let host_key = HostKey::open(state_dir, random::bytes()).map_err(|error| failed(&error))?;
    let means = template::Means {
        clock: clock.clone(),
        engine: Arc::clone(engine),
        admission: admission.clone(),
        images: image::Catalog::new(state_dir),
        dir: state_dir.join("templates"),
    };
    let templates = Templates::open(means, config.sizes.clone(), super::host::template_specs(config))
        .map_err(|error| failed(&error))?;
    let sandboxes = Sandboxes::new(Means {
        clock: clock.clone(),
        journal: journal.clone(),
        engine: Arc::clone(engine),
        admission,
        reaper: Reaper::new(),
        paces: Paces {
            warm: link::PACE_WARM,
            claimed: link::PACE_CLAIMED,
        },
        deadlines: Deadlines::default(),
        metrics: Arc::clone(metrics),
    });
    let in_flight = u32::from(config.node.clones_in_flight);
    let pools = Pools::new(
        sandboxes.clone(),
        templates.clone(),
        Arc::clone(metrics),
        in_flight,
    );
    Ok(Claims {
        sandboxes,
        pools,
        templates,
        keys: Keys::default(),
        host_key: Arc::new(host_key),
        metrics: Arc::new(metrics.claim.series(None)),
    })
}

/// Records this boot, plans from rows and host, and takes up what was claimed.
async fn take_up(
    claims: &Claims,
    engine: &Arc<dyn Engine>,
    config: &Config,
    opened: &Opened,
) -> Result<Behind, Refusal> {
    let failed = |error: &dyn std::error::Error| Refusal::new(StartReason::HostFault, None, error);
    let boot_id =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|error| failed(&error))?;
    let boot_id = boot_id.trim().to_owned();
    let boot = Transition::Boot {
        boot_id: boot_id.clone(),
    };
    // Written is enough: nothing waits for the disk.
    drop(
        claims
            .sandboxes
            .means()
            .record(None, &boot)
            .map_err(|error| failed(&error))?,
    );
    faults::passage("recover.boot_recorded");
    for row in opened.state.pools.values() {
        claims.pools.set(crate::pool::Spec::from_row(row));
    }
    for spec in super::host::pool_specs(config) {
        claims.pools.set(spec);
    }
    let found = engine.inventory().map_err(|error| failed(&error))?;
    let slots: Vec<SlotNumber> = found.iter().map(|found| found.slot).collect();
    let host = recover::Host {
        boot_id: &boot_id,
        engine: engine.kind(),
        slots: &slots,
        digest: |key: &PoolKey, digest: &str| {
            claims
                .templates
                .current(key)
                .is_some_and(|capture| capture.digest().to_string() == digest)
        },
        pool: |name: &Name, key: &PoolKey| claims.pools.get(name).is_some_and(|pool| pool.key() == *key),
    };
    let (fates, strays) = recover::plan(&opened.state, &host);
    let strays = recover::hold(claims, strays);
    let (summary, later) = recover::claimed(claims, &opened.state, fates, &boot_id).await;
    tracing::info!(
        claimed = summary.claimed,
        ended = summary.ended,
        replayed = opened.replayed,
        "claims taken up"
    );
    Ok(Behind {
        later,
        strays,
        damaged: opened.damage.iter().any(|damage| damage.lost),
    })
}

/// Warm stock and strays; then refill begins, so that it makes nothing that is already there.
async fn finish_recovery(claims: Claims, engine: Arc<dyn Engine>, behind: Behind) {
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

async fn reap(reaper: Reaper, sandboxes: Sandboxes, tasks: Group) {
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
async fn tell_health(health: Health, readiness: Readiness, tasks: Group) {
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

/// A journal that failed turns readiness red, for good.
async fn watch_journal(journal: Journal, readiness: Readiness, metrics: Arc<Metrics>, tasks: Group) {
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
async fn progress(templates: Templates, printer: Printer, tasks: Group) {
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

/// Serves until a signal says stop.
async fn watch(rooms: &Rooms, signals: &mut Signals, notify: &Notify, watchdog: Option<Duration>) {
    // systemd kills a daemon that it has not heard of for the whole time; twice in it is the usual half.
    let mut beat = tokio::time::interval(watchdog.map_or(Duration::from_secs(3600), |time| time / 2));
    loop {
        tokio::select! {
            biased;
            heard = signals.next() => match heard {
                Heard::Stop => return,
                Heard::Hangup => reload(rooms, notify).await,
            },
            _ = beat.tick() => if watchdog.is_some() {
                tell(notify, News::Watchdog);
            },
        }
    }
}

async fn reload(rooms: &Rooms, notify: &Notify) {
    let monotonic = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    tell(
        notify,
        News::Reloading {
            monotonic: Duration::try_from(monotonic).unwrap_or_default(),
        },
    );
    let host = Arc::clone(&rooms.host);
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
    tell(notify, News::Ready);
}

fn tell(notify: &Notify, news: News<'_>) {
    if let Err(error) = notify.tell(news) {
        tracing::warn!(error = %chain(&error), "systemd was not told");
    }
}

/// The stop, read top to bottom. A second signal, or the end of its time, jumps to the journal.
async fn stop(rooms: Rooms, end: bool, signals: &mut Signals) {
    let Rooms {
        journal,
        engine,
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
    let orderly = async {
        claims.pools.stop(end).await;
        server.stop(CALLS).await;
        claims.templates.stop().await;
        claims.sandboxes.stop(end).await;
        engine.stop().await;
        tasks.stop().await;
    };
    tokio::select! {
        biased;
        () = signals.stop() => tracing::warn!("told twice: the rest of the stop is left to the next start"),
        done = tokio::time::timeout(STOP, orderly) => if done.is_err() {
            tracing::warn!(limit = ?STOP, "the stop took too long: the rest of it is left to the next start");
        },
    }
    if let Err(error) = journal.close().await {
        tracing::error!(error = %chain(&error), "the journal could not be closed; the next start replays it");
    }
    if let Some(admin) = admin {
        admin.stop();
    }
}

/// What a signal wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Stop,
    Hangup,
}

/// The signals that we listen to.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next signal. Cancel safe.
    async fn next(&mut self) -> Heard {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Heard::Stop,
            _ = self.interrupt.recv() => Heard::Stop,
            _ = self.hangup.recv() => Heard::Hangup,
        }
    }

    /// Resolves when the daemon is told to stop. Cancel safe.
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
