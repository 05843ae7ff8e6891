//! `sandbox.v1.Agent` as any gRPC client sees it, through the daemon: every method, before the SDK has words for it.

use tonic::{
    Request, Status,
    metadata::{AsciiMetadataKey, AsciiMetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

use sandbox_protocol::v1::agent_client::AgentClient;

use crate::Daemon;

/// Calls to one sandbox.
pub type Calls = AgentClient<InterceptedService<Channel, Headers>>;

/// What each call says to the host.
#[derive(Debug, Clone)]
pub struct Headers(Vec<(AsciiMetadataKey, AsciiMetadataValue)>);

impl Interceptor for Headers {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        for (key, value) in &self.0 {
            request.metadata_mut().insert(key.clone(), value.clone());
        }
        Ok(request)
    }
}

impl Daemon {
    /// Calls to this sandbox, with this token and further metadata, over a connection of their own.
    ///
    /// # Panics
    /// The daemon is not there.
    pub async fn calls(&self, sandbox: &str, token: &str, more: &[(&'static str, &str)]) -> Calls {
        let address = self.address().replacen("unix:", "unix://", 1);
        let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let bearer = format!("Bearer {token}");
        let ours = [("sandbox-id", sandbox), ("authorization", bearer.as_str())];
        let headers = ours.iter().chain(more).map(|(key, value)| {
            let key = AsciiMetadataKey::from_static(key);
            (key, value.parse().unwrap())
        });
        AgentClient::with_interceptor(channel, Headers(headers.collect()))
    }
}
