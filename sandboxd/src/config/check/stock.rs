//! `[template.NAME]`, `[size.NAME]`, `[pool.NAME]`.

use std::{collections::BTreeMap, time::Duration};

use sandbox_protocol::{limits, reason::Reason};

use super::{LIST, egress, exists, onwards, or, table_name};
use crate::{
    config::{
        pool::{PoolFault, PoolFields, WARM_LIMIT, WARM_MAX_LIMIT},
        types::{Config, Egress, ImageName, Net, PoolConfig, Template},
        values,
        walk::{Found, Section, Walk, Wrong},
    },
    words::{EngineKind, Lane, MemBytes, Name, PoolKey, Size, Vcpus},
};

const LEASE_LIMIT: Duration = Duration::from_secs(limits::LEASE_MAX_SECS as u64);
/// Floor of a pool that names none.
const WARM: u32 = 4;
const WARMUP_TIMEOUT: Duration = Duration::from_secs(30);

pub(in crate::config) fn template_default() -> Template {
    Template {
        image: ImageName::Named("busybox".to_owned()),
        warmup: Vec::new(),
        warmup_timeout: WARMUP_TIMEOUT,
    }
}

pub(in crate::config) fn default_name() -> Name {
    "default".parse().expect("it is a name")
}

pub(super) fn templates(walk: &mut Walk, root: &mut Section<'_>) -> BTreeMap<Name, Template> {
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

pub(in crate::config) fn sizes_default() -> BTreeMap<Name, Size> {
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

pub(super) fn sizes(walk: &mut Walk, root: &mut Section<'_>) -> BTreeMap<Name, Size> {
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

/// Pools, each with the place of its `warm`.
pub(super) type Pools = BTreeMap<Name, Found<PoolConfig>>;

const LANES: &[(&str, Lane)] = &[("none", Lane::None), ("guarded", Lane::Guarded)];

pub(super) fn pools(
    walk: &mut Walk,
    root: &mut Section<'_>,
    templates: &BTreeMap<Name, Template>,
    sizes: &BTreeMap<Name, Size>,
    doors: &Egress,
    net: &Net,
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
            lane: lane(walk, &mut table, net),
            size: or(size, "small".parse().expect("it is a name")),
        };
        let policy = egress::named(walk, &mut table, &doors.policies);
        let upstream = onwards::named_upstream(walk, &mut table, "upstream", &doors.upstreams);
        let (pool, span) = numbers(walk, &mut table, key, (policy, upstream));
        if let Some(name) = table_name(walk, &name, &table)
            && let Some(value) = pool
        {
            pools.insert(name, Found { value, span });
        }
        walk.done(table);
    }
    pools
}

fn lane(walk: &mut Walk, table: &mut Section<'_>, net: &Net) -> Lane {
    let Some(lane) = walk.get(table, "lane", values::word(LANES)) else {
        return Lane::None;
    };
    if lane.value == Lane::Guarded && net.slots == 0 {
        let wrong = Wrong::new(
            format!(
                "`{}`: `net.slots` is 0, so there is no lane `guarded`",
                table.key("lane")
            ),
            "none, or net.slots of at least 1",
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
    (egress, upstream): (Option<Name>, Option<Name>),
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
        egress,
        upstream,
        require_claim_policy: or(walk.get(table, "require_claim_policy", values::flag), false),
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
pub(super) fn stock_fits(walk: &mut Walk, config: &Config, pools: &Pools) {
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
