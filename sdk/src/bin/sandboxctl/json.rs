//! Messages as JSON: the field names of the API, enums in lower case, times in RFC 3339. What is absent is null.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use sandbox_sdk::{How, Sandbox, v1};
use serde_json::{Map, Value, json};

use crate::text::{last_word, lossy, stamp, time, word};

pub(crate) fn claimed(sandbox: &Sandbox) -> Value {
    let mut object = json!({
        "sandbox": sandbox.id(),
        "claim": sandbox.claim_id(),
        "token": sandbox.token().map(sandbox_sdk::Token::expose),
        "tier": word(sandbox.tier().as_str_name()),
        "pool": sandbox.pool(),
        "expires_at": sandbox.expires_at().map(time),
        "engine": word(sandbox.engine().as_str_name()),
        "accel": word(sandbox.accel().as_str_name()),
    });
    if let (Some(object), Some(traced)) = (object.as_object_mut(), sandbox.work()) {
        object.insert("work".to_owned(), work(traced));
        object.insert("steps_us".to_owned(), json!(traced.steps_us));
    }
    object
}

pub(crate) fn sandbox(row: &v1::Sandbox) -> Value {
    json!({
        "sandbox": row.sandbox,
        "claim": row.claim,
        "pool": row.pool,
        "template": row.template,
        "lane": word(row.lane().as_str_name()),
        "size": row.size,
        "state": word(row.state().as_str_name()),
        "why": row.why,
        "tier": word(row.tier().as_str_name()),
        "owner": row.owner,
        "labels": row.labels,
        "created_at": stamp(row.created_at.as_ref()),
        "claimed_at": stamp(row.claimed_at.as_ref()),
        "expires_at": stamp(row.expires_at.as_ref()),
        "engine": word(row.engine().as_str_name()),
        "accel": word(row.accel().as_str_name()),
        "proto": row.proto,
        "agent_version": row.agent_version,
        "conditions": row.conditions.iter().map(|condition| json!({
            "name": condition.name,
            "count": condition.count,
            "last_at": stamp(condition.last_at.as_ref()),
        })).collect::<Vec<_>>(),
        "slot": row.slot,
        "pid": row.pid,
    })
}

fn key(key: &v1::PoolKey) -> Value {
    json!({ "template": key.template, "lane": word(key.lane().as_str_name()), "size": key.size })
}

pub(crate) fn pool(pool: &v1::Pool) -> Value {
    let spec = pool.spec.clone().unwrap_or_default();
    json!({
        "spec": {
            "name": spec.name,
            "key": spec.key.as_ref().map(key),
            "warm": spec.warm,
            "warm_max": spec.warm_max,
            "lease_secs": spec.lease_secs,
            "lease_max_secs": spec.lease_max_secs,
            "egress": spec.egress,
            "require_claim_policy": spec.require_claim_policy,
        },
        "source": word(pool.source().as_str_name()),
        "target": pool.target,
        "warm": pool.warm,
        "making": pool.making,
        "claimed": pool.claimed,
        "waiting": pool.waiting,
        "arrivals_per_min": pool.arrivals_per_min,
        "lead_ms": pool.lead_ms,
        "parked": pool.parked.as_ref().map(|parked| json!({
            "reason": parked.reason,
            "since": stamp(parked.since.as_ref()),
            "retry_at": stamp(parked.retry_at.as_ref()),
            "message": parked.message,
        })),
    })
}

pub(crate) fn template(template: &v1::Template) -> Value {
    json!({
        "name": template.name,
        "image": template.image,
        "image_digest": template.image_digest,
        "warmup": template.warmup.iter().map(|arg| lossy(arg)).collect::<Vec<_>>(),
        "variants": template.variants.iter().map(variant).collect::<Vec<_>>(),
    })
}

fn variant(variant: &v1::Variant) -> Value {
    json!({
        "lane": word(variant.lane().as_str_name()),
        "size": variant.size,
        "digest": variant.digest,
        "qemu_version": variant.qemu_version,
        "machine": variant.machine,
        "cpu_model": variant.cpu_model,
        "accel": word(variant.accel().as_str_name()),
        "ram_mib": variant.ram_mib,
        "state_bytes": variant.state_bytes,
        "proto_min": variant.proto_min,
        "proto_max": variant.proto_max,
        "created_at": stamp(variant.created_at.as_ref()),
        "pools": variant.pools,
        "stale": variant.stale,
    })
}

pub(crate) fn node(info: &v1::NodeInfoReply) -> Value {
    json!({
        "version": info.version,
        "name": info.name,
        "engine": word(info.engine().as_str_name()),
        "accel": word(info.accel().as_str_name()),
        "accel_why": info.accel_why,
        "memory_budget_mib": info.memory_budget_mib,
        "memory_reserved_mib": info.memory_reserved_mib,
        "sandboxes": info.sandboxes,
        "started_at": stamp(info.started_at.as_ref()),
        "ready": info.ready,
    })
}

pub(crate) fn doctor(reply: &v1::NodeDoctorReply) -> Value {
    json!({ "checks": reply.checks.iter().map(|check| json!({
        "name": check.name,
        "verdict": word(check.verdict().as_str_name()),
        "found": check.found,
        "remedy": check.remedy,
    })).collect::<Vec<_>>() })
}

/// The counters; the steps stand beside it as `steps_us`.
pub(crate) fn work(work: &v1::Work) -> Value {
    json!({
        "journal_records": work.journal_records,
        "journal_bytes": work.journal_bytes,
        "writes": work.writes,
        "syncs": work.syncs,
        "netlink_messages": work.netlink_messages,
        "binds": work.binds,
        "qmp_commands": work.qmp_commands,
        "guest_round_trips": work.guest_round_trips,
        "tasks_spawned": work.tasks_spawned,
    })
}

pub(crate) fn agent_work(work: &v1::AgentWork) -> Value {
    json!({
        "clones": work.clones,
        "leaves_taken": work.leaves_taken,
        "tasks_spawned": work.tasks_spawned,
        "rings_built": work.rings_built,
        "reads": work.reads,
        "writes": work.writes,
        "start_us": work.start_us,
        "run_us": work.run_us,
    })
}

pub(crate) fn process(row: &v1::Process) -> Value {
    let exit = row.exit.as_ref().map(|exit| {
        let (code, signal) = match exit.how {
            Some(v1::exit::How::Code(code)) => (Some(code), None),
            Some(v1::exit::How::Signal(signal)) => (None, Some(signal)),
            None => (None, None),
        };
        json!({ "code": code, "signal": signal, "timed_out": exit.timed_out })
    });
    json!({
        "process": row.id,
        "pid": row.pid,
        "name": (!row.name.is_empty()).then(|| lossy(&row.name)),
        "kind": last_word(row.kind().as_str_name()),
        "argv": row.argv.iter().map(|arg| lossy(arg)).collect::<Vec<_>>(),
        "argv_cut": row.argv_cut,
        "uid": row.uid,
        "state": last_word(row.state().as_str_name()),
        "exit": exit,
        "started_at": stamp(row.started_at.as_ref()),
        "age_ms": row.age_ms,
        "log_start": row.log_start,
        "log_end": row.log_end,
        "readers": row.readers,
        "tty": row.tty,
    })
}

pub(crate) fn session(row: &v1::Session) -> Value {
    json!({
        "session": row.session,
        "process": row.process,
        "pid": row.pid,
        "busy": row.busy,
        "commands": row.commands,
        "opened_at": stamp(row.opened_at.as_ref()),
        "idle_ms": row.idle_ms,
        "idle_secs": row.idle_secs,
    })
}

/// How something ended, under the keys of every verb that says so.
pub(crate) fn exit(object: &mut Map<String, Value>, how: How, timed_out: bool) {
    let (code, signal) = match how {
        How::Code(code) => (Some(code), None),
        How::Signal(signal) => (None, Some(signal)),
    };
    object.insert("code".to_owned(), json!(code));
    object.insert("signal".to_owned(), json!(signal));
    object.insert("timed_out".to_owned(), json!(timed_out));
}

/// Output under its name if it is text, else under its name with `_base64`.
pub(crate) fn output(object: &mut Map<String, Value>, name: &str, bytes: Vec<u8>) {
    match String::from_utf8(bytes) {
        Ok(text) => object.insert(name.to_owned(), text.into()),
        Err(error) => object.insert(format!("{name}_base64"), STANDARD.encode(error.as_bytes()).into()),
    };
}
