//! The daemon is expendable: guests notice neither its death nor its coming back.

use std::collections::BTreeMap;

use harness::Daemon;
use sandbox_sdk::{Event, ExecStream, Reason, SandboxHandle, Token, v1::State};

use crate::node::{Node, sh};

/// Slots and pids by sandbox.
async fn places(daemon: &Daemon, state: State) -> BTreeMap<String, (u32, u32)> {
    let rows = daemon.rows(&[state]).await;
    rows.into_iter()
        .map(|row| (row.sandbox, (row.slot.unwrap(), row.pid.unwrap())))
        .collect()
}

/// Starts a program that stays by itself, and one that a call holds: pid, call, pid.
async fn start_two(sandbox: &SandboxHandle) -> (String, ExecStream, u32) {
    let stays = "setsid sh -c 'while echo x >> /tmp/ticks; do sleep 0.1; done' > /dev/null 2>&1 & echo $!";
    let stays = sandbox.exec(["sh", "-c", stays]).keep_descendants();
    let stays = stays.output().await.unwrap().stdout_text().trim().to_owned();
    let mut held = sandbox.exec(["sleep", "1000"]).stream().await.unwrap();
    let Event::Started { pid, .. } = held.next().await.unwrap().unwrap() else {
        panic!("the first event is the start");
    };
    (stays, held, pid)
}

#[tokio::test]
async fn inv_23_guest_outlives_kill() {
    let mut node = Node::warm(2).await;
    let claim = node.ctl().json(["claim", "--pool", "default"]).await;
    let (id, token) = (
        claim["sandbox"].as_str().unwrap(),
        claim["token"].as_str().unwrap(),
    );
    node.until_warm(2).await;
    let of = |client: sandbox_sdk::Client| client.sandbox(id, Some(Token::new(token).unwrap()));
    let sandbox = of(node.client().await);
    let (stays, mut held, held_pid) = start_two(&sandbox).await;
    let boot = sh(
        &sandbox,
        "cat /proc/sys/kernel/random/boot_id /run/sandbox/generation",
    )
    .await;
    let before = (
        places(&node, State::Claimed).await,
        places(&node, State::Warm).await,
    );
    let processes = node.sandbox_processes();

    node.kill9().await;
    assert!(
        processes.iter().all(|process| process.lives()),
        "a guest died with the daemon"
    );
    let broken = held.next().await.unwrap();
    assert!(broken.is_err(), "{broken:?}");
    node.start_again().await;
    assert_eq!(
        places(&node, State::Claimed).await,
        before.0,
        "claims are there before the first call"
    );
    node.until_warm(2).await;
    assert_eq!(
        places(&node, State::Warm).await,
        before.1,
        "the warm stock is the old one"
    );

    let sandbox = of(node.client().await);
    let again = sh(
        &sandbox,
        "cat /proc/sys/kernel/random/boot_id /run/sandbox/generation",
    )
    .await;
    assert_eq!(again, boot, "the same guest, not renewed");
    // It went on while there was no daemon, and goes on now.
    let count =
        "n=$(wc -l < /tmp/ticks); while [ $(wc -l < /tmp/ticks) -le $n ]; do sleep 0.05; done; echo more";
    assert_eq!(sh(&sandbox, count).await, "more\n");
    let lives = format!("test -d /proc/{stays} && echo lives");
    assert_eq!(sh(&sandbox, &lives).await, "lives\n");
    let ended = format!("while test -d /proc/{held_pid}; do sleep 0.05; done; echo ended");
    assert_eq!(
        sh(&sandbox, &ended).await,
        "ended\n",
        "what a call held ends with the call"
    );
    let stranger = node
        .client()
        .await
        .sandbox(id, Some(Token::new("sbt_wrong").unwrap()));
    let refused = stranger.exec(["true"]).output().await.unwrap_err();
    assert!(refused.is(Reason::SandboxNotFound), "{refused}");
    assert!(!sandbox.release().await.unwrap().already);
    drop(sandbox);
    node.stops_clean().await;
}

#[tokio::test]
async fn a_guest_that_dies_while_there_is_no_daemon_is_told_and_replaced() {
    let mut node = Node::warm(1).await;
    let sandbox = node.claim().await;
    node.until_warm(1).await;
    let (id, token) = (sandbox.id().to_owned(), sandbox.token().cloned());
    let victims = node.sandbox_processes();
    let warm = places(&node, State::Warm).await;
    node.kill9().await;
    for victim in &victims {
        victim.signal(rustix::process::Signal::KILL);
        victim.gone().await;
    }
    node.start_again().await;
    let row = node.until_state(&id, State::Failed).await;
    assert!(row.why.starts_with("lost_on_restart"), "{}", row.why);
    let refused = node
        .client()
        .await
        .sandbox(&id, token)
        .exec(["true"])
        .output()
        .await
        .unwrap_err();
    assert!(refused.is(Reason::SandboxFailed), "{refused}");
    node.until_warm(1).await;
    let fresh = places(&node, State::Warm).await;
    assert!(
        fresh.keys().all(|id| !warm.contains_key(id)),
        "dead stock is not taken back"
    );
    assert_eq!(sh(&node.claim().await, "echo new").await, "new\n");
}
