//! Messages that are unusual and legal: both sides are the test's.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    net::{TcpListener, TcpStream},
};

use crate::egress::{
    DoorKind,
    door::BODY,
    tests::{Bench, read_all, read_head, read_to, within},
};

/// A client that has sent this, and the origin's end of what the door made of it.
async fn asked(bench: &Bench, origin: &TcpListener, text: &str) -> (DuplexStream, TcpStream) {
    let mut io = bench.connect(DoorKind::Http);
    io.write_all(text.as_bytes()).await.unwrap();
    (io, accept(origin).await)
}

async fn accept(origin: &TcpListener) -> TcpStream {
    within(origin.accept()).await.unwrap().0
}

/// The head of a request.
fn head(bench: &Bench, method: &str, more: &str) -> String {
    format!("{method} {} HTTP/1.1\r\nhost: a\r\n{more}\r\n", bench.url("/x"))
}

/// Whether nothing has come, as far as can be seen now.
async fn is_silent(io: &mut (impl AsyncRead + Unpin)) -> bool {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    io.read_u8().now_or_never().is_none()
}

const EXPECTS: &str = "content-length: 4\r\nexpect: 100-continue\r\n";
const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

#[tokio::test]
async fn http_expect_and_early_answers() {
    let (bench, listener) = Bench::scripted().await;
    let expects = head(&bench, "PUT", EXPECTS);

    // Allowed: the client is told when the origin says so, and by no other word of it.
    let (mut io, mut origin) = asked(&bench, &listener, &expects).await;
    assert!(
        read_head(&mut origin)
            .await
            .contains("\r\nexpect: 100-continue\r\n")
    );
    assert!(is_silent(&mut io).await, "nobody has asked for the body");
    origin
        .write_all(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")
        .await
        .unwrap();
    assert!(
        is_silent(&mut io).await,
        "that was no leave, and is not passed on"
    );
    origin.write_all(CONTINUE.as_bytes()).await.unwrap();
    assert_eq!(read_head(&mut io).await, CONTINUE);
    io.write_all(b"body").await.unwrap();
    assert_eq!(read_to(&mut origin, "body").await, "body");
    origin
        .write_all(b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok")
        .await
        .unwrap();
    let answer = read_to(&mut io, "ok").await;
    assert!(answer.starts_with("HTTP/1.1 201 Created\r\n"), "{answer}");
    assert!(!answer.contains("connection: close"), "{answer}");
    drop(io);

    // An origin that has never heard of it says nothing, and gets the body all the same.
    let (mut io, mut origin) = asked(&bench, &listener, &expects).await;
    read_head(&mut origin).await;
    assert_eq!(read_head(&mut io).await, CONTINUE);
    io.write_all(b"body").await.unwrap();
    assert_eq!(read_to(&mut origin, "body").await, "body");
    drop((io, origin));

    // Denied: that, no leave, and nothing behind it is taken for a request.
    let denied = expects.replace("allowed.test", "other.test");
    let answer = bench.ask(denied.as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 403 host_not_allowed\r\n"),
        "{answer}"
    );
    assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");

    // The origin's last word comes first: it is passed on, the body is never asked for, and that was all.
    let (mut io, mut origin) = asked(&bench, &listener, &expects).await;
    read_head(&mut origin).await;
    origin
        .write_all(b"HTTP/1.1 417 No\r\ncontent-length: 2\r\n\r\nno")
        .await
        .unwrap();
    let answer = read_all(&mut io).await;
    assert!(answer.starts_with("HTTP/1.1 417 "), "{answer}");
    assert!(
        answer.contains("\r\nconnection: close\r\n") && answer.ends_with("no"),
        "{answer}"
    );
    let mut rest = Vec::new();
    drop(within(origin.read_to_end(&mut rest)).await);
    assert!(rest.is_empty(), "{}", rest.escape_ascii());

    // A client of before cannot be told, and is not.
    let old = expects.replace("HTTP/1.1", "HTTP/1.0") + "body";
    let (mut io, mut origin) = asked(&bench, &listener, &old).await;
    let seen = read_to(&mut origin, "body").await;
    assert!(!seen.contains("expect"), "{seen}");
    origin
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        .await
        .unwrap();
    assert!(read_all(&mut io).await.starts_with("HTTP/1.0 200 OK\r\n"));
}

#[tokio::test]
async fn http_answers_in_mid_upload_are_whole() {
    const MUCH: usize = 8 << 20;
    let (bench, listener) = Bench::scripted().await;
    let upload = head(&bench, "PUT", &format!("content-length: {MUCH}\r\n"));
    for round in 0..20 {
        let (io, mut origin) = asked(&bench, &listener, &upload).await;
        let (mut from, mut to) = tokio::io::split(io);
        let sending = async move {
            // It is cut off at some time.
            drop(to.write_all(&vec![7; MUCH]).await);
        };
        let refusing = async {
            read_head(&mut origin).await;
            origin.read_exact(&mut [0; 10_000]).await.unwrap();
            let refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 9\r\n\r\ntoo large";
            origin.write_all(refusal).await.unwrap();
            // Either it says so, or it is gone: with bytes unread, which resets.
            if round % 2 == 0 {
                origin.shutdown().await.unwrap();
            }
            drop(origin);
        };
        let reading = async {
            let mut all = String::new();
            from.read_to_string(&mut all).await.unwrap();
            all
        };
        let ((), (), answer) = within(Box::pin(async { tokio::join!(sending, refusing, reading) })).await;
        assert!(answer.starts_with("HTTP/1.1 413 Too Large\r\n"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\ntoo large"), "{answer}");
    }

    // An origin that answers as it reads is given all of it.
    let (io, mut origin) = asked(&bench, &listener, &upload).await;
    let (mut from, mut to) = tokio::io::split(io);
    let sending = async { to.write_all(&vec![7; MUCH]).await.unwrap() };
    let echoing = async {
        read_head(&mut origin).await;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {MUCH}\r\n\r\n");
        origin.write_all(head.as_bytes()).await.unwrap();
        let (mut from, mut to) = origin.split();
        let mut from = (&mut from).take(MUCH as u64);
        tokio::io::copy(&mut from, &mut to).await.unwrap()
    };
    let reading = async {
        let mut all = Vec::new();
        from.read_to_end(&mut all).await.unwrap();
        all.iter().filter(|byte| **byte == 7).count()
    };
    let ((), sent, back) = within(Box::pin(async { tokio::join!(sending, echoing, reading) })).await;
    assert_eq!((sent, back), (MUCH as u64, MUCH));
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[tokio::test]
async fn http_bodies_and_trailers() {
    let (bench, listener) = Bench::scripted().await;

    // Answers without a body, all on one connection: each ends where it ends.
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "HEAD", "")).await;
    for (method, answer, kept) in [
        (
            "HEAD",
            "HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n",
            "content-length: 1234\r\n",
        ),
        (
            "HEAD",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-a: b\r\n\r\n",
            "x-a: b\r\n",
        ),
        (
            "GET",
            "HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n",
            "content-length: 99\r\n",
        ),
        ("GET", "HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n", "x-a: b\r\n"),
        (
            "GET",
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "content-length: 0\r\n",
        ),
    ] {
        if answer.contains("1234") {
            read_head(&mut origin).await;
        } else {
            io.write_all(head(&bench, method, "").as_bytes()).await.unwrap();
            read_head(&mut origin).await;
        }
        origin.write_all(answer.as_bytes()).await.unwrap();
        let said = read_head(&mut io).await;
        let line = answer.lines().next().unwrap();
        assert!(said.starts_with(line) && said.contains(kept), "{answer}{said}");
        assert!(
            !said.contains("transfer-encoding") && !said.contains("connection: close"),
            "{said}"
        );
    }
    drop((io, origin));

    // Chunks with trailers, there and back.
    let framed = "transfer-encoding: chunked\r\ntrailer: x-sum\r\n";
    let chunks = "3\r\nabc\r\n0\r\nx-sum: 6\r\n\r\n";
    let text = head(&bench, "POST", &format!("{framed}te: trailers\r\n")) + chunks;
    let (mut io, mut origin) = asked(&bench, &listener, &text).await;
    let seen = read_to(&mut origin, "x-sum: 6\r\n\r\n").await;
    for part in [
        "trailer: x-sum\r\n",
        "te: trailers\r\n",
        "transfer-encoding: chunked\r\n",
        "\r\n3\r\nabc\r\n0\r\n",
    ] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    origin
        .write_all(format!("HTTP/1.1 200 OK\r\n{framed}\r\n{chunks}").as_bytes())
        .await
        .unwrap();
    let said = read_to(&mut io, "x-sum: 6\r\n\r\n").await;
    assert!(!said.contains("connection: close"), "{said}");
    assert!(
        said.contains("trailer: x-sum\r\n") && said.contains("\r\n3\r\nabc\r\n0\r\n"),
        "{said}"
    );
    drop(origin);
    // Whoever did not say that it takes them gets none, and an end all the same.
    let text = head(&bench, "POST", framed) + chunks;
    io.write_all(text.as_bytes()).await.unwrap();
    let mut origin = accept(&listener).await;
    read_to(&mut origin, "x-sum: 6\r\n\r\n").await;
    origin
        .write_all(format!("HTTP/1.1 200 OK\r\n{framed}\r\n{chunks}").as_bytes())
        .await
        .unwrap();
    let said = read_to(&mut io, "3\r\nabc\r\n0\r\n\r\n").await;
    assert!(said.starts_with("HTTP/1.1 200 OK\r\n"), "{said}");
    drop((io, origin));

    // A body that ends with its connection: in chunks to whoever can tell their end from a loss, as it is to others.
    for (version, expected) in [
        ("HTTP/1.1", "5\r\nbytes\r\n0\r\n\r\n"),
        ("HTTP/1.0", "\r\n\r\nbytes"),
    ] {
        let text = head(&bench, "GET", "").replace("HTTP/1.1", version);
        let (mut io, mut origin) = asked(&bench, &listener, &text).await;
        assert!(read_head(&mut origin).await.starts_with("GET /x HTTP/1.1\r\n"));
        origin
            .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nbytes")
            .await
            .unwrap();
        origin.shutdown().await.unwrap();
        io.shutdown().await.unwrap();
        let said = read_all(&mut io).await;
        assert!(said.starts_with(&format!("{version} 200 OK\r\n")), "{said}");
        assert!(said.ends_with(expected), "{said}");
    }
    // A client of before need not say whom it asks twice.
    let old = format!("GET {} HTTP/1.0\r\n\r\n", bench.url("/x"));
    let (mut io, mut origin) = asked(&bench, &listener, &old).await;
    let seen = read_head(&mut origin).await;
    assert!(
        seen.contains(&format!("host: allowed.test:{}\r\n", bench.origin.port())),
        "{seen}"
    );
    origin
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        .await
        .unwrap();
    assert!(
        read_all(&mut io).await.ends_with("\r\n\r\nok"),
        "and its connection ends"
    );
    drop(origin);

    // A body that is cut is cut for the client too, and is never its end.
    for (answer, whole) in [
        ("content-length: 10\r\n\r\nbytes", "0123456789"),
        ("transfer-encoding: chunked\r\n\r\n5\r\nbytes\r\n", "0\r\n\r\n"),
    ] {
        let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
        read_head(&mut origin).await;
        origin
            .write_all(format!("HTTP/1.1 200 OK\r\n{answer}").as_bytes())
            .await
            .unwrap();
        read_to(&mut io, "bytes").await;
        origin.shutdown().await.unwrap();
        let rest = read_all(&mut io).await;
        assert!(!whole.ends_with(rest.trim()) || rest.trim().is_empty(), "{rest}");
    }

    // Framing that two readers could read in two ways goes no further.
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    let both =
        "HTTP/1.1 200 OK\r\ncontent-length: 99\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    origin.write_all(both.as_bytes()).await.unwrap();
    let said = read_to(&mut io, "0\r\n\r\n").await;
    assert!(!said.contains("content-length"), "{said}");
    drop((io, origin));
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    let coded = "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    origin.write_all(coded.as_bytes()).await.unwrap();
    io.shutdown().await.unwrap();
    let said = read_all(&mut io).await;
    assert!(said.starts_with("HTTP/1.1 502 upstream_protocol\r\n"), "{said}");
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// One request on a client connection of its own, answered over this connection of the origin.
async fn served(bench: &Bench, origin: &mut TcpStream) {
    let mut io = bench.connect(DoorKind::Http);
    io.write_all(head(bench, "GET", "").as_bytes()).await.unwrap();
    read_head(origin).await;
    origin.write_all(OK).await.unwrap();
    assert!(read_to(&mut io, "ok").await.starts_with("HTTP/1.1 200 OK\r\n"));
    drop(io);
    bench.quiet().await;
}

/// Resolves when the other side has ended it.
async fn gone(origin: &mut TcpStream) {
    let mut rest = Vec::new();
    drop(within(origin.read_to_end(&mut rest)).await);
    assert!(rest.is_empty(), "{}", rest.escape_ascii());
}

#[tokio::test]
async fn http_connections_that_rest_are_the_claims_own() {
    let (bench, listener) = Bench::scripted().await;
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    origin
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        .await
        .unwrap();
    read_head(&mut io).await;
    drop(io);
    // It is told of the loss by what it can write no more.
    origin.write_all(&[7; 1_000_000]).await.ok();
    bench.quiet().await;
    let armed = bench.door.armed().unwrap();
    assert_eq!(armed.kept.len(), 0, "its answer was not read to its end");
    gone(&mut origin).await;

    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    origin.write_all(OK).await.unwrap();
    read_to(&mut io, "ok").await;
    drop(io);
    bench.quiet().await;
    // Other connections of programs use it, and it stays with its address whatever the name leads to.
    let asked_before = bench.dns.asked().len();
    bench.dns.set("allowed.test", &["127.0.0.1"]);
    for _ in 0..3 {
        served(&bench, &mut origin).await;
    }
    assert_eq!(bench.dns.asked().len(), asked_before);
    assert_eq!(armed.kept.len(), 1);
    // Each request is judged: what the policy denies does not go over it.
    let denied = bench
        .ask(head(&bench, "GET", "").replace("/x", ":1/x").as_bytes())
        .await;
    assert!(denied.starts_with("HTTP/1.1 400 "), "{denied}");
    bench.policy(vec![]);
    let sides = bench
        .egress
        .book()
        .sides(Some(&crate::egress::tests::pool()), "operator", None);
    bench.door.change(sides);
    let denied = bench.ask(head(&bench, "GET", "").as_bytes()).await;
    assert!(
        denied.starts_with("HTTP/1.1 403 host_not_allowed\r\n"),
        "{denied}"
    );
    gone(&mut origin).await;

    // Another sandbox of the same claim's terms has none of it, and neither has the next claim of this one.
    let port = bench.origin.port();
    bench.policy(vec![crate::egress::tests::rule("t", "allowed.test", &[port])]);
    bench.dns.set("allowed.test", &["127.0.0.2"]);
    bench.arm();
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    origin.write_all(OK).await.unwrap();
    read_to(&mut io, "ok").await;
    let other = bench
        .egress
        .door(sandbox_protocol::id::SandboxId::from_random([2; 16]));
    bench.arm_door(&other);
    let mut its = crate::egress::tests::connect(&other, DoorKind::Http);
    its.write_all(head(&bench, "GET", "").as_bytes()).await.unwrap();
    let mut second = accept(&listener).await;
    read_head(&mut second).await;
    drop((its, second, io));
    bench.quiet().await;
    let armed = bench.door.armed().unwrap();
    assert_eq!(armed.kept.len(), 1);
    bench.door.disarm();
    assert_eq!(armed.kept.len(), 0);
    gone(&mut origin).await;
}

#[tokio::test]
async fn http_connections_that_died_resting_cost_no_answer() {
    let (bench, listener) = Bench::scripted().await;
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    origin.write_all(OK).await.unwrap();
    read_to(&mut io, "ok").await;
    // It takes the next request and dies of it: that is asked once more, elsewhere.
    io.write_all(head(&bench, "GET", "").as_bytes()).await.unwrap();
    read_head(&mut origin).await;
    drop(origin);
    let mut origin = accept(&listener).await;
    read_head(&mut origin).await;
    origin.write_all(OK).await.unwrap();
    read_to(&mut io, "ok").await;
    // What has a body, or must not be done twice, does not take that chance.
    for (method, framed) in [
        ("PUT", "content-length: 4\r\n"),
        ("POST", "content-length: 0\r\n"),
    ] {
        let body = if method == "PUT" { "body" } else { "" };
        let text = head(&bench, method, framed) + body;
        io.write_all(text.as_bytes()).await.unwrap();
        let mut fresh = accept(&listener).await;
        read_head(&mut fresh).await;
        // And a first connection that dies is not tried again.
        drop(fresh);
        let said = read_head(&mut io).await;
        assert!(said.starts_with("HTTP/1.1 502 upstream_protocol\r\n"), "{said}");
        read_to(&mut io, "}\n").await;
    }
    // One that died before is not tried at all.
    drop(origin);
    io.write_all(head(&bench, "GET", "").as_bytes()).await.unwrap();
    let mut origin = accept(&listener).await;
    read_head(&mut origin).await;
    origin.write_all(OK).await.unwrap();
    read_to(&mut io, "ok").await;
}

#[tokio::test]
async fn http_connections_that_rest_are_few_and_rest_for_a_while() {
    const MOST: usize = 64;
    let (bench, listener) = Bench::scripted().await;
    let mut all = Vec::new();
    for _ in 0..MOST + 6 {
        let (io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
        read_head(&mut origin).await;
        all.push((io, origin));
    }
    for (io, origin) in &mut all {
        origin.write_all(OK).await.unwrap();
        read_to(io, "ok").await;
    }
    let mut origins: Vec<TcpStream> = all.into_iter().map(|(_io, origin)| origin).collect();
    bench.quiet().await;
    let kept = &bench.door.armed().unwrap().kept;
    assert_eq!(kept.len(), MOST);
    for first in &mut origins[..6] {
        gone(first).await;
    }
    // The others are there until their time is over.
    assert!(origins[6].read_u8().now_or_never().is_none());
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(61)).await;
    tokio::time::resume();
    for rest in &mut origins[6..] {
        gone(rest).await;
    }
}

#[tokio::test]
async fn a_body_that_rests_for_too_long_is_given_up() {
    let (bench, listener) = Bench::scripted().await;
    let (mut io, mut origin) = asked(&bench, &listener, &head(&bench, "GET", "")).await;
    read_head(&mut origin).await;
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n";
    origin.write_all(answer).await.unwrap();
    read_head(&mut io).await;
    let pass = async |time: Duration| {
        tokio::time::pause();
        tokio::time::advance(time).await;
        tokio::time::resume();
    };
    // Each piece begins the time anew.
    for piece in ["one", "two"] {
        origin.write_all(piece.as_bytes()).await.unwrap();
        assert_eq!(read_to(&mut io, piece).await, piece);
        pass(BODY - Duration::from_secs(1)).await;
    }
    origin.write_all(b"3").await.unwrap();
    assert_eq!(read_to(&mut io, "3").await, "3");
    pass(BODY + Duration::from_secs(1)).await;
    assert_eq!(read_all(&mut io).await, "", "its client is told by an early end");
    let mut rest = Vec::new();
    drop(within(origin.read_to_end(&mut rest)).await);
    bench.quiet().await;
}
