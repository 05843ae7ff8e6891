//! Trees, as tar, both ways.

use std::{
    ffi::OsStr,
    future::poll_fn,
    io,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use sandbox_protocol::v1::{
    AgentPullRequest, FileKind, FileStat, PullEnd, PullOut, PushIn, PushMode, PushStart, pull_out, push_in,
};
use tokio::io::{AsyncRead, ReadBuf};

use super::{
    Files,
    pack::pack,
    read::{Download, Message, Part},
    unpack::{Unpack, Unpacked},
};
use crate::{
    client::via,
    error::Error,
    guest::{self, Content},
    retry::Repeat,
    sandbox::SandboxHandle,
};

impl Files {
    /// Unpacks a tree below a directory of the guest's, which is made if missing.
    pub fn push(&self, directory: impl AsRef<OsStr>) -> Push {
        Push {
            sandbox: self.sandbox.clone(),
            start: PushStart {
                dest: guest::bytes(directory),
                resolve: self.resolve(),
                ..PushStart::default()
            },
        }
    }

    /// Copies what is in a local directory into one of the guest's, as [`Push::dir`].
    ///
    /// # Errors
    /// As there.
    pub async fn push_dir(&self, local: impl AsRef<Path>, dest: impl AsRef<OsStr>) -> Result<Pushed, Error> {
        self.push(dest).dir(local).await
    }

    /// Takes a tree, or one file, out of the guest.
    pub fn pull(&self, path: impl AsRef<OsStr>) -> Pull {
        Pull {
            sandbox: self.sandbox.clone(),
            message: AgentPullRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..AgentPullRequest::default()
            },
        }
    }

    /// Copies what is in a directory of the guest's into a local one, as [`Pull::dir`].
    ///
    /// # Errors
    /// As there.
    pub async fn pull_dir(&self, path: impl AsRef<OsStr>, local: impl AsRef<Path>) -> Result<Pulled, Error> {
        self.pull(path).dir(local).await
    }
}

/// A tree that shall be unpacked in the guest. Made by [`Files::push`].
#[derive(Debug, Clone)]
#[must_use = "nothing is pushed until `dir` or `tar` is called"]
pub struct Push {
    sandbox: SandboxHandle,
    start: PushStart,
}

/// A tree that was unpacked in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// Entries of the archive.
    pub entries: u64,
    /// Bytes of their content.
    pub bytes: u64,
    /// Local sockets, devices and pipes that were left out ([`Push::dir`]).
    pub skipped: u64,
}

impl Push {
    /// Swaps the whole directory for the tree in one step. Default: merges into what is there, once every conflict was
    /// looked for.
    pub fn replace(mut self) -> Self {
        self.start.set_mode(PushMode::Replace);
        self
    }

    /// Drops so many leading components of every name.
    pub fn strip(mut self, components: u32) -> Self {
        self.start.strip = components;
        self
    }

    /// Keeps owners and set-id bits of the archive; for root.
    pub fn keep_owner(mut self) -> Self {
        self.start.keep_owner = true;
        self
    }

    /// Sends a tar archive that a reader gives; a reader that fails leaves everything as it was.
    ///
    /// # Errors
    /// ARCHIVE_REFUSED, PATH_EXISTS, NO_SPACE and the reasons of paths; kind `Local` if the reader fails.
    pub async fn tar(self, archive: impl AsyncRead + Send + 'static) -> Result<Pushed, Error> {
        let start = PushIn {
            m: Some(push_in::M::Start(self.start)),
        };
        let wrap = |data| PushIn {
            m: Some(push_in::M::Data(data)),
        };
        let archive = Content::reader(archive);
        let sent = guest::upload(&self.sandbox, (start, wrap), archive, via!(agent_client.push));
        let reply = Box::pin(sent).await?;
        Ok(Pushed {
            entries: reply.entries,
            bytes: reply.bytes,
            skipped: 0,
        })
    }

    /// Sends what is in a local directory ([`pack`]).
    ///
    /// # Errors
    /// As [`tar`](Self::tar).
    pub async fn dir(self, local: impl AsRef<Path>) -> Result<Pushed, Error> {
        let source = pack(local.as_ref());
        let skipped = source.skipped();
        let pushed = self.tar(source).await?;
        Ok(Pushed {
            skipped: skipped.get(),
            ..pushed
        })
    }
}

/// A tree that shall be taken out. Made by [`Files::pull`].
#[derive(Debug, Clone)]
#[must_use = "nothing is pulled until `dir` or `tar` is called"]
pub struct Pull {
    sandbox: SandboxHandle,
    message: AgentPullRequest,
}

/// A tree that was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pulled {
    /// What was made here.
    pub unpacked: Unpacked,
    /// What the guest says of the archive.
    pub end: PullEnd,
}

impl Pull {
    /// Leaves out what fits this glob, over paths relative to the one asked for; may be repeated.
    pub fn exclude(mut self, glob: impl AsRef<OsStr>) -> Self {
        self.message.exclude.push(guest::bytes(glob));
        self
    }

    /// Links become what they lead to.
    pub fn follow(mut self) -> Self {
        self.message.follow = true;
        self
    }

    /// The archive as it comes; a reader that pauses makes the guest wait.
    ///
    /// # Errors
    /// The reasons of paths.
    pub async fn tar(self) -> Result<TreeReader, Error> {
        let sent = guest::open(
            &self.sandbox,
            Repeat::Harmless,
            &self.message,
            via!(agent_client.pull),
        );
        Ok(TreeReader(Download::begin(sent.await?).await?))
    }

    /// Unpacks it below a local directory ([`unpack`](super::unpack())), which is made if missing.
    ///
    /// # Errors
    /// NOT_A_DIRECTORY if the path is one file, the reasons of paths; ARCHIVE_REFUSED for what would land elsewhere;
    /// kind `Local` where this side fails.
    pub async fn dir(self, local: impl AsRef<Path>) -> Result<Pulled, Error> {
        let mut tree = self.tar().await?;
        if tree.stat().kind() != FileKind::Directory {
            return Err(Error::not_a_directory());
        }
        let unpacked = Box::pin(Unpack::new(local).reader(&mut tree)).await?;
        let end = tree.end().copied().unwrap_or_default();
        Ok(Pulled { unpacked, end })
    }
}

impl Message for PullOut {
    type End = PullEnd;

    fn part(self) -> Option<Part<PullEnd>> {
        Some(match self.m? {
            pull_out::M::Head(stat) => Part::Head(stat),
            pull_out::M::Data(data) => Part::Data(data),
            pull_out::M::End(end) => Part::End(end),
        })
    }

    /// Its bytes are those of the files; the archive itself tells whether it is whole.
    fn whole(_end: &PullEnd, _bytes: u64) -> bool {
        true
    }
}

/// A tar archive of the guest's, an `AsyncRead`: hostile until proven otherwise. Dropping it ends the call.
#[derive(Debug)]
pub struct TreeReader(Download<PullOut>);

impl TreeReader {
    /// What the path is: a directory's entries begin with `./`, a file is one entry.
    #[must_use]
    pub fn stat(&self) -> &FileStat {
        &self.0.head
    }

    /// After the end: what the guest says of the archive.
    #[must_use]
    pub fn end(&self) -> Option<&PullEnd> {
        self.0.end.as_ref()
    }

    /// The next piece, at most 64 KiB; nothing after the end or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        poll_fn(|cx| self.0.poll_piece(cx)).await
    }
}

impl AsyncRead for TreeReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read(cx, into)
    }
}
