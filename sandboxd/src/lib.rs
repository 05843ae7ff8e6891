//! sandboxd: keeps warm microVM clones and hands one over per claim.
//!
//! Rooms by storey; a room calls only lower storeys, and there only the rooms that its own page lists
//! (ARCHITECTURE.md). The binary is `main.rs`, which calls [`main`].

pub mod access;
pub mod admission;
pub mod agent;
pub mod api;
pub mod ca;
pub mod claim;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod disk;
pub mod doctor;
pub mod egress;
pub mod engine;
pub mod faults;
pub mod feed;
pub mod image;
pub mod journal;
pub mod link;
pub mod names;
pub mod net;
pub mod policy;
pub mod pool;
pub mod random;
pub mod recover;
pub mod sandbox;
pub mod sys;
pub mod tasks;
pub mod telemetry;
pub mod template;
pub mod verdict;
pub mod words;
pub mod work;

pub use daemon::main;
