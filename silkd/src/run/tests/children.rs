//! Programs of other rooms.

use std::os::fd::OwnedFd;

use rustix::{pipe::PipeFlags, process::Signal};
use sandbox_protocol::v1::{ProcessKind, ProcessState, exit::How};
use tokio::io::{Interest, unix::AsyncFd};

use super::harness::{Guest, death, handle, sh, to, within};
use crate::{
    run::{ChildEnds, Kind},
    sys,
};

async fn read_all(pipe: AsyncFd<OwnedFd>) -> String {
    let mut text = Vec::new();
    loop {
        let mut ready = within(pipe.readable()).await.unwrap();
        let mut buffer = [0; 4096];
        match rustix::io::read(&pipe, &mut buffer) {
            Ok(0) => return String::from_utf8(text).unwrap(),
            Ok(n) => text.extend_from_slice(&buffer[..n]),
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(errno) => panic!("{errno}"),
        }
    }
}

#[tokio::test]
async fn a_child_has_its_ends_and_an_exit_as_a_value() {
    let guest = Guest::start();
    let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    let ours = sys::watch(ours, Interest::READABLE).unwrap();
    let ends = ChildEnds {
        stdin: true,
        extra: vec![(theirs, 250)],
        ..ChildEnds::default()
    };
    // dash knows numbers of one digit only.
    let script = sh("cat; echo aside >&2; echo more >/proc/self/fd/250; exit 3");
    let ctx = guest.ctx();
    let started = guest.runner.child(&ctx, &script, Kind::Session, ends);
    let mut child = within(started).await.unwrap();
    let row = guest.runner.list(true, 0, 9).remove(0);
    assert_eq!(
        (row.id, row.pid, row.kind()),
        (child.id(), child.pid(), ProcessKind::Session)
    );
    assert_eq!(row.argv, script.argv);
    // A session is nothing that a call waits for.
    assert!(guest.runner.open().is_empty());
    let stdin = child.stdin.take().unwrap();
    rustix::io::write(&stdin, b"in").unwrap();
    drop(stdin);
    let exit = within(child.exit()).await;
    assert_eq!(exit.how, Some(How::Code(3)));
    assert_eq!(read_all(child.stdout.take().unwrap()).await, "in");
    assert_eq!(read_all(child.stderr.take().unwrap()).await, "aside\n");
    assert_eq!(read_all(ours).await, "more\n");
    // It is a value: asked again, it says the same.
    assert_eq!(within(child.exit()).await, exit);
    assert!(guest.runner.list(false, 0, 9).is_empty());
    guest.end().await;
}

#[tokio::test]
async fn a_child_ends_with_its_value_and_all_it_started() {
    let guest = Guest::start();
    let script = sh("setsid sleep 1000 & sleep 1000 & kill -STOP $$");
    let ctx = guest.ctx();
    let started = guest.runner.child(&ctx, &script, Kind::Git, ChildEnds::default());
    let child = within(started).await.unwrap();
    let leader = i32::try_from(child.pid()).unwrap();
    super::harness::eventually("the tree", || child.members().len() == 3).await;
    let tree: Vec<_> = child.members().into_iter().map(handle).collect();
    assert_eq!(guest.runner.open(), [format!("git {} `sh`", child.id())]);
    // Those that are not spared, then the rest with the value.
    child.signal_others(Signal::KILL, &[leader]);
    super::harness::eventually("the leader alone", || child.members() == [leader]).await;
    let exit = child.exit();
    drop(child);
    for process in tree {
        death(process).await;
    }
    assert_eq!(within(exit).await.how, Some(How::Signal(9)));
    guest.end().await;
}

#[tokio::test]
async fn what_a_child_says_aside_can_be_a_log() {
    let guest = Guest::start();
    let ctx = guest.ctx();
    let ends = ChildEnds {
        stdin: true,
        log: true,
        ..ChildEnds::default()
    };
    let script = sh("echo aside >&2; cat; exit 4");
    let started = guest.runner.child(&ctx, &script, Kind::Lsp, ends);
    let mut child = within(started).await.unwrap();
    assert!(child.stderr.is_none());
    let mut live = guest.attach(to(child.id())).await.unwrap();
    assert_eq!(live.read(6).await.data, b"aside\n");
    drop(child.stdin.take());
    assert_eq!(within(child.exit()).await.how, Some(How::Code(4)));
    let heard = live.finish().await;
    assert_eq!((heard.code(), heard.exit.unwrap().stderr_bytes), (4, 6));
    let row = guest.runner.list(false, 0, 9).remove(0);
    assert_eq!(
        (row.kind(), row.state()),
        (ProcessKind::Lsp, ProcessState::Exited)
    );
    let id = child.id();
    drop(child);
    // Kept, whoever ran it.
    let mut late = guest.attach(to(id)).await.unwrap();
    assert_eq!(late.finish().await.data, b"aside\n");
    guest.end().await;
}
