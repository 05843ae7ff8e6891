//! A link as a gRPC channel, and a guest's refusals as errors.

use std::{
    error::Error as _,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use sandbox_protocol::{
    reason::{DOMAIN, Reason},
    v1::{agent_client::AgentClient, agent_control_client::AgentControlClient},
};
use tonic::body::Body;
use tonic_types::StatusExt as _;

use super::AgentError;
use crate::{
    link::{Link, LinkBody, LinkError},
    telemetry::GuestText,
    work,
};

/// Largest reply of AgentControl that is decoded: lists of conditions are its largest.
const CONTROL_REPLY: usize = 64 * 1024;
/// Largest message of an Exec that is decoded: a chunk of 64 KiB and its frame.
const EXEC_MESSAGE: usize = 128 * 1024;

/// Calls over one link.
#[derive(Debug, Clone)]
pub(super) struct Caller(Link);

impl tower_service::Service<http::Request<Body>> for Caller {
    type Response = http::Response<LinkBody>;
    type Error = LinkError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, LinkError>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let link = self.0.clone();
        Box::pin(async move { link.call(request).await })
    }
}

pub(super) fn control(link: &Link) -> AgentControlClient<Caller> {
    AgentControlClient::new(Caller(link.clone())).max_decoding_message_size(CONTROL_REPLY)
}

pub(super) fn agent(link: &Link) -> AgentClient<Caller> {
    AgentClient::new(Caller(link.clone())).max_decoding_message_size(EXEC_MESSAGE)
}

/// Waits for one answer, counts it, and makes an error of a refusal.
pub(super) fn asked<'a, T: 'a>(
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send + 'a,
) -> impl Future<Output = Result<T, AgentError>> + Send + 'a {
    // A generated client's future holds its request several times over, 2 to 4 KiB.
    let answer = Box::pin(answer);
    async move {
        work::count(work::Kind::GuestRoundTrips, 1);
        answer
            .await
            .map(tonic::Response::into_inner)
            .map_err(|status| refused(call, status))
    }
}

pub(super) fn refused(call: &'static str, status: tonic::Status) -> AgentError {
    // A status with a source was made here, of what the link or the decoder met; a guest's has none.
    if status.source().is_some() {
        return AgentError::Link {
            call,
            source: Box::new(status),
        };
    }
    let info = status
        .get_details_error_info()
        .filter(|info| info.domain == DOMAIN);
    AgentError::Refused {
        call,
        code: status.code(),
        reason: info.and_then(|info| Reason::parse(&info.reason)),
        said: GuestText::head(status.message().as_bytes()),
    }
}
