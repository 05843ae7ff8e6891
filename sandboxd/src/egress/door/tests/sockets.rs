//! WebSocket: HTTP up to 101, and raw bytes behind it.

use std::{sync::atomic::Ordering, time::Duration};

use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinHandle,
};

use super::{
    intercept::{denials, inside, open},
    origin::{Inspected, Proof, client},
};
use crate::{
    egress::{
        DoorKind, Outcome,
        door::TUNNEL,
        tests::{Bench, pool, read_all, read_head, read_to, rule, within},
    },
    policy::RuleFields,
    tasks,
    words::OPERATOR,
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

/// Either side's end of a connection, in clear or inside TLS.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// How a client gets to its handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Tunnel,
    Inside(DoorKind),
}

impl Way {
    const ALL: [Self; 4] = [
        Self::Plain,
        Self::Tunnel,
        Self::Inside(DoorKind::Http),
        Self::Inside(DoorKind::Socks5),
    ];
    /// Those on which the door reads the handshake.
    const READ: [Self; 2] = [Self::Plain, Self::Inside(DoorKind::Http)];
}

/// A bench whose origin is the test's to serve, with or without TLS.
struct Sockets {
    bench: Bench,
    listener: TcpListener,
    inspected: Inspected,
}

impl Sockets {
    async fn new() -> Self {
        let (bench, listener) = Bench::scripted().await;
        Self {
            inspected: Inspected::new(&bench),
            bench,
            listener,
        }
    }

    /// The rule that lets this way in.
    fn rule(&self, way: Way) -> RuleFields {
        let port = self.bench.origin.port();
        match way {
            Way::Plain | Way::Tunnel => rule("s", "allowed.test", &[port]),
            Way::Inside(_) => inside("s", "allowed.test", port),
        }
    }

    /// Arms the doors for this way.
    fn arm(&self, way: Way) {
        self.bench.policy(vec![self.rule(way)]);
        self.bench.arm();
    }

    /// Puts a rule in force under the claim that is served.
    fn change(&self, rule: RuleFields) {
        self.bench.policy(vec![rule]);
        let book = self.bench.egress.book();
        self.bench.door.change(book.sides(Some(&pool()), OPERATOR, None));
    }

    /// A client's connection, and what it names as the target of `path`.
    async fn connect(&self, way: Way, path: &str) -> (Box<dyn Io>, String) {
        let port = self.bench.origin.port();
        match way {
            Way::Plain => (Box::new(self.bench.connect(DoorKind::Http)), self.bench.url(path)),
            Way::Tunnel => {
                let io = open(&self.bench, DoorKind::Http, "allowed.test", port).await;
                (Box::new(io), path.to_owned())
            }
            Way::Inside(kind) => {
                let io = open(&self.bench, kind, "allowed.test", port).await;
                let roots = self.inspected.trust();
                let tls = client(io, roots, "allowed.test", true, &["http/1.1"]).await;
                (tls.unwrap(), path.to_owned())
            }
        }
    }

    /// The host that a client names.
    fn host(&self) -> String {
        format!("allowed.test:{}", self.bench.origin.port())
    }

    /// A handshake that is asked for, and the origin's connection, which has not read it yet. What is looked into is
    /// dialled before the client may ask, all else behind that.
    async fn ask(&self, way: Way, fields: &str, behind: &str) -> (Box<dyn Io>, Box<dyn Io>) {
        let asking = async {
            let (mut io, target) = self.connect(way, "/chat").await;
            let head = format!(
                "GET {target} HTTP/1.1\r\nhost: {}\r\n{fields}\r\n{behind}",
                self.host()
            );
            io.write_all(head.as_bytes()).await.unwrap();
            io
        };
        tokio::join!(Box::pin(asking), Box::pin(self.accept(way)))
    }

    async fn accept(&self, way: Way) -> Box<dyn Io> {
        let origin = within(self.listener.accept()).await.unwrap().0;
        match way {
            Way::Plain | Way::Tunnel => Box::new(origin),
            Way::Inside(_) => {
                let acceptor = self.inspected.world.acceptor(Proof::Good, &["http/1.1"]);
                Box::new(within(Box::pin(acceptor.accept(origin))).await.unwrap())
            }
        }
    }

    /// A WebSocket that stands.
    async fn switched(&self, way: Way) -> (Box<dyn Io>, Box<dyn Io>) {
        let (mut io, mut origin) = self.ask(way, ASKS, "").await;
        let seen = read_head(&mut origin).await;
        assert!(seen.starts_with("GET /chat HTTP/1.1\r\n"), "{seen}");
        let fields = seen.to_lowercase();
        assert!(fields.contains("\r\nupgrade: websocket\r\n"), "{seen}");
        assert!(fields.contains("upgrade\r\n"), "{seen}");
        assert!(
            seen.contains("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"),
            "{seen}"
        );
        assert_eq!(seen.contains("via: "), way == Way::Plain, "{seen}");
        origin.write_all(AGREES.as_bytes()).await.unwrap();
        origin.flush().await.unwrap();
        let said = read_head(&mut io).await;
        assert!(
            said.starts_with("HTTP/1.1 101 Switching Protocols\r\n"),
            "{way:?}: {said}"
        );
        assert!(
            said.contains("connection: upgrade\r\n"),
            "{way:?}: a client agrees to nothing else: {said}"
        );
        assert!(said.contains("upgrade: websocket\r\n"), "{said}");
        assert!(
            said.contains("sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"),
            "{said}"
        );
        assert_eq!(read_to(&mut io, "first").await, "first");
        (io, origin)
    }

    /// Bytes of the guest, and to it, that its claim was billed.
    fn billed(&self) -> [u64; 2] {
        let armed = self.bench.door.armed().unwrap();
        [&armed.meters.sent, &armed.meters.received].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Gives every byte back, then ends.
fn echo(origin: Box<dyn Io>) -> JoinHandle<()> {
    tasks::spawn("echo", async move {
        let (mut from, mut to) = tokio::io::split(origin);
        tokio::io::copy(&mut from, &mut to).await.unwrap();
        to.shutdown().await.unwrap();
    })
}

/// Lets a time pass for all that waits.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

/// Resolves when a connection was cut: inside TLS that is an end without its word.
async fn is_cut(io: &mut (impl AsyncRead + Unpin), way: Way) {
    let mut rest = Vec::new();
    let ended = within(io.read_to_end(&mut rest)).await;
    assert_eq!(ended.is_err(), matches!(way, Way::Inside(_)), "{way:?}");
    assert!(rest.is_empty(), "{}", rest.escape_ascii());
}

#[tokio::test]
async fn door_websocket_three_ways() {
    let sockets = Sockets::new().await;
    for way in Way::ALL {
        sockets.arm(way);
        let before = sockets.billed();
        let (mut io, origin) = sockets.switched(way).await;
        let echoing = echo(origin);

        let large = frame(&vec![0x55; 10 << 20]);
        let (mut from, mut to) = tokio::io::split(&mut io);
        let reading = async {
            let mut back = vec![0; large.len()];
            from.read_exact(&mut back).await.unwrap();
            back
        };
        let writing = async {
            to.write_all(&large).await.unwrap();
            to.flush().await.unwrap();
        };
        let ((), back) = within(async { tokio::join!(writing, reading) }).await;
        assert!(back == large, "{way:?}: a frame came back as another");
        let after = sockets.billed();
        for (before, after) in before.into_iter().zip(after) {
            assert!(after - before > 10 << 20, "{way:?}: {before} {after}");
        }

        // It may rest for long, and goes on.
        pass(Duration::from_secs(5 * 60)).await;
        let small = frame(b"still there");
        io.write_all(&small).await.unwrap();
        io.shutdown().await.unwrap();
        assert_eq!(
            read_all(&mut io).await.as_bytes(),
            String::from_utf8_lossy(&small).as_bytes()
        );
        within(echoing).await.unwrap();
        sockets.bench.quiet().await;
    }
}

#[tokio::test]
async fn a_websocket_ends_by_either_side_and_by_rest() {
    let sockets = Sockets::new().await;
    for way in Way::ALL {
        sockets.arm(way);
        // The origin ends first: its client is told, and still heard.
        let (mut io, mut origin) = sockets.switched(way).await;
        origin.write_all(b"last").await.unwrap();
        origin.shutdown().await.unwrap();
        assert_eq!(read_all(&mut io).await, "last", "{way:?}");
        io.write_all(b"and mine").await.unwrap();
        io.shutdown().await.unwrap();
        assert_eq!(read_all(&mut origin).await, "and mine", "{way:?}");
        sockets.bench.quiet().await;
        // Either side's loss is the other's.
        let (io, mut origin) = sockets.switched(way).await;
        drop(io);
        is_lost(&mut origin, way).await;
        drop(origin);
        let (mut io, origin) = sockets.switched(way).await;
        drop(origin);
        is_lost(&mut io, way).await;
        drop(io);
        sockets.bench.quiet().await;
        // Nothing moves for as long as a tunnel may rest; it is looked at once in that time.
        let (mut io, _origin) = sockets.switched(way).await;
        pass(TUNNEL + Duration::from_secs(1)).await;
        pass(TUNNEL + Duration::from_secs(1)).await;
        is_cut(&mut io, way).await;
        drop(io);
        sockets.bench.quiet().await;
    }
}

/// Resolves when the other side is gone. In clear, a client that is dropped has ended; inside TLS it did not say so.
async fn is_lost(io: &mut Box<dyn Io>, way: Way) {
    let mut rest = Vec::new();
    let ended = within(io.read_to_end(&mut rest)).await;
    assert!(ended.is_err() || !matches!(way, Way::Inside(_)), "{way:?}");
    assert!(rest.is_empty(), "{}", rest.escape_ascii());
}

#[tokio::test]
async fn a_websocket_that_the_policy_refuses_is_not_passed_on() {
    let sockets = Sockets::new().await;
    let behind = format!("GET /behind HTTP/1.1\r\nhost: {}\r\n\r\n", sockets.host());
    // By the policy.
    let asks = format!(
        "GET {} HTTP/1.1\r\nhost: a\r\n{ASKS}\r\n{behind}",
        sockets.bench.url("/chat")
    );
    let answer = sockets
        .bench
        .ask(asks.replacen("allowed.test", "other.test", 1).as_bytes())
        .await;
    assert!(
        answer.starts_with("HTTP/1.1 403 host_not_allowed\r\n"),
        "{answer}"
    );
    assert!(answer.contains("connection: close\r\n"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    for way in Way::READ {
        // By a rule that does not have its path.
        sockets.bench.policy(vec![RuleFields {
            paths: vec!["/other".into()],
            ..sockets.rule(way)
        }]);
        sockets.bench.arm();
        let asked = async {
            let (mut io, target) = sockets.connect(way, "/chat").await;
            let head = format!(
                "GET {target} HTTP/1.1\r\nhost: {}\r\n{ASKS}\r\n{behind}",
                sockets.host()
            );
            io.write_all(head.as_bytes()).await.unwrap();
            io.shutdown().await.unwrap();
            read_all(&mut io).await
        };
        let (said, rest) = match way {
            Way::Plain | Way::Tunnel => (asked.await, Vec::new()),
            Way::Inside(_) => tokio::join!(Box::pin(asked), async {
                let (mut origin, mut rest) = (Box::pin(sockets.accept(way)).await, Vec::new());
                drop(within(origin.read_to_end(&mut rest)).await);
                rest
            }),
        };
        assert!(
            said.starts_with("HTTP/1.1 403 path_not_allowed\r\n"),
            "{way:?} {said}"
        );
        assert!(said.contains("connection: close\r\n"), "{said}");
        assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "{said}");
        assert!(rest.is_empty(), "nothing was passed on: {}", rest.escape_ascii());
        sockets.bench.quiet().await;
    }
}

#[tokio::test]
async fn a_websocket_that_is_refused_is_the_end_of_its_connection() {
    let sockets = Sockets::new().await;
    let behind = format!("GET /behind HTTP/1.1\r\nhost: {}\r\n\r\n", sockets.host());
    for way in Way::READ {
        sockets.arm(way);
        // By the origin, and by one that means another protocol, or says none.
        for (answer, line) in [
            (
                "HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\nno",
                "HTTP/1.1 400 No\r\n",
            ),
            (
                "HTTP/1.1 101 Yes\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
                "HTTP/1.1 502 upstream_protocol\r\n",
            ),
            ("", "HTTP/1.1 502 upstream_protocol\r\n"),
        ] {
            let (mut io, mut origin) = sockets.ask(way, ASKS, &behind).await;
            read_head(&mut origin).await;
            origin.write_all(answer.as_bytes()).await.unwrap();
            origin.shutdown().await.unwrap();
            io.shutdown().await.unwrap();
            let said = read_all(&mut io).await;
            assert!(said.starts_with(line), "{way:?} {answer}: {said}");
            assert!(said.contains("connection: close\r\n"), "{way:?} {answer}: {said}");
            assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "{said}");
            let mut rest = Vec::new();
            drop(within(origin.read_to_end(&mut rest)).await);
            assert!(
                rest.is_empty(),
                "nothing behind it was passed on: {}",
                rest.escape_ascii()
            );
        }
        sockets.bench.quiet().await;
    }
}

#[tokio::test]
async fn only_websocket_is_switched_to() {
    let sockets = Sockets::new().await;
    for way in Way::READ {
        sockets.arm(way);
        for asks in [
            "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n",
            "connection: upgrade\r\nupgrade: websocket, h2c\r\n",
            "connection: upgrade\r\nupgrade: websocket\r\nupgrade: h2c\r\n",
            "upgrade: websocket\r\n",
            "connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 4\r\n",
        ] {
            let body = if asks.contains("length") { "body" } else { "" };
            let (mut io, mut origin) = sockets.ask(way, asks, body).await;
            let seen = read_head(&mut origin).await;
            assert!(!seen.contains("upgrade") && !seen.contains("http2"), "{seen}");
            // An origin that switches all the same is not followed.
            origin.write_all(AGREES.as_bytes()).await.unwrap();
            origin.flush().await.unwrap();
            let said = read_head(&mut io).await;
            assert!(
                said.starts_with("HTTP/1.1 502 upstream_protocol\r\n"),
                "{way:?} {asks}{said}"
            );
        }
    }
}

#[tokio::test]
async fn a_websocket_is_held_to_the_rule_that_let_it_in() {
    let sockets = Sockets::new().await;
    for way in Way::READ {
        let seen = |path: &str| RuleFields {
            methods: vec!["GET".into()],
            paths: vec![path.into()],
            ..sockets.rule(way)
        };
        sockets.bench.policy(vec![seen("/chat")]);
        sockets.bench.arm();
        let (mut io, mut origin) = sockets.switched(way).await;
        // A rule that sees requests alone has let it in, and still does.
        sockets.change(seen("/chat"));
        io.write_all(b"on").await.unwrap();
        io.flush().await.unwrap();
        assert_eq!(read_to(&mut origin, "on").await, "on");
        let before = denials(&sockets.bench).len();
        sockets.change(seen("/other"));
        is_cut(&mut io, way).await;
        sockets.bench.quiet().await;
        assert_eq!(
            denials(&sockets.bench).get(before..),
            Some(&[DoorReason::PolicyChanged][..])
        );
        let (decided, ..) = sockets.bench.egress.decisions().read(Some(0));
        let of_it = |outcome: fn(&Outcome) -> bool| {
            let found = decided
                .iter()
                .rev()
                .find(|decided| outcome(&decided.outcome))
                .unwrap();
            (found.method.clone(), found.path.clone())
        };
        let request = ("GET".to_owned(), "/chat".to_owned());
        assert_eq!(of_it(|outcome| matches!(outcome, Outcome::Denied(_))), request);
        assert_eq!(of_it(|outcome| matches!(outcome, Outcome::Allowed(_))), request);
    }
}

#[tokio::test]
async fn a_websocket_ends_with_its_host_and_its_claim() {
    let sockets = Sockets::new().await;
    for way in Way::ALL {
        sockets.arm(way);
        let (mut io, mut origin) = sockets.switched(way).await;
        sockets.change(rule("s", "other.test", &[443]));
        is_cut(&mut io, way).await;
        is_lost(&mut origin, way).await;
        assert_eq!(denials(&sockets.bench).last(), Some(&DoorReason::PolicyChanged));
        sockets.bench.quiet().await;

        sockets.arm(way);
        let before = denials(&sockets.bench).len();
        let (mut io, mut origin) = sockets.switched(way).await;
        sockets.bench.door.disarm();
        is_cut(&mut io, way).await;
        is_lost(&mut origin, way).await;
        sockets.bench.quiet().await;
        assert_eq!(denials(&sockets.bench).len(), before, "an end is no denial");
    }
}

/// RFC 8441 is not offered, and who asks for it all the same is refused in the words of HTTP/2.
#[tokio::test]
async fn http2_offers_no_websocket() {
    let sockets = Sockets::new().await;
    let way = Way::Inside(DoorKind::Http);
    sockets.arm(way);
    let port = sockets.bench.origin.port();
    let acceptor = sockets.inspected.world.acceptor(Proof::Good, &["h2"]);
    let accepting = async {
        let origin = within(sockets.listener.accept()).await.unwrap().0;
        let tls = within(Box::pin(acceptor.accept(origin))).await.unwrap();
        let mut origin = within(Box::pin(h2::server::handshake(tls))).await.unwrap();
        let (asked, mut answer) = within(origin.accept()).await.unwrap().unwrap();
        answer.send_response(http::Response::new(()), true).unwrap();
        let seen = (asked.method().clone(), asked.uri().path().to_owned());
        // Until its client is gone.
        let more = within(origin.accept()).await;
        (seen, more.is_none_or(|more| more.is_err()))
    };
    let asking = async {
        let io = open(&sockets.bench, DoorKind::Http, "allowed.test", port).await;
        let tls = client(io, sockets.inspected.trust(), "allowed.test", true, &["h2"]).await;
        let (mut sender, connection) = within(h2::client::handshake(tls.unwrap())).await.unwrap();
        let driver = tasks::spawn("client", connection);
        let mut ask = async |method: &str, protocol: Option<&'static str>| {
            sender = within(sender.clone().ready()).await.unwrap();
            let uri = match (method, protocol) {
                ("CONNECT", None) => sockets.host(),
                _ => format!("https://{}/chat", sockets.host()),
            };
            let mut request = http::Request::builder().method(method).uri(uri);
            if let Some(protocol) = protocol {
                request = request.extension(h2::ext::Protocol::from_static(protocol));
            }
            let (answer, _) = sender.send_request(request.body(()).unwrap(), true).unwrap();
            let answered = within(answer).await;
            let offered = sender.is_extended_connect_protocol_enabled();
            (answered.map(|answer| answer.status().as_u16()), offered)
        };
        let (refused, offered) = ask("CONNECT", Some("websocket")).await;
        assert_eq!(refused.unwrap_err().reason(), Some(h2::Reason::PROTOCOL_ERROR));
        assert!(!offered);
        assert_eq!(ask("CONNECT", None).await.0.unwrap(), 400);
        assert_eq!(ask("GET", None).await.0.unwrap(), 200, "its connection goes on");
        driver.abort();
    };
    let ((), (seen, is_over)) = tokio::join!(Box::pin(asking), Box::pin(accepting));
    assert_eq!(seen, (http::Method::GET, "/chat".to_owned()));
    assert!(is_over, "nothing else was passed on");
    assert_eq!(denials(&sockets.bench), [DoorReason::BadTarget]);
}
