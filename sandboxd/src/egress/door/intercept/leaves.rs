//! Leaves that were made, by host.

use std::{
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
};

use lru::LruCache;
use rustls::{
    crypto::CryptoProvider,
    server::{ClientHello, ResolvesServerCert},
    sign::{CertifiedKey, SigningKey},
};

use super::InterceptionError;
use crate::{
    ca::{LeafKey, Node},
    clock::{Clock, WallTime},
    policy::Host,
    random,
};

/// Leaves that are kept.
const KEPT: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4_095);

#[derive(Debug)]
struct Kept {
    renew_at: WallTime,
    certified: Arc<CertifiedKey>,
}

/// The leaves of one intermediate.
#[derive(Debug)]
pub(super) struct Leaves {
    node: Node,
    key: LeafKey,
    signing: Arc<dyn SigningKey>,
    kept: Mutex<LruCache<Host, Kept>>,
    clock: Clock,
}

impl Leaves {
    pub(super) fn new(
        node: Node,
        provider: &CryptoProvider,
        clock: Clock,
    ) -> Result<Self, InterceptionError> {
        let key = LeafKey::new()?;
        Ok(Self {
            signing: provider.key_provider.load_private_key(key.der())?,
            node,
            key,
            kept: Mutex::new(LruCache::new(KEPT)),
            clock,
        })
    }

    pub(super) const fn node(&self) -> &Node {
        &self.node
    }

    /// The leaf of a host, made now if there is none, or one that is past the half of its time. None: the intermediate
    /// has ended.
    pub(super) fn of(&self, host: &Host) -> Option<Arc<CertifiedKey>> {
        let now = self.clock.wall();
        if !self.node.intermediate().holds(now) {
            return None;
        }
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = kept().get(host).filter(|found| now < found.renew_at) {
            return Some(Arc::clone(&found.certified));
        }
        let leaf = self
            .node
            .leaf(host, &self.key, random::bytes(), now)
            .inspect_err(
                |error| tracing::error!(error = %crate::telemetry::chain(error), "no leaf can be made"),
            )
            .ok()?;
        let certified = Arc::new(CertifiedKey::new(leaf.chain, Arc::clone(&self.signing)));
        let made = Kept {
            renew_at: leaf.renew_at,
            certified: Arc::clone(&certified),
        };
        kept().put(host.clone(), made);
        Some(certified)
    }
}

/// One leaf, whatever the client names: that was compared before.
#[derive(Debug)]
pub(super) struct One(pub(super) Arc<CertifiedKey>);

impl ResolvesServerCert for One {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// No leaf: what a handshake begins with before its own is known.
#[derive(Debug)]
pub(super) struct NoLeaf;

impl ResolvesServerCert for NoLeaf {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::crypto::ring;

    use super::*;
    use crate::{ca::Dir, clock::Tick};

    #[test]
    fn a_leaf_is_kept_until_the_half_of_its_time() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Dir::new(temp.path().to_owned());
        let clock = Clock::manual(Tick::default(), WallTime::from_micros(1_767_225_600_000_000));
        let now = clock.wall();
        dir.init(None, [1; 16], now).unwrap();
        dir.issue_node(None, "n", false, [2; 16], now).unwrap();
        let node = dir.open(now).unwrap().unwrap();
        let leaves = Leaves::new(node, &ring::default_provider(), clock.clone()).unwrap();
        let leaf = |name: &str| leaves.of(&Host::Name(name.into()));
        let first = leaf("a.test").unwrap();
        assert!(!Arc::ptr_eq(&first, &leaf("b.test").unwrap()));
        clock.advance(Duration::from_secs(12 * 3600 - 1));
        assert!(Arc::ptr_eq(&first, &leaf("a.test").unwrap()));
        clock.advance(Duration::from_secs(1));
        assert!(!Arc::ptr_eq(&first, &leaf("a.test").unwrap()));
        for at in 0..KEPT.get() + 5 {
            leaf(&format!("n{at}.test")).unwrap();
        }
        assert_eq!(leaves.kept.lock().unwrap().len(), KEPT.get());
        clock.advance(Duration::from_secs(91 * 24 * 3600));
        assert!(leaf("a.test").is_none());
    }
}
