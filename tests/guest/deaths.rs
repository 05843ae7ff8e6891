//! Machines that die: noticed, told, replaced.

use rustix::process::Signal;
use sandbox_sdk::{Event, Reason, v1::State};

use crate::node::{Node, sh};

#[tokio::test]
async fn c05_a_warm_vm_that_dies_is_replaced_and_never_handed_out() {
    let node = Node::warm(2).await;
    let stock = node.rows(&[State::Warm]).await;
    let victim = stock[0].clone();
    let process = node.process_of(&victim.sandbox).await;
    process.signal(Signal::KILL);
    process.gone().await;
    let (one, two) = tokio::join!(node.claim(), node.claim());
    for claimed in [&one, &two] {
        assert_ne!(claimed.id(), victim.sandbox, "a dead sandbox was handed out");
        assert_eq!(sh(claimed, "echo alive").await, "alive\n");
    }
    let rows = node
        .until_rows(|rows| {
            let warm = rows.values().filter(|row| row.state() == State::Warm).count();
            let gone = |row| sandbox_sdk::v1::Sandbox::state(row) == State::Gone;
            warm == 2 && rows.get(&victim.sandbox).is_none_or(gone)
        })
        .await;
    if let Some(row) = rows.get(&victim.sandbox) {
        assert!(row.why.starts_with("vm_exited"), "{}", row.why);
    }
    drop((one, two));
    node.stops_clean().await;
}

#[tokio::test]
async fn c05_a_claimed_vm_that_dies_is_failed_with_its_reason() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    let mut running = sandbox.exec(["sleep", "1000"]).stream().await.unwrap();
    let started = running.next().await.unwrap().unwrap();
    assert!(matches!(started, Event::Started { .. }), "{started:?}");
    let slots = node.slot_dirs();
    let process = node.process_of(sandbox.id()).await;
    process.signal(Signal::KILL);

    // The call under way ends with an error, never with an invented exit.
    let broken = running.next().await.unwrap().unwrap_err();
    assert!(
        broken.is(Reason::AgentLost) || broken.is(Reason::SandboxFailed),
        "{broken}"
    );
    let row = node.until_state(sandbox.id(), State::Failed).await;
    assert!(
        row.why.starts_with("vm_exited") && row.why.contains("signal 9"),
        "{}",
        row.why
    );
    let refused = sandbox.exec(["true"]).output().await.unwrap_err();
    assert!(refused.is(Reason::SandboxFailed), "{refused}");
    assert_eq!(refused.why(), Some(row.why.as_str()));
    // Its slot is free though the claim stands.
    node.until_warm(1).await;
    assert!(node.slot_dirs().len() <= slots.len(), "{:?}", node.slot_dirs());
    assert!(!sandbox.release().await.unwrap().already);
    node.until_state(sandbox.id(), State::Gone).await;
}

#[tokio::test]
async fn a_guest_that_reboots_or_powers_off_is_dead() {
    let node = Node::warm(2).await;
    for command in [["reboot", "-f"], ["poweroff", "-f"]] {
        let sandbox = node.claim().await;
        let ended = sandbox.exec(command).output().await;
        let error = ended.expect_err("a call into a guest that went away has no exit");
        assert!(
            error.is(Reason::AgentLost) || error.is(Reason::SandboxFailed),
            "{error}"
        );
        let row = node.until_state(sandbox.id(), State::Failed).await;
        assert!(row.why.starts_with("vm_exited"), "{command:?}: {}", row.why);
        sandbox.release().await.unwrap();
    }
    node.until_warm(2).await;
}

#[tokio::test]
async fn h05_a_vm_that_is_stuck_is_released_all_the_same() {
    let node = Node::warm(2).await;
    let (sandbox, neighbour) = (node.claim().await, node.claim().await);
    let mut running = sandbox.exec(["sleep", "1000"]).stream().await.unwrap();
    running.next().await.unwrap().unwrap();
    let process = node.process_of(sandbox.id()).await;
    // Neither guest nor emulator does anything from here on; nor do they answer.
    process.signal(Signal::STOP);
    assert_eq!(sh(&neighbour, "echo beside").await, "beside\n");
    let rows = node.rows(&[State::Claimed]).await;
    assert_eq!(rows.len(), 2, "to be listed it is not asked");
    assert!(!sandbox.release().await.unwrap().already);
    process.gone().await;
    assert!(
        running.next().await.unwrap().is_err(),
        "the call ends, without an exit"
    );
    node.until_state(sandbox.id(), State::Gone).await;
    node.until_warm(2).await;
}
