//! A link's one task: drives the connection, pings, and says at the end why it ended.

use std::{
    future::{Future as _, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use h2::{
    Ping, PingPong,
    client::{Builder, Connection},
};
use sandbox_protocol::limits;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep},
};

use super::{LostWhy, port::Port, signals::Signals};

/// Resets by the host that `h2` remembers, so that what a guest sent before it learned of them is no fault of it. All
/// calls of a link can be cancelled at once.
const RESETS: usize = limits::LINK_STREAMS as usize;
/// Compressed header state that a guest may make the host keep.
const HEADER_TABLE: u32 = 4 * 1024;

pub(super) fn settings() -> Builder {
    let mut settings = Builder::new();
    settings
        .initial_window_size(limits::WIDE_WINDOW)
        .initial_connection_window_size(limits::HOST_CONNECTION_WINDOW)
        .max_frame_size(limits::LINK_FRAME)
        .max_header_list_size(limits::HEADER_LIST)
        .header_table_size(HEADER_TABLE)
        .max_send_buffer_size(limits::SEND_BUFFER)
        .max_concurrent_reset_streams(RESETS)
        .enable_push(false);
    settings
}

/// Says that the link is lost however its task ends, also by a panic or with the runtime.
struct Ending(Arc<Signals>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.lose(LostWhy::Closed);
    }
}

pub(super) async fn keep<T>(connection: Connection<Port<T>, Bytes>, signals: Arc<Signals>)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let ending = Ending(Arc::clone(&signals));
    // Boxed: about 2 KiB, and dropped before the loss is told.
    let why = drive(Box::pin(connection), &signals).await;
    tracing::debug!(%why, "link over");
    signals.lose(why);
    drop(ending);
}

async fn drive<T>(mut connection: Pin<Box<Connection<Port<T>, Bytes>>>, signals: &Signals) -> LostWhy
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut pings = connection.ping_pong();
    let mut timer = std::pin::pin!(sleep(signals.pace()));
    let mut is_wide = true;
    // When the ping in flight was sent.
    let mut asked: Option<Instant> = None;
    loop {
        tokio::select! {
            biased;
            () = signals.wake.notified() => {
                if signals.is_closing() {
                    return LostWhy::Closed;
                }
                let due = match asked {
                    Some(asked) => asked + signals.patience(),
                    None => timer.deadline().min(Instant::now() + signals.pace()),
                };
                timer.as_mut().reset(due);
            }
            result = poll_fn(|cx| poll(&mut connection, &mut is_wide, signals, cx)) => return cause(result, signals),
            () = pong(&mut pings), if asked.is_some() => {
                asked = None;
                signals.hear();
                timer.as_mut().reset(Instant::now() + signals.pace());
            }
            () = &mut timer => {
                if asked.is_some() {
                    return LostWhy::Silent;
                }
                let now = Instant::now();
                asked = Some(now);
                signals.pinged();
                if let Some(pings) = &mut pings {
                    // One is in flight at most, so it fails only with the connection, which reports that itself.
                    drop(pings.send_ping(Ping::opaque()));
                }
                timer.as_mut().reset(now + signals.patience());
            }
        }
    }
}

/// Drives the connection, and has the windows as wide as the number of its streams allows. What is told of them is sent
/// before the streams that were seen to be too many, but for those that another thread opens between the look and the
/// sending, and those of a link so young that the guest has not acknowledged its first settings. They are held by the
/// connection's window, as is a guest that acknowledges nothing and so stalls itself.
fn poll<T>(
    connection: &mut Pin<Box<Connection<Port<T>, Bytes>>>,
    is_wide: &mut bool,
    signals: &Signals,
    cx: &mut Context<'_>,
) -> Poll<Result<(), h2::Error>>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    turn(connection, is_wide, signals);
    loop {
        let polled = connection.as_mut().poll(cx);
        // The acknowledgement may have come just now.
        if polled.is_ready() || !turn(connection, is_wide, signals) {
            return polled;
        }
    }
}

/// Changes the windows if they are to be changed and can be: not while an earlier change is not acknowledged.
fn turn<T>(connection: &mut Connection<Port<T>, Bytes>, is_wide: &mut bool, signals: &Signals) -> bool
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let want = signals.is_wide(*is_wide);
    let changes = want != *is_wide && connection.set_initial_window_size(window(want)).is_ok();
    if changes {
        *is_wide = want;
    }
    changes
}

const fn window(wide: bool) -> u32 {
    if wide {
        limits::WIDE_WINDOW
    } else {
        limits::STREAM_WINDOW
    }
}

/// Resolves with the answer to the ping in flight; never, if the connection is over, which is told elsewhere.
async fn pong(pings: &mut Option<PingPong>) {
    let answered = match pings {
        Some(pings) => poll_fn(|cx| pings.poll_pong(cx)).await.is_ok(),
        None => false,
    };
    if !answered {
        std::future::pending::<()>().await;
    }
}

fn cause(result: Result<(), h2::Error>, signals: &Signals) -> LostWhy {
    if let Some(cause) = signals.cause.get() {
        return *cause;
    }
    match result {
        Ok(()) => LostWhy::Ended,
        Err(error) => match (error.reason(), error.get_io()) {
            (Some(h2::Reason::ENHANCE_YOUR_CALM), _) => LostWhy::Flooded,
            (Some(reason), _) => LostWhy::Protocol(reason),
            (None, Some(io)) => LostWhy::Port(io.kind()),
            (None, None) => LostWhy::Ended,
        },
    }
}
