//! `[egress]`: policies, name servers, and what is said about addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use ipnet::{IpNet, Ipv6Net};
use sandbox_protocol::limits;
use toml::de::DeValue;

use super::{LIST, exists, onwards, or, table_name};
use crate::{
    config::{
        types::{Audit, Egress, EgressTls},
        values,
        walk::{Found, Section, Walk, Wrong},
    },
    policy::{
        Effect, Internal, Keep, Layer, LayerFault, Mode, Opening, Retention, RuleFields, SecretTerms, Vetting,
    },
    words::{MemBytes, Name},
};

/// Port of a name server that names none.
const DNS: u16 = 53;

const MODES: &[(&str, Mode)] = &[("enforce", Mode::Enforce), ("report", Mode::Report)];
const EFFECTS: &[(&str, Effect)] = &[("allow", Effect::Allow), ("deny", Effect::Deny)];

pub(super) fn egress(walk: &mut Walk, root: &mut Section<'_>) -> Egress {
    let mut table = walk.section(root, "egress");
    let secrets = onwards::secrets(walk, &mut table);
    let policies = policies(walk, &mut table, &secrets);
    let upstreams = onwards::upstreams(walk, &mut table, &secrets);
    let default_upstream = onwards::named_upstream(walk, &mut table, "default_upstream", &upstreams);
    let infra = onwards::infra(walk, &mut table);
    let sources = onwards::sources(walk, &mut table);
    let mut resolver = walk.section(&mut table, "resolver");
    let servers = plain(walk.list(&mut resolver, "servers", LIST, server));
    walk.done(resolver);
    let mut section = walk.section(&mut table, "audit");
    let defaults = Audit::default();
    let required = walk.get(&mut section, "required", values::flag);
    let kept = keep(walk, &mut section, defaults.retention.audit);
    walk.done(section);
    let mut section = walk.section(&mut table, "usage");
    let audit = Audit {
        required: or(required, defaults.required),
        retention: Retention {
            audit: kept,
            usage: keep(walk, &mut section, defaults.retention.usage),
        },
    };
    walk.done(section);
    let tls = tls(walk, &mut table);
    let vetting = Vetting {
        own: plain(walk.list(&mut table, "own_addresses", LIST, net)),
        own_ports: BTreeSet::new(),
        nat64: plain(walk.list(&mut table, "nat64_prefixes", LIST, nat64)),
        internal: internal(walk, &mut table),
    };
    walk.done(table);
    Egress {
        policies,
        servers,
        vetting,
        audit,
        secrets,
        upstreams,
        default_upstream,
        infra,
        sources,
        tls,
    }
}

/// How long the files of a chain are kept, and how much of them.
fn keep(walk: &mut Walk, section: &mut Section<'_>, default: Keep) -> Keep {
    // A file has a day's lines, or 64 MiB.
    let times = Duration::from_secs(24 * 3600)..=Duration::from_secs(3650 * 24 * 3600);
    let sizes = MemBytes::from_mib(128)..=MemBytes::from_mib(64 << 20);
    let time = walk.get(section, "keep", values::duration(times));
    let size = walk.get(section, "keep_size", values::memory(sizes));
    Keep {
        time: or(time, default.time),
        size: or(size, MemBytes(default.size)).0,
    }
}

/// `[egress.tls]`. The files are opened by whoever uses them, at the start and at a reload.
fn tls(walk: &mut Walk, egress: &mut Section<'_>) -> EgressTls {
    let mut table = walk.section(egress, "tls");
    let tls = EgressTls {
        extra_roots: plain(walk.list(&mut table, "extra_roots", LIST, values::path)),
        ca_dir: or(
            walk.get(&mut table, "ca_dir", values::path),
            EgressTls::default().ca_dir,
        ),
    };
    walk.done(table);
    tls
}

/// The policy that a pool or tenant names; empty: none.
pub(super) fn named(
    walk: &mut Walk,
    table: &mut Section<'_>,
    policies: &BTreeMap<Name, Arc<Layer>>,
) -> Option<Name> {
    let or_none = |value: &DeValue<'_>| match values::text(value)? {
        "" => Ok(None),
        said => values::parse_name(said).map(Some),
    };
    let found = walk.get(table, "egress", or_none)?;
    let span = found.span;
    let name = Found {
        value: found.value?,
        span,
    };
    exists(walk, table.key("egress"), "egress.policy", &name, policies);
    Some(name.value)
}

pub(super) fn plain<T>(found: Option<Vec<Found<T>>>) -> Vec<T> {
    found
        .unwrap_or_default()
        .into_iter()
        .map(|found| found.value)
        .collect()
}

fn policies(
    walk: &mut Walk,
    table: &mut Section<'_>,
    secrets: &BTreeMap<Name, SecretTerms>,
) -> BTreeMap<Name, Arc<Layer>> {
    let mut policies = BTreeMap::new();
    for (name, mut policy) in walk.named(table, "policy") {
        let mode = or(walk.get(&mut policy, "mode", values::word(MODES)), Mode::Enforce);
        let rules = read_rules(walk, &mut policy, rule);
        for (at, (fields, _, _)) in rules.iter().enumerate() {
            for fault in onwards::rule_faults(fields, secrets) {
                tell(walk, &LayerFault { at, fault }, &rules, name.span.clone());
            }
        }
        let layer = checked(walk, mode, &rules, name.span.clone());
        if let (Some(layer), Some(name)) = (layer, table_name(walk, &name, &policy)) {
            policies.insert(name, Arc::new(layer));
        }
        walk.done(policy);
    }
    policies
}

/// A rule as it was written, the path of its table, and where its fields stand.
pub(super) type Written = (RuleFields, String, Spans);

fn read_rules(
    walk: &mut Walk,
    table: &mut Section<'_>,
    read: impl Fn(&mut Walk, &mut Section<'_>) -> (RuleFields, Spans),
) -> Vec<Written> {
    let mut rules = Vec::new();
    for mut entry in walk.sections(table, "rules", limits::POLICY_RULES) {
        let (fields, spans) = read(walk, &mut entry);
        rules.push((fields, entry.key(""), spans));
        walk.done(entry);
    }
    rules
}

/// Rules that have nothing but an id, hosts and ports.
pub(super) fn bare_rules(walk: &mut Walk, table: &mut Section<'_>) -> Vec<Written> {
    read_rules(walk, table, |walk, entry| {
        let mut spans = Spans::of(entry);
        let text = |value: &DeValue<'_>| values::text(value).map(str::to_owned);
        let id = walk.get(entry, "id", text);
        let host = walk.list(entry, "host", limits::POLICY_HOSTS, text);
        let ports = walk.list(entry, "ports", LIST, values::count(1..=65_535));
        let fields = RuleFields {
            id: or(id, String::new()),
            host: noted(&mut spans, "host", host),
            ports: noted(&mut spans, "ports", ports),
            ..RuleFields::default()
        };
        (fields, spans)
    })
}

/// The layer that these rules make; their faults are told.
pub(super) fn checked(
    walk: &mut Walk,
    mode: Mode,
    rules: &[Written],
    otherwise: Range<usize>,
) -> Option<Layer> {
    let fields = rules.iter().map(|(fields, _, _)| fields.clone()).collect();
    match Layer::new(mode, fields, limits::POLICY_RULES) {
        Ok(layer) => Some(layer),
        Err(faults) => {
            for fault in faults {
                tell(walk, &fault, rules, otherwise.clone());
            }
            None
        }
    }
}

/// Where the fields of a rule stand, and the rule itself.
pub(super) struct Spans {
    whole: Range<usize>,
    fields: Vec<(&'static str, Range<usize>)>,
}

impl Spans {
    fn of(table: &Section<'_>) -> Self {
        Self {
            whole: table.span(),
            fields: Vec::new(),
        }
    }
}

fn tell(walk: &mut Walk, fault: &LayerFault, places: &[Written], otherwise: Range<usize>) {
    let LayerFault { at, fault } = fault;
    let place = places.get(*at);
    let span = place.map_or(otherwise, |(_, _, spans)| {
        let field = spans.fields.iter().find(|(name, _)| *name == fault.field);
        field.map_or(&spans.whole, |(_, span)| span).clone()
    });
    let key = place.map_or_else(String::new, |(_, path, _)| format!("{path}{}", fault.field));
    let wrong = Wrong::new(format!("`{key}`: {}", fault.what), fault.allowed);
    walk.mistake(span, key, wrong);
}

fn rule(walk: &mut Walk, table: &mut Section<'_>) -> (RuleFields, Spans) {
    let mut spans = Spans::of(table);
    let mut text = |walk: &mut Walk, table: &mut Section<'_>, key| {
        let found = walk.get(table, key, |value| values::text(value).map(str::to_owned));
        found.map_or_else(String::new, |found| {
            spans.fields.push((key, found.span));
            found.value
        })
    };
    let id = text(walk, table, "id");
    let message = text(walk, table, "message");
    let secret = Some(text(walk, table, "secret")).filter(|name| !name.is_empty());
    let cleartext_secret = or(walk.get(table, "cleartext_secret", values::flag), false);
    let effect = or(walk.get(table, "effect", values::word(EFFECTS)), Effect::Allow);
    let mut texts = |walk: &mut Walk, table: &mut Section<'_>, key| {
        let found = walk.list(table, key, LIST.max(limits::POLICY_HOSTS), |value| {
            values::text(value).map(str::to_owned)
        });
        noted(&mut spans, key, found)
    };
    let host = texts(walk, table, "host");
    let methods = texts(walk, table, "methods");
    let paths = texts(walk, table, "paths");
    let ports = walk.list(table, "ports", LIST, values::count(1..=65_535));
    let ports = noted(&mut spans, "ports", ports);
    let intercept = walk.get(table, "intercept", values::flag).is_some_and(|found| {
        spans.fields.push(("intercept", found.span));
        found.value
    });
    let fields = RuleFields {
        id,
        effect,
        host,
        ports,
        methods,
        paths,
        secret,
        cleartext_secret,
        intercept,
        message,
    };
    (fields, spans)
}

fn noted<T>(spans: &mut Spans, key: &'static str, found: Option<Vec<Found<T>>>) -> Vec<T> {
    let found = found.unwrap_or_default();
    if let Some(first) = found.first() {
        spans.fields.push((key, first.span.clone()));
    }
    found.into_iter().map(|found| found.value).collect()
}

fn internal(walk: &mut Walk, table: &mut Section<'_>) -> Vec<Internal> {
    let mut all = Vec::new();
    for mut entry in walk.sections(table, "internal_allow", LIST) {
        let cidr = walk.get(&mut entry, "cidr", net);
        let ports = plain(walk.list(&mut entry, "ports", LIST, values::small_count(1..=65_535)));
        let pools = opening(walk, &mut entry, "pools");
        let tenants = opening(walk, &mut entry, "tenants");
        match cidr {
            Some(cidr) if !ports.is_empty() => all.push(Internal {
                net: cidr.value,
                ports: ports.into_iter().collect(),
                pools,
                tenants,
            }),
            Some(_) | None => {
                let wrong = Wrong::new(
                    "an address is opened by `cidr` and `ports`",
                    "such as { cidr = \"10.1.2.3/32\", ports = [443] }",
                );
                walk.mistake(entry.span(), entry.key("ports"), wrong);
            }
        }
        walk.done(entry);
    }
    all
}

/// Names, or all where nothing or `*` is said.
pub(super) fn opening(walk: &mut Walk, table: &mut Section<'_>, key: &'static str) -> Opening {
    let name = |value: &DeValue<'_>| match values::text(value)? {
        "*" => Ok(None),
        said => values::parse_name(said).map(Some),
    };
    match walk.list(table, key, LIST, name) {
        None => Opening::All,
        Some(found) => found
            .into_iter()
            .map(|found| found.value)
            .collect::<Option<BTreeSet<Name>>>()
            .map_or(Opening::All, Opening::Named),
    }
}

fn server(value: &DeValue<'_>) -> Result<SocketAddr, Wrong> {
    let said = values::text(value)?;
    let wrong = || {
        Wrong::new(
            format!("\"{said}\" is not a name server"),
            "an address, with or without :PORT",
        )
    };
    match said.parse::<IpAddr>() {
        Ok(address) => Ok(SocketAddr::new(address, DNS)),
        Err(_) => said.parse().map_err(|_no_address| wrong()),
    }
}

/// A range; an address stands for itself alone.
fn net(value: &DeValue<'_>) -> Result<IpNet, Wrong> {
    let said = values::text(value)?;
    let whole = |address: IpAddr| IpNet::from(address.to_canonical());
    let net = said
        .parse::<IpAddr>()
        .map(whole)
        .or_else(|_| said.parse::<IpNet>());
    let wrong = || {
        Wrong::new(
            format!("\"{said}\" is not a range"),
            "such as \"10.1.2.3/32\", \"fd00:1::/48\"",
        )
    };
    let net = net.map_err(|_no_range| wrong())?;
    // What is written with bits behind its prefix was meant otherwise.
    if net.trunc() == net { Ok(net) } else { Err(wrong()) }
}

fn nat64(value: &DeValue<'_>) -> Result<Ipv6Net, Wrong> {
    match net(value)? {
        IpNet::V6(net) if net.prefix_len() == 96 => Ok(net),
        IpNet::V4(_) | IpNet::V6(_) => Err(Wrong::new("not a NAT64 prefix", "IPv6 with /96")),
    }
}
