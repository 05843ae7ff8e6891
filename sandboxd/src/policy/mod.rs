//! What a guest may reach: targets in one form, rules, layers, the decision over them, and which addresses may be
//! dialled. Pure: names are resolved and connections made by `egress`.
//!
//! May call: words.
//! Never inside: I/O, time, a default of the configuration; an answer that is not a denial where something is missing.
//! Cancel safety: nothing here waits.

mod authority;
mod decide;
mod keep;
mod layer;
mod onwards;
mod path;
mod rule;
mod secret;
#[cfg(test)]
mod tests;
mod vet;
#[cfg(test)]
mod vet_tests;

pub use self::{
    authority::{Authority, Host, TargetError},
    decide::{
        ClaimSide, Decision, Named, PoolSide, Ruling, Seen, Side, SideVerdict, Sides, TenantSide,
        allowed_port, decide,
    },
    keep::{Keep, Retention},
    layer::{Layer, LayerFault, Mode},
    onwards::{ProxyKind, Source, Sources, UpstreamTerms},
    rule::{Effect, HostPattern, Rule, RuleFault, RuleFields},
    secret::{SecretSource, SecretTerms, may_be_secret},
    vet::{Internal, Judged, Opening, Vetted, Vetting, Who},
};
