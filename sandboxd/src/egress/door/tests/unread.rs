//! Clients that ask, and never read what they are answered. What is told to them fits into no buffer: their connections
//! are narrow.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    time::sleep,
};

use super::{
    intercept::{http1, http2, inside, open},
    origin::{Inspected, Proof, TlsOrigin, client},
};
use crate::egress::{
    DoorKind,
    door::Accepted,
    tests::{Bench, read_head, within},
};

/// For how long an answer may be left untaken.
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// A connection of a program that holds a few bytes.
fn narrow(bench: &Bench, kind: DoorKind) -> DuplexStream {
    let (ours, theirs) = tokio::io::duplex(4);
    let accepted = Accepted::new(&bench.door, kind);
    bench.door.group().spawn("door", accepted.serve(theirs));
    ours
}

/// Lets a time pass, and what it brings about happen.
async fn pass(time: Duration) {
    sleep(time).await;
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
}

/// A client that reads nothing keeps its place for a while, and loses it at the latest after so long.
async fn loses_its_place(bench: &Bench, at_last: Duration) {
    tokio::time::pause();
    pass(LIMIT / 2).await;
    assert_eq!(bench.door.connections(), 1, "it was given up early");
    pass(at_last).await;
    assert_eq!(bench.door.connections(), 0, "it was never given up");
    tokio::time::resume();
}

#[tokio::test]
async fn refusals_that_nobody_reads_end() {
    let bench = Bench::new().await;
    let denied: &[u8] = b"GET http://no.test/ HTTP/1.1\r\nhost: a\r\n\r\n";
    for (is_armed, kind, asked) in [
        (false, DoorKind::Http, denied),
        (true, DoorKind::Http, denied),
        (
            true,
            DoorKind::Http,
            b"CONNECT no.test:80 HTTP/1.1\r\nhost: a\r\n\r\n",
        ),
        (true, DoorKind::Http, b"GET / HTTP/1.1\n"),
        (
            true,
            DoorKind::Socks5,
            b"\x05\x01\x00\x05\x01\x00\x01\x01\x02\x03\x04\x00\x50",
        ),
    ] {
        if is_armed {
            bench.arm();
        }
        let mut io = narrow(&bench, kind);
        if is_armed {
            within(io.write_all(asked)).await.unwrap();
        }
        loses_its_place(&bench, LIMIT).await;
    }
}

#[tokio::test]
async fn answers_that_nobody_reads_end() {
    let (bench, listener) = Bench::scripted().await;
    let port = bench.origin.port();
    // A tunnel's word that it stands.
    for (kind, asked) in [
        (
            DoorKind::Http,
            format!("CONNECT allowed.test:{port} HTTP/1.1\r\nhost: a\r\n\r\n").into_bytes(),
        ),
        (DoorKind::Socks5, {
            let mut asked = b"\x05\x01\x00\x05\x01\x00\x03\x0callowed.test".to_vec();
            asked.extend(port.to_be_bytes());
            asked
        }),
    ] {
        let mut io = narrow(&bench, kind);
        within(io.write_all(&asked)).await.unwrap();
        let _origin = within(listener.accept()).await.unwrap();
        loses_its_place(&bench, LIMIT).await;
    }
    // An origin's answer.
    let mut io = narrow(&bench, DoorKind::Http);
    let asked = format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", bench.url("/"));
    within(io.write_all(asked.as_bytes())).await.unwrap();
    let mut origin = within(listener.accept()).await.unwrap().0;
    read_head(&mut origin).await;
    origin
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome body")
        .await
        .unwrap();
    // Whoever reads a little now and then keeps it.
    assert_eq!(within(io.read_u8()).await.unwrap(), b'H');
    tokio::time::pause();
    for _ in 0..4 {
        pass(LIMIT / 5 * 4).await;
        io.read_u8().await.unwrap();
    }
    tokio::time::resume();
    loses_its_place(&bench, LIMIT).await;
}

/// One answer, begun and not read, of a client inside TLS that speaks this.
async fn begun(bench: &Bench, inspected: &Inspected, origin: &TlsOrigin, alpn: &str) -> Response<Incoming> {
    let own = format!("allowed.test:{}", origin.port);
    let io = open(bench, DoorKind::Http, "allowed.test", origin.port).await;
    let tls = client(io, inspected.trust(), "allowed.test", true, &[alpn])
        .await
        .unwrap();
    // The origin says it back: more than all buffers and windows on the way hold.
    let body = Full::new(Bytes::from(vec![b'x'; 4 << 20]));
    let request = Request::post(format!("https://{own}/"))
        .header("host", own)
        .body(body)
        .unwrap();
    let response = if alpn == "h2" {
        within(http2(tls).await.send_request(request)).await
    } else {
        within(http1(tls).await.send_request(request)).await
    };
    response.unwrap()
}

#[tokio::test]
async fn answers_inside_tls_that_nobody_reads_end() {
    for alpn in ["http/1.1", "h2"] {
        let bench = Bench::new().await;
        let inspected = Inspected::new(&bench);
        let origin = TlsOrigin::serve(&bench, &inspected.world, Proof::Good, &[alpn]).await;
        bench.policy(vec![inside("t", "allowed.test", origin.port)]);
        bench.arm();
        let response = begun(&bench, &inspected, &origin, alpn).await;
        assert_eq!(response.status(), StatusCode::OK, "{alpn}");
        // A connection of HTTP/2 whose last stream is gone rests for a minute more.
        loses_its_place(&bench, 2 * LIMIT).await;
        let rest = within(response.into_body().collect()).await;
        assert!(
            rest.is_err(),
            "{alpn}: the answer was cut, and is not taken for whole"
        );
    }
}
