//! Doors: real silkds, whose listeners stand on loopback ports of this host. A test speaks to them as a guest's program
//! would, and finds them as one: by its environment.

use std::net::SocketAddr;

use harness::{Daemon, HANG, Setup, World, refused, within};
use sandbox_sdk::{
    Reason, Sandbox,
    v1::{
        EgressDecision, EgressEffect, EgressExplainRequest, EgressPolicy, EgressRule, EgressSide, Work,
        egress_watch_reply::Event,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

async fn variable(sandbox: &Sandbox, name: &str) -> String {
    let ran = sandbox.exec(["printenv", name]).output().await.unwrap();
    String::from_utf8(ran.stdout.to_vec()).unwrap().trim().to_owned()
}

/// The doors of a sandbox, HTTP and SOCKS5.
async fn doors(sandbox: &Sandbox) -> (SocketAddr, SocketAddr) {
    let http = variable(sandbox, "http_proxy").await;
    let socks5 = variable(sandbox, "SANDBOX_SOCKS5").await;
    (
        http.strip_prefix("http://").unwrap().parse().unwrap(),
        socks5.parse().unwrap(),
    )
}

/// What a door answers, up to its end.
async fn said(door: SocketAddr, bytes: &[u8]) -> String {
    within(HANG, async {
        let mut all = Vec::new();
        let talk = async {
            let mut stream = TcpStream::connect(door).await?;
            stream.write_all(bytes).await?;
            stream.shutdown().await?;
            stream.read_to_end(&mut all).await
        };
        // A connection that is cut, or has nobody to go to, has said what it had to.
        drop(talk.await);
        String::from_utf8_lossy(&all).into_owned()
    })
    .await
}

async fn get(door: SocketAddr, url: &str) -> String {
    said(door, format!("GET {url} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await
}

/// The reply's code of a SOCKS5 connection by name.
async fn socks5(door: SocketAddr, host: &str, port: u16) -> u8 {
    within(HANG, async {
        let mut stream = TcpStream::connect(door).await.unwrap();
        stream.write_all(&[5, 1, 0]).await.unwrap();
        let mut greeted = [0; 2];
        stream.read_exact(&mut greeted).await.unwrap();
        assert_eq!(greeted, [5, 0]);
        let mut request = vec![5, 1, 0, 3, u8::try_from(host.len()).unwrap()];
        request.extend(host.as_bytes());
        request.extend(port.to_be_bytes());
        stream.write_all(&request).await.unwrap();
        let mut reply = [0; 10];
        stream.read_exact(&mut reply).await.unwrap();
        reply[1]
    })
    .await
}

fn rule(id: &str, host: &str, port: u16) -> EgressRule {
    EgressRule {
        id: id.into(),
        host: vec![host.into()],
        ports: vec![port.into()],
        ..EgressRule::default()
    }
}

fn layer(rules: Vec<EgressRule>) -> EgressPolicy {
    EgressPolicy {
        rules,
        ..EgressPolicy::default()
    }
}

async fn start(world: &World) -> Daemon {
    Setup::stub().warm(2).config(&world.config()).start().await
}

#[tokio::test]
async fn a_guest_reaches_what_its_policy_allows_and_nothing_else() {
    let world = World::start().await;
    let daemon = start(&world).await;
    let client = daemon.client().await;
    let mut tail = client.egress().watch("", None).await.unwrap();
    let sandbox = client.claim("default").await.unwrap();
    let (http, socks) = doors(&sandbox).await;
    let port = world.port();

    let answer = get(http, &format!("http://allowed.test:{port}/a?b")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("hello from /a?b\n"), "{answer}");
    let answer = get(http, &format!("http://other.test:{port}/")).await;
    assert!(
        answer.starts_with("HTTP/1.1 403 host_not_allowed\r\n"),
        "{answer}"
    );
    assert!(answer.contains("\"target\":\"other.test"), "{answer}");
    assert_eq!(socks5(socks, "allowed.test", port).await, 0);
    assert_eq!(socks5(socks, "other.test", port).await, 2);
    assert!(!world.asked().iter().any(|name| name == "other.test"));
    let target = format!("allowed.test:{port}");
    let tunnel = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\nto and fro");
    let answer = said(http, tunnel.as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 Connection established\r\n"),
        "{answer}"
    );
    assert!(answer.ends_with("to and fro"), "the guest ended first: {answer}");

    // Whoever watches saw all of it, in its order.
    let mut seen: Vec<EgressDecision> = Vec::new();
    while seen.len() < 5 {
        match within(HANG, tail.next()).await.unwrap().unwrap().event {
            Some(Event::Decision(decision)) => seen.push(decision),
            other => panic!("{other:?}"),
        }
    }
    let short: Vec<(&str, bool, &str)> = seen
        .iter()
        .map(|decision| (&*decision.door, decision.allowed, &*decision.reason))
        .collect();
    let expected = [
        ("http", true, ""),
        ("http", false, "host_not_allowed"),
        ("socks5", true, ""),
        ("socks5", false, "host_not_allowed"),
        ("http", true, ""),
    ];
    assert_eq!(short, expected);
    assert_eq!((seen[0].rule.as_str(), seen[0].side()), ("t", EgressSide::Pool));
    assert_eq!(seen[0].path, "/a", "no query is told");
    assert!(seen.iter().all(|decision| decision.sandbox == sandbox.id()));

    // And explain says the same, without a guest.
    for (target, allowed) in [("allowed.test", true), ("other.test", false)] {
        let question = EgressExplainRequest {
            sandbox: sandbox.id().to_owned(),
            target: format!("http://{target}:{port}/"),
            resolve: true,
            ..EgressExplainRequest::default()
        };
        let found = client.egress().explain(question).await.unwrap();
        assert_eq!(found.allowed, allowed, "{found:?}");
    }
    let shown = daemon.ctl().json(["egress", "show", sandbox.id()]).await;
    assert_eq!((&shown["armed"], &shown["linked"]), (&true.into(), &true.into()));
    assert_eq!(shown["layers"][0]["name"], "build");

    // The end shuts the doors, whatever becomes of the rest.
    sandbox.release().await.unwrap();
}

#[tokio::test]
async fn without_a_policy_a_guest_reaches_nothing() {
    let daemon = Setup::dev().warm(1).start().await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let (http, socks) = doors(&sandbox).await;
    let answer = get(http, "http://allowed.test/").await;
    assert!(answer.starts_with("HTTP/1.1 403 no_policy\r\n"), "{answer}");
    assert_eq!(socks5(socks, "allowed.test", 443).await, 2);
}

#[tokio::test]
async fn door_release_disarms_first() {
    let world = World::start().await;
    let daemon = start(&world).await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let (http, _) = doors(&sandbox).await;
    let url = format!("http://allowed.test:{}/", world.port());
    assert!(get(http, &url).await.starts_with("HTTP/1.1 200 OK"));
    let target = format!("allowed.test:{}", world.port());
    let mut open = TcpStream::connect(http).await.unwrap();
    let head = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n");
    open.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    within(HANG, open.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    sandbox.release().await.unwrap();
    // Cut, and nothing new is served: neither by its silkd, while that lives, nor by what comes after it.
    let mut rest = Vec::new();
    drop(within(HANG, open.read_to_end(&mut rest)).await);
    let answer = get(http, &url).await;
    assert!(!answer.contains("200 OK"), "{answer}");
}

#[tokio::test]
async fn policy_claim_time_layers() {
    let world = World::start().await;
    let port = world.port();
    let rules = format!("[{{ id = \"a\", host = [\"allowed.test\", \"second.test\"], ports = [{port}] }}]");
    let mut daemon = Setup::stub()
        .warm(1)
        .config(&world.config_with(&rules))
        .start()
        .await;
    let client = daemon.client().await;
    let only = |host: &str| layer(vec![rule("only", host, port)]);
    let sandbox = client
        .claim("default")
        .egress(only("allowed.test"))
        .await
        .unwrap();
    let (http, _) = doors(&sandbox).await;
    let url = |host: &str| format!("http://{host}:{port}/");
    assert!(get(http, &url("allowed.test")).await.starts_with("HTTP/1.1 200"));
    let answer = get(http, &url("second.test")).await;
    assert!(answer.contains("\"layer\":\"claim\""), "{answer}");

    // It only narrows.
    let wide = client
        .egress()
        .update(sandbox.id(), Some(layer(vec![rule("all", "*", port)])), None)
        .await
        .unwrap();
    assert!(get(http, &url("second.test")).await.starts_with("HTTP/1.1 200"));
    assert!(get(http, &url("third.test")).await.contains("\"layer\":\"pool\""));

    // Changed by whoever knows what it was, and it survives the daemon.
    let again = client
        .egress()
        .update(sandbox.id(), Some(only("second.test")), Some("other".into()))
        .await;
    refused(again, Reason::PolicyChanged);
    client
        .egress()
        .update(sandbox.id(), Some(only("second.test")), Some(wide.digest))
        .await
        .unwrap();
    daemon.kill9().await;
    daemon.start_again().await;
    assert!(get(http, &url("second.test")).await.starts_with("HTTP/1.1 200"));
    let answer = get(http, &url("allowed.test")).await;
    assert!(answer.starts_with("HTTP/1.1 403 host_not_allowed"), "{answer}");

    // What cannot be read is refused before anything leaves the pool.
    let client = daemon.client().await;
    let mut bad = rule("bad", "a b", port);
    bad.effect = EgressEffect::Deny.into();
    let refusal = client.claim("default").egress(layer(vec![bad])).await;
    let error = refused(refusal.map(|_| ()), Reason::PolicyInvalid);
    assert!(error.to_string().contains("rule 1: host"), "{error}");
    let mut inside = rule("tls", "allowed.test", port);
    inside.intercept = true;
    let refusal = client.claim("default").egress(layer(vec![inside])).await;
    refused(refusal.map(|_| ()), Reason::CaNotInTemplate);
}

#[tokio::test]
async fn door_restart_never_opens() {
    let world = World::start().await;
    let mut daemon = start(&world).await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let (http, _) = doors(&sandbox).await;
    let denied = format!("http://other.test:{}/", world.port());
    let allowed = format!("http://allowed.test:{}/", world.port());
    assert!(get(http, &allowed).await.starts_with("HTTP/1.1 200"));
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let dialling = tokio::spawn(async move {
        let mut reasons = std::collections::BTreeSet::new();
        while stopped.try_recv().is_err() {
            let answer = get(http, &denied).await;
            assert!(!answer.contains("200 OK"), "{answer}");
            reasons.insert(answer.lines().next().unwrap_or_default().to_owned());
        }
        reasons
    });
    for _ in 0..2 {
        daemon.kill9().await;
        daemon.start_again().await;
        assert!(
            get(http, &allowed).await.starts_with("HTTP/1.1 200"),
            "served again"
        );
    }
    stop.send(()).unwrap();
    let reasons = dialling.await.unwrap();
    let expected = [
        "HTTP/1.1 403 host_not_allowed",
        "HTTP/1.1 503 door_unreachable",
        "HTTP/1.1 403 not_armed",
        "",
    ];
    for reason in &reasons {
        assert!(expected.contains(&reason.as_str()), "{reasons:?}");
    }
    assert!(reasons.contains("HTTP/1.1 403 host_not_allowed"), "{reasons:?}");
}

#[tokio::test]
async fn door_no_false_refusal() {
    let world = World::start().await;
    let daemon = Setup::stub().warm(4).config(&world.config()).start().await;
    let client = daemon.client().await;
    let url = format!("http://allowed.test:{}/", world.port());
    for _ in 0..24 {
        let sandbox = client.claim("default").await.unwrap();
        // The program dials as its first act.
        let (http, _) = doors(&sandbox).await;
        let answer = get(http, &url).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        drop(sandbox);
    }
    client.flush().await;
}

#[tokio::test]
async fn a_reload_rearms_live_claims() {
    let world = World::start().await;
    let mut daemon = start(&world).await;
    let client = daemon.client().await;
    let sandbox = client.claim("default").await.unwrap();
    let (http, _) = doors(&sandbox).await;
    let url = |host: &str| format!("http://{host}:{}/", world.port());
    assert!(get(http, &url("allowed.test")).await.starts_with("HTTP/1.1 200"));
    let rules = format!(
        "[{{ id = \"s\", host = [\"second.test\"], ports = [{}] }}]",
        world.port()
    );
    daemon.configure(&world.config_with(&rules));
    let reply = client.node().reload().await.unwrap();
    assert_eq!(reply.changed, ["egress.policy.build"]);
    assert!(get(http, &url("second.test")).await.starts_with("HTTP/1.1 200"));
    assert!(get(http, &url("allowed.test")).await.starts_with("HTTP/1.1 403"));
}

#[tokio::test]
async fn perf_egress_counts() {
    let world = World::start().await;
    let counted = async |setup: Setup| -> Work {
        let daemon = setup.in_process().warm(4).start().await;
        daemon.until_warm(4).await;
        let client = daemon.client().await;
        let claim = client.claim("default").trace().warm_only().await.unwrap();
        let mut work = claim.work().unwrap().clone();
        work.steps_us.clear();
        work
    };
    let armed = counted(Setup::stub().config(&world.config())).await;
    let bare = counted(Setup::stub()).await;
    assert_eq!(armed, bare, "a policy costs a claim nothing that is counted");
    assert_eq!(
        (
            armed.netlink_messages,
            armed.binds,
            armed.tasks_spawned,
            armed.guest_round_trips
        ),
        (0, 0, 0, 0)
    );
    assert_eq!((armed.journal_records, armed.writes), (1, 1));
}
