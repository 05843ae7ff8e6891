//! Looking into TLS.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{AlertDescription, RootCertStore};
use sandbox_protocol::door::DoorReason;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio_rustls::client::TlsStream;

use super::origin::{Inspected, Proof, TlsOrigin, World, client};
use crate::{
    egress::{
        DoorKind, Outcome,
        tests::{Bench, rule, secret_terms, secrets, socks5, tunnel, within},
    },
    policy::{Effect, RuleFields},
    tasks,
};

const DOORS: [DoorKind; 2] = [DoorKind::Http, DoorKind::Socks5];

/// A rule that looks inside.
pub(super) fn inside(id: &str, host: &str, port: u16) -> RuleFields {
    RuleFields {
        intercept: true,
        ..rule(id, host, &[port])
    }
}

/// A tunnel that stands.
pub(super) async fn open(bench: &Bench, kind: DoorKind, host: &str, port: u16) -> DuplexStream {
    let mut io = bench.connect(kind);
    match kind {
        DoorKind::Http => {
            let status = tunnel(&mut io, &format!("{host}:{port}")).await;
            assert_eq!(status, "HTTP/1.1 200 Connection established");
        }
        DoorKind::Socks5 | DoorKind::Dns => assert_eq!(socks5(&mut io, host, port).await, 0),
    }
    io
}

/// The reasons of all denials so far.
pub(super) fn denials(bench: &Bench) -> Vec<DoorReason> {
    let (decided, _, _) = bench.egress.decisions().read(Some(0));
    decided
        .iter()
        .filter_map(|decided| match decided.outcome {
            Outcome::Denied(reason) => Some(reason),
            Outcome::Allowed(_) => None,
        })
        .collect()
}

fn alert(error: &std::io::Error) -> Option<AlertDescription> {
    if let rustls::Error::AlertReceived(alert) = error.get_ref()?.downcast_ref()? {
        return Some(*alert);
    }
    None
}

/// What a client was answered.
#[derive(Debug)]
struct Told {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
    trailers: Option<HeaderMap>,
}

impl Told {
    fn reason(&self) -> &str {
        self.headers
            .get("sandbox-deny-reason")
            .map_or("", |reason| reason.to_str().unwrap())
    }
}

async fn told(response: http::Response<hyper::body::Incoming>) -> Told {
    let (parts, body) = response.into_parts();
    let body = within(body.collect()).await.unwrap();
    let trailers = body.trailers().cloned();
    Told {
        status: parts.status,
        headers: parts.headers,
        body: String::from_utf8(body.to_bytes().to_vec()).unwrap(),
        trailers,
    }
}

type Http1 = hyper::client::conn::http1::SendRequest<Full<Bytes>>;
type Http2 = hyper::client::conn::http2::SendRequest<Full<Bytes>>;

pub(super) async fn http1(tls: Box<TlsStream<DuplexStream>>) -> Http1 {
    let (sender, connection) = within(Box::pin(hyper::client::conn::http1::handshake(TokioIo::new(tls))))
        .await
        .unwrap();
    drop(tasks::spawn("client", connection));
    sender
}

pub(super) async fn http2(tls: Box<TlsStream<DuplexStream>>) -> Http2 {
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls));
    let (sender, connection) = within(Box::pin(handshake)).await.unwrap();
    drop(tasks::spawn("client", connection));
    sender
}

fn request(method: &str, uri: &str, host: Option<&str>, body: &'static str) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(uri);
    if let Some(host) = host {
        request = request.header("host", host);
    }
    request.body(Full::new(Bytes::from(body))).unwrap()
}

async fn ask1(sender: &mut Http1, request: Request<Full<Bytes>>) -> Told {
    within(sender.ready()).await.unwrap();
    told(within(sender.send_request(request)).await.unwrap()).await
}

async fn ask2(sender: &mut Http2, request: Request<Full<Bytes>>) -> Told {
    within(sender.ready()).await.unwrap();
    told(within(sender.send_request(request)).await.unwrap()).await
}

/// A bench, its CA, and an origin that a rule looks into.
async fn bench(proof: Proof, alpn: &[&str]) -> (Bench, Inspected, TlsOrigin) {
    let bench = Bench::new().await;
    let inspected = Inspected::new(&bench);
    let origin = TlsOrigin::serve(&bench, &inspected.world, proof, alpn).await;
    bench.policy(vec![inside("t", "allowed.test", origin.port)]);
    bench.arm();
    (bench, inspected, origin)
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[tokio::test]
async fn tls_one_name_everywhere() {
    let (bench, inspected, origin) = bench(Proof::Good, &["h2", "http/1.1"]).await;
    let port = origin.port;
    let own = format!("allowed.test:{port}");
    for kind in DOORS {
        // CONNECT a, and another name or none in the ClientHello.
        for (name, sni) in [("other.test", true), ("allowed.test", false)] {
            let io = open(&bench, kind, "allowed.test", port).await;
            let error = client(io, inspected.trust(), name, sni, &[]).await.unwrap_err();
            assert_eq!(alert(&error), Some(AlertDescription::UnrecognisedName), "{error}");
            assert_eq!(denials(&bench).last(), Some(&DoorReason::SniMismatch));
        }
        // What is no TLS at all.
        let mut io = open(&bench, kind, "allowed.test", port).await;
        io.write_all(format!("GET / HTTP/1.1\r\nhost: {own}\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut rest = Vec::new();
        within(io.read_to_end(&mut rest)).await.unwrap();
        assert_eq!(denials(&bench).last(), Some(&DoorReason::BadFraming));
        assert_eq!(
            origin.connections.load(Ordering::SeqCst),
            0,
            "nothing was dialled"
        );

        // Another name in the request.
        for (uri, host) in [
            ("/", "other.test"),
            ("/", "allowed.test"),
            ("https://other.test/", &own),
        ] {
            let io = open(&bench, kind, "allowed.test", port).await;
            let tls = client(io, inspected.trust(), "allowed.test", true, &["http/1.1"])
                .await
                .unwrap();
            let mut sender = http1(tls).await;
            let told = ask1(&mut sender, request("GET", uri, Some(host), "")).await;
            assert_eq!(
                (told.status.as_u16(), told.reason()),
                (421, "authority_mismatch"),
                "{uri} {host}"
            );
            // The connection goes on, and the right name is served.
            let told = ask1(&mut sender, request("GET", "/x", Some(&own), "")).await;
            assert_eq!(told.body, format!("1 GET /x {own} "), "{told:?}");
        }
        let io = open(&bench, kind, "allowed.test", port).await;
        let tls = client(io, inspected.trust(), "allowed.test", true, &["h2"])
            .await
            .unwrap();
        let mut sender = http2(tls).await;
        let other = format!("https://other.test:{port}/");
        let told = ask2(&mut sender, request("GET", &other, None, "")).await;
        assert_eq!((told.status.as_u16(), told.reason()), (421, "authority_mismatch"));
        let told = ask2(
            &mut sender,
            request("GET", &format!("https://{own}/y"), Some("other.test"), ""),
        )
        .await;
        assert_eq!((told.status.as_u16(), told.reason()), (421, "authority_mismatch"));
        let told = ask2(&mut sender, request("GET", &format!("https://{own}/y"), None, "")).await;
        assert_eq!(told.body, format!("2 GET /y {own} "));
        assert_eq!(origin.connections.swap(0, Ordering::SeqCst), 4);
        assert!(
            origin
                .seen()
                .iter()
                .all(|seen| seen.contains(&own) && !seen.contains("via")),
            "{:?}",
            origin.seen()
        );
    }
    // An address has no name, and its leaf is of the address.
    bench.policy(vec![inside("a", "127.0.0.2", port)]);
    bench.arm();
    let io = open(&bench, DoorKind::Http, "127.0.0.2", port).await;
    let tls = client(io, inspected.trust(), "127.0.0.2", true, &["http/1.1"])
        .await
        .unwrap();
    let host = format!("127.0.0.2:{port}");
    let told = ask1(&mut http1(tls).await, request("GET", "/z", Some(&host), "")).await;
    assert_eq!(told.body, format!("1 GET /z {host} "));
    let io = open(&bench, DoorKind::Http, "127.0.0.2", port).await;
    let error = client(io, inspected.trust(), "allowed.test", true, &[])
        .await
        .unwrap_err();
    assert_eq!(alert(&error), Some(AlertDescription::UnrecognisedName));
    bench.quiet().await;
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[tokio::test]
async fn each_request_inside_is_judged() {
    let (bench, inspected, origin) = bench(Proof::Good, &["h2", "http/1.1"]).await;
    let own = format!("allowed.test:{}", origin.port);
    bench.policy(vec![
        RuleFields {
            effect: Effect::Deny,
            paths: vec!["/secret".into()],
            ..inside("no", "allowed.test", origin.port)
        },
        RuleFields {
            methods: vec!["GET".into(), "OPTIONS".into(), "TRACE".into()],
            ..inside("read", "allowed.test", origin.port)
        },
        RuleFields {
            methods: vec!["POST".into()],
            paths: vec!["/up".into()],
            ..inside("write", "allowed.test", origin.port)
        },
    ]);
    bench.arm();
    let cases = [
        ("GET", "/a", ""),
        ("POST", "/up/x", ""),
        ("POST", "/down", "path_not_allowed"),
        ("PUT", "/up", "method_not_allowed"),
        ("GET", "/secret/x", "denied_by_rule"),
        ("GET", "/x/../secret", "path_not_canonical"),
        ("TRACE", "/a", "method_not_allowed"),
    ];
    let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
    let tls = client(io, inspected.trust(), "allowed.test", true, &["http/1.1"])
        .await
        .unwrap();
    let mut one = http1(tls).await;
    let io = open(&bench, DoorKind::Socks5, "allowed.test", origin.port).await;
    let tls = client(io, inspected.trust(), "allowed.test", true, &["h2"])
        .await
        .unwrap();
    let mut two = http2(tls).await;
    for (method, path, reason) in cases {
        let first = ask1(&mut one, request(method, path, Some(&own), "body")).await;
        let second = ask2(
            &mut two,
            request(method, &format!("https://{own}{path}"), None, "body"),
        )
        .await;
        for (version, told) in [(1, first), (2, second)] {
            assert_eq!(told.reason(), reason, "{method} {path} {told:?}");
            if reason.is_empty() {
                assert_eq!(told.body, format!("{version} {method} {path} {own} body"));
            } else {
                assert_eq!(
                    told.headers.contains_key("sandbox-deny-rule"),
                    reason.contains("rule") || reason == "path_not_canonical"
                );
            }
        }
    }
    // It has no path, so a rule about paths can say nothing of it.
    let told = ask1(&mut one, request("OPTIONS", "*", Some(&own), "")).await;
    assert_eq!(told.reason(), "path_not_canonical");
    bench.policy(vec![inside("all", "allowed.test", origin.port)]);
    bench.arm();
    let told = ask1(&mut one, request("OPTIONS", "*", Some(&own), "")).await;
    assert_eq!(told.body, format!("1 OPTIONS * {own} "));
    assert_eq!(origin.seen().len(), 5, "{:?}", origin.seen());
    // What frames badly inside is refused as it is outside.
    let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
    let mut tls = client(io, inspected.trust(), "allowed.test", true, &["http/1.1"])
        .await
        .unwrap();
    let twice = format!(
        "POST /up HTTP/1.1\r\nhost: {own}\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    );
    tls.write_all(twice.as_bytes()).await.unwrap();
    let mut all = String::new();
    within(tls.read_to_string(&mut all)).await.unwrap();
    assert!(all.starts_with("HTTP/1.1 400 bad_framing\r\n"), "{all}");
    assert_eq!(origin.seen().len(), 5);
    // Requests inside are recorded with method and path.
    let (decided, _, _) = bench.egress.decisions().read(Some(0));
    let wrote = decided.iter().find(|decided| decided.path == "/up/x").unwrap();
    assert_eq!((&*wrote.method, wrote.rule.as_deref()), ("POST", Some("write")));
}

#[tokio::test]
async fn tls_parity_and_grpc() {
    let (both, one, two) = (&["h2", "http/1.1"][..], &["http/1.1"][..], &["h2"][..]);
    // What the origin speaks, what the client offers, and what both speak then.
    for (origin_alpn, client_alpn, chosen) in [
        (both, both, Some("h2")),
        (both, one, Some("http/1.1")),
        (both, two, Some("h2")),
        (both, &[][..], None),
        (one, both, Some("http/1.1")),
        (one, one, Some("http/1.1")),
        (two, both, Some("h2")),
        (&[][..], both, None),
        (&[][..], one, None),
    ] {
        let (bench, inspected, origin) = bench(Proof::Good, origin_alpn).await;
        let own = format!("allowed.test:{}", origin.port);
        let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
        let tls = client(io, inspected.trust(), "allowed.test", true, client_alpn)
            .await
            .unwrap();
        let agreed = tls
            .get_ref()
            .1
            .alpn_protocol()
            .map(|name| String::from_utf8_lossy(name).into_owned());
        assert_eq!(agreed.as_deref(), chosen, "{origin_alpn:?} {client_alpn:?}");
        if chosen == Some("h2") {
            let mut sender = http2(tls).await;
            let told = ask2(
                &mut sender,
                request("POST", &format!("https://{own}/grpc"), None, "call"),
            )
            .await;
            let trailers = told.trailers.expect("trailers");
            assert_eq!(
                (&*told.body, &trailers["grpc-status"], &trailers["grpc-message"]),
                (
                    "reply",
                    &http::HeaderValue::from_static("0"),
                    &http::HeaderValue::from_static("whole")
                )
            );
            assert_eq!(origin.seen(), [format!("2 POST /grpc {own} call")]);
        } else {
            let told = ask1(&mut http1(tls).await, request("POST", "/x", Some(&own), "call")).await;
            assert_eq!(told.body, format!("1 POST /x {own} call"));
        }
    }
    // One that has nothing in common with the client: the origin's refusal is told inside.
    let (bench, inspected, origin) = bench(Proof::Good, two).await;
    let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
    let tls = client(io, inspected.trust(), "allowed.test", true, one)
        .await
        .unwrap();
    let told = ask1(
        &mut http1(tls).await,
        request("GET", "/", Some(&format!("allowed.test:{}", origin.port)), ""),
    )
    .await;
    assert_eq!((told.status.as_u16(), told.reason()), (502, "upstream_tls"));
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn many_requests_share_one_connection() {
    let (bench, inspected, origin) = bench(Proof::Good, &["h2"]).await;
    let own = format!("https://allowed.test:{}/x", origin.port);
    let io = open(&bench, DoorKind::Socks5, "allowed.test", origin.port).await;
    let tls = client(io, inspected.trust(), "allowed.test", true, &["h2"])
        .await
        .unwrap();
    let sender = http2(tls).await;
    let asking = (0..60).map(|_| {
        let (mut sender, own) = (sender.clone(), own.clone());
        async move {
            ask2(&mut sender, request("POST", &own, None, "body"))
                .await
                .status
        }
    });
    let told = within(futures_util::future::join_all(asking)).await;
    assert!(told.iter().all(|status| *status == 200), "{told:?}");
    assert_eq!(
        (origin.seen().len(), origin.connections.load(Ordering::SeqCst)),
        (60, 1)
    );
    drop(sender);
    bench.quiet().await;
}

#[tokio::test]
async fn tls_upstream_verified() {
    for proof in [Proof::Expired, Proof::OtherName, Proof::UnknownRoot] {
        let (bench, inspected, origin) = bench(proof, &["h2", "http/1.1"]).await;
        let own = format!("allowed.test:{}", origin.port);
        let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
        let tls = client(io, inspected.trust(), "allowed.test", true, &["h2", "http/1.1"])
            .await
            .unwrap();
        let told = ask1(&mut http1(tls).await, request("GET", "/", Some(&own), "")).await;
        assert_eq!((told.status.as_u16(), told.reason()), (502, "upstream_tls"));
        assert!(told.body.contains("upstream_tls"), "{}", told.body);
        let io = open(&bench, DoorKind::Socks5, "allowed.test", origin.port).await;
        let tls = client(io, inspected.trust(), "allowed.test", true, &["h2"])
            .await
            .unwrap();
        let told = ask2(
            &mut http2(tls).await,
            request("GET", &format!("https://{own}/"), None, ""),
        )
        .await;
        assert_eq!((told.status.as_u16(), told.reason()), (502, "upstream_tls"));
        assert_eq!(
            (origin.seen().len(), origin.connections.load(Ordering::SeqCst)),
            (0, 2)
        );
    }
    // What is not there at all is told inside too; what the policy forbids is told outside.
    let (bench, inspected, origin) = bench(Proof::Good, &["http/1.1"]).await;
    bench.policy(vec![inside("t", "nowhere.test", origin.port)]);
    bench.arm();
    let io = open(&bench, DoorKind::Http, "nowhere.test", origin.port).await;
    let tls = client(io, inspected.trust(), "nowhere.test", true, &["http/1.1"])
        .await
        .unwrap();
    let own = format!("nowhere.test:{}", origin.port);
    let told = ask1(&mut http1(tls).await, request("GET", "/", Some(&own), "")).await;
    assert_eq!((told.status.as_u16(), told.reason()), (502, "name_not_found"));
    let mut io = bench.connect(DoorKind::Http);
    let status = tunnel(&mut io, &format!("allowed.test:{}", origin.port)).await;
    assert_eq!(status, "HTTP/1.1 403 host_not_allowed");
}

/// Through a whole tunnel; which requests are given one is the matter of `secret_only_to_verified_origin`.
#[tokio::test]
async fn secrets_go_inside_to_an_origin_that_proved_itself() {
    for proof in [Proof::Good, Proof::Expired, Proof::OtherName, Proof::UnknownRoot] {
        let (bench, inspected, origin) = bench(proof, &["h2", "http/1.1"]).await;
        bench.set(|settings| {
            settings.secrets = secrets(&[("s", secret_terms(Some("authorization")))], "hush")
        });
        bench.open(origin.port);
        bench.policy(vec![RuleFields {
            secret: Some("s".into()),
            ..inside("t", "allowed.test", origin.port)
        }]);
        bench.arm();
        let own = format!("allowed.test:{}", origin.port);
        for alpn in ["h2", "http/1.1"] {
            let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
            let tls = client(io, inspected.trust(), "allowed.test", true, &[alpn]).await;
            let (uri, host) = match alpn {
                "h2" => (format!("https://{own}/x"), None),
                _ => ("/x".to_owned(), Some(&*own)),
            };
            let mut request = request("GET", &uri, host, "");
            request
                .headers_mut()
                .append("authorization", "mine".parse().unwrap());
            let told = match alpn {
                "h2" => ask2(&mut http2(tls.unwrap()).await, request).await,
                _ => ask1(&mut http1(tls.unwrap()).await, request).await,
            };
            if proof != Proof::Good {
                assert_eq!((told.status.as_u16(), told.reason()), (502, "upstream_tls"));
                assert_eq!(origin.seen(), Vec::<String>::new(), "{alpn}");
                continue;
            }
            assert!(
                told.body.ends_with("given [\"Bearer hush\"]"),
                "{alpn}: {}",
                told.body
            );
            let (decided, _, _) = bench.egress.decisions().read(Some(0));
            assert_eq!(decided.last().unwrap().secret.as_deref(), Some("s"), "{alpn}");
        }
    }
}

#[tokio::test]
async fn a_client_that_does_not_trust_the_ca_is_told_of() {
    let (bench, _inspected, origin) = bench(Proof::Good, &["http/1.1"]).await;
    let mut roots = RootCertStore::empty();
    roots.add(World::new().root()).unwrap();
    let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
    assert!(client(io, roots, "allowed.test", true, &[]).await.is_err());
    bench.quiet().await;
    assert_eq!(denials(&bench), [DoorReason::TlsClientRejected]);
}

#[tokio::test]
async fn a_node_without_a_ca_passes_nothing_unseen() {
    let (bench, _inspected, origin) = bench(Proof::Good, &["http/1.1"]).await;
    bench.egress.set_interception(None);
    let mut io = bench.connect(DoorKind::Http);
    let status = tunnel(&mut io, &format!("allowed.test:{}", origin.port)).await;
    assert_eq!(status, "HTTP/1.1 503 ca_unavailable");
    let mut io = bench.connect(DoorKind::Socks5);
    assert_eq!(socks5(&mut io, "allowed.test", origin.port).await, 1);
    assert_eq!(origin.connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn an_end_is_passed_on_both_ways() {
    let (bench, inspected, origin) = bench(Proof::Good, &["http/1.1"]).await;
    let own = format!("allowed.test:{}", origin.port);
    for kind in DOORS {
        // The client ends first, and is answered after that.
        let io = open(&bench, kind, "allowed.test", origin.port).await;
        let mut tls = client(io, inspected.trust(), "allowed.test", true, &["http/1.1"])
            .await
            .unwrap();
        let text = format!("POST /x HTTP/1.1\r\nhost: {own}\r\ncontent-length: 4\r\n\r\nbody");
        tls.write_all(text.as_bytes()).await.unwrap();
        tls.shutdown().await.unwrap();
        let mut all = String::new();
        // To the end by close_notify: an end without one is an error here.
        within(tls.read_to_string(&mut all)).await.unwrap();
        assert!(
            all.starts_with("HTTP/1.1 200 OK\r\n") && all.ends_with(&format!("1 POST /x {own} body")),
            "{all}"
        );
        // The origin ends first, and the client is told.
        let io = open(&bench, kind, "allowed.test", origin.port).await;
        let mut tls = client(io, inspected.trust(), "allowed.test", true, &["http/1.1"])
            .await
            .unwrap();
        let text = format!("GET /close HTTP/1.1\r\nhost: {own}\r\n\r\n");
        tls.write_all(text.as_bytes()).await.unwrap();
        let mut all = String::new();
        within(tls.read_to_string(&mut all)).await.unwrap();
        assert!(all.ends_with(&format!("1 GET /close {own} ")), "{all}");
        drop(tls);
    }
    bench.quiet().await;
}

#[tokio::test]
async fn what_is_looked_into_ends_with_its_policy_and_its_claim() {
    let (bench, inspected, origin) = bench(Proof::Good, &["h2", "http/1.1"]).await;
    let own = format!("allowed.test:{}", origin.port);
    let sides = |rules| {
        bench.policy(rules);
        bench
            .egress
            .book()
            .sides(Some(&crate::egress::tests::pool()), crate::words::OPERATOR, None)
    };
    for alpn in ["h2", "http/1.1"] {
        let connect = async || {
            let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
            client(io, inspected.trust(), "allowed.test", true, &[alpn])
                .await
                .unwrap()
        };
        let mut tls = connect().await;
        bench.door.change(sides(vec![]));
        // A reset: no close_notify.
        let mut rest = Vec::new();
        assert!(within(tls.read_to_end(&mut rest)).await.is_err() || rest.is_empty());
        bench.quiet().await;
        assert_eq!(denials(&bench).last(), Some(&DoorReason::PolicyChanged));
        bench
            .door
            .change(sides(vec![inside("t", "allowed.test", origin.port)]));
        let mut tls = connect().await;
        bench.door.disarm();
        assert!(within(tls.read_to_end(&mut rest)).await.is_err() || rest.is_empty());
        bench.quiet().await;
        bench.arm();
    }
    // An opaque tunnel is cut when a rule begins to look into it.
    bench
        .door
        .change(sides(vec![rule("t", "allowed.test", &[origin.port])]));
    let mut io = bench.connect(DoorKind::Http);
    drop(tunnel(&mut io, &own).await);
    bench
        .door
        .change(sides(vec![inside("t", "allowed.test", origin.port)]));
    let mut rest = Vec::new();
    within(io.read_to_end(&mut rest)).await.unwrap();
    bench.quiet().await;
    assert_eq!(denials(&bench).last(), Some(&DoorReason::PolicyChanged));
}

/// What guests of templates from before, from amid and from behind a rotation trust, and what the node shows them.
#[tokio::test]
async fn tls_ca_rotation_at_the_door() {
    let (bench, inspected, origin) = bench(Proof::Good, &["http/1.1"]).await;
    let now = crate::clock::Clock::host().wall();
    let own = format!("allowed.test:{}", origin.port);
    let works = async |roots: RootCertStore| {
        let io = open(&bench, DoorKind::Http, "allowed.test", origin.port).await;
        let Ok(tls) = client(io, roots, "allowed.test", true, &["http/1.1"]).await else {
            return false;
        };
        let told = ask1(&mut http1(tls).await, request("GET", "/", Some(&own), "")).await;
        assert_eq!(told.status, 200);
        true
    };
    let old = inspected.trust();
    let ca = inspected.ca();
    ca.rotate(None, None, crate::random::bytes(), now).unwrap();
    let amid = inspected.trust();
    inspected.load(&bench);
    assert!(works(old.clone()).await && works(amid.clone()).await);
    ca.issue_node(None, "bench", false, crate::random::bytes(), now)
        .unwrap();
    inspected.load(&bench);
    // Those from before know the old root alone, which vouches for the new one.
    let new = || {
        let mut roots = RootCertStore::empty();
        roots.add(ca.bundle().unwrap().roots()[0].der().clone()).unwrap();
        roots
    };
    assert!(works(old.clone()).await && works(amid.clone()).await && works(new()).await);
    // Where it cannot, they do not trust what they are shown, and nothing passes.
    let cross = std::fs::read(ca.cross_file()).unwrap();
    std::fs::remove_file(ca.cross_file()).unwrap();
    inspected.load(&bench);
    assert!(!works(old.clone()).await && works(amid.clone()).await && works(new()).await);
    crate::disk::write_atomic(&ca.cross_file(), &cross, 0o644).unwrap();
    inspected.load(&bench);
    assert!(works(old.clone()).await);
    ca.finish().unwrap();
    inspected.load(&bench);
    assert!(!works(old).await && works(amid).await && works(new()).await);
}
