//! Files and trees of a sandbox.
//!
//! ```no_run
//! # async fn example(sandbox: sandbox_sdk::Sandbox) -> Result<(), sandbox_sdk::Error> {
//! let files = sandbox.files();
//! files.write("/srv/hello.txt").parents().bytes("hello\n").await?;
//! assert_eq!(files.read("/srv/hello.txt").bytes().await?, b"hello\n");
//! files.push_dir("src", "/srv/src").await?;
//! files.pull_dir("/srv/out", "out").await?;
//! # Ok(())
//! # }
//! ```
//!
//! May call: sandbox, guest, client, retry, error, tasks.
//! Never inside: a name of the guest's that is believed: what it sends is unpacked beneath the directory that was named,
//! and nowhere else. Paths are bytes; memory does not grow with a file or a tree.
//! Cancel safety: a dropped write or push leaves the guest's files as they were, but a merge that had begun to move
//! entries; a dropped pull leaves what it had unpacked.

mod local;
mod pack;
mod read;
mod search;
#[cfg(test)]
mod tests;
mod tree;
mod unpack;
mod write;

use std::{
    ffi::OsStr,
    future::IntoFuture,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use sandbox_protocol::v1::{
    AgentListReply, AgentListRequest, AgentMkdirRequest, AgentRemoveRequest, AgentRenameRequest,
    AgentStatRequest, FileEntry, FileStat, RenameReplace, Resolve,
};
use tokio_stream::Stream;
use tonic::Streaming;

pub use local::save;
pub use pack::{Skipped, TarSource, pack};
pub use read::{FileReader, Read};
pub use search::{Find, FindEvent, Finding, Replace, ReplaceEvent, Replaced, Replacing};
pub use tree::{Pull, Pulled, Push, Pushed, TreeReader};
pub use unpack::{Unpack, Unpacked, unpack};
pub use write::{Write, Written};

use crate::{client::via, error::Error, guest, retry::Repeat, sandbox::SandboxHandle};

/// The future of a builder that is awaited.
type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

impl SandboxHandle {
    /// Its files. Paths are absolute.
    #[must_use]
    pub fn files(&self) -> Files {
        Files {
            sandbox: self.clone(),
            resolve: Resolve::default(),
        }
    }
}

/// Files of a sandbox, and how paths are resolved there. Made by [`SandboxHandle::files`]; cheap to clone.
#[derive(Debug, Clone)]
pub struct Files {
    sandbox: SandboxHandle,
    resolve: Resolve,
}

impl Files {
    /// Paths lead to what lies below this directory; others are PATH_ESCAPES.
    #[must_use]
    pub fn beneath(mut self, directory: impl AsRef<OsStr>) -> Self {
        self.resolve.beneath = guest::bytes(directory);
        self
    }

    /// A path that ends at a link is LINK_REFUSED.
    #[must_use]
    pub fn no_follow(mut self) -> Self {
        self.resolve.no_follow = true;
        self
    }

    /// As this user: name or number, `[:group]`. Default: the claim's, else root.
    #[must_use]
    pub fn user(mut self, user: impl Into<Bytes>) -> Self {
        self.resolve.user = user.into();
        self
    }

    pub(crate) fn sandbox(&self) -> &SandboxHandle {
        &self.sandbox
    }

    pub(crate) fn resolve(&self) -> Option<Resolve> {
        (self.resolve != Resolve::default()).then(|| self.resolve.clone())
    }

    /// What a path is. Of a link, the link itself.
    ///
    /// # Errors
    /// PATH_NOT_FOUND, PATH_DENIED and the other reasons of paths.
    pub async fn stat(&self, path: impl AsRef<OsStr>) -> Result<FileStat, Error> {
        self.look(guest::bytes(path), false).await
    }

    /// What a path leads to, through links.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub async fn stat_target(&self, path: impl AsRef<OsStr>) -> Result<FileStat, Error> {
        self.look(guest::bytes(path), true).await
    }

    async fn look(&self, path: Bytes, follow: bool) -> Result<FileStat, Error> {
        let message = AgentStatRequest {
            path,
            resolve: self.resolve(),
            follow,
        };
        let terms = (Repeat::Harmless, None);
        let reply = guest::ask(&self.sandbox, terms, &message, via!(agent_client.stat)).await?;
        reply
            .stat
            .ok_or_else(|| Error::unfinished("the answer says nothing of the file"))
    }

    /// Entries of a directory.
    pub fn list(&self, path: impl AsRef<OsStr>) -> List {
        List {
            sandbox: self.sandbox.clone(),
            message: AgentListRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..AgentListRequest::default()
            },
        }
    }

    /// Makes a directory; await it, or set more first.
    pub fn mkdir(&self, path: impl AsRef<OsStr>) -> Mkdir {
        Mkdir {
            sandbox: self.sandbox.clone(),
            message: AgentMkdirRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..AgentMkdirRequest::default()
            },
        }
    }

    /// Removes a file, a link or an empty directory; await it, or set more first.
    pub fn remove(&self, path: impl AsRef<OsStr>) -> Remove {
        Remove {
            sandbox: self.sandbox.clone(),
            message: AgentRemoveRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..AgentRemoveRequest::default()
            },
        }
    }

    /// Gives a file or directory another path on the same file system; await it, or set more first.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> Rename {
        Rename {
            sandbox: self.sandbox.clone(),
            message: AgentRenameRequest {
                from: guest::bytes(from),
                to: guest::bytes(to),
                resolve: self.resolve(),
                ..AgentRenameRequest::default()
            },
        }
    }
}

/// A directory that shall be listed. Made by [`Files::list`].
#[derive(Debug, Clone)]
#[must_use = "nothing is listed until `stream` is called"]
pub struct List {
    sandbox: SandboxHandle,
    message: AgentListRequest,
}

impl List {
    /// Levels below the path; default 1, at most 64.
    pub fn depth(mut self, levels: u32) -> Self {
        self.message.depth = levels;
        self
    }

    /// Ends after so many entries; see [`Entries::truncated`].
    pub fn max_entries(mut self, entries: u64) -> Self {
        self.message.max_entries = entries;
        self
    }

    /// The entries as they are found, unsorted.
    ///
    /// # Errors
    /// NOT_A_DIRECTORY and the reasons of paths.
    pub async fn stream(self) -> Result<Entries, Error> {
        let sent = guest::open(
            &self.sandbox,
            Repeat::Harmless,
            &self.message,
            via!(agent_client.list),
        );
        Ok(Entries {
            replies: sent.await?,
            batch: Vec::new().into_iter(),
            truncated: false,
            unreadable: 0,
        })
    }
}

/// Entries of a directory, a `Stream`. Dropping it ends the call.
#[derive(Debug)]
pub struct Entries {
    replies: Streaming<AgentListReply>,
    batch: std::vec::IntoIter<FileEntry>,
    truncated: bool,
    unreadable: u64,
}

impl Entries {
    /// The next entry; its name is relative to the path that was asked for. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<FileEntry, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// After the end: there were more than [`List::max_entries`].
    #[must_use]
    pub fn truncated(&self) -> bool {
        self.truncated
    }

    /// After the end: directories that could not be read.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }
}

impl Stream for Entries {
    type Item = Result<FileEntry, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(entry) = self.batch.next() {
                return Poll::Ready(Some(Ok(entry)));
            }
            match ready!(Pin::new(&mut self.replies).poll_next(cx)) {
                Some(Ok(reply)) => {
                    self.truncated |= reply.truncated;
                    self.unreadable = self.unreadable.max(reply.unreadable);
                    self.batch = reply.entries.into_iter();
                }
                Some(Err(status)) => return Poll::Ready(Some(Err(Error::from_status(status)))),
                None => return Poll::Ready(None),
            }
        }
    }
}

/// A directory in the making. Made by [`Files::mkdir`].
#[derive(Debug, Clone)]
#[must_use = "nothing is made until it is awaited"]
pub struct Mkdir {
    sandbox: SandboxHandle,
    message: AgentMkdirRequest,
}

impl Mkdir {
    /// Makes missing ones on the way, and takes one that is there.
    pub fn parents(mut self) -> Self {
        self.message.parents = true;
        self
    }

    /// Permission bits; default 0755.
    pub fn mode(mut self, mode: u32) -> Self {
        self.message.mode = Some(mode);
        self
    }
}

impl IntoFuture for Mkdir {
    /// False: it was there.
    type Output = Result<bool, Error>;
    type IntoFuture = Answer<bool>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let terms = (Repeat::OnWord, None);
            let sent = guest::ask(&self.sandbox, terms, &self.message, via!(agent_client.mkdir));
            Ok(sent.await?.made)
        })
    }
}

/// A removal in the making. Made by [`Files::remove`].
#[derive(Debug, Clone)]
#[must_use = "nothing is removed until it is awaited"]
pub struct Remove {
    sandbox: SandboxHandle,
    message: AgentRemoveRequest,
}

impl Remove {
    /// With all that is in it; never across a mount, never through a link.
    pub fn recursive(mut self) -> Self {
        self.message.recursive = true;
        self
    }

    /// What is not there is no error.
    pub fn missing_ok(mut self) -> Self {
        self.message.missing_ok = true;
        self
    }
}

impl IntoFuture for Remove {
    /// How many files and directories were removed.
    type Output = Result<u64, Error>;
    type IntoFuture = Answer<u64>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let terms = (Repeat::OnWord, None);
            let sent = guest::ask(&self.sandbox, terms, &self.message, via!(agent_client.remove));
            Ok(sent.await?.removed)
        })
    }
}

/// A renaming in the making. Made by [`Files::rename`].
#[derive(Debug, Clone)]
#[must_use = "nothing is renamed until it is awaited"]
pub struct Rename {
    sandbox: SandboxHandle,
    message: AgentRenameRequest,
}

impl Rename {
    /// What has the new path already is PATH_EXISTS, not replaced.
    pub fn keep_existing(mut self) -> Self {
        self.message.set_replace(RenameReplace::No);
        self
    }

    /// Both exist and change places in one step.
    pub fn exchange(mut self) -> Self {
        self.message.set_replace(RenameReplace::Exchange);
        self
    }
}

impl IntoFuture for Rename {
    type Output = Result<(), Error>;
    type IntoFuture = Answer<()>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let terms = (Repeat::OnWord, None);
            guest::ask(&self.sandbox, terms, &self.message, via!(agent_client.rename)).await?;
            Ok(())
        })
    }
}
