//! What the policy says, as a door tells it.

use std::sync::Arc;

use sandbox_protocol::door::DoorReason;
use tokio::io::AsyncWriteExt as _;

use crate::{
    egress::{
        DoorKind, Outcome, explain,
        tests::{Bench, pool, read_all, rule, socks5, tunnel},
    },
    policy::{Authority, Effect, Layer, Mode, Seen, Who},
};

#[tokio::test]
async fn door_every_deny_is_typed() {
    let bench = Bench::new().await;
    let port = bench.origin.port();
    let mut no = rule("no-gists", "gist.test", &[80]);
    no.effect = Effect::Deny;
    no.message = "use the store".into();
    let mut seen = rule("seen", "seen.test", &[80]);
    seen.methods = vec!["GET".into()];
    seen.paths = vec!["/v1".into()];
    bench.policy(vec![
        no,
        seen,
        rule("t", "allowed.test", &[port]),
        rule("inner", "inner.test", &[port]),
        rule("none", "none.test", &[port]),
        rule("shut", "shut.test", &[1]),
        rule("lit", "127.0.0.1", &[port]),
    ]);
    bench.dns.set("inner.test", &["10.0.0.1"]);
    bench.dns.set("shut.test", &["127.0.0.3"]);
    bench.arm();
    for (url, reason) in [
        ("http://x.test/", DoorReason::HostNotAllowed),
        ("http://gist.test/", DoorReason::DeniedByRule),
        ("http://allowed.test:81/", DoorReason::PortNotAllowed),
        ("http://seen.test/v2", DoorReason::PathNotAllowed),
        ("http://seen.test/v1/../v2", DoorReason::PathNotCanonical),
        ("http://8.8.8.8/", DoorReason::AddressLiteral),
        ("http://127.1/", DoorReason::OddAddress),
        ("http://u@x.test/", DoorReason::BadTarget),
        ("https://x.test/", DoorReason::BadTarget),
        ("/x", DoorReason::BadTarget),
        (&*format!("http://inner.test:{port}/"), DoorReason::SpecialAddress),
        (&*format!("http://127.0.0.1:{port}/"), DoorReason::OwnAddress),
        (&*format!("http://none.test:{port}/"), DoorReason::NameNotFound),
    ] {
        let answer = bench.get(url).await;
        let first = format!("HTTP/1.1 {} {}\r\n", reason.http(), reason.as_str());
        assert!(answer.starts_with(&first), "{url}: {answer}");
        assert!(answer.contains(&format!("sandbox-deny-reason: {}\r\n", reason.as_str())));
        let body = answer.split("\r\n\r\n").nth(1).unwrap();
        let json: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(json["error"]["reason"], reason.as_str());
        assert_eq!(json["error"]["remedy"], reason.remedy());
        let host = url.split('/').nth(2).unwrap_or("x").split(':').next().unwrap();
        assert!(json["error"]["target"].as_str().unwrap().contains(host), "{body}");
        assert!(!body.contains("10.0.0.1"), "no address is shown: {body}");
    }
    let answer = bench.get("http://gist.test/").await;
    assert!(answer.contains("sandbox-deny-rule: no-gists\r\n"), "{answer}");
    assert!(answer.contains("use the store"), "{answer}");
    let answer = bench.get("http://door.internal/denials").await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("denied_by_rule"),
        "{answer}"
    );

    for (host, port, reason) in [
        ("x.test", 443, DoorReason::HostNotAllowed),
        ("seen.test", 80, DoorReason::NeedsVisibleRequest),
        ("none.test", port, DoorReason::NameNotFound),
        ("inner.test", port, DoorReason::SpecialAddress),
        ("127.1", 80, DoorReason::OddAddress),
        ("allowed.test", 0, DoorReason::BadTarget),
    ] {
        let mut io = bench.connect(DoorKind::Socks5);
        assert_eq!(socks5(&mut io, host, port).await, reason.socks(), "{host}");
        let mut io = bench.connect(DoorKind::Http);
        let line = tunnel(&mut io, &format!("{host}:{port}")).await;
        assert_eq!(line, format!("HTTP/1.1 {} {}", reason.http(), reason.as_str()));
    }
}

#[tokio::test]
async fn policy_all_request_forms() {
    let bench = Bench::new().await;
    bench.arm();
    let port = bench.origin.port();
    for text in [
        format!("GET http://other.test:{port}/ HTTP/1.1\r\nhost: allowed.test:{port}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nhost: other.test:{port}\r\n\r\n"),
        format!("CONNECT other.test:{port} HTTP/1.1\r\nhost: allowed.test:{port}\r\n\r\n"),
        format!("OPTIONS * HTTP/1.1\r\nhost: allowed.test:{port}\r\n\r\n"),
        format!("GET http://OTHER.test.:{port}/ HTTP/1.1\r\nhost: x\r\n\r\n"),
    ] {
        let answer = bench.ask(text.as_bytes()).await;
        let refused = answer.starts_with("HTTP/1.1 403 ") || answer.starts_with("HTTP/1.1 400 ");
        assert!(refused, "{text}{answer}");
    }
    let mut io = bench.connect(DoorKind::Socks5);
    assert_eq!(socks5(&mut io, "other.test", port).await, 2);
    assert!(bench.origin.text().is_empty());
    assert!(bench.dns.asked().is_empty(), "dns_denied_name_never_leaves");
    // And each form of the allowed one passes, under the name that was judged.
    let answer = bench
        .ask(format!("GET {} HTTP/1.1\r\nhost: other.test\r\n\r\n", bench.url("/x?y")).as_bytes())
        .await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let seen = bench.origin.text();
    assert!(seen.starts_with("GET /x?y HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains(&format!("host: allowed.test:{port}\r\n")), "{seen}");
    assert!(!seen.contains("other.test"), "{seen}");
}

#[tokio::test]
async fn dns_denied_name_never_leaves() {
    let bench = Bench::new().await;
    bench.arm();
    for n in 0..50 {
        let host = format!("x{n}.other.test");
        let answer = bench.get(&format!("http://{host}/")).await;
        assert!(answer.starts_with("HTTP/1.1 403 host_not_allowed"), "{answer}");
        let mut io = bench.connect(DoorKind::Socks5);
        assert_eq!(socks5(&mut io, &host, 443).await, 2);
    }
    assert!(bench.dns.asked().is_empty());
}

#[tokio::test]
async fn addr_rebinding_and_mixed() {
    let bench = Bench::new().await;
    bench.arm();
    let url = bench.url("/");
    assert!(bench.get(&url).await.starts_with("HTTP/1.1 200 OK"));
    // Each dial looks up anew, and is judged by what it finds.
    for (addresses, reason) in [
        (&["127.0.0.1"][..], "own_address"),
        (&["127.0.0.2", "10.0.0.1"], "special_address"),
        (&["127.0.0.2", "::1"], "own_address"),
        (&["127.0.0.2", "fd00::1"], "special_address"),
    ] {
        bench.dns.set("allowed.test", addresses);
        // A connection that rests stays with the address that it was vetted for; a claim begins without any.
        bench.arm();
        let answer = bench.get(&url).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 403 {reason}")),
            "{addresses:?}: {answer}"
        );
    }
    let dialled: Vec<_> = bench
        .egress
        .decisions()
        .read(Some(1))
        .0
        .into_iter()
        .filter_map(|decided| match decided.outcome {
            Outcome::Allowed(address) => Some(address),
            Outcome::Denied(_) => None,
        })
        .collect();
    assert_eq!(dialled, [bench.origin.address]);
}

#[tokio::test]
async fn policy_update_cuts_tunnels() {
    let bench = Bench::new().await;
    let port = bench.origin.port();
    bench.policy(vec![
        rule("t", "allowed.test", &[port]),
        rule("o", "other.test", &[port]),
    ]);
    bench.arm();
    let mut forbidden = bench.connect(DoorKind::Http);
    let mut kept = bench.connect(DoorKind::Socks5);
    tunnel(&mut forbidden, &format!("other.test:{port}")).await;
    assert_eq!(socks5(&mut kept, "allowed.test", port).await, 0);
    let narrow = Layer::new(Mode::Enforce, vec![rule("t", "allowed.test", &[port])], 64).unwrap();
    let sides = bench
        .egress
        .book()
        .sides(Some(&pool()), "operator", Some(&Arc::new(narrow)));
    bench.door.change(sides);
    assert_eq!(read_all(&mut forbidden).await, "", "it was cut");
    kept.write_all(b"alive").await.unwrap();
    kept.shutdown().await.unwrap();
    assert_eq!(read_all(&mut kept).await, "alive");
    let (decided, lost, _) = bench.egress.decisions().read(Some(1));
    assert_eq!(lost, 0);
    let cut = decided.iter().find(|decided| {
        decided.target.starts_with("other.test")
            && decided.outcome == Outcome::Denied(DoorReason::PolicyChanged)
    });
    assert!(cut.is_some(), "{decided:?}");
}

#[tokio::test]
async fn policy_explain_equals_door() {
    let bench = Bench::new().await;
    let port = bench.origin.port();
    let mut deny = rule("d", "*.no.test", &[port, 80]);
    deny.effect = Effect::Deny;
    let mut seen = rule("s", "seen.test", &[port]);
    seen.methods = vec!["GET".into()];
    bench.policy(vec![
        deny,
        seen,
        rule("t", "allowed.test", &[port]),
        rule("w", "*.wild.test", &[port]),
    ]);
    bench.dns.set("seen.test", &["127.0.0.2"]);
    bench.dns.set("a.wild.test", &["10.0.0.1"]);
    bench.arm();
    let sides = bench.door.armed().unwrap();
    let who = Who {
        pool: "p",
        tenant: "operator",
    };
    for host in [
        "allowed.test",
        "a.no.test",
        "seen.test",
        "a.wild.test",
        "b.wild.test",
        "x.test",
        "8.8.8.8",
    ] {
        for at in [port, 80] {
            for method in ["GET", "PUT"] {
                let target = Authority::parse(&format!("{host}:{at}"), None).unwrap();
                let asked = Seen::Request { method, path: "/" };
                let explained =
                    Box::pin(explain(&bench.egress, &sides.sides, &target, asked, who, true)).await;
                let text =
                    format!("{method} http://{host}:{at}/ HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n");
                let mut io = bench.connect(DoorKind::Http);
                io.write_all(text.as_bytes()).await.unwrap();
                io.shutdown().await.unwrap();
                let answer = read_all(&mut io).await;
                match explained.refused {
                    None => assert!(answer.starts_with("HTTP/1.1 200"), "{text}{answer}"),
                    Some(reason) => {
                        let line = format!("HTTP/1.1 {} {}\r\n", reason.http(), reason.as_str());
                        assert!(answer.starts_with(&line), "{text}{answer}");
                    }
                }
            }
        }
    }
}
