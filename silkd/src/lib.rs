//! x

pub mod agent;
pub mod clock;
pub mod gate;
pub mod reap;
pub mod refusal;
pub mod run;
pub mod sys;
pub mod tasks;
