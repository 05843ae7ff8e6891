//! Guests that flood, starve and lie: the agent and the daemon go on, and nobody else notices.

use std::fs;

use harness::{HANG, within};
use sandbox_sdk::{Event, How, Reason, SandboxHandle, v1::State};

use crate::node::{Node, sh};

/// Resident memory of the daemon in bytes, now.
fn resident(node: &Node) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.process().pid)).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

async fn has_condition(node: &Node, sandbox: &SandboxHandle, name: &str) {
    node.until_rows(|rows| {
        let row = rows.get(sandbox.id());
        row.is_some_and(|row| row.conditions.iter().any(|c| c.name == name && c.count > 0))
    })
    .await;
    let seen = node.ctl().json(["inspect", sandbox.id()]).await;
    let names: Vec<_> = seen["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["name"])
        .collect();
    assert!(names.iter().any(|seen| *seen == name), "{names:?}");
}

/// Most that a clone may write to its console file.
const CONSOLE_MOST: u64 = 256 * 1024;

#[tokio::test]
async fn a_guest_that_floods_its_console_harms_nobody() {
    let node = Node::warm(2).await;
    let (sandbox, neighbour) = (node.claim().await, node.claim().await);
    let slot = node.rows(&[State::Claimed]).await;
    let slot = slot
        .iter()
        .find(|row| row.sandbox == sandbox.id())
        .unwrap()
        .slot
        .unwrap();
    let console = node.dir().join(format!("run/{slot:04x}/console"));
    let flood = "head -c 400000 /dev/zero | tr '\\0' '\\033' > /dev/ttyS0; echo done";
    let (said, other) = tokio::join!(sh(&sandbox, flood), sh(&neighbour, "echo quiet"));
    assert_eq!((said.as_str(), other.as_str()), ("done\n", "quiet\n"));
    let length = fs::metadata(&console).unwrap().len();
    assert!(length <= CONSOLE_MOST, "the console took {length} bytes of disk");
    assert!(length > CONSOLE_MOST / 2, "it was a flood: {length}");
    // It still works, and its end is told in words that no terminal obeys.
    assert_eq!(sh(&sandbox, "echo on").await, "on\n");
    node.process_of(sandbox.id())
        .await
        .signal(rustix::process::Signal::KILL);
    let row = node.until_state(sandbox.id(), State::Failed).await;
    assert!(
        !row.why.contains('\x1b') && row.why.len() < 8 * 1024,
        "{}",
        row.why
    );
    assert!(!node.log().contains('\x1b'));
}

#[tokio::test]
async fn a_program_that_floods_its_output_is_slowed_down() {
    let node = Node::warm(2).await;
    let (sandbox, neighbour) = (node.claim().await, node.claim().await);
    sh(&sandbox, "true").await;
    let before = resident(&node);
    // Streams that nobody reads, on one connection, while others use it.
    let mut stalled = Vec::new();
    for _ in 0..20 {
        let mut flood = sandbox.exec(["yes"]).stream().await.unwrap();
        let first = flood.next().await.unwrap().unwrap();
        assert!(matches!(first, Event::Started { .. }), "{first:?}");
        stalled.push(flood);
    }
    for _ in 0..5 {
        assert_eq!(sh(&sandbox, "echo beside").await, "beside\n");
        assert_eq!(sh(&neighbour, "echo beside").await, "beside\n");
    }
    // One is read on, and all that it says is there.
    let mut bytes = 0;
    while bytes < 4 << 20 {
        match within(HANG, stalled[0].next()).await.unwrap().unwrap() {
            Event::Stdout(data) => {
                assert!(data.iter().all(|byte| matches!(byte, b'y' | b'\n')));
                bytes += data.len();
            }
            other @ (Event::Started { .. } | Event::Stderr(_) | Event::Exit(_)) => panic!("{other:?}"),
        }
    }
    let grown = resident(&node).saturating_sub(before);
    assert!(grown < 32 << 20, "the daemon grew by {grown} bytes");
    drop(stalled);
    let none_left = "while pgrep -x yes > /dev/null; do sleep 0.05; done; echo none";
    assert_eq!(sh(&sandbox, none_left).await, "none\n");
}

#[tokio::test]
async fn fork_bomb_then_exec() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    // The same limit, only nearer: under emulation it takes a minute to fork up to the real one.
    sh(&sandbox, "echo 200 > /sys/fs/cgroup/work/pids.max").await;
    let bomb = ["sh", "-c", "bomb() { bomb | bomb & }; bomb; sleep 1000"];
    let mut bomb = sandbox.exec(bomb).stream().await.unwrap();
    let started = bomb.next().await.unwrap().unwrap();
    assert!(matches!(started, Event::Started { .. }), "{started:?}");
    has_condition(&node, &sandbox, "PIDS_LIMIT").await;
    // Refused for want of room, or served: but answered, while it goes on.
    for _ in 0..3 {
        match within(HANG, sandbox.exec(["true"]).output()).await {
            Ok(output) => assert!(matches!(output.status.how, How::Code(_)), "{output:?}"),
            Err(error) => assert!(error.is(Reason::ProcessLimit), "{error}"),
        }
        within(HANG, sandbox.agent()).await.unwrap();
    }
    drop(bomb);
    // All of it ends with its call.
    harness::eventually("the bomb is gone", || async {
        let count = "cat /sys/fs/cgroup/work/pids.current";
        let output = sandbox.exec(["sh", "-c", count]).output().await.ok()?;
        // The one that counts, and its shell.
        let left = output.stdout_text().trim().parse::<u32>().ok()?;
        (left <= 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn memory_hog_spares_the_agent() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    let generation = sandbox.agent().await.unwrap().generation;
    let hog = sandbox.exec(["tail", "/dev/zero"]).output().await.unwrap();
    assert_eq!(hog.status.how, How::Signal(9));
    assert!(hog.status.oom_suspected, "{:?}", hog.status);
    has_condition(&node, &sandbox, "OOM_KILL").await;
    let info = sandbox.agent().await.unwrap();
    assert_eq!(info.generation, generation, "the same agent");
    assert_eq!(sh(&sandbox, "echo on").await, "on\n");
}

#[tokio::test]
async fn full_tmp_spares_exec() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    let fill = sandbox
        .exec(["dd", "if=/dev/zero", "of=/tmp/full", "bs=1M"])
        .output()
        .await
        .unwrap();
    assert_ne!(fill.status.how, How::Code(0), "{}", fill.stderr_text());
    assert_eq!(sh(&sandbox, "true; echo runs").await, "runs\n");
    let told = sandbox.agent().await.unwrap().conditions;
    assert!(told.iter().any(|c| c.name == "TMP_FULL"), "{told:?}");
    sh(&sandbox, "rm /tmp/full; echo > /tmp/again").await;
}

#[tokio::test]
async fn n14_a_guest_that_takes_the_port_from_its_agent_fails_alone() {
    let node = Node::warm(2).await;
    let (sandbox, neighbour) = (node.claim().await, node.claim().await);
    let before = resident(&node);
    // Root in the guest tears the device from under the agent, and speaks in its place.
    let takeover = "cd /sys/bus/virtio/drivers/virtio_console; for device in virtio*; do \
        echo $device > unbind; echo $device > bind; done; \
        while :; do for port in /dev/vport*; do cat /dev/urandom > $port & done; wait; done";
    let attack = format!("({takeover}) > /dev/null 2>&1 & echo");
    let attack = sandbox
        .exec(["sh", "-c", &attack])
        .keep_descendants()
        .output()
        .await;
    // Its own call may just have got through.
    if let Err(error) = attack {
        assert!(
            error.is(Reason::AgentLost) || error.is(Reason::SandboxFailed),
            "{error}"
        );
    }
    for _ in 0..3 {
        assert_eq!(sh(&neighbour, "echo beside").await, "beside\n");
    }
    // An agent without its port gives up, and says so.
    let row = node.until_state(sandbox.id(), State::Failed).await;
    assert!(row.why.contains("silkd.agent"), "{}", row.why);
    let refused = within(HANG, sandbox.exec(["true"]).output()).await.unwrap_err();
    assert!(refused.is(Reason::SandboxFailed), "{refused}");
    let grown = resident(&node).saturating_sub(before);
    assert!(grown < 32 << 20, "the daemon grew by {grown} bytes");
    assert!(!sandbox.release().await.unwrap().already);
    node.until_state(sandbox.id(), State::Gone).await;
    drop((sandbox, neighbour));
    node.stops_clean().await;
}
