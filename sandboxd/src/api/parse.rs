//! Requests of clients, checked against their limits and made into values of the domain. An absent optional field takes
//! its default; a value out of range is refused with the field named, never clamped.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use prost::Message as _;
use sandbox_protocol::{limits, reason::Reason, v1};
use sha2::{Digest as _, Sha256};

use super::Refusal;
use crate::{
    access::TokenHash,
    claim::{Ask, Wanted},
    clock::Tick,
    config::{PoolConfig, PoolFields, TenantPools},
    policy::{Effect, Layer, Mode, RuleFields},
    pool::{Source, Spec},
    words::{Lane, Name, PoolKey},
};

/// The size where none is named.
const DEFAULT_SIZE: &str = "small";
/// Names in a list of pools to look at; more than a node has in use.
const POOLS: usize = 64;
/// Variables of a claim's environment; with [`limits::CLAIM_ENV`] a mean of 64 bytes each.
const ENV_VARS: usize = 1024;
/// Longest user of a claim, the same as in silkd.
const USER: usize = 128;

/// A name in a field.
pub(super) fn name(field: &str, text: &str) -> Result<Name, Refusal> {
    text.parse()
        .map_err(|error: crate::words::NameError| Refusal::field(field, error.to_string()))
}

fn lane(field: &str, value: i32) -> Result<Lane, Refusal> {
    match v1::Lane::try_from(value) {
        Ok(v1::Lane::Unspecified | v1::Lane::None) => Ok(Lane::None),
        Ok(v1::Lane::Guarded) => Ok(Lane::Guarded),
        Err(_unknown) => Err(Refusal::field(field, "not a lane")),
    }
}

/// A key, with its defaults.
pub(super) fn key(field: &str, key: &v1::PoolKey) -> Result<PoolKey, Refusal> {
    let size = if key.size.is_empty() {
        DEFAULT_SIZE
    } else {
        &key.size
    };
    Ok(PoolKey {
        template: name(&format!("{field}.template"), &key.template)?,
        lane: lane(&format!("{field}.lane"), key.lane)?,
        size: name(&format!("{field}.size"), size)?,
    })
}

/// The key of a template's variant.
pub(super) fn variant(template: &str, lane_value: i32, size: &str) -> Result<PoolKey, Refusal> {
    let size = if size.is_empty() { DEFAULT_SIZE } else { size };
    Ok(PoolKey {
        template: name("name", template)?,
        lane: lane("lane", lane_value)?,
        size: name("size", size)?,
    })
}

/// Names of pools to look at; none: all.
pub(super) fn pools(names: &[String]) -> Result<BTreeSet<Name>, Refusal> {
    if names.len() > POOLS {
        return Err(Refusal::field("pools", format!("at most {POOLS}")));
    }
    names.iter().map(|text| name("pools", text)).collect()
}

/// States to look at, each once.
pub(super) fn states(states: &[i32]) -> Result<BTreeSet<v1::State>, Refusal> {
    let known = |state: &i32| match v1::State::try_from(*state) {
        Ok(v1::State::Unspecified) | Err(_) => Err(Refusal::field("states", "not a state")),
        Ok(known) => Ok(known),
    };
    states.iter().map(known).collect()
}

/// An owner to look at: a tenant's name, or `operator`; empty: nobody's.
pub(super) fn owner(owner: Option<String>) -> Result<Option<String>, Refusal> {
    match owner {
        Some(text) if text.len() > limits::NAME => {
            Err(Refusal::field("owner", format!("at most {} bytes", limits::NAME)))
        }
        Some(_) | None => Ok(owner),
    }
}

/// Checks what a claim tells its guest, as the guest does: a refusal there has cost a warm sandbox.
fn for_guest(env: &[v1::EnvVar], user: &[u8]) -> Result<(), Refusal> {
    if env.len() > ENV_VARS {
        return Err(Refusal::field("env", format!("at most {ENV_VARS} variables")));
    }
    let bytes: usize = env.iter().map(|var| var.key.len() + var.value.len()).sum();
    if bytes + user.len() > limits::CLAIM_ENV {
        return Err(Refusal::field(
            "env",
            format!("with user at most {} bytes", limits::CLAIM_ENV),
        ));
    }
    let good = |var: &v1::EnvVar| {
        !var.key.is_empty() && !var.key.iter().any(|b| matches!(b, b'=' | 0)) && !var.value.contains(&0)
    };
    if !env.iter().all(good) {
        return Err(Refusal::field(
            "env",
            "a key is not empty and holds no = and no NUL, a value no NUL",
        ));
    }
    if user.len() > USER || user.contains(&0) {
        return Err(Refusal::field(
            "user",
            format!("at most {USER} bytes, without NUL"),
        ));
    }
    Ok(())
}

pub(super) fn labels(labels: HashMap<String, String>) -> Result<BTreeMap<String, String>, Refusal> {
    if labels.len() > limits::LABELS {
        return Err(Refusal::field("labels", format!("at most {}", limits::LABELS)));
    }
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._/-".contains(&b);
    for (key, value) in &labels {
        if key.is_empty() || key.len() > limits::LABEL_KEY || !key.bytes().all(plain) {
            return Err(Refusal::field(
                "labels",
                "a key has 1 to 63 characters of a-z 0-9 . _ / -",
            ));
        }
        if value.len() > limits::LABEL_VALUE {
            return Err(Refusal::field(
                "labels",
                format!("a value has at most {} bytes", limits::LABEL_VALUE),
            ));
        }
    }
    Ok(labels.into_iter().collect())
}

fn request_key(key: &str) -> Result<(), Refusal> {
    let printable = key.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    if key.is_empty() || key.len() > limits::REQUEST_KEY || !printable {
        return Err(Refusal::field(
            "request_key",
            "1 to 128 printable ASCII characters",
        ));
    }
    Ok(())
}

/// What a claim asks for.
pub(super) fn ask(
    mut request: v1::ClaimsClaimRequest,
    owner: Arc<str>,
    allowed: TenantPools,
    deadline: Option<Tick>,
) -> Result<Ask, Refusal> {
    let wanted = match &request.source {
        Some(v1::claims_claim_request::Source::Pool(pool)) => Wanted::Pool(name("pool", pool)?),
        Some(v1::claims_claim_request::Source::Key(wanted)) => Wanted::Key(key("key", wanted)?),
        None => {
            return Err(Refusal::field(
                "pool",
                "name a pool, or give a key of template, lane and size",
            ));
        }
    };
    if request.lease_secs == Some(0) {
        return Err(Refusal::new(
            Reason::LeaseOutOfRange,
            "a lease of 0 s is over before it begins",
        ));
    }
    let wait_ms = request.wait_ms.unwrap_or(limits::WAIT_DEFAULT_MS);
    if wait_ms > limits::WAIT_MAX_MS {
        return Err(Refusal::field(
            "wait_ms",
            format!("at most {}", limits::WAIT_MAX_MS),
        ));
    }
    for_guest(&request.env, &request.user)?;
    let keyed = match request.request_key.take() {
        Some(key) => {
            request_key(&key)?;
            Some((key, digest(&request)))
        }
        None => None,
    };
    Ok(Ask {
        owner,
        allowed,
        from: wanted,
        lease_secs: request.lease_secs,
        request: keyed,
        labels: labels(request.labels)?,
        wait: Duration::from_millis(wait_ms.into()),
        warm_only: request.warm_only,
        layer: request.egress.take().map(layer).transpose()?,
        env: request.env,
        user: request.user,
        deadline,
    })
}

/// A claim's layer, compiled.
pub(super) fn layer(policy: v1::EgressPolicy) -> Result<Arc<Layer>, Refusal> {
    let invalid = |message: String| Refusal::new(Reason::PolicyInvalid, message);
    if policy.encoded_len() > limits::CLAIM_POLICY {
        return Err(invalid(format!(
            "a claim's policy has at most {} bytes",
            limits::CLAIM_POLICY
        )));
    }
    let mode = match v1::EgressMode::try_from(policy.mode) {
        Ok(v1::EgressMode::Unspecified | v1::EgressMode::Enforce) => Mode::Enforce,
        Ok(v1::EgressMode::Report) => Mode::Report,
        Err(_unknown) => return Err(invalid("not a mode".into())),
    };
    let rule = |rule: v1::EgressRule| {
        let effect = match v1::EgressEffect::try_from(rule.effect) {
            Ok(v1::EgressEffect::Unspecified | v1::EgressEffect::Allow) => Effect::Allow,
            Ok(v1::EgressEffect::Deny) => Effect::Deny,
            Err(_unknown) => return Err(invalid(format!("rule {:?}: not an effect", rule.id))),
        };
        Ok(RuleFields {
            id: rule.id,
            effect,
            host: rule.host,
            ports: rule.ports,
            methods: rule.methods,
            paths: rule.paths,
            intercept: rule.intercept,
            message: rule.message,
            ..RuleFields::default()
        })
    };
    let rules = policy
        .rules
        .into_iter()
        .map(rule)
        .collect::<Result<Vec<_>, _>>()?;
    let compiled = Layer::new(mode, rules, limits::CLAIM_RULES);
    compiled.map(Arc::new).map_err(|faults| {
        let told: Vec<String> = faults.iter().map(ToString::to_string).collect();
        invalid(told.join("; "))
    })
}

/// Tells two requests apart; labels come in the order of their keys, `trace` does not count.
fn digest(request: &v1::ClaimsClaimRequest) -> String {
    let mut hash = Sha256::new();
    let labels: BTreeMap<_, _> = request.labels.iter().collect();
    for (key, value) in labels {
        for text in [key, value] {
            hash.update(text.len().to_be_bytes());
            hash.update(text);
        }
    }
    let rest = v1::ClaimsClaimRequest {
        labels: HashMap::new(),
        trace: false,
        ..request.clone()
    };
    hash.update(rest.encode_to_vec());
    TokenHash::from_bytes(hash.finalize().into()).to_hex()
}

/// What a pool is to be: the same bounds as in the configuration file.
pub(super) fn pool(spec: Option<v1::PoolSpec>) -> Result<Spec, Refusal> {
    let spec = spec.ok_or_else(|| Refusal::field("spec", "is missing"))?;
    let name = name("spec.name", &spec.name)?;
    let wanted = spec.key.ok_or_else(|| Refusal::field("spec.key", "is missing"))?;
    let key = key("spec.key", &wanted)?;
    let fields = PoolFields {
        key,
        warm: spec.warm,
        warm_max: spec.warm_max,
        lease_secs: spec.lease_secs,
        lease_max_secs: spec.lease_max_secs,
        egress: match &*spec.egress {
            "" => None,
            policy => Some(self::name("spec.egress", policy)?),
        },
        require_claim_policy: spec.require_claim_policy,
    };
    let pool = PoolConfig::new(fields).map_err(|faults| {
        let first = faults.into_iter().next();
        first.map_or_else(
            || Refusal::field("spec", "is not a pool"),
            |fault| {
                Refusal::field(
                    format!("spec.{}", fault.field),
                    format!("{}; allowed: {}", fault.what, fault.allowed),
                )
            },
        )
    })?;
    Ok(Spec::new(name, &pool, Source::Applied))
}
