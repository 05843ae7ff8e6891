//! Files and trees: read, written, listed, changed, on threads of their own.
//!
//! Each operation is a value that was checked without touching anything, and then acts on a thread, step by step, as
//! the user that it was asked for. A path is followed once; what it leads to is judged on the descriptor; whatever
//! changes a tree does it by a name in a directory that is open. A stream holds no thread while its client rests, and
//! less than 256 KiB.
//!
//! May call: gate, refusal, sys, tasks.
//! Never inside: a link, a service; a lookup by name of what was judged before.
//! Cancel safety: dropping a call stops its step within one block, and leaves of a write, push or replace nothing: the
//! old content is there, and nothing beside it. A removal leaves what it had not come to.

pub mod archive;
mod errno;
mod globs;
mod input;
mod list;
mod open;
mod read;
mod remove;
mod stat;
mod steps;
mod temp;
mod tree;
mod walk;
mod workers;
mod write;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use futures_util::Stream;
use sandbox_protocol::v1::{
    AgentListReply, AgentListRequest, AgentMkdirReply, AgentMkdirRequest, AgentPullRequest, AgentPushReply,
    AgentReadRequest, AgentRemoveReply, AgentRemoveRequest, AgentRenameReply, AgentRenameRequest,
    AgentStatReply, AgentStatRequest, AgentWriteReply, PullOut, PushIn, PushStart, ReadOut, WriteIn,
    WriteStart,
};
use tonic::{Status, Streaming};

pub use self::workers::{Call, Workers};
use self::{
    archive::{pull, push},
    list::Lister,
    read::Reader,
    remove::Remove,
    steps::Steps,
    tree::Mkdir,
    tree::Rename,
    tree::Stat,
};
use crate::refusal::Refusal;

/// Files; a handle.
#[derive(Debug, Clone, Default)]
pub struct Files {
    workers: Workers,
}

impl Files {
    /// See [`Workers::stop`].
    pub async fn stop(&self) {
        self.workers.stop().await;
    }

    /// Writes a file from a client's stream, whose first message was `start`. Cancel safe: the old content stays.
    ///
    /// # Errors
    /// Why nothing was written; an append that fails may have written a part.
    pub async fn write(
        &self,
        call: Arc<Call>,
        start: &WriteStart,
        input: Streaming<WriteIn>,
    ) -> Result<AgentWriteReply, Status> {
        write::write(&self.workers, call, start, input).await
    }

    /// Reads a file: head, data, end. Cancel safe.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn read(
        &self,
        call: Arc<Call>,
        request: &AgentReadRequest,
    ) -> Result<impl Stream<Item = Result<ReadOut, Refusal>> + Send + Unpin + use<>, Refusal> {
        let wanted = read::check(request)?;
        let (offset, length) = (request.offset, request.length);
        Steps::open(&self.workers, call, move |_| Reader::open(wanted, offset, length)).await
    }

    /// What is there. Cancel safe.
    ///
    /// # Errors
    /// Why that cannot be told.
    pub async fn stat(&self, call: Arc<Call>, request: &AgentStatRequest) -> Result<AgentStatReply, Refusal> {
        let stat = Stat::new(request)?;
        self.workers.run(&call, move |_| stat.act()).await
    }

    /// What a directory holds, in batches. Cancel safe.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn list(
        &self,
        call: Arc<Call>,
        request: &AgentListRequest,
    ) -> Result<impl Stream<Item = Result<AgentListReply, Refusal>> + Send + Unpin + use<>, Refusal> {
        let plan = list::Plan::new(request)?;
        Steps::open(&self.workers, call, move |_| Lister::open(&plan)).await
    }

    /// Makes a directory. Cancel safe.
    ///
    /// # Errors
    /// Why it was not made.
    pub async fn mkdir(
        &self,
        call: Arc<Call>,
        request: &AgentMkdirRequest,
    ) -> Result<AgentMkdirReply, Refusal> {
        let mkdir = Mkdir::new(request)?;
        self.workers.run(&call, move |_| mkdir.act()).await
    }

    /// Removes a name, or a tree. Cancel safe: what it had not come to stays.
    ///
    /// # Errors
    /// What stopped it.
    pub async fn remove(
        &self,
        call: Arc<Call>,
        request: &AgentRemoveRequest,
    ) -> Result<AgentRemoveReply, Refusal> {
        let remove = Remove::new(request)?;
        self.workers.run(&call, move |cancel| remove.act(cancel)).await
    }

    /// Renames, or changes two names. Cancel safe.
    ///
    /// # Errors
    /// Why nothing was renamed.
    pub async fn rename(
        &self,
        call: Arc<Call>,
        request: &AgentRenameRequest,
    ) -> Result<AgentRenameReply, Refusal> {
        let rename = Rename::new(request)?;
        self.workers.run(&call, move |_| rename.act()).await
    }

    /// Unpacks a client's archive, whose first message was `start`, and lands it whole. Cancel safe: what was there
    /// stays.
    ///
    /// # Errors
    /// Why nothing has landed; a merge that broke off says how far it came.
    pub async fn push(
        &self,
        call: Arc<Call>,
        start: &PushStart,
        input: Streaming<PushIn>,
    ) -> Result<AgentPushReply, Status> {
        push::push(&self.workers, call, start, input).await
    }

    /// A tree as an archive: head, data, end. Cancel safe.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn pull(
        &self,
        call: Arc<Call>,
        request: &AgentPullRequest,
    ) -> Result<impl Stream<Item = Result<PullOut, Refusal>> + Send + Unpin + use<>, Refusal> {
        let plan = pull::Plan::new(request)?;
        Steps::open(&self.workers, call, move |_| pull::Puller::open(plan)).await
    }
}
