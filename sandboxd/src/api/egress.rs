//! Service `Egress`.

use std::{collections::VecDeque, sync::Arc};

use futures_util::stream;
use sandbox_protocol::{door::DoorReason, id::SandboxId, reason::Reason, v1};
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    claims::{ended, journal},
    desk::{Desk, answer},
    parse,
    stream::Boxed,
};
use crate::{
    access::{Caller, Principal},
    egress::{Decided, Denial, Explained, Outcome, explain},
    feed::{News, Reader},
    policy::{
        Authority, ClaimSide, Effect, Layer, Mode, PoolSide, Ruling, Seen, Side, SideVerdict, Sides,
        TenantSide, Who, decide,
    },
    sandbox::{ApplyError, Life, Sandbox},
    words::{Name, OPERATOR},
};

/// Longest target and method of a question.
const TARGET: usize = 8 * 1024;

/// Service `Egress`.
#[derive(Debug, Clone)]
pub(super) struct EgressService(pub(super) Desk);

#[tonic::async_trait]
impl v1::egress_server::Egress for EgressService {
    async fn explain(
        &self,
        request: Request<v1::EgressExplainRequest>,
    ) -> Result<Response<v1::EgressExplainReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(
            &ctx,
            Box::pin(explained(&self.0, &ctx, request.into_inner())).await,
        )
    }

    async fn get(
        &self,
        request: Request<v1::EgressGetRequest>,
    ) -> Result<Response<v1::EgressGetReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, get(&self.0, &ctx, request.get_ref()))
    }

    async fn update(
        &self,
        request: Request<v1::EgressUpdateRequest>,
    ) -> Result<Response<v1::EgressUpdateReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, Box::pin(update(&self.0, &ctx, request.into_inner())).await)
    }

    async fn watch(
        &self,
        request: Request<v1::EgressWatchRequest>,
    ) -> Result<Response<Boxed<v1::EgressWatchReply>>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, watch(&self.0, &ctx, request.get_ref()))
    }
}

/// Of whom is asked.
struct Subject {
    sides: Sides,
    pool: String,
    tenant: String,
}

fn subject(desk: &Desk, ctx: &Ctx, wanted: &v1::EgressExplainRequest) -> Result<Subject, Refusal> {
    let book = desk.claims.sandboxes.means().egress.book();
    let layer = wanted.layer.clone().map(parse::layer).transpose()?;
    if !wanted.sandbox.is_empty() {
        let (sandbox, _) = desk.opened(&ctx.caller, &wanted.sandbox)?;
        let life = sandbox.life();
        let Life::Claimed(claim) = life else {
            return Err(unclaimed(&life));
        };
        return Ok(Subject {
            sides: book.sides(
                claim.pool.as_ref(),
                &claim.owner,
                layer.as_ref().or(claim.layer.as_ref()),
            ),
            pool: claim.pool.map_or(String::new(), String::from),
            tenant: claim.owner.to_string(),
        });
    }
    let principal = ctx.principal()?;
    let pool: Name = parse::name("pool", &wanted.pool)?;
    let there = desk
        .claims
        .pools
        .get(&pool)
        .filter(|_| desk.allowed(&principal).contains(&pool));
    if there.is_none() {
        return Err(Refusal::new(
            Reason::PoolNotFound,
            format!("there is no pool {pool}"),
        ));
    }
    let tenant = match &principal {
        Principal::Operator(_) if wanted.tenant.is_empty() => OPERATOR.to_owned(),
        Principal::Operator(_) => wanted.tenant.clone(),
        Principal::Tenant { tenant, .. } if wanted.tenant.is_empty() || wanted.tenant == tenant.as_str() => {
            tenant.to_string()
        }
        Principal::Tenant { .. } | Principal::Claimer { .. } => {
            return Err(Refusal::new(
                Reason::NotAllowed,
                "only its own policy is a tenant's to ask for",
            ));
        }
    };
    Ok(Subject {
        sides: book.sides(Some(&pool), &tenant, layer.as_ref()),
        pool: pool.to_string(),
        tenant,
    })
}

/// A sandbox that is nobody's, or no more.
fn unclaimed(life: &Life) -> Refusal {
    match life {
        Life::Making | Life::Warm | Life::Claimed(_) => Refusal::not_found(),
        Life::Ending { why, .. }
        | Life::Failed { why, .. }
        | Life::Gone { why, .. }
        | Life::Quarantined { why } => ended(why),
    }
}

async fn explained(
    desk: &Desk,
    ctx: &Ctx,
    wanted: v1::EgressExplainRequest,
) -> Result<v1::EgressExplainReply, Refusal> {
    desk.started()?;
    let subject = subject(desk, ctx, &wanted)?;
    if wanted.target.len() + wanted.method.len() > TARGET {
        return Err(Refusal::field("target", format!("at most {TARGET} bytes")));
    }
    let schemes = [("http://", 80), ("https://", 443)];
    let url = schemes
        .into_iter()
        .find_map(|(scheme, port)| Some((wanted.target.strip_prefix(scheme)?, port)));
    let (text, path, port) = match url {
        Some((rest, port)) => {
            let at = rest.find(['/', '?']).unwrap_or(rest.len());
            let (text, path) = rest.split_at_checked(at).unwrap_or((rest, ""));
            (text, Some(if path.is_empty() { "/" } else { path }), Some(port))
        }
        None => (&*wanted.target, None, None),
    };
    let target = match Authority::parse(text, port) {
        Ok(target) => target,
        // A door says so before it asks anybody.
        Err(error) => return Ok(refused_before(error.reason(), port == Some(80))),
    };
    let method = if wanted.method.is_empty() {
        "GET"
    } else {
        &wanted.method
    };
    // Who asks for https opens a tunnel first.
    let tunnel = decide(&subject.sides, &target, Seen::Tunnel);
    let looks_inside = port != Some(80) && tunnel.denial().is_none() && tunnel.looks_inside();
    let seen = match (path, port) {
        (Some(path), Some(80)) => Seen::Request { method, path },
        (Some(path), _) if looks_inside => Seen::Inside { method, path },
        (Some(_) | None, _) => Seen::Tunnel,
    };
    let who = Who {
        pool: &subject.pool,
        tenant: &subject.tenant,
    };
    let egress = &desk.claims.sandboxes.means().egress;
    let mut found = explain(
        egress,
        &subject.sides,
        &target,
        seen,
        wanted.resolve.then_some(who),
    )
    .await;
    if looks_inside && egress.interception().is_none() {
        found.refused = found.refused.or(Some(DoorReason::CaUnavailable));
    }
    Ok(explanation(&found, &target, seen != Seen::Tunnel))
}

fn refused_before(reason: DoorReason, visible: bool) -> v1::EgressExplainReply {
    v1::EgressExplainReply {
        reason: reason.as_str().to_owned(),
        remedy: reason.remedy().to_owned(),
        visible,
        answer: Denial::bare(reason).status_line(),
        ..v1::EgressExplainReply::default()
    }
}

fn explanation(found: &Explained<'_>, target: &Authority, visible: bool) -> v1::EgressExplainReply {
    let base = found
        .refused
        .map_or_else(v1::EgressExplainReply::default, |reason| {
            refused_before(reason, visible)
        });
    v1::EgressExplainReply {
        allowed: found.refused.is_none(),
        authority: target.to_string(),
        visible,
        verdicts: found.decision.0.iter().map(verdict).collect(),
        addresses: found
            .addresses
            .iter()
            .map(|judged| v1::EgressAddress {
                address: judged.address.to_string(),
                allowed: judged.refused.is_none(),
                reason: judged.refused.map_or("", |reason| reason.as_str()).to_owned(),
                range: judged.range.clone().unwrap_or_default(),
            })
            .collect(),
        ..base
    }
}

fn verdict(said: &SideVerdict<'_>) -> v1::EgressVerdict {
    let (allowed, reason, rule, nearest) = match said.ruling {
        Ruling::Allowed(rule) => (true, "", rule, None),
        Ruling::Denied {
            reason,
            rule,
            nearest,
        } => (false, reason.as_str(), rule, nearest),
    };
    let id = |rule: Option<&crate::policy::Rule>| rule.map(|rule| rule.id().to_owned()).unwrap_or_default();
    v1::EgressVerdict {
        side: side(said.side).into(),
        name: said.name.map(Name::to_string).unwrap_or_default(),
        digest: said
            .layer
            .map(|layer| layer.digest().to_owned())
            .unwrap_or_default(),
        allowed,
        reason: reason.to_owned(),
        rule: id(rule),
        nearest: id(nearest),
        would_deny: said.would_deny(),
    }
}

const fn side(side: Side) -> v1::EgressSide {
    match side {
        Side::Pool => v1::EgressSide::Pool,
        Side::Tenant => v1::EgressSide::Tenant,
        Side::Claim => v1::EgressSide::Claim,
    }
}

fn get(desk: &Desk, ctx: &Ctx, wanted: &v1::EgressGetRequest) -> Result<v1::EgressGetReply, Refusal> {
    desk.started()?;
    let (sandbox, _) = desk.opened(&ctx.caller, &wanted.sandbox)?;
    let door = sandbox.door();
    let armed = door.armed();
    let layers = armed
        .as_ref()
        .map(|armed| layers(&armed.sides))
        .unwrap_or_default();
    Ok(v1::EgressGetReply {
        armed: armed.is_some(),
        linked: door.is_linked(),
        layers,
        connections: u32::try_from(door.connections()).unwrap_or(u32::MAX),
    })
}

fn layers(sides: &Sides) -> Vec<v1::EgressLayer> {
    let layer = |side, name: Option<&Name>, layer: Option<&Layer>| v1::EgressLayer {
        side: i32::from(side),
        name: name.map(Name::to_string).unwrap_or_default(),
        digest: layer.map(|layer| layer.digest().to_owned()).unwrap_or_default(),
        missing: layer.is_none(),
        policy: layer.map(policy),
    };
    let pool = match &sides.pool {
        PoolSide::Missing => layer(v1::EgressSide::Pool, None, None),
        PoolSide::Layer(named) => layer(v1::EgressSide::Pool, Some(&named.name), Some(&named.layer)),
    };
    let tenant = match &sides.tenant {
        TenantSide::Missing => Some(layer(v1::EgressSide::Tenant, None, None)),
        TenantSide::All => None,
        TenantSide::Layer(named) => Some(layer(
            v1::EgressSide::Tenant,
            Some(&named.name),
            Some(&named.layer),
        )),
    };
    let claim = match &sides.claim {
        ClaimSide::Missing => Some(layer(v1::EgressSide::Claim, None, None)),
        ClaimSide::Open => None,
        ClaimSide::Layer(own) => Some(layer(v1::EgressSide::Claim, None, Some(own))),
    };
    std::iter::once(pool).chain(tenant).chain(claim).collect()
}

fn policy(layer: &Layer) -> v1::EgressPolicy {
    let mode = match layer.mode() {
        Mode::Enforce => v1::EgressMode::Enforce,
        Mode::Report => v1::EgressMode::Report,
    };
    let rule = |rule: &crate::policy::Rule| {
        let fields = rule.fields();
        let effect = match fields.effect {
            Effect::Allow => v1::EgressEffect::Allow,
            Effect::Deny => v1::EgressEffect::Deny,
        };
        v1::EgressRule {
            id: fields.id.clone(),
            effect: effect.into(),
            host: fields.host.clone(),
            ports: fields.ports.clone(),
            methods: fields.methods.clone(),
            paths: fields.paths.clone(),
            intercept: fields.intercept,
            message: fields.message.clone(),
        }
    };
    v1::EgressPolicy {
        mode: mode.into(),
        rules: layer.rules().iter().map(rule).collect(),
    }
}

async fn update(
    desk: &Desk,
    ctx: &Ctx,
    wanted: v1::EgressUpdateRequest,
) -> Result<v1::EgressUpdateReply, Refusal> {
    desk.started()?;
    let (sandbox, _) = desk.opened(&ctx.caller, &wanted.sandbox)?;
    let layer = wanted.layer.map(parse::layer).transpose()?;
    if layer.as_ref().is_some_and(|layer| layer.looks_inside()) {
        let may = desk.claims.templates.may_look_inside(&sandbox.key);
        may.map_err(|error| Refusal::new(error.reason(), error.chain()))?;
    }
    let one = desk.changing.begin();
    if let Some(expected) = &wanted.if_digest {
        let now = sandbox.with_life(|life| {
            let layer = life.claim().and_then(|claim| claim.layer.as_ref());
            layer.map(|layer| layer.digest().to_owned()).unwrap_or_default()
        });
        if now != *expected {
            return Err(Refusal::new(
                Reason::PolicyChanged,
                "the claim's policy is another by now",
            ));
        }
    }
    let digest = layer
        .as_ref()
        .map(|layer| layer.digest().to_owned())
        .unwrap_or_default();
    let applied = desk.claims.sandboxes.narrow(&sandbox, layer);
    drop(one);
    let applied = applied.map_err(|error| not_applied(&error, &sandbox))?;
    if let Some(written) = applied.written {
        let settled = desk.claims.sandboxes.means().settle(written).await;
        drop(settled.map_err(|error| journal(&error))?);
    }
    Ok(v1::EgressUpdateReply { digest })
}

fn not_applied(error: &ApplyError, sandbox: &Sandbox) -> Refusal {
    match error {
        ApplyError::Journal(error) => journal(error),
        ApplyError::Refused => unclaimed(&sandbox.life()),
    }
}

/// Which decisions a caller sees.
enum Sees {
    All,
    Sandbox(SandboxId),
    Tenant(Name),
}

impl Sees {
    fn shows(&self, decided: &Decided) -> bool {
        match self {
            Self::All => true,
            Self::Sandbox(id) => decided.sandbox == *id,
            Self::Tenant(tenant) => *decided.tenant == *tenant.as_str(),
        }
    }
}

struct Watcher {
    sees: Sees,
    kept: VecDeque<Arc<Decided>>,
    lost: u64,
    reader: Reader<Arc<Decided>>,
}

fn watch(
    desk: &Desk,
    ctx: &Ctx,
    wanted: &v1::EgressWatchRequest,
) -> Result<Boxed<v1::EgressWatchReply>, Refusal> {
    desk.started()?;
    let sees = match (&*wanted.sandbox, &ctx.caller) {
        ("", Caller::Known(Principal::Operator(_))) => Sees::All,
        ("", Caller::Known(Principal::Tenant { tenant, .. })) => Sees::Tenant(tenant.clone()),
        ("", _) => {
            return Err(match ctx.principal() {
                Ok(_) => Refusal::new(Reason::NotAllowed, "name the sandbox"),
                Err(refusal) => refusal,
            });
        }
        (id, caller) => Sees::Sandbox(desk.opened(caller, id)?.0.id),
    };
    let egress = &desk.claims.sandboxes.means().egress;
    let (kept, lost, reader) = egress.decisions().read(wanted.from_seq);
    let watcher = Watcher {
        sees,
        kept: kept.into(),
        lost,
        reader,
    };
    let events = stream::unfold(watcher, |mut watcher| async move {
        watcher.next().await.map(|event| (event, watcher))
    });
    Ok(desk.until_stop(ctx.id, events))
}

impl Watcher {
    async fn next(&mut self) -> Option<v1::EgressWatchReply> {
        use v1::egress_watch_reply::Event;
        let event = loop {
            if self.lost > 0 {
                let count = std::mem::take(&mut self.lost);
                break Event::Lost(v1::Lost { count });
            }
            let decided = match self.kept.pop_front() {
                Some(decided) => decided,
                None => match self.reader.next().await {
                    News::Event(decided) => decided,
                    News::Lost(count) => break Event::Lost(v1::Lost { count }),
                    News::Closed => return None,
                },
            };
            if self.sees.shows(&decided) {
                break Event::Decision(decision(&decided));
            }
        };
        Some(v1::EgressWatchReply { event: Some(event) })
    }
}

fn decision(decided: &Decided) -> v1::EgressDecision {
    let (allowed, reason, address) = match &decided.outcome {
        Outcome::Allowed(address) => (true, "", address.to_string()),
        Outcome::Denied(reason) => (false, reason.as_str(), String::new()),
    };
    let kind = if decided.method.is_empty() {
        "tunnel"
    } else {
        "request"
    };
    v1::EgressDecision {
        seq: decided.seq,
        at: Some(decided.at.to_proto()),
        sandbox: decided.sandbox.to_string(),
        claim: decided.claim.map(|claim| claim.to_string()).unwrap_or_default(),
        tenant: decided.tenant.to_string(),
        pool: decided.pool.as_ref().map(Name::to_string).unwrap_or_default(),
        door: decided.door.as_str().to_owned(),
        kind: kind.to_owned(),
        target: decided.target.clone(),
        method: decided.method.clone(),
        path: decided.path.clone(),
        allowed,
        reason: reason.to_owned(),
        side: decided.side.map_or(v1::EgressSide::Unspecified, side).into(),
        rule: decided.rule.clone().unwrap_or_default(),
        would_deny: decided.would_deny,
        address,
    }
}
