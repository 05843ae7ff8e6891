//! Tokens: secrets that open a sandbox or the API.
//!
//! May call: error.
//! Never inside: a Display, or any other way into a log.

use std::fmt;

use sandbox_protocol::metadata;
use tonic::metadata::{Ascii, MetadataValue};
use zeroize::Zeroizing;

use crate::error::Error;

/// Longest token that is taken, in bytes; the daemon's have 47.
const LONGEST: usize = 1024;

/// A claim's token (`sbt_..`) or an access token (`sba_..`). Redacted in Debug, zeroed when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Zeroizing<String>);

impl Token {
    /// Takes a token as text.
    ///
    /// # Errors
    /// FIELD_INVALID if it is empty, longer than 1 KiB or not printable ASCII without spaces.
    pub fn new(text: impl Into<String>) -> Result<Self, Error> {
        let text = Zeroizing::new(text.into());
        if text.is_empty() || text.len() > LONGEST || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::invalid(
                "token",
                "1 to 1024 printable ASCII characters".to_owned(),
            ));
        }
        Ok(Self(text))
    }

    /// The secret itself: for storing it, never for a log.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// As the value of `authorization`.
    pub(crate) fn bearer(&self) -> MetadataValue<Ascii> {
        let text = Zeroizing::new([metadata::BEARER, &self.0].concat());
        let mut value = MetadataValue::try_from(text.as_str()).expect("`new` lets only graphic ASCII in");
        value.set_sensitive(true);
        value
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_header_can_hold_and_never_in_debug() {
        for bad in ["", "a b", "a\nb", "\u{e4}", &"x".repeat(LONGEST + 1)] {
            assert!(Token::new(bad).is_err(), "{bad:?}");
        }
        let token = Token::new("sbt_secret").unwrap();
        assert!(!format!("{token:?} {:?}", token.bearer()).contains("secret"));
        assert_eq!(token.bearer().to_str().unwrap(), "Bearer sbt_secret");
    }
}
