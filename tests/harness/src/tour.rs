//! Every call of `sandbox.v1.Agent` once, as a claimer would put them together. What each does in full is tested beside
//! its code; here it is proved that nothing on the way, and nothing in a guest of this kind, is in its way.

use std::collections::BTreeSet;

use prost_reflect::DescriptorPool;
use sandbox_protocol::{
    DESCRIPTOR_SET,
    v1::{
        AgentFindRequest, AgentForgetRequest, AgentGitAddRequest, AgentGitBranchRequest,
        AgentGitCheckoutRequest, AgentGitCloneRequest, AgentGitCommitRequest, AgentGitPullRequest,
        AgentGitPushRequest, AgentGitStatusRequest, AgentInfoRequest, AgentKillRequest, AgentListRequest,
        AgentLogsRequest, AgentLspStopRequest, AgentMkdirRequest, AgentPsRequest, AgentPullRequest,
        AgentReadRequest, AgentRemoveRequest, AgentRenameRequest, AgentReplaceRequest, AgentRunRequest,
        AgentSessionCloseRequest, AgentSessionListRequest, AgentSessionOpenRequest, AgentSpawnRequest,
        AgentStatRequest, AgentState, AgentWaitRequest, AgentWatchRequest, AttachIn, AttachStart, Command,
        EnvVar, ExecIn, ExecStart, GitBranchList, GitContext, GitOut, LspFrame, LspIn, LspStart,
        PortForwardEof, PortForwardIn, PortForwardOpen, ProcessRef, PushIn, PushStart, SessionRunIn,
        SessionRunStart, StdinClose, WriteIn, WriteStart, agent_git_branch_request::What, attach_in,
        attach_out, exec_in, exec_out, exit::How, find_out, git_out, logs_out, lsp_in, lsp_out, lsp_start,
        port_forward_in, port_forward_out, process_ref, pull_out, push_in, read_out, replace_out,
        session_exit, session_run_in, session_run_out, watch_out, write_in,
    },
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::{HANG, agent::Calls, within};

/// A walk through one guest.
#[derive(Debug)]
pub struct Tour {
    calls: Calls,
    /// A folder of the guest that is not there yet.
    base: String,
    /// The guest's folder of languages.
    languages: String,
    called: BTreeSet<&'static str>,
}

macro_rules! call {
    ($tour:ident, $name:literal, $method:ident, $request:expr) => {{
        $tour.called.insert($name);
        match within(HANG, Box::pin($tour.calls.$method($request))).await {
            Ok(reply) => reply.into_inner(),
            Err(status) => panic!("{}: {status:?}", $name),
        }
    }};
}

/// All messages of a stream that ends well.
async fn all<T>(mut stream: Streaming<T>) -> Vec<T> {
    let mut messages = Vec::new();
    while let Some(message) = within(HANG, stream.message()).await.unwrap() {
        messages.push(message);
    }
    messages
}

async fn next<T>(stream: &mut Streaming<T>) -> T {
    within(HANG, stream.message())
        .await
        .unwrap()
        .expect("the stream goes on")
}

/// A request that is open, with its first messages.
async fn open<T: Send + 'static>(
    messages: impl IntoIterator<Item = T>,
) -> (tokio::sync::mpsc::Sender<T>, ReceiverStream<T>) {
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    for message in messages {
        sender.send(message).await.ok().unwrap();
    }
    (sender, ReceiverStream::new(receiver))
}

fn command(argv: &[&str]) -> Option<Command> {
    Some(Command {
        argv: argv.iter().map(|arg| (*arg).to_owned().into()).collect(),
        ..Command::default()
    })
}

fn by_id(id: u64) -> Option<ProcessRef> {
    Some(ProcessRef {
        which: Some(process_ref::Which::Id(id)),
    })
}

impl Tour {
    /// A walk by these calls; `base` is a folder to be made, `languages` the guest's `/etc/silkd/lsp.d`.
    #[must_use]
    pub const fn new(calls: Calls, base: String, languages: String) -> Self {
        Self {
            calls,
            base,
            languages,
            called: BTreeSet::new(),
        }
    }

    /// The whole walk.
    ///
    /// # Panics
    /// Something does not do what it is for, or a method of Agent was not called.
    pub async fn walk(mut self) {
        let info = call!(self, "Info", info, AgentInfoRequest {});
        assert_eq!(info.state, i32::from(AgentState::Ready));
        Box::pin(self.files()).await;
        Box::pin(self.trees()).await;
        Box::pin(self.watch()).await;
        Box::pin(self.programs()).await;
        Box::pin(self.detached()).await;
        Box::pin(self.sessions()).await;
        Box::pin(self.git_of_one()).await;
        Box::pin(self.git_with_others()).await;
        Box::pin(self.ports()).await;
        Box::pin(self.language_servers()).await;
        let pool = DescriptorPool::decode(DESCRIPTOR_SET).unwrap();
        let agent = pool.get_service_by_name("sandbox.v1.Agent").unwrap();
        let methods: Vec<String> = agent.methods().map(|method| method.name().to_owned()).collect();
        let missed: Vec<&String> = methods
            .iter()
            .filter(|name| !self.called.contains(name.as_str()))
            .collect();
        assert!(missed.is_empty(), "never called: {missed:?}");
    }

    fn at(&self, name: &str) -> bytes::Bytes {
        format!("{}/{name}", self.base).into()
    }

    async fn write(&mut self, path: bytes::Bytes, data: &'static [u8]) {
        let start = WriteStart {
            path,
            parents: true,
            ..WriteStart::default()
        };
        let messages = [write_in::M::Start(start), write_in::M::Data(data.into())];
        let messages = messages.map(|m| WriteIn { m: Some(m) });
        let reply = call!(self, "Write", write, tokio_stream::iter(messages));
        assert_eq!(reply.bytes, u64::try_from(data.len()).unwrap());
    }

    async fn read(&mut self, path: bytes::Bytes) -> Vec<u8> {
        let request = AgentReadRequest {
            path,
            ..AgentReadRequest::default()
        };
        let mut data = Vec::new();
        for out in all(call!(self, "Read", read, request)).await {
            if let Some(read_out::M::Data(bytes)) = out.m {
                data.extend_from_slice(&bytes);
            }
        }
        data
    }

    async fn files(&mut self) {
        let made = AgentMkdirRequest {
            path: self.at("d"),
            parents: true,
            ..AgentMkdirRequest::default()
        };
        assert!(call!(self, "Mkdir", mkdir, made).made);
        self.write(self.at("d/a"), b"one\ntwo\n").await;
        assert_eq!(self.read(self.at("d/a")).await, b"one\ntwo\n");
        let renamed = AgentRenameRequest {
            from: self.at("d/a"),
            to: self.at("d/b"),
            ..AgentRenameRequest::default()
        };
        call!(self, "Rename", rename, renamed);
        let stat = AgentStatRequest {
            path: self.at("d/b"),
            ..AgentStatRequest::default()
        };
        assert_eq!(call!(self, "Stat", stat, stat).stat.unwrap().size, 8);
        let list = AgentListRequest {
            path: self.at("d"),
            ..AgentListRequest::default()
        };
        let listed = all(call!(self, "List", list, list)).await;
        let names: Vec<_> = listed
            .iter()
            .flat_map(|batch| &batch.entries)
            .map(|entry| &entry.name[..])
            .collect();
        assert_eq!(names, [b"b"]);
        let find = AgentFindRequest {
            path: self.at("d"),
            pattern: "t.o".into(),
            ..AgentFindRequest::default()
        };
        let found = all(call!(self, "Find", find, find)).await;
        assert!(matches!(&found.first().unwrap().m, Some(find_out::M::Line(line)) if line.line == 2));
        let replace = AgentReplaceRequest {
            paths: vec![self.at("d/b")],
            pattern: "two".into(),
            replacement: "three".into(),
            ..AgentReplaceRequest::default()
        };
        let replaced = all(call!(self, "Replace", replace, replace)).await;
        let done = replaced.into_iter().filter_map(|out| out.m).last();
        assert!(matches!(done, Some(replace_out::M::Done(done)) if done.replacements == 1));
        assert_eq!(self.read(self.at("d/b")).await, b"one\nthree\n");
    }

    async fn trees(&mut self) {
        let pull = AgentPullRequest {
            path: self.at("d"),
            ..AgentPullRequest::default()
        };
        let mut tar = Vec::new();
        for out in all(call!(self, "Pull", pull, pull)).await {
            if let Some(pull_out::M::Data(bytes)) = out.m {
                tar.extend_from_slice(&bytes);
            }
        }
        let start = PushStart {
            dest: self.at("e"),
            ..PushStart::default()
        };
        let messages = [push_in::M::Start(start), push_in::M::Data(tar.into())];
        let messages = messages.map(|m| PushIn { m: Some(m) });
        call!(self, "Push", push, tokio_stream::iter(messages));
        assert_eq!(self.read(self.at("e/b")).await, b"one\nthree\n");
        let remove = AgentRemoveRequest {
            path: self.at("e"),
            recursive: true,
            ..AgentRemoveRequest::default()
        };
        assert!(call!(self, "Remove", remove, remove).removed >= 1);
    }

    async fn watch(&mut self) {
        let watch = AgentWatchRequest {
            path: self.at("d"),
            ..AgentWatchRequest::default()
        };
        let mut events = call!(self, "Watch", watch, watch);
        assert!(matches!(next(&mut events).await.m, Some(watch_out::M::Ready(_))));
        self.write(self.at("d/seen"), b"x").await;
        loop {
            let seen = match next(&mut events).await.m.unwrap() {
                watch_out::M::Event(event) => event.path == b"seen"[..],
                watch_out::M::Renamed(renamed) => renamed.to == b"seen"[..],
                watch_out::M::Ready(_) | watch_out::M::Overflow(_) => false,
            };
            if seen {
                return;
            }
        }
    }

    async fn programs(&mut self) {
        let start = ExecStart {
            command: command(&["cat"]),
            stdin: true,
            ..ExecStart::default()
        };
        let messages = [exec_in::M::Start(start), exec_in::M::Stdin("echo".into())];
        let messages = messages.map(|m| ExecIn { m: Some(m) });
        let out = all(call!(self, "Exec", exec, tokio_stream::iter(messages))).await;
        let said: Vec<u8> = out
            .iter()
            .filter_map(|out| match &out.m {
                Some(exec_out::M::Stdout(chunk)) => Some(chunk.data.to_vec()),
                _ => None,
            })
            .flatten()
            .collect();
        assert_eq!(said, b"echo");
        let run = AgentRunRequest {
            command: command(&["sh", "-c", "echo out; echo err >&2; exit 3"]),
            ..AgentRunRequest::default()
        };
        let run = call!(self, "Run", run, run);
        assert_eq!((&run.stdout[..], &run.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
        assert_eq!(run.exit.unwrap().how, Some(How::Code(3)));
    }

    async fn detached(&mut self) {
        let spawn = AgentSpawnRequest {
            command: command(&["sh", "-c", "echo up; exec cat"]),
            keep_stdin: true,
            ..AgentSpawnRequest::default()
        };
        let id = call!(self, "Spawn", spawn, spawn).id;
        let start = AttachStart {
            process: by_id(id),
            input: true,
            ..AttachStart::default()
        };
        let messages = [
            attach_in::M::Start(start),
            attach_in::M::Stdin("in".into()),
            attach_in::M::StdinClose(StdinClose {}),
        ];
        let (_input, rest) = open(messages.map(|m| AttachIn { m: Some(m) })).await;
        let out = all(call!(self, "Attach", attach, rest)).await;
        assert!(matches!(out.first().unwrap().m, Some(attach_out::M::Attached(_))));
        assert!(matches!(out.last().unwrap().m, Some(attach_out::M::Exit(_))));
        let wait = AgentWaitRequest {
            process: by_id(id),
            timeout_ms: 1000,
        };
        assert_eq!(
            call!(self, "Wait", wait, wait).exit.unwrap().how,
            Some(How::Code(0))
        );
        let logs = AgentLogsRequest {
            process: by_id(id),
            ..AgentLogsRequest::default()
        };
        assert_eq!(said(all(call!(self, "Logs", logs, logs)).await), b"up\nin");
        let kill = AgentKillRequest {
            process: by_id(id),
            ..AgentKillRequest::default()
        };
        assert!(call!(self, "Kill", kill, kill).already_exited);
        let listed = all(call!(self, "Ps", ps, AgentPsRequest::default())).await;
        assert!(
            listed
                .iter()
                .flat_map(|batch| &batch.processes)
                .any(|process| process.id == id)
        );
        call!(self, "Forget", forget, AgentForgetRequest { process: by_id(id) });
    }

    async fn sessions(&mut self) {
        let opened = call!(
            self,
            "SessionOpen",
            session_open,
            AgentSessionOpenRequest::default()
        );
        for (text, expected) in [("x=5; cd /", ""), ("echo $x $PWD", "5 /\n")] {
            let start = SessionRunStart {
                session: opened.session.clone(),
                command: text.into(),
                ..SessionRunStart::default()
            };
            let message = SessionRunIn {
                m: Some(session_run_in::M::Start(start)),
            };
            let (_input, rest) = open([message]).await;
            let mut said = Vec::new();
            let mut code = None;
            for out in all(call!(self, "SessionRun", session_run, rest)).await {
                match out.m.unwrap() {
                    session_run_out::M::Stdout(chunk) => said.extend_from_slice(&chunk.data),
                    session_run_out::M::Exit(exit) => code = exit.how,
                    session_run_out::M::Started(_)
                    | session_run_out::M::Stderr(_)
                    | session_run_out::M::LateStdout(_)
                    | session_run_out::M::LateStderr(_) => {}
                }
            }
            assert_eq!(
                (said.as_slice(), code),
                (expected.as_bytes(), Some(session_exit::How::Code(0)))
            );
        }
        let listed = call!(self, "SessionList", session_list, AgentSessionListRequest {});
        assert_eq!(listed.sessions.len(), 1);
        let close = AgentSessionCloseRequest {
            session: opened.session,
        };
        call!(self, "SessionClose", session_close, close);
    }

    fn tree(&self, name: &str) -> Option<GitContext> {
        let var = |key: &'static str, value: bytes::Bytes| EnvVar {
            key: key.into(),
            value,
        };
        Some(GitContext {
            path: self.at(name),
            env: vec![
                var("HOME", self.base.clone().into()),
                var("GIT_CONFIG_NOSYSTEM", "1".into()),
            ],
            ..GitContext::default()
        })
    }

    async fn git_of_one(&mut self) {
        let origin = String::from_utf8(self.at("origin").to_vec()).unwrap();
        let init = AgentRunRequest {
            command: command(&["git", "init", "--quiet", "--bare", &origin]),
            ..AgentRunRequest::default()
        };
        assert_eq!(
            call!(self, "Run", run, init).exit.unwrap().how,
            Some(How::Code(0))
        );
        let clone = AgentGitCloneRequest {
            context: self.tree("tree"),
            url: origin.into(),
            ..AgentGitCloneRequest::default()
        };
        assert_eq!(done(call!(self, "GitClone", git_clone, clone)).await, "");
        self.write(self.at("tree/file"), b"1\n").await;
        let add = AgentGitAddRequest {
            context: self.tree("tree"),
            all: true,
            ..AgentGitAddRequest::default()
        };
        call!(self, "GitAdd", git_add, add);
        let commit = AgentGitCommitRequest {
            context: self.tree("tree"),
            message: "first".into(),
            author_name: "A".into(),
            author_email: "a@example".into(),
            ..AgentGitCommitRequest::default()
        };
        let head = call!(self, "GitCommit", git_commit, commit).head;
        let status = AgentGitStatusRequest {
            context: self.tree("tree"),
            ignored: false,
        };
        let status = call!(self, "GitStatus", git_status, status);
        assert_eq!((&status.head, status.entries.len()), (&head, 0));
    }

    async fn git_with_others(&mut self) {
        let checkout = AgentGitCheckoutRequest {
            context: self.tree("tree"),
            target: "topic".into(),
            create: true,
            ..AgentGitCheckoutRequest::default()
        };
        let head = call!(self, "GitCheckout", git_checkout, checkout).head;
        let list = AgentGitBranchRequest {
            context: self.tree("tree"),
            what: Some(What::List(GitBranchList::default())),
        };
        let branches = call!(self, "GitBranch", git_branch, list).branches;
        assert!(
            branches
                .iter()
                .any(|branch| branch.current && branch.name == b"topic"[..])
        );
        let push = AgentGitPushRequest {
            context: self.tree("tree"),
            remote: "origin".into(),
            refspecs: vec!["topic".into()],
            set_upstream: true,
            ..AgentGitPushRequest::default()
        };
        assert_eq!(done(call!(self, "GitPush", git_push, push)).await, head);
        let pull = AgentGitPullRequest {
            context: self.tree("tree"),
            ff_only: true,
            ..AgentGitPullRequest::default()
        };
        assert_eq!(done(call!(self, "GitPull", git_pull, pull)).await, head);
    }

    async fn ports(&mut self) {
        const SERVER: &str = "import socket
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
stream, _ = listener.accept()
stream.sendall(stream.makefile('rb').read().upper())";
        let spawn = AgentSpawnRequest {
            command: command(&["python3", "-c", SERVER]),
            ..AgentSpawnRequest::default()
        };
        let id = call!(self, "Spawn", spawn, spawn).id;
        let logs = AgentLogsRequest {
            process: by_id(id),
            follow: true,
            ..AgentLogsRequest::default()
        };
        let mut log = call!(self, "Logs", logs, logs);
        let mut port = Vec::new();
        while !port.ends_with(b"\n") {
            port.extend(said(vec![next(&mut log).await]));
        }
        let port = std::str::from_utf8(&port).unwrap().trim().parse().unwrap();
        let messages = [
            port_forward_in::M::Open(PortForwardOpen { port, address: 0 }),
            port_forward_in::M::Data("hello".into()),
            port_forward_in::M::Eof(PortForwardEof {}),
        ];
        let (_input, rest) = open(messages.map(|m| PortForwardIn { m: Some(m) })).await;
        let mut got = Vec::new();
        for out in all(call!(self, "PortForward", port_forward, rest)).await {
            if let Some(port_forward_out::M::Data(data)) = out.m {
                got.extend_from_slice(&data);
            }
        }
        assert_eq!(got, b"HELLO");
    }

    async fn language_servers(&mut self) {
        self.write(format!("{}/echo", self.languages).into(), b"cat\n")
            .await;
        let start = LspStart {
            which: Some(lsp_start::Which::Language("echo".to_owned())),
            ..LspStart::default()
        };
        let frame = LspFrame {
            data: "{}".into(),
            more: false,
        };
        let messages = [lsp_in::M::Start(start), lsp_in::M::Frame(frame.clone())];
        let (_input, rest) = open(messages.map(|m| LspIn { m: Some(m) })).await;
        let mut out = call!(self, "LspOpen", lsp_open, rest);
        let Some(lsp_out::M::Started(started)) = next(&mut out).await.m else {
            panic!("no start");
        };
        assert_eq!(next(&mut out).await.m, Some(lsp_out::M::Frame(frame)));
        let stop = AgentLspStopRequest {
            server: started.server,
        };
        let exit = call!(self, "LspStop", lsp_stop, stop).exit.unwrap();
        assert_eq!(exit.how, Some(How::Signal(15)));
        assert!(matches!(next(&mut out).await.m, Some(lsp_out::M::Exit(_))));
    }
}

/// What a log holds.
fn said(out: Vec<sandbox_protocol::v1::LogsOut>) -> Vec<u8> {
    let chunks = out.into_iter().filter_map(|out| match out.m {
        Some(logs_out::M::Chunk(chunk)) => Some(chunk.data),
        Some(logs_out::M::Gap(_) | logs_out::M::Exit(_)) | None => None,
    });
    chunks.flatten().collect()
}

/// Where HEAD is, when it is through.
async fn done(stream: Streaming<GitOut>) -> String {
    match all(stream).await.pop().unwrap().m {
        Some(git_out::M::Done(done)) => done.head,
        other => panic!("{other:?}"),
    }
}
