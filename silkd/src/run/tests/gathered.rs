//! Run: one answer.

use bytes::Bytes;
use sandbox_protocol::{
    limits::{RUN_OUTPUT_DEFAULT, RUN_OUTPUT_MAX},
    reason::Reason,
    v1::{AgentRunReply, AgentRunRequest, Command, exit::How},
};
use tonic::Status;

use super::harness::{Guest, command, eventually, refusal, sh, within};

fn of(command: Command) -> AgentRunRequest {
    AgentRunRequest {
        command: Some(command),
        ..AgentRunRequest::default()
    }
}

impl Guest {
    async fn gather(&self, request: AgentRunRequest) -> Result<AgentRunReply, Status> {
        let mut client = self.client.clone().max_decoding_message_size(usize::MAX);
        let reply = Box::pin(client.run(request));
        Ok(within(reply).await?.into_inner())
    }
}

#[tokio::test]
async fn run_caps_and_says_so() {
    let guest = Guest::start();
    let said: u64 = 20_000_000;
    let request = AgentRunRequest {
        max_output: RUN_OUTPUT_MAX,
        trace: true,
        ..of(sh(&format!("yes | head -c {said}; echo aside >&2; exit 7")))
    };
    let reply = guest.gather(request).await.unwrap();
    let exit = reply.exit.unwrap();
    // The program ran on: all that it said is counted.
    assert_eq!(
        (exit.how, exit.stdout_bytes, exit.stderr_bytes),
        (Some(How::Code(7)), said, 6)
    );
    assert_eq!(u64::try_from(reply.stdout.len()).unwrap(), RUN_OUTPUT_MAX);
    assert!(reply.stdout_truncated && !reply.stderr_truncated);
    assert_eq!(reply.stderr, "aside\n");
    assert!(reply.stdout.chunks(2).all(|line| line == b"y\n"));
    assert_eq!(exit.work.unwrap().clones, 1);
    let small = guest.gather(of(sh("yes | head -c 1048577"))).await.unwrap();
    assert_eq!(u64::try_from(small.stdout.len()).unwrap(), RUN_OUTPUT_DEFAULT);
    assert!(small.stdout_truncated);
    let whole = guest.gather(of(sh("yes | head -c 1048576"))).await.unwrap();
    assert!(!whole.stdout_truncated && whole.stdout.len() == 1_048_576);
    let more = AgentRunRequest {
        max_output: RUN_OUTPUT_MAX + 1,
        ..of(sh("true"))
    };
    assert_eq!(
        refusal(guest.gather(more).await.unwrap_err()).0,
        Reason::FieldInvalid
    );
    guest.end().await;
}

#[tokio::test]
async fn a_run_gets_its_input_whole_and_its_end() {
    let guest = Guest::start();
    let input = Bytes::from(vec![b'x'; 1024 * 1024]);
    let request = AgentRunRequest {
        stdin: input.clone(),
        ..of(command(&[b"cat"]))
    };
    assert!(guest.gather(request).await.unwrap().stdout == input);
    assert_eq!(guest.gather(of(command(&[b"cat"]))).await.unwrap().stdout, "");
    let mut timed = sh("setsid sleep 1000 & echo on; sleep 1000");
    timed.timeout_ms = 1500;
    let reply = guest.gather(of(timed)).await.unwrap();
    assert!(reply.exit.unwrap().timed_out && reply.stdout == "on\n");
    guest.end().await;
}

#[tokio::test]
async fn a_run_ends_with_its_caller() {
    let guest = Guest::start();
    let mut run = Box::pin(guest.gather(of(sh("setsid sleep 1000 & sleep 1000"))));
    let started = eventually("it runs", || guest.runner.running() == 1);
    tokio::select! {
        reply = &mut run => panic!("{reply:?}"),
        () = started => {}
    }
    drop(run);
    eventually("nothing is left", || guest.runner.list(false, 0, 9).is_empty()).await;
    guest.end().await;
}

#[tokio::test]
async fn runs_that_are_full_refuse_the_next() {
    let guest = Guest::start();
    let held = guest.runner.shared.buffers.fill();
    let refused = guest.gather(of(sh("true"))).await.unwrap_err();
    assert_eq!(refusal(refused).0, Reason::RunBufferFull);
    drop(held);
    assert!(guest.gather(of(sh("true"))).await.is_ok());
    guest.end().await;
}

/// What it costs to run `true` is a row of the bench; that it costs nothing which is not given back stands here.
#[tokio::test]
async fn true_1000_times_has_no_tail() {
    let guest = Guest::start();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let leaves = guest.leaves();
    assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    let before = descriptors();
    for _ in 0..1000 {
        assert_eq!(guest.run(command(&[b"true"])).await.unwrap().code(), 0);
    }
    eventually("all descriptors came back", || descriptors() <= before).await;
    assert_eq!((guest.leaves(), guest.runner.running()), (leaves, 0));
    assert!(guest.runner.list(false, 0, 9).is_empty());
    guest.end().await;
}
