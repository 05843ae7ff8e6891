//! Tests of the whole room.

mod arming;
mod connections;
mod framing;
mod policy;
mod secrets;
mod ways;
