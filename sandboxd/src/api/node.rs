//! Service `Node`.

use std::sync::Arc;

use sandbox_protocol::{reason::Reason, v1};
use tonic::{Request, Response, Status};

use super::{
    Ctx, Refusal,
    desk::{Desk, answer, is_operator},
};
use crate::{doctor::Verdict, tasks, telemetry::admin::Phase, words::MemBytes};

/// Service `Node`.
#[derive(Debug, Clone)]
pub(super) struct NodeService(pub(super) Desk);

#[tonic::async_trait]
impl v1::node_server::Node for NodeService {
    async fn info(
        &self,
        request: Request<v1::NodeInfoRequest>,
    ) -> Result<Response<v1::NodeInfoReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(
            &ctx,
            ctx.principal()
                .map(|principal| info(&self.0, is_operator(&principal))),
        )
    }

    async fn doctor(
        &self,
        request: Request<v1::NodeDoctorRequest>,
    ) -> Result<Response<v1::NodeDoctorReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, doctor(&self.0, &ctx).await)
    }

    async fn reload(
        &self,
        request: Request<v1::NodeReloadRequest>,
    ) -> Result<Response<v1::NodeReloadReply>, Status> {
        let ctx = self.0.ctx(&request);
        answer(&ctx, reload(&self.0, &ctx).await)
    }

    async fn ping(
        &self,
        _request: Request<v1::NodePingRequest>,
    ) -> Result<Response<v1::NodePingReply>, Status> {
        Ok(Response::new(v1::NodePingReply {}))
    }
}

/// Facts of the host itself are for operators; a tenant gets names and counts.
fn info(desk: &Desk, operator: bool) -> v1::NodeInfoReply {
    let sandboxes = &desk.claims.sandboxes;
    let counts = sandboxes.counts().into_iter();
    let text = |state: v1::State| state.as_str_name().trim_start_matches("STATE_").to_lowercase();
    let shown = |memory: MemBytes| if operator { memory.mib() } else { 0 };
    v1::NodeInfoReply {
        version: env!("CARGO_PKG_VERSION").into(),
        name: desk.host.name(),
        engine: desk.engine.kind().to_proto().into(),
        accel: desk.engine.accel().to_proto().into(),
        accel_why: if operator {
            desk.engine.accel_why()
        } else {
            String::new()
        },
        memory_budget_mib: shown(desk.host.memory_budget()),
        memory_reserved_mib: shown(sandboxes.means().admission.used().reserved),
        sandboxes: counts.map(|(state, count)| (text(state), count)).collect(),
        started_at: Some(desk.host.started_at().to_proto()),
        ready: desk.readiness.phase() == Phase::Ready,
    }
}

async fn doctor(desk: &Desk, ctx: &Ctx) -> Result<v1::NodeDoctorReply, Refusal> {
    ctx.operator()?;
    let host = Arc::clone(&desk.host);
    let checks = tasks::blocking("doctor", move || host.doctor())
        .await
        .map_err(|_panicked| Refusal::new(Reason::Bug, "a check of the host failed"))?;
    let checks = checks.into_iter().map(|check| v1::Check {
        name: check.name.into(),
        verdict: match check.verdict {
            Verdict::Ok => v1::Verdict::Ok.into(),
            Verdict::Warn => v1::Verdict::Warn.into(),
            Verdict::Fail => v1::Verdict::Fail.into(),
        },
        found: check.found,
        remedy: check.remedy,
    });
    Ok(v1::NodeDoctorReply {
        checks: checks.collect(),
    })
}

async fn reload(desk: &Desk, ctx: &Ctx) -> Result<v1::NodeReloadReply, Refusal> {
    desk.serving()?;
    ctx.operator()?;
    let host = Arc::clone(&desk.host);
    let reloaded = tasks::blocking("reload", move || host.reload())
        .await
        .map_err(|_panicked| Refusal::new(Reason::Bug, "the reload failed"))?
        .map_err(|mistakes| Refusal::new(Reason::ReloadRefused, mistakes))?;
    Ok(v1::NodeReloadReply {
        changed: reloaded.changed,
        needs_restart: reloaded.needs_restart,
    })
}
