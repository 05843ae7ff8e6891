//! Looking into TLS, from the commands that make the certificates to what a program of a sandbox is shown.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use harness::{Daemon, HANG, Setup, World, refused, sandboxd, within};
use rustls::{ClientConfig, RootCertStore, ServerConfig, crypto::ring};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, pem::PemObject as _};
use sandbox_sdk::{
    Client, Reason, Sandbox,
    v1::{EgressExplainRequest, EgressPolicy, EgressRule, TemplatesBuildRequest},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// An origin that speaks TLS and answers each connection's first request, and the root that it is proved by.
async fn world(dir: &Path) -> World {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["allowed.test".to_owned()]).unwrap();
    fs::write(dir.join("origin.pem"), cert.pem()).unwrap();
    let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key.into())
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    World::with_origin(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(mut tls) = acceptor.accept(stream).await else {
                return;
            };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                match tls.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => return,
                }
            }
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
            if tls.write_all(answer).await.is_ok() {
                drop(tls.shutdown().await);
            }
        }
    })
    .await
}

/// The configuration: the pool's policy looks into TLS of `allowed.test` for GET.
fn config(world: &World, dir: &Path) -> String {
    let port = world.port();
    let rules = format!(
        "[{{ id = \"in\", host = [\"allowed.test\"], ports = [{port}], intercept = true, methods = [\"GET\"] }}]"
    );
    format!(
        "{}egress.tls = {{ ca_dir = \"{}\", extra_roots = [\"{}\"] }}\n",
        world.config_with(&rules),
        dir.join("ca").display(),
        dir.join("origin.pem").display()
    )
}

async fn ca(dir: &Path, args: &[&str]) -> serde_json::Value {
    let at = dir.join("ca");
    let all = ["--json", "ca"].iter().chain(args).copied();
    let ran = sandboxd(all.chain(["--dir", at.to_str().unwrap()])).await;
    assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
    ran.value()
}

/// What a template that is built now has its guests trust.
fn trust(dir: &Path) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(dir.join("ca/bundle.pem")).unwrap() {
        roots.add(root.unwrap()).unwrap();
    }
    roots
}

async fn door(sandbox: &Sandbox) -> SocketAddr {
    let ran = sandbox.exec(["printenv", "http_proxy"]).output().await.unwrap();
    let text = String::from_utf8(ran.stdout.to_vec()).unwrap();
    text.trim().strip_prefix("http://").unwrap().parse().unwrap()
}

/// The status line of a request through a tunnel, or what hindered it.
async fn ask(sandbox: &Sandbox, roots: RootCertStore, method: &str, port: u16) -> String {
    let door = door(sandbox).await;
    let asking = Box::pin(async {
        let mut stream = TcpStream::connect(door).await.unwrap();
        let target = format!("allowed.test:{port}");
        let connect = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n");
        stream.write_all(connect.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let status = String::from_utf8_lossy(&head).lines().next().unwrap().to_owned();
        if !status.starts_with("HTTP/1.1 200") {
            return status;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("allowed.test").unwrap();
        let mut tls = match TlsConnector::from(Arc::new(config)).connect(name, stream).await {
            Ok(tls) => tls,
            Err(error) => return format!("{error}"),
        };
        let request = format!("{method} / HTTP/1.1\r\nhost: {target}\r\nconnection: close\r\n\r\n");
        tls.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        tls.read_to_end(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer)
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned()
    });
    within(HANG, asking).await
}

async fn rebuild(client: &Client) {
    let request = TemplatesBuildRequest {
        name: "default".to_owned(),
        image: "busybox".to_owned(),
        rebuild: true,
        ..TemplatesBuildRequest::default()
    };
    let building = client.templates().build(request).await.unwrap();
    building.finish(|_| {}).await.unwrap();
}

/// What explain says of a request inside: its reason, and whether the door would see it.
async fn explained(client: &Client, sandbox: &Sandbox, method: &str, port: u16) -> (String, bool) {
    let question = EgressExplainRequest {
        sandbox: sandbox.id().to_string(),
        target: format!("https://allowed.test:{port}/"),
        method: method.to_owned(),
        ..EgressExplainRequest::default()
    };
    let said = client.egress().explain(question).await.unwrap();
    (said.reason, said.visible)
}

/// Until the pool is refused for its template.
async fn until_refused(daemon: &Daemon) {
    let is_refused = |pool: &sandbox_sdk::v1::Pool| {
        let parked = pool.parked.as_ref();
        parked.is_some_and(|parked| parked.reason == "CA_NOT_IN_TEMPLATE") && pool.warm == 0
    };
    daemon.until_pool("default", is_refused).await;
}

#[tokio::test]
async fn tls_ca_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path()).await;
    let (dir, port) = (dir.path(), world.port());
    let mut daemon = Setup::stub().warm(2).config(&config(&world, dir)).start().await;
    daemon.until_warm(2).await;
    let client = daemon.client().await;

    // Without certificates nothing passes unseen, and a claim that wants to look is told so before it takes anything.
    let sandbox = client.claim("default").await.unwrap();
    assert_eq!(
        ask(&sandbox, RootCertStore::empty(), "GET", port).await,
        "HTTP/1.1 503 ca_unavailable"
    );
    let said = explained(&client, &sandbox, "GET", port).await;
    assert_eq!(said, ("ca_unavailable".to_owned(), true));
    daemon.until_warm(2).await;
    let looking = || EgressPolicy {
        rules: vec![EgressRule {
            id: "in".to_owned(),
            host: vec!["allowed.test".to_owned()],
            ports: vec![port.into()],
            intercept: true,
            ..EgressRule::default()
        }],
        ..EgressPolicy::default()
    };
    refused(
        client.claim("default").egress(looking()).await,
        Reason::CaNotInTemplate,
    );
    assert_eq!(daemon.until_warm(2).await.warm, 2);

    // A template from before the root is refused until it is built anew.
    ca(dir, &["init"]).await;
    ca(dir, &["issue-node"]).await;
    client.node().reload().await.unwrap();
    until_refused(&daemon).await;
    refused(client.claim("default").await, Reason::CaNotInTemplate);
    rebuild(&client).await;
    daemon.until_warm(2).await;
    let first = client.claim("default").egress(looking()).await.unwrap();
    let before = trust(dir);
    assert_eq!(ask(&first, before.clone(), "GET", port).await, "HTTP/1.1 200 OK");
    assert_eq!(
        ask(&first, before.clone(), "PUT", port).await,
        "HTTP/1.1 403 method_not_allowed"
    );

    for (method, reason) in [("GET", ""), ("PUT", "method_not_allowed")] {
        let said = explained(&client, &first, method, port).await;
        assert_eq!(said, (reason.to_owned(), true));
    }

    // Both roots; the old one signs until templates trust the new one.
    let rotated = ca(dir, &["rotate"]).await;
    assert_eq!(rotated["bundle"].as_array().unwrap().len(), 2);
    assert!(rotated["cross"].is_string(), "{rotated}");
    client.node().reload().await.unwrap();
    assert_eq!(ask(&first, before.clone(), "GET", port).await, "HTTP/1.1 200 OK");
    ca(dir, &["issue-node"]).await;
    let error = refused(client.node().reload().await, Reason::ReloadRefused);
    assert!(error.message().contains("CA_NOT_IN_TEMPLATE"), "{error:?}");
    assert_eq!(ask(&first, before.clone(), "GET", port).await, "HTTP/1.1 200 OK");
    rebuild(&client).await;
    daemon.until_warm(2).await;
    let second = client.claim("default").await.unwrap();
    let both = trust(dir);
    for (sandbox, roots) in [(&first, &before), (&second, &both)] {
        assert_eq!(ask(sandbox, roots.clone(), "GET", port).await, "HTTP/1.1 200 OK");
    }

    // The switch: the old root vouches for the new one, also behind a restart.
    client.node().reload().await.unwrap();
    for _ in 0..2 {
        for (sandbox, roots) in [(&first, &before), (&second, &both)] {
            assert_eq!(ask(sandbox, roots.clone(), "GET", port).await, "HTTP/1.1 200 OK");
        }
        daemon.kill9().await;
        daemon.start_again().await;
    }
    let client = daemon.client().await;
    // The old root's end.
    ca(dir, &["rotate", "--finish"]).await;
    client.node().reload().await.unwrap();
    let third = client.claim("default").await.unwrap();
    assert_eq!(ask(&second, both, "GET", port).await, "HTTP/1.1 200 OK");
    assert_eq!(ask(&third, trust(dir), "GET", port).await, "HTTP/1.1 200 OK");
    let said = ask(&first, before, "GET", port).await;
    assert!(said.contains("UnknownIssuer"), "{said}");
    let checked = sandboxd(["ca", "check", "--config", daemon.config_file().to_str().unwrap()]).await;
    assert_eq!(checked.code, 0, "{} {}", checked.text(), checked.stderr);
    assert!(
        checked
            .text()
            .contains("template default-none-small: trusts the root"),
        "{}",
        checked.text()
    );
    client.flush().await;
}
