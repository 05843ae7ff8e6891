//! Doors of a guest that goes to sleep and wakes elsewhere. The daemon puts nobody to sleep yet; what is here is what it
//! will do it by: an agent that rests and is renewed, doors that deny until they are armed, slots, and a policy that is
//! made of the claim's record anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicUsize, Ordering},
    },
};

use harness::{HANG, program, within};
use sandbox_protocol::id::{ClaimId, SandboxId};
use sandboxd::{
    agent::{self, Quiesce, RenewMode, RenewSpec},
    clock::Clock,
    egress::{Door, Egress, PoolTerms, Settings, door::serve_link},
    link::{self, Link},
    net::{HTTP_PORT, Taken},
    policy::{Internal, Layer, Mode, Opening, RuleFields, Vetting},
    telemetry::metrics::Metrics,
    words::{Name, OPERATOR},
};
use tokio::{io::AsyncBufReadExt as _, net::UnixStream, task::JoinHandle};

use crate::{bench::Bench, guest::Guest};

/// An address of this machine's loopback that is not its own.
const ORIGIN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OK: &str = "HTTP/1.1 200 OK";
const DENIED: &str = "HTTP/1.1 403 port_not_allowed";
const NOT_ARMED: &str = "HTTP/1.1 403 not_armed";

/// What a claim's record has of its doors, a node that has the policy it names, and where that leads.
struct World {
    egress: Egress,
    pool: Name,
    sandbox: SandboxId,
    claim: ClaimId,
    port: u16,
    met: Arc<AtomicUsize>,
}

impl World {
    fn new() -> Self {
        let listener = TcpListener::bind((ORIGIN, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let met = Arc::new(AtomicUsize::new(0));
        let meets = Arc::clone(&met);
        // It ends with the test.
        drop(std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                meets.fetch_add(1, Ordering::SeqCst);
                drop(std::thread::spawn(move || {
                    // A tunnel is held, a request is answered.
                    if stream.read(&mut [0; 1024]).unwrap_or(0) > 0 {
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                        stream.write_all(answer).unwrap();
                    }
                }));
            }
        }));
        let vetting = Vetting {
            internal: vec![Internal {
                net: format!("{ORIGIN}/32").parse().unwrap(),
                ports: BTreeSet::from([port]),
                pools: Opening::All,
                tenants: Opening::All,
            }],
            ..Vetting::default()
        };
        let settings = Settings {
            vetting,
            ..Settings::default()
        };
        let egress = Egress::new(settings, Metrics::new().door.clone(), Clock::host());
        let rule = RuleFields {
            id: "t".to_owned(),
            host: vec![ORIGIN.to_string()],
            ports: vec![port.into()],
            ..RuleFields::default()
        };
        let layer = Arc::new(Layer::new(Mode::Enforce, vec![rule], 1).unwrap());
        let pool: Name = "default".parse().unwrap();
        egress
            .book()
            .set(BTreeMap::from([(pool.clone(), layer)]), BTreeMap::new());
        let terms = PoolTerms {
            policy: Some(pool.clone()),
            requires_claim_layer: false,
        };
        egress.book().set_pool(&pool, terms);
        Self {
            egress,
            pool,
            sandbox: SandboxId::from_random([1; 16]),
            claim: ClaimId::from_random([2; 16]),
            port,
            met,
        }
    }

    /// As a start arms what a record says was claimed.
    fn arm(&self, door: &Door) {
        let sides = self.egress.book().sides(Some(&self.pool), OPERATOR, None);
        door.arm(self.claim, OPERATOR.into(), Some(self.pool.clone()), sides);
    }

    fn met(&self) -> usize {
        self.met.load(Ordering::SeqCst)
    }

    fn get(&self, port: u16) -> String {
        format!("GET http://{ORIGIN}:{port}/ HTTP/1.1\r\nhost: x\r\n\r\n")
    }

    /// What is in force: this destination and no other, whoever asks by `said`.
    fn is_in_force(&self, said: impl Fn(String) -> String) {
        assert_eq!(said(self.get(self.port)), OK);
        assert_eq!(said(self.get(1)), DENIED);
    }

    fn connect(&self) -> String {
        format!("CONNECT {ORIGIN}:{} HTTP/1.1\r\nhost: x\r\n\r\n", self.port)
    }
}

fn first_line(mut stream: TcpStream, bytes: &str) -> String {
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    all.lines().next().unwrap_or_default().to_owned()
}

/// A tunnel that stands.
fn tunnel(mut stream: TcpStream, bytes: &str) -> TcpStream {
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut said = [0; 256];
    let n = stream.read(&mut said).unwrap();
    assert!(said[..n].starts_with(b"HTTP/1.1 200"), "{:?}", &said[..n]);
    stream
}

/// It was reset, or has ended.
fn is_over(mut stream: &TcpStream) -> bool {
    !matches!(stream.read(&mut [0; 64]), Ok(n) if n > 0)
}

/// A fresh name for what the host says, each once.
fn fresh() -> [u8; 16] {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    [NEXT.fetch_add(1, Ordering::SeqCst); 16]
}

/// An agent on lane none, as a process: its memory is the capture, and its two ports are what a host comes by.
struct Agent {
    socket: PathBuf,
    _process: tokio::process::Child,
    _dir: tempfile::TempDir,
}

impl Agent {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let mut process = tokio::process::Command::new(program("silkd-under-test"))
            .arg("--serve")
            .arg(&socket)
            .args(["--doors", "127.0.0.1:0,127.0.0.1:0"])
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = tokio::io::BufReader::new(process.stderr.take().unwrap()).lines();
        let serves = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line.contains("serving ") {
                    return;
                }
            }
            panic!("silkd ended early");
        };
        within(HANG, serves).await;
        Self {
            socket,
            _process: process,
            _dir: dir,
        }
    }

    async fn link(&self) -> Link {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        let opened = link::open(stream, fresh(), Clock::host());
        within(HANG, opened).await.unwrap().link
    }

    /// A host's end of its doors, which denies until it is armed.
    async fn door(&self, world: &World) -> (Door, JoinHandle<()>) {
        let door = world.egress.door(world.sandbox);
        let stream = UnixStream::connect(self.socket.with_extension("egress"))
            .await
            .unwrap();
        let (served, nonce) = (door.clone(), fresh());
        let serving = tokio::spawn(async move { drop(Box::pin(serve_link(&served, stream, nonce)).await) });
        within(HANG, door.linked()).await;
        (door, serving)
    }
}

async fn renew(link: &Link, world: &World, mode: RenewMode, door: &Door) {
    let spec = RenewSpec {
        mode,
        renew_id: format!("{:?}", fresh()),
        seed: [7; 32],
        sandbox: world.sandbox,
        hostname: "guest".to_owned(),
        ask_doors: true,
    };
    let proof = door.prove();
    let renewed = within(HANG, agent::renew(link, spec, &Clock::host()))
        .await
        .unwrap();
    let said = renewed.doors.unwrap();
    proof.by_guest(&said.http, &said.socks5).unwrap();
}

/// The HTTP door of a guest on lane none, as its programs are told of it.
async fn proxy(link: &Link) -> SocketAddr {
    let argv = ["sh", "-c", "printf %s ${http_proxy#http://}"].map(Into::into);
    let ran = within(HANG, agent::exec_once(link, &argv, HANG)).await.unwrap();
    String::from_utf8(ran.output).unwrap().parse().unwrap()
}

async fn by_link(rest: Quiesce) {
    let world = World::new();
    let agent = Agent::start().await;
    let link = agent.link().await;
    let (door, serving) = agent.door(&world).await;
    renew(&link, &world, RenewMode::Clone, &door).await;
    world.arm(&door);
    let at = proxy(&link).await;
    let said = |bytes: String| first_line(TcpStream::connect(at).unwrap(), &bytes);
    tokio::task::block_in_place(|| world.is_in_force(said));
    let open = tokio::task::block_in_place(|| tunnel(TcpStream::connect(at).unwrap(), &world.connect()));
    let met = world.met();

    within(HANG, agent::quiesce(&link, rest, HANG)).await.unwrap();
    serving.abort();
    drop(serving.await);
    door.disarm();
    within(HANG, door.stop()).await;
    drop((door, link));
    tokio::task::block_in_place(|| {
        assert!(is_over(&open), "what was open at the capture has ended");
        assert_eq!(said(world.get(world.port)), "HTTP/1.1 503 door_unreachable");
    });

    // Awake, by another host's end, before and after it is renewed: nothing is open until it is armed.
    let (link, (door, _serving)) = (agent.link().await, agent.door(&world).await);
    tokio::task::block_in_place(|| assert_eq!(said(world.get(world.port)), NOT_ARMED));
    renew(&link, &world, RenewMode::Wake, &door).await;
    tokio::task::block_in_place(|| assert_eq!(said(world.get(world.port)), NOT_ARMED));
    assert_eq!(world.met(), met, "{rest:?}: nobody was let out between");
    world.arm(&door);
    tokio::task::block_in_place(|| world.is_in_force(said));
}

/// A slot whose doors listen and deny, and the guest behind it.
async fn bound(bench: &Bench, world: &World) -> (Taken, Door, Guest) {
    let mut taken = bench.lane().take().await.unwrap();
    let tap = taken.take_tap().unwrap();
    let doors = taken.bind().await.unwrap();
    let door = world.egress.door(world.sandbox);
    door.listen(doors.http, doors.socks5).unwrap();
    let guest = Guest::behind(tap, taken.slot().to_string());
    (taken, door, guest)
}

async fn by_card() {
    let world = World::new();
    let bench = Bench::new(2).await;
    let (taken, door, guest) = bound(&bench, &world).await;
    taken.arm().unwrap();
    world.arm(&door);
    let said = |guest: &Guest, bytes: String| {
        let all = guest.said(bytes).expect("an answer");
        all.lines().next().unwrap_or_default().to_owned()
    };
    tokio::task::block_in_place(|| world.is_in_force(|bytes| said(&guest, bytes)));
    let open = tokio::task::block_in_place(|| guest.open(world.connect()));
    let (met, tap) = (world.met(), guest.tap.clone());

    door.disarm();
    within(HANG, door.stop()).await;
    tokio::task::block_in_place(|| {
        assert!(is_over(&open), "what was open at the capture has ended");
        assert!(!guest.reaches(HTTP_PORT), "its doors are shut");
    });
    // The slot before is kept, so that it wakes on another.
    drop(guest);
    let (fresh, door, woken) = bound(&bench, &world).await;
    assert_ne!(woken.tap, tap, "a fresh slot");
    tokio::task::block_in_place(|| assert_eq!(said(&woken, world.get(world.port)), NOT_ARMED));
    assert_eq!(world.met(), met, "nobody was let out between");
    fresh.arm().unwrap();
    world.arm(&door);
    tokio::task::block_in_place(|| world.is_in_force(|bytes| said(&woken, bytes)));
    within(HANG, door.stop()).await;
    drop((taken, fresh));
}

/// The same policy after it wakes, and never open between: on lane none over sleep and checkpoint, and on lane guarded
/// on another slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn door_hibernate_wake_rearms() {
    for rest in [Quiesce::Hibernate, Quiesce::Checkpoint] {
        by_link(rest).await;
    }
    by_card().await;
}
