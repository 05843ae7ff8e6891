//! Files in a guest's `/etc/silkd` by which its programs trust the host's doors where those look into TLS. A template's
//! build puts them there; silkd names them to programs where they are.

/// The host's roots.
pub const ROOTS: &str = "ca.pem";
/// The image's own roots, and the host's behind them.
pub const STORE: &str = "ca-bundle.pem";
