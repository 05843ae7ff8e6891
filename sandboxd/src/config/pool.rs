//! What makes a pool right, wherever it comes from: the file, or `Pools.Apply`.

use std::time::Duration;

use sandbox_protocol::limits;

use super::types::PoolConfig;
use crate::words::{Name, PoolKey};

const LEASE: u32 = 3_600;
const LEASE_MAX: u32 = 24 * 3_600;
/// Largest floor of a pool.
pub(super) const WARM_LIMIT: u32 = 4_096;
/// Largest ceiling: the default of the largest floor.
pub(super) const WARM_MAX_LIMIT: u32 = 2 * WARM_LIMIT;

/// A pool as it was asked for; what is absent takes its default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolFields {
    /// What its sandboxes have in common.
    pub key: PoolKey,
    /// Floor of the adaptive target, 0 ..= 4,096.
    pub warm: u32,
    /// Its ceiling, `warm` ..= 8,192; twice `warm` unless given.
    pub warm_max: Option<u32>,
    /// Lease of a claim that asks for none, 1 ..= `lease_max_secs`; an hour, or the longest if that is shorter.
    pub lease_secs: Option<u32>,
    /// Longest lease, at most 30 days; a day unless given.
    pub lease_max_secs: Option<u32>,
    /// Named egress policy; none denies.
    pub egress: Option<Name>,
    /// A claim must bring a layer of its own.
    pub require_claim_policy: bool,
    /// Named upstream proxy; none: the node's.
    pub upstream: Option<Name>,
}

/// A field that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}; allowed: {allowed}")]
pub struct PoolFault {
    /// Its name in `PoolSpec`.
    pub field: &'static str,
    /// What is wrong.
    pub what: String,
    /// What is allowed.
    pub allowed: String,
}

impl PoolConfig {
    /// Checks the numbers; whether template and size exist and the lane can be had is for whoever knows them.
    ///
    /// # Errors
    /// Every field that is wrong.
    pub fn new(fields: PoolFields) -> Result<Self, Vec<PoolFault>> {
        let PoolFields {
            key,
            warm,
            warm_max,
            lease_secs,
            lease_max_secs,
            egress,
            require_claim_policy,
            upstream,
        } = fields;
        let mut faults = Vec::new();
        let mut within = |field, number: u32, low: u32, high: u32| {
            if !(low..=high).contains(&number) {
                faults.push(PoolFault {
                    field,
                    what: format!("{number} is out of range"),
                    allowed: format!("{low} to {high}"),
                });
            }
        };
        within("warm", warm, 0, WARM_LIMIT);
        let most = warm_max.unwrap_or(warm.saturating_mul(2).min(WARM_MAX_LIMIT));
        within("warm_max", most, warm.min(WARM_LIMIT), WARM_MAX_LIMIT);
        let longest = lease_max_secs.unwrap_or(LEASE_MAX);
        within("lease_max_secs", longest, 1, limits::LEASE_MAX_SECS);
        let lease = lease_secs.unwrap_or(LEASE.min(longest.max(1)));
        within("lease_secs", lease, 1, longest.clamp(1, limits::LEASE_MAX_SECS));
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Self {
            key,
            warm,
            warm_max: most,
            lease: Duration::from_secs(lease.into()),
            lease_max: Duration::from_secs(longest.into()),
            egress,
            require_claim_policy,
            upstream,
        })
    }
}
