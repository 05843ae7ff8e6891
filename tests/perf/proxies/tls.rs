//! What looking into TLS costs a client: handshakes with a leaf that is made for it, with one that is kept, and with the
//! origin itself through an opaque tunnel; and a leaf alone.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ClientConfig, RootCertStore, ServerConfig, client::Resumption, crypto::ring};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
use sandboxd::{
    ca::{Dir, LeafKey},
    clock::Clock,
    egress::Interception,
    policy::Host,
    random,
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{
    load::{PATIENCE, tunnel_to},
    peers::Running,
    world::TLS,
};
use crate::arm::Arm;

/// Names that lead to the origin.
const ZONE: &str = "bench.test";
/// The one whose tunnels are opaque.
pub(super) const OPAQUE: &str = "opaque.bench.test";
/// Those that are looked into.
pub(super) const INSIDE: &str = "*.bench.test";
/// The one whose leaf is kept.
const KEPT: &str = "kept.bench.test";

/// Certificates of a run: those of the origin, and the node's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Certificates<'a>(pub(crate) &'a Path);

impl Certificates<'_> {
    fn root(self) -> PathBuf {
        self.0.join("root.pem")
    }

    fn origin(self) -> PathBuf {
        self.0.join("origin.pem")
    }

    fn ca(self) -> Dir {
        Dir::new(self.0.join("ca"))
    }

    /// Makes them.
    pub(super) fn make(self) -> Result<()> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let cert = CertificateParams::new([format!("*.{ZONE}")])?.signed_by(&key, &root)?;
        std::fs::write(self.root(), root.pem())?;
        std::fs::write(self.origin(), format!("{}{}", cert.pem(), key.serialize_pem()))?;
        let (ca, now) = (self.ca(), Clock::host().wall());
        ca.init(None, random::bytes(), now)?;
        ca.issue_node(None, "bench", false, random::bytes(), now)?;
        Ok(())
    }

    /// What the origin speaks TLS by.
    pub(super) fn acceptor(self) -> Result<TlsAcceptor> {
        let file = self.origin();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_file(&file)?],
                PrivateKeyDer::from_pem_file(&file)?,
            )?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// What the door looks into TLS by.
    pub(super) fn interception(self) -> Result<Interception> {
        let means = Interception::open(&self.ca(), &[self.root()], Clock::host())?;
        means.context("no intermediate")
    }

    /// A client that trusts origin and door, and knows no session.
    fn connector(self) -> Result<TlsConnector> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.root())?)?;
        roots.add(CertificateDer::from_pem_file(self.ca().bundle_file())?)?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.resumption = Resumption::disabled();
        Ok(TlsConnector::from(Arc::new(config)))
    }
}

/// Times of handshakes, from the ClientHello to the client's end of it, in tunnels that stand; and of leaves.
pub(super) struct Handshakes {
    opaque: Arm,
    kept: Arm,
    new: Arm,
    leaf: Arm,
}

impl Handshakes {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            opaque: Arm::new()?,
            kept: Arm::new()?,
            new: Arm::new()?,
            leaf: Arm::new()?,
        })
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "opaque_us": self.opaque.json(),
            "kept_leaf_us": self.kept.json(),
            "new_leaf_us": self.new.json(),
            "leaf_us": self.leaf.json(),
        })
    }

    /// `n` of each, in turns, through a door that has made no leaf yet.
    pub(super) async fn measure(&mut self, door: &Running, of: Certificates<'_>, n: usize) -> Result<()> {
        let connector = of.connector()?;
        let mut unmeasured = Arm::new()?;
        for name in [OPAQUE, KEPT] {
            shake(door, &connector, name, &mut unmeasured).await?;
        }
        for at in 0..n {
            let new = format!("n{at}.{ZONE}");
            let mut arms = [
                (OPAQUE, &mut self.opaque),
                (KEPT, &mut self.kept),
                (&*new, &mut self.new),
            ];
            if at % 2 == 1 {
                arms.reverse();
            }
            for (name, arm) in arms {
                shake(door, &connector, name, arm).await?;
            }
        }
        let node = of.ca().open(Clock::host().wall())?.context("no intermediate")?;
        let key = LeafKey::new()?;
        for at in 0..n {
            let host = Host::Name(format!("n{at}.{ZONE}"));
            let began = Instant::now();
            node.leaf(&host, &key, random::bytes(), Clock::host().wall())?;
            self.leaf.add(began.elapsed());
        }
        for arm in [&mut self.opaque, &mut self.kept, &mut self.new, &mut self.leaf] {
            arm.round();
        }
        Ok(())
    }
}

async fn shake(door: &Running, connector: &TlsConnector, name: &str, arm: &mut Arm) -> Result<()> {
    let shaking = async {
        let stream = tunnel_to(door.at, &format!("{name}:{TLS}")).await?;
        let began = Instant::now();
        let tls = connector
            .connect(ServerName::try_from(name.to_owned())?, stream)
            .await?;
        arm.add(began.elapsed());
        drop(tls);
        anyhow::Ok(())
    };
    timeout(PATIENCE, Box::pin(shaking))
        .await
        .context("a handshake hangs")?
        .with_context(|| format!("a handshake with {name}"))
}
