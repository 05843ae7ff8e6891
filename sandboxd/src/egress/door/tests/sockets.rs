//! WebSocket: HTTP up to 101, and raw bytes behind it.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    net::TcpStream,
};

use crate::egress::{
    DoorKind, Outcome,
    tests::{Bench, pool, read_all, read_head, read_to, rule, tunnel, within},
};

const ASKS: &str = "connection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\nsec-websocket-version: 13\r\n\
                    sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
/// An origin that agrees, and speaks first.
const AGREES: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                      sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nfirst";

/// A binary frame of a client: its mask is of zeros.
fn frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x82, 0x80 | 127];
    frame.extend((payload.len() as u64).to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

/// How a client gets to its handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Tunnel,
}

impl Way {
    const ALL: [Self; 2] = [Self::Plain, Self::Tunnel];

    /// A connection on which the handshake has been asked for.
    async fn ask(self, bench: &Bench) -> DuplexStream {
        let mut io = bench.connect(DoorKind::Http);
        let target = match self {
            Self::Plain => bench.url("/chat"),
            Self::Tunnel => {
                let target = format!("allowed.test:{}", bench.origin.port());
                tunnel(&mut io, &target).await;
                "/chat".to_owned()
            }
        };
        let head = format!("GET {target} HTTP/1.1\r\nhost: a\r\n{ASKS}\r\n");
        io.write_all(head.as_bytes()).await.unwrap();
        io
    }
}

/// Gives every byte back, then ends.
async fn echo(mut origin: TcpStream) {
    let (mut from, mut to) = origin.split();
    tokio::io::copy(&mut from, &mut to).await.unwrap();
    to.shutdown().await.unwrap();
}

#[tokio::test]
async fn door_websocket_three_ways() {
    let (bench, listener) = Bench::scripted().await;
    for way in Way::ALL {
        let mut io = way.ask(&bench).await;
        let mut origin = within(listener.accept()).await.unwrap().0;
        let seen = read_head(&mut origin).await;
        assert!(seen.starts_with("GET /chat HTTP/1.1\r\n"), "{seen}");
        assert!(
            seen.to_lowercase().contains("\r\nupgrade: websocket\r\n"),
            "{seen}"
        );
        assert!(
            seen.contains("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"),
            "{seen}"
        );
        origin.write_all(AGREES.as_bytes()).await.unwrap();
        let said = read_head(&mut io).await;
        assert!(
            said.starts_with("HTTP/1.1 101 Switching Protocols\r\n"),
            "{way:?}: {said}"
        );
        assert!(said.contains("upgrade: websocket\r\n"), "{said}");
        assert!(
            said.contains("sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"),
            "{said}"
        );
        assert_eq!(read_to(&mut io, "first").await, "first");
        let echoing = crate::tasks::spawn("echo", echo(origin));

        let large = frame(&vec![0x55; 10 << 20]);
        let (mut from, mut to) = tokio::io::split(&mut io);
        let reading = async {
            let mut back = vec![0; large.len()];
            from.read_exact(&mut back).await.unwrap();
            back
        };
        let (sent, back) = within(async { tokio::join!(to.write_all(&large), reading) }).await;
        sent.unwrap();
        assert!(back == large, "{way:?}: a frame came back as another");

        // It may rest for long, and goes on.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(5 * 60)).await;
        tokio::time::resume();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let small = frame(b"still there");
        io.write_all(&small).await.unwrap();
        io.shutdown().await.unwrap();
        assert_eq!(
            read_all(&mut io).await.as_bytes(),
            String::from_utf8_lossy(&small).as_bytes()
        );
        within(echoing).await.unwrap();
        bench.quiet().await;
    }
}

#[tokio::test]
async fn a_websocket_that_is_refused_is_the_end_of_its_connection() {
    let (bench, listener) = Bench::scripted().await;
    let behind = format!("GET {} HTTP/1.1\r\nhost: a\r\n\r\n", bench.url("/behind"));
    // By the policy.
    let asks = format!(
        "GET {} HTTP/1.1\r\nhost: a\r\n{ASKS}\r\n{behind}",
        bench.url("/chat")
    );
    let answer = bench
        .ask(asks.replacen("allowed.test", "other.test", 1).as_bytes())
        .await;
    assert!(
        answer.starts_with("HTTP/1.1 403 host_not_allowed\r\n"),
        "{answer}"
    );
    assert!(answer.contains("connection: close\r\n"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    // By the origin, and by one that means another protocol.
    for (answer, line) in [
        (
            "HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\nno",
            "HTTP/1.1 400 No\r\n",
        ),
        (
            "HTTP/1.1 101 Yes\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
            "HTTP/1.1 502 upstream_protocol\r\n",
        ),
    ] {
        let mut io = bench.connect(DoorKind::Http);
        io.write_all(asks.as_bytes()).await.unwrap();
        let mut origin = within(listener.accept()).await.unwrap().0;
        read_head(&mut origin).await;
        origin.write_all(answer.as_bytes()).await.unwrap();
        io.shutdown().await.unwrap();
        let said = read_all(&mut io).await;
        assert!(said.starts_with(line), "{said}");
        assert!(said.contains("connection: close\r\n"), "{said}");
        assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "{said}");
        let mut rest = Vec::new();
        drop(within(origin.read_to_end(&mut rest)).await);
        assert!(
            rest.is_empty(),
            "nothing behind it was passed on: {}",
            rest.escape_ascii()
        );
    }
}

#[tokio::test]
async fn only_websocket_is_switched_to() {
    let (bench, listener) = Bench::scripted().await;
    for asks in [
        "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n",
        "connection: upgrade\r\nupgrade: websocket, h2c\r\n",
        "connection: upgrade\r\nupgrade: websocket\r\nupgrade: h2c\r\n",
        "upgrade: websocket\r\n",
        "connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 4\r\n",
    ] {
        let body = if asks.contains("length") { "body" } else { "" };
        let text = format!("GET {} HTTP/1.1\r\nhost: a\r\n{asks}\r\n{body}", bench.url("/"));
        let mut io = bench.connect(DoorKind::Http);
        io.write_all(text.as_bytes()).await.unwrap();
        let mut origin = within(listener.accept()).await.unwrap().0;
        let seen = read_head(&mut origin).await;
        assert!(!seen.contains("upgrade") && !seen.contains("http2"), "{seen}");
        // An origin that switches all the same is not followed.
        origin.write_all(AGREES.as_bytes()).await.unwrap();
        let said = read_head(&mut io).await;
        assert!(
            said.starts_with("HTTP/1.1 502 upstream_protocol\r\n"),
            "{asks}{said}"
        );
    }
}

#[tokio::test]
async fn a_websocket_is_held_to_the_rule_that_let_it_in() {
    let (bench, listener) = Bench::scripted().await;
    let port = bench.origin.port();
    let seen = |path: &str| {
        let mut seen = rule("s", "allowed.test", &[port]);
        (seen.methods, seen.paths) = (vec!["GET".into()], vec![path.into()]);
        bench.policy(vec![seen]);
        bench.egress.book().sides(Some(&pool()), "operator", None)
    };
    bench.door.change(seen("/chat"));
    let mut io = Way::Plain.ask(&bench).await;
    let mut origin = within(listener.accept()).await.unwrap().0;
    read_head(&mut origin).await;
    origin.write_all(AGREES.as_bytes()).await.unwrap();
    assert!(read_head(&mut io).await.starts_with("HTTP/1.1 101 "));
    read_to(&mut io, "first").await;
    // A rule that sees requests alone has let it in, and still does.
    io.write_all(b"on").await.unwrap();
    assert_eq!(read_to(&mut origin, "on").await, "on");
    bench.door.change(seen("/other"));
    assert_eq!(read_all(&mut io).await, "", "it was cut");
    let (decided, ..) = bench.egress.decisions().read(Some(1));
    let last = decided.last().unwrap();
    assert_eq!(
        last.outcome,
        Outcome::Denied(sandbox_protocol::door::DoorReason::PolicyChanged)
    );
    assert_eq!((last.method.as_str(), last.path.as_str()), ("GET", "/chat"));
}
