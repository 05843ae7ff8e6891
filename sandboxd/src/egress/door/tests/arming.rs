//! When a door serves: from the claim on, to its end.

use sandbox_protocol::id::ClaimId;
use tokio::io::AsyncWriteExt as _;

use crate::{
    egress::{
        DoorKind,
        tests::{Bench, read_all, tunnel, within},
    },
    policy::Sides,
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
    let claim = ClaimId::from_random([8; 16]);
    bench.door.arm(claim, "t".into(), None, Sides::default());
    assert_eq!(line().await, "HTTP/1.1 403 no_policy");
    bench.door.disarm();
    assert_eq!(line().await, "HTTP/1.1 403 not_armed");
    bench.arm();
    assert_eq!(line().await, "HTTP/1.1 200 OK");
    // What is dialled is what was judged, now; a claim begins without connections that rest.
    bench.dns.set("allowed.test", &["10.0.0.1"]);
    bench.arm();
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
