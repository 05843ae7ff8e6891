//! silkd: the agent inside every guest. PID 1, programs, and the link to the host.
//!
//! The binary is `main.rs`, which calls [`main`]. As PID 1 it boots the guest (`boot`) and serves the host on the
//! guest's ports; with `--serve PATH` it serves the same on a Unix socket and changes nothing of the machine.

pub mod agent;
pub mod boot;
pub mod clock;
pub mod conditions;
pub mod control;
pub mod door;
pub mod events;
pub mod fs;
pub mod gate;
pub mod link;
pub mod places;
pub mod reap;
pub mod refusal;
pub mod relay;
pub mod run;
pub mod scratch;
pub mod serve;
pub mod server;
pub mod start;
pub mod sys;
pub mod tasks;
pub mod tools;

pub use start::main;
