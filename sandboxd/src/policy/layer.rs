//! A layer: rules of which the first that matches decides, and none denies.

use std::{collections::BTreeSet, fmt::Write as _};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::rule::{Rule, RuleFault, RuleFields};

/// Hosts of one layer.
pub(super) const HOSTS: usize = sandbox_protocol::limits::POLICY_HOSTS;

/// What becomes of a layer's denial.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It holds.
    #[default]
    Enforce,
    /// It is recorded and passes.
    Report,
}

/// What is wrong with a layer: the rule by its place, and in it the field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rule {}: {fault}", .at + 1)]
pub struct LayerFault {
    /// Place of the rule, from 0.
    pub at: usize,
    /// What is wrong with it.
    #[source]
    pub fault: RuleFault,
}

/// A checked layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    mode: Mode,
    rules: Vec<Rule>,
    digest: String,
}

impl Layer {
    /// Checks a layer of at most `most` rules.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn new(mode: Mode, rules: Vec<RuleFields>, most: usize) -> Result<Self, Vec<LayerFault>> {
        let mut faults = Vec::new();
        let whole = |at, what: &str, allowed| LayerFault {
            at,
            fault: RuleFault {
                field: "id",
                what: what.to_owned(),
                allowed,
            },
        };
        if rules.len() > most {
            return Err(vec![whole(most, "too many rules", "at most 256, in a claim 64")]);
        }
        let hosts: usize = rules.iter().map(|rule| rule.host.len()).sum();
        if hosts > HOSTS {
            return Err(vec![whole(
                0,
                "too many hosts in all rules together",
                "at most 4096",
            )]);
        }
        let digest = digest(mode, &rules);
        let mut ids = BTreeSet::new();
        let mut checked = Vec::with_capacity(rules.len());
        for (at, rule) in rules.into_iter().enumerate() {
            if !ids.insert(rule.id.clone()) {
                faults.push(whole(at, "another rule has this id", "each rule has its own"));
            }
            match Rule::new(rule) {
                Ok(rule) => checked.push(rule),
                Err(wrong) => faults.extend(wrong.into_iter().map(|fault| LayerFault { at, fault })),
            }
        }
        if faults.is_empty() {
            Ok(Self {
                mode,
                rules: checked,
                digest,
            })
        } else {
            Err(faults)
        }
    }

    /// A layer that denies everything: what stands for one that can no longer be read.
    #[must_use]
    pub fn nothing() -> Self {
        Self {
            mode: Mode::Enforce,
            rules: Vec::new(),
            digest: digest(Mode::Enforce, &[]),
        }
    }

    /// What becomes of its denials.
    #[must_use]
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Its rules, in the order in which they are asked.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether a rule of it wants to look into tunnels.
    #[must_use]
    pub fn looks_inside(&self) -> bool {
        self.rules.iter().any(|rule| rule.fields().intercept)
    }

    /// SHA-256 of what it says, in lower-case hexadecimal.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

fn digest(mode: Mode, rules: &[RuleFields]) -> String {
    let said = serde_json::to_vec(&(mode, rules)).expect("rules are text and numbers");
    let hash = Sha256::digest(said);
    hash.iter().fold(String::with_capacity(64), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}
