//! A silkd that is none: answers in this process what a guest would, for load tests of the host. It runs nothing.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use sandbox_protocol::{
    limits,
    v1::{
        self,
        agent_control_server::{AgentControl, AgentControlServer},
        agent_server::{Agent, AgentServer},
        exec_in, exec_out, exit,
    },
};
use tonic::{
    Request, Response, Status, Streaming, body::Body, codegen::BoxStream, server::NamedService as _,
};
use tower_service::Service as _;

use crate::link::Answer;

/// Answers Info, Exec and AgentControl for any number of links, and remembers nothing. `false` exits 1, `echo` writes
/// its arguments, whatever else is named exits 0.
#[derive(Debug, Clone, Copy, Default)]
pub struct Local;

impl Answer for Local {
    fn answer(
        &self,
        request: http::Request<Body>,
    ) -> Pin<Box<dyn Future<Output = http::Response<Body>> + Send>> {
        let path = request.uri().path();
        let service = path.trim_start_matches('/').split('/').next();
        let answer = match service {
            Some(name) if name == AgentServer::<Self>::NAME => AgentServer::new(*self).call(request),
            Some(name) if name == AgentControlServer::<Self>::NAME => {
                AgentControlServer::new(*self).call(request)
            }
            Some(_) | None => {
                let none = Status::unimplemented("no such service").into_http();
                return Box::pin(std::future::ready(none));
            }
        };
        Box::pin(async move { answer.await.unwrap_or_else(|never| match never {}) })
    }
}

#[tonic::async_trait]
impl Agent for Local {
    async fn info(
        &self,
        _request: Request<v1::AgentInfoRequest>,
    ) -> Result<Response<v1::AgentInfoReply>, Status> {
        Ok(Response::new(v1::AgentInfoReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            proto: limits::PROTO_MAX,
            state: v1::AgentState::Ready.into(),
            generation: 1,
            ..v1::AgentInfoReply::default()
        }))
    }

    async fn exec(
        &self,
        request: Request<Streaming<v1::ExecIn>>,
    ) -> Result<Response<BoxStream<v1::ExecOut>>, Status> {
        let first = request.into_inner().message().await?.and_then(|first| first.m);
        let Some(exec_in::M::Start(v1::ExecStart {
            command: Some(command),
            ..
        })) = first
        else {
            return Err(Status::invalid_argument("the first message is `start`"));
        };
        let (code, said) = run(&command.argv);
        let said_bytes = said.len() as u64;
        let mut out = vec![exec_out::M::Started(v1::Started { id: 1, pid: 1 })];
        if !said.is_empty() {
            out.push(exec_out::M::Stdout(v1::Chunk { data: said }));
        }
        out.push(exec_out::M::Exit(v1::Exit {
            how: Some(exit::How::Code(code)),
            stdout_bytes: said_bytes,
            ..v1::Exit::default()
        }));
        let messages: Vec<_> = out.into_iter().map(|m| Ok(v1::ExecOut { m: Some(m) })).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
    }
}

fn run(argv: &[Bytes]) -> (i32, Bytes) {
    let name = argv.first().map(|path| path.rsplit(|byte| *byte == b'/').next());
    match name.flatten() {
        Some(b"false") => (1, Bytes::new()),
        Some(b"echo") => {
            let words = argv.get(1..).unwrap_or_default();
            let mut said = words.join(&b' ');
            said.push(b'\n');
            (0, said.into())
        }
        Some(_) | None => (0, Bytes::new()),
    }
}

#[tonic::async_trait]
impl AgentControl for Local {
    async fn quiesce(
        &self,
        _request: Request<v1::ControlQuiesceRequest>,
    ) -> Result<Response<v1::ControlQuiesceReply>, Status> {
        Ok(Response::new(v1::ControlQuiesceReply {}))
    }

    async fn resume(
        &self,
        _request: Request<v1::ControlResumeRequest>,
    ) -> Result<Response<v1::ControlResumeReply>, Status> {
        Ok(Response::new(v1::ControlResumeReply {}))
    }

    async fn renew(
        &self,
        request: Request<v1::ControlRenewRequest>,
    ) -> Result<Response<v1::ControlRenewReply>, Status> {
        Ok(Response::new(v1::ControlRenewReply {
            generation: 1,
            guest_time: request.into_inner().host_time,
            // It has no doors.
            doors: None,
        }))
    }

    async fn adopt(
        &self,
        _request: Request<v1::ControlAdoptRequest>,
    ) -> Result<Response<v1::ControlAdoptReply>, Status> {
        Ok(Response::new(v1::ControlAdoptReply {
            state: v1::AgentState::Ready.into(),
            generation: 1,
            ..v1::ControlAdoptReply::default()
        }))
    }

    async fn clock(
        &self,
        request: Request<v1::ControlClockRequest>,
    ) -> Result<Response<v1::ControlClockReply>, Status> {
        Ok(Response::new(v1::ControlClockReply {
            guest_time: request.into_inner().host_time,
            stepped: false,
        }))
    }

    async fn set_claim(
        &self,
        _request: Request<v1::ControlSetClaimRequest>,
    ) -> Result<Response<v1::ControlSetClaimReply>, Status> {
        Ok(Response::new(v1::ControlSetClaimReply {}))
    }

    async fn events(
        &self,
        _request: Request<v1::ControlEventsRequest>,
    ) -> Result<Response<BoxStream<v1::ControlEvent>>, Status> {
        Ok(Response::new(Box::pin(tokio_stream::pending())))
    }

    async fn power_off(
        &self,
        _request: Request<v1::ControlPowerOffRequest>,
    ) -> Result<Response<v1::ControlPowerOffReply>, Status> {
        Ok(Response::new(v1::ControlPowerOffReply {}))
    }
}
