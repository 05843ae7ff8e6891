//! The handle: one method for each call.

use std::sync::Arc;

use futures_util::Stream;
use sandbox_protocol::v1::{
    AgentFindRequest, AgentListReply, AgentListRequest, AgentMkdirReply, AgentMkdirRequest, AgentPullRequest,
    AgentPushReply, AgentReadRequest, AgentRemoveReply, AgentRemoveRequest, AgentRenameReply,
    AgentRenameRequest, AgentReplaceRequest, AgentStatReply, AgentStatRequest, AgentWatchRequest,
    AgentWriteReply, FindOut, PullOut, PushIn, PushStart, ReadOut, ReplaceOut, WatchOut, WriteIn, WriteStart,
};
use tonic::{Status, Streaming};

use super::{
    archive::{pull, push},
    find,
    list::{self, Lister},
    read::{self, Reader},
    remove::Remove,
    replace,
    steps::Steps,
    tree::{Mkdir, Rename, Stat},
    watch,
    workers::{Call, Cancel, Workers},
    write,
};
use crate::refusal::Refusal;

/// Files; a handle.
#[derive(Debug, Clone, Default)]
pub struct Files {
    workers: Workers,
    /// What watches take.
    watched: watch::Taken,
}

impl Files {
    /// Ends the threads: waiting steps are dropped, those under way have a second.
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

    /// Lines that match, and what was skipped. Cancel safe.
    ///
    /// # Errors
    /// Why nothing can be searched.
    pub async fn find(
        &self,
        call: Arc<Call>,
        request: AgentFindRequest,
    ) -> Result<impl Stream<Item = Result<FindOut, Refusal>> + Send + Unpin + use<>, Refusal> {
        let plan = find::Plan::new(request)?;
        Steps::open(&self.workers, call, move |_| find::Finder::open(plan)).await
    }

    /// Replaces in all files that match, or in none. Cancel safe: before the first has changed, nothing does.
    ///
    /// # Errors
    /// Why nothing was replaced.
    pub async fn replace(
        &self,
        call: Arc<Call>,
        request: AgentReplaceRequest,
    ) -> Result<impl Stream<Item = Result<ReplaceOut, Refusal>> + Send + Unpin + use<>, Refusal> {
        let plan = replace::Plan::new(request, call.uid())?;
        let make = move |cancel: &Cancel| replace::Replacer::open(&plan, cancel);
        Steps::open(&self.workers, call, make).await
    }

    /// Watches a tree: ready, then what happens. Cancel safe.
    ///
    /// # Errors
    /// Why it cannot be watched; `WATCH_LIMIT`.
    pub async fn watch(
        &self,
        call: Arc<Call>,
        request: &AgentWatchRequest,
    ) -> Result<impl Stream<Item = Result<WatchOut, Refusal>> + Send + Unpin + use<>, Refusal> {
        let plan = watch::Plan::new(request)?;
        watch::watch(&self.workers, &self.watched, call, plan).await
    }
}
