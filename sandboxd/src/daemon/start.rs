//! How the daemon starts: the rooms in their order, the listeners, and the claims of an earlier daemon.

use std::{
    path::Path,
    sync::{Arc, Weak},
};

use arc_swap::ArcSwap;
use tracing::Instrument as _;

use super::{
    args::Environment,
    behind::{Behind, reap, tell_health, watch_lane},
    engines,
    host::{
        self, DaemonHost, door_settings, pool_specs, read_secrets, set_policies, set_pools, template_specs,
        tenants,
    },
    lane, listen,
    print::{Refusal, StartReason},
    run::Serving,
};
use crate::{
    access::HostKey,
    admission::{Admission, Limits},
    api::{
        RequestIds, Server,
        desk::{Changing, Desk, Inner},
        routes,
    },
    claim::{Claims, Keys},
    clock::Clock,
    config::Config,
    disk,
    egress::{
        Egress,
        audit::{self, Audit},
    },
    engine::Engine,
    faults, image,
    journal::{self, AppendError, Journal, OpenError, Opened, Transition},
    link,
    names::SlotNumber,
    net::Lane,
    pool::Pools,
    random, recover,
    sandbox::{Deadlines, Means, Paces, Reaper, Sandboxes},
    tasks::Group,
    telemetry::{
        admin::{Admin, Readiness},
        log::Logging,
        metrics::Metrics,
        span,
    },
    template::{self, Templates},
    words::{EngineKind, Name, PoolKey},
};

/// Everything that runs.
pub(super) struct Rooms {
    pub(super) journal: Journal,
    pub(super) engine: Arc<dyn Engine>,
    /// None: lane guarded is off.
    pub(super) lane: Option<Arc<Lane>>,
    pub(super) claims: Claims,
    pub(super) readiness: Readiness,
    pub(super) metrics: Arc<Metrics>,
    pub(super) host: Arc<DaemonHost>,
    pub(super) server: Server,
    pub(super) admin: Option<Admin>,
    pub(super) tasks: Group,
    pub(super) address: String,
}

/// A daemon that has taken up its claims, and what is left to do behind its first calls.
pub(super) struct Started {
    pub(super) rooms: Rooms,
    pub(super) behind: Behind,
}

/// Builds the rooms and takes up the claims of an earlier daemon.
pub(super) async fn start(
    serving: Serving,
    environment: &Environment,
    logging: Weak<Logging>,
) -> Result<Started, Refusal> {
    let Serving { config, file, .. } = serving;
    let clock = Clock::host();
    let readiness = Readiness::new();
    let metrics = Arc::new(Metrics::new());
    let (journal, opened) = open_journal(&config, &clock)?;
    let lane = lane::open(&config, &clock, &opened.state).await?;
    let engine = engines::build(&config).await?;
    metrics.node.build(engine.kind(), engine.accel());
    let audit = open_audit(&config, &clock, &journal, opened.state.heads.clone(), &metrics)?;
    let given = (&journal, lane.as_ref(), audit.clone());
    let claims = domain(&config, &clock, given, &engine, &metrics)?;
    let (host, desk) = front(config, claims.clone(), &engine, &readiness, (file, logging));

    // Early calls get an answer: STARTING, until the claims are taken up.
    let tasks = Group::new();
    let (routes, health) = routes(desk).await;
    tasks.spawn("health", tell_health(health, readiness.clone(), tasks.clone()));
    let config = host.config();
    let listen::Opened {
        listeners,
        address,
        certificates,
    } = listen::open(&config, environment)?;
    if let Some(certificates) = certificates {
        host.present(certificates);
    }
    let server = Server::start(listeners, routes, RequestIds::new(random::bytes()));
    let admin = open_admin(&config, &metrics, &readiness)?;
    let reaper = claims.sandboxes.means().reaper.clone();
    tasks.spawn("leases", reap(reaper, claims.sandboxes.clone(), tasks.clone()));
    if let Some(lane) = &lane {
        lane::show(lane, &metrics);
        tasks.spawn("lane watch", watch_lane(lane.status(), audit, tasks.clone()));
    }
    let behind = take_up(&claims, &engine, &config, &opened)
        .instrument(span::recover())
        .await?;
    let rooms = Rooms {
        journal,
        engine,
        lane,
        claims,
        readiness,
        metrics,
        host,
        server,
        admin,
        tasks,
        address,
    };
    Ok(Started { rooms, behind })
}

/// The front desk, and the daemon as it sees it; what a reload changes they share.
fn front(
    config: Config,
    claims: Claims,
    engine: &Arc<dyn Engine>,
    readiness: &Readiness,
    (file, logging): (Option<std::path::PathBuf>, Weak<Logging>),
) -> (Arc<DaemonHost>, Desk) {
    let access = Arc::new(ArcSwap::from_pointee(listen::access(&config.access)));
    let tenants = Arc::new(ArcSwap::from_pointee(tenants(&config)));
    let changing = Changing::default();
    let means = host::Means {
        file,
        logging,
        claims: claims.clone(),
        access: Arc::clone(&access),
        tenants: Arc::clone(&tenants),
        changing: changing.clone(),
        engine: Arc::clone(engine),
    };
    let host = Arc::new(DaemonHost::new(config, means));
    let desk = Desk::new(Inner {
        claims,
        access,
        tenants,
        changing,
        readiness: readiness.clone(),
        host: Arc::clone(&host) as Arc<dyn crate::api::desk::Host>,
        engine: Arc::clone(engine),
    });
    (host, desk)
}

fn open_admin(
    config: &Config,
    metrics: &Arc<Metrics>,
    readiness: &Readiness,
) -> Result<Option<Admin>, Refusal> {
    let Some(addr) = config.listen.metrics else {
        return Ok(None);
    };
    Admin::start(addr, Arc::clone(metrics), readiness.clone())
        .map(Some)
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

/// Takes up the audit's files; what the disk cannot give now it may give later.
fn open_audit(
    config: &Config,
    clock: &Clock,
    journal: &Journal,
    heads: journal::Heads,
    metrics: &Metrics,
) -> Result<Audit, Refusal> {
    let options = audit::Options {
        state_dir: config.node.state_dir.clone(),
        queue: audit::QUEUE,
        spare: audit::SPARE,
        heads,
        journal: Some(journal.clone()),
        metrics: metrics.audit.clone(),
        clock: clock.clone(),
    };
    let audit = Audit::open(options).map_err(|error| Refusal::new(StartReason::HostFault, None, &error))?;
    audit.require(config.egress.audit.required);
    audit.keep(config.egress.audit.retention);
    Ok(audit)
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
    (journal, lane, audit): (&Journal, Option<&Arc<Lane>>, Audit),
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
        net: lane.cloned(),
        images: image::Catalog::new(state_dir),
        dir: state_dir.join("templates"),
    };
    let templates = Templates::open(means, config.sizes.clone(), template_specs(config))
        .map_err(|error| failed(&error))?;
    let settings = door_settings(config, read_secrets(config));
    let egress = Egress::audited(settings, metrics.door.clone(), clock.clone(), audit);
    set_policies(&egress, config);
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
        egress,
        net: lane.cloned(),
    });
    let interception = host::interception(config, clock.clone());
    let interception = interception.unwrap_or_else(|error| {
        // What runs goes on: doors refuse what they would have to look into.
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "this node looks into no TLS"
        );
        None
    });
    let in_flight = u32::from(config.node.clones_in_flight);
    let pools = Pools::new(
        sandboxes.clone(),
        templates.clone(),
        Arc::clone(metrics),
        in_flight,
    );
    let claims = Claims {
        sandboxes,
        pools,
        templates,
        keys: Keys::default(),
        host_key: Arc::new(host_key),
        metrics: Arc::new(metrics.claim.series(None)),
    };
    host::look_inside(&claims, interception);
    Ok(claims)
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
    record_boot(
        claims,
        &boot_id,
        opened.state.boot_id.as_deref(),
        &config.node.state_dir,
    )?;
    faults::passage("recover.boot_recorded");
    for row in opened.state.pools.values() {
        claims.pools.set(crate::pool::Spec::from_row(row));
    }
    set_pools(claims, pool_specs(config));
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

/// Records that this is another boot than that of the last start, if it is. In the same boot there is nothing to record,
/// so that a daemon can be started again on a full disk.
fn record_boot(claims: &Claims, now: &str, last: Option<&str>, state_dir: &Path) -> Result<(), Refusal> {
    if last == Some(now) {
        return Ok(());
    }
    let boot = Transition::Boot {
        boot_id: now.to_owned(),
    };
    match claims.sandboxes.means().record(None, &boot) {
        // Written is enough: a boot that is not on the disk is recorded by the next start.
        Ok(written) => {
            drop(written);
            Ok(())
        }
        Err(AppendError::Full) => Err(Refusal {
            reason: StartReason::HostFault,
            place: Some(state_dir.to_owned()),
            message: "the disk is full, and the first start after the host's own needs room for a record: \
                      make room below this directory"
                .into(),
        }),
        Err(error @ (AppendError::Failed | AppendError::TooLong { .. })) => Err(Refusal::new(
            StartReason::HostFault,
            Some(state_dir.to_owned()),
            &error,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::tests::rooms::Rooms;

    #[tokio::test]
    async fn a_start_in_the_same_boot_needs_no_record() {
        let rooms = Rooms::new();
        let dir = rooms.dir.path();
        record_boot(&rooms.claims, "a", None, dir).unwrap();
        // A journal that takes no more.
        rooms.journal.close().await.unwrap();
        record_boot(&rooms.claims, "a", Some("a"), dir).unwrap();
        let refused = record_boot(&rooms.claims, "b", Some("a"), dir).unwrap_err();
        assert_eq!(
            (refused.reason, refused.place.as_deref()),
            (StartReason::HostFault, Some(dir))
        );
    }
}
