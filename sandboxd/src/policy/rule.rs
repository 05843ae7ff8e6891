//! One rule: what it matches and what it says.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use serde::Serialize;

use super::{
    authority::{Authority, Host},
    decide::Seen,
    path,
};

/// Ports of a rule that names none.
pub(super) const PORTS: [u16; 2] = [80, 443];
/// The port of a rule that looks into TLS and names none.
const TLS: u16 = 443;
/// Longest id and longest message of a rule.
const ID: usize = 64;
const MESSAGE: usize = 256;
/// Values in one list of a rule.
const LIST: usize = 256;
/// Longest method and longest path of a rule.
const METHOD: usize = 32;
const PATH: usize = 1024;

/// What a rule that matches says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Yes.
    #[default]
    Allow,
    /// No.
    Deny,
}

/// A rule as it was written; absent lists are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RuleFields {
    /// Distinct within its layer.
    pub id: String,
    /// What it says.
    pub effect: Effect,
    /// Hosts.
    pub host: Vec<String>,
    /// Ports; none: 80 and 443.
    pub ports: Vec<u32>,
    /// Methods; none: any, and tunnels too.
    pub methods: Vec<String>,
    /// Prefixes of paths; none: any, and tunnels too.
    pub paths: Vec<String>,
    /// Tunnels that it decides are looked into, and methods, paths and secret are about the requests inside.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub intercept: bool,
    /// Name of the secret that its requests are given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// The secret may go out in plain requests.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cleartext_secret: bool,
    /// What is told to whoever it denies.
    pub message: String,
}

impl RuleFields {
    /// Whether it judges what a tunnel hides.
    const fn is_about_requests(&self) -> bool {
        !self.methods.is_empty() || !self.paths.is_empty() || self.secret.is_some()
    }
}

/// What is wrong with a field of a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}; {allowed}")]
pub struct RuleFault {
    /// The field.
    pub field: &'static str,
    /// What is wrong.
    pub what: String,
    /// What is allowed.
    pub allowed: &'static str,
}

/// Hosts that a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPattern {
    /// This name.
    Name(String),
    /// Names that end in this, which begins with a dot: one label more, or several.
    Suffix(String),
    /// Every name, no address.
    AnyName,
    /// This address, written as one.
    Address(IpAddr),
}

impl HostPattern {
    /// Reads a pattern.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::AnyName);
        }
        let (text, is_suffix) = match text.strip_prefix("*.") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        // IPv6 reads well without brackets here, where no port follows.
        let host = match text.parse::<IpAddr>() {
            Ok(address) if !is_suffix => Host::address(address),
            Ok(_) | Err(_) => Host::parse(text).ok()?,
        };
        match host {
            Host::Name(name) if is_suffix => Some(Self::Suffix(format!(".{name}"))),
            Host::Name(name) => Some(Self::Name(name)),
            Host::Address(address) => (!is_suffix).then_some(Self::Address(address)),
        }
    }

    /// Whether all that another is about is among what it is about.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::AnyName, Self::Name(_) | Self::Suffix(_) | Self::AnyName) => true,
            (Self::Suffix(mine), Self::Suffix(theirs)) => theirs.ends_with(mine.as_str()),
            (Self::Suffix(suffix), Self::Name(name)) => {
                name.len() > suffix.len() && name.ends_with(suffix.as_str())
            }
            (Self::Name(mine), Self::Name(theirs)) => mine == theirs,
            (Self::Address(mine), Self::Address(theirs)) => mine == theirs,
            (Self::Name(_) | Self::Suffix(_) | Self::Address(_), Self::AnyName)
            | (Self::Name(_), Self::Suffix(_))
            | (Self::Address(_), Self::Name(_) | Self::Suffix(_))
            | (Self::Name(_) | Self::Suffix(_) | Self::AnyName, Self::Address(_)) => false,
        }
    }

    /// Whether it is about this host.
    #[must_use]
    pub fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (Self::Name(mine), Host::Name(name)) => mine == name,
            (Self::Suffix(suffix), Host::Name(name)) => name.len() > suffix.len() && name.ends_with(suffix),
            (Self::AnyName, Host::Name(_)) => true,
            (Self::Address(mine), Host::Address(address)) => mine == address,
            (Self::Name(_) | Self::Suffix(_) | Self::AnyName, Host::Address(_))
            | (Self::Address(_), Host::Name(_)) => false,
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Suffix(suffix) => write!(f, "*{suffix}"),
            Self::AnyName => f.write_str("*"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// A checked rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    fields: RuleFields,
    hosts: Vec<HostPattern>,
    ports: BTreeSet<u16>,
}

/// How far a target came in a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reached {
    /// Its host is another.
    Nothing,
    /// Its port is another.
    Host,
    /// The rule judges what a tunnel hides, or what is not in one.
    Port,
    /// Its method is another.
    Visible,
    /// Its path is another.
    Method,
    /// Its path can be read in two ways.
    OddPath,
    /// It decides, and not before the requests inside the tunnel are seen.
    Inside,
    /// It matches.
    All,
}

impl Rule {
    /// Checks a rule.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn new(fields: RuleFields) -> Result<Self, Vec<RuleFault>> {
        let mut faults = Vec::new();
        let mut fault = |field, what: String, allowed| faults.push(RuleFault { field, what, allowed });
        if !is_id(&fields.id) {
            fault(
                "id",
                format!("{:?} is not an id", fields.id),
                "1 to 64 of a-z 0-9 . _ -, beginning with a letter or digit",
            );
        }
        if fields.host.is_empty() {
            fault(
                "host",
                "a rule names a host".into(),
                "such as \"example.org\", \"*.example.org\", \"*\"",
            );
        }
        let mut hosts = Vec::new();
        for text in &fields.host {
            match HostPattern::parse(text) {
                Some(pattern) => hosts.push(pattern),
                None => fault(
                    "host",
                    format!("{text:?} is not a host"),
                    "a name, *.name, *, or an address without port",
                ),
            }
        }
        let ports = ports(&fields, &mut fault);
        requests(&fields, &mut fault);
        secret(&fields, &mut fault);
        for (field, is_long) in [
            ("host", fields.host.len() > super::layer::HOSTS),
            ("ports", fields.ports.len() > LIST),
            ("methods", fields.methods.len() > LIST),
            ("paths", fields.paths.len() > LIST),
        ] {
            if is_long {
                fault(field, "too many values".into(), "at most 256, of hosts 4096");
            }
        }
        if fields.message.len() > MESSAGE || fields.message.chars().any(char::is_control) {
            fault(
                "message",
                "not a message".into(),
                "at most 256 bytes, on one line",
            );
        }
        if faults.is_empty() {
            Ok(Self { fields, hosts, ports })
        } else {
            Err(faults)
        }
    }

    /// As it was written.
    #[must_use]
    pub const fn fields(&self) -> &RuleFields {
        &self.fields
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.fields.id
    }

    /// Hosts that it is about.
    #[must_use]
    pub fn hosts(&self) -> &[HostPattern] {
        &self.hosts
    }

    /// What it tells those it denies.
    #[must_use]
    pub fn message(&self) -> Option<&str> {
        Some(&*self.fields.message).filter(|text| !text.is_empty())
    }

    /// Whether it allows something of this host.
    pub(super) fn allows_some_of(&self, host: &Host) -> bool {
        self.fields.effect == Effect::Allow && self.hosts.iter().any(|pattern| pattern.matches(host))
    }

    /// Ports that it is about.
    pub(super) const fn ports(&self) -> &BTreeSet<u16> {
        &self.ports
    }

    pub(super) fn reached(&self, target: &Authority, seen: Seen<'_>) -> Reached {
        if !self.hosts.iter().any(|pattern| pattern.matches(target.host())) {
            return Reached::Nothing;
        }
        if !self.ports.contains(&target.port()) {
            return Reached::Host;
        }
        let RuleFields { methods, paths, .. } = &self.fields;
        let (method, path) = match (seen, self.fields.intercept) {
            // What it says of requests waits for them; a denial of some is none of the tunnel.
            (Seen::Tunnel, true) if self.fields.effect == Effect::Deny && self.fields.is_about_requests() => {
                return Reached::Inside;
            }
            (Seen::Tunnel, true) => return Reached::All,
            (Seen::Tunnel | Seen::Inside { .. }, false) if self.fields.is_about_requests() => {
                return Reached::Port;
            }
            (Seen::Tunnel, false) => return Reached::All,
            (Seen::Request { .. }, true) => return Reached::Port,
            (Seen::Request { method, path }, false) | (Seen::Inside { method, path }, _) => (method, path),
        };
        if !methods.is_empty() && !methods.iter().any(|mine| mine == method) {
            return Reached::Visible;
        }
        if paths.is_empty() {
            return Reached::All;
        }
        if !path::is_canonical(path) {
            return Reached::OddPath;
        }
        if paths.iter().any(|prefix| path::lies_below(path, prefix)) {
            Reached::All
        } else {
            Reached::Method
        }
    }
}

/// Checks what is seen of requests.
fn requests(fields: &RuleFields, fault: &mut impl FnMut(&'static str, String, &'static str)) {
    for method in &fields.methods {
        let token = method
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte == b'-');
        if method.is_empty() || method.len() > METHOD || !token || method == "CONNECT" {
            fault(
                "methods",
                format!("{method:?} is not a method"),
                "upper case, such as \"GET\"; not CONNECT",
            );
        }
    }
    for prefix in &fields.paths {
        let clean = prefix.len() <= PATH && path::is_canonical(prefix) && !prefix.contains(['?', '#']);
        if !clean || !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            fault(
                "paths",
                format!("{prefix:?} is not a path"),
                "begins with /, without dot segments, //, query or escapes of them",
            );
        }
    }
}

/// Checks what is said about a secret.
fn secret(fields: &RuleFields, fault: &mut impl FnMut(&'static str, String, &'static str)) {
    if fields.secret.is_some() && fields.effect == Effect::Deny {
        fault(
            "secret",
            "a rule that denies sends nothing".into(),
            "leave it out",
        );
    }
    if fields.secret.is_some() && !fields.intercept && !fields.cleartext_secret {
        fault(
            "secret",
            "a secret is seen by everybody on the way where TLS is not looked into".into(),
            "intercept = true; or ports without 443 and cleartext_secret = true",
        );
    }
    if fields.cleartext_secret && (fields.secret.is_none() || fields.intercept) {
        fault(
            "cleartext_secret",
            "there is no secret that goes out in clear".into(),
            "with secret, and without intercept",
        );
    }
}

/// Checks the ports, and gives those that the rule is about.
fn ports(fields: &RuleFields, fault: &mut impl FnMut(&'static str, String, &'static str)) -> BTreeSet<u16> {
    let sees_plain = fields.is_about_requests() && !fields.intercept;
    let mut ports = BTreeSet::new();
    for port in &fields.ports {
        match u16::try_from(*port) {
            Ok(port @ 1..) => drop(ports.insert(port)),
            Ok(0) | Err(_) => fault("ports", format!("{port} is not a port"), "1 to 65535"),
        }
    }
    if sees_plain && (fields.ports.is_empty() || ports.contains(&443)) {
        fault(
            "ports",
            "without intercept, methods, paths and secret are about plain http:// requests alone".into(),
            "give ports, without 443; or intercept = true",
        );
    }
    match (fields.ports.is_empty(), fields.intercept) {
        (true, true) => drop(ports.insert(TLS)),
        (true, false) => ports.extend(PORTS),
        (false, _) => {}
    }
    ports
}

fn is_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let first = id.bytes().next().is_some_and(plain);
    first && id.len() <= ID && id.bytes().all(|byte| plain(byte) || b"._-".contains(&byte))
}
