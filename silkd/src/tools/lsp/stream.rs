//! The stream of one client: started, frames, and the exit if it comes to that.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::Stream;
use sandbox_protocol::{
    reason::Reason,
    v1::{LspFrame, LspIn, LspOut, LspStarted, lsp_out::M},
};
use tokio::{sync::Semaphore, task::JoinHandle};
use tonic::Status;

use super::{
    input::pump,
    server::{Next, Over, Server},
};
use crate::{
    gate::{InputSeat, Permit},
    refusal::Refusal,
    tasks,
};

/// The answer to one `LspOpen`. Dropped, it leaves the server to the next client, for as long as it lingers.
#[derive(Debug)]
pub struct LspStream {
    server: Arc<Server>,
    /// `None`: it was told, or there is nothing more to tell.
    started: Option<LspStarted>,
    /// `None`: the client sends no more.
    pump: Option<JoinHandle<Result<(), Refusal>>>,
    over: bool,
    _seats: (Permit, InputSeat),
}

impl LspStream {
    /// Becomes the server's client.
    ///
    /// # Errors
    /// Those of [`Server::attach`].
    pub(super) fn attach<S>(
        server: Arc<Server>,
        input: S,
        budget: &Arc<Semaphore>,
        seats: (Permit, InputSeat),
    ) -> Result<Self, Refusal>
    where
        S: Stream<Item = Result<LspIn, Status>> + Send + Unpin + 'static,
    {
        let resumed = server.attach()?;
        let started = LspStarted {
            server: server.id(),
            pid: server.pid(),
            resumed,
        };
        let pump = pump(input, server.input().clone(), Arc::clone(budget));
        Ok(Self {
            server,
            started: Some(started),
            pump: Some(tasks::spawn(pump)),
            over: false,
            _seats: seats,
        })
    }

    /// Looks whether the client broke off.
    fn poll_pump(&mut self, cx: &mut Context<'_>) -> Option<Refusal> {
        let Poll::Ready(joined) = Pin::new(self.pump.as_mut()?).poll(cx) else {
            return None;
        };
        self.pump = None;
        match joined {
            Ok(outcome) => outcome.err(),
            Err(panic) => Some(Refusal::new(Reason::AgentBug, panic.to_string())),
        }
    }
}

impl Stream for LspStream {
    type Item = Result<LspOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        let tell = |m| Poll::Ready(Some(Ok(LspOut { m: Some(m) })));
        if let Some(started) = this.started.take() {
            return tell(M::Started(started));
        }
        if let Some(refusal) = this.poll_pump(cx) {
            this.over = true;
            return Poll::Ready(Some(Err(refusal.into())));
        }
        match std::task::ready!(this.server.poll(cx)) {
            Next::Part(part) => tell(M::Frame(LspFrame {
                data: part.data,
                more: part.more,
            })),
            Next::Over(over) => {
                this.over = true;
                match over {
                    Over::Exit(exit) => tell(M::Exit(exit)),
                    Over::Broken(refusal) => Poll::Ready(Some(Err(refusal.into()))),
                }
            }
        }
    }
}

impl Drop for LspStream {
    fn drop(&mut self) {
        self.server.detach();
        // It holds at most a message that the server has nothing of; the runtime joins it.
        if let Some(pump) = &self.pump {
            pump.abort();
        }
    }
}
