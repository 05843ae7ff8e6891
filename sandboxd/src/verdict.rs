//! How a check came out, whoever makes it: the doctor, or the look at the CA's folder.
//!
//! May call: nothing.
//! Never inside: a check.

use sandbox_protocol::v1;
use serde::Serialize;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, but is degraded or wants to be looked at.
    Warn,
    /// It does not work like this, or is open to others.
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

    /// As the API has it.
    #[must_use]
    pub const fn to_proto(self) -> v1::Verdict {
        match self {
            Self::Ok => v1::Verdict::Ok,
            Self::Warn => v1::Verdict::Warn,
            Self::Fail => v1::Verdict::Fail,
        }
    }
}
