//! Table by table into newtypes, then what must fit together. A mistake never stops the reading: whatever is wrong
//! takes its default, and the mistakes decide at the end.

mod access;
mod egress;
mod node;
mod onwards;
mod stock;

use std::collections::{BTreeMap, BTreeSet};

use toml::de::DeTable;

pub(super) use self::{
    node::{engine_default, log_default, net_default, node_default},
    stock::{default_name, sizes_default, template_default},
};
use super::{
    Host,
    mistake::Mistake,
    types::Config,
    values,
    walk::{Found, Section, Walk, Wrong},
};
use crate::words::Name;

/// Tokens, tenants' pools and warm-up arguments in one list at most; a bound on what a file can make us do.
const LIST: usize = 1_024;

pub(super) fn check(text: &str, host: &Host) -> Result<Config, Vec<Mistake>> {
    let (document, faults) = DeTable::parse_recoverable(text);
    let mut walk = Walk::default();
    let config = read(&mut walk, document.get_ref(), host);
    let mut mistakes = syntax(text, &faults);
    // What the parser made of a broken line is no use; the mistakes of all other lines are.
    let lines = Lines::of(text);
    let broken: BTreeSet<_> = mistakes.iter().map(|fault| lines.at(fault.span.start)).collect();
    let whole = |mistake: &Mistake| !broken.contains(&lines.at(mistake.span.start));
    mistakes.extend(walk.mistakes.into_iter().filter(whole));
    if mistakes.is_empty() {
        Ok(config)
    } else {
        Err(mistakes)
    }
}

/// Where each line but the first begins.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at + 1).collect())
    }

    fn at(&self, at: usize) -> usize {
        self.0.partition_point(|start| *start <= at)
    }
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
    let node = node::node(walk, &mut root, host);
    let engine = node::engine(walk, &mut root);
    let listen = node::listen(walk, &mut root, &node);
    let net = node::net(walk, &mut root);
    let journal = node::journal(walk, &mut root);
    let log = node::log(walk, &mut root);
    let doors = egress::egress(walk, &mut root);
    let tenants = access::tenants(walk, &mut root, &doors.policies);
    let access = access::access(walk, &mut root, &tenants);
    let templates = stock::templates(walk, &mut root);
    let sizes = stock::sizes(walk, &mut root);
    let pools = stock::pools(walk, &mut root, &templates, &sizes, &doors, &net);
    let config = Config {
        node,
        listen,
        engine,
        net,
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
        egress: doors,
    };
    stock::stock_fits(walk, &config, &pools);
    walk.done(root);
    config
}

fn or<T>(found: Option<Found<T>>, default: T) -> T {
    found.map_or(default, |found| found.value)
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
