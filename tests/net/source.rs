//! Where dials leave from: an address that the operator named, whose ports are shared between destinations.

use std::{collections::BTreeMap, net::SocketAddr};

use harness::{HANG, within};
use sandboxd::{
    egress::Routes,
    policy::{Source, Sources},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{
    bench::Space,
    own::{PORT, door, listen, opened},
};

/// Ports that the namespace has for dials, and tunnels that stand at once: half of them by each door, for their guests need
/// ports too, and the doors four.
const PORTS: usize = 16;
const TUNNELS: usize = 20;
const SOURCE: [u8; 4] = [127, 0, 0, 50];

async fn tunnel(at: SocketAddr, target: &str) -> (String, TcpStream) {
    let mut io = TcpStream::connect(at).await.unwrap();
    let head = format!("CONNECT {target}:{PORT} HTTP/1.1\r\nhost: a\r\n\r\n");
    io.write_all(head.as_bytes()).await.unwrap();
    let mut said = [0; 64];
    let n = within(HANG, io.read(&mut said)).await.unwrap();
    let said = String::from_utf8_lossy(&said[..n]).into_owned();
    (said.lines().next().unwrap_or_default().to_owned(), io)
}

async fn many_stand() {
    let node = Source {
        v4: Some(SOURCE.into()),
        v6: None,
    };
    let sources = Sources {
        node,
        ..Sources::default()
    };
    let routes = Routes::new(BTreeMap::new(), BTreeMap::new(), None, sources);
    let egress = opened(routes);
    let targets: Vec<String> = (1..=TUNNELS).map(|n| format!("127.0.1.{n}")).collect();
    let allowed: Vec<&str> = targets.iter().map(String::as_str).collect();
    let origin = TcpListener::bind(("0.0.0.0", PORT)).await.unwrap();
    let doors = [door(&egress, &allowed), door(&egress, &allowed)];
    let at = [listen(&doors[0]), listen(&doors[1])];
    let mut standing = Vec::new();
    for (at, targets) in at.into_iter().zip(allowed.chunks(TUNNELS / 2)) {
        for target in targets {
            let (said, guest) = tunnel(at, target).await;
            assert_eq!(said, "HTTP/1.1 200 Connection established", "{target}");
            let (there, from) = within(HANG, origin.accept()).await.unwrap();
            assert_eq!(from.ip(), std::net::IpAddr::from(SOURCE), "{target}");
            standing.push((from.port(), guest, there));
        }
    }
    let mut ports: Vec<u16> = standing.iter().map(|(port, _, _)| *port).collect();
    assert_eq!(ports.len(), TUNNELS);
    ports.sort_unstable();
    ports.dedup();
    assert!(ports.len() <= PORTS, "{ports:?}");
    drop(standing);
    for door in doors {
        within(HANG, door.stop()).await;
    }
}

#[test]
fn dials_from_a_named_address_share_its_ports() {
    let host = Space::new();
    host.command("ip link set lo up");
    host.command(&format!(
        "sysctl -qw net.ipv4.ip_local_port_range=40000\t{}",
        40_000 + PORTS - 1
    ));
    host.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(many_stand());
    });
}
