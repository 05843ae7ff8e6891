use std::{
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::Request;
use http_body_util::BodyExt as _;
use sandbox_protocol::{limits, v1};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    sync::{mpsc, watch},
};
use tonic::{body::Body, service::Routes};

use super::{
    fake::{Client, Desk, Reply, Sandboxes, agent, forwarding, serve, to},
    *,
};
use crate::{
    agent::Local,
    clock::Clock,
    link::{
        self, Link,
        fake::{opened, opened_as, read_all, reply, send_all, status, within},
    },
    tasks,
};

/// A guest that sends back what it gets: the headers it saw in `x-saw`, the body as it is.
async fn mirror(request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let saw: Vec<_> = request
        .headers()
        .iter()
        .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
        .collect();
    let saw = format!("{} {}", request.uri(), saw.join(";"));
    let mut out = respond.send_response(reply(), false).unwrap();
    let mut body = request.into_body();
    if let Ok(all) = read_all(&mut body).await {
        let mut said = saw.into_bytes();
        said.push(b'|');
        said.extend(all);
        drop(send_all(&mut out, said.into()).await);
        drop(out.send_trailers(status("0")));
    }
}

async fn guest<H, F>(handler: H) -> (Arc<Sandboxes>, sandbox_protocol::id::SandboxId, Desk, Client)
where
    H: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (opened, _task) = opened(Clock::host(), handler).await;
    let sandboxes = Arc::new(Sandboxes::default());
    let sandbox = sandboxes.add(1, opened.link, "sbt_right");
    let desk = forwarding(&sandboxes);
    let client = Client::unix(&desk).await;
    (sandboxes, sandbox, desk, client)
}

#[tokio::test]
async fn inv_13_a_guest_never_sees_a_token() {
    let (sandboxes, sandbox, _desk, client) = guest(mirror).await;
    let request = to(sandbox, "sbt_right", "Exec")
        .header("grpc-timeout", "9S")
        .header("x-secret-bin", "c2VjcmV0")
        .header("agent-proto-min", "1")
        .header("sandbox-trace", "1");
    let reply = client.call(request, b"sbt_body").await;
    let said = String::from_utf8(reply.data.clone()).unwrap();
    assert_eq!(
        said,
        "http://silkd/sandbox.v1.Agent/Exec content-type=application/grpc;te=trailers;grpc-timeout=9S|sbt_body"
    );
    assert_eq!(reply.reason(), (String::new(), "guest".into()));
    assert_eq!(reply.headers["sandbox-origin"], "guest");
    let id = reply.headers["sandbox-request-id"].clone();
    assert!(id.to_str().unwrap().starts_with("rq_"));
    assert_eq!(reply.trailers["sandbox-request-id"], id);
    assert_eq!(sandboxes.uses.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_trace_counts_the_hosts_part() {
    use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
    use prost::Message as _;
    let (_, sandbox, _desk, client) = guest(mirror).await;
    let reply = client.call(to(sandbox, "sbt_right", "Info"), b"").await;
    assert!(!reply.trailers.contains_key("sandbox-work-bin"));
    let traced = to(sandbox, "sbt_right", "Info").header("sandbox-trace", "1");
    let reply = client.call(traced, b"").await;
    let work = STANDARD_NO_PAD
        .decode(&reply.trailers["sandbox-work-bin"])
        .unwrap();
    let work = v1::Work::decode(work.as_slice()).unwrap();
    assert_eq!((work.guest_round_trips, work.writes), (1, 0));
    let mut steps: Vec<_> = work.steps_us.keys().map(String::as_str).collect();
    steps.sort_unstable();
    assert_eq!(steps, ["body", "find", "guest"]);
}

#[tokio::test]
async fn unknown_wrong_and_missing_read_the_same() {
    let (sandboxes, sandbox, desk, _operator) = guest(mirror).await;
    let client = Client::stranger(&desk).await;
    let unknown = sandbox_protocol::id::SandboxId::from_random([9; 16]);
    let mut told = Vec::new();
    for request in [
        to(unknown, "sbt_right", "Exec"),
        to(sandbox, "sbt_wrong", "Exec"),
        to(sandbox, "sba_wrong", "Exec"),
        agent("Exec").header("sandbox-id", sandbox.to_string()),
        agent("Exec").header("sandbox-id", "no id at all"),
        agent("Exec")
            .header("sandbox-id", sandbox.to_string())
            .header("authorization", "Basic sbt_right"),
    ] {
        let mut reply = client.call(request, b"x").await;
        assert_eq!(reply.reason(), ("SANDBOX_NOT_FOUND".into(), "host".into()));
        let id = reply.trailers.remove("sandbox-request-id").unwrap();
        let details = reply.trailers.remove("grpc-status-details-bin").unwrap();
        told.push((reply.trailers.clone(), details.len(), id.len(), reply.data));
    }
    assert!(told.windows(2).all(|two| two[0] == two[1]), "{told:#?}");
    assert_eq!(sandboxes.uses.load(Ordering::SeqCst), 0);

    let reply = client.call(agent("Exec"), b"x").await;
    assert_eq!(reply.reason(), ("FIELD_INVALID".into(), "host".into()));
    // An operator opens any.
    let reply = client.call(to(sandbox, "sba_op", "Info"), b"x").await;
    assert_eq!(reply.reason().1, "guest");
}

#[tokio::test]
async fn inv_18_control_unimplemented() {
    let (_, sandbox, _desk, client) = guest(mirror).await;
    for path in [
        "/sandbox.v1.AgentControl/Renew",
        "/sandbox.v1.Agent/../sandbox.v1.AgentControl/Renew",
        "/sandbox.v1.Agent/Exec/x",
        "/sandbox.v1.Agent%2fExec",
        "/nothing",
    ] {
        let request = to(sandbox, "sbt_right", "Exec").uri(format!("http://host{path}"));
        let reply = client.call(request, b"x").await;
        assert_eq!(reply.status().code(), tonic::Code::Unimplemented, "{path}");
        assert_eq!(reply.reason().1, "host", "{path}");
    }
}

#[tokio::test]
async fn inv_19_old_agent() {
    let (_, sandbox, _desk, client) = guest(mirror).await;
    let request = to(sandbox, "sbt_right", "Exec").header("agent-proto-min", "2");
    let reply = client.call(request, b"x").await;
    assert_eq!(reply.reason(), ("AGENT_TOO_OLD".into(), "host".into()));
    let request = to(sandbox, "sbt_right", "Exec").header("grpc-encoding", "gzip");
    let reply = client.call(request, b"x").await;
    assert_eq!(reply.status().code(), tonic::Code::Unimplemented);
}

#[tokio::test]
async fn old_agent_is_refused_not_misread() {
    let (told, mut heard) = mpsc::channel(8);
    let handler = move |request: Request<RecvStream>, respond: SendResponse<Bytes>| {
        told.try_send(request.uri().path().to_owned()).unwrap();
        mirror(request, respond)
    };
    // It knows the first protocol only, whatever this host knows by then.
    let first = v1::LinkHello {
        proto_min: 1,
        proto_max: 1,
        ..link::fake::hello()
    };
    let (opened, _task) = opened_as(first.clone(), Clock::host(), handler).await;
    let opened = opened.unwrap();
    assert_eq!(opened.proto, 1);
    let sandboxes = Arc::new(Sandboxes::default());
    let sandbox = sandboxes.add_with(1, opened.link.clone(), opened.proto, "sbt_right");
    let desk = forwarding(&sandboxes);
    let client = Client::unix(&desk).await;
    // A message with a field of a later protocol, number 1000, and a method of one. The guest would drop the one in
    // silence.
    let body = b"\0\0\0\0\x03\xc0\x3e\x01";
    for method in ["Exec", "Write", "Info", "Later"] {
        let request = to(sandbox, "sbt_right", method).header("agent-proto-min", "2");
        let reply = client.call(request, body).await;
        assert_eq!(
            reply.reason(),
            ("AGENT_TOO_OLD".into(), "host".into()),
            "{method}"
        );
        let status = reply.status();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        assert_eq!(
            status.message(),
            "this call needs agent protocol 2, the guest has 1"
        );
        assert!(reply.data.is_empty());
    }
    // Not one of them reached it; what it can read does, as it is.
    let request = to(sandbox, "sbt_right", "Exec").header("agent-proto-min", "1");
    let reply = client.call(request, body).await;
    assert!(reply.data.ends_with(body), "{:?}", reply.data);
    assert_eq!(within(heard.recv()).await.unwrap(), "/sandbox.v1.Agent/Exec");
    assert!(heard.is_empty());
    assert_eq!(sandboxes.uses.load(Ordering::SeqCst), 0);

    // One below what this host still speaks gets no call at all: there is no link.
    let ancient = v1::LinkHello {
        proto_min: limits::PROTO_MIN - 1,
        proto_max: limits::PROTO_MIN - 1,
        ..first
    };
    let (opened, task) = opened_as(ancient, Clock::host(), mirror).await;
    let refused = opened.unwrap_err();
    assert!(
        matches!(refused, link::LinkError::NoCommonProto { max, .. } if max < limits::PROTO_MIN),
        "{refused}"
    );
    within(task).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_is_a_reset_for_a_silent_guest() {
    let (told, mut events) = mpsc::channel(8);
    let handler = move |request: Request<RecvStream>, mut respond: SendResponse<Bytes>| {
        let told = told.clone();
        async move {
            let late = request.uri().path().ends_with("Late");
            let mut out = late.then(|| respond.send_response(reply(), false).unwrap());
            told.send(None).await.unwrap();
            let reset = match &mut out {
                Some(out) => std::future::poll_fn(|cx| out.poll_reset(cx)).await,
                None => std::future::poll_fn(|cx| respond.poll_reset(cx)).await,
            };
            told.send(reset.ok()).await.unwrap();
            drop(request);
        }
    };
    let (sandboxes, sandbox, desk, _client) = guest(handler).await;
    // h2 itself as the client: it resets a call whose handles are dropped, which is what is to be seen here.
    let stream = UnixStream::connect(&desk.path).await.unwrap();
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tasks::spawn("client", async {
        drop(connection.await);
    });
    let open = |method| {
        let request = to(sandbox, "sbt_right", method).body(()).unwrap();
        let mut send = send.clone();
        // The request goes on: its body has no end.
        send.send_request(request, false).unwrap()
    };
    // While no head has come.
    let call = open("Early");
    assert_eq!(within(events.recv()).await, Some(None));
    drop(call);
    assert_eq!(within(events.recv()).await, Some(Some(h2::Reason::CANCEL)));
    // While the body is awaited.
    let (response, kept) = open("Late");
    let response = within(response).await.unwrap();
    assert_eq!(within(events.recv()).await, Some(None));
    drop((response, kept));
    assert_eq!(within(events.recv()).await, Some(Some(h2::Reason::CANCEL)));
    // With its whole connection.
    let (response, _kept) = open("Late");
    let _response = within(response).await.unwrap();
    assert_eq!(within(events.recv()).await, Some(None));
    connection.abort();
    assert_eq!(within(events.recv()).await, Some(Some(h2::Reason::CANCEL)));
    within(desk.server.stop(Duration::ZERO)).await;
    assert_eq!(sandboxes.uses.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn inv_17_stalled_readers() {
    let handler = |request: Request<RecvStream>, mut respond: SendResponse<Bytes>| async move {
        if request.uri().path().ends_with("Flood") {
            let mut out = respond.send_response(reply(), false).unwrap();
            drop(send_all(&mut out, Bytes::from(vec![0; 2_000_000])).await);
        } else {
            mirror(request, respond).await;
        }
    };
    let (_, sandbox, _desk, client) = guest(handler).await;
    let mut unread = Vec::new();
    for _ in 0..100 {
        let request = to(sandbox, "sbt_right", "Flood").body(Body::empty()).unwrap();
        unread.push(client.send(request).await);
    }
    let reply = client.call(to(sandbox, "sbt_right", "Exec"), &[7; 200_000]).await;
    assert!(reply.data.ends_with(&[7; 200_000]));
    drop(unread);
}

#[tokio::test]
async fn a_guest_that_lies_is_cut_to_size() {
    let handler = |request: Request<RecvStream>, mut respond: SendResponse<Bytes>| async move {
        let mut forged = status("0");
        for (name, value) in [
            ("sandbox-origin", "host".to_owned()),
            ("sandbox-work-bin", "AAAA".to_owned()),
            ("sandbox-request-id", "rq_forged".to_owned()),
            ("x-other", "y".to_owned()),
            ("grpc-message", "m".repeat(3000)),
        ] {
            forged.insert(name, value.parse().unwrap());
        }
        match request.uri().path().rsplit('/').next().unwrap() {
            "Front" => {
                let mut head = reply();
                head.headers_mut().extend(forged);
                drop(respond.send_response(head, true));
            }
            "Behind" => {
                let mut head = reply();
                head.headers_mut()
                    .insert("sandbox-origin", "host".parse().unwrap());
                let mut out = respond.send_response(head, false).unwrap();
                drop(out.send_trailers(forged));
            }
            "Bare" => {
                let mut out = respond.send_response(reply(), false).unwrap();
                drop(out.send_data(Bytes::from_static(b"half"), true));
            }
            "Http" => {
                let mut head = reply();
                *head.status_mut() = http::StatusCode::FORBIDDEN;
                drop(respond.send_response(head, true));
            }
            "Reset" => {
                let mut out = respond.send_response(reply(), false).unwrap();
                out.send_reset(h2::Reason::REFUSED_STREAM);
            }
            "Huge" => {
                let mut head = reply();
                head.headers_mut()
                    .insert("x-big", "v".repeat(40_000).parse().unwrap());
                drop(respond.send_response(head, true));
            }
            _ => mirror(request, respond).await,
        }
    };
    let (_, sandbox, _desk, client) = guest(handler).await;
    for (method, code, origin) in [
        ("Front", tonic::Code::Ok, "guest"),
        ("Behind", tonic::Code::Ok, "guest"),
        ("Bare", tonic::Code::Unknown, "guest"),
        ("Http", tonic::Code::Unknown, "guest"),
        ("Reset", tonic::Code::Unavailable, "guest"),
        ("Huge", tonic::Code::Unavailable, "host"),
    ] {
        let reply = client.call(to(sandbox, "sbt_right", method), b"").await;
        assert_eq!(reply.status().code(), code, "{method}: {reply:?}");
        assert_eq!(reply.reason().1, origin, "{method}");
        for name in ["sandbox-work-bin", "x-other", "x-big"] {
            assert!(!reply.trailers.contains_key(name) && !reply.headers.contains_key(name));
        }
        assert_ne!(reply.trailers["sandbox-request-id"], "rq_forged");
        let message = reply.trailers.get("grpc-message");
        assert!(message.is_none_or(|message| message.len() <= 1024));
    }
    // It is none the worse for it.
    let reply = client.call(to(sandbox, "sbt_right", "Exec"), b"still").await;
    assert!(reply.data.ends_with(b"|still"));
}

#[tokio::test]
async fn a_lost_link_ends_the_call_in_the_hosts_name() {
    let (stop, stopped) = watch::channel(false);
    let handler = move |request: Request<RecvStream>, mut respond: SendResponse<Bytes>| {
        let mut stopped = stopped.clone();
        async move {
            let mut out = respond.send_response(reply(), false).unwrap();
            out.send_data(Bytes::from_static(b"begun"), false).unwrap();
            drop(stopped.wait_for(|stop| *stop).await);
            drop((request, out));
        }
    };
    let (opened, task) = opened(Clock::host(), handler).await;
    let sandboxes = Arc::new(Sandboxes::default());
    let sandbox = sandboxes.add(1, opened.link.clone(), "sbt_right");
    let other = sandboxes.add(2, Link::in_process(Arc::new(Local), Clock::host()), "sbt_right");
    let desk = forwarding(&sandboxes);
    let client = Client::unix(&desk).await;
    let request = to(sandbox, "sbt_right", "Exec").body(Body::empty()).unwrap();
    let mut response = client.send(request).await;
    let first = within(response.frame()).await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap(), "begun");
    opened.link.close();
    let lost = Reply::read(response).await;
    assert_eq!(lost.reason(), ("AGENT_LOST".into(), "host".into()));
    assert_eq!(lost.status().code(), tonic::Code::Unavailable);
    // From now on at once; and another guest's calls are not touched.
    let reply = client.call(to(sandbox, "sbt_right", "Exec"), b"").await;
    assert_eq!(reply.reason(), ("AGENT_LOST".into(), "host".into()));
    let reply = client.call(to(other, "sbt_right", "Info"), &[0; 5]).await;
    assert_eq!(reply.status().code(), tonic::Code::Ok);
    drop(stop);
    within(task).await.unwrap();
}

#[tokio::test]
async fn generated_clients_and_services_meet_through_it() {
    let sandboxes = Arc::new(Sandboxes::default());
    let sandbox = sandboxes.add(1, Link::in_process(Arc::new(Local), Clock::host()), "sbt_right");
    let desk = forwarding(&sandboxes);
    let mut client = v1::agent_client::AgentClient::new(Client::unix(&desk).await);
    let mut request = tonic::Request::new(v1::AgentInfoRequest {});
    request
        .metadata_mut()
        .insert("sandbox-id", sandbox.to_string().parse().unwrap());
    request
        .metadata_mut()
        .insert("authorization", "Bearer sbt_right".parse().unwrap());
    let reply = within(Box::pin(client.info(request))).await.unwrap();
    assert_eq!(reply.metadata().get("sandbox-origin").unwrap(), "guest");
    assert_eq!(reply.get_ref().state, 2);
}

#[tokio::test]
async fn stopping_lets_calls_end_within_its_grace_and_then_cuts_them() {
    let (told, mut seen) = mpsc::channel(8);
    let (go, gone) = watch::channel(false);
    let handler = move |request: Request<RecvStream>, mut respond: SendResponse<Bytes>| {
        let (told, mut gone) = (told.clone(), gone.clone());
        async move {
            let _request = request;
            let mut out = respond.send_response(reply(), false).unwrap();
            told.send(()).await.unwrap();
            drop(gone.wait_for(|go| *go).await);
            drop(out.send_trailers(status("0")));
        }
    };
    let (sandboxes, sandbox, desk, client) = guest(handler).await;
    let request = || to(sandbox, "sbt_right", "Exec").body(Body::empty()).unwrap();
    let open = client.send(request()).await;
    within(seen.recv()).await.unwrap();
    {
        let mut stop = std::pin::pin!(desk.server.stop(Duration::from_secs(3600)));
        assert!(futures_util::poll!(&mut stop).is_pending());
        go.send(true).unwrap();
        let reply = Reply::read(open).await;
        assert_eq!(reply.status().code(), tonic::Code::Ok);
        within(stop).await;
    }
    assert!(!desk.path.exists());

    go.send(false).unwrap();
    let desk = forwarding(&sandboxes);
    let client = Client::unix(&desk).await;
    let open = client.send(request()).await;
    within(seen.recv()).await.unwrap();
    within(desk.server.stop(Duration::ZERO)).await;
    assert!(within(open.collect()).await.is_err());
    assert_eq!(sandboxes.uses.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn what_does_not_speak_http_2_is_dropped() {
    let desk = serve(Routes::default());
    let mut stream = UnixStream::connect(&desk.path).await.unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut said = Vec::new();
    // A reset is as good as an end: what was sent is not all read.
    drop(within(stream.read_to_end(&mut said)).await);
    assert!(said.is_empty());
    within(desk.server.stop(Duration::ZERO)).await;
}

#[tokio::test(start_paused = true)]
async fn who_says_nothing_does_not_keep_a_place() {
    let desk = serve(Routes::default());
    let mut stream = UnixStream::connect(&desk.path).await.unwrap();
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
}

#[tokio::test]
async fn a_socket_is_taken_over_only_when_nobody_answers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api.sock");
    let listener = unix(&path, 0o660, Some(rustix::process::getgid().as_raw())).unwrap();
    let mode = std::fs::metadata(&path).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o660);
    assert_eq!(mode.gid(), rustix::process::getgid().as_raw());
    assert_eq!(listener.address(), format!("unix:{}", path.display()));
    assert!(matches!(unix(&path, 0o600, None), Err(ListenError::InUse { .. })));
    drop(listener);
    assert!(!path.exists());
    // Left behind by a daemon that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(unix(&path, 0o600, None).unwrap());
    crate::disk::write_atomic(&path, b"a file", 0o600).unwrap();
    assert!(matches!(
        unix(&path, 0o600, None),
        Err(ListenError::NotASocket { .. })
    ));
    assert!(path.exists());
}

#[tokio::test]
async fn tcp_is_plain_on_loopback_only_and_else_tls() {
    let any = "0.0.0.0:0".parse().unwrap();
    assert!(matches!(tcp(any, None), Err(ListenError::NeedsTls { .. })));

    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    crate::disk::write_atomic(&cert, made.cert.pem().as_bytes(), 0o600).unwrap();
    crate::disk::write_atomic(&key, made.signing_key.serialize_pem().as_bytes(), 0o600).unwrap();
    let certificates = Arc::new(Certificates::open(cert, key).unwrap());

    let loopback = "127.0.0.1:0".parse().unwrap();
    let plain = tcp(loopback, None).unwrap();
    let secure = tcp(loopback, Some(certificates)).unwrap();
    let (http, https) = (plain.address(), secure.address());
    let server = Server::start(vec![plain, secure], Routes::default(), RequestIds::new([1; 16]));

    let unknown = || Request::post("http://host/x.Y/Z").header("content-type", "application/grpc");
    let stream = TcpStream::connect(http.strip_prefix("http://").unwrap())
        .await
        .unwrap();
    let reply = Box::pin(Client::new(stream)).await.call(unknown(), b"").await;
    assert_eq!(reply.status().code(), tonic::Code::Unimplemented);

    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let mut config =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(https.strip_prefix("https://").unwrap())
        .await
        .unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = within(Box::pin(
        connector.connect("localhost".try_into().unwrap(), stream),
    ))
    .await
    .unwrap();
    let reply = Box::pin(Client::new(stream)).await.call(unknown(), b"").await;
    assert_eq!(reply.status().code(), tonic::Code::Unimplemented);
    within(server.stop(Duration::ZERO)).await;
}

#[tokio::test]
async fn sockets_of_systemd_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("passed.sock");
    let bound = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let listener = Listener::passed(bound.into(), None).unwrap();
    let server = Server::start(vec![listener], Routes::default(), RequestIds::new([1; 16]));
    let client = Client::new(UnixStream::connect(&path).await.unwrap()).await;
    let request = Request::post("http://host/x.Y/Z").header("content-type", "application/grpc");
    assert_eq!(
        client.call(request, b"").await.status().code(),
        tonic::Code::Unimplemented
    );
    within(server.stop(Duration::ZERO)).await;
    // It is systemd's to remove.
    assert!(path.exists());
}

#[tokio::test]
async fn health_and_reflection_are_served_and_control_is_not_listed() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let (health, routes) = Health::add(reflection(Routes::default())).await;
    let desk = serve(routes);
    let client = Client::unix(&desk).await;
    let mut check = HealthClient::new(client.clone());
    for (serving, status) in [(false, 2), (true, 1), (false, 2)] {
        health.set(serving).await;
        for service in ["", "sandbox.v1.Claims", "sandbox.v1.Agent"] {
            let request = HealthCheckRequest {
                service: service.into(),
            };
            let reply = within(Box::pin(check.check(request))).await.unwrap();
            assert_eq!(reply.get_ref().status, status, "{service}");
            assert_eq!(reply.metadata().get("sandbox-origin").unwrap(), "host");
        }
    }
    let ask = |request| {
        let mut reflection = ServerReflectionClient::new(client.clone());
        async move {
            let request = ServerReflectionRequest {
                host: String::new(),
                message_request: Some(request),
            };
            let mut replies = reflection
                .server_reflection_info(tokio_stream::once(request))
                .await
                .unwrap()
                .into_inner();
            replies
                .message()
                .await
                .unwrap()
                .unwrap()
                .message_response
                .unwrap()
        }
    };
    let listed = within(Box::pin(ask(MessageRequest::ListServices(String::new())))).await;
    let MessageResponse::ListServicesResponse(listed) = listed else {
        panic!("{listed:?}");
    };
    let names: Vec<_> = listed
        .service
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    assert!(names.contains(&"sandbox.v1.Claims") && names.contains(&"sandbox.v1.Agent"));
    assert!(!names.iter().any(|name| name.contains("Control")), "{names:?}");
    let symbol = "sandbox.v1.AgentControl".to_owned();
    let control = within(Box::pin(async {
        let mut reflection = ServerReflectionClient::new(client.clone());
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::FileContainingSymbol(symbol)),
        };
        let mut replies = reflection
            .server_reflection_info(tokio_stream::once(request))
            .await?
            .into_inner();
        replies.message().await
    }))
    .await;
    assert!(control.is_err(), "{control:?}");
}

/// A service with a bug.
#[derive(Clone)]
struct Broken;

impl tonic::server::NamedService for Broken {
    const NAME: &'static str = "x.Broken";
}

impl tower_service::Service<Request<Body>> for Broken {
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: Request<Body>) -> Self::Future {
        Box::pin(async { panic!("as a test has it") })
    }
}

#[tokio::test]
async fn a_panic_costs_its_call_only() {
    let desk = serve(Routes::new(Broken));
    let client = Client::unix(&desk).await;
    let request = || Request::post("http://host/x.Broken/Do").header("content-type", "application/grpc");
    for _ in 0..2 {
        let reply = client.call(request(), b"").await;
        assert_eq!(reply.reason(), ("BUG".into(), "host".into()));
        assert!(reply.trailers.contains_key("sandbox-request-id"));
    }
    within(desk.server.stop(Duration::ZERO)).await;
}
