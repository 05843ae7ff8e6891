//! What tests of sessions have in common: a command that runs, and what it said.

use bytes::Bytes;
use sandbox_protocol::{
    reason::Reason,
    v1::{
        AgentSessionCloseRequest, AgentSessionOpenReply, AgentSessionOpenRequest, SessionExit, SessionRunIn,
        SessionRunOut, SessionRunStart, Signal, session_exit::How, session_run_in, session_run_out::M,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::harness::{Guest, refusal, within};

/// A command that runs.
pub(super) struct Running {
    /// `None`: our half is closed.
    pub(super) input: Option<mpsc::Sender<SessionRunIn>>,
    pub(super) output: Streaming<SessionRunOut>,
    pub(super) number: u64,
}

/// What a command said.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) number: u64,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    pub(super) late: Vec<u8>,
    pub(super) exit: SessionExit,
}

impl Said {
    pub(super) fn out(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    pub(super) fn err(&self) -> &str {
        std::str::from_utf8(&self.stderr).unwrap()
    }

    #[track_caller]
    pub(super) fn code(&self) -> i32 {
        assert!(!self.exit.session_ended, "{self:?}");
        match self.exit.how {
            Some(How::Code(code)) => code,
            other => panic!("no code: {other:?}"),
        }
    }
}

impl Running {
    pub(super) async fn next(&mut self) -> Result<M, Status> {
        let message = within(self.output.message()).await?;
        Ok(message
            .and_then(|message| message.m)
            .expect("it ended without an exit"))
    }

    /// A line with a number of a process, which is all that it says now.
    pub(super) async fn line(&mut self) -> i32 {
        let message = self.next().await.unwrap();
        let M::Stdout(chunk) = message else {
            panic!("no output: {message:?}");
        };
        std::str::from_utf8(&chunk.data).unwrap().trim().parse().unwrap()
    }

    /// Reads until it has said all of these.
    pub(super) async fn until(&mut self, texts: &[&str]) {
        let mut said = String::new();
        while !texts.iter().all(|text| said.contains(text)) {
            match self.next().await.unwrap() {
                M::Stdout(chunk) => said.push_str(std::str::from_utf8(&chunk.data).unwrap()),
                M::Stderr(_) => {}
                message @ (M::Started(_) | M::LateStdout(_) | M::LateStderr(_) | M::Exit(_)) => {
                    panic!("{message:?}")
                }
            }
        }
    }

    pub(super) async fn signal(&self, number: i32) {
        let signal = Signal { number, scope: 0 };
        let message = SessionRunIn {
            m: Some(session_run_in::M::Signal(signal)),
        };
        self.input.as_ref().unwrap().send(message).await.unwrap();
    }

    /// Reads to the end: the exit, then OK.
    pub(super) async fn finish(mut self) -> Result<Said, Status> {
        let mut said = Said {
            number: self.number,
            ..Said::default()
        };
        let mut begun = false;
        said.exit = loop {
            match self.next().await? {
                M::Started(_) => panic!("started twice"),
                M::LateStdout(chunk) | M::LateStderr(chunk) => {
                    assert!(!begun, "late output comes first");
                    said.late.extend_from_slice(&chunk.data);
                }
                M::Stdout(chunk) => {
                    begun = true;
                    said.stdout.extend_from_slice(&chunk.data);
                }
                M::Stderr(chunk) => {
                    begun = true;
                    said.stderr.extend_from_slice(&chunk.data);
                }
                M::Exit(exit) => break exit,
            }
        };
        assert!(within(self.output.message()).await?.is_none());
        Ok(said)
    }
}

pub(super) fn named(session: &str) -> AgentSessionOpenRequest {
    AgentSessionOpenRequest {
        session: session.to_owned(),
        ..AgentSessionOpenRequest::default()
    }
}

impl Guest {
    pub(super) async fn open(
        &self,
        request: AgentSessionOpenRequest,
    ) -> Result<AgentSessionOpenReply, Status> {
        let mut client = self.client.clone();
        within(Box::pin(client.session_open(request)))
            .await
            .map(|reply| reply.into_inner())
    }

    pub(super) async fn close(&self, session: &str) -> Result<(), Status> {
        let request = AgentSessionCloseRequest {
            session: session.to_owned(),
        };
        let mut client = self.client.clone();
        within(Box::pin(client.session_close(request))).await.map(drop)
    }

    pub(super) async fn order(
        &self,
        session: &str,
        text: impl Into<Bytes>,
        timeout_ms: u32,
    ) -> Result<Running, Status> {
        let (input, messages) = mpsc::channel(4);
        let start = SessionRunStart {
            session: session.to_owned(),
            command: text.into(),
            timeout_ms,
        };
        let first = SessionRunIn {
            m: Some(session_run_in::M::Start(start)),
        };
        input.try_send(first).unwrap();
        let mut client = self.client.clone();
        let reply = within(client.session_run(ReceiverStream::new(messages))).await?;
        let mut running = Running {
            input: Some(input),
            output: reply.into_inner(),
            number: 0,
        };
        let first = running.next().await?;
        let M::Started(started) = first else {
            panic!("no Started: {first:?}");
        };
        running.number = started.number;
        Ok(running)
    }

    pub(super) async fn told(&self, session: &str, text: impl Into<Bytes>) -> Said {
        let mut running = self.order(session, text, 0).await.unwrap();
        running.input = None;
        running.finish().await.unwrap()
    }

    pub(super) async fn not_told(&self, session: &str, text: impl Into<Bytes>) -> Reason {
        refusal(self.order(session, text, 0).await.err().expect("it was taken")).0
    }
}

pub(super) async fn with_a_session() -> Guest {
    let guest = Guest::start();
    let reply = guest.open(named("s")).await.unwrap();
    assert_eq!(reply.session, "s");
    guest
}
