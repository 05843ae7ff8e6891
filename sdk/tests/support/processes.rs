//! Processes of the scripted daemon: what each does goes by its name.

use sandbox_sdk::{
    Reason,
    v1::{self, attach_in, attach_out, exit::How, logs_out, process_ref::Which},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::{Attendant, Events, Reply, Service, refusal};

fn name(which: Option<&v1::ProcessRef>) -> String {
    match which.and_then(|which| which.which.as_ref()) {
        Some(Which::Id(id)) => id.to_string(),
        Some(Which::Name(name)) => String::from_utf8_lossy(name).into_owned(),
        None => String::new(),
    }
}

fn exit(how: How) -> v1::Exit {
    v1::Exit {
        how: Some(how),
        ..v1::Exit::default()
    }
}

fn row(id: u64, state: v1::ProcessState) -> v1::Process {
    v1::Process {
        id,
        pid: 70,
        name: "web".into(),
        kind: v1::ProcessKind::Detached.into(),
        argv: vec!["serve".into(), "\u{1b}[31m".into()],
        state: state.into(),
        exit: (state == v1::ProcessState::Exited).then(|| exit(How::Code(3))),
        started_at: super::at(1_700_000_000),
        age_ms: 65_000,
        log_end: 12,
        ..v1::Process::default()
    }
}

/// Two batches.
pub(super) fn list(running: bool) -> Events<v1::AgentPsReply> {
    let mut batches = vec![vec![row(1, v1::ProcessState::Running)]];
    if !running {
        batches.push(vec![
            row(2, v1::ProcessState::Draining),
            row(3, v1::ProcessState::Exited),
        ]);
    }
    let batches = batches
        .into_iter()
        .map(|processes| Ok(v1::AgentPsReply { processes }));
    Box::pin(tokio_stream::iter(batches))
}

/// `running` never ends, `killed` was; all else ends with code 3.
pub(super) fn end(request: &v1::AgentWaitRequest) -> Reply<v1::AgentWaitReply> {
    let how = match name(request.process.as_ref()).as_str() {
        "running" => return Err(refusal(Reason::StillRunning, "guest", None)),
        "killed" => How::Signal(9),
        _ => How::Code(3),
    };
    Ok(Response::new(v1::AgentWaitReply {
        exit: Some(exit(how)),
    }))
}

fn chunk(output: v1::Output, offset: u64, data: &'static [u8]) -> v1::LogChunk {
    v1::LogChunk {
        output: output.into(),
        offset,
        data: data.into(),
    }
}

/// `out`, then seven bytes that are gone, then `err`. `lossy` does not tell of the seven.
pub(super) fn log(request: &v1::AgentLogsRequest) -> Events<v1::LogsOut> {
    let mut said = vec![logs_out::M::Chunk(chunk(v1::Output::Stdout, 0, b"out"))];
    if name(request.process.as_ref()) != "lossy" {
        said.push(logs_out::M::Gap(v1::LogGap { from: 3, to: 10 }));
    }
    said.push(logs_out::M::Chunk(chunk(v1::Output::Stderr, 10, b"\xff\x00")));
    if request.follow {
        said.push(logs_out::M::Exit(exit(How::Code(3))));
    }
    let said = said.into_iter().map(|m| Ok(v1::LogsOut { m: Some(m) }));
    Box::pin(tokio_stream::iter(said))
}

impl Service {
    /// `echo` says its argument, `both` is on both outputs, `flood` is beyond the cap, `lost` has said more.
    pub(super) fn answer(&self, request: v1::AgentRunRequest) -> Reply<v1::AgentRunReply> {
        self.note(|seen| seen.runs.push(request.clone()));
        let argv = request.command.unwrap_or_default().argv;
        let mut reply = v1::AgentRunReply::default();
        let mut exit = exit(How::Code(3));
        match argv.first().map(AsRef::as_ref) {
            Some(b"cat") => reply.stdout = request.stdin,
            Some(b"both") => {
                reply.stdout = "out".into();
                reply.stderr = "err".into();
            }
            Some(b"flood") => {
                reply.stdout = vec![b'x'; 8 * 1024 * 1024].into();
                reply.stderr = reply.stdout.clone();
                (reply.stdout_truncated, reply.stderr_truncated) = (true, true);
            }
            _ => {}
        }
        exit.stdout_bytes = reply.stdout.len() as u64 + u64::from(reply.stdout_truncated);
        exit.stderr_bytes = reply.stderr.len() as u64 + u64::from(reply.stderr_truncated);
        if argv.first().is_some_and(|name| name == "lost") {
            exit.stdout_bytes += 1;
        }
        reply.exit = (argv.first().is_none_or(|name| name != "noexit")).then_some(exit);
        Ok(Response::new(reply))
    }

    /// Gives back what it gets, until its input ends or a signal comes. `tty` has a terminal, and says its size;
    /// `noexit` ends at once, and without an exit; `strange` does not say how it is.
    pub(super) async fn visit(&self, mut input: Streaming<v1::AttachIn>) -> Reply<Events<v1::AttachOut>> {
        let Some(attach_in::M::Start(start)) = input.message().await?.and_then(|message| message.m) else {
            return Err(Status::invalid_argument("no start"));
        };
        self.note(|seen| seen.attaches.push(start.clone()));
        let (output, replies) = mpsc::channel(4);
        let visit = Visit {
            service: self.clone(),
            output,
            offset: 0,
        };
        drop(tokio::spawn(visit.run(name(start.process.as_ref()), input)));
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }
}

struct Visit {
    service: Service,
    output: mpsc::Sender<Result<v1::AttachOut, Status>>,
    offset: u64,
}

impl Visit {
    async fn send(&self, m: attach_out::M) {
        drop(self.output.send(Ok(v1::AttachOut { m: Some(m) })).await);
    }

    async fn say(&mut self, data: bytes::Bytes) {
        let length = data.len() as u64;
        let chunk = v1::LogChunk {
            output: v1::Output::Stdout.into(),
            offset: self.offset,
            data,
        };
        self.offset += length;
        self.send(attach_out::M::Chunk(chunk)).await;
    }

    async fn run(mut self, name: String, mut input: Streaming<v1::AttachIn>) {
        let mut guard = Attendant(self.service.clone(), false);
        if name != "strange" {
            let attached = v1::Attached {
                id: 7,
                pid: 70,
                state: v1::ProcessState::Running.into(),
                log_end: 5,
                tty: name == "tty",
                ..v1::Attached::default()
            };
            self.send(attach_out::M::Attached(attached)).await;
        }
        self.say("ready".into()).await;
        if name == "noexit" || name == "strange" {
            guard.1 = true;
            return;
        }
        let how = loop {
            let message = tokio::select! {
                message = input.message() => message,
                () = self.output.closed() => return,
            };
            match message.ok().flatten().and_then(|message| message.m) {
                Some(attach_in::M::Stdin(data)) => self.say(data).await,
                Some(attach_in::M::Signal(signal)) => {
                    self.service.note(|seen| seen.signals.push(signal.number));
                    break How::Signal(signal.number);
                }
                Some(attach_in::M::Resize(size)) => {
                    self.service.note(|seen| seen.sizes.push((size.cols, size.rows)));
                }
                Some(attach_in::M::StdinClose(_)) => break How::Code(0),
                // Whoever has nothing to say looks on.
                Some(attach_in::M::Start(_)) | None => {
                    self.output.closed().await;
                    return;
                }
            }
        };
        self.send(attach_out::M::Exit(exit(how))).await;
        guard.1 = !self.output.is_closed();
    }
}
