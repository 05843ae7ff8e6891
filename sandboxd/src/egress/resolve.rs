//! Names into addresses, on the host: full names only, no search list, no hosts file, no cache.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use hickory_resolver::{
    ResolveError, TokioResolver,
    config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts},
    name_server::TokioConnectionProvider,
    proto::xfer::Protocol,
};
use sandbox_protocol::door::DoorReason;
use tokio::time::timeout;

/// All of a look-up.
const LOOK_UP: Duration = Duration::from_secs(5);
/// One question to one server; asked twice.
const QUESTION: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 2;
/// Addresses of one name; one with more is as good as none: its answer is longer than any honest one.
const ADDRESSES: usize = 64;

/// Asks name servers.
pub struct Resolver {
    inner: TokioResolver,
    servers: Vec<SocketAddr>,
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver")
            .field("servers", &self.servers)
            .finish_non_exhaustive()
    }
}

impl Resolver {
    /// A resolver that asks these servers; none: those of resolv.conf, and where that cannot be read nobody, so that no
    /// name is found.
    #[must_use]
    pub fn new(servers: Vec<SocketAddr>) -> Self {
        let servers = if servers.is_empty() {
            of_the_host()
        } else {
            servers
        };
        let mut config = ResolverConfig::new();
        for server in &servers {
            for protocol in [Protocol::Udp, Protocol::Tcp] {
                config.add_name_server(NameServerConfig::new(*server, protocol));
            }
        }
        let mut options = ResolverOpts::default();
        options.ndots = 0;
        options.timeout = QUESTION;
        options.attempts = ATTEMPTS;
        options.cache_size = 0;
        options.use_hosts_file = ResolveHosts::Never;
        let builder = TokioResolver::builder_with_config(config, TokioConnectionProvider::default());
        Self {
            inner: builder.with_options(options).build(),
            servers,
        }
    }

    /// Every address of a name. Cancel safe.
    ///
    /// # Errors
    /// `name_not_found`, `resolve_timeout`.
    pub async fn resolve(&self, name: &str) -> Result<Vec<IpAddr>, DoorReason> {
        // With a dot at its end nothing is appended to it.
        let full = format!("{name}.");
        let both = async {
            tokio::join!(
                self.inner.ipv4_lookup(full.as_str()),
                self.inner.ipv6_lookup(full.as_str())
            )
        };
        let (v4, v6) = timeout(LOOK_UP, Box::pin(both))
            .await
            .map_err(|_elapsed| DoorReason::ResolveTimeout)?;
        let v4 = v4.map(|found| found.iter().map(|a| IpAddr::V4(a.0)).collect());
        let v6 = v6.map(|found| found.iter().map(|aaaa| IpAddr::V6(aaaa.0)).collect());
        merge(part(v4), part(v6))
    }
}

/// What one kind of question came to; an answer without addresses is an empty one.
fn part(found: Result<Vec<IpAddr>, ResolveError>) -> Option<Vec<IpAddr>> {
    match found {
        Ok(addresses) => Some(addresses),
        Err(error) if error.is_no_records_found() || error.is_nx_domain() => Some(Vec::new()),
        Err(_no_answer) => None,
    }
}

/// All that was answered. A kind that nobody answers does not take the other along: many servers drop what they do not
/// know. What was answered is vetted whole.
fn merge(v4: Option<Vec<IpAddr>>, v6: Option<Vec<IpAddr>>) -> Result<Vec<IpAddr>, DoorReason> {
    let is_whole = v4.is_some() && v6.is_some();
    let mut all: Vec<IpAddr> = v4.into_iter().chain(v6).flatten().collect();
    match (all.is_empty(), is_whole) {
        (true, true) => Err(DoorReason::NameNotFound),
        (true, false) => Err(DoorReason::ResolveTimeout),
        (false, _) if all.len() > ADDRESSES => Err(DoorReason::NameNotFound),
        (false, _) => {
            all.dedup();
            Ok(all)
        }
    }
}

fn of_the_host() -> Vec<SocketAddr> {
    match hickory_resolver::system_conf::read_system_conf() {
        Ok((config, _)) => {
            let mut servers: Vec<_> = config
                .name_servers()
                .iter()
                .map(|server| server.socket_addr)
                .collect();
            servers.dedup();
            servers
        }
        Err(error) => {
            tracing::warn!(%error, "resolv.conf cannot be read: no name is found until egress.resolver.servers is set");
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_answer_count_and_silence_is_no_answer() {
        let v4 = || Some(vec![IpAddr::from([192, 0, 2, 1])]);
        assert_eq!(merge(v4(), Some(vec![])).unwrap().len(), 1);
        assert_eq!(merge(v4(), None).unwrap().len(), 1);
        assert_eq!(merge(Some(vec![]), Some(vec![])), Err(DoorReason::NameNotFound));
        assert_eq!(merge(None, Some(vec![])), Err(DoorReason::ResolveTimeout));
        assert_eq!(merge(None, None), Err(DoorReason::ResolveTimeout));
        let many = (0..=u8::try_from(ADDRESSES).unwrap())
            .map(|n| IpAddr::from([192, 0, 2, n]))
            .collect();
        assert_eq!(merge(Some(many), None), Err(DoorReason::NameNotFound));
    }
}
