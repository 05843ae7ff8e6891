//! What a pool is to be, from the configuration file or from the API.

use std::time::Duration;

use sandbox_protocol::v1;

use super::policy::Bounds;
use crate::{
    config::PoolConfig,
    egress::PoolTerms,
    journal::PoolRow,
    words::{Name, PoolKey},
};

/// Who defined a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The configuration file.
    File,
    /// `Pools.Apply`.
    Applied,
}

/// Bounds of a lease, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseBounds {
    /// When none is asked for.
    pub secs: u32,
    /// The longest.
    pub max_secs: u32,
}

impl LeaseBounds {
    /// Where nothing else is said (docs/configuration.md: the defaults of a pool): an hour, a day at most.
    pub const DEFAULT: Self = Self {
        secs: 3600,
        max_secs: 24 * 3600,
    };
}

/// What a pool is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Its name.
    pub name: Name,
    /// What its sandboxes have in common.
    pub key: PoolKey,
    /// Floor of the target.
    pub warm: u32,
    /// Ceiling of the target.
    pub warm_max: u32,
    /// Bounds of its claims' leases.
    pub lease: LeaseBounds,
    /// What it says about its sandboxes' doors.
    pub doors: PoolTerms,
    /// Who defined it.
    pub source: Source,
}

impl Spec {
    /// A checked pool, and who defined it.
    #[must_use]
    pub fn new(name: Name, pool: &PoolConfig, source: Source) -> Self {
        let secs = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        Self {
            name,
            key: pool.key.clone(),
            warm: pool.warm,
            warm_max: pool.warm_max,
            lease: LeaseBounds {
                secs: secs(pool.lease),
                max_secs: secs(pool.lease_max),
            },
            doors: PoolTerms {
                policy: pool.egress.clone(),
                requires_claim_layer: pool.require_claim_policy,
            },
            source,
        }
    }

    /// Bounds of the target.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        Bounds::new(self.warm, self.warm_max)
    }

    /// As the journal has it.
    #[must_use]
    pub fn to_row(&self) -> PoolRow {
        PoolRow {
            name: self.name.clone(),
            key: self.key.clone(),
            warm: self.warm,
            warm_max: self.warm_max,
            lease_secs: self.lease.secs,
            lease_max_secs: self.lease.max_secs,
            egress: self.doors.policy.clone(),
            require_claim_policy: self.doors.requires_claim_layer,
            unknown: Default::default(),
        }
    }

    /// From the journal.
    #[must_use]
    pub fn from_row(row: &PoolRow) -> Self {
        Self {
            name: row.name.clone(),
            key: row.key.clone(),
            warm: row.warm,
            warm_max: row.warm_max,
            lease: LeaseBounds {
                secs: row.lease_secs,
                max_secs: row.lease_max_secs,
            },
            doors: PoolTerms {
                policy: row.egress.clone(),
                requires_claim_layer: row.require_claim_policy,
            },
            source: Source::Applied,
        }
    }

    /// As the API has it.
    #[must_use]
    pub fn to_proto(&self) -> v1::PoolSpec {
        v1::PoolSpec {
            name: self.name.to_string(),
            key: Some(self.key.to_proto()),
            warm: self.warm,
            warm_max: Some(self.warm_max),
            lease_secs: Some(self.lease.secs),
            lease_max_secs: Some(self.lease.max_secs),
            egress: self
                .doors
                .policy
                .as_ref()
                .map(Name::to_string)
                .unwrap_or_default(),
            require_claim_policy: self.doors.requires_claim_layer,
        }
    }
}
