//! The guest's files, tools and ports, by script: what a path or port does is said by its name.

use std::sync::Arc;

use bytes::Bytes;
use sandbox_sdk::{Reason, v1};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Response, Status, Streaming};

use super::{Attendant, Events, Reply, Service, chunk, refusal};

/// What came in an upload.
#[derive(Debug, Clone, Default)]
pub(crate) struct Uploaded {
    pub(crate) write: Option<v1::WriteStart>,
    pub(crate) push: Option<v1::PushStart>,
    pub(crate) content: Vec<u8>,
    /// The largest piece.
    pub(crate) piece: usize,
}

fn all<T: Send + 'static>(messages: Vec<T>) -> Reply<Events<T>> {
    let messages = messages.into_iter().map(Ok);
    Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
}

fn not_found() -> Status {
    refusal(Reason::PathNotFound, "guest", None)
}

pub(crate) fn stat(kind: v1::FileKind, size: u64) -> v1::FileStat {
    v1::FileStat {
        kind: kind.into(),
        size,
        mode: 0o640,
        uid: 7,
        gid: 8,
        mtime_ns: 1_700_000_000_000_000_000,
        links: 1,
        ..v1::FileStat::default()
    }
}

fn kind(path: &[u8]) -> Option<v1::FileStat> {
    if path.starts_with(b"/missing") {
        None
    } else if path.starts_with(b"/dir") && !path.ends_with(b"file") {
        Some(stat(v1::FileKind::Directory, 0))
    } else {
        Some(stat(v1::FileKind::Regular, 5))
    }
}

pub(crate) fn look(request: &v1::AgentStatRequest) -> Reply<v1::AgentStatReply> {
    let stat = Some(kind(&request.path).ok_or_else(not_found)?);
    Ok(Response::new(v1::AgentStatReply { stat }))
}

pub(crate) fn list() -> Reply<Events<v1::AgentListReply>> {
    let entry = |name: &'static [u8], kind| v1::FileEntry {
        name: name.into(),
        stat: Some(stat(kind, 5)),
    };
    let link = v1::FileStat {
        target: "b".into(),
        ..stat(v1::FileKind::Link, 1)
    };
    all(vec![
        v1::AgentListReply {
            entries: vec![
                entry(b"z", v1::FileKind::Regular),
                entry(b"a\n\x1b[2J", v1::FileKind::Directory),
            ],
            ..v1::AgentListReply::default()
        },
        v1::AgentListReply::default(),
        v1::AgentListReply {
            entries: vec![
                entry(b"\xff", v1::FileKind::Regular),
                v1::FileEntry {
                    name: "l".into(),
                    stat: Some(link),
                },
                entry(b".hidden", v1::FileKind::Regular),
            ],
            truncated: true,
            unreadable: 0,
        },
    ])
}

impl Service {
    /// Takes the pieces of an upload in, to its end, and gives their number of bytes.
    async fn take<M>(
        &self,
        mut input: Streaming<M>,
        read: impl Fn(M, &mut Uploaded) -> Option<Bytes>,
    ) -> Result<u64, Status> {
        let mut bytes = 0;
        self.note(|seen| seen.uploads.push(Uploaded::default()));
        let last = |change: &mut dyn FnMut(&mut Uploaded)| {
            self.note(|seen| change(seen.uploads.last_mut().unwrap()));
        };
        while let Some(message) = input.message().await? {
            let mut message = Some(message);
            last(&mut |uploaded| {
                if let Some(data) = read(message.take().unwrap(), uploaded) {
                    bytes += data.len() as u64;
                    uploaded.piece = uploaded.piece.max(data.len());
                    uploaded.content.extend_from_slice(&data);
                }
            });
        }
        Ok(bytes)
    }

    pub(crate) async fn take_write(&self, input: Streaming<v1::WriteIn>) -> Reply<v1::AgentWriteReply> {
        let taken = self.take(input, |message, uploaded| match message.m.unwrap() {
            v1::write_in::M::Start(start) => {
                uploaded.write = Some(start);
                None
            }
            v1::write_in::M::Data(data) => Some(data),
        });
        let bytes = taken.await?;
        Ok(Response::new(v1::AgentWriteReply {
            bytes,
            durable: true,
            stat: Some(stat(v1::FileKind::Regular, bytes)),
        }))
    }

    pub(crate) async fn take_push(&self, input: Streaming<v1::PushIn>) -> Reply<v1::AgentPushReply> {
        let taken = self.take(input, |message, uploaded| match message.m.unwrap() {
            v1::push_in::M::Start(start) => {
                uploaded.push = Some(start);
                None
            }
            v1::push_in::M::Data(data) => Some(data),
        });
        let bytes = taken.await?;
        Ok(Response::new(v1::AgentPushReply { entries: 3, bytes }))
    }

    /// A port's program: 7 gives back what comes, 8 says its word first, 2 resets, 3 goes away without an end, the others
    /// refuse.
    pub(crate) async fn connect(
        &self,
        mut input: Streaming<v1::PortForwardIn>,
    ) -> Reply<Events<v1::PortForwardOut>> {
        use v1::{port_forward_in::M as In, port_forward_out::M as Out};
        let Some(v1::PortForwardIn {
            m: Some(In::Open(open)),
        }) = input.message().await?
        else {
            return Err(Status::invalid_argument("no open"));
        };
        if ![2, 3, 7, 8].contains(&open.port) {
            return Err(refusal(Reason::PortRefused, "guest", None));
        }
        let (output, replies) = mpsc::channel(4);
        let service = self.clone();
        drop(tokio::spawn(async move {
            let mut guard = Attendant(service.clone(), false);
            let say = async |m| drop(output.send(Ok(v1::PortForwardOut { m: Some(m) })).await);
            say(Out::Ready(v1::PortForwardReady {})).await;
            if open.port == 8 {
                say(Out::Data("hello".into())).await;
                say(Out::Eof(v1::PortForwardEof {})).await;
            }
            loop {
                let message = tokio::select! {
                    message = input.message() => message,
                    () = output.closed() => return,
                };
                match message.ok().flatten().and_then(|message| message.m) {
                    Some(In::Data(data)) => {
                        service.note(|seen| seen.forwarded += data.len());
                        if open.port != 8 {
                            say(Out::Data(data)).await;
                        }
                    }
                    Some(In::Eof(_)) => break,
                    Some(In::Open(_)) | None => return,
                }
                match open.port {
                    2 => drop(output.send(Err(refusal(Reason::PortReset, "guest", None))).await),
                    7 | 8 => continue,
                    _ => {}
                }
                guard.1 = true;
                return;
            }
            if open.port == 8 {
                guard.1 = true;
                return;
            }
            // It has seen the end, and has something to say yet.
            say(Out::Data("bye".into())).await;
            say(Out::Eof(v1::PortForwardEof {})).await;
            guard.1 = true;
        }));
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    /// A language server that gives back what comes; a message `exit` ends it.
    pub(crate) async fn serve_lsp(&self, mut input: Streaming<v1::LspIn>) -> Reply<Events<v1::LspOut>> {
        use v1::{lsp_in::M as In, lsp_out::M as Out};
        let Some(v1::LspIn {
            m: Some(In::Start(start)),
        }) = input.message().await?
        else {
            return Err(Status::invalid_argument("no start"));
        };
        self.note(|seen| seen.lsp.push(start.clone()));
        if start.which == Some(v1::lsp_start::Which::Language("unknown".into())) {
            return Err(refusal(Reason::LspUnknown, "guest", None));
        }
        let (output, replies) = mpsc::channel(4);
        drop(tokio::spawn(async move {
            let say = async |m| drop(output.send(Ok(v1::LspOut { m: Some(m) })).await);
            say(Out::Started(v1::LspStarted {
                server: 5,
                pid: 6,
                resumed: matches!(start.which, Some(v1::lsp_start::Which::Server(_))),
            }))
            .await;
            while let Ok(Some(v1::LspIn {
                m: Some(In::Frame(frame)),
            })) = input.message().await
            {
                if frame.data == "exit" {
                    let how = Some(v1::exit::How::Code(3));
                    say(Out::Exit(v1::Exit {
                        how,
                        ..v1::Exit::default()
                    }))
                    .await;
                    return;
                }
                say(Out::Frame(frame)).await;
            }
        }));
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }
}

pub(crate) fn read(request: &v1::AgentReadRequest) -> Reply<Events<v1::ReadOut>> {
    use v1::read_out::M;
    let message = |m| v1::ReadOut { m: Some(m) };
    let head = |size| message(M::Head(stat(v1::FileKind::Regular, size)));
    let data = |data: &'static [u8]| message(M::Data(data.into()));
    let end = |bytes, changed| message(M::End(v1::ReadEnd { bytes, changed }));
    match &request.path[..] {
        b"/missing" => Err(not_found()),
        b"/cut" => all(vec![head(5), data(b"he")]),
        b"/lost" => all(vec![head(5), data(b"he"), end(5, false)]),
        b"/headless" => all(vec![data(b"he")]),
        b"/afterwards" => all(vec![head(2), data(b"he"), end(2, false), data(b"x")]),
        b"/broken" => {
            let replies = [
                Ok(head(5)),
                Ok(data(b"he")),
                Err(refusal(Reason::AgentLost, "host", None)),
            ];
            Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
        }
        // 1 GiB, if anybody reads it.
        b"/flood" => {
            let piece = Bytes::from(vec![b'x'; 64 * 1024]);
            let pieces = (0..1 << 14).map(move |_| message(M::Data(piece.clone())));
            let replies = std::iter::once(head(1 << 30))
                .chain(pieces)
                .chain([end(1 << 30, false)]);
            Ok(Response::new(Box::pin(tokio_stream::iter(replies.map(Ok)))))
        }
        _ => all(vec![head(5), data(b"he"), data(b""), data(b"llo"), end(5, true)]),
    }
}

pub(crate) fn pull(request: &v1::AgentPullRequest, archive: Vec<u8>) -> Reply<Events<v1::PullOut>> {
    use v1::pull_out::M;
    let stat = kind(&request.path).ok_or_else(not_found)?;
    let end = v1::PullEnd {
        entries: 2,
        bytes: 5,
        skipped: 1,
        ..v1::PullEnd::default()
    };
    let messages = [M::Head(stat), M::Data(archive.into()), M::End(end)];
    all(messages.map(|m| v1::PullOut { m: Some(m) }).into())
}

pub(crate) fn find(request: &v1::AgentFindRequest) -> Reply<Events<v1::FindOut>> {
    use v1::find_out::M;
    let line = |line, context| {
        M::Line(v1::FindLine {
            path: b"/dir/\xff"[..].into(),
            line,
            column: 3,
            offset: 9,
            text: "a \u{1b}[2J b".into(),
            cut: true,
            context,
        })
    };
    let done = M::Done(v1::FindDone {
        searched: 4,
        matches: 1,
        skipped: Some(v1::FindSkipped {
            binary: 2,
            ..v1::FindSkipped::default()
        }),
        truncated: true,
    });
    let mut messages = vec![line(6, true), line(7, false), done];
    if request.pattern == "cut" {
        messages.pop();
    }
    all(messages.into_iter().map(|m| v1::FindOut { m: Some(m) }).collect())
}

pub(crate) fn replace(request: &v1::AgentReplaceRequest) -> Reply<Events<v1::ReplaceOut>> {
    use v1::replace_out::M;
    let path = request.paths.first().unwrap().clone();
    let messages = [
        M::File(v1::ReplaceFile {
            path,
            replacements: 2,
        }),
        M::Done(v1::ReplaceDone {
            files: 1,
            replacements: 2,
            skipped: None,
        }),
    ];
    all(messages.map(|m| v1::ReplaceOut { m: Some(m) }).into())
}

/// Ends by itself for `/gone`, else never.
pub(crate) fn watch(
    request: &v1::AgentWatchRequest,
    guard: Arc<dyn Send + Sync>,
) -> Reply<Events<v1::WatchOut>> {
    use v1::watch_out::M;
    let event = |kind: v1::WatchKind, path: &'static [u8], directory| {
        M::Event(v1::WatchEvent {
            kind: kind.into(),
            path: path.into(),
            directory,
        })
    };
    let messages = [
        M::Ready(v1::WatchReady { directories: 2 }),
        event(v1::WatchKind::Created, b"a\n", false),
        event(v1::WatchKind::Deleted, b"\xff", true),
        M::Renamed(v1::WatchRenamed {
            from: "a".into(),
            to: "b".into(),
            directory: false,
        }),
        M::Overflow(v1::WatchOverflow {
            reason: "kernel".into(),
        }),
    ];
    let events = tokio_stream::iter(messages.map(|m| Ok(v1::WatchOut { m: Some(m) })));
    if request.path == "/gone" {
        return Ok(Response::new(Box::pin(events)));
    }
    let forever = tokio_stream::pending().map(move |event| {
        let _held = &guard;
        event
    });
    Ok(Response::new(Box::pin(events.chain(forever))))
}

pub(crate) fn git_progress(cut: bool) -> Reply<Events<v1::GitOut>> {
    use v1::git_out::M;
    let done = M::Done(v1::GitDone { head: "abc".into() });
    let mut messages = vec![M::Progress(chunk("Counting: 1%\r\u{1b}[2J\n")), done];
    if cut {
        messages.pop();
    }
    all(messages.into_iter().map(|m| v1::GitOut { m: Some(m) }).collect())
}

pub(crate) fn git_status() -> Reply<v1::AgentGitStatusReply> {
    Ok(Response::new(v1::AgentGitStatusReply {
        branch: "main".into(),
        head: "abc".into(),
        entries: vec![v1::GitEntry {
            path: b"\xff"[..].into(),
            index: ".".into(),
            worktree: "M".into(),
            ..v1::GitEntry::default()
        }],
        ..v1::AgentGitStatusReply::default()
    }))
}

pub(crate) fn git_branch(request: &v1::AgentGitBranchRequest) -> Reply<v1::AgentGitBranchReply> {
    let mut branches = Vec::new();
    if let Some(v1::agent_git_branch_request::What::List(_)) = request.what {
        branches.push(v1::GitBranchEntry {
            name: "main".into(),
            head: "abc".into(),
            current: true,
            upstream: "origin/main".into(),
        });
    }
    Ok(Response::new(v1::AgentGitBranchReply {
        branches,
        truncated: false,
    }))
}
