//! Tests of the whole room.

mod arming;
mod connections;
mod framing;
mod messages;
mod policy;
mod secrets;
mod sockets;
mod ways;
