//! What the daemon itself does for the front desk: reload, doctor, facts of the host.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use arc_swap::ArcSwap;

use super::{engines, listen};
use crate::{
    access::Access,
    api::{
        AccessNow, Certificates,
        desk::{Desk, Host, Reloaded},
    },
    claim::Claims,
    clock::WallTime,
    config::{self, Config, TenantPools},
    doctor::{self, Check},
    engine::Engine,
    pool::{Source, Spec as PoolSpec},
    telemetry::{chain, log::Logging},
    template::Spec as TemplateSpec,
    words::{MemBytes, Name},
};

/// The daemon, as its front desk sees it.
#[derive(Debug)]
pub(super) struct DaemonHost {
    config: ArcSwap<Config>,
    file: Option<PathBuf>,
    logging: Weak<Logging>,
    claims: Claims,
    access: AccessNow,
    engine: Arc<dyn Engine>,
    started_at: WallTime,
    desk: OnceLock<Desk>,
    certificates: OnceLock<Arc<Certificates>>,
    /// One reload at a time: a call and a signal may want one together.
    reloading: Mutex<()>,
}

impl DaemonHost {
    /// A daemon with this configuration, from this file if there is one.
    #[must_use]
    pub(super) fn new(
        config: Config,
        file: Option<PathBuf>,
        logging: Weak<Logging>,
        claims: Claims,
        access: AccessNow,
        engine: Arc<dyn Engine>,
    ) -> Self {
        let started_at = claims.sandboxes.means().clock.wall();
        Self {
            config: ArcSwap::from_pointee(config),
            file,
            logging,
            claims,
            access,
            engine,
            started_at,
            desk: OnceLock::new(),
            certificates: OnceLock::new(),
            reloading: Mutex::new(()),
        }
    }

    /// Names the desk whose tenants a reload sets.
    pub(super) fn attach(&self, desk: Desk) {
        // There is one desk.
        drop(self.desk.set(desk));
    }

    /// Names the certificates of the TLS listener, if there is one: a reload sets their files.
    pub(super) fn present(&self, certificates: Option<Arc<Certificates>>) {
        if let Some(certificates) = certificates {
            // There is one TLS listener.
            drop(self.certificates.set(certificates));
        }
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

    /// What tenants may claim.
    #[must_use]
    pub(super) fn tenants(&self) -> BTreeMap<Name, TenantPools> {
        tenants(&self.config.load())
    }

    /// Puts a checked configuration in force. Nothing here can fail, so that a reload is all or nothing.
    fn put_in_force(&self, old: &Config, new: &Config) {
        let access: Access = listen::access(&new.access);
        self.access.store(Arc::new(access));
        if let Some(desk) = self.desk.get() {
            desk.tenants.store(Arc::new(tenants(new)));
        }
        self.claims.templates.set_sizes(new.sizes.clone());
        self.claims.templates.set_specs(template_specs(new));
        for name in old.pools.keys().filter(|name| !new.pools.contains_key(*name)) {
            self.claims.pools.remove(name);
        }
        for spec in pool_specs(new) {
            self.claims.pools.set(spec);
        }
    }
}

impl Host for DaemonHost {
    fn reload(&self) -> Result<Reloaded, String> {
        let file = self
            .file
            .as_ref()
            .ok_or("dev mode has no configuration file to read again")?;
        let _one = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Config::read(file, &config::Host::look()).map_err(|error| error.to_string())?;
        let old = self.config.load_full();
        let diff = config::diff(&old, &new);
        let new = config::in_force(&old, &new);
        let certificates = self.certificates(&old, &new)?;
        if let Some(logging) = self.logging.upgrade() {
            logging
                .set_filter(&new.log.filter)
                .map_err(|error| error.to_string())?;
        }
        if let (Some(mine), Some(new)) = (self.certificates.get(), certificates) {
            mine.replace(new);
        }
        self.put_in_force(&old, &new);
        self.config.store(Arc::new(new));
        Ok(Reloaded {
            changed: diff.changed,
            needs_restart: diff.needs_restart,
        })
    }

    fn doctor(&self) -> Vec<Check> {
        let config = self.config.load();
        let mut given = engines::given(&config);
        given.accel = Some((self.engine.accel(), self.engine.accel_why()));
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

fn tenants(config: &Config) -> BTreeMap<Name, TenantPools> {
    config
        .tenants
        .iter()
        .map(|(name, tenant)| (name.clone(), tenant.pools.clone()))
        .collect()
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

/// Pools of the configuration file.
#[must_use]
pub(super) fn pool_specs(config: &Config) -> Vec<PoolSpec> {
    let specs = config
        .pools
        .iter()
        .map(|(name, pool)| PoolSpec::new(name.clone(), pool, Source::File));
    specs.collect()
}
