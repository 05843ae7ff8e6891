//! Lines that match, and what takes their place.

use std::{
    ffi::OsStr,
    pin::Pin,
    task::{Context, Poll, ready},
};

use sandbox_protocol::v1::{
    AgentFindRequest, AgentReplaceRequest, FindDone, FindLine, FindOut, ReplaceDone, ReplaceFile, ReplaceOut,
    find_out, replace_out,
};
use tokio_stream::Stream;
use tonic::Streaming;

use super::Files;
use crate::{client::via, error::Error, guest, retry::Repeat, sandbox::SandboxHandle};

impl Files {
    /// Looks for lines that match a regular expression (Rust's `regex`, on bytes), in a file or in all below a directory.
    pub fn find(&self, path: impl AsRef<OsStr>, pattern: impl AsRef<OsStr>) -> Find {
        Find {
            sandbox: self.sandbox.clone(),
            message: AgentFindRequest {
                path: guest::bytes(path),
                resolve: self.resolve(),
                pattern: guest::bytes(pattern),
                ..AgentFindRequest::default()
            },
        }
    }

    /// Replaces what matches, in all the files or in none; name them by [`Replace::path`]. In the replacement, `$1`
    /// and `${name}` are groups of the pattern.
    pub fn replace(&self, pattern: impl AsRef<OsStr>, replacement: impl AsRef<OsStr>) -> Replace {
        Replace {
            sandbox: self.sandbox.clone(),
            message: AgentReplaceRequest {
                resolve: self.resolve(),
                pattern: guest::bytes(pattern),
                replacement: guest::bytes(replacement),
                ..AgentReplaceRequest::default()
            },
        }
    }
}

/// What is searched, and in which files: the same for [`Find`] and [`Replace`], whose messages have these fields.
macro_rules! search_setters {
    () => {
        /// Pattern and, where there is one, replacement are text.
        pub fn fixed(mut self) -> Self {
            self.message.fixed = true;
            self
        }

        /// Upper and lower case are the same.
        pub fn ignore_case(mut self) -> Self {
            self.message.ignore_case = true;
            self
        }

        /// Only files that fit (`*.rs`), or not those that do (`!target`); as in a gitignore file; may be repeated.
        pub fn glob(mut self, glob: impl AsRef<OsStr>) -> Self {
            self.message.globs.push(guest::bytes(glob));
            self
        }

        /// Files whose names begin with a dot, too.
        pub fn hidden(mut self) -> Self {
            self.message.hidden = true;
            self
        }

        /// Not what gitignore files leave out.
        pub fn respect_gitignore(mut self) -> Self {
            self.message.respect_gitignore = true;
            self
        }
    };
}

/// A search in the making. Made by [`Files::find`].
#[derive(Debug, Clone)]
#[must_use = "nothing is searched until `stream` is called"]
pub struct Find {
    sandbox: SandboxHandle,
    message: AgentFindRequest,
}

impl Find {
    search_setters!();

    /// So many lines before and after each match; at most 10.
    pub fn context(mut self, lines: u32) -> Self {
        self.message.context = lines;
        self
    }

    /// Ends after so many matches.
    pub fn max_matches(mut self, matches: u64) -> Self {
        self.message.max_matches = matches;
        self
    }

    /// Lines as they are found. Dropping the stream ends the search.
    ///
    /// # Errors
    /// INVALID_PATTERN and the reasons of paths.
    pub async fn stream(self) -> Result<Finding, Error> {
        let sent = guest::open(
            &self.sandbox,
            Repeat::Harmless,
            &self.message,
            via!(agent_client.find),
        );
        Ok(Finding(Ending::new(sent.await?)))
    }
}

/// What a search comes upon.
#[derive(Debug, Clone, PartialEq)]
pub enum FindEvent {
    /// A line that matches, or stands near one ([`Find::context`]).
    Line(FindLine),
    /// All was searched, and the call ended in order. The last event.
    Done(FindDone),
}

/// A stream whose last message says that it was the last.
#[derive(Debug)]
struct Ending<M, D> {
    /// None once it has ended.
    replies: Option<Streaming<M>>,
    done: Option<D>,
}

/// A message as it counts.
enum Word<L, D> {
    Line(L),
    Done(D),
}

impl<M, D> Ending<M, D> {
    fn new(replies: Streaming<M>) -> Self {
        Self {
            replies: Some(replies),
            done: None,
        }
    }

    fn poll<L>(
        &mut self,
        cx: &mut Context<'_>,
        read: impl Fn(M) -> Option<Word<L, D>>,
    ) -> Poll<Option<Result<Word<L, D>, Error>>> {
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match read(message) {
                    // Of a newer agent; it says nothing that was asked for.
                    None => continue,
                    Some(_) if self.done.is_some() => Err(Error::unfinished("a message came after the last")),
                    // It counts only once the call has ended in order.
                    Some(Word::Done(done)) => {
                        self.done = Some(done);
                        continue;
                    }
                    Some(line) => return Poll::Ready(Some(Ok(line))),
                },
                Some(Err(status)) => Err(Error::from_status(status)),
                None => self
                    .done
                    .take()
                    .map(Word::Done)
                    .ok_or_else(|| Error::unfinished("the call ended without its last message")),
            };
            self.replies = None;
            return Poll::Ready(Some(outcome));
        }
    }
}

/// A search under way, a `Stream`. Dropping it ends the search.
#[derive(Debug)]
pub struct Finding(Ending<FindOut, FindDone>);

impl Finding {
    /// The next line; nothing after the last event or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<FindEvent, Error>> {
        tokio_stream::StreamExt::next(self).await
    }
}

impl Stream for Finding {
    type Item = Result<FindEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let word = self.0.poll(cx, |message: FindOut| {
            Some(match message.m? {
                find_out::M::Line(line) => Word::Line(line),
                find_out::M::Done(done) => Word::Done(done),
            })
        });
        word.map(|word| {
            word.map(|word| {
                word.map(|word| match word {
                    Word::Line(line) => FindEvent::Line(line),
                    Word::Done(done) => FindEvent::Done(done),
                })
            })
        })
    }
}

/// A replacement in the making. Made by [`Files::replace`].
#[derive(Debug, Clone)]
#[must_use = "nothing is replaced until `stream` or `run` is called"]
pub struct Replace {
    sandbox: SandboxHandle,
    message: AgentReplaceRequest,
}

/// What a replacement did.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Replaced {
    /// Each file that has changed, or would.
    pub files: Vec<ReplaceFile>,
    /// All of it.
    pub done: ReplaceDone,
}

impl Replace {
    /// A file, or a directory with all below it; may be repeated.
    pub fn path(mut self, path: impl AsRef<OsStr>) -> Self {
        self.message.paths.push(guest::bytes(path));
        self
    }

    search_setters!();

    /// Counts, and changes nothing.
    pub fn dry_run(mut self) -> Self {
        self.message.dry_run = true;
        self
    }

    /// The files as they are told.
    ///
    /// # Errors
    /// INVALID_PATTERN, NOT_REGULAR_FILE and the reasons of paths; then nothing has changed.
    pub async fn stream(self) -> Result<Replacing, Error> {
        let sent = guest::open(
            &self.sandbox,
            Repeat::OnWord,
            &self.message,
            via!(agent_client.replace),
        );
        Ok(Replacing(Ending::new(sent.await?)))
    }

    /// Replaces, and gives all that is told, of at most 10,000 files.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub async fn run(self) -> Result<Replaced, Error> {
        let mut stream = self.stream().await?;
        let mut files = Vec::new();
        loop {
            match stream.next().await {
                Some(Ok(ReplaceEvent::File(file))) if files.len() < REPLACED => files.push(file),
                Some(Ok(ReplaceEvent::File(_))) => {
                    return Err(Error::unfinished("more files were told than a guest may change"));
                }
                Some(Ok(ReplaceEvent::Done(done))) => return Ok(Replaced { files, done }),
                Some(Err(error)) => return Err(error),
                None => return Err(Error::unfinished("the call ended without its last message")),
            }
        }
    }
}

/// Files that one replacement changes at most.
const REPLACED: usize = 10_000;

/// What a replacement tells.
#[derive(Debug, Clone, PartialEq)]
pub enum ReplaceEvent {
    /// A file that has changed, or would.
    File(ReplaceFile),
    /// All of them have, and the call ended in order. The last event.
    Done(ReplaceDone),
}

/// A replacement under way, a `Stream`.
#[derive(Debug)]
pub struct Replacing(Ending<ReplaceOut, ReplaceDone>);

impl Replacing {
    /// The next file; nothing after the last event or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<ReplaceEvent, Error>> {
        tokio_stream::StreamExt::next(self).await
    }
}

impl Stream for Replacing {
    type Item = Result<ReplaceEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let word = self.0.poll(cx, |message: ReplaceOut| {
            Some(match message.m? {
                replace_out::M::File(file) => Word::Line(file),
                replace_out::M::Done(done) => Word::Done(done),
            })
        });
        word.map(|word| {
            word.map(|word| {
                word.map(|word| match word {
                    Word::Line(file) => ReplaceEvent::File(file),
                    Word::Done(done) => ReplaceEvent::Done(done),
                })
            })
        })
    }
}
