//! Claims and commands in virtual machines.

use bytes::Bytes;
use futures_util::future;
use harness::{HANG, within};
use http::{Request, StatusCode};
use sandbox_sdk::{
    How, Reason, SandboxHandle,
    v1::{Accel, AgentState, Engine, Tier},
};
use tokio::net::UnixStream;

use crate::node::{Node, sh};

#[tokio::test]
async fn a_clone_is_claimed_by_library_and_by_command_and_nothing_is_left() {
    let node = Node::warm(2).await;
    let client = node.client().await;
    let sandbox = client.claim("default").await.unwrap();
    assert_eq!((sandbox.tier(), sandbox.pool()), (Tier::Warm, "default"));
    assert_eq!(sandbox.engine(), Engine::Qemu);
    assert!(matches!(sandbox.accel(), Accel::Kvm | Accel::Tcg));
    let info = sandbox.agent().await.unwrap();
    assert!(info.pid1, "silkd is the first process of a guest");
    assert_eq!(info.state(), AgentState::Ready);
    let output = sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 7"]);
    let output = output.output().await.unwrap();
    assert_eq!(output.status.how, How::Code(7));
    assert_eq!(
        (output.stdout_text().as_ref(), output.stderr_text().as_ref()),
        ("out\n", "err\n")
    );

    let claim = node.ctl().json(["claim", "--pool", "default"]).await;
    assert_eq!(
        (claim["tier"].as_str(), claim["engine"].as_str()),
        (Some("warm"), Some("qemu"))
    );
    let (id, token) = (
        claim["sandbox"].as_str().unwrap(),
        claim["token"].as_str().unwrap(),
    );
    let ctl = node.ctl().token(token);
    let ran = ctl.run(["exec", id, "--", "sh", "-c", "uname; exit 3"]).await;
    assert_eq!((ran.code, ran.text().as_str()), (3, "Linux\n"), "{}", ran.stderr);
    let ran = ctl
        .run_with(["exec", "-i", id, "--", "wc", "-c"], &[0, 255, 10, 13])
        .await;
    assert_eq!((ran.code, ran.text().trim()), (0, "4"), "{}", ran.stderr);
    let ran = node.ctl().run(["run", "--", "sh", "-c", "kill -9 $$"]).await;
    assert_eq!(ran.code, 128 + 9, "{}", ran.stderr);

    let released = node.ctl().json(["release", id]).await;
    assert_eq!(released["already"], false);
    assert!(!sandbox.release().await.unwrap().already);
    drop(client);
    node.stops_clean().await;
}

#[tokio::test]
async fn stream_through_sandboxd_is_the_same() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    let sent = noise(4 << 20);
    let output = sandbox
        .exec(["sh", "-c", "cat; echo end >&2; exit 9"])
        .stdin(sent.clone())
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.how, How::Code(9));
    assert!(output.stdout == sent, "bytes in are bytes out");
    assert_eq!(output.stderr, b"end\n");
    assert_eq!(output.status.stdout_bytes, sent.len() as u64);
    assert_eq!(output.status.stdin_discarded, 0);

    // Bytes that look like the boundary of the link are just bytes.
    let mut boundary = vec![0; 256 * 1024];
    boundary.extend_from_slice(b"\x01SILKHELOSILKHELO");
    let output = sandbox
        .exec(["cat"])
        .stdin(boundary.clone())
        .output()
        .await
        .unwrap();
    assert!(output.stdout == boundary, "bytes in are bytes out");

    // A hundred small ones at once are not mixed up.
    let many = (0..100).map(|n: u32| {
        let sandbox = sandbox.clone();
        async move {
            let output = sandbox
                .exec(["echo".to_owned(), n.to_string()])
                .output()
                .await
                .unwrap();
            assert_eq!(output.stdout_text(), format!("{n}\n"));
        }
    });
    future::join_all(many).await;
}

/// Bytes without a pattern, the same ones each time.
fn noise(length: usize) -> Bytes {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    });
    bytes.take(length).collect()
}

/// Calls a method of a guest as any gRPC client could, and gives the gRPC status.
async fn status_of(node: &Node, sandbox: &SandboxHandle, token: &str, path: &str) -> String {
    let stream = UnixStream::connect(node.dir().join("api.sock")).await.unwrap();
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("authorization", format!("Bearer {token}"))
        .header("sandbox-id", sandbox.id());
    let mut send = send.ready().await.unwrap();
    let (response, mut body) = send.send_request(request.body(()).unwrap(), false).unwrap();
    body.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
    let response = within(HANG, response).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut status = response.headers().get("grpc-status").cloned();
    let mut body = response.into_body();
    while let Some(data) = within(HANG, body.data()).await {
        let length = data.unwrap().len();
        body.flow_control().release_capacity(length).unwrap();
    }
    if let Some(trailers) = within(HANG, body.trailers()).await.unwrap() {
        status = status.or_else(|| trailers.get("grpc-status").cloned());
    }
    drop((send, body));
    connection.abort();
    status.unwrap().to_str().unwrap().to_owned()
}

#[tokio::test]
async fn control_service_is_unreachable_for_clients() {
    let node = Node::warm(1).await;
    let claim = node.ctl().json(["claim"]).await;
    let (id, token) = (
        claim["sandbox"].as_str().unwrap(),
        claim["token"].as_str().unwrap(),
    );
    let sandbox = node
        .client()
        .await
        .sandbox(id, Some(sandbox_sdk::Token::new(token).unwrap()));
    let info = "/sandbox.v1.Agent/Info";
    assert_eq!(
        status_of(&node, &sandbox, token, info).await,
        "0",
        "the guest answers"
    );
    for method in [
        "PowerOff", "Adopt", "Quiesce", "Renew", "Resume", "Clock", "SetClaim", "Events",
    ] {
        let path = format!("/sandbox.v1.AgentControl/{method}");
        assert_eq!(status_of(&node, &sandbox, token, &path).await, "12", "{method}");
    }
    // Nor by a detour.
    for path in [
        "/sandbox.v1.Agent/../sandbox.v1.AgentControl/PowerOff",
        "/sandbox.v1.Agent//PowerOff",
    ] {
        assert_ne!(status_of(&node, &sandbox, token, path).await, "0", "{path}");
    }
    assert_eq!(sh(&sandbox, "echo alive").await, "alive\n");
    // With another sandbox's id or a wrong token there is no such sandbox.
    let wrong = token.replace("sbt_", "sbt_A");
    let stranger = node
        .client()
        .await
        .sandbox(id, Some(sandbox_sdk::Token::new(&wrong).unwrap()));
    let refused = stranger.exec(["true"]).output().await.unwrap_err();
    assert!(refused.is(Reason::SandboxNotFound), "{refused}");
}
