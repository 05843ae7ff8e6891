//! Tests of the whole room.

mod arming;
mod connections;
mod framing;
mod intercept;
mod origin;
mod policy;
