//! What a user of the daemon sees: through the SDK, through `sandboxctl`, and through its files and signals. Engine stub,
//! with a real silkd per sandbox unless a test wants ten thousand of them.
//!
//! Codes such as `c02_` are those of the kinds of failure in CONTRIBUTING.md.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]
#![expect(clippy::too_many_lines, reason = "a table of cases is read whole")]

mod access;
mod agent;
mod claims;
mod commands;
mod disk;
mod doors;
mod ending;
mod examples;
mod failing;
mod files;
mod intercept;
mod node;
mod ports;
mod processes;
mod reflect;
mod restart;
mod rows;
mod sessions;
mod shell;
mod stock;
mod storm;
mod streams;
mod tls;
mod tools;
