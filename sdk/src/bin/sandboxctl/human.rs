//! Messages as tables and lines for people.

use std::collections::HashMap;

use sandbox_sdk::v1;

use crate::{
    print::{fields, table},
    text::{last_word, lossy, span, stamp, word},
};

fn labels(labels: &HashMap<String, String>) -> String {
    let mut pairs: Vec<String> = labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    pairs.sort();
    pairs.join(",")
}

pub(crate) fn row(row: &v1::Sandbox) -> [String; 7] {
    let state = word(row.state().as_str_name()).unwrap_or_default();
    [
        row.sandbox.clone(),
        // The kind of end alone: what follows it may be a page of console, which `inspect` shows.
        match row
            .why
            .split_once(": ")
            .map_or(row.why.as_str(), |(kind, _)| kind)
        {
            "" => state,
            kind => format!("{state} ({kind})"),
        },
        row.pool.clone(),
        word(row.tier().as_str_name()).unwrap_or_default(),
        row.owner.clone(),
        stamp(row.expires_at.as_ref()).unwrap_or_default(),
        labels(&row.labels),
    ]
}

pub(crate) const ROW: [&str; 7] = ["SANDBOX", "STATE", "POOL", "TIER", "OWNER", "EXPIRES", "LABELS"];

pub(crate) fn sandboxes(rows: &[v1::Sandbox]) -> String {
    table(ROW, rows.iter().map(row).collect())
}

pub(crate) fn sandbox(row: &v1::Sandbox) -> String {
    let mut rows = vec![
        ("sandbox", row.sandbox.clone()),
        ("claim", row.claim.clone()),
        ("state", word(row.state().as_str_name()).unwrap_or_default()),
        ("why", row.why.clone()),
        ("pool", row.pool.clone()),
        ("template", row.template.clone()),
        ("lane", word(row.lane().as_str_name()).unwrap_or_default()),
        ("size", row.size.clone()),
        ("tier", word(row.tier().as_str_name()).unwrap_or_default()),
        ("owner", row.owner.clone()),
        ("labels", labels(&row.labels)),
        ("created", stamp(row.created_at.as_ref()).unwrap_or_default()),
        ("claimed", stamp(row.claimed_at.as_ref()).unwrap_or_default()),
        ("expires", stamp(row.expires_at.as_ref()).unwrap_or_default()),
        ("engine", word(row.engine().as_str_name()).unwrap_or_default()),
        ("accel", word(row.accel().as_str_name()).unwrap_or_default()),
        ("agent", row.agent_version.clone()),
        ("proto", row.proto.to_string()),
        ("slot", row.slot.map(|slot| slot.to_string()).unwrap_or_default()),
        ("pid", row.pid.map(|pid| pid.to_string()).unwrap_or_default()),
    ];
    for condition in &row.conditions {
        rows.push(("condition", format!("{} x{}", condition.name, condition.count)));
    }
    fields(&rows)
}

pub(crate) fn pools(pools: &[v1::Pool]) -> String {
    let head = [
        "POOL", "TEMPLATE", "LANE", "SIZE", "WARM", "TARGET", "MAKING", "CLAIMED", "WAITING", "STATE",
    ];
    let rows = pools.iter().map(|pool| {
        let spec = pool.spec.clone().unwrap_or_default();
        let key = spec.key.clone().unwrap_or_default();
        [
            spec.name,
            key.template.clone(),
            word(key.lane().as_str_name()).unwrap_or_else(|| "none".to_owned()),
            key.size,
            pool.warm.to_string(),
            pool.target.to_string(),
            pool.making.to_string(),
            pool.claimed.to_string(),
            pool.waiting.to_string(),
            pool.parked.as_ref().map_or_else(
                || "ok".to_owned(),
                |parked| format!("parked: {} {}", parked.reason, parked.message),
            ),
        ]
    });
    table(head, rows.collect())
}

pub(crate) fn pool(pool: &v1::Pool) -> String {
    let spec = pool.spec.clone().unwrap_or_default();
    let key = spec.key.clone().unwrap_or_default();
    let max = spec.warm_max.map(|max| format!(" to {max}")).unwrap_or_default();
    fields(&[
        ("pool", spec.name),
        ("template", key.template.clone()),
        ("lane", word(key.lane().as_str_name()).unwrap_or_default()),
        ("size", key.size),
        ("keeps", format!("{}{max}", spec.warm)),
        ("lease", spec.lease_secs.map(span).unwrap_or_default()),
        ("lease max", spec.lease_max_secs.map(span).unwrap_or_default()),
        ("warm", pool.warm.to_string()),
        ("target", pool.target.to_string()),
        ("claimed", pool.claimed.to_string()),
    ])
}

pub(crate) fn templates(templates: &[v1::Template]) -> String {
    let head = [
        "TEMPLATE", "IMAGE", "LANE", "SIZE", "ACCEL", "RAM", "CREATED", "POOLS", "STATE",
    ];
    let rows = templates.iter().flat_map(|template| {
        template.variants.iter().map(|variant| {
            [
                template.name.clone(),
                template.image.clone(),
                word(variant.lane().as_str_name()).unwrap_or_default(),
                variant.size.clone(),
                word(variant.accel().as_str_name()).unwrap_or_default(),
                format!("{} MiB", variant.ram_mib),
                stamp(variant.created_at.as_ref()).unwrap_or_default(),
                variant.pools.join(","),
                if variant.stale.is_empty() {
                    "ok".to_owned()
                } else {
                    format!("stale: {}", variant.stale)
                },
            ]
        })
    });
    table(head, rows.collect())
}

pub(crate) fn template(template: &v1::Template) -> String {
    let warmup: Vec<String> = template.warmup.iter().map(|arg| lossy(arg)).collect();
    let head = fields(&[
        ("template", template.name.clone()),
        ("image", template.image.clone()),
        ("digest", template.image_digest.clone()),
        ("warm-up", warmup.join(" ")),
    ]);
    format!("{head}\n\n{}", templates(std::slice::from_ref(template)))
}

pub(crate) fn node(info: &v1::NodeInfoReply) -> String {
    let mut states: Vec<String> = info
        .sandboxes
        .iter()
        .map(|(state, count)| format!("{count} {state}"))
        .collect();
    states.sort();
    let accel = word(info.accel().as_str_name()).unwrap_or_default();
    fields(&[
        ("name", info.name.clone()),
        ("version", info.version.clone()),
        ("engine", word(info.engine().as_str_name()).unwrap_or_default()),
        (
            "accel",
            if info.accel_why.is_empty() {
                accel
            } else {
                format!("{accel} ({})", info.accel_why)
            },
        ),
        (
            "memory",
            format!(
                "{} of {} MiB reserved",
                info.memory_reserved_mib, info.memory_budget_mib
            ),
        ),
        ("sandboxes", states.join(", ")),
        ("started", stamp(info.started_at.as_ref()).unwrap_or_default()),
        ("ready", if info.ready { "yes" } else { "no" }.to_owned()),
    ])
}

pub(crate) fn doctor(reply: &v1::NodeDoctorReply) -> String {
    let rows = reply.checks.iter().map(|check| {
        [
            word(check.verdict().as_str_name()).unwrap_or_default(),
            check.name.clone(),
            check.found.clone(),
            check.remedy.clone(),
        ]
    });
    table(["", "CHECK", "FOUND", "REMEDY"], rows.collect())
}

pub(crate) fn processes(rows: &[v1::Process]) -> String {
    let head = ["ID", "NAME", "STATE", "KIND", "PID", "AGE", "COMMAND"];
    let rows = rows.iter().map(|row| {
        let argv: Vec<String> = row.argv.iter().map(|arg| lossy(arg)).collect();
        let state = last_word(row.state().as_str_name()).unwrap_or_default();
        let how = row.exit.as_ref().and_then(|exit| exit.how.as_ref());
        [
            row.id.to_string(),
            lossy(&row.name),
            match how {
                Some(v1::exit::How::Code(code)) => format!("{state} ({code})"),
                Some(v1::exit::How::Signal(signal)) => format!("{state} (signal {signal})"),
                None => state,
            },
            last_word(row.kind().as_str_name()).unwrap_or_default(),
            row.pid.to_string(),
            age(row.age_ms),
            argv.join(" ") + if row.argv_cut { ".." } else { "" },
        ]
    });
    table(head, rows.collect())
}

pub(crate) fn sessions(rows: &[v1::Session]) -> String {
    let head = [
        "SESSION",
        "STATE",
        "PROCESS",
        "PID",
        "COMMANDS",
        "IDLE",
        "ENDS AFTER",
    ];
    let rows = rows.iter().map(|row| {
        [
            row.session.clone(),
            if row.busy { "busy" } else { "idle" }.to_owned(),
            row.process.to_string(),
            row.pid.to_string(),
            row.commands.to_string(),
            age(row.idle_ms),
            if row.idle_secs == 0 {
                "never".to_owned()
            } else {
                span(row.idle_secs)
            },
        ]
    });
    table(head, rows.collect())
}

fn age(ms: u64) -> String {
    span(u32::try_from(ms / 1_000).unwrap_or(u32::MAX))
}

/// Counters and steps, one a line.
pub(crate) fn work(work: &v1::Work) -> String {
    let mut rows = vec![
        ("journal_records", work.journal_records.to_string()),
        ("journal_bytes", work.journal_bytes.to_string()),
        ("writes", work.writes.to_string()),
        ("syncs", work.syncs.to_string()),
        ("netlink_messages", work.netlink_messages.to_string()),
        ("binds", work.binds.to_string()),
        ("qmp_commands", work.qmp_commands.to_string()),
        ("guest_round_trips", work.guest_round_trips.to_string()),
        ("tasks_spawned", work.tasks_spawned.to_string()),
    ];
    let mut steps: Vec<_> = work.steps_us.iter().collect();
    steps.sort();
    rows.extend(steps.iter().map(|(step, us)| (step.as_str(), format!("{us} us"))));
    fields(&rows)
}

pub(crate) fn agent_work(work: &v1::AgentWork) -> String {
    fields(&[
        ("agent: clones", work.clones.to_string()),
        ("agent: leaves_taken", work.leaves_taken.to_string()),
        ("agent: tasks_spawned", work.tasks_spawned.to_string()),
        ("agent: rings_built", work.rings_built.to_string()),
        ("agent: reads", work.reads.to_string()),
        ("agent: writes", work.writes.to_string()),
        ("agent: start", format!("{} us", work.start_us)),
        ("agent: run", format!("{} us", work.run_us)),
    ])
}
