//! A guest's connections: how they end, how many and how slow they may be, and the link that carries them.

use std::time::Duration;

use bytes::Bytes;
use sandbox_protocol::{id::SandboxId, limits::DOOR_CONNECTIONS, link::encode_hello};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    egress::{
        Door, DoorKind,
        door::serve_link,
        tests::{Bench, connect, read_all, socks5, tunnel, within},
    },
    link::fake,
    tasks,
};

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

/// Time between two requests counts from the last one, however long the connection has lived.
#[tokio::test(start_paused = true)]
async fn a_kept_connection_may_rest_behind_each_request() {
    let bench = Bench::new().await;
    bench.arm();
    let mut io = bench.connect(DoorKind::Http);
    for _ in 0..5 {
        io.write_all(b"GET http://no.test/ HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_secs(45)).await;
    }
    assert_eq!(bench.door.connections(), 1);
    // The 60 s behind the last are over in 15.
    let mut all = String::new();
    io.read_to_string(&mut all).await.unwrap();
    assert_eq!(all.matches("HTTP/1.1 403 host_not_allowed").count(), 5, "{all}");
}

/// A guest's end of a link.
async fn guest(door: &Door) -> (h2::client::SendRequest<Bytes>, tokio::task::JoinHandle<String>) {
    let (host, mut guest) = tokio::io::duplex(256 * 1024);
    let door = door.clone();
    let serving = tasks::spawn("link", async move {
        Box::pin(serve_link(&door, host, [7; 16])).await.to_string()
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
