//! Sessions of the scripted daemon.

use sandbox_sdk::v1::{self, session_exit::How, session_run_in, session_run_out};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::{Attendant, Events, Reply, Service, chunk};

pub(super) fn list() -> v1::AgentSessionListReply {
    let session = v1::Session {
        session: "s-1".into(),
        process: 8,
        pid: 80,
        busy: true,
        commands: 2,
        opened_at: super::at(1_700_000_000),
        idle_ms: 1_000,
        idle_secs: 1_800,
    };
    v1::AgentSessionListReply {
        sessions: vec![session],
    }
}

impl Service {
    /// Says its text. `exit` ends the session with 5, `sleep` waits for a signal, `late` has a job that said something
    /// before, `slow` is timed out, `noexit` has no end.
    pub(super) async fn command(
        &self,
        mut input: Streaming<v1::SessionRunIn>,
    ) -> Reply<Events<v1::SessionRunOut>> {
        let Some(session_run_in::M::Start(start)) = input.message().await?.and_then(|message| message.m)
        else {
            return Err(Status::invalid_argument("no start"));
        };
        self.note(|seen| seen.texts.push(start.clone()));
        let (output, replies) = mpsc::channel(4);
        let service = self.clone();
        let command = async move {
            let mut guard = Attendant(service.clone(), false);
            let say = async |m| drop(output.send(Ok(v1::SessionRunOut { m: Some(m) })).await);
            let mut exit = v1::SessionExit {
                how: Some(How::Code(0)),
                cwd: "/tmp".into(),
                ..v1::SessionExit::default()
            };
            let text = String::from_utf8_lossy(&start.command).into_owned();
            if text == "late" {
                say(session_run_out::M::LateStdout(chunk("old"))).await;
                say(session_run_out::M::LateStderr(chunk("older"))).await;
            }
            say(session_run_out::M::Started(v1::SessionStarted { number: 1 })).await;
            say(session_run_out::M::Stdout(chunk(text.clone()))).await;
            say(session_run_out::M::Stderr(chunk("err"))).await;
            match text.as_str() {
                "noexit" => {
                    guard.1 = true;
                    return;
                }
                "exit" => (exit.how, exit.session_ended) = (Some(How::Code(5)), true),
                "slow" => (exit.how, exit.timed_out) = (Some(How::Code(137)), true),
                "sleep" => {
                    let message = tokio::select! {
                        message = input.message() => message,
                        () = output.closed() => return,
                    };
                    let Some(session_run_in::M::Signal(signal)) =
                        message.ok().flatten().and_then(|message| message.m)
                    else {
                        output.closed().await;
                        return;
                    };
                    service.note(|seen| seen.signals.push(signal.number));
                    exit.how = Some(How::Code(128 + signal.number));
                }
                _ => {}
            }
            say(session_run_out::M::Exit(exit)).await;
            guard.1 = !output.is_closed();
        };
        drop(tokio::spawn(command));
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }
}
