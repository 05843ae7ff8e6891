//! `egress explain|show|set|tail`, and policies in files.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use sandbox_sdk::v1::{
    EgressDecision, EgressEffect, EgressExplainReply, EgressExplainRequest, EgressGetReply, EgressMode,
    EgressPolicy, EgressRule, EgressVerdict, egress_watch_reply,
};
use serde_json::{Map, Value, json};

use crate::{
    Reach,
    args::{InspectArgs, Limit},
    fault::Fault,
    print::{self, Out, fields},
    text::{harmless, stamp, word},
    within,
};

#[derive(Debug, Subcommand)]
pub(crate) enum EgressVerb {
    /// Tell what a door would answer, and why. Nothing is dialled.
    #[command(
        after_help = "Examples:\n  sandboxctl egress explain --sandbox sb_... example.org:443\n  \
                      sandboxctl egress explain --pool web --resolve http://example.org/path"
    )]
    Explain(EgressExplainArgs),
    /// Show the layers in force for a sandbox.
    Show(InspectArgs),
    /// Set what a claim narrows anew; tunnels that it forbids are cut.
    Set(EgressSetArgs),
    /// Follow decisions as they happen.
    Tail(EgressTailArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct EgressExplainArgs {
    /// Of which sandbox.
    #[arg(long, value_name = "SANDBOX", conflicts_with_all = ["pool", "tenant"])]
    sandbox: Option<String>,
    /// Of claims from which pool.
    #[arg(long, value_name = "P", required_unless_present = "sandbox")]
    pool: Option<String>,
    /// Of which tenant's claims [default: the caller's own].
    #[arg(long, value_name = "T")]
    tenant: Option<String>,
    /// JSON file with a claim's layer.
    #[arg(long, value_name = "FILE")]
    egress: Option<PathBuf>,
    /// Method of a request [default: GET].
    #[arg(long, value_name = "M")]
    method: Option<String>,
    /// Look the name up too, if it is allowed.
    #[arg(long)]
    resolve: bool,
    /// HOST:PORT for a tunnel, `http://HOST/PATH` for a request.
    target: String,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct EgressSetArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// JSON file with the layer; without it the claim narrows nothing.
    #[arg(long, value_name = "FILE")]
    egress: Option<PathBuf>,
    /// Only if the layer is still the one with this digest (of `egress show`).
    #[arg(long, value_name = "DIGEST")]
    if_digest: Option<String>,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct EgressTailArgs {
    /// Of one sandbox [default: all that you may see].
    sandbox: Option<String>,
    /// Begin with decisions that are still kept, from this number on.
    #[arg(long, value_name = "N")]
    from: Option<u64>,
    #[command(flatten)]
    limit: Limit,
}

pub(crate) async fn verb(reach: &Reach, verb: EgressVerb, out: Out) -> Result<(), Fault> {
    match verb {
        EgressVerb::Explain(args) => explain(reach, args, out).await,
        EgressVerb::Show(args) => {
            let limit = args.limit.or_default();
            let client = reach.client(Some(limit)).await?;
            let found = within(Some(limit), async {
                Ok(client.egress().get(args.sandbox).await?)
            })
            .await?;
            out.result(|| shown(&found), || shown_text(&found))
        }
        EgressVerb::Set(args) => set(reach, args, out).await,
        EgressVerb::Tail(args) => tail(reach, args, out).await,
    }
}

async fn explain(reach: &Reach, args: EgressExplainArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let question = EgressExplainRequest {
        sandbox: args.sandbox.unwrap_or_default(),
        pool: args.pool.unwrap_or_default(),
        tenant: args.tenant.unwrap_or_default(),
        layer: args.egress.as_deref().map(read).transpose()?,
        target: args.target,
        method: args.method.unwrap_or_default(),
        resolve: args.resolve,
    };
    let client = reach.client(Some(limit)).await?;
    let found = within(Some(limit), async {
        Ok(client.egress().explain(question).await?)
    })
    .await?;
    out.result(|| explained(&found), || explained_text(&found))
}

async fn set(reach: &Reach, args: EgressSetArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.or_default();
    let layer = args.egress.as_deref().map(read).transpose()?;
    let client = reach.client(Some(limit)).await?;
    let updating = async {
        let egress = client.egress();
        Ok(egress.update(args.sandbox, layer, args.if_digest).await?)
    };
    let updated = within(Some(limit), updating).await?;
    out.result(
        || json!({ "digest": updated.digest }),
        || fields(&[("digest", updated.digest.clone())]),
    )
}

async fn tail(reach: &Reach, args: EgressTailArgs, out: Out) -> Result<(), Fault> {
    use egress_watch_reply::Event;
    let client = reach.client(None).await?;
    within(args.limit.timeout, async {
        let mut decisions = client
            .egress()
            .watch(args.sandbox.unwrap_or_default(), args.from)
            .await?;
        while let Some(decision) = decisions.next().await {
            match decision?.event {
                Some(Event::Decision(decision)) => {
                    out.result(|| decided(&decision), || decided_text(&decision))?
                }
                Some(Event::Lost(lost)) => {
                    out.result(|| json!({ "lost": lost.count }), String::new)?;
                    if !out.json {
                        print::stderr(&format!("sandboxctl: {} decisions were lost", lost.count));
                    }
                }
                // Of a newer daemon.
                None => {}
            }
        }
        Ok(())
    })
    .await
}

/// A policy of a JSON file, read strictly: a word that is not known may be what keeps a guest in.
pub(crate) fn read(path: &Path) -> Result<EgressPolicy, Fault> {
    let text = std::fs::read_to_string(path).map_err(|error| Fault::io("--egress", error))?;
    let wrong = |what: String| Fault::Usage(format!("--egress {}: {what}", path.display()));
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    policy(value).map_err(wrong)
}

fn policy(value: Value) -> Result<EgressPolicy, String> {
    let mut table = object(value, "a policy")?;
    let mode = match text(&mut table, "mode")?.as_str() {
        "" | "enforce" => EgressMode::Enforce,
        "report" => EgressMode::Report,
        other => return Err(format!("mode {other:?} is not enforce or report")),
    };
    let rules = match table.remove("rules") {
        None => Vec::new(),
        Some(Value::Array(rules)) => rules.into_iter().map(rule).collect::<Result<_, _>>()?,
        Some(_) => return Err("rules is a list".to_owned()),
    };
    nothing_else(&table)?;
    Ok(EgressPolicy {
        mode: mode.into(),
        rules,
    })
}

fn rule(value: Value) -> Result<EgressRule, String> {
    let mut table = object(value, "a rule")?;
    let effect = match text(&mut table, "effect")?.as_str() {
        "" | "allow" => EgressEffect::Allow,
        "deny" => EgressEffect::Deny,
        other => return Err(format!("effect {other:?} is not allow or deny")),
    };
    let rule = EgressRule {
        id: text(&mut table, "id")?,
        effect: effect.into(),
        host: texts(&mut table, "host")?,
        ports: list(&mut table, "ports", |value| {
            value.as_u64().and_then(|port| u32::try_from(port).ok())
        })?,
        methods: texts(&mut table, "methods")?,
        paths: texts(&mut table, "paths")?,
        intercept: match table.remove("intercept") {
            None => false,
            Some(Value::Bool(intercept)) => intercept,
            Some(_) => return Err("intercept is true or false".to_owned()),
        },
        message: text(&mut table, "message")?,
    };
    nothing_else(&table)?;
    Ok(rule)
}

fn object(value: Value, what: &str) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(table) => Ok(table),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err(format!("{what} is an object"))
        }
    }
}

fn text(table: &mut Map<String, Value>, key: &str) -> Result<String, String> {
    match table.remove(key) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("{key} is text")),
    }
}

fn texts(table: &mut Map<String, Value>, key: &str) -> Result<Vec<String>, String> {
    list(table, key, |value| value.as_str().map(str::to_owned))
}

fn list<T>(
    table: &mut Map<String, Value>,
    key: &str,
    each: fn(&Value) -> Option<T>,
) -> Result<Vec<T>, String> {
    let wrong = || format!("{key} is a list of such values");
    match table.remove(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(all)) => all.iter().map(|value| each(value).ok_or_else(wrong)).collect(),
        Some(_) => Err(wrong()),
    }
}

fn nothing_else(table: &Map<String, Value>) -> Result<(), String> {
    table
        .keys()
        .next()
        .map_or(Ok(()), |key| Err(format!("unknown key {key:?}")))
}

fn to_json(policy: &EgressPolicy) -> Value {
    let rule = |rule: &EgressRule| {
        json!({
            "id": rule.id,
            "effect": word(rule.effect().as_str_name().trim_start_matches("EGRESS_EFFECT_")),
            "host": rule.host,
            "ports": rule.ports,
            "methods": rule.methods,
            "paths": rule.paths,
            "message": rule.message,
        })
    };
    json!({
        "mode": word(policy.mode().as_str_name().trim_start_matches("EGRESS_MODE_")),
        "rules": policy.rules.iter().map(rule).collect::<Vec<_>>(),
    })
}

fn side(name: &str) -> String {
    word(name.trim_start_matches("EGRESS_SIDE_")).unwrap_or_default()
}

fn explained(found: &EgressExplainReply) -> Value {
    let verdict = |verdict: &EgressVerdict| {
        json!({
            "side": side(verdict.side().as_str_name()),
            "name": verdict.name,
            "digest": verdict.digest,
            "allowed": verdict.allowed,
            "reason": verdict.reason,
            "rule": verdict.rule,
            "nearest": verdict.nearest,
            "would_deny": verdict.would_deny,
        })
    };
    json!({
        "allowed": found.allowed,
        "reason": found.reason,
        "remedy": found.remedy,
        "authority": found.authority,
        "visible": found.visible,
        "verdicts": found.verdicts.iter().map(verdict).collect::<Vec<_>>(),
        "addresses": found.addresses.iter().map(|address| json!({
            "address": address.address,
            "allowed": address.allowed,
            "reason": address.reason,
            "range": address.range,
        })).collect::<Vec<_>>(),
        "answer": found.answer,
        "secret": found.secret,
        "upstream": found.upstream,
        "vetted": found.vetted,
    })
}

fn explained_text(found: &EgressExplainReply) -> String {
    let mut rows = vec![
        (
            "decision",
            if found.allowed { "allow" } else { "deny" }.to_owned(),
        ),
        ("target", found.authority.clone()),
        ("reason", found.reason.clone()),
        ("remedy", found.remedy.clone()),
        ("answer", found.answer.clone()),
        ("secret", found.secret.clone()),
        (
            "upstream",
            if found.upstream.is_empty() || found.vetted {
                found.upstream.clone()
            } else {
                format!("{}, which resolves the name", found.upstream)
            },
        ),
    ];
    let said: Vec<(String, String)> = found
        .verdicts
        .iter()
        .map(|verdict| {
            let by = [("rule", &verdict.rule), ("nearest", &verdict.nearest)]
                .into_iter()
                .filter(|(_, id)| !id.is_empty())
                .map(|(what, id)| format!(" {what} {id}"))
                .collect::<String>();
            let word = match (verdict.allowed, verdict.would_deny) {
                (true, _) => "allow".to_owned(),
                (false, true) => format!("would deny: {}", verdict.reason),
                (false, false) => verdict.reason.clone(),
            };
            (side(verdict.side().as_str_name()), format!("{word}{by}"))
        })
        .collect();
    rows.extend(said.iter().map(|(side, text)| (side.as_str(), text.clone())));
    rows.extend(found.addresses.iter().map(|address| {
        let why = if address.allowed { "ok" } else { &address.reason };
        ("address", format!("{} {why} {}", address.address, address.range))
    }));
    fields(&rows)
}

fn shown(found: &EgressGetReply) -> Value {
    json!({
        "armed": found.armed,
        "linked": found.linked,
        "connections": found.connections,
        "layers": found.layers.iter().map(|layer| json!({
            "side": side(layer.side().as_str_name()),
            "name": layer.name,
            "digest": layer.digest,
            "missing": layer.missing,
            "policy": layer.policy.as_ref().map(to_json),
        })).collect::<Vec<_>>(),
    })
}

fn shown_text(found: &EgressGetReply) -> String {
    let mut rows = vec![
        ("armed", found.armed.to_string()),
        ("linked", found.linked.to_string()),
        ("connections", found.connections.to_string()),
    ];
    for layer in &found.layers {
        let what = if layer.missing {
            "missing: everything is denied".to_owned()
        } else {
            layer
                .policy
                .as_ref()
                .map(|policy| to_json(policy).to_string())
                .unwrap_or_default()
        };
        let name = side(layer.side().as_str_name());
        rows.push(("layer", format!("{name} {} {what}", layer.name)));
    }
    fields(&rows)
}

fn decided(decision: &EgressDecision) -> Value {
    json!({
        "seq": decision.seq,
        "at": stamp(decision.at.as_ref()),
        "sandbox": decision.sandbox,
        "claim": decision.claim,
        "tenant": decision.tenant,
        "pool": decision.pool,
        "door": decision.door,
        "kind": decision.kind,
        "target": decision.target,
        "method": decision.method,
        "path": decision.path,
        "allowed": decision.allowed,
        "reason": decision.reason,
        "side": side(decision.side().as_str_name()),
        "rule": decision.rule,
        "would_deny": decision.would_deny,
        "address": decision.address,
        "secret": decision.secret,
        "upstream": decision.upstream,
        "vetted": decision.vetted,
    })
}

fn decided_text(decision: &EgressDecision) -> String {
    let word = match (decision.allowed, decision.would_deny) {
        (true, false) => "allow",
        (true, true) => "allow (would deny)",
        (false, _) => &decision.reason,
    };
    let what = if decision.method.is_empty() {
        decision.target.clone()
    } else {
        format!("{} http://{}{}", decision.method, decision.target, decision.path)
    };
    let cells = [
        &*decision.sandbox,
        &decision.door,
        &what,
        word,
        &decision.rule,
        &decision.address,
    ];
    harmless(cells.join("  ").trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_strictly() {
        let text = r#"{"mode":"report","rules":[{"id":"a","effect":"deny","host":["x"],"ports":[80],"message":"m"}]}"#;
        let policy = policy(serde_json::from_str(text).unwrap()).unwrap();
        assert_eq!(policy.mode(), EgressMode::Report);
        assert_eq!(
            (policy.rules[0].effect(), &*policy.rules[0].ports),
            (EgressEffect::Deny, &[80][..])
        );
        for bad in [
            r#"[]"#,
            r#"{"mode":"x"}"#,
            r#"{"rules":{}}"#,
            r#"{"rule":[]}"#,
            r#"{"rules":[{"hosts":["x"]}]}"#,
            r#"{"rules":[{"effect":"x"}]}"#,
            r#"{"rules":[{"ports":["80"]}]}"#,
            r#"{"rules":[{"id":1}]}"#,
        ] {
            assert!(
                super::policy(serde_json::from_str(bad).unwrap()).is_err(),
                "{bad}"
            );
        }
    }
}
