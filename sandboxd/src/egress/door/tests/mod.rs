//! Tests of the whole room.

mod arming;
mod connections;
mod framing;
mod intercept;
mod messages;
mod origin;
mod policy;
mod secrets;
mod sockets;
mod splice;
mod unread;
mod ways;
