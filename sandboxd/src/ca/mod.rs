//! The certificates by which doors look into TLS: a root that guests trust, an intermediate for each node, leaves for
//! hosts.
//!
//! The root's key signs intermediates and nothing else, so that it can lie elsewhere. A node has `bundle.pem`, the roots
//! that its guests are to trust, newest first, and `node.pem`, its intermediate with the key in one file, so that one
//! rename changes both. While roots rotate, `cross.pem` has the old one vouch for the new one. Without `node.pem` a node
//! looks into nothing.
//!
//! May call: disk, clock, policy, verdict.
//! Never inside: TLS itself; a certificate for what no rule looks into; a key in a log, an error or a `Debug`.
//! Cancel safety: nothing here awaits; each file is put in place whole.

mod cert;
mod check;
mod cross;
mod dir;
mod error;
mod fingerprint;
mod leaf;
mod make;
#[cfg(test)]
mod tests;

use std::fmt;

use rustls_pki_types::CertificateDer;

pub use self::{
    cert::Cert,
    check::Finding,
    dir::{Dir, Done, Issued},
    error::CaError,
    fingerprint::{Fingerprint, NotAFingerprint},
    leaf::{Leaf, LeafKey},
};
use crate::clock::WallTime;

/// The roots that guests are to trust, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    roots: Vec<Cert>,
}

impl Bundle {
    /// The roots.
    #[must_use]
    pub fn roots(&self) -> &[Cert] {
        &self.roots
    }

    /// Their fingerprints.
    #[must_use]
    pub fn fingerprints(&self) -> Vec<Fingerprint> {
        self.roots.iter().map(Cert::fingerprint).collect()
    }

    /// As a file that programs read.
    #[must_use]
    pub fn pem(&self) -> String {
        self.roots.iter().map(Cert::pem).collect()
    }
}

/// What a node signs leaves with, checked: the chain holds, now is within its dates.
pub struct Node {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    intermediate: Cert,
    root: Fingerprint,
    bundle: Bundle,
    /// Shown with each leaf, for guests that know the root of before alone.
    cross: Option<Cert>,
}

impl Node {
    /// Its intermediate.
    #[must_use]
    pub const fn intermediate(&self) -> &Cert {
        &self.intermediate
    }

    /// The root that guests must trust for its leaves to be trusted.
    #[must_use]
    pub const fn root(&self) -> Fingerprint {
        self.root
    }

    /// All roots that guests are to trust.
    #[must_use]
    pub const fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Until when it can sign.
    #[must_use]
    pub const fn not_after(&self) -> WallTime {
        self.intermediate.not_after()
    }

    /// What a leaf is shown with.
    fn above(&self) -> impl Iterator<Item = CertificateDer<'static>> {
        let certs = std::iter::once(&self.intermediate).chain(&self.cross);
        certs.map(|cert| cert.der().clone())
    }
}

/// What guests are to trust, for whoever builds their templates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trust {
    /// The root that the node's leaves hang on.
    pub root: Fingerprint,
    /// All of them.
    pub roots: Vec<Fingerprint>,
    /// Their certificates.
    pub pem: String,
}

impl Trust {
    /// Of a node.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        Self {
            root: node.root(),
            roots: node.bundle().fingerprints(),
            pem: node.bundle().pem(),
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("intermediate", &self.intermediate.fingerprint())
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}
