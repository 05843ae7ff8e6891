//! The way from a judged target to a connection: resolve, vet, dial; directly, or through an upstream proxy.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use sandbox_protocol::door::DoorReason;
use tokio::{net::TcpStream, time::timeout};

use super::{Egress, Secrets, dial, upstream::Upstream};
use crate::{
    policy::{Authority, Host, Judged, Source, Vetted, Who},
    words::Name,
};

/// A connection that stands.
#[derive(Debug)]
pub(super) struct Connected {
    /// The connection.
    pub(super) stream: TcpStream,
    /// Where the target is; where that is not known here, where the upstream proxy is.
    pub(super) address: SocketAddr,
    /// Which way it goes.
    pub(super) way: Way,
}

/// Which way a connection goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Way {
    /// Through this upstream proxy.
    pub upstream: Option<Name>,
    /// The target's addresses were judged here.
    pub vetted: bool,
}

impl Way {
    /// No upstream proxy stands between.
    pub(super) const fn is_direct(&self) -> bool {
        self.upstream.is_none()
    }
}

impl Egress {
    /// The secrets in force.
    #[must_use]
    pub fn secrets(&self) -> Arc<Secrets> {
        self.0.secrets.load_full()
    }

    /// Every address of a target.
    pub(super) async fn addresses(&self, target: &Authority) -> Result<Vec<IpAddr>, DoorReason> {
        match target.host() {
            Host::Address(address) => Ok(vec![*address]),
            Host::Name(name) => self.0.resolver.load_full().resolve(name).await,
        }
    }

    /// What becomes of each of these addresses of a target.
    ///
    /// # Errors
    /// `own_address`: which addresses are the host's own is not known.
    pub(super) async fn judged(
        &self,
        target: &Authority,
        addresses: &[IpAddr],
        who: Who<'_>,
    ) -> Result<Vec<Judged>, DoorReason> {
        self.judged_by(&self.own()?, target, addresses, who).await
    }

    async fn judged_by(
        &self,
        interfaces: &[IpAddr],
        target: &Authority,
        addresses: &[IpAddr],
        who: Who<'_>,
    ) -> Result<Vec<Judged>, DoorReason> {
        let (routes, resolver) = (self.0.routes.load_full(), self.0.resolver.load_full());
        let proxies = routes.listening_on(target.port(), &resolver).await;
        let vetting = self.0.vetting.load();
        let judge = |address: &IpAddr| {
            let canonical = address.to_canonical();
            if proxies.contains(&canonical) || proxies.contains(&vetting.meant(canonical)) {
                return Judged {
                    address: *address,
                    refused: Some(DoorReason::OwnAddress),
                    range: Some("an upstream proxy".to_owned()),
                };
            }
            vetting.judge(interfaces, *address, target.port(), who)
        };
        Ok(addresses.iter().map(judge).collect())
    }

    /// The addresses of a target, if every one of them may be dialled.
    ///
    /// # Errors
    /// Why the first that may not is refused.
    pub(super) async fn vet(
        &self,
        target: &Authority,
        addresses: &[IpAddr],
        who: Who<'_>,
    ) -> Result<Vec<Vetted>, DoorReason> {
        let interfaces = self.own()?;
        let judged = self.judged_by(&interfaces, target, addresses, who).await?;
        let vetted = match judged.into_iter().find(|judged| judged.refused.is_some()) {
            Some(bad) => Err(bad),
            None => self
                .0
                .vetting
                .load()
                .vet(&interfaces, addresses, target.port(), who),
        };
        vetted.map_err(|judged| {
            tracing::debug!(address = %judged.address, range = judged.range, "an address was refused");
            judged.refused.unwrap_or(DoorReason::SpecialAddress)
        })
    }

    /// Which way a connection to a target goes.
    ///
    /// # Errors
    /// `own_address`: the target is an upstream proxy itself. `upstream_proxy`: the pool's is not there.
    pub(super) fn way(&self, target: &Authority, who: Who<'_>) -> Result<Way, DoorReason> {
        let routes = self.0.routes.load();
        if routes.names(target) {
            return Err(DoorReason::OwnAddress);
        }
        let upstream = routes.upstream(who.pool)?;
        Ok(Way {
            upstream: upstream.map(|upstream| upstream.name().clone()),
            vetted: !upstream.is_some_and(|upstream| is_handed_on(upstream, target)),
        })
    }

    /// Goes it: resolves and vets, unless the name is handed on; and dials. Cancel safe: nothing is open then.
    ///
    /// # Errors
    /// Why the target cannot be reached.
    pub(super) async fn go(&self, target: &Authority, who: Who<'_>) -> Result<Connected, DoorReason> {
        let way = self.way(target, who)?;
        let routes = self.0.routes.load_full();
        let (upstream, source) = (routes.upstream(who.pool)?, routes.source(who.tenant));
        let targets = if way.vetted {
            let addresses = self.addresses(target).await?;
            let vetted = self.vet(target, &addresses, who).await?;
            let Some(_) = upstream else {
                let (stream, address) = self.dialling(dial::dial(&vetted, source)).await?;
                return Ok(Connected { stream, address, way });
            };
            dial::in_turn(&vetted)
        } else {
            Vec::new()
        };
        let upstream = upstream.ok_or(DoorReason::UpstreamProxy)?;
        let through = self.through(upstream, target, &targets, source);
        let (stream, address) = timeout(dial::DIAL, Box::pin(through))
            .await
            .unwrap_or_else(|_elapsed| Err(upstream.failed("it takes too long")))?;
        Ok(Connected { stream, address, way })
    }

    /// Counts a dial and its time.
    async fn dialling<T>(&self, dial: impl Future<Output = Result<T, DoorReason>>) -> Result<T, DoorReason> {
        let decisions = self.decisions();
        let begun = decisions.clock().tick();
        let dialled = dial.await;
        let taken = decisions.clock().tick().since(begun);
        decisions.metrics().dialled(dialled.is_ok(), taken);
        dialled
    }

    /// The host's own addresses, as they are now.
    fn own(&self) -> Result<Arc<[IpAddr]>, DoorReason> {
        self.0.interfaces.now().map_err(|error| {
            tracing::error!(%error, "the host's own addresses cannot be read: nothing is dialled");
            DoorReason::OwnAddress
        })
    }

    /// Has an upstream proxy connect to one of these addresses, or where there is none, to the target by its name.
    async fn through(
        &self,
        upstream: &Upstream,
        target: &Authority,
        addresses: &[SocketAddr],
        source: Source,
    ) -> Result<(TcpStream, SocketAddr), DoorReason> {
        let credentials = upstream.credentials(&self.secrets())?;
        let place = upstream.place(&self.0.resolver.load_full()).await?;
        let by_address = addresses.iter().map(|address| Some(*address));
        let by_name = addresses.is_empty().then_some(None);
        let mut refused = DoorReason::UpstreamProxy;
        for address in by_address.chain(by_name) {
            let dialled = self.dialling(dial::dial_upstream(&place, source)).await;
            let (mut stream, proxy) = dialled.map_err(|reason| upstream.failed(reason.as_str()))?;
            let wanted = match address.map(|address| (Host::address(address.ip()), address.port())) {
                Some((host, port)) => Authority::new(host, port).map_err(|error| error.reason())?,
                None => target.clone(),
            };
            match upstream.hand_on(&mut stream, &wanted, credentials.as_ref()).await {
                Ok(()) => return Ok((stream, address.unwrap_or(proxy))),
                Err(reason) => refused = reason,
            }
        }
        Err(refused)
    }
}

fn is_handed_on(upstream: &Upstream, target: &Authority) -> bool {
    upstream.resolves() && matches!(target.host(), Host::Name(_))
}
