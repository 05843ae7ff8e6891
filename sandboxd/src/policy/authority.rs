//! A target in the only form that policy, resolver, dialer and feed take.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use sandbox_protocol::door::DoorReason;

/// Longest name, and longest label of one.
const NAME: usize = 253;
const LABEL: usize = 63;

/// Text that is no target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It cannot be read as host and port.
    #[error("{0}")]
    Malformed(&'static str),
    /// It may be an address, in a form that others read differently.
    #[error("an address is written as four plain decimals")]
    Odd,
}

impl TargetError {
    /// As a door tells it.
    #[must_use]
    pub const fn reason(self) -> DoorReason {
        match self {
            Self::Malformed(_) => DoorReason::BadTarget,
            Self::Odd => DoorReason::OddAddress,
        }
    }
}

/// A name in lower case without a dot at its end, or an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// A full name.
    Name(String),
    /// An address; IPv4 inside IPv6 is IPv4.
    Address(IpAddr),
}

impl Host {
    /// Reads a host as HTTP has it: a name, four decimals, or IPv6 in brackets.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner
                .strip_suffix(']')
                .ok_or(TargetError::Malformed("a bracket is open"))?;
            // No zone: std takes none for an address without one.
            let address: Ipv6Addr = inner
                .parse()
                .map_err(|_unreadable| TargetError::Malformed("in brackets stands an IPv6 address"))?;
            return Ok(Self::Address(canonical(address.into())));
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        if name.is_empty() || name.len() > NAME {
            return Err(TargetError::Malformed("a name has 1 to 253 characters"));
        }
        let plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
        for label in name.split('.') {
            if label.is_empty() || label.len() > LABEL {
                return Err(TargetError::Malformed("a label has 1 to 63 characters"));
            }
            if !label.bytes().all(plain) {
                return Err(TargetError::Malformed("a name has letters, digits, - and _"));
            }
        }
        if !ends_in_a_number(&name) {
            return Ok(Self::Name(name));
        }
        // std takes four decimals without leading zeros, and nothing else.
        let address: Ipv4Addr = name.parse().map_err(|_unreadable| TargetError::Odd)?;
        Ok(Self::Address(address.into()))
    }

    /// Reads a name as SOCKS5 has it: UTF-8 without brackets or escapes. What only becomes an address by being mapped to
    /// ASCII is odd.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn parse_unicode(name: &[u8]) -> Result<Self, TargetError> {
        let text =
            std::str::from_utf8(name).map_err(|_unreadable| TargetError::Malformed("a name is UTF-8"))?;
        if text.starts_with('[') {
            return Err(TargetError::Malformed("a name has no brackets"));
        }
        if text.is_ascii() {
            return Self::parse(text);
        }
        let mapped = idna::domain_to_ascii_strict(text)
            .map_err(|_unreadable| TargetError::Malformed("not an internationalised name"))?;
        match Self::parse(&mapped)? {
            name @ Self::Name(_) => Ok(name),
            Self::Address(_) => Err(TargetError::Odd),
        }
    }

    /// An address in its one form.
    #[must_use]
    pub fn address(address: IpAddr) -> Self {
        Self::Address(canonical(address))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => address.fmt(f),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// Host and port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Authority {
    host: Host,
    port: u16,
}

impl Authority {
    /// Of a host and a port, which is not 0.
    ///
    /// # Errors
    /// [`TargetError::Malformed`].
    pub fn new(host: Host, port: u16) -> Result<Self, TargetError> {
        if port == 0 {
            return Err(TargetError::Malformed("port 0 is none"));
        }
        Ok(Self { host, port })
    }

    /// Reads `host:port`; `default` stands for a port that is not there.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn parse(text: &str, default: Option<u16>) -> Result<Self, TargetError> {
        if text.contains('%') {
            return Err(TargetError::Malformed("a target has no percent sign"));
        }
        if text.contains('@') {
            return Err(TargetError::Malformed("a target names no user"));
        }
        let end = if text.starts_with('[') {
            text.find(']').map_or(text.len(), |at| at + 1)
        } else {
            text.find(':').unwrap_or(text.len())
        };
        let (host, rest) = text
            .split_at_checked(end)
            .ok_or(TargetError::Malformed("not a target"))?;
        let host = Host::parse(host)?;
        let port = match rest.strip_prefix(':') {
            Some(digits) => port(digits)?,
            None if rest.is_empty() => default.ok_or(TargetError::Malformed("a port is missing"))?,
            None => return Err(TargetError::Malformed("behind a bracket stands a port")),
        };
        Self::new(host, port)
    }

    /// The host.
    #[must_use]
    pub const fn host(&self) -> &Host {
        &self.host
    }

    /// The port, 1 ..= 65,535.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

fn port(digits: &str) -> Result<u16, TargetError> {
    let wrong = TargetError::Malformed("a port is 1 to 65535");
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    if plain {
        digits.parse().map_err(|_unreadable| wrong)
    } else {
        Err(wrong)
    }
}

/// Whether some readers take it for an IPv4 address: its last label is a number, decimal or hexadecimal.
fn ends_in_a_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    last.bytes().all(|byte| byte.is_ascii_digit()) || last.strip_prefix("0x").is_some_and(is_hex)
}

fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}
