//! What goes on across a sleep, and what ends with it. The host that wakes a guest is a new connection: it was written
//! to disk, and whoever was connected is not.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
};

use sandbox_protocol::v1::{
    AgentSpawnRequest, AttachIn, AttachOut, AttachStart, Attached, Exit, Flow, LogFrom, ProcessState, Size,
    Tty, attach_in, attach_out, control_quiesce_request::Mode as Rest, control_renew_request::Mode, exec_out,
    exit::How, log_from,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::{
    by_id, command,
    common::{Guest, Host, reason, within},
    foreground, rows, start,
};

/// A guest that was renewed.
async fn ready() -> (Guest, Host) {
    let guest = Guest::start();
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "a")).await.unwrap();
    (guest, host)
}

/// Wakes the guest as its next host does.
async fn wake(guest: &Guest) -> Host {
    let mut host = within(Host::connect(&guest.socket())).await;
    within(host.renew(Mode::Wake, "w")).await.unwrap();
    host
}

/// One who reads what a program says and gives it input.
struct Attachment {
    input: mpsc::Sender<AttachIn>,
    output: tonic::Streaming<AttachOut>,
    attached: Attached,
    /// Offset behind what was read.
    next: u64,
}

async fn attach(host: &mut Host, start: AttachStart) -> Result<Attachment, Status> {
    let (input, messages) = mpsc::channel(4);
    let m = Some(attach_in::M::Start(start));
    input.send(AttachIn { m }).await.unwrap();
    let output = within(host.agent.attach(ReceiverStream::new(messages))).await?;
    let mut output = output.into_inner();
    match within(output.message()).await?.and_then(|out| out.m) {
        Some(attach_out::M::Attached(attached)) => Ok(Attachment {
            input,
            output,
            attached,
            next: 0,
        }),
        other => panic!("not attached: {other:?}"),
    }
}

impl Attachment {
    async fn send(&self, m: attach_in::M) {
        within(self.input.send(AttachIn { m: Some(m) })).await.unwrap();
    }

    async fn say(&self, line: &'static str) {
        self.send(attach_in::M::Stdin(line.into())).await;
    }

    /// Reads on until it has so many bytes; no byte is missed.
    async fn read(&mut self, length: usize) -> Result<Vec<u8>, Status> {
        let mut said = Vec::new();
        while said.len() < length {
            match within(self.output.message()).await?.and_then(|out| out.m) {
                Some(attach_out::M::Chunk(chunk)) => {
                    assert_eq!(chunk.offset, self.next, "a hole");
                    self.next += u64::try_from(chunk.data.len()).unwrap();
                    said.extend_from_slice(&chunk.data);
                }
                other => panic!("{other:?} after {} bytes", said.len()),
            }
        }
        Ok(said)
    }

    /// Reads to the end of the program.
    async fn end(mut self) -> (Vec<u8>, Exit) {
        let mut said = Vec::new();
        loop {
            match within(self.output.message()).await.unwrap().and_then(|out| out.m) {
                Some(attach_out::M::Chunk(chunk)) => said.extend_from_slice(&chunk.data),
                Some(attach_out::M::Exit(exit)) => return (said, exit),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A pipe by its name, open at both ends, so that neither end waits for the other.
fn fifo(path: &std::path::Path) -> File {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    File::options().read(true).write(true).open(path).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn wake_keeps_background_job_and_identity() {
    let (guest, mut host) = ready().await;
    let (ask, said) = (guest.dir.path().join("ask"), guest.dir.path().join("said"));
    let (mut asking, saying) = (fifo(&ask), fifo(&said));
    // It counts in its own memory, so that another one in its place would show.
    let server = format!(
        "n=0; while read word; do n=$((n + 1)); echo $word $n $$; done <>{} >{}",
        ask.display(),
        said.display()
    );
    let server = AgentSpawnRequest {
        command: command(&["sh", "-c", &server]),
        name: "server".into(),
        ..AgentSpawnRequest::default()
    };
    let server = within(host.agent.spawn(server)).await.unwrap().into_inner();
    // Lines as they come.
    let (tell, mut told) = mpsc::channel(3);
    let lines = tokio::task::spawn_blocking(move || {
        for line in BufReader::new(saying).lines().take(3) {
            tell.blocking_send(line.unwrap()).unwrap();
        }
    });
    asking.write_all(b"before\n").unwrap();
    assert_eq!(
        within(told.recv()).await.unwrap(),
        format!("before 1 {}", server.pid)
    );
    let names = [
        "etc/machine-id",
        "run/silkd/boot_id",
        "run/sandbox/id",
        "etc/hosts",
    ];
    let identity = names.map(|name| guest.read(name));
    let generation = host.info().await.generation;

    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    // Asked of a server that stands still.
    asking.write_all(b"asleep\n").unwrap();
    let mut host = wake(&guest).await;
    assert_eq!(
        within(told.recv()).await.unwrap(),
        format!("asleep 2 {}", server.pid)
    );
    asking.write_all(b"after\n").unwrap();
    assert_eq!(
        within(told.recv()).await.unwrap(),
        format!("after 3 {}", server.pid)
    );
    lines.await.unwrap();
    assert_eq!(names.map(|name| guest.read(name)), identity);
    assert_eq!(host.info().await.generation, generation + 1);
    let row = rows(&mut host).await.remove(0);
    assert_eq!((row.id, row.state()), (server.id, ProcessState::Running));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hibernate_closes_pty_with_reason() {
    let (guest, mut host) = ready().await;
    let mut wanted = start("stty -echo; echo ready; read x; echo got $x at $(stty size); exit 7");
    wanted.command.as_mut().unwrap().tty = Some(Tty {
        cols: 80,
        rows: 24,
        ..Tty::default()
    });
    let mut call = foreground(&mut host, wanted, "ready\r\n").await;
    // The one who sits there, and one who looks over the shoulder of another.
    let spawned = AgentSpawnRequest {
        command: command(&["cat"]),
        keep_stdin: true,
        ..AgentSpawnRequest::default()
    };
    let beside = within(host.agent.spawn(spawned)).await.unwrap().into_inner().id;
    let to_beside = AttachStart {
        process: by_id(beside),
        input: true,
        ..AttachStart::default()
    };
    let mut watching = attach(&mut host, to_beside).await.unwrap();
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    let ended = loop {
        match within(call.output.message()).await {
            Ok(Some(out)) => assert!(!matches!(out.m, Some(exec_out::M::Exit(_))), "{out:?}"),
            Ok(None) => panic!("it ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&ended), "SANDBOX_HIBERNATING");
    let ended = watching.read(1).await.unwrap_err();
    assert_eq!(reason(&ended), "SANDBOX_HIBERNATING");

    // The terminal is as it was, and so are its size and its input for whoever comes.
    let mut host = wake(&guest).await;
    let again = AttachStart {
        process: by_id(call.id),
        input: true,
        ..AttachStart::default()
    };
    let again = attach(&mut host, again).await.unwrap();
    assert!(again.attached.tty);
    assert_eq!(again.attached.state(), ProcessState::Running);
    again
        .send(attach_in::M::Resize(Size { cols: 132, rows: 50 }))
        .await;
    again.say("after\n").await;
    let (said, exit) = again.end().await;
    assert_eq!(
        (&*said, exit.how),
        (&b"got after at 50 132\r\n"[..], Some(How::Code(7)))
    );
    drop(call.input);
}

/// Says so many bytes at once.
const FLOOD: usize = 4 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn attached_reader_across_wake_gets_bytes() {
    let (guest, mut host) = ready().await;
    let script = format!("while read word; do echo $word; [ $word != flood ] || yes | head -c {FLOOD}; done");
    let spawned = AgentSpawnRequest {
        command: command(&["sh", "-c", &script]),
        keep_stdin: true,
        // All of it fits, so that what is said before anybody has come back is not lost.
        log_bytes: 2 * u64::try_from(FLOOD).unwrap(),
        ..AgentSpawnRequest::default()
    };
    let id = within(host.agent.spawn(spawned)).await.unwrap().into_inner().id;
    // The program waits for this reader, and nobody else may give it input.
    let start = |from| AttachStart {
        process: by_id(id),
        from: Some(LogFrom {
            at: Some(log_from::At::Offset(from)),
        }),
        flow: Flow::Hold.into(),
        input: true,
    };
    let mut before = attach(&mut host, start(0)).await.unwrap();
    before.say("one\n").await;
    assert_eq!(before.read(4).await.unwrap(), b"one\n");
    // Now it takes no more: its window is full, and the program stands.
    before.say("flood\n").await;
    let window = u64::from(sandbox_protocol::limits::STREAM_WINDOW);
    within(async {
        while rows(&mut host).await.remove(0).log_end < 2 * window {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // It is let go all the same, and what it takes later ends with the reason.
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    let ended = before.read(usize::MAX).await.unwrap_err();
    assert_eq!(reason(&ended), "SANDBOX_HIBERNATING");

    let mut host = wake(&guest).await;
    let mut after = attach(&mut host, start(before.next)).await.unwrap();
    after.next = before.next;
    assert_eq!(rows(&mut host).await.remove(0).readers, 1, "and no ghost");
    // One that the program still waited for would keep it from ever saying the rest.
    let all = ["one\nflood\n", &"y\n".repeat(FLOOD / 2)].concat();
    let left = &all.as_bytes()[usize::try_from(before.next).unwrap()..];
    assert!(after.read(left.len()).await.unwrap() == left);
    after.say("two\n").await;
    assert_eq!(after.read(4).await.unwrap(), b"two\n");
}
