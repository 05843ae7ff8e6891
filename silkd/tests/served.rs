//! Every method of the service is there.
#![expect(clippy::unwrap_used, reason = "tests say what holds")]
#![expect(clippy::large_futures, reason = "no code of a service")]

mod common;

use common::{Guest, Host, within};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use prost::Message as _;
use sandbox_protocol::{DESCRIPTOR_SET, v1::control_renew_request::Mode};
use tonic::{Code, Status, body::Body};
use tower_service::Service as _;

/// A gRPC frame with an empty message in it.
const EMPTY: [u8; 5] = [0; 5];

/// The status of a call with one empty message.
async fn status(host: &mut Host, path: &str) -> Status {
    let mut request = Request::new(Body::new(Full::new(EMPTY.as_slice().into())));
    *request.uri_mut() = path.parse().unwrap();
    let kind = "application/grpc".parse().unwrap();
    request.headers_mut().insert("content-type", kind);
    let response = within(host.calls.call(request)).await.unwrap();
    if let Some(status) = Status::from_header_map(response.headers()) {
        return status;
    }
    let collected = within(response.into_body().collect()).await.unwrap();
    Status::from_header_map(collected.trailers().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_method_is_served() {
    let set = prost_types::FileDescriptorSet::decode(DESCRIPTOR_SET).unwrap();
    let services = set
        .file
        .iter()
        .filter(|file| file.package() == "sandbox.v1")
        .flat_map(|file| &file.service);
    let agent = services.filter(|service| service.name() == "Agent");
    let methods: Vec<&str> = agent
        .flat_map(|service| &service.method)
        .map(prost_types::MethodDescriptorProto::name)
        .collect();
    assert!(methods.len() > 30 && methods.contains(&"Exec"), "{methods:?}");
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    let none = status(&mut host, "/sandbox.v1.Agent/NoSuch").await;
    assert_eq!(none.code(), Code::Unimplemented);
    for method in methods {
        let status = status(&mut host, &format!("/sandbox.v1.Agent/{method}")).await;
        assert_ne!(status.code(), Code::Unimplemented, "{method}: {status}");
        assert_ne!(status.code(), Code::Internal, "{method}: {status}");
    }
}
