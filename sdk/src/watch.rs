//! Changes of files below a path.
//!
//! May call: files, sandbox, guest, client, retry, error.
//! Never inside: a change that is left out in silence: what was lost is an [`FileChange::Overflow`].
//! Cancel safety: dropping the stream ends the watch.

use std::{
    ffi::OsStr,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use sandbox_protocol::v1::{AgentWatchRequest, WatchKind, WatchOut, watch_out};
use tokio_stream::Stream;
use tonic::Streaming;

use crate::{client::via, error::Error, files::Files, guest, retry::Repeat, sandbox::SandboxHandle};

impl Files {
    /// Watches a file, or what is directly in a directory.
    pub fn watch(&self, path: impl AsRef<OsStr>) -> FileWatch {
        FileWatch {
            sandbox: self.sandbox().clone(),
            message: AgentWatchRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..AgentWatchRequest::default()
            },
        }
    }
}

/// A watch in the making. Made by [`Files::watch`].
#[derive(Debug, Clone)]
#[must_use = "nothing is watched until `stream` is called"]
pub struct FileWatch {
    sandbox: SandboxHandle,
    message: AgentWatchRequest,
}

impl FileWatch {
    /// All levels below.
    pub fn recursive(mut self) -> Self {
        self.message.recursive = true;
        self
    }

    /// Not what fits this glob, over paths relative to the one that is watched; may be repeated.
    pub fn exclude(mut self, glob: impl AsRef<OsStr>) -> Self {
        self.message.exclude.push(guest::bytes(glob));
        self
    }

    /// Changes as they happen; the first event is [`FileChange::Ready`]. The end comes when the path itself was deleted
    /// or moved away.
    ///
    /// # Errors
    /// WATCH_LIMIT and the reasons of paths.
    pub async fn stream(self) -> Result<FileChanges, Error> {
        let sent = guest::open(
            &self.sandbox,
            Repeat::Harmless,
            &self.message,
            via!(agent_client.watch),
        );
        Ok(FileChanges(Some(sent.await?)))
    }
}

/// What happens to files. Paths are relative to the one that is watched; empty: that one itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileChange {
    /// Every watch is armed: what happens from here on is told.
    Ready {
        /// Directories that are watched.
        directories: u64,
    },
    /// At least once for each: what a scan finds in a new directory is told as created.
    Changed {
        /// How.
        kind: WatchKind,
        /// What.
        path: Bytes,
        /// It is a directory.
        directory: bool,
    },
    /// Within what is watched.
    Renamed {
        /// Its old path.
        from: Bytes,
        /// Its new path.
        to: Bytes,
        /// It is a directory.
        directory: bool,
    },
    /// Changes were lost: look again at everything once `Ready` has come, which follows.
    Overflow {
        /// `kernel` or `client`.
        reason: String,
    },
}

/// Changes of files, a `Stream`. A reader that is 1,024 of them behind gets an [`FileChange::Overflow`]. Dropping it ends
/// the watch.
#[derive(Debug)]
pub struct FileChanges(Option<Streaming<WatchOut>>);

impl FileChanges {
    /// The next change; nothing after the end or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<FileChange, Error>> {
        tokio_stream::StreamExt::next(self).await
    }
}

fn read(message: WatchOut) -> Option<FileChange> {
    Some(match message.m? {
        watch_out::M::Ready(ready) => FileChange::Ready {
            directories: ready.directories,
        },
        watch_out::M::Event(event) => FileChange::Changed {
            kind: event.kind(),
            path: event.path,
            directory: event.directory,
        },
        watch_out::M::Renamed(renamed) => FileChange::Renamed {
            from: renamed.from,
            to: renamed.to,
            directory: renamed.directory,
        },
        watch_out::M::Overflow(overflow) => FileChange::Overflow {
            reason: overflow.reason,
        },
    })
}

impl Stream for FileChanges {
    type Item = Result<FileChange, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(replies) = self.0.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match read(message) {
                    // Of a newer agent.
                    None => continue,
                    Some(change) => return Poll::Ready(Some(Ok(change))),
                },
                Some(Err(status)) => Some(Err(Error::from_status(status))),
                None => None,
            };
            self.0 = None;
            return Poll::Ready(outcome);
        }
    }
}
