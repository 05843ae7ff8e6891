//! Exec and sessions as a client sees them: the generated client and server over an in-process HTTP/2 connection, real programs.

mod children;
mod detached;
mod ends;
mod gathered;
mod harness;
mod memory;
mod sessions;
mod starts;
mod streams;
mod terminal;
