//! Slots: made once, used again and again, and never with anything of the guest before.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    process::{Command, Stdio},
};

use harness::{HANG, eventually, program, within};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink::SocketAddrNetlink, recv,
        socket_with,
    },
};
use sandboxd::net::{self, HTTP_PORT, Lane, NetError, State, Taken};

use crate::{
    bench::{Bench, Space, namespace, open},
    frames::{ACK, SYN, Segment, segment},
    wire::Wire,
};

/// Ends a sandbox that never was: no doors of it are left, and its VMM is dead.
async fn give_back(lane: &Lane, taken: Taken) {
    let free = lane.slots().get(State::Free);
    let draining = taken.release();
    draining.doors_shut().unwrap();
    draining.vmm_gone().unwrap();
    until_free(lane, free + 1).await;
}

/// Waits until so many slots are free.
async fn until_free(lane: &Lane, free: usize) {
    let mut freed = lane.freed();
    within(HANG, async {
        while lane.slots().get(State::Free) != free {
            freed.changed().await.unwrap();
        }
    })
    .await;
}

/// Laid until there are as many as are wanted, whoever has them, and never fewer.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slots_are_laid_ahead_up_to_what_is_wanted() {
    let bench = Bench::bare(16).await;
    let lane = bench.lane();
    lane.lay_ahead(10);
    until_free(lane, 10).await;
    assert_eq!(bench.links().len(), 10);
    // Taken ones count, and a lower number takes none away.
    let _two = (bench.take().await, bench.take().await);
    assert_eq!(lane.slots().get(State::Taken), 2);
    lane.lay_ahead(4);
    lane.lay_ahead(11);
    until_free(lane, 9).await;
    assert_eq!(bench.links().len(), 11);
    // As many as the lane may have.
    lane.lay_ahead(1_000);
    until_free(lane, 14).await;
    assert_eq!(bench.links().len(), 16);
}

/// Everything that the kernel tells of links, as kinds of message.
fn link_news(space: &Space) -> std::os::fd::OwnedFd {
    space.run(|| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let protocol = None; // NETLINK_ROUTE
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol).unwrap();
        bind(&socket, &SocketAddrNetlink::new(0, 1)).unwrap();
        socket
    })
}

fn kinds(news: &std::os::fd::OwnedFd, into: &mut Vec<u16>) {
    let mut buffer = [0; 64 << 10];
    loop {
        match recv(news, &mut buffer[..], RecvFlags::empty()) {
            Ok((length, _)) => {
                let mut rest = &buffer[..length];
                while rest.len() >= 16 {
                    into.push(u16::from_ne_bytes([rest[4], rest[5]]));
                    let size = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]);
                    rest = &rest[usize::try_from(size).unwrap().next_multiple_of(4).min(rest.len())..];
                }
            }
            Err(Errno::AGAIN) => return,
            Err(errno) => panic!("news of links were lost: {errno}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_never_deletes_a_link() {
    const NEW_LINK: u16 = 16;
    const DELETED_LINK: u16 = 17;
    let bench = Bench::new(2).await;
    let news = link_news(&bench.space);
    let links = bench.links();
    let (mut told, mut used) = (Vec::new(), BTreeSet::new());
    for _ in 0..1_000 {
        let (taken, wire) = bench.take().await;
        let doors = taken.bind().await.unwrap();
        taken.arm().unwrap();
        used.insert(taken.slot());
        drop((doors, wire));
        give_back(bench.lane(), taken).await;
        kinds(&news, &mut told);
    }
    assert_eq!(bench.links(), links);
    assert!(told.contains(&NEW_LINK), "links went down and up");
    assert!(!told.contains(&DELETED_LINK));
    assert!(used.len() <= 2);
    // Both in use: no third is made.
    let _both = (bench.take().await, bench.take().await);
    let refused = bench.lane().take().await.map(drop);
    assert!(
        matches!(refused, Err(NetError::NoSlot { slots: 2 })),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_waits_for_whoever_has_its_tap() {
    let bench = Bench::new(1).await;
    let (taken, wire) = bench.take().await;
    let draining = taken.release();
    draining.doors_shut().unwrap();
    draining.vmm_gone().unwrap();
    // The lane thread tried before it laid another: the VMM is told to be gone, and is not.
    bench.lane().lay(1).await.unwrap();
    assert_eq!(bench.lane().slots().get(State::Draining), 1);
    let refused = bench.lane().take().await.map(drop);
    assert!(matches!(refused, Err(NetError::NoSlot { .. })), "{refused:?}");
    drop(wire);
    let freed = || async { (bench.lane().slots().get(State::Free) == 1).then_some(()) };
    eventually("the slot is free", freed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_that_nothing_was_made_of_is_free_again() {
    let bench = Bench::new(1).await;
    for _ in 0..3 {
        drop(bench.lane().take().await.unwrap());
        let freed = || async { (bench.lane().slots().get(State::Free) == 1).then_some(()) };
        eventually("the slot is free", freed).await;
    }
    // With a guest that may still be there it is not.
    let (taken, wire) = bench.take().await;
    drop((taken, wire));
    bench.lane().lay(1).await.unwrap();
    assert_eq!(bench.lane().slots().get(State::Draining), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_taps_deleted_by_hand() {
    let bench = Bench::new(4).await;
    let held = [bench.take().await, bench.take().await];
    for (name, ..) in bench.links() {
        bench.space.command(&format!("ip link delete {name}"));
    }
    assert_eq!(bench.links(), []);
    for (taken, wire) in held {
        drop(wire);
        give_back(bench.lane(), taken).await;
    }
    // All four are whole again once they are handed out.
    let mut all = Vec::new();
    for _ in 0..4 {
        let (taken, mut wire) = bench.take().await;
        let doors = taken.bind().await.unwrap();
        assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new());
        all.push((taken, wire, doors));
    }
}

/// Opens a connection by hand; gives what the host accepted, and the next numbers of the guest's side.
fn connect(wire: &mut Wire, door: &TcpListener, port: u16) -> (std::net::TcpStream, Segment) {
    let syn = Segment::syn(port, HTTP_PORT);
    wire.send(&syn.frame());
    let answer = loop {
        let (answer, data) = segment(&wire.next()).expect("only TCP comes");
        assert_eq!(
            (answer.to.1, data),
            (port, 0),
            "a segment of an earlier guest: {answer:?}"
        );
        if answer.flags == SYN | ACK {
            break answer;
        }
    };
    let established = Segment {
        flags: ACK,
        seq: answer.ack,
        ack: answer.seq.wrapping_add(1),
        ..syn
    };
    wire.send(&established.frame());
    let limit = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    assert_eq!(
        poll(&mut [PollFd::new(door, PollFlags::IN)], Some(&limit)).unwrap(),
        1
    );
    (door.accept().unwrap().0, established)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_reuse_leaks_no_bytes() {
    const SECRET: &[u8] = b"of the guest before";
    let bench = Bench::new(1).await;
    for round in 0..500_u16 {
        let (taken, mut wire) = bench.take().await;
        let doors = taken.bind().await.unwrap();
        let before = wire.until_fence();
        assert_eq!(before, Vec::<Vec<u8>>::new(), "round {round}");
        let (mut stream, _) = connect(&mut wire, &doors.http, 10_000 + round);
        stream.set_nonblocking(true).unwrap();
        // More than the guest will ever acknowledge: some is on its way, some waits in the socket.
        while stream.write(&SECRET.repeat(100)).is_ok() {}
        let came = wire.next();
        assert!(
            came.windows(SECRET.len()).any(|part| part == SECRET),
            "the data was on its way"
        );
        drop((stream, doors, wire));
        // A graceful end would leave the kernel with a socket that goes on sending. (A program that another test starts just
        // now has what was open until it runs.)
        let none_left = || async { (bench.space.table("tcp").lines().count() == 1).then_some(()) };
        eventually("no socket is left", none_left).await;
        give_back(bench.lane(), taken).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_ports_are_used_again_at_once() {
    let bench = Bench::new(1).await;
    for _ in 0..20 {
        let (taken, mut wire) = bench.take().await;
        let doors = taken.bind().await.unwrap();
        // The guest before had the same port, and its connection ended the slow way: by both sides.
        let (stream, established) = connect(&mut wire, &doors.http, 10_000);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let (end, _) = segment(&wire.next()).unwrap();
        const FIN: u8 = 1;
        assert_ne!(end.flags & FIN, 0);
        let last = Segment {
            flags: ACK | FIN,
            ack: end.seq.wrapping_add(1),
            ..established
        };
        wire.send(&last.frame());
        drop((stream, doors, wire));
        give_back(bench.lane(), taken).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_kill_loop_no_growth() {
    const SLOTS: u16 = 4;
    let name = namespace();
    net::prepare(&name).unwrap();
    let space = Space::at(&net::pin(&name));
    let mut links = None;
    for round in 0..200 {
        let mut child = Command::new(program("lane-under-test"))
            .args([name.as_str(), &SLOTS.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "taking\n", "round {round}");
        child.kill().unwrap();
        child.wait().unwrap();
        let now = space.command("ip -o link show");
        let now = now
            .lines()
            .map(|line| line.split(':').take(2).collect::<String>());
        let now: Vec<String> = now.collect();
        assert_eq!(links.get_or_insert(now.clone()), &now, "round {round}");
    }
    assert_eq!(links.unwrap().len(), usize::from(SLOTS) + 1, "those and lo");
    let lane = open(&name, SLOTS).await;
    let all_free = || async { (lane.slots().get(State::Free) == usize::from(SLOTS)).then_some(()) };
    eventually("all slots are free", all_free).await;
    let mut all = Vec::new();
    for _ in 0..SLOTS {
        let mut taken = within(HANG, lane.take()).await.unwrap();
        let mut wire = Wire::new(taken.take_tap().unwrap());
        let doors = taken.bind().await.unwrap();
        assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new());
        all.push((taken, wire, doors));
    }
    drop(all);
    lane.stop().await;
    drop(space);
    assert!(net::purge(&name).unwrap());
}
