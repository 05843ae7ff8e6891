//! One guest port, one kept HTTP/2 connection: opened by BREAK and HELLO, then calls over it, and news of its loss.
//!
//! Each link has one task (`keep`), which drives the connection and its pings; [`Link::lost`] resolves as that task
//! ends. Calls go straight from the caller's task to the connection: no queue of ours, flow control end to end.
//!
//! May call: clock, tasks.
//! Never inside: what a call says; whether the port is serial or vsock.
//! Invariant 16: all that a guest says is bounded before it is stored. Header lists, windows, streams, small frames and
//! frames without data all have a number, and a guest that passes one loses its link and nothing else.
//! Cancel safety: every future here may be dropped at any time. A dropped call resets its stream at once.

mod allowance;
mod body;
mod call;
mod greet;
mod keep;
mod local;
mod port;
mod signals;

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use h2::client::SendRequest;
use sandbox_protocol::{
    limits,
    link::{HelloError, Nonce},
    v1::LinkHello,
};
use tonic::body::Body;

pub use self::{body::LinkBody, port::Prefixed};
use self::{port::Port, signals::Signals};
use crate::{
    clock::{Clock, Tick},
    tasks,
};

/// From one ping to the next, until [`Link::pace`] says otherwise: warm stock counts as fresh for two seconds.
pub const PACE_WARM: Duration = Duration::from_secs(1);
/// The pace of a claimed sandbox: an idle guest is not woken each second.
pub const PACE_CLAIMED: Duration = Duration::from_secs(15);
/// How long a ping may stay unanswered, until [`Link::patience`] says otherwise. Generous: a guest under software
/// emulation on a busy host, or one that is paused for a capture, answers late and is well.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a link could not do.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The port broke before the guest had greeted.
    #[error("the guest's port failed before HELLO")]
    Port(#[source] std::io::Error),
    /// The guest's greeting was none.
    #[error("the guest did not greet")]
    Hello(#[source] HelloError),
    /// The guest's silkd and this build have no protocol in common.
    #[error(
        "the guest speaks agent protocols {min} to {max}, this build {} to {}",
        limits::PROTO_MIN,
        limits::PROTO_MAX
    )]
    NoCommonProto {
        /// Lowest that the guest speaks.
        min: u32,
        /// Highest that the guest speaks.
        max: u32,
    },
    /// HTTP/2 could not begin.
    #[error("HTTP/2 with the guest did not begin")]
    Preface(#[source] h2::Error),
    /// As many calls as a link carries are open ([`limits::LINK_STREAMS`]); nothing was sent.
    #[error("too many calls to this guest are open")]
    Full,
    /// The call is none that HTTP/2 can carry; nothing was sent.
    #[error("the call cannot be sent")]
    Unsendable(#[source] h2::Error),
    /// The caller's own body failed; the guest saw a cancelled call.
    #[error("the caller left while sending")]
    CallerLeft,
    /// The guest ended this one call by a reset; the link lives.
    #[error("the guest reset the call: {0}")]
    Reset(h2::Reason),
    /// The link broke, or the guest broke the rules of this one call.
    #[error("the link to the guest is lost")]
    Lost(#[source] h2::Error),
}

/// Why a link is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LostWhy {
    /// The host closed it.
    #[error("closed by the host")]
    Closed,
    /// The port ended.
    #[error("the port ended")]
    Ended,
    /// The port failed.
    #[error("the port failed: {0}")]
    Port(std::io::ErrorKind),
    /// silkd said goodbye; it never does while it serves.
    #[error("the guest's agent closed the connection")]
    Goodbye,
    /// A ping stayed unanswered.
    #[error("the guest's agent did not answer a ping in time")]
    Silent,
    /// More frames than any honest guest sends.
    #[error("the guest flooded its link")]
    Flooded,
    /// The guest broke HTTP/2.
    #[error("the guest broke the protocol: {0}")]
    Protocol(h2::Reason),
}

/// Answers calls in place of a guest, in this process.
pub trait Answer: Send + Sync + 'static {
    /// Answers one call.
    fn answer(
        &self,
        request: http::Request<Body>,
    ) -> Pin<Box<dyn Future<Output = http::Response<Body>> + Send>>;
}

/// A link that has just been opened.
#[derive(Debug)]
pub struct Opened {
    /// The link.
    pub link: Link,
    /// What the guest said of itself; not to be trusted beyond its own sandbox.
    pub hello: LinkHello,
    /// The protocol in use: the highest in common.
    pub proto: u32,
}

/// A way to call one guest. Clones are the same link; it is closed when the last one goes.
#[derive(Clone)]
pub struct Link(Arc<Inner>);

struct Inner {
    way: Way,
    signals: Arc<Signals>,
}

enum Way {
    Kept(SendRequest<Bytes>),
    Local(Arc<dyn Answer>),
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// Opens a link over a guest's port: writes BREAK once and waits for the HELLO that answers it, however long that
/// takes (the caller sets the deadline), then starts HTTP/2. The nonce must be fresh.
///
/// # Errors
/// [`LinkError::Port`], [`LinkError::Hello`], [`LinkError::NoCommonProto`], [`LinkError::Preface`].
///
/// Cancel safe: the port is dropped.
pub async fn open<T>(io: T, nonce: Nonce, clock: Clock) -> Result<Opened, LinkError>
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let (hello, io) = greet::greet(io, nonce).await?;
    let proto = sandbox_protocol::link::negotiate(&hello).ok_or(LinkError::NoCommonProto {
        min: hello.proto_min,
        max: hello.proto_max,
    })?;
    let signals = Arc::new(Signals::new(clock));
    let port = Port::new(io, Arc::clone(&signals));
    let (send, connection) = keep::settings()
        .handshake(port)
        .await
        .map_err(LinkError::Preface)?;
    // `Link::lost` is the join: it resolves when the task has ended, however that came.
    drop(tasks::spawn("link", keep::keep(connection, Arc::clone(&signals))));
    Ok(Opened {
        link: Link(Arc::new(Inner {
            way: Way::Kept(send),
            signals,
        })),
        hello,
        proto,
    })
}

impl Link {
    /// A link without a connection: `answerer`, which many links may share, answers. Costs less than 1 KiB.
    #[must_use]
    pub fn in_process(answerer: Arc<dyn Answer>, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            way: Way::Local(answerer),
            signals: Arc::new(Signals::new(clock)),
        }))
    }

    /// When the guest last answered a call or a ping, or greeted. A link in this process always answers now.
    #[must_use]
    pub fn heard(&self) -> Tick {
        match (&self.0.way, self.0.signals.lost.get()) {
            (Way::Local(_), None) => self.0.signals.clock.tick(),
            (Way::Local(_) | Way::Kept(_), _) => self.0.signals.heard(),
        }
    }

    /// Sets the time from one ping to the next. A longer one takes effect after the next ping and wakes no task.
    pub fn pace(&self, pace: Duration) {
        self.0.signals.set_pace(pace);
    }

    /// Sets how long a ping may stay unanswered before the link is lost; counts from the next ping.
    pub fn patience(&self, patience: Duration) {
        self.0.signals.set_patience(patience);
    }

    /// Waits until the link is lost, and says why. Cancel safe; any number may wait.
    pub async fn lost(&self) -> LostWhy {
        // The signals alone: whoever waits for the end does not put it off.
        let signals = Arc::clone(&self.0.signals);
        *signals.lost.wait().await
    }

    /// Closes the link: open calls fail, the port is dropped. Twice is as once. [`lost`](Self::lost) tells when it is
    /// done.
    pub fn close(&self) {
        self.0.signals.close();
        match &self.0.way {
            Way::Local(_) => self.0.signals.lose(LostWhy::Closed),
            Way::Kept(_) => {}
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("local", &matches!(self.0.way, Way::Local(_)))
            .field("streams", &self.0.signals.streams())
            .field("lost", &self.0.signals.lost.get())
            .finish()
    }
}

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
