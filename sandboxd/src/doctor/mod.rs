//! One list of checks of the host, for `sandboxd doctor` and `Node.Doctor`: what is there is proved by use where that
//! changes nothing, and every finding names its remedy.
//!
//! May call: config, net, verdict, words.
//! Never inside: a change of anything; a check that only one of the two callers has.
//! Cancel safety: nothing here waits for more than the kernel.

mod facts;
mod judge;
mod look;
#[cfg(test)]
mod tests;

use sandbox_protocol::v1;
use serde::Serialize;

pub use self::{
    facts::{Cgroup, Facts, Folder, Given, Net},
    judge::judge,
    look::look,
};
pub use crate::verdict::Verdict;

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do; empty where all is well.
    pub remedy: String,
}

impl Check {
    /// As the API has it.
    #[must_use]
    pub fn to_proto(&self) -> v1::Check {
        v1::Check {
            name: self.name.to_owned(),
            verdict: self.verdict.to_proto().into(),
            found: self.found.clone(),
            remedy: self.remedy.clone(),
        }
    }
}
