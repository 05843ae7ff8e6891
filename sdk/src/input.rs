//! The request half of a call on a running program: input, signals, sizes of its terminal.
//!
//! May call: nothing.
//! Never inside: a queue without a bound; a kill that waits behind input.
//! Cancel safety: the half ends with the call, and each handle learns of it; see the handles.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use sandbox_protocol::v1::{self, AttachIn, ExecIn, StdinClose, attach_in, exec_in, signal::Scope};
use tokio::{io::AsyncWrite, sync::mpsc};
use tokio_stream::Stream;
use tokio_util::sync::PollSender;

/// Largest piece of input in one message, in bytes: one HTTP/2 window's worth.
const PIECE: usize = 64 * 1024;
/// Pieces of input that wait for the connection: enough to keep it busy, 256 KiB at most.
const PIECES: usize = 4;
/// Signals and sizes that wait for the connection; a sender waits beyond that.
const CONTROLS: usize = 8;

/// The program's input is over: it has ended, or the call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the program's input is over")]
pub struct StdinClosed;

/// The input of a running program. Dropping it ends the input. As `AsyncWrite`, `shutdown` ends it too, and there is
/// nothing to flush: what was written goes as soon as the connection takes it. Dropping the call drops what it has not.
#[derive(Debug)]
pub struct StdinWriter(PollSender<Bytes>);

impl StdinWriter {
    /// Writes all of it, as fast as the program reads. Not cancel safe: a part may have been written.
    ///
    /// # Errors
    /// The call is over. A program that only stops reading is no error: it has the right to.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), StdinClosed> {
        let mut bytes = bytes.into();
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(PIECE));
            let room = std::future::poll_fn(|cx| self.0.poll_reserve(cx)).await;
            room.and_then(|()| self.0.send_item(piece))
                .map_err(|_unsent| StdinClosed)?;
        }
        Ok(())
    }

    /// Returns when the call is over, and with it any use of more input. Cancel safe.
    pub async fn closed(&self) {
        if let Some(sender) = self.0.get_ref() {
            sender.closed().await;
        }
    }
}

impl AsyncWrite for StdinWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let piece = bytes.get(..PIECE).unwrap_or(bytes);
        if piece.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let sent =
            ready!(self.0.poll_reserve(cx)).and_then(|()| self.0.send_item(Bytes::copy_from_slice(piece)));
        Poll::Ready(match sent {
            Ok(()) => Ok(piece.len()),
            Err(_unsent) => Err(io::Error::new(io::ErrorKind::BrokenPipe, StdinClosed)),
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.close();
        Poll::Ready(Ok(()))
    }
}

/// What overtakes input.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    Signal(v1::Signal),
    Resize(v1::Size),
}

/// Sends signals to a running program.
#[derive(Debug, Clone)]
pub struct Signaller(mpsc::Sender<Control>);

impl Signaller {
    /// Sends a signal to the program's process group. Nothing happens once it has ended. Cancel safe.
    pub async fn signal(&self, number: i32) {
        self.signal_scope(number, Scope::Group).await;
    }

    /// Sends a signal to the leader, its group, or all that descends from it. Nothing happens once it has ended.
    pub async fn signal_scope(&self, number: i32, scope: Scope) {
        let scope = i32::from(scope);
        // The program has ended: there is nobody to signal.
        self.0
            .send(Control::Signal(v1::Signal { number, scope }))
            .await
            .ok();
    }
}

/// Tells a running program the size of its terminal.
#[derive(Debug, Clone)]
pub struct Resizer(mpsc::Sender<Control>);

impl Resizer {
    /// Sets the size, 1 to 4096 each way; the program gets SIGWINCH. Without a terminal the call fails with
    /// NOT_A_TTY. Nothing happens once the program has ended. Cancel safe.
    pub async fn resize(&self, cols: u32, rows: u32) {
        // The program has ended: there is no terminal.
        self.0.send(Control::Resize(v1::Size { cols, rows })).await.ok();
    }
}

/// The sending end of controls, as long as the call's owner wants to send any.
#[derive(Debug)]
pub(crate) struct Controls(mpsc::Sender<Control>);

impl Controls {
    pub(crate) fn channel() -> (Self, mpsc::Receiver<Control>) {
        let (sender, receiver) = mpsc::channel(CONTROLS);
        (Self(sender), receiver)
    }

    /// One whose call has none: it answers as that of an ended program does.
    pub(crate) fn none() -> Self {
        Self(mpsc::channel(1).0)
    }

    pub(crate) fn signaller(&self) -> Signaller {
        Signaller(self.0.clone())
    }

    pub(crate) fn resizer(&self) -> Resizer {
        Resizer(self.0.clone())
    }
}

/// What the program reads.
#[derive(Debug, Clone, Default)]
pub(crate) enum Stdin {
    /// `/dev/null`.
    #[default]
    Null,
    /// These bytes, then the end.
    Fixed(Bytes),
    /// What a [`StdinWriter`] writes.
    Piped,
}

/// A message of a request half.
pub(crate) trait Message {
    fn stdin(data: Bytes) -> Self;
    fn stdin_close() -> Self;
    fn control(control: Control) -> Self;
}

impl Message for ExecIn {
    fn stdin(data: Bytes) -> Self {
        let m = Some(exec_in::M::Stdin(data));
        Self { m }
    }

    fn stdin_close() -> Self {
        let m = Some(exec_in::M::StdinClose(StdinClose {}));
        Self { m }
    }

    fn control(control: Control) -> Self {
        let m = Some(match control {
            Control::Signal(signal) => exec_in::M::Signal(signal),
            Control::Resize(size) => exec_in::M::Resize(size),
        });
        Self { m }
    }
}

impl Message for AttachIn {
    fn stdin(data: Bytes) -> Self {
        let m = Some(attach_in::M::Stdin(data));
        Self { m }
    }

    fn stdin_close() -> Self {
        let m = Some(attach_in::M::StdinClose(StdinClose {}));
        Self { m }
    }

    fn control(control: Control) -> Self {
        let m = Some(match control {
            Control::Signal(signal) => attach_in::M::Signal(signal),
            Control::Resize(size) => attach_in::M::Resize(size),
        });
        Self { m }
    }
}

/// The request half, as tonic sends it.
#[derive(Debug)]
pub(crate) struct Input<M> {
    start: Option<M>,
    controls: Option<mpsc::Receiver<Control>>,
    stdin: Source,
}

#[derive(Debug)]
enum Source {
    End,
    Fixed(Bytes),
    Piped(mpsc::Receiver<Bytes>),
}

impl<M: Message> Input<M> {
    /// A half that begins with `start`. With `controls` it stays open until the program's end, so that signals and
    /// sizes can be sent.
    pub(crate) fn new(start: M, stdin: &Stdin, controls: bool) -> (Self, Option<StdinWriter>, Controls) {
        let (stdin, writer) = match stdin {
            Stdin::Null => (Source::End, None),
            Stdin::Fixed(bytes) => (Source::Fixed(bytes.clone()), None),
            Stdin::Piped => {
                let (writer, reader) = mpsc::channel(PIECES);
                (Source::Piped(reader), Some(StdinWriter(PollSender::new(writer))))
            }
        };
        let (sender, controls) = if controls {
            let (sender, receiver) = Controls::channel();
            (sender, Some(receiver))
        } else {
            (Controls::none(), None)
        };
        let input = Self {
            start: Some(start),
            controls,
            stdin,
        };
        (input, writer, sender)
    }

    /// The next piece of input; nothing when there is and will be none.
    fn poll_stdin(&mut self, cx: &mut Context<'_>) -> Poll<Option<M>> {
        let piece = match &mut self.stdin {
            Source::End => return Poll::Ready(None),
            Source::Fixed(bytes) if bytes.is_empty() => None,
            Source::Fixed(bytes) => Some(bytes.split_to(bytes.len().min(PIECE))),
            Source::Piped(reader) => ready!(reader.poll_recv(cx)),
        };
        Poll::Ready(Some(piece.map_or_else(
            || {
                self.stdin = Source::End;
                M::stdin_close()
            },
            M::stdin,
        )))
    }
}

impl<M: Message + Unpin> Stream for Input<M> {
    type Item = M;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<M>> {
        if let Some(start) = self.start.take() {
            return Poll::Ready(Some(start));
        }
        // Signals overtake input: a kill never waits behind it.
        if let Some(controls) = &mut self.controls {
            match controls.poll_recv(cx) {
                Poll::Ready(Some(control)) => return Poll::Ready(Some(M::control(control))),
                Poll::Ready(None) => self.controls = None,
                Poll::Pending => {}
            }
        }
        match self.poll_stdin(cx) {
            Poll::Ready(Some(message)) => Poll::Ready(Some(message)),
            Poll::Ready(None) if self.controls.is_none() => Poll::Ready(None),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn start() -> ExecIn {
        ExecIn {
            m: Some(exec_in::M::Start(v1::ExecStart::default())),
        }
    }

    async fn next(input: &mut Input<ExecIn>) -> exec_in::M {
        input.next().await.unwrap().m.unwrap()
    }

    #[tokio::test]
    async fn controls_overtake_input_and_the_close_comes_last() {
        let (mut input, writer, controls) = Input::new(start(), &Stdin::Piped, true);
        let mut writer = writer.unwrap();
        // More than one piece, through AsyncWrite.
        writer.write_all(&[b'x'; PIECE + 1]).await.unwrap();
        writer.shutdown().await.unwrap();
        assert!(writer.write_all(b"y").await.is_err());
        controls.signaller().signal(15).await;
        controls.resizer().resize(80, 24).await;
        assert!(matches!(next(&mut input).await, exec_in::M::Start(_)));
        assert!(matches!(next(&mut input).await, exec_in::M::Signal(signal) if signal.number == 15));
        assert!(matches!(next(&mut input).await, exec_in::M::Resize(size) if size.cols == 80));
        assert!(matches!(next(&mut input).await, exec_in::M::Stdin(data) if data.len() == PIECE));
        assert!(matches!(next(&mut input).await, exec_in::M::Stdin(data) if data.len() == 1));
        assert!(matches!(next(&mut input).await, exec_in::M::StdinClose(_)));
        // Open as long as somebody may send a signal.
        assert!(futures_util::poll!(input.next()).is_pending());
        drop(controls);
        assert!(input.next().await.is_none());
    }

    #[tokio::test]
    async fn a_writer_learns_of_the_end_of_its_call() {
        let (input, writer, controls) = Input::new(start(), &Stdin::Piped, true);
        let mut writer = writer.unwrap();
        drop(input);
        writer.closed().await;
        assert_eq!(writer.write("x").await, Err(StdinClosed));
        let error = writer.write_all(b"x").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        // Nobody waits for a program that is gone.
        controls.signaller().signal(9).await;
        Controls::none().resizer().resize(1, 1).await;
    }
}
