//! A bench for doors: a name server, an origin on a loopback address that is opened, and a sandbox's doors.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use sandbox_protocol::id::{ClaimId, SandboxId};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    net::{TcpListener, TcpStream, UdpSocket},
};

use super::{door::Accepted, *};
use crate::{
    clock::Clock,
    policy::{HostPattern, Internal, Layer, Mode, Opening, RuleFields, SecretSource, SecretTerms, Vetting},
    tasks,
    telemetry::metrics::Metrics,
    words::{Name, OPERATOR},
};

/// A hang, not a speed.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), future)
        .await
        .expect("nothing hangs")
}

/// Answers A and AAAA from a list that can change; logs what it was asked.
#[derive(Clone, Default)]
pub(crate) struct Dns {
    names: Arc<Mutex<BTreeMap<String, Vec<IpAddr>>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Dns {
    pub(crate) fn set(&self, name: &str, addresses: &[&str]) {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        self.names.lock().unwrap().insert(name.into(), addresses);
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    async fn serve(self) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        drop(tasks::spawn("dns", async move {
            let mut packet = [0; 512];
            while let Ok((n, from)) = socket.recv_from(&mut packet).await {
                socket.send_to(&self.answer(&packet[..n]), from).await.unwrap();
            }
        }));
        address
    }

    fn answer(&self, question: &[u8]) -> Vec<u8> {
        let (mut labels, mut at) = (Vec::new(), 12);
        while question[at] != 0 {
            let end = at + 1 + usize::from(question[at]);
            labels.push(String::from_utf8_lossy(&question[at + 1..end]).into_owned());
            at = end;
        }
        let kind = u16::from_be_bytes([question[at + 1], question[at + 2]]);
        let name = labels.join(".").to_lowercase();
        self.asked.lock().unwrap().push(name.clone());
        let names = self.names.lock().unwrap();
        let found = names.get(&name);
        let rdata: Vec<Vec<u8>> = found
            .into_iter()
            .flatten()
            .filter_map(|address| match (kind, address) {
                (1, IpAddr::V4(v4)) => Some(v4.octets().to_vec()),
                (28, IpAddr::V6(v6)) => Some(v6.octets().to_vec()),
                _ => None,
            })
            .collect();
        let code = if found.is_some() { 0x80 } else { 0x83 };
        let count = u8::try_from(rdata.len()).unwrap();
        let mut answer = vec![question[0], question[1], 0x81, code, 0, 1, 0, count, 0, 0, 0, 0];
        answer.extend(&question[12..at + 5]);
        for data in rdata {
            answer.extend([0xc0, 12]);
            answer.extend(kind.to_be_bytes());
            answer.extend([0, 1, 0, 0, 0, 0, 0, u8::try_from(data.len()).unwrap()]);
            answer.extend(data);
        }
        answer
    }
}

/// An origin that answers each request with 200 and the head that it saw, and records all bytes.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<u8>>>,
}

impl Origin {
    async fn serve() -> Self {
        let (origin, listener) = Self::silent().await;
        let log = Arc::clone(&origin.seen);
        drop(tasks::spawn("origin", async move {
            while let Ok((stream, _)) = listener.accept().await {
                drop(tasks::spawn("origin", answer(stream, Arc::clone(&log))));
            }
        }));
        origin
    }

    /// One whose connections are the test's to serve.
    async fn silent() -> (Self, TcpListener) {
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::default();
        (Self { address, seen }, listener)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }
}

async fn answer(mut stream: TcpStream, log: Arc<Mutex<Vec<u8>>>) {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let n = stream.read(&mut chunk).await.unwrap_or(0);
        if n == 0 {
            // Whatever is no request is given back at its end: a tunnel's other side.
            drop(stream.write_all(&bytes).await);
            drop(stream.shutdown().await);
            return;
        }
        log.lock().unwrap().extend_from_slice(&chunk[..n]);
        bytes.extend_from_slice(&chunk[..n]);
        let is_whole = bytes.ends_with(b"\r\n\r\n");
        let is_bare = bytes.starts_with(b"GET ") || bytes.starts_with(b"PUT ");
        if is_bare && is_whole || bytes.starts_with(b"POST ") && bytes.ends_with(b"body") {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", bytes.len());
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
            bytes.clear();
        }
    }
}

/// The bench.
pub(crate) struct Bench {
    pub(crate) settings: Settings,
    pub(crate) egress: Egress,
    pub(crate) door: Door,
    pub(crate) dns: Dns,
    pub(crate) origin: Origin,
}

pub(crate) fn rule(id: &str, host: &str, ports: &[u16]) -> RuleFields {
    RuleFields {
        id: id.into(),
        host: vec![host.into()],
        ports: ports.iter().map(|port| u32::from(*port)).collect(),
        ..RuleFields::default()
    }
}

/// What is said of a secret for `allowed.test`, which every tenant may use.
pub(crate) fn secret_terms(header: Option<&str>) -> SecretTerms {
    SecretTerms {
        header: header.map(|header| header.parse().unwrap()),
        prefix: header.map_or("", |_| "Bearer ").into(),
        source: SecretSource::Env("THE_SECRET".into()),
        hosts: vec![HostPattern::parse("allowed.test").unwrap()],
        tenants: Opening::All,
    }
}

/// Secrets of which every one has this value.
pub(crate) fn secrets(terms: &[(&str, SecretTerms)], value: &str) -> Secrets {
    let terms = terms
        .iter()
        .map(|(name, terms)| (name.parse().unwrap(), terms.clone()));
    let (secrets, unreadable) = Secrets::read(&terms.collect(), |_| Some(value.into()));
    assert!(unreadable.is_empty(), "{unreadable:?}");
    secrets
}

pub(crate) fn pool() -> Name {
    "p".parse().unwrap()
}

impl Bench {
    pub(crate) async fn new() -> Self {
        Self::to(Origin::serve().await, Audit::off()).await
    }

    pub(crate) async fn audited(audit: Audit) -> Self {
        Self::to(Origin::serve().await, audit).await
    }

    /// With an origin whose connections are the test's to serve, armed.
    pub(crate) async fn scripted() -> (Self, TcpListener) {
        let (origin, listener) = Origin::silent().await;
        let bench = Self::to(origin, Audit::off()).await;
        bench.arm();
        (bench, listener)
    }

    async fn to(origin: Origin, audit: Audit) -> Self {
        let dns = Dns::default();
        dns.set("allowed.test", &["127.0.0.2"]);
        dns.set("other.test", &["127.0.0.2"]);
        let opened = Internal {
            net: "127.0.0.2/32".parse().unwrap(),
            ports: BTreeSet::from([origin.port()]),
            pools: Opening::All,
            tenants: Opening::All,
        };
        let settings = Settings {
            servers: vec![dns.clone().serve().await],
            vetting: Vetting {
                internal: vec![opened],
                ..Vetting::default()
            },
            ..Settings::default()
        };
        let egress = Egress::audited(settings.clone(), Metrics::new().door, Clock::host(), audit);
        let terms = PoolTerms {
            policy: Some("build".parse().unwrap()),
            requires_claim_layer: false,
        };
        egress.book().set_pool(&pool(), terms);
        let bench = Self {
            settings,
            door: egress.door(SandboxId::from_random([1; 16])),
            egress,
            dns,
            origin,
        };
        let port = bench.origin.port();
        bench.policy(vec![rule("t", "allowed.test", &[port])]);
        bench
    }

    /// Opens one more port of the origins' address.
    pub(crate) fn open(&self, port: u16) {
        let mut vetting = Vetting::clone(&self.egress.0.vetting.load());
        for opened in &mut vetting.internal {
            opened.ports.insert(port);
        }
        self.egress.0.vetting.store(Arc::new(vetting));
    }

    /// Sets the pool's policy.
    pub(crate) fn policy(&self, rules: Vec<RuleFields>) {
        let layer = Layer::new(Mode::Enforce, rules, 256).unwrap();
        let policies = BTreeMap::from([("build".parse().unwrap(), Arc::new(layer))]);
        self.egress.book().set(policies, BTreeMap::new());
    }

    /// Puts other settings in force.
    pub(crate) fn set(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.settings.clone();
        change(&mut settings);
        self.egress.set(settings);
    }

    /// Arms the doors for a tenant that has the pool's policy as well.
    pub(crate) fn arm_for(&self, tenant: &str) {
        let sides = self.egress.book().sides(Some(&pool()), OPERATOR, None);
        let claim = ClaimId::from_random([8; 16]);
        self.door.arm(claim, tenant.into(), Some(pool()), sides);
    }

    pub(crate) fn arm(&self) {
        self.arm_door(&self.door);
    }

    pub(crate) fn arm_door(&self, door: &Door) {
        let sides = self.egress.book().sides(Some(&pool()), OPERATOR, None);
        door.arm(
            ClaimId::from_random([9; 16]),
            OPERATOR.into(),
            Some(pool()),
            sides,
        );
    }

    /// A connection of a program.
    pub(crate) fn connect(&self, kind: DoorKind) -> DuplexStream {
        connect(&self.door, kind)
    }

    /// `http://allowed.test:PORT/`.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://allowed.test:{}{path}", self.origin.port())
    }

    /// What the HTTP door answers to these bytes, up to its end.
    pub(crate) async fn ask(&self, bytes: &[u8]) -> String {
        let mut io = self.connect(DoorKind::Http);
        io.write_all(bytes).await.unwrap();
        io.shutdown().await.unwrap();
        read_all(&mut io).await
    }

    pub(crate) async fn get(&self, url: &str) -> String {
        let host = url.split('/').nth(2).unwrap_or_default();
        self.ask(format!("GET {url} HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes())
            .await
    }

    /// Resolves when no connection is open.
    pub(crate) async fn quiet(&self) {
        let none_open = async {
            while self.door.connections() > 0 {
                tokio::task::yield_now().await;
            }
        };
        within(none_open).await;
    }
}

pub(crate) fn connect(door: &Door, kind: DoorKind) -> DuplexStream {
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    door.group()
        .spawn("door", Accepted::new(door, kind).serve(theirs));
    ours
}

pub(crate) async fn read_all(io: &mut (impl AsyncRead + Unpin)) -> String {
    let mut all = Vec::new();
    within(io.read_to_end(&mut all)).await.unwrap();
    String::from_utf8_lossy(&all).into_owned()
}

/// Connects by SOCKS5 and gives the reply's code.
pub(crate) async fn socks5(io: &mut DuplexStream, host: &str, port: u16) -> u8 {
    io.write_all(&[5, 1, 0]).await.unwrap();
    let mut greeted = [0; 2];
    within(io.read_exact(&mut greeted)).await.unwrap();
    assert_eq!(greeted, [5, 0]);
    let mut request = vec![5, 1, 0, 3, u8::try_from(host.len()).unwrap()];
    request.extend(host.as_bytes());
    request.extend(port.to_be_bytes());
    io.write_all(&request).await.unwrap();
    let mut reply = [0; 10];
    within(io.read_exact(&mut reply)).await.unwrap();
    reply[1]
}

/// What is said up to and with `end`.
pub(crate) async fn read_to(io: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut said = Vec::new();
    while !said.ends_with(end.as_bytes()) {
        let mut byte = [0];
        let n = within(io.read(&mut byte)).await.unwrap();
        assert_eq!(n, 1, "the end came before {end:?}: {}", said.escape_ascii());
        said.push(byte[0]);
    }
    String::from_utf8(said).unwrap()
}

/// A head.
pub(crate) async fn read_head(io: &mut (impl AsyncRead + Unpin)) -> String {
    read_to(io, "\r\n\r\n").await
}

/// Opens a tunnel by CONNECT; gives the status line.
pub(crate) async fn tunnel(io: &mut DuplexStream, target: &str) -> String {
    let head = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n");
    io.write_all(head.as_bytes()).await.unwrap();
    let head = read_head(io).await;
    head.lines().next().unwrap_or_default().to_owned()
}
