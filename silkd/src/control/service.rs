//! The service: checks, hands over, answers.
//!
//! May call: clock, control/*, events, refusal.
//! Never inside: a change of how the guest stands.

use std::time::Duration;

use futures_util::StreamExt as _;
use sandbox_protocol::{
    reason::Reason,
    v1::{
        ControlAdoptReply, ControlAdoptRequest, ControlClockReply, ControlClockRequest, ControlEvent,
        ControlEventsRequest, ControlPowerOffReply, ControlPowerOffRequest, ControlQuiesceReply,
        ControlQuiesceRequest, ControlRenewReply, ControlRenewRequest, ControlResumeReply,
        ControlResumeRequest, ControlSetClaimReply, ControlSetClaimRequest, DoorsSaid,
        agent_control_server::AgentControl, control_event::Event,
    },
};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status, codegen::BoxStream};

use super::{Control, actor::Order, order};
use crate::{clock, events, refusal::Refusal};

/// To come to rest when the host names no time.
const DEADLINE: Duration = Duration::from_secs(10);
/// Steps of the clock that are small enough to be left undone.
const STEP_NANOS: u128 = 250_000_000;

impl Control {
    async fn order<T>(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<T, Refusal>>) -> Order,
    ) -> Result<T, Status> {
        let gone = || Refusal::new(Reason::NotReady, "the guest is stopping");
        let (answer, answered) = oneshot::channel();
        self.orders.send(order(answer)).await.map_err(|_order| gone())?;
        Ok(answered.await.map_err(|_dropped| gone())??)
    }
}

#[tonic::async_trait]
impl AgentControl for Control {
    async fn quiesce(
        &self,
        request: Request<ControlQuiesceRequest>,
    ) -> Result<Response<ControlQuiesceReply>, Status> {
        let request = request.into_inner();
        let mode = order::rest(request.mode)?;
        let deadline = match request.deadline_ms {
            0 => DEADLINE,
            ms => Duration::from_millis(ms.into()),
        };
        self.order(|answer| Order::Quiesce(mode, deadline, answer))
            .await?;
        Ok(Response::new(ControlQuiesceReply {}))
    }

    async fn resume(
        &self,
        _request: Request<ControlResumeRequest>,
    ) -> Result<Response<ControlResumeReply>, Status> {
        self.order(Order::Resume).await?;
        Ok(Response::new(ControlResumeReply {}))
    }

    async fn renew(
        &self,
        request: Request<ControlRenewRequest>,
    ) -> Result<Response<ControlRenewReply>, Status> {
        let renewal = Box::new(order::renewal(request.into_inner())?);
        let renewed = self.order(|answer| Order::Renew(renewal, answer)).await?;
        Ok(Response::new(ControlRenewReply {
            generation: renewed.generation,
            guest_time: Some(clock::timestamp(self.parts.machine.now())),
            doors: renewed.doors.map(|said| DoorsSaid {
                http: said.http.into(),
                socks5: said.socks5.into(),
            }),
        }))
    }

    async fn adopt(
        &self,
        _request: Request<ControlAdoptRequest>,
    ) -> Result<Response<ControlAdoptReply>, Status> {
        Ok(Response::new(ControlAdoptReply {
            state: self.parts.gate.state().on_the_wire().into(),
            generation: self.facts.generation(),
            sandbox_id: self.facts.sandbox().to_string(),
            conditions: self.parts.conditions.list(),
        }))
    }

    async fn clock(
        &self,
        request: Request<ControlClockRequest>,
    ) -> Result<Response<ControlClockReply>, Status> {
        let to = order::time(request.into_inner().host_time)?;
        let machine = &self.parts.machine;
        let off = clock::nanos(to) - clock::nanos(machine.now());
        let stepped = off.unsigned_abs() > STEP_NANOS;
        if stepped {
            machine
                .set_clock(to)
                .map_err(|error| Refusal::new(Reason::AgentBug, format!("clock: {error}")))?;
        }
        Ok(Response::new(ControlClockReply {
            guest_time: Some(clock::timestamp(machine.now())),
            stepped,
        }))
    }

    async fn set_claim(
        &self,
        request: Request<ControlSetClaimRequest>,
    ) -> Result<Response<ControlSetClaimReply>, Status> {
        let claim = order::claim(request.into_inner())?;
        self.order(|answer| Order::SetClaim(claim, answer)).await?;
        Ok(Response::new(ControlSetClaimReply {}))
    }

    async fn events(
        &self,
        _request: Request<ControlEventsRequest>,
    ) -> Result<Response<BoxStream<ControlEvent>>, Status> {
        // Subscribed first: a change in between is told twice rather than never.
        let news = self.parts.events.subscribe();
        let now = self.parts.conditions.list().into_iter();
        let now = now.map(|condition| ControlEvent {
            event: Some(Event::Condition(condition)),
        });
        Ok(Response::new(Box::pin(
            events::after(now.collect(), news).map(Ok),
        )))
    }

    async fn power_off(
        &self,
        _request: Request<ControlPowerOffRequest>,
    ) -> Result<Response<ControlPowerOffReply>, Status> {
        self.parts.power_off.send_replace(true);
        Ok(Response::new(ControlPowerOffReply {}))
    }
}
