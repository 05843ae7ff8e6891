//! The process: what the command line and the environment say, what it prints, what systemd is told.
//!
//! May call: config, doctor, words.
//! Never inside: logic that a test would want.
//! Cancel safety: nothing here waits.

pub mod args;
pub mod notify;
pub mod print;
