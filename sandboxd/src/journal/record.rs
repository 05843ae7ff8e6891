//! Records: what changed, and nothing else. JSON inside a frame, so that `journal cat` stays readable.
//!
//! A transition carries only what it changes; its size does not depend on what else lives. Fields that this version
//! does not know are carried along, transitions that it does not know stop the start (see [`Unreadable`]).

use std::{collections::BTreeMap, fmt::Display, str::FromStr};

use sandbox_protocol::id::{ClaimId, SandboxId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::{
    clock::{Tick, WallTime},
    names::SlotNumber,
    words::{Accel, EngineKind, Name, PoolKey, Tier},
};

/// Fields of a newer version, kept as they were read.
pub type Unknown = BTreeMap<String, Value>;

/// One entry of the log.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Its number: the log counts up by one, across segments and restarts.
    pub seq: u64,
    /// When it was appended.
    pub at: WallTime,
    /// Which sandbox it is about; none for pools, boots and the drain.
    pub sandbox: Option<SandboxId>,
    /// What changed.
    pub transition: Transition,
    /// Fields of the transition that this version does not know.
    pub unknown: Unknown,
}

/// What changed. Closed: a name that is not here was written by a newer version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transition {
    /// The daemon started.
    Boot {
        /// The kernel's boot id; another one means that no process of before lives.
        boot_id: String,
    },
    /// A sandbox is about to be made. Stands before anything of it exists on the host.
    Making {
        /// Its place, from which every name on the host follows.
        slot: SlotNumber,
        /// What it is made of.
        key: PoolKey,
        /// The slot of its TAP, on lane guarded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tap: Option<SlotNumber>,
        /// The pool it is made for, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pool: Option<Name>,
        /// How it is made.
        tier: Tier,
        /// What runs it.
        engine: EngineKind,
        /// On what.
        accel: Accel,
        /// Digest of the template, as it names itself.
        template_digest: String,
        /// When.
        created_at: WallTime,
    },
    /// It passed the checks that make it fit to be claimed. A second one replaces the facts of the first.
    Warmed {
        /// Process of the VM; none where the engine has no process of its own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        /// When that process started, in the kernel's clock ticks since boot: with the pid it names one process.
        started: u64,
        /// How many times the guest was renewed.
        generation: u64,
        /// Agent proto that was agreed on.
        proto: u32,
        /// What silkd says it is.
        agent_version: String,
    },
    /// It is somebody's.
    Claimed(Box<ClaimFacts>),
    /// The lease was set anew.
    Renewed {
        /// Length of the lease, seconds.
        lease_secs: u32,
        /// When it is over, in elapsed time of this boot.
        expires_tick: Tick,
        /// The same, to tell people.
        expires_at: WallTime,
    },
    /// What the claim narrows was set anew.
    Narrowed {
        /// The claim's layer; none: it does not narrow.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        egress: Option<LayerRow>,
    },
    /// It ends: nothing but an end comes after.
    Ending {
        /// Why, in words that name no secret.
        why: String,
    },
    /// It is dead, and its claimer has not heard of it.
    Failed {
        /// Why.
        why: String,
    },
    /// Nothing of it is left on the host.
    Gone,
    /// Given to nobody; an operator ends it.
    Quarantined {
        /// Why.
        why: String,
    },
    /// A pool was made or changed through the API.
    PoolApplied {
        /// The pool as it is now.
        spec: PoolRow,
    },
    /// A pool was deleted through the API.
    PoolDeleted {
        /// Which.
        name: Name,
    },
    /// The operator's drain was turned on or off.
    Drain {
        /// Whether the host drains.
        on: bool,
    },
    /// How far the disk has the files of the audit; what is not said is as it was.
    Audited {
        /// Of decisions and connections.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        audit: Option<HeadRow>,
        /// Of what claims used.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<HeadRow>,
    },
}

impl Transition {
    /// Whether this ends something: such a record is tried on a full disk too, where changes are refused.
    #[must_use]
    pub const fn is_ending(&self) -> bool {
        match self {
            Self::Ending { .. } | Self::Failed { .. } | Self::Gone | Self::Quarantined { .. } => true,
            Self::Boot { .. }
            | Self::Making { .. }
            | Self::Warmed { .. }
            | Self::Claimed(_)
            | Self::Renewed { .. }
            | Self::Narrowed { .. }
            | Self::PoolApplied { .. }
            | Self::PoolDeleted { .. }
            | Self::Drain { .. }
            | Self::Audited { .. } => false,
        }
    }
}

/// How far a chain of lines has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadRow {
    /// The last number.
    pub seq: u64,
    /// The hash of its line, in lower-case hexadecimal digits.
    pub hash: String,
}

/// What a claim settled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimFacts {
    /// The claim.
    #[serde(with = "as_text")]
    pub claim: ClaimId,
    /// Whose it is.
    pub owner: String,
    /// SHA-256 of the claim token, lower-case hexadecimal; the token itself is written nowhere.
    pub token_sha256: String,
    /// Length of the lease, seconds.
    pub lease_secs: u32,
    /// When it is over, in elapsed time of this boot.
    pub expires_tick: Tick,
    /// The same, to tell people.
    pub expires_at: WallTime,
    /// When it was claimed.
    pub claimed_at: WallTime,
    /// The pool it was asked of, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Name>,
    /// How it was served.
    pub tier: Tier,
    /// The claimer's labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What its guest may reach, where the claim narrows that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<LayerRow>,
    /// The request's key, if it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_key: Option<String>,
    /// Digest of the request that the key belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_digest: Option<String>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A claim's layer of what its guest may reach.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerRow {
    /// Its denials are told and pass.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub report: bool,
    /// Its rules, in their order.
    pub rules: Vec<RuleRow>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A rule of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RuleRow {
    /// Its id.
    pub id: String,
    /// It denies; else it allows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deny: bool,
    /// Hosts.
    pub host: Vec<String>,
    /// Ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u32>,
    /// Methods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Prefixes of paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Its tunnels are looked into.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub intercept: bool,
    /// Told to whoever it denies.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A pool that was made through the API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolRow {
    /// Its name.
    pub name: Name,
    /// What its sandboxes have in common.
    pub key: PoolKey,
    /// Sandboxes kept warm.
    pub warm: u32,
    /// The most that demand may raise that to.
    pub warm_max: u32,
    /// Lease of a claim that asks for none, seconds.
    pub lease_secs: u32,
    /// Longest lease, seconds.
    pub lease_max_secs: u32,
    /// Named egress policy of its sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Name>,
    /// A claim must bring a layer of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_claim_policy: bool,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A whole record with a good checksum that this version cannot read: a newer one wrote it.
#[derive(Debug, thiserror::Error)]
#[error("not a record of this version")]
pub(super) struct Unreadable(#[source] serde_json::Error);

#[derive(Serialize)]
struct Out<'a> {
    at: WallTime,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "opt_text")]
    sandbox: Option<SandboxId>,
    #[serde(rename = "do")]
    transition: &'a Transition,
}

#[derive(Deserialize)]
struct In {
    at: WallTime,
    #[serde(default, deserialize_with = "some_text")]
    sandbox: Option<SandboxId>,
    #[serde(rename = "do")]
    transition: Transition,
}

/// The JSON of a record; its number stands in the frame.
pub(super) fn encode(at: WallTime, sandbox: Option<SandboxId>, transition: &Transition) -> Vec<u8> {
    // A claim without labels is some 420 bytes.
    let mut json = Vec::with_capacity(512);
    let out = Out {
        at,
        sandbox,
        transition,
    };
    serde_json::to_writer(&mut json, &out).expect("records have text keys and a Vec takes every byte");
    json
}

/// Reads the JSON of a record.
pub(super) fn decode(seq: u64, json: &[u8]) -> Result<Record, Unreadable> {
    let read: In = serde_json::from_slice(json).map_err(Unreadable)?;
    let again = encode(read.at, read.sandbox, &read.transition);
    // What this version wrote reads back to the same bytes; only a difference needs the slow look.
    let unknown = if again == json || carries_its_own(&read.transition) {
        Unknown::new()
    } else {
        unknown_fields(json, &again)
    };
    Ok(Record {
        seq,
        at: read.at,
        sandbox: read.sandbox,
        transition: read.transition,
        unknown,
    })
}

/// Whether the transition's own value keeps what it does not know.
const fn carries_its_own(transition: &Transition) -> bool {
    match transition {
        Transition::Claimed(_) | Transition::PoolApplied { .. } => true,
        Transition::Boot { .. }
        | Transition::Making { .. }
        | Transition::Warmed { .. }
        | Transition::Renewed { .. }
        | Transition::Narrowed { .. }
        | Transition::Ending { .. }
        | Transition::Failed { .. }
        | Transition::Gone
        | Transition::Quarantined { .. }
        | Transition::PoolDeleted { .. }
        | Transition::Drain { .. }
        | Transition::Audited { .. } => false,
    }
}

/// Fields of the transition in `json` that `known`, the same record as this version writes it, does not have.
fn unknown_fields(json: &[u8], known: &[u8]) -> Unknown {
    let fields = |bytes: &[u8]| -> serde_json::Map<String, Value> {
        let mut value: Value = serde_json::from_slice(bytes).unwrap_or_default();
        let transition = value.get_mut("do").and_then(Value::as_object_mut);
        match transition
            .and_then(|tagged| tagged.values_mut().next())
            .map(Value::take)
        {
            Some(Value::Object(fields)) => fields,
            Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_))
            | None => serde_json::Map::new(),
        }
    };
    let known = fields(known);
    fields(json)
        .into_iter()
        // A field of ours that says nothing is left out when we write.
        .filter(|(name, value)| !known.contains_key(name) && !value.is_null())
        .collect()
}

/// Ids as their text.
pub(super) mod as_text {
    use super::{Deserialize, Deserializer, Display, FromStr, Serializer};

    pub(in super::super) fn serialize<T: Display, S: Serializer>(id: &T, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(id)
    }

    pub(in super::super) fn deserialize<'de, T, D>(d: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

fn opt_text<S: Serializer>(id: &Option<SandboxId>, s: S) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => s.collect_str(id),
        None => s.serialize_none(),
    }
}

fn some_text<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SandboxId>, D::Error> {
    as_text::deserialize(d).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::tests::samples;

    #[test]
    fn every_transition_reads_back_as_it_was() {
        for (sandbox, transition) in samples::all() {
            let json = encode(WallTime::from_micros(7), sandbox, &transition);
            let record = decode(9, &json).unwrap();
            assert_eq!(
                (record.seq, record.at.as_micros(), record.sandbox),
                (9, 7, sandbox)
            );
            assert_eq!(record.transition, transition);
            assert!(record.unknown.is_empty(), "{:?}", record.unknown);
        }
    }

    #[test]
    fn unknown_fields_are_kept_and_unknown_transitions_refused() {
        let json = br#"{"at":1,"sandbox":"sb_00000000000000000000000000000001","do":{"ending":{"why":"x","by":"op"}},"trace":3}"#;
        let record = decode(1, json).unwrap();
        assert_eq!(record.unknown.get("by"), Some(&Value::from("op")));
        assert!(decode(1, br#"{"at":1,"do":{"hibernated":{"file":"x"}}}"#).is_err());
        assert!(decode(1, b"null").is_err());
    }
}
