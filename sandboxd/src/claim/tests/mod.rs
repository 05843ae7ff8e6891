//! Claims over the fake engine.

mod refusals;
pub(crate) mod rooms;
