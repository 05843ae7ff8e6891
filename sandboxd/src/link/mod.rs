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
mod details;
mod error;
mod greet;
mod keep;
mod local;
mod open;
mod port;
mod signals;

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use h2::client::SendRequest;
use sandbox_protocol::v1::LinkHello;
use tonic::body::Body;

use self::signals::Signals;
pub use self::{
    body::LinkBody,
    error::{LinkError, LostWhy},
    greet::greet,
    open::open,
    port::Prefixed,
};
use crate::clock::{Clock, Tick};

/// From one ping to the next, until [`Link::pace`] says otherwise: warm stock counts as fresh for two seconds.
pub const PACE_WARM: Duration = Duration::from_secs(1);
/// The pace of a claimed sandbox: an idle guest is not woken each second.
pub const PACE_CLAIMED: Duration = Duration::from_secs(15);
/// How long a ping may stay unanswered, until [`Link::patience`] says otherwise. Generous: a guest under software
/// emulation on a busy host, or one that is paused for a capture, answers late and is well.
pub const PATIENCE: Duration = Duration::from_secs(30);

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

    /// Sets the time from one ping to the next, 10 ms to a year. A longer one takes effect after the next ping and wakes
    /// no task.
    pub fn pace(&self, pace: Duration) {
        self.0.signals.set_pace(pace);
    }

    /// Sets how long a ping may stay unanswered before the link is lost, 10 ms to a year; a ping in flight included. For a
    /// guest about to be paused: [`Duration::MAX`].
    pub fn patience(&self, patience: Duration) {
        self.0.signals.set_patience(patience);
    }

    /// Waits until the link is lost, and says why. Cancel safe; any number may wait, and waiting keeps no link open.
    pub fn lost(&self) -> impl Future<Output = LostWhy> + Send + use<> {
        let signals = Arc::clone(&self.0.signals);
        async move { *signals.lost.wait().await }
    }

    /// Closes the link: open calls fail (in process: those not answered yet), the port is dropped. Twice is as once.
    /// [`lost`](Self::lost) tells when it is done.
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
