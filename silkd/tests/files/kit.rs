//! Calls on files, as a client makes them.

use std::{
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use sandbox_protocol::v1::{
    AgentReadRequest, AgentWriteReply, FileStat, ReadEnd, Resolve, WriteIn, WriteStart,
    control_renew_request::Mode, read_out, write_in,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::common::{Guest, Host, reason, within};

/// A guest that was renewed, a host, and a directory for the test.
pub(crate) struct Kit {
    pub(crate) host: Host,
    pub(crate) guest: Guest,
    pub(crate) dir: tempfile::TempDir,
}

impl Kit {
    pub(crate) async fn new() -> Self {
        Self::within_dir(tempfile::tempdir().unwrap()).await
    }

    pub(crate) async fn within_dir(dir: tempfile::TempDir) -> Self {
        Self::of(Guest::start(), dir).await
    }

    pub(crate) async fn of(guest: Guest, dir: tempfile::TempDir) -> Self {
        let mut host = within(Host::connect(&guest.socket())).await;
        within(host.renew(Mode::Boot, "files")).await.unwrap();
        Self { host, guest, dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The names in the directory.
    pub(crate) fn names(&self) -> Vec<String> {
        names(self.dir.path())
    }

    pub(crate) async fn write(&mut self, start: WriteStart, data: &[u8]) -> Result<AgentWriteReply, Status> {
        let put = self.begin(start).await;
        for chunk in data.chunks(64 * 1024) {
            if !put.send(Bytes::copy_from_slice(chunk)).await {
                break;
            }
        }
        put.end().await
    }

    /// A write whose data comes later.
    pub(crate) async fn begin(&mut self, start: WriteStart) -> Put {
        let (input, rest) = mpsc::channel(2);
        let m = Some(write_in::M::Start(start));
        input.send(WriteIn { m }).await.unwrap();
        let mut agent = self.host.agent.clone();
        let reply = tokio::spawn(async move {
            let reply = agent.write(ReceiverStream::new(rest)).await;
            reply.map(tonic::Response::into_inner)
        });
        Put { input, reply }
    }

    pub(crate) async fn read(&mut self, request: AgentReadRequest) -> Result<Whole, Status> {
        let mut stream = within(self.host.agent.read(request)).await?.into_inner();
        let mut whole = Whole::default();
        while let Some(message) = within(stream.message()).await? {
            match message.m.unwrap() {
                read_out::M::Head(head) => whole.head = Some(head),
                read_out::M::Data(data) => whole.data.extend_from_slice(&data),
                read_out::M::End(end) => whole.end = Some(end),
            }
        }
        assert!(whole.end.is_some(), "no end");
        Ok(whole)
    }

    /// The most memory that silkd has had, in KiB.
    pub(crate) fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.guest.child.id())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A write under way.
pub(crate) struct Put {
    input: mpsc::Sender<WriteIn>,
    reply: tokio::task::JoinHandle<Result<AgentWriteReply, Status>>,
}

impl Put {
    /// False once nobody takes any more.
    pub(crate) async fn send(&self, data: Bytes) -> bool {
        let m = Some(write_in::M::Data(data));
        within(self.input.send(WriteIn { m })).await.is_ok()
    }

    pub(crate) async fn end(self) -> Result<AgentWriteReply, Status> {
        drop(self.input);
        within(self.reply).await.unwrap()
    }

    /// As a client that is gone.
    pub(crate) async fn cancel(self) {
        self.reply.abort();
        drop(self.reply.await);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) head: Option<FileStat>,
    pub(crate) data: Vec<u8>,
    pub(crate) end: Option<ReadEnd>,
}

pub(crate) fn bytes(path: &Path) -> Bytes {
    Bytes::copy_from_slice(path.as_os_str().as_bytes())
}

pub(crate) fn start(path: &Path) -> WriteStart {
    WriteStart {
        path: bytes(path),
        ..WriteStart::default()
    }
}

pub(crate) fn read(path: &Path) -> AgentReadRequest {
    AgentReadRequest {
        path: bytes(path),
        ..AgentReadRequest::default()
    }
}

pub(crate) fn beneath(root: &Path) -> Option<Resolve> {
    Some(Resolve {
        beneath: bytes(root),
        ..Resolve::default()
    })
}

pub(crate) fn user(user: &'static str) -> Option<Resolve> {
    Some(Resolve {
        user: user.into(),
        ..Resolve::default()
    })
}

/// Reason and status of a call that must have failed.
pub(crate) fn refused<T>(outcome: Result<T, Status>) -> (String, Code) {
    match outcome {
        Ok(_) => panic!("it was not refused"),
        Err(status) => (reason(&status), status.code()),
    }
}

/// The reason alone.
pub(crate) fn why<T>(outcome: Result<T, Status>) -> String {
    refused(outcome).0
}

/// Something of this length in which no block looks like another.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ length as u64;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(length);
    out
}
