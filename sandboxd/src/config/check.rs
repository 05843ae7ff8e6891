//! Table by table into newtypes, then what must fit together. A mistake never stops the reading: whatever is wrong
//! takes its default, and the mistakes decide at the end.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use sandbox_protocol::{limits, reason::Reason};
use toml::de::DeTable;

use super::{
    Host,
    mistake::Mistake,
    pool::{PoolFault, PoolFields, WARM_LIMIT, WARM_MAX_LIMIT},
    types::{
        AccelWish, Access, Config, Engine, ImageName, Journal, Listen, Log, LogFormat, Node, PoolConfig,
        Role, Stub, StubAgent, Sync, Tcp, Template, Tenant, TenantPools, Tls, Token,
    },
    values,
    walk::{Found, Section, Walk, Wrong},
};
use crate::words::{EngineKind, Lane, MemBytes, Name, PoolKey, Size, Vcpus};

const LEASE_LIMIT: Duration = Duration::from_secs(limits::LEASE_MAX_SECS as u64);
/// Floor of a pool that names none.
const WARM: u32 = 4;
const WARMUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Tokens, tenants' pools and warm-up arguments in one list at most; a bound on what a file can make us do.
const LIST: usize = 1_024;

pub(super) fn check(text: &str, host: &Host) -> Result<Config, Vec<Mistake>> {
    let (document, faults) = DeTable::parse_recoverable(text);
    let mut walk = Walk::default();
    let config = read(&mut walk, document.get_ref(), host);
    let mut mistakes = syntax(text, &faults);
    // What the parser made of a broken line is no use; the mistakes of all other lines are.
    let broken: Vec<_> = mistakes
        .iter()
        .map(|fault| line_of(text, fault.span.start))
        .collect();
    mistakes.extend(
        walk.mistakes
            .into_iter()
            .filter(|mistake| !broken.contains(&line_of(text, mistake.span.start))),
    );
    if mistakes.is_empty() {
        Ok(config)
    } else {
        Err(mistakes)
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

fn syntax(text: &str, faults: &[toml::de::Error]) -> Vec<Mistake> {
    let mistake = |fault: &toml::de::Error| Mistake {
        span: fault.span().unwrap_or(text.len()..text.len()),
        key: String::new(),
        what: fault.message().to_owned(),
        allowed: String::new(),
        reason: "CONFIG_INVALID",
    };
    faults.iter().map(mistake).collect()
}

fn read(walk: &mut Walk, table: &DeTable<'_>, host: &Host) -> Config {
    let mut root = Section::root(table);
    let node = node(walk, &mut root, host);
    let engine = engine(walk, &mut root);
    let listen = listen(walk, &mut root, &node);
    let journal = journal(walk, &mut root);
    let log = log(walk, &mut root);
    let tenants = tenants(walk, &mut root);
    let access = access(walk, &mut root, &tenants);
    let templates = templates(walk, &mut root);
    let sizes = sizes(walk, &mut root);
    let pools = pools(walk, &mut root, &templates, &sizes);
    let config = Config {
        node,
        listen,
        engine,
        journal,
        log,
        access,
        tenants,
        templates,
        sizes,
        pools: pools
            .iter()
            .map(|(name, pool)| (name.clone(), pool.value.clone()))
            .collect(),
    };
    stock_fits(walk, &config, &pools);
    walk.done(root);
    config
}

fn or<T>(found: Option<Found<T>>, default: T) -> T {
    found.map_or(default, |found| found.value)
}

pub(super) fn node_default(host: &Host) -> Node {
    Node {
        name: host.name.clone(),
        state_dir: PathBuf::from("/var/lib/sandboxd"),
        run_dir: PathBuf::from("/run/sandboxd"),
        memory: MemBytes(host.memory.0 / 100 * 80),
        max_sandboxes: 4_096,
        clones_in_flight: host.cores.max(1),
    }
}

fn node(walk: &mut Walk, root: &mut Section<'_>, host: &Host) -> Node {
    let mut table = walk.section(root, "node");
    let default = node_default(host);
    let clones = or(
        walk.get(&mut table, "clones_in_flight", values::small_count(0..=1_024)),
        0,
    );
    let node = Node {
        name: or(walk.get(&mut table, "name", values::node_name), None).unwrap_or(default.name),
        state_dir: or(walk.get(&mut table, "state_dir", values::path), default.state_dir),
        run_dir: or(walk.get(&mut table, "run_dir", values::run_dir), default.run_dir),
        memory: or(
            walk.get(&mut table, "memory", values::budget(host.memory)),
            default.memory,
        ),
        max_sandboxes: or(
            walk.get(&mut table, "max_sandboxes", values::small_count(1..=65_535)),
            default.max_sandboxes,
        ),
        clones_in_flight: if clones == 0 {
            default.clones_in_flight
        } else {
            clones
        },
    };
    walk.done(table);
    node
}

fn listen(walk: &mut Walk, root: &mut Section<'_>, node: &Node) -> Listen {
    let mut table = walk.section(root, "listen");
    let unix = or(
        walk.get(&mut table, "unix", values::socket_path),
        node.run_dir.join("api.sock"),
    );
    let addr = walk.get(&mut table, "tcp", values::address);
    let tls = tls(walk, &mut table);
    let metrics = walk.get(&mut table, "metrics", values::address);
    let addr = addr.and_then(|found| {
        let span = found.span;
        found.value.map(|value| Found { value, span })
    });
    if let (
        Some(tcp),
        Some(Found {
            value: Some(metrics),
            span,
        }),
    ) = (&addr, &metrics)
        && tcp.value == *metrics
        && metrics.port() != 0
    {
        let wrong = Wrong::new(
            format!("`listen.metrics` is the address of `listen.tcp`, {metrics}"),
            "another port, or \"\" for none",
        );
        walk.mistake(span.clone(), table.key("metrics"), wrong);
    }
    let tcp = tcp(walk, &table, addr, tls);
    walk.done(table);
    Listen {
        unix,
        unix_mode: 0o660,
        tcp,
        metrics: or(metrics, Some(SocketAddr::from(([127, 0, 0, 1], 9_640)))),
    }
}

fn tcp(
    walk: &mut Walk,
    table: &Section<'_>,
    addr: Option<Found<SocketAddr>>,
    tls: Option<Found<Tls>>,
) -> Option<Tcp> {
    match (addr, tls) {
        (Some(addr), Some(tls)) => Some(Tcp::Tls(addr.value, tls.value)),
        (Some(addr), None) if addr.value.ip().is_loopback() => Some(Tcp::Plain(addr.value)),
        (Some(addr), None) => {
            let wrong = Wrong::new(
                format!("`listen.tcp`: {} is not loopback and needs TLS", addr.value),
                "set listen.tls.cert and listen.tls.key, or listen on 127.0.0.1",
            );
            walk.mistake(addr.span, table.key("tcp"), wrong);
            None
        }
        (None, Some(tls)) => {
            let wrong = Wrong::new(
                "`listen.tls` without `listen.tcp`",
                "set listen.tcp, or remove it",
            );
            walk.mistake(tls.span, table.key("tls"), wrong);
            None
        }
        (None, None) => None,
    }
}

fn tls(walk: &mut Walk, listen: &mut Section<'_>) -> Option<Found<Tls>> {
    let mut table = walk.section(listen, "tls");
    let span = table.span();
    let cert = or(walk.get(&mut table, "cert", values::path_or_none), None);
    let key = or(walk.get(&mut table, "key", values::path_or_none), None);
    let missing = match (cert, key) {
        (Some(cert), Some(key)) => {
            walk.done(table);
            return Some(Found {
                value: Tls { cert, key },
                span,
            });
        }
        (Some(_), None) => Some("key"),
        (None, Some(_)) => Some("cert"),
        (None, None) => None,
    };
    if let Some(missing) = missing {
        let wrong = Wrong::new(
            format!("`listen.tls` has no `{missing}`"),
            "cert and key go together",
        );
        walk.mistake(span, table.key(missing), wrong);
    }
    walk.done(table);
    None
}

pub(super) fn engine_default() -> Engine {
    Engine {
        kind: EngineKind::Qemu,
        accel: AccelWish::Auto,
        qemu: PathBuf::from("qemu-system-x86_64"),
        vm_user: Some("sandboxd-vm".to_owned()),
        blanks: 1,
        stub: Stub::default(),
    }
}

const KINDS: &[(&str, EngineKind)] = &[("qemu", EngineKind::Qemu), ("stub", EngineKind::Stub)];
const ACCELS: &[(&str, AccelWish)] = &[
    ("auto", AccelWish::Auto),
    ("kvm", AccelWish::Kvm),
    ("tcg", AccelWish::Tcg),
];
const AGENTS: &[(&str, StubAgent)] = &[
    ("process", StubAgent::Process),
    ("in_process", StubAgent::InProcess),
];

fn engine(walk: &mut Walk, root: &mut Section<'_>) -> Engine {
    let mut table = walk.section(root, "engine");
    let default = engine_default();
    let kind = walk.get(&mut table, "kind", values::word(KINDS));
    let isolates_nothing = or(walk.get(&mut table, "isolates_nothing", values::flag), false);
    if let Some(Found {
        value: EngineKind::Stub,
        span,
    }) = &kind
        && !isolates_nothing
    {
        let wrong = Wrong::new(
            "`engine.kind`: the stub engine isolates nothing, and starts only when that is said",
            "set engine.isolates_nothing = true, for tests and load only",
        );
        walk.mistake(span.clone(), table.key("kind"), wrong);
    }
    let mut stub = walk.section(&mut table, "stub");
    let engine = Engine {
        kind: or(kind, default.kind),
        accel: or(walk.get(&mut table, "accel", values::word(ACCELS)), default.accel),
        qemu: or(walk.get(&mut table, "qemu", values::program), default.qemu),
        vm_user: or(walk.get(&mut table, "vm_user", values::account), default.vm_user),
        blanks: or(
            walk.get(&mut table, "blanks", values::small_count(0..=64)),
            default.blanks,
        ),
        stub: Stub {
            agent: or(
                walk.get(&mut stub, "agent", values::word(AGENTS)),
                StubAgent::Process,
            ),
            silkd: or(walk.get(&mut stub, "silkd", values::path_or_none), None),
            faults: or(walk.get(&mut stub, "faults", values::argument), String::new()),
        },
    };
    walk.done(stub);
    walk.done(table);
    engine
}

const SYNCS: &[(&str, Sync)] = &[("auto", Sync::Auto), ("always", Sync::Always)];
const FORMATS: &[(&str, LogFormat)] = &[
    ("auto", LogFormat::Auto),
    ("json", LogFormat::Json),
    ("text", LogFormat::Text),
];

fn journal(walk: &mut Walk, root: &mut Section<'_>) -> Journal {
    let mut table = walk.section(root, "journal");
    let sync = or(walk.get(&mut table, "sync", values::word(SYNCS)), Sync::Auto);
    walk.done(table);
    Journal { sync }
}

pub(super) fn log_default() -> Log {
    Log {
        filter: "info".to_owned(),
        format: LogFormat::Auto,
    }
}

fn log(walk: &mut Walk, root: &mut Section<'_>) -> Log {
    let mut table = walk.section(root, "log");
    let default = log_default();
    let log = Log {
        filter: or(walk.get(&mut table, "filter", values::filter), default.filter),
        format: or(
            walk.get(&mut table, "format", values::word(FORMATS)),
            default.format,
        ),
    };
    walk.done(table);
    log
}

/// The name of a named table; a wrong one is a mistake, and the table's content is still looked at.
fn table_name(walk: &mut Walk, name: &Found<&str>, section: &Section<'_>) -> Option<Name> {
    match values::parse_name(name.value) {
        Ok(name) => Some(name),
        Err(wrong) => {
            let key = section.key("");
            walk.mistake(name.span.clone(), key.trim_end_matches('.').to_owned(), wrong);
            None
        }
    }
}

fn tenants(walk: &mut Walk, root: &mut Section<'_>) -> BTreeMap<Name, Tenant> {
    let mut tenants = BTreeMap::new();
    for (name, mut table) in walk.named(root, "tenant") {
        let everything = |value: &toml::de::DeValue<'_>| match values::text(value)? {
            "*" => Ok(None),
            said => values::parse_name(said).map(Some),
        };
        let pools = walk.list(&mut table, "pools", LIST, everything);
        let pools = match pools {
            None => TenantPools::All,
            Some(named) => named
                .into_iter()
                .map(|found| found.value)
                .collect::<Option<_>>()
                .map_or(TenantPools::All, TenantPools::Named),
        };
        if let Some(name) = table_name(walk, &name, &table) {
            tenants.insert(name, Tenant { pools });
        }
        walk.done(table);
    }
    tenants
}

fn access(walk: &mut Walk, root: &mut Section<'_>, tenants: &BTreeMap<Name, Tenant>) -> Access {
    let mut table = walk.section(root, "access");
    let operator_group = or(
        walk.get(&mut table, "operator_group", values::account),
        Some("sandboxd".to_owned()),
    );
    let mut tokens: Vec<Token> = Vec::new();
    for mut entry in walk.sections(&mut table, "token", LIST) {
        let token = token(walk, &mut entry, tenants);
        let span = entry.span();
        walk.done(entry);
        let Some(token) = token else { continue };
        let doubled = tokens
            .iter()
            .find(|other| other.name == token.name || other.sha256 == token.sha256);
        if let Some(other) = doubled {
            let what = format!(
                "token `{}` has the name or the hash of token `{}`",
                token.name, other.name
            );
            walk.mistake(
                span,
                "access.token".to_owned(),
                Wrong::new(what, "each token has its own"),
            );
            continue;
        }
        tokens.push(token);
    }
    walk.done(table);
    Access {
        operator_group,
        tokens,
    }
}

#[derive(Clone, Copy)]
enum RoleWord {
    Operator,
    Tenant,
}

const ROLES: &[(&str, RoleWord)] = &[("operator", RoleWord::Operator), ("tenant", RoleWord::Tenant)];

fn token(walk: &mut Walk, table: &mut Section<'_>, tenants: &BTreeMap<Name, Tenant>) -> Option<Token> {
    let before = walk.mistakes.len();
    let name = walk.get(table, "name", values::name);
    let sha256 = walk.get(table, "sha256", values::sha256);
    let role = walk.get(table, "role", values::word(ROLES));
    let tenant = walk.get(table, "tenant", values::name);
    if walk.mistakes.len() > before {
        return None;
    }
    let mut missing = |key: &str| {
        let wrong = Wrong::new(
            format!("a token has no `{key}`"),
            "name, sha256, role, and tenant with role = \"tenant\"",
        );
        walk.mistake(table.span(), table.key(key), wrong);
    };
    let (Some(name), Some(sha256), Some(role)) = (&name, &sha256, &role) else {
        for (key, absent) in [
            ("name", name.is_none()),
            ("sha256", sha256.is_none()),
            ("role", role.is_none()),
        ] {
            if absent {
                missing(key);
            }
        }
        return None;
    };
    let role = match (role.value, tenant) {
        (RoleWord::Operator, None) => Role::Operator,
        (RoleWord::Tenant, None) => {
            missing("tenant");
            return None;
        }
        (RoleWord::Operator, Some(tenant)) => {
            let wrong = Wrong::new(
                "an operator's token has no tenant",
                "remove it, or role = \"tenant\"",
            );
            walk.mistake(tenant.span, table.key("tenant"), wrong);
            return None;
        }
        (RoleWord::Tenant, Some(tenant)) => {
            exists(walk, table.key("tenant"), "tenant", &tenant, tenants);
            Role::Tenant(tenant.value)
        }
    };
    Some(Token {
        name: name.value.clone(),
        sha256: sha256.value,
        role,
    })
}

/// A name that is spoken of must be there.
fn exists<T>(walk: &mut Walk, key: String, what: &str, name: &Found<Name>, there: &BTreeMap<Name, T>) {
    if there.contains_key(&name.value) {
        return;
    }
    let known: Vec<_> = there.keys().map(Name::as_str).collect();
    let allowed = if known.is_empty() {
        format!("add [{what}.{}]", name.value)
    } else {
        format!("add [{what}.{}], or use one of: {}", name.value, known.join(", "))
    };
    let wrong = Wrong::new(format!("`{key}`: there is no {what} `{}`", name.value), allowed);
    walk.mistake(name.span.clone(), key, wrong);
}

pub(super) fn template_default() -> Template {
    Template {
        image: ImageName::Named("busybox".to_owned()),
        warmup: Vec::new(),
        warmup_timeout: WARMUP_TIMEOUT,
    }
}

pub(super) fn default_name() -> Name {
    "default".parse().expect("it is a name")
}

fn templates(walk: &mut Walk, root: &mut Section<'_>) -> BTreeMap<Name, Template> {
    let mut templates = BTreeMap::from([(default_name(), template_default())]);
    for (name, mut table) in walk.named(root, "template") {
        let default = template_default();
        let warmup = walk.list(&mut table, "warmup", LIST, values::argument);
        let timeout = values::duration(Duration::from_millis(1)..=Duration::from_secs(600));
        let template = Template {
            image: or(walk.get(&mut table, "image", values::image), default.image),
            warmup: warmup
                .unwrap_or_default()
                .into_iter()
                .map(|found| found.value)
                .collect(),
            warmup_timeout: or(
                walk.get(&mut table, "warmup_timeout", timeout),
                default.warmup_timeout,
            ),
        };
        if let Some(name) = table_name(walk, &name, &table) {
            templates.insert(name, template);
        }
        walk.done(table);
    }
    templates
}

pub(super) fn sizes_default() -> BTreeMap<Name, Size> {
    let built_in = [("small", 1, 256), ("medium", 2, 1_024), ("large", 4, 4_096)];
    built_in
        .into_iter()
        .map(|(name, vcpus, mib)| {
            let size = Size {
                vcpus: Vcpus(vcpus),
                memory: MemBytes::from_mib(mib),
            };
            (name.parse().expect("it is a name"), size)
        })
        .collect()
}

fn sizes(walk: &mut Walk, root: &mut Section<'_>) -> BTreeMap<Name, Size> {
    let mut sizes = sizes_default();
    let range = MemBytes::from_mib(128)..=MemBytes::from_mib(1 << 20);
    for (name, mut table) in walk.named(root, "size") {
        let vcpus = walk.get(&mut table, "vcpus", values::small_count(1..=64));
        let memory = walk.get(&mut table, "memory", values::memory(range.clone()));
        if let Some(name) = table_name(walk, &name, &table) {
            // A built-in one keeps what is not said; a new one has the parts of `small`.
            let small = Size {
                vcpus: Vcpus(1),
                memory: MemBytes::from_mib(256),
            };
            let base = sizes.get(&name).copied().unwrap_or(small);
            let size = Size {
                vcpus: vcpus.map_or(base.vcpus, |found| Vcpus(found.value)),
                memory: or(memory, base.memory),
            };
            sizes.insert(name, size);
        }
        walk.done(table);
    }
    sizes
}

type Pools = BTreeMap<Name, Found<PoolConfig>>;

const LANES: &[(&str, Lane)] = &[("none", Lane::None), ("guarded", Lane::Guarded)];

fn pools(
    walk: &mut Walk,
    root: &mut Section<'_>,
    templates: &BTreeMap<Name, Template>,
    sizes: &BTreeMap<Name, Size>,
) -> Pools {
    let mut pools = Pools::new();
    for (name, mut table) in walk.named(root, "pool") {
        let template = walk.get(&mut table, "template", values::name);
        let size = walk.get(&mut table, "size", values::name);
        if let Some(template) = &template {
            exists(walk, table.key("template"), "template", template, templates);
        }
        if let Some(size) = &size {
            exists(walk, table.key("size"), "size", size, sizes);
        }
        let key = PoolKey {
            template: or(template, default_name()),
            lane: lane(walk, &mut table),
            size: or(size, "small".parse().expect("it is a name")),
        };
        let (pool, span) = numbers(walk, &mut table, key);
        if let Some(name) = table_name(walk, &name, &table)
            && let Some(value) = pool
        {
            pools.insert(name, Found { value, span });
        }
        walk.done(table);
    }
    pools
}

fn lane(walk: &mut Walk, table: &mut Section<'_>) -> Lane {
    let Some(lane) = walk.get(table, "lane", values::word(LANES)) else {
        return Lane::None;
    };
    if lane.value == Lane::Guarded {
        let wrong = Wrong::new(
            format!("`{}`: this version has no lane `guarded`", table.key("lane")),
            Reason::LaneUnavailable.remedy(),
        );
        walk.mistake_for(
            Reason::LaneUnavailable.as_str(),
            lane.span,
            table.key("lane"),
            wrong,
        );
    }
    lane.value
}

/// The numbers of a pool, and where its `warm` stands. A number that cannot be read is told and left out.
fn numbers(
    walk: &mut Walk,
    table: &mut Section<'_>,
    key: PoolKey,
) -> (Option<PoolConfig>, std::ops::Range<usize>) {
    let warm = walk.get(table, "warm", values::count(0..=WARM_LIMIT));
    let warm_max = walk.get(table, "warm_max", values::count(0..=WARM_MAX_LIMIT));
    let lease = walk.get(table, "lease", values::lease(LEASE_LIMIT));
    let lease_max = walk.get(table, "lease_max", values::lease(LEASE_LIMIT));
    let spans = [
        ("warm", "warm", span_of(warm.as_ref())),
        ("warm_max", "warm_max", span_of(warm_max.as_ref())),
        ("lease_secs", "lease", span_of(lease.as_ref())),
        ("lease_max_secs", "lease_max", span_of(lease_max.as_ref())),
    ];
    let warm_span = span_of(warm.as_ref()).unwrap_or(table.span());
    let fields = PoolFields {
        key,
        warm: or(warm, WARM),
        warm_max: warm_max.map(|found| found.value),
        lease_secs: lease.map(|found| found.value),
        lease_max_secs: lease_max.map(|found| found.value),
    };
    match PoolConfig::new(fields) {
        Ok(pool) => (Some(pool), warm_span),
        Err(faults) => {
            for PoolFault { field, what, allowed } in faults {
                let place = spans.iter().find(|(name, ..)| *name == field);
                let (key, span) = place.map_or((field, None), |(_, key, span)| (*key, span.clone()));
                let path = table.key(key);
                let wrong = Wrong::new(format!("`{path}`: {what}"), allowed);
                walk.mistake(span.unwrap_or(table.span()), path, wrong);
            }
            (None, warm_span)
        }
    }
}

fn span_of<T>(found: Option<&Found<T>>) -> Option<std::ops::Range<usize>> {
    found.map(|found| found.span.clone())
}

/// The stock that the pools keep at least must fit on the node, else refill could never reach it.
fn stock_fits(walk: &mut Walk, config: &Config, pools: &Pools) {
    let counts_memory = match config.engine.kind {
        EngineKind::Qemu => true,
        EngineKind::Stub => false,
    };
    let (mut places, mut memory) = (0_u64, 0_u64);
    for (name, pool) in pools {
        let warm = u64::from(pool.value.warm);
        let each = config
            .sizes
            .get(&pool.value.key.size)
            .map_or(0, |size| size.memory.0);
        places += warm;
        memory = memory.saturating_add(each.saturating_mul(warm));
        let over = if places > u64::from(config.node.max_sandboxes) {
            format!(
                "with this pool {places} sandboxes are kept warm, and node.max_sandboxes is {}",
                config.node.max_sandboxes
            )
        } else if counts_memory && memory > config.node.memory.0 {
            format!(
                "with this pool {} MiB are kept warm, and node.memory is {} MiB",
                MemBytes(memory).mib(),
                config.node.memory.mib()
            )
        } else {
            continue;
        };
        let key = format!("pool.{name}.warm");
        walk.mistake(
            pool.span.clone(),
            key.clone(),
            Wrong::new(
                format!("`{key}`: {over}"),
                "less warm, a smaller size, or a larger budget",
            ),
        );
        return;
    }
}
