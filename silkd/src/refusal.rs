//! Why a call was refused or failed, before it becomes a gRPC status (`agent::reason`).
//!
//! May call: nothing.
//! Never inside: tonic.

use std::{error::Error, fmt};

use sandbox_protocol::reason::Reason;

/// A call's refusal or failure: one of the closed set of reasons, and what helps to mend it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", reason.as_str())]
pub struct Refusal {
    /// Which of the closed set.
    pub reason: Reason,
    /// What happened, in one sentence.
    pub message: String,
    /// The kernel's error number, where it was the kernel that refused.
    pub errno: Option<i32>,
    /// The path that it was about, as the guest has it.
    pub path: Option<Vec<u8>>,
}

impl Refusal {
    /// A refusal for this reason.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            errno: None,
            path: None,
        }
    }

    /// With the kernel's error number.
    #[must_use]
    pub fn with_errno(mut self, errno: i32) -> Self {
        self.errno = Some(errno);
        self
    }

    /// With the path that it was about.
    #[must_use]
    pub fn with_path(mut self, path: &[u8]) -> Self {
        self.path = Some(path.to_vec());
        self
    }
}

/// Bytes of a guest as harmless ASCII, the first `max` of them.
#[derive(Debug, Clone, Copy)]
pub struct Escaped<'a>(pub &'a [u8], pub usize);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes, max) = *self;
        let head = bytes.get(..max).unwrap_or(bytes);
        write!(f, "{}", head.escape_ascii())?;
        f.write_str(if head.len() < bytes.len() { "..." } else { "" })
    }
}

/// An error with its causes, in one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once_each() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        assert_eq!(chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
    }

    #[test]
    fn bytes_are_cut_and_made_harmless() {
        assert_eq!(Escaped(b"a\n\x1b\xff", 9).to_string(), "a\\n\\x1b\\xff");
        assert_eq!(Escaped(b"abcdef", 3).to_string(), "abc...");
    }
}
