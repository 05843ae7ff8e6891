//! Content that goes.

use std::{
    ffi::OsStr,
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use sandbox_protocol::v1::{FileStat, WriteIf, WriteIn, WriteStart, write_in};
use tokio::io::AsyncRead;

use super::Files;
use crate::{
    client::via,
    error::Error,
    guest::{self, Content},
    sandbox::SandboxHandle,
};

impl Files {
    /// Writes a file whole: its old content stays until the new one is complete.
    pub fn write(&self, path: impl AsRef<OsStr>) -> Write {
        Write {
            sandbox: self.sandbox.clone(),
            start: WriteStart {
                path: guest::bytes(path),
                resolve: self.resolve(),
                ..WriteStart::default()
            },
            wrong: None,
        }
    }
}

/// A file that shall be written. Made by [`Files::write`].
#[derive(Debug, Clone)]
#[must_use = "nothing is written until `bytes` or `reader` is called"]
pub struct Write {
    sandbox: SandboxHandle,
    start: WriteStart,
    wrong: Option<(&'static str, &'static str)>,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Written {
    /// Bytes of this write.
    pub bytes: u64,
    /// It is on disk; false where that was not asked for, and on a file system in memory.
    pub durable: bool,
    /// What the file is now.
    pub stat: FileStat,
}

impl Write {
    /// Permission bits. Default: those of the old file, 0644 for a new one.
    pub fn mode(mut self, mode: u32) -> Self {
        self.start.mode = Some(mode);
        self
    }

    /// How many bytes will come; another amount is SIZE_MISMATCH, and nothing is changed.
    pub fn size(mut self, bytes: u64) -> Self {
        self.start.size = Some(bytes);
        self
    }

    /// Makes missing directories on the way (0755).
    pub fn parents(mut self) -> Self {
        self.start.parents = true;
        self
    }

    /// Only if there is none yet; else PATH_EXISTS.
    pub fn if_absent(mut self) -> Self {
        self.start.set_if(WriteIf::Absent);
        self
    }

    /// Only if the file was last changed then (as [`Files::stat`] says); else MTIME_CHANGED.
    pub fn if_unchanged_since(mut self, mtime_ns: i64) -> Self {
        self.start.set_if(WriteIf::SameMtime);
        self.start.mtime_ns = mtime_ns;
        self
    }

    /// As [`if_unchanged_since`](Self::if_unchanged_since), with the time as the system has it.
    pub fn if_unchanged_since_time(self, time: SystemTime) -> Self {
        let since = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_nanos()).ok(),
            Err(before) => i64::try_from(before.duration().as_nanos())
                .ok()
                .and_then(i64::checked_neg),
        };
        match since {
            Some(ns) => self.if_unchanged_since(ns),
            None => Self {
                wrong: Some(("mtime_ns", "nanoseconds since 1970 that fit into 64 bits")),
                ..self
            },
        }
    }

    /// Goes on at the end of the file. A write that is cut off leaves a part.
    pub fn append(mut self) -> Self {
        self.start.append = true;
        self
    }

    /// The answer comes once it is on disk, where the file system has one; see [`Written::durable`].
    pub fn durable(mut self) -> Self {
        self.start.durable = true;
        self
    }

    /// Writes these bytes.
    ///
    /// # Errors
    /// PATH_EXISTS, MTIME_CHANGED, NOT_REGULAR_FILE, NO_SPACE and the reasons of paths.
    pub async fn bytes(mut self, content: impl Into<Bytes>) -> Result<Written, Error> {
        let content = content.into();
        let length = u64::try_from(content.len()).unwrap_or(u64::MAX);
        self.start.size.get_or_insert(length);
        self.send(Content::Fixed(content)).await
    }

    /// Writes what a reader gives, to its end; a reader that fails leaves the file as it was. Memory stays flat.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes); kind `Local` if the reader fails.
    pub async fn reader(self, content: impl AsyncRead + Send + 'static) -> Result<Written, Error> {
        self.send(Content::reader(content)).await
    }

    async fn send(self, content: Content) -> Result<Written, Error> {
        if let Some((field, allowed)) = self.wrong {
            return Err(Error::invalid(field, allowed.to_owned()));
        }
        let start = WriteIn {
            m: Some(write_in::M::Start(self.start)),
        };
        let wrap = |data| WriteIn {
            m: Some(write_in::M::Data(data)),
        };
        let sent = guest::upload(&self.sandbox, (start, wrap), content, via!(agent_client.write));
        let reply = Box::pin(sent).await?;
        let stat = reply
            .stat
            .ok_or_else(|| Error::unfinished("the answer says nothing of the file"))?;
        Ok(Written {
            bytes: reply.bytes,
            durable: reply.durable,
            stat,
        })
    }
}
