//! The client's half: a task that writes what it sends to the program.

use std::{io, sync::Arc};

use bytes::{Buf as _, Bytes};
use futures_util::{Stream, StreamExt as _};
use rustix::net::Shutdown;
use sandbox_protocol::{
    limits::CHUNK_IN,
    reason::Reason,
    v1::{PortForwardEof, PortForwardIn, port_forward_in::M},
};
use tokio::{io::Interest, net::TcpStream};
use tonic::Status;

use crate::refusal::Refusal;

/// How the client's half broke off.
#[derive(Debug)]
pub(super) enum Broken {
    /// By the program: what it had sent before is still to be read.
    Program(Refusal),
    /// By the client.
    Client(Refusal),
}

/// Passes on what the client sends, up to its end, which becomes FIN. To be dropped when the forward ends.
pub(super) async fn pump<S>(socket: Arc<TcpStream>, mut input: S) -> Result<(), Broken>
where
    S: Stream<Item = Result<PortForwardIn, Status>> + Unpin,
{
    let client = |message: String| Broken::Client(Refusal::new(Reason::FieldInvalid, message));
    loop {
        let message = tokio::select! {
            message = input.next() => message,
            // Also when the program has sent its own end, and nobody reads from it any more.
            error = failure(&socket) => return Err(Broken::Program(reset(&error))),
        };
        let message = match message {
            Some(Ok(message)) => message.m,
            Some(Err(status)) => return Err(client(format!("the client broke off: {}", status.message()))),
            None => Some(M::Eof(PortForwardEof {})),
        };
        match message {
            Some(M::Data(data)) if data.len() > CHUNK_IN => {
                let message = format!("a chunk of {} bytes: {CHUNK_IN} are allowed", data.len());
                return Err(client(message));
            }
            Some(M::Data(data)) => {
                write(&socket, data)
                    .await
                    .map_err(|error| Broken::Program(reset(&error)))?;
            }
            Some(M::Eof(_)) => {
                let fin = rustix::net::shutdown(&*socket, Shutdown::Write);
                return fin.map_err(|errno| Broken::Program(reset(&errno.into())));
            }
            Some(M::Open(_)) => return Err(client("a second open in one call".to_owned())),
            None => return Err(client("a message without content".to_owned())),
        }
    }
}

/// Resolves when the connection has failed.
async fn failure(socket: &TcpStream) -> io::Error {
    match socket.ready(Interest::ERROR).await {
        // Who reads may have learned of it first; there is only one way for the loopback to fail.
        Ok(_ready) => match socket.take_error() {
            Ok(Some(error)) | Err(error) => error,
            Ok(None) => io::ErrorKind::ConnectionReset.into(),
        },
        Err(error) => error,
    }
}

async fn write(socket: &TcpStream, mut data: Bytes) -> io::Result<()> {
    while data.has_remaining() {
        socket.writable().await?;
        match socket.try_write(&data) {
            Ok(written) => data.advance(written),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The program closed the connection though not all was said.
pub(super) fn reset(error: &io::Error) -> Refusal {
    let refusal = Refusal::new(Reason::PortReset, format!("the connection broke: {error}"));
    match error.raw_os_error() {
        Some(errno) => refusal.with_errno(errno),
        None => refusal,
    }
}
