//! What is read as a message, and what is refused as none.

use bytes::BytesMut;
use proptest::prelude::*;
use sandbox_protocol::door::DoorReason;

use crate::{
    egress::{
        door::{
            guard::{Guard, Next},
            socks5::{Wish, greeting, request},
        },
        tests::{Bench, rule, secret_terms, secrets},
    },
    policy::Authority,
};

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
    // Nor what the host adds.
    let terms = secret_terms(Some("x-gone"));
    bench.set(|settings| settings.secrets = secrets(&[("s", terms)], "hush"));
    let mut given = rule("s", "allowed.test", &[port]);
    (given.secret, given.cleartext_secret) = (Some("s".into()), true);
    bench.policy(vec![given]);
    bench.arm();
    bench.origin.seen.lock().unwrap().clear();
    let answer = bench.ask(text.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let seen = bench.origin.text();
    assert!(
        seen.contains("x-gone: Bearer hush\r\n") && !seen.contains("x-gone: 1"),
        "{seen}"
    );
    let traced = bench.ask(text.replace("POST", "TRACE").as_bytes()).await;
    assert!(traced.starts_with("HTTP/1.1 403 method_not_allowed"), "{traced}");
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
