//! What a new configuration changes, what of that needs a restart, and what is in force until then. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::types::{Config, Listen, Log, Tcp};
use crate::words::Name;

/// Dotted keys that differ, each in one of the two lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diff {
    /// Take effect when the new configuration is swapped in.
    pub changed: Vec<String>,
    /// Stay as they are until the daemon is started again.
    pub needs_restart: Vec<String>,
}

impl Diff {
    /// Whether the configurations are the same.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.needs_restart.is_empty()
    }
}

macro_rules! differing {
    ($list:expr, $old:expr, $new:expr, $($($part:ident).+),+ $(,)?) => {
        $(if $old.$($part).+ != $new.$($part).+ {
            $list.push(stringify!($($part).+).replace(' ', ""));
        })+
    };
}

/// Compares what is in force with what was read.
#[must_use]
pub fn diff(old: &Config, new: &Config) -> Diff {
    let mut diff = Diff::default();
    differing!(
        diff.needs_restart,
        old,
        new,
        node.name,
        node.state_dir,
        node.run_dir,
        node.memory,
        node.max_sandboxes,
        node.clones_in_flight,
        listen.unix,
        listen.metrics,
        engine.kind,
        engine.accel,
        engine.qemu,
        engine.vm_user,
        engine.blanks,
        engine.stub.agent,
        engine.stub.silkd,
        engine.stub.faults,
        net.namespace,
        net.slots,
        journal.sync,
    );
    tcp(old.listen.tcp.as_ref(), new.listen.tcp.as_ref(), &mut diff);
    differing!(diff.changed, old, new, log.filter);
    // A line's form is chosen once, so that no log holds two.
    differing!(diff.needs_restart, old, new, log.format);
    differing!(diff.changed, old, new, access.operator_group);
    if old.access.tokens != new.access.tokens {
        diff.changed.push("access.token".to_owned());
    }
    maps(&mut diff.changed, "tenant", &old.tenants, &new.tenants);
    maps(&mut diff.changed, "template", &old.templates, &new.templates);
    maps(&mut diff.changed, "size", &old.sizes, &new.sizes);
    maps(&mut diff.changed, "pool", &old.pools, &new.pools);
    maps(
        &mut diff.changed,
        "egress.policy",
        &old.egress.policies,
        &new.egress.policies,
    );
    maps(
        &mut diff.changed,
        "egress.secret",
        &old.egress.secrets,
        &new.egress.secrets,
    );
    maps(
        &mut diff.changed,
        "egress.upstream",
        &old.egress.upstreams,
        &new.egress.upstreams,
    );
    differing!(
        diff.changed,
        old,
        new,
        egress.servers,
        egress.vetting,
        egress.audit.required,
        egress.audit.retention,
        egress.default_upstream,
        egress.infra,
        egress.sources,
        egress.tls,
    );
    diff
}

/// Files of a listener that stays are read anew; a listener that comes, goes or moves needs a restart.
fn tcp(old: Option<&Tcp>, new: Option<&Tcp>, diff: &mut Diff) {
    match (old, new) {
        (Some(Tcp::Tls(old_addr, old_tls)), Some(Tcp::Tls(new_addr, new_tls))) => {
            if old_addr != new_addr {
                diff.needs_restart.push("listen.tcp".to_owned());
            }
            if old_tls != new_tls {
                diff.changed.push("listen.tls".to_owned());
            }
        }
        (Some(_) | None, Some(_) | None) if old != new => {
            diff.needs_restart.push("listen.tcp".to_owned());
        }
        (Some(_) | None, Some(_) | None) => {}
    }
}

/// What is in force once `new` was read: what needs a restart stays as it was, so that the next reload tells it again.
#[must_use]
pub fn in_force(old: &Config, new: &Config) -> Config {
    let tcp = match (&old.listen.tcp, &new.listen.tcp) {
        (Some(Tcp::Tls(addr, _)), Some(Tcp::Tls(_, files))) => Some(Tcp::Tls(*addr, files.clone())),
        (Some(_) | None, Some(_) | None) => old.listen.tcp.clone(),
    };
    Config {
        node: old.node.clone(),
        listen: Listen {
            tcp,
            ..old.listen.clone()
        },
        engine: old.engine.clone(),
        net: old.net.clone(),
        journal: old.journal.clone(),
        log: Log {
            filter: new.log.filter.clone(),
            format: old.log.format,
        },
        ..new.clone()
    }
}

fn maps<T: PartialEq>(list: &mut Vec<String>, table: &str, old: &BTreeMap<Name, T>, new: &BTreeMap<Name, T>) {
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    list.extend(
        names
            .into_iter()
            .filter(|name| old.get(*name) != new.get(*name))
            .map(|name| format!("{table}.{name}")),
    );
}
