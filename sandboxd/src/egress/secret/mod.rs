//! Secrets: values that requests are given on their way out, and that no guest, record or log ever sees.
//!
//! A value is read once per load, from where the configuration says, into storage that is wiped when the last request
//! that was given it has been written. It has no `Serialize`, and its `Debug` shows nothing.

mod given;
mod source;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, ffi::OsString, fmt, sync::Arc};

use bytes::Bytes;
use http::HeaderValue;
use sandbox_protocol::door::DoorReason;

pub use self::{given::Given, source::SecretError};
use crate::{
    policy::{Authority, Decision, SecretTerms, Seen},
    words::Name,
};

/// All secrets of the configuration.
#[derive(Debug, Clone, Default)]
pub struct Secrets(Arc<BTreeMap<Name, Secret>>);

/// What is said of a secret, and its value; none: it could not be read.
struct Secret {
    terms: SecretTerms,
    value: Option<HeaderValue>,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("terms", &self.terms)
            .field("is_there", &self.value.is_some())
            .finish()
    }
}

/// A secret whose value could not be read.
#[derive(Debug, thiserror::Error)]
#[error("egress.secret.{name}")]
pub struct Unreadable {
    /// Which.
    pub name: Name,
    /// Why.
    #[source]
    pub error: SecretError,
}

impl Secrets {
    /// Reads all values; `var` is the daemon's environment. What could not be read is told beside, and its rules deny.
    pub fn read(
        terms: &BTreeMap<Name, SecretTerms>,
        var: impl Fn(&str) -> Option<OsString>,
    ) -> (Self, Vec<Unreadable>) {
        let mut unreadable = Vec::new();
        let mut secrets = BTreeMap::new();
        for (name, terms) in terms {
            let value = match source::read(terms, &var) {
                Ok(storage) => Some(header_value(Bytes::from_owner(storage))),
                Err(error) => {
                    unreadable.push(Unreadable {
                        name: name.clone(),
                        error,
                    });
                    None
                }
            };
            let secret = Secret {
                terms: terms.clone(),
                value: value.flatten(),
            };
            secrets.insert(name.clone(), secret);
        }
        (Self(Arc::new(secrets)), unreadable)
    }

    /// Names of those whose value is another than in `old`.
    #[must_use]
    pub fn differing(&self, old: &Self) -> Vec<Name> {
        let value = |secrets: &Self, name: &Name| secrets.0.get(name).map(|secret| secret.value.clone());
        let names = self.0.keys();
        names
            .filter(|name| value(self, name) != value(old, name))
            .cloned()
            .collect()
    }

    /// What a request is given by the rule that decided it. A tunnel's head is given nothing.
    ///
    /// # Errors
    /// `secret_unavailable`: the rule names one that is not there, or not for this host or tenant. A request that should
    /// have been given one does not go without.
    pub fn give(
        &self,
        decision: &Decision<'_>,
        target: &Authority,
        seen: Seen<'_>,
        tenant: &str,
    ) -> Result<Option<Given>, DoorReason> {
        let Some(rule) = decision.secret_rule().map(crate::policy::Rule::fields) else {
            return Ok(None);
        };
        let may_be_seen = match seen {
            Seen::Tunnel => return Ok(None),
            Seen::Request { .. } => rule.cleartext_secret,
            // Only what has verified the origin's certificate sees inside.
            Seen::Inside { .. } => true,
        };
        let given = rule.secret.as_deref().and_then(|name| {
            let (_, secret) = self.0.iter().find(|(known, _)| known.as_str() == name)?;
            let holds = may_be_seen && secret.terms.holds(target.host(), tenant);
            Some(Given {
                name: name.to_owned(),
                header: secret.terms.header.clone().filter(|_| holds)?,
                value: secret.value.clone()?,
            })
        });
        given.map(Some).ok_or(DoorReason::SecretUnavailable)
    }

    /// The credentials that an upstream proxy is shown.
    ///
    /// # Errors
    /// `secret_unavailable`.
    pub(super) fn credentials(&self, name: &Name) -> Result<HeaderValue, DoorReason> {
        let value = self.0.get(name).and_then(|secret| secret.value.clone());
        value.ok_or(DoorReason::SecretUnavailable)
    }
}

/// Shares the storage. What was read is header text, so that there is always one.
fn header_value(storage: Bytes) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_maybe_shared(storage).ok()?;
    // HPACK keeps it out of its tables, and Debug shows nothing.
    value.set_sensitive(true);
    Some(value)
}
