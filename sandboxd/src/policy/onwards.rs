//! What the operator says about the way out: upstream proxies, and the local address of dials.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use super::authority::Host;
use crate::words::Name;

/// How an upstream proxy is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyKind {
    /// By CONNECT.
    Http,
    /// By SOCKS5.
    Socks5,
}

/// What is said about one upstream proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamTerms {
    /// How it is spoken to.
    pub kind: ProxyKind,
    /// Where it is.
    pub host: Host,
    /// Its port.
    pub port: u16,
    /// The secret that is shown to it: a user's name, a colon and a password.
    pub secret: Option<Name>,
    /// It resolves names: they are handed on unresolved, and no address of theirs is judged here.
    pub resolves: bool,
}

/// Local addresses of dials, one of each family; none at all: the kernel's choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Source {
    /// IPv4.
    pub v4: Option<Ipv4Addr>,
    /// IPv6.
    pub v6: Option<Ipv6Addr>,
}

impl Source {
    /// What a dial to this address leaves from; an inner `None`: the kernel's choice. No answer: it has none of that
    /// family, and a dial would leave from an address that nobody named.
    #[must_use]
    pub fn towards(self, to: SocketAddr) -> Option<Option<IpAddr>> {
        match (self, to) {
            (Self { v4: None, v6: None }, _) => Some(None),
            (Self { v4: Some(v4), .. }, SocketAddr::V4(_)) => Some(Some(v4.into())),
            (Self { v6: Some(v6), .. }, SocketAddr::V6(_)) => Some(Some(v6.into())),
            (Self { .. }, _) => None,
        }
    }
}

/// `[egress.source]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// Of dials for tenants that have none of their own.
    pub node: Source,
    /// By tenant.
    pub tenants: BTreeMap<String, Source>,
}

impl Sources {
    /// Where dials for a tenant leave from.
    #[must_use]
    pub fn of(&self, tenant: &str) -> Source {
        self.tenants.get(tenant).copied().unwrap_or(self.node)
    }
}
