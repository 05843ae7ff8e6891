//! The link of a real machine under what a claimer can do to it.

use bytes::Bytes;
use futures_util::future;
use harness::{HANG, refused, within};
use sandbox_protocol::{
    limits::LINK_INPUT_STREAMS,
    link::{BREAK_ZEROS, HELLO_MAGIC, encode_break},
};
use sandbox_sdk::{Event, ExecStream, Reason, SandboxHandle, StdinWriter};

use crate::node::{Node, sh};

/// Bytes of each file; 64 MiB are the soak's.
const MANY: usize = 4 << 20;

/// What a link would take for its boundary, if it looked for it within its streams: over and over, so that it lies in
/// every place that a frame can cut.
fn boundaries() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(MANY + BREAK_ZEROS);
    while bytes.len() < MANY {
        bytes.extend(encode_break(*b"not a host's own"));
        bytes.extend(HELLO_MAGIC);
        bytes.extend([0; 16]);
    }
    bytes.truncate(MANY);
    bytes
}

#[tokio::test]
async fn file_full_of_zeros_or_magic_passes() {
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    // A call that would not outlive its link.
    let mut held = sandbox.exec(["cat"]).piped_stdin().stream().await.unwrap();
    let mut stdin = held.take_stdin().unwrap();
    assert_eq!(echoed(&mut held, &mut stdin, "before").await, "before");

    let contents = [("zeros", vec![0; MANY]), ("magic", boundaries())];
    let here = tempfile::tempdir().unwrap();
    let (there, back) = (here.path().join("there"), here.path().join("back"));
    std::fs::create_dir(&there).unwrap();
    for (name, content) in &contents {
        std::fs::write(there.join(name), content).unwrap();
    }
    let files = sandbox.files();
    let pushed = within(HANG, files.push_dir(&there, "/root/tree")).await.unwrap();
    assert_eq!(pushed.bytes, 2 * MANY as u64);
    within(HANG, files.pull_dir("/root/tree", &back)).await.unwrap();
    for (name, content) in contents {
        assert!(
            std::fs::read(back.join(name)).unwrap() == content,
            "{name} by trees"
        );
        // And alone, to another place.
        let path = format!("/root/{name}");
        let content = Bytes::from(content);
        let written = files.write(&path).bytes(content.clone());
        within(HANG, written).await.unwrap();
        let same = format!("cmp /root/tree/{name} {path} && echo same");
        assert_eq!(sh(&sandbox, &same).await, "same\n");
        let read = within(HANG, files.read(&path).bytes()).await.unwrap();
        assert!(read == content, "{name} by itself");
    }
    assert_eq!(echoed(&mut held, &mut stdin, "after").await, "after");
    drop(stdin);
    assert!(within(HANG, held.wait()).await.unwrap().success());
}

/// What `cat` says of a word.
async fn echoed(cat: &mut ExecStream, stdin: &mut StdinWriter, word: &'static str) -> String {
    stdin.write(word).await.unwrap();
    let mut said = String::new();
    while said.len() < word.len() {
        match within(HANG, cat.next()).await.unwrap().unwrap() {
            Event::Started { .. } => {}
            Event::Stdout(bytes) => said.push_str(std::str::from_utf8(&bytes).unwrap()),
            other @ (Event::Stderr(_) | Event::Exit(_)) => panic!("{other:?}"),
        }
    }
    said
}

/// A program that reads nothing, and its input.
async fn deaf(sandbox: SandboxHandle) -> (ExecStream, StdinWriter) {
    let mut stream = sandbox
        .exec(["sleep", "1000"])
        .piped_stdin()
        .stream()
        .await
        .unwrap();
    let first = within(HANG, stream.next()).await.unwrap().unwrap();
    assert!(matches!(first, Event::Started { .. }), "{first:?}");
    let stdin = stream.take_stdin().unwrap();
    (stream, stdin)
}

#[tokio::test]
async fn stalled_streams_do_not_stall_info() {
    /// What the ways to a program take at least before they are full: its pipe, and the windows of both hops.
    const AT_LEAST: usize = 512 << 10;
    /// More than they can take.
    const TOO_MUCH: usize = 4 << 20;
    let node = Node::warm(1).await;
    let sandbox = node.claim().await;
    let streams = LINK_INPUT_STREAMS as usize;
    let programs = (0..streams).map(|_| deaf(sandbox.clone()));
    let (mut calls, mut inputs): (Vec<_>, Vec<_>) = future::join_all(programs).await.into_iter().unzip();
    let block = Bytes::from(vec![b'x'; TOO_MUCH]);
    let filled = inputs
        .iter_mut()
        .map(|stdin| stdin.write(block.slice(..AT_LEAST)));
    let filled = within(HANG, future::join_all(filled)).await;
    assert!(filled.iter().all(Result::is_ok), "{filled:?}");
    let stuck = inputs.iter_mut().map(|stdin| stdin.write(block.clone()));
    let stuck = future::select_all(stuck.map(Box::pin));
    let asked = async {
        for _ in 0..10 {
            let info = within(HANG, sandbox.agent()).await.unwrap();
            assert_eq!(info.processes, LINK_INPUT_STREAMS);
        }
        // No more of them, but whatever takes no input.
        let one_more = sandbox.exec(["cat"]).stdin("x").output();
        refused(within(HANG, one_more).await, Reason::StreamLimit);
        assert_eq!(sh(&sandbox, "echo beside").await, "beside\n");
    };
    tokio::select! {
        biased;
        () = asked => {}
        (ended, ..) = stuck => panic!("a program that reads nothing had it all: {ended:?}"),
    }
    // What leaves makes room.
    drop((calls.pop(), inputs.pop()));
    let cat = || async {
        match sandbox.exec(["cat"]).stdin("x").output().await {
            Ok(output) => Some(output.stdout),
            Err(error) if error.is(Reason::StreamLimit) => None,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(harness::eventually("there is room for one", cat).await, b"x");
}
