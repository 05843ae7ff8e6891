//! x

pub mod exec;
pub mod reason;
