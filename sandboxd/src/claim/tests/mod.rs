//! Claims over the fake engine.

pub(crate) mod rooms;
