//! The services as one set of routes.

use std::sync::Arc;

use sandbox_protocol::{limits, v1};
use tonic::service::Routes;

use super::{
    Forward, Health, claims::ClaimsService, desk::Desk, egress::EgressService, node::NodeService,
    pools::PoolsService, reflection, templates::TemplatesService,
};

/// Every service of the API, with health and reflection. `Agent` is forwarded; `AgentControl` has no route.
pub async fn routes(desk: Desk) -> (Routes, Health) {
    let forward = Forward::new(
        Arc::new(desk.clone()),
        Arc::clone(&desk.access),
        desk.clock().clone(),
    );
    let claims = v1::claims_server::ClaimsServer::new(ClaimsService(desk.clone()));
    let pools = v1::pools_server::PoolsServer::new(PoolsService(desk.clone()));
    let templates = v1::templates_server::TemplatesServer::new(TemplatesService(desk.clone()));
    let egress = v1::egress_server::EgressServer::new(EgressService(desk.clone()));
    let node = v1::node_server::NodeServer::new(NodeService(desk));
    let routes = Routes::new(claims.max_decoding_message_size(limits::MESSAGE_IN))
        .add_service(pools.max_decoding_message_size(limits::MESSAGE_IN))
        .add_service(templates.max_decoding_message_size(limits::MESSAGE_IN))
        .add_service(egress.max_decoding_message_size(limits::MESSAGE_IN))
        .add_service(node.max_decoding_message_size(limits::MESSAGE_IN))
        .add_service(forward);
    let (health, routes) = Health::add(routes).await;
    (reflection(routes), health)
}
