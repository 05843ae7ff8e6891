//! What a reader of `Claims.List` or `Watch` gets to see: decided on the record itself, so that only what is shown is
//! ever rendered.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use sandbox_protocol::{id::SandboxId, v1};

use super::{
    Ctx, Refusal,
    desk::{Desk, is_operator, lock},
    parse,
};
use crate::{access::Caller, sandbox::Sandbox, words::Name};

/// The filters of List and Watch as they came.
pub(super) struct Wish {
    pub(super) states: Vec<i32>,
    pub(super) pools: Vec<String>,
    pub(super) labels: HashMap<String, String>,
    pub(super) owner: Option<String>,
}

/// Which sandboxes are looked at.
#[derive(Debug, Clone, Copy)]
enum Scope {
    /// Each.
    All,
    /// The holder of a claim's token sees one, or none if it opens none.
    Only(Option<SandboxId>),
}

/// What a reader sees.
#[derive(Debug)]
pub(super) struct Filter {
    caller: Caller,
    operator: bool,
    scope: Scope,
    states: BTreeSet<v1::State>,
    pools: BTreeSet<Name>,
    labels: BTreeMap<String, String>,
    owner: Option<String>,
}

impl Filter {
    /// Checks a wish.
    ///
    /// # Errors
    /// `FIELD_INVALID`, and `TOKEN_REQUIRED` or `TOKEN_INVALID`.
    pub(super) fn new(desk: &Desk, ctx: &Ctx, wish: Wish) -> Result<Self, Refusal> {
        let (operator, scope) = match &ctx.caller {
            Caller::Known(principal) => (is_operator(principal), Scope::All),
            Caller::Claim(_) => (false, Scope::Only(opened_by(desk, &ctx.caller))),
            Caller::Nobody | Caller::Stranger => (is_operator(&ctx.principal()?), Scope::All),
        };
        let mut states = parse::states(&wish.states)?;
        if states.is_empty() {
            states.extend([v1::State::Claimed, v1::State::Ending, v1::State::Failed]);
        }
        Ok(Self {
            caller: ctx.caller.clone(),
            operator,
            scope,
            states,
            pools: parse::pools(&wish.pools)?,
            labels: parse::labels(wish.labels)?,
            owner: parse::owner(wish.owner)?,
        })
    }

    /// What there is to look at behind `after`, in the order of ids.
    pub(super) fn candidates(&self, desk: &Desk, after: Option<SandboxId>) -> Vec<Arc<Sandbox>> {
        let sandboxes = &desk.claims.sandboxes;
        match self.scope {
            Scope::All => sandboxes.list(after),
            Scope::Only(only) => {
                let behind = only.filter(|id| after.is_none_or(|after| *id > after));
                behind.and_then(|id| sandboxes.get(id)).into_iter().collect()
            }
        }
    }

    /// Whether a change of this sandbox can be news at all.
    pub(super) fn concerns(&self, id: SandboxId) -> bool {
        match self.scope {
            Scope::All => true,
            Scope::Only(only) => only == Some(id),
        }
    }

    /// Whether the reader may know of it.
    pub(super) fn may_see(&self, sandbox: &Sandbox) -> bool {
        self.caller.opens(Some(&lock(sandbox))).is_some()
    }

    /// Whether the reader may know of it and asked for such.
    pub(super) fn shows(&self, sandbox: &Sandbox) -> bool {
        self.fits(sandbox) && self.may_see(sandbox)
    }

    fn fits(&self, sandbox: &Sandbox) -> bool {
        sandbox.with_life(|life| {
            let claim = life.claim();
            let pool = claim
                .and_then(|claim| claim.pool.as_ref())
                .or(sandbox.pool.as_ref());
            let label = |key: &str| claim.and_then(|claim| claim.labels.get(key));
            self.states.contains(&life.state())
                && (self.pools.is_empty() || pool.is_some_and(|pool| self.pools.contains(pool)))
                && (self.owner.as_deref())
                    .is_none_or(|owner| owner == claim.map_or("", |claim| &*claim.owner))
                && self.labels.iter().all(|(key, value)| label(key) == Some(value))
        })
    }

    /// As this reader is shown it.
    pub(super) fn view(&self, desk: &Desk, sandbox: &Sandbox) -> v1::Sandbox {
        sandbox.view(&desk.claims.sandboxes, self.operator)
    }

    /// Whether a view is of a state that was asked for: it may be a moment younger than the look that chose it.
    pub(super) fn has_state(&self, view: &v1::Sandbox) -> bool {
        self.states.contains(&view.state())
    }
}

/// The sandbox that a claim's token opens.
fn opened_by(desk: &Desk, caller: &Caller) -> Option<SandboxId> {
    let all = desk.claims.sandboxes.list(None);
    let opened = all
        .iter()
        .find(|sandbox| caller.opens(Some(&lock(sandbox))).is_some());
    opened.map(|sandbox| sandbox.id)
}
