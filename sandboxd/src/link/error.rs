//! What can go wrong with a link, and how it can end.

use std::fmt;

use sandbox_protocol::{limits, link::HelloError};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostWhy {
    /// The host closed it.
    Closed,
    /// The port ended.
    Ended,
    /// The port failed.
    Port(std::io::ErrorKind),
    /// silkd said goodbye; it never does while it serves.
    Goodbye,
    /// A ping stayed unanswered.
    Silent,
    /// More frames than any honest guest sends.
    Flooded,
    /// The guest broke HTTP/2.
    Protocol(h2::Reason),
}

impl fmt::Display for LostWhy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by the host"),
            Self::Ended => f.write_str("the port ended"),
            Self::Port(what) => write!(f, "the port failed: {what}"),
            Self::Goodbye => f.write_str("the guest's agent closed the connection"),
            Self::Silent => f.write_str("the guest's agent did not answer a ping in time"),
            Self::Flooded => f.write_str("the guest flooded its link"),
            Self::Protocol(what) => write!(f, "the guest broke the protocol: {what}"),
        }
    }
}
