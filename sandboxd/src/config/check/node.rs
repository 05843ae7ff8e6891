//! `[node]`, `[listen]`, `[engine]`, `[net]`, `[journal]`, `[log]`.

use std::{net::SocketAddr, path::PathBuf};

use super::or;
use crate::{
    config::{
        Host,
        types::{
            AccelWish, Engine, Journal, Listen, Log, LogFormat, Net, Node, Stub, StubAgent, Sync, Tcp, Tls,
        },
        values,
        walk::{Found, Section, Walk, Wrong},
    },
    words::{EngineKind, MemBytes},
};

pub(in crate::config) fn node_default(host: &Host) -> Node {
    Node {
        name: host.name.clone(),
        state_dir: PathBuf::from("/var/lib/sandboxd"),
        run_dir: PathBuf::from("/run/sandboxd"),
        memory: MemBytes(host.memory.0 / 100 * 80),
        max_sandboxes: 4_096,
        clones_in_flight: host.cores.max(1),
    }
}

pub(super) fn node(walk: &mut Walk, root: &mut Section<'_>, host: &Host) -> Node {
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

pub(super) fn listen(walk: &mut Walk, root: &mut Section<'_>, node: &Node) -> Listen {
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

pub(in crate::config) fn engine_default() -> Engine {
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

pub(super) fn engine(walk: &mut Walk, root: &mut Section<'_>) -> Engine {
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

/// TAPs at most: looking up a listener takes time in proportion to how many there are.
const SLOTS: u16 = 4_096;

pub(in crate::config) fn net_default() -> Net {
    Net {
        namespace: "sandboxd".parse().expect("it is a name"),
        slots: 0,
    }
}

pub(super) fn net(walk: &mut Walk, root: &mut Section<'_>) -> Net {
    let mut table = walk.section(root, "net");
    let default = net_default();
    let net = Net {
        namespace: or(walk.get(&mut table, "namespace", values::name), default.namespace),
        slots: or(
            walk.get(&mut table, "slots", values::small_count(0..=SLOTS)),
            default.slots,
        ),
    };
    walk.done(table);
    net
}

const SYNCS: &[(&str, Sync)] = &[("auto", Sync::Auto), ("always", Sync::Always)];
const FORMATS: &[(&str, LogFormat)] = &[
    ("auto", LogFormat::Auto),
    ("json", LogFormat::Json),
    ("text", LogFormat::Text),
];

pub(super) fn journal(walk: &mut Walk, root: &mut Section<'_>) -> Journal {
    let mut table = walk.section(root, "journal");
    let sync = or(walk.get(&mut table, "sync", values::word(SYNCS)), Sync::Auto);
    walk.done(table);
    Journal { sync }
}

pub(in crate::config) fn log_default() -> Log {
    Log {
        filter: "info".to_owned(),
        format: LogFormat::Auto,
    }
}

pub(super) fn log(walk: &mut Walk, root: &mut Section<'_>) -> Log {
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
