//! What the operator says about a secret: where its value comes from, which field it becomes, for which hosts and for whom.

use std::path::PathBuf;

use http::{HeaderName, header};

use super::{authority::Host, rule::HostPattern, vet::Opening};

/// Fields that say where a request goes, how long it is, or what is about one connection: none is a secret's to set.
const REFUSED: [HeaderName; 10] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::CONNECTION,
    header::EXPECT,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::UPGRADE,
];
/// The same, of fields without a constant.
const REFUSED_TOO: [&str; 2] = ["keep-alive", "proxy-connection"];

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// A variable of the daemon's environment.
    Env(String),
    /// A file.
    File(PathBuf),
    /// A file of systemd's directory of credentials.
    Credential(String),
}

/// What is said about one secret. Its value is not part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretTerms {
    /// The field that it becomes; none: it is for upstream proxies alone.
    pub header: Option<HeaderName>,
    /// What stands before the value in the field.
    pub prefix: String,
    /// Where the value comes from.
    pub source: SecretSource,
    /// Hosts that it may be sent to; never "any name".
    pub hosts: Vec<HostPattern>,
    /// Tenants whose requests may be given it.
    pub tenants: Opening,
}

impl SecretTerms {
    /// Whether all hosts of a rule's pattern are among its own.
    #[must_use]
    pub fn covers(&self, rule: &HostPattern) -> bool {
        self.hosts.iter().any(|mine| mine.covers(rule))
    }

    /// Whether a request of this tenant to this host may be given it.
    #[must_use]
    pub fn holds(&self, host: &Host, tenant: &str) -> bool {
        self.hosts.iter().any(|mine| mine.matches(host)) && self.tenants.holds(tenant)
    }
}

/// Whether a secret may be this field.
#[must_use]
pub fn may_be_secret(header: &HeaderName) -> bool {
    !REFUSED.contains(header) && !REFUSED_TOO.contains(&header.as_str())
}
