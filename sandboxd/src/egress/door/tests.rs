use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use sandbox_protocol::{door::DoorReason, id::SandboxId, limits::DOOR_CONNECTIONS, link::encode_hello};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    guard::{Guard, Next},
    socks5::{Wish, greeting, request},
};
use crate::{
    egress::{
        Door, DoorKind, Outcome, explain,
        tests::{Bench, connect, pool, read_all, rule, socks5, tunnel, within},
    },
    link::fake,
    policy::{Authority, Effect, Layer, Mode, Seen, Sides},
    tasks,
};

const GET: &str = "GET http://allowed.test/ HTTP/1.1\r\nhost: a\r\n\r\n";

#[tokio::test]
async fn inv_12_denies_before_after_and_by_default() {
    let bench = Bench::new().await;
    let url = bench.url("/");
    let line = async || {
        bench
            .get(&url)
            .await
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    assert_eq!(line().await, "HTTP/1.1 403 not_armed");
    // Armed with nothing is armed with no.
    let claim = sandbox_protocol::id::ClaimId::from_random([8; 16]);
    bench.door.arm(claim, "t".into(), None, Sides::default());
    assert_eq!(line().await, "HTTP/1.1 403 no_policy");
    bench.door.disarm();
    assert_eq!(line().await, "HTTP/1.1 403 not_armed");
    bench.arm();
    assert_eq!(line().await, "HTTP/1.1 200 OK");
    // What is dialled is what was judged, now.
    bench.dns.set("allowed.test", &["10.0.0.1"]);
    assert_eq!(line().await, "HTTP/1.1 403 special_address");
    bench.door.disarm();
    bench.door.disarm();
    assert_eq!(line().await, "HTTP/1.1 403 not_armed");
}

#[tokio::test]
async fn door_denies_until_armed() {
    let bench = Bench::new().await;
    let answer = bench.ask(GET.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 403 not_armed\r\n"), "{answer}");
    let mut io = bench.connect(DoorKind::Socks5);
    io.write_all(&[5, 1, 0]).await.unwrap();
    io.shutdown().await.unwrap();
    assert_eq!(read_all(&mut io).await.as_bytes(), "\u{5}\u{fffd}".as_bytes());
    assert!(bench.dns.asked().is_empty());
    assert!(bench.origin.text().is_empty());
    assert!(
        bench.egress.decisions().read(Some(1)).0.is_empty(),
        "nothing was parsed"
    );
}

#[tokio::test]
async fn door_preclaim_connection_not_served() {
    let bench = Bench::new().await;
    let mut before = bench.connect(DoorKind::Http);
    let mut socks = bench.connect(DoorKind::Socks5);
    bench.arm();
    let request = bench.url("/").replace("http", "GET http") + " HTTP/1.1\r\nhost: a\r\n\r\n";
    before.write_all(request.as_bytes()).await.unwrap();
    before.shutdown().await.unwrap();
    let answer = read_all(&mut before).await;
    assert!(answer.starts_with("HTTP/1.1 403 not_armed\r\n"), "{answer}");
    socks.write_all(&[5, 1, 0]).await.unwrap();
    socks.shutdown().await.unwrap();
    assert_eq!(read_all(&mut socks).await.as_bytes(), "\u{5}\u{fffd}".as_bytes());
    // What comes after the claim is served.
    let answer = bench.get(&bench.url("/")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
}

#[tokio::test]
async fn door_release_disarms_first() {
    let bench = Bench::new().await;
    bench.arm();
    let target = format!("allowed.test:{}", bench.origin.port());
    let mut open = bench.connect(DoorKind::Http);
    assert_eq!(
        tunnel(&mut open, &target).await,
        "HTTP/1.1 200 Connection established"
    );
    let mut idle = bench.connect(DoorKind::Http);
    idle.write_all(b"GET ").await.unwrap();
    bench.door.disarm();
    for io in [&mut open, &mut idle] {
        assert_eq!(read_all(io).await, "", "it was cut");
    }
    bench.quiet().await;
    let answer = bench.get(&bench.url("/")).await;
    assert!(answer.starts_with("HTTP/1.1 403 not_armed\r\n"), "{answer}");
    within(bench.door.stop()).await;
}

#[tokio::test]
async fn door_half_close_both_ways() {
    let bench = Bench::new().await;
    bench.arm();
    let port = bench.origin.port();
    for round in 0..50 {
        let kind = if round % 2 == 0 {
            DoorKind::Http
        } else {
            DoorKind::Socks5
        };
        let mut io = bench.connect(kind);
        match kind {
            DoorKind::Http => drop(tunnel(&mut io, &format!("allowed.test:{port}")).await),
            DoorKind::Socks5 | DoorKind::Dns => assert_eq!(socks5(&mut io, "allowed.test", port).await, 0),
        }
        // Ours ends first, and what the origin says after that still comes.
        io.write_all(b"to and fro").await.unwrap();
        io.shutdown().await.unwrap();
        assert_eq!(read_all(&mut io).await, "to and fro");
    }
    bench.quiet().await;
}

#[tokio::test]
async fn door_cap_is_per_sandbox() {
    let bench = Bench::new().await;
    bench.arm();
    let mut held = Vec::new();
    for _ in 0..DOOR_CONNECTIONS {
        held.push(bench.connect(DoorKind::Http));
    }
    let answer = bench.get(&bench.url("/")).await;
    assert!(
        answer.starts_with("HTTP/1.1 503 too_many_connections\r\n"),
        "{answer}"
    );
    assert!(answer.contains("retry-after: 1\r\n"), "{answer}");
    // The other door, and another sandbox, have places of their own.
    let mut io = bench.connect(DoorKind::Socks5);
    assert_eq!(socks5(&mut io, "allowed.test", bench.origin.port()).await, 0);
    let other = bench.egress.door(SandboxId::from_random([2; 16]));
    bench.arm_door(&other);
    let mut io = connect(&other, DoorKind::Http);
    io.write_all(format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", bench.url("/")).as_bytes())
        .await
        .unwrap();
    io.shutdown().await.unwrap();
    assert!(read_all(&mut io).await.starts_with("HTTP/1.1 200 OK\r\n"));
    drop(held);
    let freed = async {
        while bench.door.connections() >= DOOR_CONNECTIONS {
            tokio::task::yield_now().await;
        }
    };
    within(freed).await;
    assert!(
        bench
            .get(&bench.url("/"))
            .await
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
}

#[tokio::test(start_paused = true)]
async fn door_slow_head_times_out() {
    let bench = Bench::new().await;
    bench.arm();
    let mut slow = bench.connect(DoorKind::Http);
    let (mut from, mut to) = tokio::io::split(&mut slow);
    let dripping = async {
        for byte in b"GET http://allowed.test/ HTTP/1.1\r\n" {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if to.write_all(&[*byte]).await.is_err() {
                break;
            }
        }
    };
    let reading = async {
        let mut all = String::new();
        from.read_to_string(&mut all).await.unwrap();
        all
    };
    let (answer, ()) = tokio::join!(reading, dripping);
    assert!(answer.starts_with("HTTP/1.1 408 head_timeout\r\n"), "{answer}");

    let mut slow = bench.connect(DoorKind::Socks5);
    slow.write_all(&[5, 1]).await.unwrap();
    let mut all = Vec::new();
    slow.read_to_end(&mut all).await.unwrap();
    assert!(all.is_empty(), "{all:?}");
    // Between two requests a client may rest for longer.
    let mut idle = bench.connect(DoorKind::Http);
    let denied = b"GET http://no.test/ HTTP/1.1\r\nhost: a\r\n\r\n";
    idle.write_all(denied).await.unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    idle.write_all(denied).await.unwrap();
    let mut all = String::new();
    idle.read_to_string(&mut all).await.unwrap();
    assert_eq!(all.matches("HTTP/1.1 403 host_not_allowed").count(), 2, "{all}");
}

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

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[tokio::test]
async fn http_smuggling_corpus() {
    let bench = Bench::new().await;
    bench.arm();
    let url = bench.url("/");
    for (head, body) in [
        (
            "host: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
        ("host: a\r\ncontent-length: 4\r\ncontent-length: 4\r\n", "body"),
        ("host: a\r\ncontent-length: 4\r\ncontent-length: 5\r\n", "body"),
        ("host: a\r\ncontent-length: +4\r\n", "body"),
        ("host: a\r\ncontent-length: 4, 4\r\n", "body"),
        ("host: a\r\ncontent-length: 0x4\r\n", "body"),
        ("host: a\r\ncontent-length: \r\n", ""),
        ("host: a\r\ntransfer-encoding: chunked ,\r\n", "0\r\n\r\n"),
        ("host: a\r\ntransfer-encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        (
            "host: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
        ("host: a\r\ntransfer-encoding: identity\r\n", ""),
        ("host: a\r\ntransfer-encoding:\x0bchunked\r\n", "0\r\n\r\n"),
        ("host: a\nx: y\r\n", ""),
        ("host: a\r\nx: y\n", ""),
        ("host: a\r\nx: y\rz: w\r\n", ""),
        ("host: a\r\nx: y\0\r\n", ""),
        ("host: a\r\n folded: b\r\n", ""),
        ("host: a\r\nx : y\r\n", ""),
        ("host: a\r\n: y\r\n", ""),
        ("host: a\r\nnocolon\r\n", ""),
        ("host: a\r\nhost: b\r\n", ""),
        ("x: y\r\n", ""),
        ("host: a\r\ntransfer-encoding: chunked\r\n", "x\r\n\r\n"),
        ("host: a\r\ntransfer-encoding: chunked\r\n", "-1\r\n\r\n"),
        ("host: a\r\ntransfer-encoding: chunked\r\n", "1\nx\r\n0\r\n\r\n"),
        (
            "host: a\r\ntransfer-encoding: chunked\r\n",
            "1 \r\nx\r\n0\r\n\r\n",
        ),
        (
            "host: a\r\ntransfer-encoding: chunked\r\n",
            "ffffffffffffffff1\r\nx",
        ),
    ] {
        let text = format!("POST {url} HTTP/1.1\r\n{head}\r\n{body}");
        let answer = bench.ask(text.as_bytes()).await;
        let in_body = head.ends_with("transfer-encoding: chunked\r\n") && body != "0\r\n\r\n";
        // A fault in a body comes after its head has passed; it is an end, and never a second request.
        assert!(
            answer.starts_with("HTTP/1.1 400 bad_framing\r\n")
                || in_body && !answer.starts_with("HTTP/1.1 200"),
            "{text:?}: {answer}"
        );
        if !in_body {
            assert_eq!(bench.origin.text(), "", "{text:?}");
        }
    }
    for line in [
        "GET  http://a/ HTTP/1.1",
        "GET http://a/",
        "GET http://a/ HTTP/0.9",
        "GET http://a/ HTTP/2.0",
        "PRI * HTTP/2.0",
        "G\u{e4}T http://a/ HTTP/1.1",
        "GET http://a/ HTTP/1.1 ",
        " GET http://a/ HTTP/1.1",
    ] {
        let answer = bench.ask(format!("{line}\r\nhost: a\r\n\r\n").as_bytes()).await;
        assert!(
            answer.starts_with("HTTP/1.1 400 bad_framing\r\n"),
            "{line}: {answer}"
        );
    }
    let long = format!(
        "GET {url} HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n",
        "y".repeat(70_000)
    );
    assert!(
        bench
            .ask(long.as_bytes())
            .await
            .starts_with("HTTP/1.1 431 head_too_large")
    );
    let many = format!("GET {url} HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(128));
    assert!(
        bench
            .ask(many.as_bytes())
            .await
            .starts_with("HTTP/1.1 431 head_too_large")
    );
}

#[tokio::test]
async fn http_each_message_judged() {
    let bench = Bench::new().await;
    bench.arm();
    let allowed = format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", bench.url("/first"));
    let denied = "GET http://other.test/ HTTP/1.1\r\nhost: a\r\n\r\n";
    let answer = bench.ask(format!("{allowed}{denied}{allowed}").as_bytes()).await;
    let lines: Vec<&str> = answer
        .split("HTTP/1.1 ")
        .filter_map(|part| part.split("\r\n").next())
        .filter(|line| line.starts_with(char::is_numeric))
        .collect();
    assert_eq!(lines, ["200 OK", "403 host_not_allowed", "200 OK"], "{answer}");
    assert_eq!(bench.origin.text().matches("GET /first").count(), 2);
    // A fault is answered in its turn, and nothing behind it is looked at.
    let answer = bench
        .ask(format!("{allowed}GET / HTTP/1.1\n\n{allowed}").as_bytes())
        .await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK") && answer.contains("HTTP/1.1 400 bad_framing"),
        "{answer}"
    );
    assert_eq!(bench.origin.text().matches("GET /first").count(), 3);
    // Nor behind a CONNECT that was refused.
    let refused = "CONNECT other.test:443 HTTP/1.1\r\nhost: a\r\n\r\n";
    let answer = bench.ask(format!("{refused}{allowed}").as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 403 host_not_allowed") && !answer.contains("200 OK"),
        "{answer}"
    );
    assert_eq!(bench.origin.text().matches("GET /first").count(), 3);
}

#[tokio::test]
async fn http_connection_cannot_nominate() {
    let bench = Bench::new().await;
    bench.arm();
    let port = bench.origin.port();
    let text = format!(
        "POST {} HTTP/1.1\r\nhost: a\r\nconnection: host, content-length, x-gone, close\r\nx-gone: 1\r\nx-kept: 2\r\n\
         proxy-authorization: secret\r\nproxy-connection: keep-alive\r\nupgrade: h2c\r\nkeep-alive: 1\r\nte: trailers\r\n\
         content-length: 4\r\n\r\nbody",
        bench.url("/")
    );
    let answer = bench.ask(text.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let seen = bench.origin.text();
    for kept in [
        &*format!("host: allowed.test:{port}\r\n"),
        "content-length: 4\r\n",
        "x-kept: 2\r\n",
        "te: trailers\r\n",
    ] {
        assert_eq!(seen.matches(kept).count(), 1, "{kept}: {seen}");
    }
    for gone in ["x-gone", "proxy-", "upgrade", "keep-alive", "h2c"] {
        assert!(!seen.contains(gone), "{gone}: {seen}");
    }
    assert!(seen.contains("via: 1.1 sandboxd\r\n"), "{seen}");
    let traced = bench.ask(text.replace("POST", "TRACE").as_bytes()).await;
    assert!(traced.starts_with("HTTP/1.1 403 method_not_allowed"), "{traced}");
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
    let who = crate::policy::Who {
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
                    Box::pin(explain(&bench.egress, &sides.sides, &target, asked, Some(who))).await;
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

#[test]
fn socks_malformed_frames() {
    let name = |port: u16| {
        let mut bytes = vec![5, 1, 0, 3, 4];
        bytes.extend(b"a.bc");
        bytes.extend(port.to_be_bytes());
        bytes
    };
    let wish = |bytes: &[u8]| request(bytes).unwrap().map(|(wish, _)| wish);
    let refused = |bytes: &[u8]| match wish(bytes) {
        Some(Wish::Not(reason, _)) => reason,
        other => panic!("{bytes:?}: {other:?}"),
    };
    let whole = name(443);
    let target = Authority::parse("a.bc:443", None).unwrap();
    assert_eq!(wish(&whole), Some(Wish::Tunnel(target)));
    for cut in 0..whole.len() {
        assert_eq!(request(&whole[..cut]), Ok(None), "cut at {cut}");
    }
    assert_eq!(refused(&name(0)), DoorReason::BadTarget);
    assert_eq!(refused(&[5, 1, 0, 3, 0, 0, 80]), DoorReason::BadTarget);
    for command in [0, 2, 3, 9] {
        let mut bytes = whole.clone();
        bytes[1] = command;
        assert_eq!(refused(&bytes), DoorReason::CommandNotSupported);
    }
    assert_eq!(refused(&[5, 1, 0, 2]), DoorReason::AddressTypeNotSupported);
    for bad in [&[4, 1, 0, 80][..], &[0], &[5, 1, 1, 1], b"GET / HTTP/1.1"] {
        assert!(request(bad).is_err(), "{bad:?}");
    }
    let mapped = [
        5, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 1, 2, 3, 4, 0, 80,
    ];
    let target = Authority::parse("1.2.3.4:80", None).unwrap();
    assert_eq!(wish(&mapped), Some(Wish::Tunnel(target)));

    assert_eq!(greeting(&[5, 1, 0]), Ok(Some((true, 3))));
    assert_eq!(greeting(&[5, 2, 1, 2]), Ok(Some((false, 4))));
    assert_eq!(greeting(&[5, 0]), Ok(Some((false, 2))));
    for cut in [&[][..], &[5], &[5, 2], &[5, 2, 0]] {
        assert_eq!(greeting(cut), Ok(None));
    }
    assert!(greeting(&[4, 1]).is_err());
}

/// Feeds a guard in pieces; what passed, and what it came to.
fn fed(bytes: &[u8], piece: usize) -> (Vec<u8>, Next) {
    let (mut guard, mut input, mut out) = (Guard::new(), BytesMut::new(), BytesMut::new());
    let mut next = Next::More;
    for part in bytes.chunks(piece.max(1)) {
        input.extend_from_slice(part);
        next = guard.feed(&mut input, &mut out);
        if next != Next::More {
            break;
        }
    }
    (out.to_vec(), next)
}

fn some_message() -> impl Strategy<Value = String> {
    let heads = proptest::sample::select(vec![
        "GET http://a/ HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET http://a/ HTTP/1.0\r\n\r\n",
        "POST http://a/ HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n1\r\n\r\n",
        "POST http://a/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\n\r\n",
        "POST http://a/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-t: 1\r\n\r\n",
        "CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET / HTTP/1.1\nhost: a\r\n\r\n",
        "POST http://a/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nhost: b\r\n\r\n",
    ]);
    heads.prop_map(str::to_owned)
}

proptest! {
    #[test]
    fn guard_reads_alike_however_it_is_cut(messages in proptest::collection::vec(some_message(), 1..5), piece in 1_usize..40) {
        let bytes = messages.concat().into_bytes();
        prop_assert_eq!(fed(&bytes, piece), fed(&bytes, bytes.len()));
    }

    #[test]
    fn guard_passes_nothing_but_a_beginning(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..20) {
        let (out, _) = fed(&bytes, piece);
        prop_assert!(bytes.starts_with(&out));
    }
}

/// A guest's end of a link.
async fn guest(door: &Door) -> (h2::client::SendRequest<Bytes>, tokio::task::JoinHandle<String>) {
    let (host, mut guest) = tokio::io::duplex(256 * 1024);
    let door = door.clone();
    let serving = tasks::spawn("link", async move {
        Box::pin(super::serve_link(&door, host, [7; 16]))
            .await
            .to_string()
    });
    let (nonce, _behind) = within(fake::read_break(&mut guest)).await;
    let hello = encode_hello(nonce, &fake::hello()).unwrap();
    guest.write_all(&hello).await.unwrap();
    let (send, connection) = within(h2::client::handshake(guest)).await.unwrap();
    drop(tasks::spawn("guest", connection));
    (within(send.ready()).await.unwrap(), serving)
}

async fn stream(
    send: &h2::client::SendRequest<Bytes>,
    authority: &'static str,
) -> Result<(h2::SendStream<Bytes>, h2::RecvStream), h2::Error> {
    let request = http::Request::builder()
        .version(http::Version::HTTP_2)
        .method(http::Method::CONNECT)
        .uri(authority)
        .body(())
        .unwrap();
    let mut send = within(send.clone().ready()).await?;
    let (response, stream) = send.send_request(request, false)?;
    Ok((stream, within(response).await?.into_body()))
}

#[tokio::test]
async fn a_link_serves_both_doors_and_no_other() {
    let bench = Bench::new().await;
    bench.arm();
    let (send, serving) = guest(&bench.door).await;
    within(bench.door.linked()).await;
    assert!(stream(&send, "ssh.door:22").await.is_err());
    let (mut http, mut answer) = stream(&send, "http.door:3128").await.unwrap();
    let text = format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", bench.url("/"));
    http.send_data(text.into(), true).unwrap();
    let all = within(fake::read_all(&mut answer)).await.unwrap();
    assert!(all.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", all.escape_ascii());
    bench.quiet().await;
    drop((http, answer, send));
    within(serving).await.unwrap();
    assert!(!bench.door.is_linked());
}

#[tokio::test]
async fn door_link_abuse_is_contained() {
    let bench = Bench::new().await;
    bench.arm();
    let (send, serving) = guest(&bench.door).await;
    // A stream that nobody reads, and that is full.
    let (mut unread, _answer) = stream(&send, "http.door:3128").await.unwrap();
    let target = format!("allowed.test:{}", bench.origin.port());
    let head = format!("CONNECT {target} HTTP/1.1\r\nhost: a\r\n\r\n");
    unread.send_data(head.into(), false).unwrap();
    unread.send_data(vec![b'x'; 60_000].into(), false).unwrap();
    // Beside it others go on.
    for _ in 0..50 {
        let (mut http, mut answer) = stream(&send, "http.door:3128").await.unwrap();
        let text = format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", bench.url("/"));
        http.send_data(text.into(), true).unwrap();
        let all = within(fake::read_all(&mut answer)).await.unwrap();
        assert!(all.starts_with(b"HTTP/1.1 200 OK\r\n"));
    }
    // Streams of no use end the link, and nothing else.
    let other = bench.egress.door(SandboxId::from_random([2; 16]));
    bench.arm_door(&other);
    let (others, _others_link) = guest(&other).await;
    while !serving.is_finished() {
        assert!(stream(&send, "none.door:1").await.is_err());
        tokio::task::yield_now().await;
    }
    assert_eq!(
        within(serving).await.unwrap(),
        "the guest opens streams of no use"
    );
    let (mut http, mut answer) = stream(&others, "http.door:3128").await.unwrap();
    http.send_data(Bytes::from_static(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"), true)
        .unwrap();
    let all = within(fake::read_all(&mut answer)).await.unwrap();
    assert!(
        all.starts_with(b"HTTP/1.1 400 bad_target\r\n"),
        "{}",
        all.escape_ascii()
    );
    within(bench.door.stop()).await;
}
