//! `[egress.secret.NAME]`, `[egress.upstream.NAME]`, `[egress.infra]`, `[egress.source]`: what the operator adds to the way
//! out.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use http::{HeaderName, HeaderValue};
use sandbox_protocol::limits;
use toml::de::DeValue;

use super::{
    LIST,
    egress::{bare_rules, checked, opening, plain},
    exists, or, table_name,
};
use crate::{
    config::{
        values,
        walk::{Found, Section, Walk, Wrong},
    },
    policy::{
        Authority, HostPattern, Layer, Mode, ProxyKind, RuleFault, RuleFields, SecretSource, SecretTerms,
        Source, Sources, UpstreamTerms, may_be_secret,
    },
    words::Name,
};

/// Longest prefix of a value, and longest name of a variable or credential.
const WORD: usize = 256;
const RESOLVE: &[(&str, bool)] = &[("here", false), ("upstream", true)];

pub(super) fn secrets(walk: &mut Walk, table: &mut Section<'_>) -> BTreeMap<Name, SecretTerms> {
    let mut secrets = BTreeMap::new();
    for (name, mut secret) in walk.named(table, "secret") {
        let before = walk.mistakes.len();
        let span = name.span.clone();
        let header = walk.get(&mut secret, "header", field);
        let prefix = walk.get(&mut secret, "prefix", prefix);
        let source = source_of(walk, &mut secret);
        let hosts = walk.list(&mut secret, "hosts", limits::POLICY_HOSTS, pattern);
        let tenants = opening(walk, &mut secret, "tenants");
        let hosts = plain(hosts);
        let fits = header.is_some() != hosts.is_empty() && (prefix.is_none() || header.is_some());
        if !fits && walk.mistakes.len() == before {
            let key = secret.key("hosts");
            let wrong = Wrong::new(
                format!("`{key}`: a field goes to some hosts, and nothing else does"),
                "header and hosts, with or without prefix; or none of them, for an upstream proxy",
            );
            walk.mistake(span, key, wrong);
        }
        let name = table_name(walk, &name, &secret);
        walk.done(secret);
        let Some(name) = name else { continue };
        let Some(source) = source.filter(|_| walk.mistakes.len() == before) else {
            secrets.insert(name, broken());
            continue;
        };
        let terms = SecretTerms {
            header: header.map(|found| found.value),
            prefix: or(prefix, String::new()),
            source,
            hosts,
            tenants,
        };
        secrets.insert(name, terms);
    }
    secrets
}

/// What stands for a secret whose own lines are wrong, so that the rules that name it are not told to be wrong as well.
fn broken() -> SecretTerms {
    SecretTerms {
        header: Some(http::header::AUTHORIZATION),
        prefix: String::new(),
        source: SecretSource::Env(String::new()),
        hosts: vec![HostPattern::AnyName],
        tenants: crate::policy::Opening::All,
    }
}

fn source_of(walk: &mut Walk, secret: &mut Section<'_>) -> Option<SecretSource> {
    let mut value = walk.section(secret, "value");
    let before = walk.mistakes.len();
    let env = walk.get(&mut value, "env", word);
    let file = walk.get(&mut value, "file", values::path);
    let credential = walk.get(&mut value, "credential", credential);
    let (span, key) = (value.span(), secret.key("value"));
    walk.done(value);
    let sources = [
        env.map(|found| SecretSource::Env(found.value)),
        file.map(|found| SecretSource::File(found.value)),
        credential.map(|found| SecretSource::Credential(found.value)),
    ];
    let mut sources = sources.into_iter().flatten();
    match (sources.next(), sources.next()) {
        (Some(source), None) => Some(source),
        // What is wrong below it was told.
        (Some(_) | None, _) if walk.mistakes.len() > before => None,
        (Some(_) | None, _) => {
            let wrong = Wrong::new(
                format!("`{key}`: a secret's value comes from one place, and is not written here"),
                "{ env = \"NAME\" }, { file = \"/PATH\" } or { credential = \"NAME\" }",
            );
            walk.mistake(span, key, wrong);
            None
        }
    }
}

fn field(value: &DeValue<'_>) -> Result<HeaderName, Wrong> {
    let said = values::text(value)?;
    let header = HeaderName::try_from(said)
        .map_err(|_no_name| Wrong::new("not a field's name", "such as \"authorization\""))?;
    if may_be_secret(&header) {
        Ok(header)
    } else {
        Err(Wrong::new(
            format!("`{header}` is about the connection, its host or a length"),
            "another field",
        ))
    }
}

fn prefix(value: &DeValue<'_>) -> Result<String, Wrong> {
    let said = values::text(value)?;
    if said.len() <= WORD && HeaderValue::from_str(said).is_ok() {
        Ok(said.to_owned())
    } else {
        Err(Wrong::new(
            "not the beginning of a field",
            "at most 256 bytes, such as \"Bearer \"",
        ))
    }
}

fn word(value: &DeValue<'_>) -> Result<String, Wrong> {
    let said = values::text(value)?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if (1..=WORD).contains(&said.len()) && said.bytes().all(plain) {
        Ok(said.to_owned())
    } else {
        Err(Wrong::new("not a name", "1 to 256 of letters, digits, _ . -"))
    }
}

/// The name of a file in a folder, and not a way out of it.
fn credential(value: &DeValue<'_>) -> Result<String, Wrong> {
    word(value).and_then(|name| {
        if name.bytes().all(|byte| byte == b'.') {
            Err(Wrong::new("not a name", "that of a credential"))
        } else {
            Ok(name)
        }
    })
}

/// Hosts of a secret are named: with `*` it would go to whoever a rule allows.
fn pattern(value: &DeValue<'_>) -> Result<HostPattern, Wrong> {
    match HostPattern::parse(values::text(value)?) {
        Some(HostPattern::AnyName) | None => Err(Wrong::new(
            "not a host of a secret",
            "a name, *.name, or an address without port",
        )),
        Some(pattern) => Ok(pattern),
    }
}

/// What is wrong with the secret that a rule names.
pub(super) fn rule_faults(rule: &RuleFields, secrets: &BTreeMap<Name, SecretTerms>) -> Vec<RuleFault> {
    let Some(named) = &rule.secret else {
        return Vec::new();
    };
    let fault = |what: String, allowed| {
        vec![RuleFault {
            field: "secret",
            what,
            allowed,
        }]
    };
    let found = secrets.iter().find(|(name, _)| name.as_str() == named);
    let Some((_, terms)) = found else {
        return fault(
            format!("there is no secret {named:?}"),
            "one of [egress.secret.NAME]",
        );
    };
    if terms.header.is_none() {
        return fault(
            format!("secret {named:?} is for upstream proxies: it has no header"),
            "one with header and hosts",
        );
    }
    let patterns = rule.host.iter().filter_map(|text| HostPattern::parse(text));
    let outside: Vec<String> = patterns
        .filter(|pattern| !terms.covers(pattern))
        .map(|pattern| pattern.to_string())
        .collect();
    if outside.is_empty() {
        return Vec::new();
    }
    fault(
        format!("secret {named:?} does not go to {}", outside.join(", ")),
        "hosts among those of the secret",
    )
}

pub(super) fn upstreams(
    walk: &mut Walk,
    table: &mut Section<'_>,
    secrets: &BTreeMap<Name, SecretTerms>,
) -> BTreeMap<Name, UpstreamTerms> {
    let mut upstreams = BTreeMap::new();
    for (name, mut upstream) in walk.named(table, "upstream") {
        let url = walk.get(&mut upstream, "url", url);
        let secret = walk.get(&mut upstream, "secret", values::name);
        let resolves = or(walk.get(&mut upstream, "resolve", values::word(RESOLVE)), false);
        if let Some(secret) = &secret {
            let key = upstream.key("secret");
            exists(walk, key.clone(), "egress.secret", secret, secrets);
            if secrets
                .get(&secret.value)
                .is_some_and(|terms| terms.header.is_some())
            {
                let wrong = Wrong::new(
                    format!("`{key}`: this secret is a field of requests"),
                    "one without header and hosts, whose value is user:password",
                );
                walk.mistake(secret.span.clone(), key, wrong);
            }
        }
        let missing = url.is_none() && !walk.mistakes.iter().any(|told| told.key == upstream.key("url"));
        if missing {
            let key = upstream.key("url");
            let wrong = Wrong::new(format!("`{key}`: where is it?"), URL);
            walk.mistake(name.span.clone(), key, wrong);
        }
        let name = table_name(walk, &name, &upstream);
        walk.done(upstream);
        if let (Some(name), Some(url)) = (name, url) {
            let (kind, at) = url.value;
            let terms = UpstreamTerms {
                kind,
                host: at.host().clone(),
                port: at.port(),
                secret: secret.map(|found| found.value),
                resolves,
            };
            upstreams.insert(name, terms);
        }
    }
    upstreams
}

const URL: &str = "\"http://HOST:PORT\" or \"socks5://HOST:PORT\"; credentials come from a secret";

/// Where an upstream proxy is. Nothing of it is repeated: people write passwords here.
fn url(value: &DeValue<'_>) -> Result<(ProxyKind, Authority), Wrong> {
    let said = values::text(value)?;
    let wrong = || Wrong::new("not where a proxy is", URL);
    let (scheme, rest) = said.split_once("://").ok_or_else(wrong)?;
    let kind = match scheme {
        "http" => ProxyKind::Http,
        "socks5" => ProxyKind::Socks5,
        _ => return Err(wrong()),
    };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let at = Authority::parse(rest, None).map_err(|_no_authority| wrong())?;
    Ok((kind, at))
}

/// The upstream proxy that a pool or the node names; empty: none.
pub(super) fn named_upstream(
    walk: &mut Walk,
    table: &mut Section<'_>,
    key: &'static str,
    upstreams: &BTreeMap<Name, UpstreamTerms>,
) -> Option<Name> {
    let or_none = |value: &DeValue<'_>| match values::text(value)? {
        "" => Ok(None),
        said => values::parse_name(said).map(Some),
    };
    let found = walk.get(table, key, or_none)?;
    let name = Found {
        value: found.value?,
        span: found.span,
    };
    exists(walk, table.key(key), "egress.upstream", &name, upstreams);
    Some(name.value)
}

/// The operator's own destinations: opaque tunnels alone, so that a rule has nothing but hosts and ports.
pub(super) fn infra(walk: &mut Walk, table: &mut Section<'_>) -> Option<Arc<Layer>> {
    let mut infra = walk.section(table, "infra");
    let rules = bare_rules(walk, &mut infra);
    walk.done(infra);
    let layer = checked(walk, Mode::Enforce, &rules, 0..0)?;
    (!layer.rules().is_empty()).then(|| Arc::new(layer))
}

pub(super) fn sources(walk: &mut Walk, table: &mut Section<'_>) -> Sources {
    let mut source = walk.section(table, "source");
    let node = addresses(walk, &mut source, "node");
    let mut tenants = BTreeMap::new();
    for mut entry in walk.sections(&mut source, "tenants", LIST) {
        let name = walk.get(&mut entry, "name", values::name);
        let own = addresses(walk, &mut entry, "addresses");
        match name {
            Some(name) if own != Source::default() => drop(tenants.insert(name.value.to_string(), own)),
            Some(_) | None => {
                let wrong = Wrong::new(
                    "a tenant's dials leave from `addresses`",
                    "such as { name = \"acme\", addresses = [\"192.0.2.7\"] }",
                );
                walk.mistake(entry.span(), entry.key("addresses"), wrong);
            }
        }
        walk.done(entry);
    }
    walk.done(source);
    Sources { node, tenants }
}

fn addresses(walk: &mut Walk, table: &mut Section<'_>, key: &'static str) -> Source {
    let mut source = Source::default();
    let local = |value: &DeValue<'_>| {
        let said = values::text(value)?;
        let wrong = || {
            Wrong::new(
                format!("{said:?} is not an address of this host"),
                "one IPv4, one IPv6",
            )
        };
        let address: IpAddr = said.parse().map_err(|_no_address| wrong())?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(wrong());
        }
        Ok(address)
    };
    for found in walk.list(table, key, 2, local).unwrap_or_default() {
        let before = match found.value {
            IpAddr::V4(v4) => source.v4.replace(v4).is_some(),
            IpAddr::V6(v6) => source.v6.replace(v6).is_some(),
        };
        if before {
            let key = table.key(key);
            let wrong = Wrong::new(format!("`{key}`: two addresses of a family"), "one of each");
            walk.mistake(found.span, key, wrong);
        }
    }
    source
}
