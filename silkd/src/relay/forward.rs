//! The stream of one forward: ready, what the program sends, its end, OK.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use sandbox_protocol::{
    limits::CHUNK_OUT,
    reason::Reason,
    v1::{PortForwardEof, PortForwardIn, PortForwardOut, PortForwardReady, port_forward_out::M},
};
use tokio::{net::TcpStream, task::JoinHandle};
use tonic::Status;

use super::{
    Seat,
    pump::{Broken, pump, reset},
};
use crate::{
    gate::{InputSeat, Permit},
    refusal::Refusal,
    tasks,
};

/// First size of a read; it grows while reads are filled.
const SMALL: usize = 4 * 1024;

/// The answer to one `PortForward`. Dropped before both sides were through, it resets the connection.
#[derive(Debug)]
pub struct ForwardStream {
    socket: Arc<TcpStream>,
    program: Program,
    /// `None`: the client has sent its end, or broke off.
    pump: Option<JoinHandle<Result<(), Broken>>>,
    /// To be told once all that the program had sent is.
    failed: Option<Refusal>,
    over: bool,
    size: usize,
    _seats: (Permit, InputSeat, Seat),
}

/// The program's half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    /// The client does not know yet that it has accepted.
    Accepted,
    Sends,
    Ended,
}

impl ForwardStream {
    pub(super) fn new<S>(socket: Arc<TcpStream>, input: S, seats: (Permit, InputSeat, Seat)) -> Self
    where
        S: Stream<Item = Result<PortForwardIn, Status>> + Send + Unpin + 'static,
    {
        Self {
            pump: Some(tasks::spawn(pump(Arc::clone(&socket), input))),
            socket,
            program: Program::Accepted,
            failed: None,
            over: false,
            size: SMALL,
            _seats: seats,
        }
    }

    /// The next bytes, [`CHUNK_OUT`] at most; none are the program's end.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        loop {
            ready!(self.socket.poll_read_ready(cx))?;
            let mut bytes = BytesMut::with_capacity(self.size);
            match self.socket.try_read_buf(&mut bytes) {
                Ok(n) => {
                    // Room for what comes, not for what came once.
                    if n >= self.size {
                        self.size = self.size.saturating_mul(4).min(CHUNK_OUT);
                    } else if n < self.size / 16 {
                        self.size = (self.size / 4).max(SMALL);
                    }
                    return Poll::Ready(Ok(bytes.freeze()));
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Looks whether the client's half is through.
    fn poll_pump(&mut self, cx: &mut Context<'_>) {
        let Some(pump) = &mut self.pump else { return };
        let Poll::Ready(joined) = Pin::new(pump).poll(cx) else {
            return;
        };
        self.pump = None;
        match joined {
            Ok(Ok(())) => {}
            Ok(Err(Broken::Program(refusal))) => self.failed = Some(refusal),
            Ok(Err(Broken::Client(refusal))) => {
                self.program = Program::Ended;
                self.failed = Some(refusal);
            }
            Err(panic) => {
                self.program = Program::Ended;
                self.failed = Some(Refusal::new(Reason::AgentBug, panic.to_string()));
            }
        }
    }

    /// What the program says next, if it can say anything.
    fn poll_program(&mut self, cx: &mut Context<'_>) -> Poll<Option<M>> {
        match self.program {
            Program::Accepted => {
                self.program = Program::Sends;
                return Poll::Ready(Some(M::Ready(PortForwardReady {})));
            }
            Program::Sends => {}
            Program::Ended => return Poll::Ready(None),
        }
        let said = ready!(self.poll_read(cx));
        if let Ok(data) = &said
            && !data.is_empty()
        {
            return Poll::Ready(said.ok().map(M::Data));
        }
        self.program = Program::Ended;
        if let Err(error) = &said {
            self.failed.get_or_insert_with(|| reset(error));
        }
        // After a failure that the client's half met, a read ends as if all were well.
        Poll::Ready(self.failed.is_none().then_some(M::Eof(PortForwardEof {})))
    }
}

impl Stream for ForwardStream {
    type Item = Result<PortForwardOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        this.poll_pump(cx);
        if let Some(said) = ready!(this.poll_program(cx)) {
            return Poll::Ready(Some(Ok(PortForwardOut { m: Some(said) })));
        }
        if let Some(refusal) = this.failed.take() {
            this.break_off();
            return Poll::Ready(Some(Err(refusal.into())));
        }
        if this.pump.is_some() {
            return Poll::Pending;
        }
        this.over = true;
        Poll::Ready(None)
    }
}

impl ForwardStream {
    /// Whatever is still to be said is not said any more: the program sees a reset, and not an end.
    fn break_off(&mut self) {
        self.over = true;
        // Fails for what is no socket, which it is.
        drop(self.socket.set_zero_linger());
        // It holds the socket, and nothing that needs more than being dropped; the runtime joins it.
        if let Some(pump) = self.pump.take() {
            pump.abort();
        }
    }
}

impl Drop for ForwardStream {
    fn drop(&mut self) {
        if !self.over {
            self.break_off();
        }
    }
}
