//! kill -9 at each step of each transition, then what the next daemon makes of it, compared with a model of what was
//! answered. Stub engine with real silkd processes; the daemon dies at its failpoints (`sandboxd::faults`).

#![cfg(test)]

mod damage;
mod model;
mod recovery;
mod steps;
mod templates;
