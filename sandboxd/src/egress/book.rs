//! Named policies, and which of them pools and tenants have.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwap;

use crate::{
    policy::{ClaimSide, Layer, Named, PoolSide, Sides, TenantSide},
    words::{Name, OPERATOR},
};

/// What a pool says about its sandboxes' doors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolTerms {
    /// Its policy; none denies.
    pub policy: Option<Name>,
    /// A claim must bring a layer of its own.
    pub requires_claim_layer: bool,
}

#[derive(Debug, Clone, Default)]
struct Pages {
    policies: BTreeMap<Name, Arc<Layer>>,
    /// By the owner of a claim, as it stands there.
    tenants: BTreeMap<String, Option<Name>>,
    pools: BTreeMap<Name, PoolTerms>,
}

/// Which policies there are and who has which. Reading takes no lock.
#[derive(Debug, Default)]
pub struct Book {
    pages: ArcSwap<Pages>,
    /// One change at a time.
    changing: Mutex<()>,
}

impl Book {
    /// Sets the policies, and those of the tenants.
    pub fn set(&self, policies: BTreeMap<Name, Arc<Layer>>, tenants: BTreeMap<Name, Option<Name>>) {
        self.change(|pages| {
            pages.policies = policies;
            pages.tenants = tenants
                .into_iter()
                .map(|(tenant, policy)| (tenant.into(), policy))
                .collect();
        });
    }

    /// Sets what a pool says.
    pub fn set_pool(&self, pool: &Name, terms: PoolTerms) {
        self.change(|pages| drop(pages.pools.insert(pool.clone(), terms)));
    }

    /// A pool is no more.
    pub fn forget_pool(&self, pool: &Name) {
        self.change(|pages| drop(pages.pools.remove(pool)));
    }

    fn change(&self, change: impl FnOnce(&mut Pages)) {
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pages = Pages::clone(&self.pages.load());
        change(&mut pages);
        self.pages.store(Arc::new(pages));
    }

    /// Whether there is a policy of this name.
    #[must_use]
    pub fn has(&self, policy: &Name) -> bool {
        self.pages.load().policies.contains_key(policy)
    }

    /// Whether a pool's policy has a rule that looks into tunnels.
    #[must_use]
    pub fn pool_looks_inside(&self, pool: &Name) -> bool {
        let pages = self.pages.load();
        let policy = pages.pools.get(pool).and_then(|terms| terms.policy.as_ref());
        policy
            .and_then(|policy| pages.policies.get(policy))
            .is_some_and(|layer| layer.looks_inside())
    }

    /// What is in force for a claim of `tenant` that `pool` served and that brought `layer`. Whatever is not there is a
    /// missing side, which denies.
    #[must_use]
    pub fn sides(&self, pool: Option<&Name>, tenant: &str, layer: Option<&Arc<Layer>>) -> Sides {
        let pages = self.pages.load();
        let named = |name: &Name| {
            let layer = pages.policies.get(name)?;
            Some(Named {
                name: name.clone(),
                layer: Arc::clone(layer),
            })
        };
        let terms = pool.and_then(|pool| pages.pools.get(pool));
        let pool = terms.and_then(|terms| terms.policy.as_ref()).and_then(named);
        let tenant = if tenant == OPERATOR {
            TenantSide::All
        } else {
            let policy = pages.tenants.get(tenant).and_then(Option::as_ref);
            policy
                .and_then(named)
                .map_or(TenantSide::Missing, TenantSide::Layer)
        };
        let claim = match (layer, terms) {
            (Some(layer), _) => ClaimSide::Layer(Arc::clone(layer)),
            (None, Some(terms)) if terms.requires_claim_layer => ClaimSide::Missing,
            (None, Some(_) | None) => ClaimSide::Open,
        };
        Sides {
            pool: pool.map_or(PoolSide::Missing, PoolSide::Layer),
            tenant,
            claim,
        }
    }
}
