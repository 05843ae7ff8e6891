//! A client that knows nothing but reflection, as `grpcurl` does.

use std::collections::BTreeMap;

use bytes::BufMut as _;
use harness::{Daemon, HANG, Setup, within};
use prost_reflect::{
    DescriptorPool, DynamicMessage, MethodDescriptor, Value,
    prost::Message as _,
    prost_types::{FileDescriptorProto, FileDescriptorSet},
};
use tokio_stream::StreamExt as _;
use tonic::{
    Code, Request, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::{Channel, Endpoint},
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

async fn channel(daemon: &Daemon) -> Channel {
    let socket = daemon.address().replacen("unix:", "unix://", 1);
    Endpoint::from_shared(socket).unwrap().connect().await.unwrap()
}

async fn ask(channel: &Channel, question: MessageRequest) -> Result<MessageResponse, Status> {
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(question),
    };
    let mut client = ServerReflectionClient::new(channel.clone());
    let mut answers = client
        .server_reflection_info(tokio_stream::once(request))
        .await
        .unwrap()
        .into_inner();
    let answer = within(HANG, answers.next()).await.unwrap()?;
    Ok(answer.message_response.unwrap())
}

async fn services(channel: &Channel) -> Vec<String> {
    match ask(channel, MessageRequest::ListServices(String::new()))
        .await
        .unwrap()
    {
        MessageResponse::ListServicesResponse(list) => {
            let mut names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
            names.sort();
            names
        }
        other @ (MessageResponse::FileDescriptorResponse(_)
        | MessageResponse::AllExtensionNumbersResponse(_)
        | MessageResponse::ErrorResponse(_)) => panic!("{other:?}"),
    }
}

/// The files that describe a service, fetched name by name.
async fn describe(channel: &Channel, service: &str) -> DescriptorPool {
    let mut files: BTreeMap<String, FileDescriptorProto> = BTreeMap::new();
    let mut questions = vec![MessageRequest::FileContainingSymbol(service.to_owned())];
    while let Some(question) = questions.pop() {
        let Ok(MessageResponse::FileDescriptorResponse(found)) = ask(channel, question).await else {
            panic!("{service} is not described");
        };
        for bytes in found.file_descriptor_proto {
            let file = FileDescriptorProto::decode(bytes.as_slice()).unwrap();
            for import in &file.dependency {
                if !files.contains_key(import) {
                    questions.push(MessageRequest::FileByFilename(import.clone()));
                }
            }
            files.insert(file.name().to_owned(), file);
        }
    }
    let file = files.into_values().collect();
    DescriptorPool::from_file_descriptor_set(FileDescriptorSet { file }).unwrap()
}

/// Messages by their descriptors.
#[derive(Debug, Clone)]
struct Dynamic(MethodDescriptor);

impl Codec for Dynamic {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        self.clone()
    }

    fn decoder(&mut self) -> Self {
        self.clone()
    }
}

impl Encoder for Dynamic {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, item: DynamicMessage, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&item.encode_to_vec());
        Ok(())
    }
}

impl Decoder for Dynamic {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let decoded = DynamicMessage::decode(self.0.output(), buffer);
        decoded
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

async fn call(
    channel: &Channel,
    pool: &DescriptorPool,
    service: &str,
    method: &str,
    fields: &[(&str, Value)],
) -> Result<DynamicMessage, Status> {
    let service = pool.get_service_by_name(service).unwrap();
    let method = service.methods().find(|found| found.name() == method).unwrap();
    let mut message = DynamicMessage::new(method.input());
    for (name, value) in fields {
        message.set_field_by_name(name, value.clone());
    }
    let path = format!("/{}/{}", service.full_name(), method.name());
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let reply = client.unary(Request::new(message), path.parse().unwrap(), Dynamic(method));
    Ok(Box::pin(reply).await?.into_inner())
}

fn text(message: &DynamicMessage, field: &str) -> String {
    message
        .get_field_by_name(field)
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned()
}

#[tokio::test]
async fn a_client_that_knows_only_reflection_lists_services_and_claims() {
    let daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let channel = Box::pin(channel(&daemon)).await;
    let services = Box::pin(services(&channel)).await;
    for service in ["Agent", "Claims", "Node", "Pools", "Templates"] {
        assert!(
            services.contains(&format!("sandbox.v1.{service}")),
            "{services:?}"
        );
    }
    assert!(
        !services.iter().any(|service| service.contains("Control")),
        "{services:?}"
    );
    let control = MessageRequest::FileContainingSymbol("sandbox.v1.AgentControl".to_owned());
    assert_eq!(ask(&channel, control).await.unwrap_err().code(), Code::NotFound);

    let claims = "sandbox.v1.Claims";
    let pool = describe(&channel, claims).await;
    let wanted = [
        ("pool", Value::String("default".to_owned())),
        ("lease_secs", Value::U32(60)),
    ];
    let claim = call(&channel, &pool, claims, "Claim", &wanted).await.unwrap();
    let id = text(&claim, "sandbox");
    assert!(id.starts_with("sb_") && text(&claim, "token").starts_with("sbt_"));
    assert_eq!(text(&claim, "pool"), "default");
    assert_eq!(
        claim.get_field_by_name("tier").unwrap().as_enum_number(),
        Some(1),
        "warm"
    );
    let named = [("sandbox", Value::String(id.clone()))];
    let row = call(&channel, &pool, claims, "Get", &named).await.unwrap();
    assert_eq!(text(&row, "sandbox"), id);
    let released = call(&channel, &pool, claims, "Release", &named).await.unwrap();
    assert_eq!(
        released.get_field_by_name("already").unwrap().as_bool(),
        Some(false)
    );
    let unknown = [("pool", Value::String("absent".to_owned()))];
    let error = call(&channel, &pool, claims, "Claim", &unknown)
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}
