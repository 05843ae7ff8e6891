//! Language servers of a guest, one message of their protocol at a time.
//!
//! May call: sandbox, guest, client, exec, retry, error.
//! Never inside: what a message says; its length header is the guest's matter.
//! Cancel safety: dropping the stream leaves the server alive for its time to linger, for another client.

use std::{
    ffi::OsStr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::Sink;
use sandbox_protocol::{
    limits,
    v1::{AgentLspStopRequest, EnvVar, LspFrame, LspIn, LspOut, LspStart, lsp_in, lsp_out, lsp_start::Which},
};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt as _, wrappers::ReceiverStream};
use tokio_util::sync::PollSender;
use tonic::Streaming;

use crate::{client::via, error::Error, exec::Exit, guest, retry::Repeat, sandbox::SandboxHandle};

/// Largest piece of a message in one frame, in bytes: one HTTP/2 window's worth.
const PIECE: usize = 64 * 1024;
/// Frames that wait for the connection: enough to keep it busy, 256 KiB at most.
const PIECES: usize = 4;

impl SandboxHandle {
    /// A language server, by the name of its file in the image's `/etc/silkd/lsp.d`. A new one is started.
    pub fn lsp(&self, language: impl Into<String>) -> Lsp {
        Lsp::new(self, Which::Language(language.into()))
    }

    /// A language server that was started before and has no client now.
    pub fn lsp_server(&self, server: u64) -> Lsp {
        Lsp::new(self, Which::Server(server))
    }

    /// Ends a language server: TERM, after 2 s KILL. How it ended, where that is known.
    ///
    /// # Errors
    /// LSP_UNKNOWN.
    pub async fn lsp_stop(&self, server: u64) -> Result<Option<Exit>, Error> {
        let terms = (Repeat::OnWord, None);
        let message = AgentLspStopRequest { server };
        let reply = guest::ask(self, terms, &message, via!(agent_client.lsp_stop)).await?;
        reply.exit.map(|exit| Exit::read(exit, None)).transpose()
    }
}

/// A language server that is wanted. Made by [`SandboxHandle::lsp`].
#[derive(Debug, Clone)]
#[must_use = "nothing is started until `open` is called"]
pub struct Lsp {
    sandbox: SandboxHandle,
    start: LspStart,
    wrong: Option<(&'static str, &'static str)>,
}

impl Lsp {
    fn new(sandbox: &SandboxHandle, which: Which) -> Self {
        Self {
            sandbox: sandbox.clone(),
            start: LspStart {
                which: Some(which),
                ..LspStart::default()
            },
            wrong: None,
        }
    }

    /// Its working directory, absolute.
    pub fn root(mut self, path: impl AsRef<OsStr>) -> Self {
        self.start.root = guest::bytes(path);
        self
    }

    /// Name or number, `[:group]`. Default: the claim's, else root.
    pub fn user(mut self, user: impl Into<Bytes>) -> Self {
        self.start.user = user.into();
        self
    }

    /// An environment variable, over those of the claim and the image.
    pub fn env(mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        let (key, value) = (key.into(), value.into());
        self.start.env.push(EnvVar { key, value });
        self
    }

    /// How long it stays without a client, in whole seconds; default 5 minutes, at most an hour.
    pub fn linger(mut self, linger: Duration) -> Self {
        match u32::try_from(linger.as_secs()) {
            Ok(secs) => self.start.linger_secs = Some(secs),
            Err(_too_long) => self.wrong = Some(("linger_secs", "at most 3600 seconds")),
        }
        self
    }

    /// Starts it, or takes it up again.
    ///
    /// # Errors
    /// LSP_UNKNOWN, LSP_BUSY and the reasons of a program's start.
    pub async fn open(self) -> Result<LspStream, Error> {
        if let Some((field, allowed)) = self.wrong {
            return Err(Error::invalid(field, allowed.to_owned()));
        }
        let opened = guest::open(&self.sandbox, Repeat::OnWord, &(), |client, request| {
            // Each attempt has a request half of its own.
            let (frames, receiver) = mpsc::channel(PIECES);
            let start = LspIn {
                m: Some(lsp_in::M::Start(self.start.clone())),
            };
            let input = tokio_stream::once(start).chain(ReceiverStream::new(receiver));
            async move {
                let mut agent = client.agent_client();
                let replies = Box::pin(agent.lsp_open(request.map(|()| input))).await?;
                Ok(replies.map(|replies| (replies, frames)))
            }
        });
        let (mut replies, frames) = opened.await?;
        let started = loop {
            match replies.message().await.map_err(Error::from_status)? {
                Some(LspOut {
                    m: Some(lsp_out::M::Started(started)),
                }) => break started,
                // Of a newer agent.
                Some(LspOut { m: None }) => {}
                Some(_) | None => return Err(Error::unfinished("the call began without a server")),
            }
        };
        Ok(LspStream {
            server: started.server,
            pid: started.pid,
            resumed: started.resumed,
            replies: Some(replies),
            message: BytesMut::new(),
            exit: None,
            frames: PollSender::new(frames),
            sending: None,
        })
    }
}

/// A conversation with a language server: a `Stream` and a `Sink` of whole messages, each at most 8 MiB and without a length
/// header. A reader that pauses makes the server wait.
#[derive(Debug)]
pub struct LspStream {
    server: u64,
    pid: u32,
    resumed: bool,
    /// None once it has ended.
    replies: Option<Streaming<LspOut>>,
    /// Of a message that comes in parts.
    message: BytesMut,
    exit: Option<Exit>,
    frames: PollSender<LspIn>,
    /// What is left of the message that goes. Present but empty: an empty message.
    sending: Option<Bytes>,
}

impl LspStream {
    /// By which another client finds it: [`SandboxHandle::lsp_server`].
    #[must_use]
    pub fn server(&self) -> u64 {
        self.server
    }

    /// In the guest.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it said while it had no client was held, and follows.
    #[must_use]
    pub fn resumed(&self) -> bool {
        self.resumed
    }

    /// After the end: how the server ended.
    #[must_use]
    pub fn exit(&self) -> Option<&Exit> {
        self.exit.as_ref()
    }

    /// The next message; nothing after the server's end or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        tokio_stream::StreamExt::next(self).await
    }

    /// Sends a message. Not cancel safe: what was begun is finished by the next.
    ///
    /// # Errors
    /// Kind `Unfinished` when the server or the call has ended; FIELD_INVALID for more than 8 MiB.
    pub async fn send(&mut self, message: impl Into<Bytes>) -> Result<(), Error> {
        futures_util::SinkExt::send(self, message.into()).await
    }

    fn read(&mut self, message: LspOut) -> Result<Option<Bytes>, Error> {
        if self.exit.is_some() {
            return Err(Error::unfinished("a message came after the server's end"));
        }
        match message.m {
            Some(lsp_out::M::Frame(frame)) => {
                if self.message.len().saturating_add(frame.data.len()) > limits::LSP_MESSAGE {
                    return Err(Error::unfinished("a message of more than 8 MiB came"));
                }
                if self.message.is_empty() && !frame.more {
                    return Ok(Some(frame.data));
                }
                self.message.extend_from_slice(&frame.data);
                Ok((!frame.more).then(|| self.message.split().freeze()))
            }
            Some(lsp_out::M::Exit(exit)) => {
                self.exit = Some(Exit::read(exit, None)?);
                Ok(None)
            }
            Some(lsp_out::M::Started(_)) => Err(Error::unfinished("a server was started twice")),
            // Of a newer agent.
            None => Ok(None),
        }
    }

    /// Hands over what is left of the message that goes.
    fn poll_frames(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let over = || Error::unfinished("the language server has ended, or the call has");
        while let Some(message) = &mut self.sending {
            ready!(self.frames.poll_reserve(cx)).map_err(|_closed| over())?;
            let data = message.split_to(message.len().min(PIECE));
            let more = !message.is_empty();
            let frame = LspIn {
                m: Some(lsp_in::M::Frame(LspFrame { data, more })),
            };
            self.frames.send_item(frame).map_err(|_closed| over())?;
            if !more {
                self.sending = None;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl Stream for LspStream {
    type Item = Result<Bytes, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(replies) = self.replies.as_mut() else {
                return Poll::Ready(None);
            };
            let outcome = match ready!(Pin::new(replies).poll_next(cx)) {
                Some(Ok(message)) => match self.read(message) {
                    Ok(None) => continue,
                    Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                    Err(error) => Some(Err(error)),
                },
                Some(Err(status)) => Some(Err(Error::from_status(status))),
                None if self.exit.is_some() => None,
                None => Some(Err(Error::unfinished("the call ended without the server's end"))),
            };
            self.replies = None;
            return Poll::Ready(outcome);
        }
    }
}

impl Sink<Bytes> for LspStream {
    type Error = Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.poll_frames(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, message: Bytes) -> Result<(), Error> {
        if message.len() > limits::LSP_MESSAGE {
            return Err(Error::invalid("message", "at most 8 MiB".to_owned()));
        }
        self.sending = Some(message);
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.poll_frames(cx)
    }

    /// Ends the conversation; the server stays for its time to linger.
    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        ready!(self.poll_frames(cx))?;
        self.frames.close();
        Poll::Ready(Ok(()))
    }
}
