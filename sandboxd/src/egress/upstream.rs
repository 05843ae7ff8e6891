//! Upstream proxies: the operator's own way out, which guests can neither name nor go around.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwapOption;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::HeaderValue;
use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::Instant,
};
use zeroize::Zeroizing;

use super::{Resolver, Secrets};
use crate::{
    policy::{Authority, Host, ProxyKind, Source, Sources, UpstreamTerms},
    words::Name,
};

/// Longest head of a proxy's answer.
const HEAD: usize = 16 * 1024;
/// Longest name and longest password of SOCKS5.
const WORD: usize = 255;
/// How long the addresses of a proxy's name are good for.
const KNOWN: Duration = Duration::from_secs(30);

/// The ways out.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    upstreams: BTreeMap<Name, Arc<Upstream>>,
    default: Option<Name>,
    pools: BTreeMap<Name, Name>,
    sources: Sources,
}

/// One upstream proxy.
#[derive(Debug)]
pub(super) struct Upstream {
    name: Name,
    terms: UpstreamTerms,
    /// What its name led to, and when.
    known: ArcSwapOption<(Instant, Vec<IpAddr>)>,
}

/// Where an upstream proxy is. Only [`Upstream::place`] makes one: it is dialled without having been vetted, for the
/// operator named it.
#[derive(Debug)]
pub(super) struct Place(pub(super) Vec<SocketAddr>);

impl Routes {
    /// Upstream proxies, which of them pools use, the one that all others use, and where dials leave from.
    #[must_use]
    pub fn new(
        upstreams: BTreeMap<Name, UpstreamTerms>,
        pools: BTreeMap<Name, Name>,
        default: Option<Name>,
        sources: Sources,
    ) -> Self {
        let upstream = |(name, terms): (Name, UpstreamTerms)| {
            let upstream = Upstream {
                name: name.clone(),
                terms,
                known: ArcSwapOption::const_empty(),
            };
            (name, Arc::new(upstream))
        };
        Self {
            upstreams: upstreams.into_iter().map(upstream).collect(),
            default,
            pools,
            sources,
        }
    }

    /// The proxy through which a pool's sandboxes go; none: they dial directly.
    ///
    /// # Errors
    /// `upstream_proxy`: the one that was named is not there, and nothing is dialled around it.
    pub(super) fn upstream(&self, pool: &str) -> Result<Option<&Arc<Upstream>>, DoorReason> {
        let named = self.pools.iter().find(|(name, _)| name.as_str() == pool);
        let Some(name) = named.map(|(_, upstream)| upstream).or(self.default.as_ref()) else {
            return Ok(None);
        };
        let upstream = self.upstreams.get(name);
        upstream.map(Some).ok_or(DoorReason::UpstreamProxy)
    }

    /// Where dials for a tenant leave from.
    pub(super) fn source(&self, tenant: &str) -> Source {
        self.sources.of(tenant)
    }

    /// Whether a target is an upstream proxy as the configuration names it.
    pub(super) fn names(&self, target: &Authority) -> bool {
        let mut all = self.upstreams.values();
        all.any(|upstream| upstream.terms.port == target.port() && upstream.terms.host == *target.host())
    }

    /// Addresses at which upstream proxies listen on a port. Cancel safe.
    pub(super) async fn listening_on(&self, port: u16, resolver: &Resolver) -> Vec<IpAddr> {
        let mut all = Vec::new();
        for upstream in self
            .upstreams
            .values()
            .filter(|upstream| upstream.terms.port == port)
        {
            // Where its name leads nowhere, nobody can be sent there either.
            all.extend(upstream.addresses(resolver).await.unwrap_or_default());
        }
        all
    }
}

impl Upstream {
    /// Its name.
    pub(super) const fn name(&self) -> &Name {
        &self.name
    }

    /// Whether names are handed on to it.
    pub(super) const fn resolves(&self) -> bool {
        self.terms.resolves
    }

    /// Its addresses: told by the configuration, or by the name servers of this node.
    async fn addresses(&self, resolver: &Resolver) -> Result<Vec<IpAddr>, DoorReason> {
        let name = match &self.terms.host {
            Host::Address(address) => return Ok(vec![*address]),
            Host::Name(name) => name,
        };
        let known = self.known.load_full();
        if let Some(known) = &known
            && known.0.elapsed() < KNOWN
        {
            return Ok(known.1.clone());
        }
        match resolver.resolve(name).await {
            Ok(found) => {
                let found: Vec<IpAddr> = found.iter().map(IpAddr::to_canonical).collect();
                self.known.store(Some(Arc::new((Instant::now(), found.clone()))));
                Ok(found)
            }
            // It may still be where it was.
            Err(reason) => known.map(|known| known.1.clone()).ok_or(reason),
        }
    }

    /// Where it is.
    ///
    /// # Errors
    /// `upstream_proxy`.
    pub(super) async fn place(&self, resolver: &Resolver) -> Result<Place, DoorReason> {
        let addresses = self.addresses(resolver).await;
        let addresses = addresses.map_err(|reason| self.failed(reason.as_str()))?;
        let port = self.terms.port;
        let sockets = addresses
            .into_iter()
            .map(|address| SocketAddr::new(address, port));
        Ok(Place(sockets.collect()))
    }

    /// Its credentials; none: it wants none.
    ///
    /// # Errors
    /// `secret_unavailable`.
    pub(super) fn credentials(&self, secrets: &Secrets) -> Result<Option<HeaderValue>, DoorReason> {
        let named = self.terms.secret.as_ref();
        named.map(|name| secrets.credentials(name)).transpose()
    }

    /// Has it connect to a target; behind it the connection is the target's. Cancel safe: the connection is dropped.
    ///
    /// # Errors
    /// `upstream_proxy`.
    pub(super) async fn hand_on(
        &self,
        stream: &mut TcpStream,
        target: &Authority,
        credentials: Option<&HeaderValue>,
    ) -> Result<(), DoorReason> {
        let asked = match self.terms.kind {
            ProxyKind::Http => connect(stream, target, credentials).await,
            ProxyKind::Socks5 => socks5(stream, target, credentials).await,
        };
        asked.map_err(|error| self.failed(&error.to_string()))
    }

    /// Tells the operator what is not the guest's to know.
    pub(super) fn failed(&self, what: &str) -> DoorReason {
        tracing::debug!(upstream = %self.name, what, "an upstream proxy did not serve");
        DoorReason::UpstreamProxy
    }
}

fn refused(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

async fn connect(
    stream: &mut TcpStream,
    target: &Authority,
    credentials: Option<&HeaderValue>,
) -> io::Result<()> {
    let shown = credentials.map_or(0, |credentials| credentials.len());
    // As long as it ever gets: what grows leaves a copy behind.
    let mut head = Zeroizing::new(String::with_capacity(2 * shown + 1024));
    let written = write!(head, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n");
    written.map_err(io::Error::other)?;
    if let Some(credentials) = credentials {
        head.push_str("Proxy-Authorization: Basic ");
        STANDARD.encode_string(credentials, &mut head);
        head.push_str("\r\n");
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await?;
    let answer = read_head(stream).await?;
    let status = answer.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    match (answer.starts_with(b"HTTP/1."), status) {
        (true, [b'2', _, _]) => Ok(()),
        (_, status) => Err(refused(format!("it answered {}", status.escape_ascii()))),
    }
}

/// Reads a head, and nothing behind it: that is the target's.
async fn read_head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    const END: &[u8] = b"\r\n\r\n";
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    loop {
        let n = stream.peek(&mut chunk).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let before = head.len();
        head.extend_from_slice(chunk.get(..n).unwrap_or_default());
        let ends = head.windows(END.len()).position(|part| part == END);
        head.truncate(ends.map_or(head.len(), |at| at + END.len()));
        let taken = head.len() - before;
        stream
            .read_exact(chunk.get_mut(..taken).unwrap_or_default())
            .await?;
        if ends.is_some() {
            return Ok(head);
        }
        if head.len() > HEAD {
            return Err(refused("its answer has no end"));
        }
    }
}

async fn socks5(
    stream: &mut TcpStream,
    target: &Authority,
    credentials: Option<&HeaderValue>,
) -> io::Result<()> {
    let method = if credentials.is_some() { 2 } else { 0 };
    stream.write_all(&[5, 1, method]).await?;
    let mut greeted = [0; 2];
    stream.read_exact(&mut greeted).await?;
    if greeted != [5, method] {
        return Err(refused("it takes no such credentials"));
    }
    if let Some(credentials) = credentials {
        let bytes = credentials.as_bytes();
        let mut parts = bytes.splitn(2, |byte| *byte == b':');
        let (user, password) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let mut shown = Zeroizing::new(Vec::with_capacity(bytes.len() + 3));
        shown.push(1);
        for word in [user, password] {
            let length =
                u8::try_from(word.len()).map_err(|_long| refused(format!("more than {WORD} bytes")))?;
            shown.push(length);
            shown.extend_from_slice(word);
        }
        stream.write_all(&shown).await?;
        let mut answered = [0; 2];
        stream.read_exact(&mut answered).await?;
        if answered[1] != 0 {
            return Err(refused("it refused the credentials"));
        }
    }
    let mut request = vec![5, 1, 0];
    match target.host() {
        Host::Address(IpAddr::V4(v4)) => {
            request.push(1);
            request.extend(v4.octets());
        }
        Host::Address(IpAddr::V6(v6)) => {
            request.push(4);
            request.extend(v6.octets());
        }
        Host::Name(name) => {
            let length = u8::try_from(name.len()).map_err(|_long| refused("a long name"))?;
            request.extend([3, length]);
            request.extend(name.as_bytes());
        }
    }
    request.extend(target.port().to_be_bytes());
    stream.write_all(&request).await?;
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let [version, code, _, kind] = head;
    if (version, code) != (5, 0) {
        return Err(refused(format!("it answered {code}")));
    }
    // Where it bound, which is nobody's business.
    let length = match kind {
        1 => 4,
        4 => 16,
        3 => usize::from(stream.read_u8().await?),
        _ => return Err(refused("it answered no address")),
    };
    let mut bound = vec![0; length + 2];
    stream.read_exact(&mut bound).await?;
    Ok(())
}
