//! Front desk: listeners, credentials, refusals, and one file per service that turns a request into a call of the
//! domain and its answer into a reply.
//!
//! A request passes `listen` (connection, peer), `front` (request id in, stamps out), the router, and then a service or
//! `forward`. A service makes a [`Ctx`] of it and answers with a value or a [`Refusal`].
//!
//! May call: access, claim, clock, config, doctor, egress, engine (its name), journal (what a row says), link, policy, pool,
//! sandbox, sys, tasks, template, work.
//! Never inside: a decision about a sandbox.
//! Invariant 18: no client reaches AgentControl. It has no route here, and `forward` takes one exact prefix.
//! Cancel safety: a caller who leaves drops the future of its call; a forwarded call is reset in the guest at once.

mod auth;
mod claims;
pub mod desk;
mod egress;
mod filter;
mod forward;
mod front;
mod guests;
mod health;
mod listen;
mod node;
mod parse;
mod pools;
mod reason;
mod routes;
mod stream;
mod templates;
mod tls;
mod trace;

pub use self::{
    auth::{AccessNow, Ctx, Peer},
    forward::{Forward, Guest, Guests},
    front::RequestIds,
    health::{Health, reflection},
    listen::{Listener, Server, tcp, unix},
    reason::Refusal,
    routes::routes,
    tls::Certificates,
};

/// What the front desk could not open.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Nobody could connect to this address.
    #[error("cannot listen on {place}")]
    Bind {
        /// Path or address.
        place: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Another program answers there.
    #[error("{path} is in use: somebody answers on it")]
    InUse {
        /// The socket.
        path: std::path::PathBuf,
    },
    /// Something else has the socket's name; it is left alone.
    #[error("{path} is there and is no socket")]
    NotASocket {
        /// The path.
        path: std::path::PathBuf,
    },
    /// Tokens would cross a network in the clear.
    #[error("{addr} is not loopback: listen.tls is needed")]
    NeedsTls {
        /// The address.
        addr: std::net::SocketAddr,
    },
    /// A certificate or key cannot be used.
    #[error("{what} of {path} cannot be used")]
    Tls {
        /// Certificate or key.
        what: &'static str,
        /// Its file.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A descriptor that systemd passed is no listening socket.
    #[error("a socket that systemd passed cannot be used")]
    Passed(#[source] std::io::Error),
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod services_tests;
#[cfg(test)]
mod tests;
