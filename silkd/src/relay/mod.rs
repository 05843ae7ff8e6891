//! Port forwards: each is one connection to a port of the guest's own loopback, byte for byte.
//!
//! The two directions know nothing of each other: the program's bytes are read by whoever polls the call's stream, the
//! client's are written by a task of its own, so that neither waits for the other's reader. Each ends alone: an end of
//! the client becomes FIN, FIN of the program becomes an end for the client. What breaks off on one side breaks off on
//! the other: a client that leaves resets the connection, a reset by the program is an error and never an end.
//!
//! May call: gate, refusal, tasks.
//! Never inside: a name lookup, an address but the two of the loopback, a thought about what is said.
//! Held for a forward are one message of the client (256 KiB) and one read of the program (64 KiB) at most; whoever does
//! not read stalls only the one who writes to him.
//! Cancel safety: dropping [`ForwardStream`] before its end resets the connection.

mod dial;
mod forward;
mod pump;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures_util::Stream;
use sandbox_protocol::{
    limits::FORWARDS,
    reason::Reason,
    v1::{PortForwardIn, PortForwardOpen},
};
use tonic::Status;

pub use self::forward::ForwardStream;
use crate::{gate::Permit, refusal::Refusal};

/// All forwards of a guest; a handle.
#[derive(Debug, Clone, Default)]
pub struct Relay(Arc<AtomicUsize>);

impl Relay {
    /// Connects. `input` is what the client sends after `open`. Cancel safe: dropped, it leaves no connection.
    ///
    /// # Errors
    /// `FIELD_INVALID` for what is no port or address of the loopback; `PORT_REFUSED` when nobody listens there;
    /// `STREAM_LIMIT` when [`FORWARDS`] are open, or all seats for streams with input are taken.
    pub async fn forward<S>(
        &self,
        permit: Permit,
        open: PortForwardOpen,
        input: S,
    ) -> Result<ForwardStream, Refusal>
    where
        S: Stream<Item = Result<PortForwardIn, Status>> + Send + Unpin + 'static,
    {
        let target = dial::target(open)?;
        let seat = self.seat()?;
        let input_seat = permit.input()?;
        let socket = Arc::new(dial::connect(target).await?);
        Ok(ForwardStream::new(socket, input, (permit, input_seat, seat)))
    }

    fn seat(&self) -> Result<Seat, Refusal> {
        let more = |open: usize| (open < FORWARDS).then_some(open + 1);
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .map_err(|_full| Refusal::new(Reason::StreamLimit, format!("{FORWARDS} ports are forwarded")))?;
        Ok(Seat(self.clone()))
    }
}

/// One of [`FORWARDS`]; free again when dropped.
#[derive(Debug)]
struct Seat(Relay);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}
