//! One list of checks of the host, for `sandboxd doctor` and `Node.Doctor`: what is there is proved by use where that
//! changes nothing, and every finding names its remedy.
//!
//! May call: config, net, words.
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

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Degraded, but it works.
    Warn,
    /// The daemon cannot work like this.
    Fail,
}

impl Verdict {
    /// Lower-case text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }

    const fn to_proto(self) -> v1::Verdict {
        match self {
            Self::Ok => v1::Verdict::Ok,
            Self::Warn => v1::Verdict::Warn,
            Self::Fail => v1::Verdict::Fail,
        }
    }
}

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
