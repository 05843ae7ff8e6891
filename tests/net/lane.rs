//! What a guest can reach by its card: its doors, and nothing else.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
};

use harness::{HANG, within};
use sandboxd::net::{DNS_PORT, GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HTTP_PORT, PREFIX, SOCKS5_PORT};

use crate::{
    bench::{Bench, Space},
    frames::{ACK, RST, SYN, Segment, TCP, ethernet, ipv4, ping, segment, udp},
    wire::Wire,
};

/// A port where tests put a service that no guest may reach.
const SERVICE: u16 = 8_080;

/// A service for everybody: TCP and UDP.
fn service(space: &Space) -> (TcpListener, UdpSocket) {
    space.run(|| {
        let stream = TcpListener::bind(("0.0.0.0", SERVICE)).unwrap();
        let datagram = UdpSocket::bind(("0.0.0.0", SERVICE)).unwrap();
        stream.set_nonblocking(true).unwrap();
        datagram.set_nonblocking(true).unwrap();
        (stream, datagram)
    })
}

/// Nothing has arrived there.
fn untouched((stream, datagram): &(TcpListener, UdpSocket)) {
    let blocked = |error: io::Error| assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    blocked(stream.accept().map(drop).unwrap_err());
    blocked(datagram.recv(&mut [0; 16]).map(drop).unwrap_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_tap_locked_from_birth() {
    let bench = Bench::bare(1).await;
    assert!(bench.ruleset().contains("table inet sandboxd"));
    assert_eq!(bench.links(), []);
    bench.lane().lay(1).await.unwrap();
    let service = service(&bench.space);
    let (taken, mut wire) = bench.take().await;
    let before: u64 = bench.drops("input").iter().sum();
    let mut probes = 0;
    for port in [1, 22, SERVICE, 65_535] {
        wire.send(&Segment::syn(4_000, port).frame());
        wire.send(&udp((HOST_ADDRESS, port)));
        probes += 2;
    }
    wire.send(&ping(HOST_ADDRESS));
    probes += 1;
    let dropped = bench.drops("input").iter().sum::<u64>() - before;
    assert_eq!(dropped, probes, "each was dropped and counted");
    // Ports of doors that nobody has opened yet.
    for port in [HTTP_PORT, SOCKS5_PORT, DNS_PORT] {
        wire.send(&Segment::syn(4_000, port).frame());
        wire.send(
            &Segment {
                flags: ACK,
                ..Segment::syn(4_000, port)
            }
            .frame(),
        );
    }
    wire.send(&udp((HOST_ADDRESS, DNS_PORT)));
    let _doors = within(HANG, taken.bind()).await.unwrap();
    assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new());
    untouched(&service);
}

/// Asks all TCP ports for a connection, and sends to all UDP ports. The TCP ports that were open; nothing else is answered.
fn scan(wire: &mut Wire) -> Vec<u16> {
    let mut answers = Vec::new();
    for port in 0..=u16::MAX {
        wire.send(&Segment::syn(4_000, port).frame());
        wire.send(&udp((HOST_ADDRESS, port)));
        // Before the queue of the TAP is full.
        if port % 128 == 127 {
            answers.extend(wire.until_fence());
        }
    }
    let mut open: Vec<u16> = answers
        .iter()
        .map(|frame| {
            let (answer, data) = segment(frame).expect("only TCP is answered");
            assert_eq!(
                (answer.to, answer.flags, data),
                ((GUEST_ADDRESS, 4_000), SYN | ACK, 0)
            );
            answer.from.1
        })
        .collect();
    open.sort_unstable();
    // What is not taken further is said again after a second.
    open.dedup();
    open
}

/// Without a daemon too: namespace and table outlive it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn inv_10_scan_from_inside() {
    let mut bench = Bench::new(1).await;
    let service = service(&bench.space);
    let (taken, mut wire) = bench.take().await;
    let _doors = taken.bind().await.unwrap();
    bench.stop().await;
    assert_eq!(scan(&mut wire), [DNS_PORT, SOCKS5_PORT, HTTP_PORT]);
    untouched(&service);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_only_door_ports_answer() {
    let bench = Bench::new(1).await;
    let _service = service(&bench.space);
    let (taken, mut wire) = bench.take().await;
    let doors = taken.bind().await.unwrap();
    let open = scan(&mut wire);
    assert_eq!(open, [DNS_PORT, SOCKS5_PORT, HTTP_PORT]);
    let mut bytes = [0; 16];
    assert_eq!(doors.dns.recv(&mut bytes).unwrap(), 1);
    let more = doors.dns.recv(&mut bytes).map_err(|error| error.kind());
    assert_eq!(more, Err(io::ErrorKind::WouldBlock));
    // All others: dropped by the last rule, and counted. Port 53 is open to both, 3128 and 1080 to TCP.
    assert_eq!(bench.drops("input").last(), Some(&(2 * 65_536 - 4)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_host_services_unreachable() {
    let mut bench = Bench::new(1).await;
    // One that listens in the guests' namespace too, which nothing does outside of this test.
    let inside = service(&bench.space);
    // The host: a namespace with an address of its own, not that of this machine.
    let host = Space::new();
    host.command("ip link set lo up");
    host.command("ip addr add 198.51.100.7/32 dev lo");
    let outside = service(&host);
    let (taken, mut wire) = bench.take().await;
    let _doors = taken.bind().await.unwrap();
    let probe = |wire: &mut Wire| {
        for to in [HOST_ADDRESS, [127, 0, 0, 1].into(), [198, 51, 100, 7].into()] {
            let syn = Segment::syn(4_000, SERVICE);
            wire.send(
                &Segment {
                    to: (to, SERVICE),
                    ..syn
                }
                .frame(),
            );
            wire.send(&udp((to, SERVICE)));
            wire.send(&ping(to));
        }
        wire.until_fence()
    };
    assert_eq!(probe(&mut wire), Vec::<Vec<u8>>::new());
    untouched(&inside);
    untouched(&outside);
    // The same probes find the service inside once nothing protects it: they are good probes.
    bench.stop().await;
    bench.space.command("nft delete table inet sandboxd");
    probe(&mut wire);
    assert_eq!(inside.1.recv(&mut [0; 16]).unwrap(), 1);
    untouched(&outside);
}

/// Hand-made ways from one guest to the other.
fn routes(space: &Space, to: &str) {
    space.command(&format!("ip route add 203.0.113.9/32 dev {to}"));
    let mac = GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":");
    space.command(&format!(
        "ip neigh replace 203.0.113.9 lladdr {mac} nud permanent dev {to}"
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_guest_to_guest_dropped() {
    const OTHER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
    let mut bench = Bench::new(2).await;
    let (first, mut a) = bench.take().await;
    let (second, mut b) = bench.take().await;
    let _b_doors = second.bind().await.unwrap();
    // A has no doors: what the kernel would answer by itself must not go to B.
    for flags in [SYN, ACK, SYN | ACK] {
        a.send(
            &Segment {
                flags,
                ..Segment::syn(4_000, HTTP_PORT)
            }
            .frame(),
        );
    }
    assert_eq!(b.until_fence(), Vec::<Vec<u8>>::new());
    let _a_doors = first.bind().await.unwrap();
    assert_eq!(a.until_fence(), Vec::<Vec<u8>>::new());

    routes(&bench.space, &second.name());
    let mut probe = || {
        for to in [GUEST_ADDRESS, OTHER, Ipv4Addr::BROADCAST, [224, 0, 0, 1].into()] {
            a.send(
                &Segment {
                    to: (to, 22),
                    ..Segment::syn(4_000, 22)
                }
                .frame(),
            );
            a.send(&udp((to, 22)));
            a.send(&ping(to));
        }
        // To B's hardware address as well.
        let mut frame = Segment {
            to: (OTHER, 22),
            ..Segment::syn(4_000, 22)
        }
        .frame();
        frame[..6].copy_from_slice(&GUEST_MAC);
        a.send(&frame);
        (a.until_fence(), b.until_fence())
    };
    let nothing = (vec![], vec![]);
    assert_eq!(probe(), nothing);
    // With forwarding switched on by hand the table alone holds.
    bench.space.set("ipv4/conf/all/forwarding", "1");
    assert_eq!(probe(), nothing);
    assert!(bench.drops("forward")[0] > 0);
    // Without the table, the namespace alone.
    bench.stop().await;
    bench.space.command("nft delete table inet sandboxd");
    bench.space.set("ipv4/conf/all/forwarding", "0");
    assert_eq!(probe(), nothing);
    // Without either, the probes cross: they are good probes.
    bench.space.set("ipv4/conf/all/forwarding", "1");
    let (_, crossed) = probe();
    assert!(!crossed.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_ipv6_and_arp_are_dead() {
    let bench = Bench::new(1).await;
    let (taken, mut wire) = bench.take().await;
    let _doors = taken.bind().await.unwrap();
    let neighbours = bench.space.command("ip neigh show");
    assert!(neighbours.contains("PERMANENT"), "{neighbours}");
    for number in 0..10_000_u16 {
        let [high, low] = number.to_be_bytes();
        let sender = [169, 254, high, low];
        for operation in [1, 2] {
            let arp = [
                &[0, 1, 8, 0, 6, 4, 0, operation][..],
                &[2, 0, 0, 0, high, low],
                &sender,
                &[0; 6],
                &HOST_ADDRESS.octets(),
            ]
            .concat();
            wire.send(&ethernet(0x0806, &arp));
        }
    }
    for (kind, multicast) in [(134_u8, 1_u8), (135, 1), (136, 1), (128, 1), (131, 0x16)] {
        let mut from = [0_u8; 16];
        (from[0], from[1], from[15]) = (0xfe, 0x80, 2);
        let mut to = [0_u8; 16];
        (to[0], to[1], to[15]) = (0xff, 2, multicast);
        let icmp = [&[kind, 0, 0, 0][..], &[0; 20]].concat();
        let pseudo = [&from[..], &to, &[0, 0, 0, 24, 0, 0, 0, 58], &icmp].concat();
        let sum = crate::frames::checksum(&pseudo).to_be_bytes();
        let packet = [
            &[0x60, 0, 0, 0, 0, 24, 58, 255][..],
            &from,
            &to,
            &[kind, 0, sum[0], sum[1]],
            &[0; 20],
        ]
        .concat();
        wire.send(&ethernet(0x86dd, &packet));
        let mut frame = ethernet(0x86dd, &packet);
        frame[..6].copy_from_slice(&[0x33, 0x33, 0, 0, 0, multicast]);
        wire.send(&frame);
    }
    let mut multicast = ping([224, 0, 0, 1].into());
    multicast[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 1]);
    wire.send(&multicast);
    let mut broadcast = ping(Ipv4Addr::BROADCAST);
    broadcast[..6].copy_from_slice(&[0xff; 6]);
    wire.send(&broadcast);
    assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new());
    assert_eq!(bench.space.command("ip neigh show"), neighbours);
    assert_eq!(bench.space.command("ip -6 addr show"), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_spoof_vlan_fragments() {
    let bench = Bench::new(1).await;
    let (taken, mut wire) = bench.take().await;
    let doors = taken.bind().await.unwrap();
    let door = Segment::syn(4_000, HTTP_PORT);
    for from in [
        [0, 0, 0, 0],
        [127, 0, 0, 1],
        [169, 254, 1, 1],
        [169, 254, 1, 3],
        [10, 0, 0, 1],
        [255, 255, 255, 255],
    ] {
        wire.send(
            &Segment {
                from: (from.into(), 4_000),
                ..door
            }
            .frame(),
        );
    }
    let packet = ipv4(GUEST_ADDRESS, HOST_ADDRESS, TCP, 0, &door.bytes());
    for tag in [0x8100_u16, 0x88a8] {
        let tagged = [&[0, 5, 8, 0][..], &packet].concat();
        wire.send(&ethernet(tag, &tagged));
        wire.send(&ethernet(
            tag,
            &[&[0, 5, 0x81, 0, 0, 6, 8, 0][..], &packet].concat(),
        ));
        wire.send_odd(&ethernet(tag, &[0]));
    }
    // A SYN in two pieces, in order and not, overlapping, and pieces without an end.
    let bytes = door.bytes();
    const MORE: u16 = 0x2000;
    let mut piece = |fragment: u16, bytes: &[u8]| {
        let packet = ipv4(GUEST_ADDRESS, HOST_ADDRESS, TCP, fragment, bytes);
        wire.send(&ethernet(0x0800, &packet));
    };
    piece(MORE, &bytes[..16]);
    piece(2, &bytes[16..]);
    piece(2, &bytes[16..]);
    piece(MORE, &bytes[..16]);
    piece(MORE, &bytes[..8]);
    piece(1, &bytes[8..]);
    for offset in 0..4_000 {
        piece(MORE | offset, &[0; 8]);
    }
    // Runts, lies about lengths, kinds of nobody.
    let whole = door.frame();
    for length in 0..whole.len() {
        wire.send_odd(&whole[..length]);
    }
    for kind in [0_u16, 0x05dc, 0x0842, 0x88cc, 0x8847, 0x8863, 0xffff] {
        wire.send_odd(&ethernet(kind, &packet));
    }
    for (at, byte) in [
        (14, 0x44),
        (14, 0x4f),
        (14, 0x65),
        (16, 0xff),
        (17, 0),
        (22, 0),
        (46, 0),
        (46, 0xf0),
    ] {
        let mut bent = door.frame();
        bent[at] = byte;
        wire.send_odd(&bent);
    }
    let answers = wire.until_fence();
    assert_eq!(answers, Vec::<Vec<u8>>::new());
    let waiting = doors.http.accept().map(drop).map_err(|error| error.kind());
    assert_eq!(waiting, Err(io::ErrorKind::WouldBlock));
    // Nothing of it is kept.
    let kept = bench.space.table("sockstat");
    assert!(kept.contains("FRAG: inuse 0 memory 0"), "{kept}");
    // The untouched one is answered: it was a good probe.
    wire.send(&door.frame());
    let answers = wire.until_fence();
    assert_eq!(segment(&answers[0]).unwrap().0.flags, SYN | ACK);
    wire.send(&Segment { flags: RST, ..door }.frame());
    assert!(
        bench
            .links()
            .iter()
            .all(|(name, _, up)| *up && name.starts_with(PREFIX))
    );
}
