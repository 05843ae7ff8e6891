//! The host's own addresses, in a namespace that stands for the host: whatever a policy opens, none of them is dialled.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr, TcpListener},
    process::Command,
    sync::Arc,
};

use harness::{HANG, within};
use sandbox_protocol::id::{ClaimId, SandboxId};
use sandboxd::{
    clock::Clock,
    egress::{Door, Egress, PoolTerms, Routes, Settings},
    policy::{Internal, Layer, Mode, Opening, RuleFields, Vetting},
    telemetry::metrics::Metrics,
    words::{Name, OPERATOR},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::bench::Space;

pub(crate) const PORT: u16 = 8_080;
/// Public by its looks; it is only ever an address of the namespace's.
const LATER: [&str; 2] = ["9.9.9.9", "2620:fe::9"];

fn ip(line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let done = Command::new("ip").args(&words).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "ip {line}: {said}");
}

fn literal(address: &str) -> String {
    match address.parse().unwrap() {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => format!("[{v6}]"),
    }
}

/// A node whose operator has opened all addresses.
pub(crate) fn opened(routes: Routes) -> Egress {
    let open = |net: &str| Internal {
        net: net.parse().unwrap(),
        ports: BTreeSet::from([PORT]),
        pools: Opening::All,
        tenants: Opening::All,
    };
    let settings = Settings {
        vetting: Vetting {
            internal: vec![open("0.0.0.0/0"), open("::/0")],
            ..Vetting::default()
        },
        routes,
        ..Settings::default()
    };
    Egress::new(settings, Metrics::new().door, Clock::host())
}

/// Has a door listen on loopback; gives where HTTP is.
pub(crate) fn listen(door: &Door) -> SocketAddr {
    let bind = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    };
    let http = bind();
    let at = http.local_addr().unwrap();
    door.listen(http, bind()).unwrap();
    at
}

/// A door whose policy allows these addresses.
pub(crate) fn door(egress: &Egress, addresses: &[&str]) -> Door {
    let pool: Name = "p".parse().unwrap();
    let rules = addresses.iter().enumerate().map(|(number, address)| RuleFields {
        id: format!("a{number}"),
        host: vec![literal(address)],
        ports: vec![u32::from(PORT)],
        ..RuleFields::default()
    });
    let layer = Layer::new(Mode::Enforce, rules.collect(), 64).unwrap();
    let named = BTreeMap::from([("all".parse().unwrap(), Arc::new(layer))]);
    egress.book().set(named, BTreeMap::new());
    let terms = PoolTerms {
        policy: Some("all".parse().unwrap()),
        requires_claim_layer: false,
    };
    egress.book().set_pool(&pool, terms);
    let door = egress.door(SandboxId::from_random([1; 16]));
    let sides = egress.book().sides(Some(&pool), OPERATOR, None);
    door.arm(ClaimId::from_random([2; 16]), OPERATOR.into(), Some(pool), sides);
    door
}

/// The reason that the door gives for not dialling this.
async fn reason(door: SocketAddr, address: &str) -> String {
    let target = format!("{}:{PORT}", literal(address));
    let mut io = TcpStream::connect(door).await.unwrap();
    let head = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n");
    io.write_all(head.as_bytes()).await.unwrap();
    io.shutdown().await.unwrap();
    let mut said = String::new();
    within(HANG, io.read_to_string(&mut said)).await.unwrap();
    said.lines().next().unwrap_or_default().to_owned()
}

async fn own_are_refused() {
    let egress = opened(Routes::default());
    let there = ["127.0.0.1", "::1", "10.7.0.1", "fd07::1"];
    let all: Vec<&str> = there.into_iter().chain(LATER).collect();
    let door = door(&egress, &all);
    let at = listen(&door);
    for address in there {
        let said = reason(at, address).await;
        assert_eq!(said, "HTTP/1.1 403 own_address", "{address}");
    }
    for round in 0..4 {
        for address in LATER {
            let bits = if address.contains(':') { "128 nodad" } else { "32" };
            let said = reason(at, address).await;
            assert_eq!(
                said, "HTTP/1.1 502 dial_unreachable",
                "{address} in round {round}"
            );
            // One that is added a moment before. IPv6 is not there at once: the kernel makes it known, and then the
            // way to it. Until then nobody can be reached by it, and from then on nobody is.
            ip(&format!("addr add {address}/{bits} dev d0"));
            let told = async {
                loop {
                    let said = reason(at, address).await;
                    if !address.contains(':') || said != "HTTP/1.1 502 dial_unreachable" {
                        return said;
                    }
                }
            };
            let said = within(HANG, told).await;
            assert_eq!(said, "HTTP/1.1 403 own_address", "{address} in round {round}");
            ip(&format!(
                "addr del {address}/{} dev d0",
                bits.split(' ').next().unwrap()
            ));
        }
    }
    within(HANG, door.stop()).await;
}

#[test]
fn addr_own_listeners_refused() {
    let host = Space::new();
    for line in [
        "ip link set lo up",
        "ip tuntap add dev d0 mode tap",
        "ip link set d0 up",
        "ip addr add 10.7.0.1/24 dev d0",
        "ip addr add fd07::1/64 dev d0 nodad",
    ] {
        host.command(line);
    }
    host.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(own_are_refused());
    });
}
