//! What the daemon itself does for the front desk: reload, doctor, facts of the host.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use arc_swap::ArcSwap;
use sandbox_protocol::reason::Reason;

use super::{args::Environment, engines, listen};
use crate::{
    access::Access,
    api::{
        AccessNow, Certificates,
        desk::{Changing, Host, Reloaded, TenantsNow},
    },
    ca::{Dir, Trust},
    claim::Claims,
    clock::{Clock, WallTime},
    config::{self, Config, TenantPools},
    doctor::{self, Check},
    egress::{self, Egress, Interception, InterceptionError, Routes, Secrets},
    engine::Engine,
    journal::Transition,
    pool::{Source, Spec as PoolSpec},
    telemetry::{chain, log::Logging},
    template::Spec as TemplateSpec,
    words::{MemBytes, Name},
};

/// What the daemon's part of the front desk works with.
#[derive(Debug)]
pub(super) struct Means {
    /// Where the configuration came from; none in dev mode.
    pub(super) file: Option<PathBuf>,
    /// The log.
    pub(super) logging: Weak<Logging>,
    /// The domain.
    pub(super) claims: Claims,
    /// Who may call: the same as the desk's.
    pub(super) access: AccessNow,
    /// What tenants may claim: the same as the desk's.
    pub(super) tenants: TenantsNow,
    /// One change of pools or templates at a time: the same as the desk's.
    pub(super) changing: Changing,
    /// Machines.
    pub(super) engine: Arc<dyn Engine>,
}

/// The daemon, as its front desk sees it.
#[derive(Debug)]
pub(super) struct DaemonHost {
    config: ArcSwap<Config>,
    means: Means,
    started_at: WallTime,
    certificates: OnceLock<Arc<Certificates>>,
    /// One reload at a time: a call and a signal may want one together.
    reloading: Mutex<()>,
}

impl DaemonHost {
    /// A daemon with this configuration.
    #[must_use]
    pub(super) fn new(config: Config, means: Means) -> Self {
        let started_at = means.claims.sandboxes.means().clock.wall();
        Self {
            config: ArcSwap::from_pointee(config),
            means,
            started_at,
            certificates: OnceLock::new(),
            reloading: Mutex::new(()),
        }
    }

    /// Names the certificates of the TLS listener, whose files a reload sets.
    pub(super) fn present(&self, certificates: Arc<Certificates>) {
        // There is one TLS listener.
        drop(self.certificates.set(certificates));
    }

    /// Opens the files of the TLS listener if others are named; none if nothing changes.
    fn certificates(&self, old: &Config, new: &Config) -> Result<Option<Certificates>, String> {
        let files = |config: &Config| config.listen.tcp.as_ref().and_then(|tcp| tcp.tls().cloned());
        match (files(old), files(new)) {
            (Some(old), Some(new)) if old != new => Certificates::open(new.cert, new.key)
                .map(Some)
                .map_err(|error| chain(&error)),
            (Some(_) | None, Some(_) | None) => Ok(None),
        }
    }

    /// The configuration in force.
    #[must_use]
    pub(super) fn config(&self) -> Arc<Config> {
        self.config.load_full()
    }

    /// Puts a checked configuration in force. Nothing here can fail, so that a reload is all or nothing.
    fn put_in_force(&self, old: &Config, new: &Config, secrets: Secrets, interception: Option<Interception>) {
        let access: Access = listen::access(&new.access);
        let Means {
            claims,
            access: access_now,
            tenants: tenants_now,
            changing,
            ..
        } = &self.means;
        access_now.store(Arc::new(access));
        tenants_now.store(Arc::new(tenants(new)));
        let sandboxes = &claims.sandboxes;
        sandboxes.means().egress.set(door_settings(new, secrets));
        let audit = sandboxes.means().egress.audit();
        audit.require(new.egress.audit.required);
        audit.keep(new.egress.audit.retention);
        look_inside(claims, interception);
        set_policies(&sandboxes.means().egress, new);
        claims.templates.set(template_specs(new), new.sizes.clone());
        let _one = changing.begin();
        for name in old.pools.keys().filter(|name| !new.pools.contains_key(*name)) {
            claims.pools.remove(name);
        }
        set_pools(claims, pool_specs(new));
        claims.sandboxes.rearm();
    }
}

impl Host for DaemonHost {
    fn reload(&self) -> Result<Reloaded, String> {
        let file = self
            .means
            .file
            .as_ref()
            .ok_or("dev mode has no configuration file to read again")?;
        let _one = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Config::read(file, &config::Host::look()).map_err(|error| error.to_string())?;
        let old = self.config.load_full();
        let diff = config::diff(&old, &new);
        let new = config::in_force(&old, &new);
        let certificates = self.certificates(&old, &new)?;
        let secrets = read_again(&new)?;
        let changed = told(
            diff.changed,
            &secrets,
            &self.means.claims.sandboxes.means().egress.secrets(),
        );
        let clock = self.means.claims.sandboxes.means().clock.clone();
        let interception = interception(&new, clock).map_err(|error| chain(&error))?;
        covered(&self.means.claims, &new, interception.as_ref())?;
        if let Some(logging) = self.means.logging.upgrade() {
            logging
                .set_filter(&new.log.filter)
                .map_err(|error| error.to_string())?;
        }
        if let (Some(mine), Some(new)) = (self.certificates.get(), certificates) {
            mine.replace(new);
        }
        self.put_in_force(&old, &new, secrets, interception);
        self.config.store(Arc::new(new));
        Ok(Reloaded {
            changed,
            needs_restart: diff.needs_restart,
        })
    }

    fn doctor(&self) -> Vec<Check> {
        let config = self.config.load();
        let mut given = engines::given(&config);
        given.accel = Some((self.means.engine.accel(), self.means.engine.accel_why()));
        doctor::judge(&doctor::look(&config, &config::Host::look(), given))
    }

    fn name(&self) -> String {
        self.config.load().node.name.clone()
    }

    fn memory_budget(&self) -> MemBytes {
        self.config.load().node.memory
    }

    fn started_at(&self) -> WallTime {
        self.started_at
    }
}

/// What tenants may claim.
#[must_use]
pub(super) fn tenants(config: &Config) -> BTreeMap<Name, TenantPools> {
    config
        .tenants
        .iter()
        .map(|(name, tenant)| (name.clone(), tenant.pools.clone()))
        .collect()
}

/// The values of all secrets.
///
/// # Errors
/// Every one that cannot be read.
fn read_again(config: &Config) -> Result<Secrets, String> {
    let (secrets, unreadable) = Secrets::read(&config.egress.secrets, Environment::named);
    if unreadable.is_empty() {
        return Ok(secrets);
    }
    let told: Vec<String> = unreadable.iter().map(|one| chain(one)).collect();
    Err(told.join("; "))
}

/// The values of all secrets at the start, which one of them does not stop: its rules deny.
pub(super) fn read_secrets(config: &Config) -> Secrets {
    let (secrets, unreadable) = Secrets::read(&config.egress.secrets, Environment::named);
    for one in unreadable {
        tracing::error!(error = %chain(&one), "a secret cannot be read, and what needs it is denied");
    }
    secrets
}

/// What a reload changed, with secrets of which only the value did.
fn told(mut changed: Vec<String>, secrets: &Secrets, old: &Secrets) -> Vec<String> {
    for name in secrets.differing(old) {
        let key = format!("egress.secret.{name}");
        if !changed.contains(&key) {
            changed.push(key);
        }
    }
    changed
}

/// What doors are told of the configuration. The daemon's own ports are no guest's business, on whatever local address
/// they are reached.
#[must_use]
pub(super) fn door_settings(config: &Config, secrets: Secrets) -> egress::Settings {
    let tcp = config.listen.tcp.as_ref().map(config::Tcp::addr);
    let mut vetting = config.egress.vetting.clone();
    let listeners = tcp.into_iter().chain(config.listen.metrics);
    vetting.own_ports = listeners.map(|address| address.port()).collect();
    egress::Settings {
        servers: config.egress.servers.clone(),
        vetting,
        secrets,
        routes: routes(config),
    }
}

fn routes(config: &Config) -> Routes {
    let pools = config.pools.iter();
    let named = pools.filter_map(|(name, pool)| Some((name.clone(), pool.upstream.clone()?)));
    let doors = &config.egress;
    Routes::new(
        doors.upstreams.clone(),
        named.collect(),
        doors.default_upstream.clone(),
        doors.sources.clone(),
    )
}

/// What the node looks into TLS with, as its files have it now; none: nothing. Blocks.
pub(super) fn interception(config: &Config, clock: Clock) -> Result<Option<Interception>, InterceptionError> {
    let tls = &config.egress.tls;
    Interception::open(&Dir::new(tls.ca_dir.clone()), &tls.extra_roots, clock)
}

/// Puts it in force, for tunnels and template builds that begin from now on.
pub(super) fn look_inside(claims: &Claims, interception: Option<Interception>) {
    let trust = interception.as_ref().map(|means| Trust::of(means.node()));
    claims.templates.set_trust(trust);
    claims.sandboxes.means().egress.set_interception(interception);
}

/// Whether each pool that looks into TLS has a template that trusts what the doors are about to show, so that nothing that
/// works is broken. One whose tunnels are refused already is no news: its refill says so until the template is built anew.
/// One that is not built yet will have it.
fn covered(claims: &Claims, new: &Config, interception: Option<&Interception>) -> Result<(), String> {
    let Some(root) = interception.map(|means| means.node().root()) else {
        return Ok(());
    };
    let book = claims.sandboxes.means().egress.book();
    let of_file = new
        .pools
        .iter()
        .map(|(name, pool)| (name.clone(), pool.key.clone(), pool.egress.clone()));
    let applied = claims
        .pools
        .list()
        .into_iter()
        .filter(|pool| !new.pools.contains_key(pool.name()));
    let applied = applied.map(|pool| (pool.name().clone(), pool.key(), pool.spec().doors.policy.clone()));
    for (name, key, policy) in of_file.chain(applied) {
        let policy = policy.and_then(|policy| new.egress.policies.get(&policy));
        let Some(capture) = claims.templates.current(&key) else {
            continue;
        };
        let will_lack =
            policy.is_some_and(|layer| layer.looks_inside()) && !capture.manifest().ca.contains(&root);
        let is_refused = claims.templates.trust().is_none() || claims.templates.lacks_root(&capture);
        let lacks = book.pool_looks_inside(&name) && is_refused;
        if will_lack && !lacks {
            return Err(format!(
                "{}: pool {name} looks into TLS, and its template {} lacks root {}: build it anew first",
                Reason::CaNotInTemplate.as_str(),
                key.template,
                root.short()
            ));
        }
    }
    Ok(())
}

/// Puts named policies, and who has which, in force for claims from now on.
pub(super) fn set_policies(egress: &Egress, config: &Config) {
    let tenants = config
        .tenants
        .iter()
        .map(|(name, tenant)| (name.clone(), tenant.egress.clone()));
    egress
        .book()
        .set(config.egress.policies.clone(), tenants.collect());
    egress.book().set_infra(config.egress.infra.clone());
}

/// Templates of the configuration file.
#[must_use]
pub(super) fn template_specs(config: &Config) -> BTreeMap<Name, TemplateSpec> {
    let specs = config.templates.iter().map(|(name, template)| {
        let spec = TemplateSpec {
            name: name.clone(),
            image: template.image.to_string(),
            warmup: template.warmup.clone(),
            warmup_timeout: template.warmup_timeout,
        };
        (name.clone(), spec)
    });
    specs.collect()
}

/// Puts the pools of the configuration file in place. One that was made through the API is theirs from now on: without a
/// record of that it would be back once the file names it no more. Call it with [`Changing`] begun, or before the first
/// call is served.
pub(super) fn set_pools(claims: &Claims, specs: Vec<PoolSpec>) {
    for spec in specs {
        let name = spec.name.clone();
        let before = claims.pools.get(&name).map(|pool| pool.spec().source);
        claims.pools.set(spec);
        match before {
            None | Some(Source::File) => {}
            Some(Source::Applied) => {
                let record = Transition::PoolDeleted { name: name.clone() };
                match claims.sandboxes.means().record(None, &record) {
                    // Written is enough: the next start takes the pool over again if it did not reach the disk.
                    Ok(written) => drop(written),
                    Err(error) => tracing::error!(
                        pool = %name,
                        error = %chain(&error),
                        "the file's pool took over one made through the API, and that could not be recorded"
                    ),
                }
            }
        }
    }
}

/// Pools of the configuration file.
#[must_use]
pub(super) fn pool_specs(config: &Config) -> Vec<PoolSpec> {
    let specs = config
        .pools
        .iter()
        .map(|(name, pool)| PoolSpec::new(name.clone(), pool, Source::File));
    specs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        claim::tests::rooms::{Rooms, key},
        journal::{self, Filter, Line},
        pool::LeaseBounds,
    };

    fn spec(name: &str, source: Source) -> PoolSpec {
        PoolSpec {
            name: name.parse().unwrap(),
            key: key(),
            warm: 0,
            warm_max: 0,
            lease: LeaseBounds::DEFAULT,
            doors: Default::default(),
            source,
        }
    }

    #[tokio::test]
    async fn a_pool_that_the_file_takes_over_is_deleted_from_the_record() {
        let rooms = Rooms::new();
        let applied = rooms.claims.pools.apply(spec("p", Source::Applied));
        drop(applied.unwrap());
        for _ in 0..2 {
            let specs = ["p", "q"].map(|name| spec(name, Source::File));
            set_pools(&rooms.claims, specs.to_vec());
        }
        let log = journal::cat(&rooms.dir.path().join("state"), Filter::default()).unwrap();
        let deleted: Vec<String> = log
            .filter_map(|line| match line.unwrap() {
                Line::Record { json, .. } => Some(json),
                Line::Damaged { .. } => None,
            })
            .filter(|json| json.contains("pool_deleted"))
            .collect();
        assert_eq!(deleted.len(), 1, "{deleted:?}");
        assert!(deleted[0].contains(r#""p""#), "{deleted:?}");
    }
}
