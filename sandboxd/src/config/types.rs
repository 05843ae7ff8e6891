//! What a configuration is once it is checked: newtypes, defaults filled in.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use crate::{
    policy::{Keep, Layer, Retention, SecretTerms, Sources, UpstreamTerms, Vetting},
    words::{EngineKind, MemBytes, Name, PoolKey, Size},
};

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The host.
    pub node: Node,
    /// Where we listen.
    pub listen: Listen,
    /// What runs the guests.
    pub engine: Engine,
    /// The network of lane guarded.
    pub net: Net,
    /// The journal.
    pub journal: Journal,
    /// The log.
    pub log: Log,
    /// Who may call.
    pub access: Access,
    /// Tenants by name.
    pub tenants: BTreeMap<Name, Tenant>,
    /// Templates by name; `default` is built in.
    pub templates: BTreeMap<Name, Template>,
    /// Sizes by name; `small`, `medium` and `large` are built in.
    pub sizes: BTreeMap<Name, Size>,
    /// Pools by name.
    pub pools: BTreeMap<Name, PoolConfig>,
    /// What guests may reach.
    pub egress: Egress,
}

/// `[node]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of this host in replies; the host's own unless set.
    pub name: String,
    /// images/ templates/ journal/ store/ host.key lock.
    pub state_dir: PathBuf,
    /// `run/<slot>/`; short enough for the sockets below it.
    pub run_dir: PathBuf,
    /// Budget for guests.
    pub memory: MemBytes,
    /// Sandboxes at most, 1 ..= 65,535.
    pub max_sandboxes: u16,
    /// Clones made at once, at least 1.
    pub clones_in_flight: u16,
}

/// `[listen]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// The socket; one from systemd wins.
    pub unix: PathBuf,
    /// Its mode: 0660, in dev mode 0600.
    pub unix_mode: u32,
    /// TCP, if any.
    pub tcp: Option<Tcp>,
    /// `/metrics`, `/healthz`, `/readyz`, if any.
    pub metrics: Option<SocketAddr>,
}

/// A TCP listener: without TLS only on loopback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tcp {
    /// A loopback address.
    Plain(SocketAddr),
    /// Any address.
    Tls(SocketAddr, Tls),
}

impl Tcp {
    /// The address.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        match self {
            Self::Plain(addr) | Self::Tls(addr, _) => *addr,
        }
    }

    /// The key pair, if any.
    #[must_use]
    pub const fn tls(&self) -> Option<&Tls> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(_, tls) => Some(tls),
        }
    }
}

/// PEM files, read again when they change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// Certificate chain.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

/// `[engine]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// What runs the guests.
    pub kind: EngineKind,
    /// What they run on.
    pub accel: AccelWish,
    /// QEMU: a name to find in PATH, or an absolute path.
    pub qemu: PathBuf,
    /// User that VMs run as, if the daemon is root and the user exists. `None`: the daemon's own.
    pub vm_user: Option<String>,
    /// QEMU processes kept ready per variant in use.
    pub blanks: u16,
    /// The stub engine.
    pub stub: Stub,
}

/// Which accelerator is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccelWish {
    /// KVM where it is proved to work, else TCG.
    Auto,
    /// KVM or nothing.
    Kvm,
    /// TCG.
    Tcg,
}

/// `engine.stub`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stub {
    /// What answers for its guests.
    pub agent: StubAgent,
    /// The agent's program. `None`: the `silkd` beside sandboxd.
    pub silkd: Option<PathBuf>,
    /// Faults by script, for tests; empty: none.
    pub faults: String,
}

/// What answers for the stub engine's guests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StubAgent {
    /// A silkd per sandbox, which outlives the daemon.
    #[default]
    Process,
    /// The daemon itself; for load tests.
    InProcess,
}

/// `[net]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Net {
    /// Network namespace that all TAPs live in; one daemon each.
    pub namespace: Name,
    /// Sandboxes of lane guarded at most; 0: the lane is off, and nothing of the network is touched.
    pub slots: u16,
}

/// `[journal]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Journal {
    /// When records are synced.
    pub sync: Sync,
}

/// When records reach the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// Those whose subject outlives the host's power before their answer, the others soon after.
    Auto,
    /// All of them before their answer.
    Always,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// Filter directives, checked.
    pub filter: String,
    /// Form of a line.
    pub format: LogFormat,
}

/// Form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, else JSON.
    Auto,
    /// JSON, an object a line.
    Json,
    /// Text.
    Text,
}

/// `[access]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Group whose members are operators on the Unix socket. `None`: only root and the daemon's own user.
    pub operator_group: Option<String>,
    /// Access tokens; names and hashes are distinct.
    pub tokens: Vec<Token>,
}

/// An access token; the configuration knows only its hash.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// Who holds it.
    pub name: Name,
    /// SHA-256 of its text.
    pub sha256: [u8; 32],
    /// What it may do.
    pub role: Role,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("name", &self.name)
            .field("role", &self.role)
            .finish_non_exhaustive()
    }
}

/// What the holder of a token may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Everything.
    Operator,
    /// What this tenant may.
    Tenant(Name),
}

/// `[tenant.NAME]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Pools it may claim from.
    pub pools: TenantPools,
    /// Its egress policy, which exists; none denies.
    pub egress: Option<Name>,
}

/// `[egress]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Egress {
    /// Policies by name.
    pub policies: BTreeMap<Name, Arc<Layer>>,
    /// Name servers; empty: those of resolv.conf.
    pub servers: Vec<SocketAddr>,
    /// What is said about addresses, less the daemon's own ports.
    pub vetting: Vetting,
    /// The audit.
    pub audit: Audit,
    /// Secrets by name, without their values.
    pub secrets: BTreeMap<Name, SecretTerms>,
    /// Upstream proxies by name.
    pub upstreams: BTreeMap<Name, UpstreamTerms>,
    /// That of pools which name none; it exists.
    pub default_upstream: Option<Name>,
    /// The operator's own destinations.
    pub infra: Option<Arc<Layer>>,
    /// Where dials leave from.
    pub sources: Sources,
    /// Looking into TLS.
    pub tls: EgressTls,
}

/// `[egress.audit]`, and what is kept of both chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Audit {
    /// What cannot be recorded is denied.
    pub required: bool,
    /// How long files are kept; of `[egress.usage]` too.
    pub retention: Retention,
}

impl Default for Audit {
    fn default() -> Self {
        let keep = |days: u64, gib: u64| Keep {
            time: Duration::from_secs(days * 24 * 3600),
            size: gib << 30,
        };
        Self {
            required: false,
            retention: Retention {
                audit: keep(90, 16),
                // A year, and a month to settle it.
                usage: keep(400, 4),
            },
        }
    }
}

/// `[egress.tls]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressTls {
    /// PEM files of roots that origins are verified by, beside the host's own.
    pub extra_roots: Vec<PathBuf>,
    /// The folder of bundle.pem and node.pem.
    pub ca_dir: PathBuf,
}

impl Default for EgressTls {
    fn default() -> Self {
        Self {
            extra_roots: Vec::new(),
            ca_dir: PathBuf::from("/etc/sandboxd/ca"),
        }
    }
}

/// Pools of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TenantPools {
    /// All, those of the future included.
    All,
    /// These.
    Named(BTreeSet<Name>),
}

impl TenantPools {
    /// Whether a pool is among them.
    #[must_use]
    pub fn contains(&self, pool: &Name) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.contains(pool),
        }
    }
}

/// `[template.NAME]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// What it boots.
    pub image: ImageName,
    /// Program and arguments, run once before the capture; empty: none.
    pub warmup: Vec<String>,
    /// How long that may take.
    pub warmup_timeout: Duration,
}

/// Which image: a folder below `state_dir/images`, or an absolute path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageName {
    /// Name of a folder below `state_dir/images`.
    Named(String),
    /// An absolute path.
    At(PathBuf),
}

impl ImageName {
    /// Where it lies.
    #[must_use]
    pub fn path(&self, state_dir: &Path) -> PathBuf {
        match self {
            Self::Named(name) => state_dir.join("images").join(name),
            Self::At(path) => path.clone(),
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::At(path) => write!(f, "{}", path.display()),
        }
    }
}

/// `[pool.NAME]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// What its sandboxes have in common; template and size exist.
    pub key: PoolKey,
    /// Floor of the adaptive target.
    pub warm: u32,
    /// Its ceiling, at least `warm`.
    pub warm_max: u32,
    /// Lease of a claim that asks for none; whole seconds.
    pub lease: Duration,
    /// Longest lease, at most 30 days; whole seconds.
    pub lease_max: Duration,
    /// Its egress policy, which exists; none denies.
    pub egress: Option<Name>,
    /// A claim must bring a layer of its own.
    pub require_claim_policy: bool,
    /// Its upstream proxy, which exists; none: the node's.
    pub upstream: Option<Name>,
}
