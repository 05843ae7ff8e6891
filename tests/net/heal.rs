//! The packet filter is put back, and while it cannot be, nothing flows.

use std::{
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use harness::{HANG, eventually, within};
use sandboxd::net::{GUEST_ADDRESS, HOST_ADDRESS, NetError, Status};
use tokio::sync::watch;

use crate::{
    bench::{Bench, Space},
    frames::{Segment, ping, udp},
};

async fn until(status: &mut watch::Receiver<Status>, what: impl Fn(&Status) -> bool) -> Status {
    *within(HANG, status.wait_for(what)).await.unwrap()
}

/// Ends the probe, also where the test fails: else it would wait for it for ever.
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lane_flush_or_tamper_is_healed() {
    let bench = Bench::new(2).await;
    let host = Space::new();
    let (taken, mut wire) = bench.take().await;
    let (other, mut others_wire) = bench.take().await;
    let _doors = taken.bind().await.unwrap();
    let _others_doors = other.bind().await.unwrap();
    let whole = bench.ruleset();
    // A guest that never stops trying.
    let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tap = wire.file();
    let stop_at_end = Stop(Arc::clone(&stop));
    let (stopping, counting) = (stop, Arc::clone(&sent));
    let probe = tokio::task::spawn_blocking(move || {
        let spoofed = Segment {
            from: ([10, 0, 0, 1].into(), 4_000),
            ..Segment::syn(4_000, 22)
        };
        let frames = [
            Segment::syn(4_000, 22).frame(),
            spoofed.frame(),
            Segment {
                to: (GUEST_ADDRESS, 22),
                ..Segment::syn(4_000, 22)
            }
            .frame(),
            udp((HOST_ADDRESS, 67)),
            udp((GUEST_ADDRESS, 67)),
            // The kernel answers pings by itself, if only it has a way.
            ping(HOST_ADDRESS),
        ];
        while !stopping.load(Ordering::Relaxed) {
            for frame in &frames {
                tap.write_all(frame).unwrap();
            }
            counting.fetch_add(frames.len() as u64, Ordering::Relaxed);
        }
    });
    let mut status = bench.lane().status();
    for round in 0..10 {
        for tamper in [
            "nft flush ruleset",
            "nft flush chain inet sandboxd input",
            "nft insert rule inet sandboxd input accept",
            "nft delete table inet sandboxd",
            "nft add table ip foreign",
        ] {
            let before = sent.load(Ordering::Relaxed);
            let seen = status.borrow_and_update().tampered;
            bench.space.command(tamper);
            let after = until(&mut status, |status| status.tampered > seen).await;
            assert!(after.locked, "{tamper}");
            if tamper.ends_with("foreign") {
                // That may be news of its own, or part of the news before.
                bench.space.command("nft delete table ip foreign");
            }
            let put_back = || async { (bench.ruleset() == whole).then_some(()) };
            eventually("the table is as it was", put_back).await;
            let going_on = || async { (sent.load(Ordering::Relaxed) > before).then_some(()) };
            eventually("the guest tries on", going_on).await;
        }
        assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new(), "round {round}");
        assert_eq!(others_wire.until_fence(), Vec::<Vec<u8>>::new(), "round {round}");
    }
    // What the host does with its own firewall is no news here.
    let seen = status.borrow_and_update().tampered;
    for _ in 0..10 {
        host.command("nft add table inet sandboxd");
        host.command("nft flush ruleset");
    }
    // A change in here that must be noticed: all news before it are read by then.
    bench.space.command("nft flush ruleset");
    until(&mut status, |status| status.tampered > seen).await;
    assert_eq!(status.borrow().tampered, seen + 1);
    drop(stop_at_end);
    probe.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lane_unhealable_fails_closed() {
    let bench = Bench::new(3).await;
    let (taken, mut wire) = bench.take().await;
    let _doors = taken.bind().await.unwrap();
    assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new());
    let whole = bench.ruleset();
    let mut status = bench.lane().status();
    // A table of our name that belongs to another process: nobody else may touch it while that lives.
    let mut foreign = bench.space.start("nft", "-i");
    let line = "delete table inet sandboxd; add table inet sandboxd { flags owner; }\n";
    foreign
        .stdin
        .as_mut()
        .unwrap()
        .write_all(line.as_bytes())
        .unwrap();
    until(&mut status, |status| !status.locked).await;
    assert!(bench.links().iter().all(|(_, _, up)| !up), "{:?}", bench.links());
    let refused = bench.lane().take().await.map(drop);
    assert!(matches!(refused, Err(NetError::Unlocked)), "{refused:?}");
    drop(foreign.stdin.take());
    assert!(foreign.wait().unwrap().success());
    until(&mut status, |status| status.locked).await;
    assert_eq!(bench.ruleset(), whole);
    assert!(bench.links().iter().all(|(_, _, up)| *up), "{:?}", bench.links());
    // The doors that were open work again, and slots are handed out.
    assert_eq!(wire.until_fence(), Vec::<Vec<u8>>::new());
    let (next, mut its_wire) = bench.take().await;
    let _its_doors = next.bind().await.unwrap();
    assert_eq!(its_wire.until_fence(), Vec::<Vec<u8>>::new());
}
