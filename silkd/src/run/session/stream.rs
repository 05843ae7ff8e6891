//! The answer to one command of a session.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{FutureExt as _, Stream};
use sandbox_protocol::{
    reason::Reason,
    v1::{SessionRunIn, SessionRunOut, session_run_in::M as In, session_run_out::M},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tonic::{Status, Streaming};

use super::tree::Tree;
use crate::{gate::Permit, refusal::Refusal, run::input, tasks};

/// Messages between a session and its client: one that is read, one that waits. Who reads none stops the command.
pub(super) const EVENTS: usize = 2;

/// See the module. Dropped before its end, it cancels the command; the session stays.
#[derive(Debug)]
pub struct SessionStream {
    /// `None`: all was told.
    events: Option<mpsc::Receiver<M>>,
    /// What the client did wrong; `None`: it can do no more.
    failed: Option<oneshot::Receiver<Refusal>>,
    pump: Option<JoinHandle<()>>,
    _permit: Permit,
}

impl SessionStream {
    /// Of a command that was given. Not async: what is dropped cancels it.
    pub(super) fn new(
        events: mpsc::Receiver<M>,
        tree: Arc<Tree>,
        mut input: Streaming<SessionRunIn>,
        permit: Permit,
    ) -> Self {
        let (fail, failed) = oneshot::channel();
        // Most clients have closed their half by now; then no task is needed for it.
        let pump = match input.message().now_or_never() {
            Some(Ok(None)) => None,
            early => Some(tasks::spawn(pump(early, input, tree, fail))),
        };
        Self {
            events: Some(events),
            failed: Some(failed),
            pump,
            _permit: permit,
        }
    }
}

/// Passes signals on until the client has no more. To be dropped when the call ends.
async fn pump(
    early: Option<Result<Option<SessionRunIn>, Status>>,
    mut input: Streaming<SessionRunIn>,
    tree: Arc<Tree>,
    fail: oneshot::Sender<Refusal>,
) {
    let mut next = early;
    let refusal = loop {
        let message = match next.take() {
            Some(early) => early,
            None => input.message().await,
        };
        match message {
            Ok(Some(message)) => {
                if let Err(refusal) = accept(message, &tree) {
                    break refusal;
                }
            }
            Ok(None) => return,
            Err(status) => break input::broken(&status),
        }
    };
    // Nobody waits for it: the call has ended.
    fail.send(refusal).ok();
}

fn accept(message: SessionRunIn, tree: &Tree) -> Result<(), Refusal> {
    let refuse = |what| Refusal::new(Reason::InvalidCommand, what);
    match message.m.ok_or_else(|| refuse("a message without content"))? {
        In::Start(_) => Err(refuse("a second start in one call")),
        In::Signal(signal) => {
            // Whatever the scope: all that the command started, and not its shell.
            let (signal, _scope) = input::wanted(signal)?;
            tree.signal(signal);
            Ok(())
        }
    }
}

impl Stream for SessionStream {
    type Item = Result<SessionRunOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(events) = &mut this.events else {
            return Poll::Ready(None);
        };
        if let Some(failed) = &mut this.failed
            && let Poll::Ready(outcome) = failed.poll_unpin(cx)
        {
            this.failed = None;
            if let Ok(refusal) = outcome {
                this.events = None;
                return Poll::Ready(Some(Err(refusal.into())));
            }
        }
        match std::task::ready!(events.poll_recv(cx)) {
            Some(message) => {
                if matches!(message, M::Exit(_)) {
                    this.events = None;
                }
                Poll::Ready(Some(Ok(SessionRunOut { m: Some(message) })))
            }
            None => {
                this.events = None;
                let refusal = Refusal::new(Reason::SessionEnded, "the session was ended");
                Poll::Ready(Some(Err(refusal.into())))
            }
        }
    }
}

impl Drop for SessionStream {
    fn drop(&mut self) {
        // It holds nothing that needs more than being dropped; the runtime joins it.
        if let Some(pump) = &self.pump {
            pump.abort();
        }
    }
}
