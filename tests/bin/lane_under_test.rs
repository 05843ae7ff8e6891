//! A process that has a lane and refills it, to be killed: `lane-under-test NAMESPACE SLOTS`. It says a line when it
//! begins to take slots, and goes on until it is ended.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test's program fails by panicking, and tells its test where it is"
)]

use sandboxd::{
    clock::Clock,
    net::{Lane, Options, State},
};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let namespace = arguments.next().unwrap().parse().unwrap();
    let slots: u16 = arguments.next().unwrap().parse().unwrap();
    let lane = Lane::open(Options {
        namespace,
        slots,
        held: Default::default(),
        clock: Clock::host(),
    })
    .await
    .unwrap();
    lane.lay(usize::from(slots)).await.unwrap();
    println!("taking");
    loop {
        // What an earlier process left is free within one turn of the lane.
        let Ok(taken) = lane.take().await else {
            tokio::task::yield_now().await;
            continue;
        };
        let doors = taken.bind().await.unwrap();
        taken.arm().unwrap();
        let held = lane.slots().get(State::Armed);
        drop(doors);
        let draining = taken.release();
        draining.doors_shut().unwrap();
        draining.vmm_gone().unwrap();
        assert_eq!(held, 1, "one at a time");
    }
}
