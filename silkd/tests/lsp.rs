//! Language servers, in test mode. `cat` is one that answers each message with itself.
#![expect(clippy::disallowed_methods, reason = "tests own their files")]
#![expect(clippy::large_futures, reason = "a test holds few of them")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

// On threads of their own, so that a guest that ends is answered while the test waits for it.
mod common;

use common::{Guest, Host, reason, within};
use sandbox_protocol::{
    limits::{CHUNK_IN, LSP_MESSAGE, LSP_SERVERS},
    v1::{
        AgentLogsRequest, AgentLspStopRequest, Exit, LspFrame, LspIn, LspOut, LspStart, LspStarted, Output,
        ProcessRef, control_quiesce_request::Mode as Rest, control_renew_request::Mode, exit::How, logs_out,
        lsp_in, lsp_out, lsp_start::Which, process_ref,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

const ECHO: &str = "# answers each message with itself\ncat\n";

/// A guest whose gate is open, with these languages, and its host.
async fn ready(languages: &[(&str, &str)]) -> (Guest, Host) {
    let guest = Guest::start();
    std::fs::create_dir_all(guest.file("etc/silkd/lsp.d")).unwrap();
    for (name, argv) in languages {
        std::fs::write(guest.file("etc/silkd/lsp.d").join(name), argv).unwrap();
    }
    let mut host = Host::connect(&guest.socket()).await;
    within(host.renew(Mode::Boot, "lsp")).await.unwrap();
    (guest, host)
}

/// A shell script as a server; newlines become `;`.
fn script(text: &str) -> String {
    format!("sh\n-c\n{}\n", text.replace('\n', ";"))
}

/// A client of a server.
struct Client {
    input: mpsc::Sender<LspIn>,
    output: Streaming<LspOut>,
    started: LspStarted,
}

async fn open(host: &mut Host, start: LspStart) -> Result<Client, Status> {
    let (input, rest) = mpsc::channel(4);
    let start = LspIn {
        m: Some(lsp_in::M::Start(start)),
    };
    input.send(start).await.unwrap();
    let mut output = within(host.agent.lsp_open(ReceiverStream::new(rest)))
        .await?
        .into_inner();
    let first = within(output.message()).await?.unwrap().m.unwrap();
    let lsp_out::M::Started(started) = first else {
        panic!("{first:?}");
    };
    Ok(Client {
        input,
        output,
        started,
    })
}

fn language(name: &str, linger: Option<u32>) -> LspStart {
    LspStart {
        which: Some(Which::Language(name.to_owned())),
        root: "/".into(),
        linger_secs: linger,
        ..LspStart::default()
    }
}

/// Comes back to one, once the client before is known to have left.
async fn again(host: &mut Host, server: u64) -> Client {
    let which = Some(Which::Server(server));
    loop {
        let start = LspStart {
            which: which.clone(),
            ..LspStart::default()
        };
        match open(host, start).await {
            Ok(client) => return client,
            Err(busy) if reason(&busy) == "LSP_BUSY" => {}
            Err(other) => panic!("{other:?}"),
        }
    }
}

impl Client {
    async fn frame(&self, data: Vec<u8>, more: bool) {
        let frame = LspFrame {
            data: data.into(),
            more,
        };
        let frame = LspIn {
            m: Some(lsp_in::M::Frame(frame)),
        };
        within(self.input.send(frame)).await.unwrap();
    }

    async fn next(&mut self) -> Result<Option<lsp_out::M>, Status> {
        Ok(within(self.output.message()).await?.map(|out| out.m.unwrap()))
    }

    /// The next message, whole.
    async fn message(&mut self) -> Vec<u8> {
        let mut message = Vec::new();
        loop {
            match self.next().await.unwrap() {
                Some(lsp_out::M::Frame(frame)) => {
                    message.extend_from_slice(&frame.data);
                    if !frame.more {
                        return message;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    async fn echoes(&mut self, text: &str) {
        self.frame(text.into(), false).await;
        assert_eq!(self.message().await, text.as_bytes());
    }

    async fn exit(&mut self) -> How {
        match self.next().await.unwrap() {
            Some(lsp_out::M::Exit(exit)) => {
                assert_eq!(self.next().await.unwrap(), None);
                exit.how.unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    async fn failure(&mut self) -> String {
        loop {
            match self.next().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended well"),
                Err(status) => return reason(&status),
            }
        }
    }
}

async fn stop(host: &mut Host, server: u64) -> Result<Exit, Status> {
    let request = AgentLspStopRequest { server };
    let reply = within(host.agent.lsp_stop(request)).await?;
    Ok(reply.into_inner().exit.unwrap())
}

/// Resolves when the process has ended.
async fn gone(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    // None: it was reaped before we looked.
    if let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        let wait = tokio::task::spawn_blocking(move || {
            let mut ended = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut ended, None).unwrap()
        });
        within(wait).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_reattach_keeps_server() {
    // Answers its first message, and speaks again when it is told to behind its client's back.
    let say = |text: &str| format!("printf 'Content-Length: {}\\r\\n\\r\\n{text}'", text.len());
    let waits = [
        "head -c 22 >/dev/null",
        &say("got"),
        "read x <$FIFO",
        &say("held"),
        "cat",
    ]
    .join("\n");
    let waits = script(&waits);
    let (guest, mut host) = ready(&[("echo", ECHO), ("waits", &waits)]).await;
    let mut client = open(&mut host, language("echo", None)).await.unwrap();
    assert!(!client.started.resumed);
    client.echoes("one").await;
    let first = client.started;
    drop(client);
    let mut client = again(&mut host, first.server).await;
    assert_eq!(
        (client.started.server, client.started.pid),
        (first.server, first.pid)
    );
    client.echoes("two").await;

    let fifo = guest.file("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let mut start = language("waits", None);
    start.env = vec![sandbox_protocol::v1::EnvVar {
        key: "FIFO".into(),
        value: fifo.to_str().unwrap().to_owned().into(),
    }];
    let mut client = open(&mut host, start).await.unwrap();
    client.frame(b"x".to_vec(), false).await;
    assert_eq!(client.message().await, b"got");
    let server = client.started.server;
    drop(client);
    // A message that comes before silkd knows that the client is gone goes with it. A call on the same connection comes
    // behind that news.
    host.info().await;
    let mut there = within(tokio::fs::OpenOptions::new().write(true).open(&fifo))
        .await
        .unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut there, b"x\n")
        .await
        .unwrap();
    let mut client = again(&mut host, server).await;
    assert_eq!(client.message().await, b"held");
    client.echoes("three").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_second_client_busy() {
    let (_guest, mut host) = ready(&[("echo", ECHO)]).await;
    let mut client = open(&mut host, language("echo", None)).await.unwrap();
    let second = LspStart {
        which: Some(Which::Server(client.started.server)),
        ..LspStart::default()
    };
    let refused = open(&mut host, second).await.err().unwrap();
    assert_eq!(
        (reason(&refused), refused.code()),
        ("LSP_BUSY".to_owned(), tonic::Code::Aborted)
    );
    client.echoes("unharmed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_unattached_is_reaped() {
    let (_guest, mut host) = ready(&[("echo", ECHO)]).await;
    let client = open(&mut host, language("echo", Some(1))).await.unwrap();
    let LspStarted { server, pid, .. } = client.started;
    drop(client);
    // One that comes back in time keeps it, and its time begins anew.
    let mut client = again(&mut host, server).await;
    client.echoes("still there").await;
    drop(client);
    gone(pid).await;
    // The guest hears of the end when it reaps it: until then it has that to tell.
    let unknown = loop {
        if let Err(status) = stop(&mut host, server).await {
            break status;
        }
    };
    assert_eq!(reason(&unknown), "LSP_UNKNOWN");
    let late = LspStart {
        which: Some(Which::Server(server)),
        ..LspStart::default()
    };
    assert_eq!(reason(&open(&mut host, late).await.err().unwrap()), "LSP_UNKNOWN");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_stop_asks_then_insists() {
    let polite = script(
        "trap 'exit 7' TERM\nprintf 'Content-Length: 2\\r\\n\\r\\nup'\nwhile :\ndo sleep 1 & wait\ndone",
    );
    let polite = polite.replace("do;", "do ");
    let stubborn =
        script("trap '' TERM\nprintf 'Content-Length: 2\\r\\n\\r\\nup'\nwhile :\ndo sleep 1000\ndone");
    let (_guest, mut host) = ready(&[("polite", &polite), ("stubborn", &stubborn)]).await;
    for (name, how) in [("polite", How::Code(7)), ("stubborn", How::Signal(9))] {
        let mut client = open(&mut host, language(name, None)).await.unwrap();
        assert_eq!(client.message().await, b"up");
        let exit = stop(&mut host, client.started.server).await.unwrap();
        assert_eq!(exit.how, Some(how), "{name}");
        assert_eq!(client.exit().await, how);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_messages_have_any_size_and_their_limit() {
    let (_guest, mut host) = ready(&[("echo", ECHO)]).await;
    let mut client = open(&mut host, language("echo", None)).await.unwrap();
    for size in [0, 1, CHUNK_IN, CHUNK_IN + 1, LSP_MESSAGE] {
        let message: Vec<u8> = (0..size).map(|n| n.to_le_bytes()[1]).collect();
        let frames: Vec<&[u8]> = message.chunks(CHUNK_IN).collect();
        let count = frames.len();
        for (at, frame) in frames.into_iter().enumerate() {
            client.frame(frame.to_vec(), at + 1 < count).await;
        }
        if count == 0 {
            client.frame(Vec::new(), false).await;
        }
        assert!(
            client.message().await == message,
            "{size} bytes came back otherwise"
        );
    }
    let server = client.started.server;
    for _ in 0..LSP_MESSAGE / CHUNK_IN {
        client.frame(vec![0; CHUNK_IN], true).await;
    }
    client.frame(vec![0], false).await;
    assert_eq!(client.failure().await, "FIELD_INVALID");
    drop(client);
    again(&mut host, server)
        .await
        .echoes("nothing of it arrived")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_a_client_that_leaves_within_a_message_leaves_no_half() {
    let (_guest, mut host) = ready(&[("echo", ECHO)]).await;
    // In what it sends: the server gets nothing of it.
    let mut client = open(&mut host, language("echo", None)).await.unwrap();
    let server = client.started.server;
    client.echoes("whole").await;
    client.frame(b"half".to_vec(), true).await;
    drop(client);
    let mut client = again(&mut host, server).await;
    client.echoes("next").await;
    // In what it gets: the rest is nobody's.
    let long = vec![b'x'; 4 * CHUNK_IN];
    for at in 0..4 {
        client
            .frame(long[at * CHUNK_IN..][..CHUNK_IN].to_vec(), at < 3)
            .await;
    }
    client.frame(b"behind it".to_vec(), false).await;
    match client.next().await.unwrap() {
        Some(lsp_out::M::Frame(frame)) => assert!(frame.more),
        other => panic!("{other:?}"),
    }
    drop(client);
    let mut client = again(&mut host, server).await;
    client.frame(b"end".to_vec(), false).await;
    let message = client.message().await;
    // The one behind it was held, unless it had not come before the client left.
    if message == b"behind it" {
        assert_eq!(client.message().await, b"end");
    } else {
        assert_eq!(message, b"end");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_what_does_not_speak_the_protocol_is_told() {
    let chatty = script("echo Listening on stdio\nsleep 1000");
    let (_guest, mut host) = ready(&[
        ("chatty", &chatty),
        ("exits", &script("exit 3")),
        ("missing", "no-such-server\n"),
        ("echo", ECHO),
    ])
    .await;
    let mut client = open(&mut host, language("chatty", None)).await.unwrap();
    let pid = client.started.pid;
    assert_eq!(client.failure().await, "LSP_BROKEN");
    gone(pid).await;
    let mut client = open(&mut host, language("exits", None)).await.unwrap();
    assert_eq!(client.exit().await, How::Code(3));
    let refused = open(&mut host, language("missing", None)).await.err().unwrap();
    assert_eq!(reason(&refused), "PROGRAM_NOT_FOUND");
    for name in ["none", "../echo", ""] {
        let refused = open(&mut host, language(name, None)).await.err().unwrap();
        assert_eq!(reason(&refused), "LSP_UNKNOWN");
    }
    let refused = open(&mut host, language("echo", Some(3601))).await.err().unwrap();
    assert_eq!(reason(&refused), "FIELD_INVALID");
    let refused = open(&mut host, LspStart::default()).await.err().unwrap();
    assert_eq!(reason(&refused), "FIELD_INVALID");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_there_are_so_many_and_one_that_ends_makes_room() {
    let (_guest, mut host) = ready(&[("echo", ECHO)]).await;
    let mut clients = Vec::new();
    for _ in 0..LSP_SERVERS {
        clients.push(open(&mut host, language("echo", None)).await.unwrap());
    }
    let refused = open(&mut host, language("echo", None)).await.err().unwrap();
    assert_eq!(reason(&refused), "PROCESS_LIMIT");
    let mut one = clients.pop().unwrap();
    stop(&mut host, one.started.server).await.unwrap();
    assert_eq!(one.exit().await, How::Signal(15));
    open(&mut host, language("echo", None))
        .await
        .unwrap()
        .echoes("room")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_servers_outlive_a_sleep() {
    let (_guest, mut host) = ready(&[("echo", ECHO)]).await;
    let mut client = open(&mut host, language("echo", None)).await.unwrap();
    client.echoes("before").await;
    within(host.quiesce(Rest::Hibernate)).await.unwrap();
    assert_eq!(client.failure().await, "SANDBOX_HIBERNATING");
    within(host.renew(Mode::Wake, "awake")).await.unwrap();
    let mut back = again(&mut host, client.started.server).await;
    assert_eq!(back.started.pid, client.started.pid);
    back.echoes("after").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lsp_stderr_is_its_log() {
    let talks = script("echo started >&2\ncat");
    let (_guest, mut host) = ready(&[("talks", &talks)]).await;
    let mut client = open(&mut host, language("talks", None)).await.unwrap();
    client.echoes("one").await;
    let request = AgentLogsRequest {
        process: Some(ProcessRef {
            which: Some(process_ref::Which::Id(client.started.server)),
        }),
        follow: true,
        ..AgentLogsRequest::default()
    };
    let mut log = within(host.agent.logs(request)).await.unwrap().into_inner();
    let mut said = Vec::new();
    while said != b"started\n" {
        match within(log.message()).await.unwrap().unwrap().m.unwrap() {
            logs_out::M::Chunk(chunk) => {
                assert_eq!(chunk.output, i32::from(Output::Stderr));
                said.extend_from_slice(&chunk.data);
            }
            other @ (logs_out::M::Gap(_) | logs_out::M::Exit(_)) => panic!("{other:?}"),
        }
    }
}
