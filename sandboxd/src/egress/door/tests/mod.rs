//! Tests of the whole room.

mod arming;
mod connections;
mod framing;
mod messages;
mod policy;
mod sockets;
