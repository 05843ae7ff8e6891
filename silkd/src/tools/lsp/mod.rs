//! Language servers.
pub mod header;
