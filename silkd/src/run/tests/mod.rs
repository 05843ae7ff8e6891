//! Exec as a client sees it: the generated client and server over an in-process HTTP/2 connection, real programs.

mod children;
mod detached;
mod ends;
mod gathered;
mod harness;
mod memory;
mod starts;
mod streams;
mod terminal;
