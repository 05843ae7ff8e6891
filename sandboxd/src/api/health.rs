//! `grpc.health.v1` and reflection.

use sandbox_protocol::PUBLIC_DESCRIPTOR_SET;
use tonic::{server::NamedService as _, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};

use sandbox_protocol::v1;

/// Services whose health is told by name, besides the empty name that stands for all.
const NAMES: [&str; 7] = [
    "",
    v1::claims_server::ClaimsServer::<()>::NAME,
    v1::pools_server::PoolsServer::<()>::NAME,
    v1::templates_server::TemplatesServer::<()>::NAME,
    v1::node_server::NodeServer::<()>::NAME,
    v1::egress_server::EgressServer::<()>::NAME,
    v1::agent_server::AgentServer::<()>::NAME,
];

/// Tells whether the daemon serves: not while starting or draining, nor with a failed journal.
#[derive(Debug, Clone)]
pub struct Health(HealthReporter);

impl Health {
    /// Adds the health service to `routes`, not serving yet.
    pub async fn add(routes: Routes) -> (Self, Routes) {
        let (reporter, service) = tonic_health::server::health_reporter();
        let health = Self(reporter);
        health.set(false).await;
        (health, routes.add_service(service))
    }

    /// Sets and tells it.
    pub async fn set(&self, serving: bool) {
        let status = if serving {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        for name in NAMES {
            self.0.set_service_status(name, status).await;
        }
    }
}

/// Adds reflection, v1 and v1alpha, to `routes`. It knows the public services and health, never AgentControl.
#[must_use]
pub fn reflection(routes: Routes) -> Routes {
    let builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(PUBLIC_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = builder()
        .build_v1()
        .expect("descriptor sets of this build decode");
    let v1alpha = builder()
        .build_v1alpha()
        .expect("descriptor sets of this build decode");
    routes.add_service(v1).add_service(v1alpha)
}
