//! Ids: 128 random bits with a prefix that names the kind, as text `sb_` + 32 lower-case hexadecimal digits.
//!
//! An id says nothing about a place on the host: host names come from slots, never from an id.

use std::{fmt, str::FromStr};

/// Text that is not an id of the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an id of this kind: expected `{prefix}` and 32 lower-case hexadecimal digits")]
pub struct IdError {
    prefix: &'static str,
}

fn parse(text: &str, prefix: &'static str) -> Result<u128, IdError> {
    let error = IdError { prefix };
    let hex = text.strip_prefix(prefix).ok_or(error)?;
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if hex.len() != 32 || !hex.bytes().all(lower) {
        return Err(error);
    }
    u128::from_str_radix(hex, 16).map_err(|_digits| error)
}

fn write(f: &mut fmt::Formatter<'_>, prefix: &str, bits: u128) -> fmt::Result {
    let mut text = [0_u8; 32];
    let digit = |half: u8| match half {
        0..=9 => b'0' + half,
        _ => b'a' + half - 10,
    };
    for (pair, byte) in text.as_chunks_mut::<2>().0.iter_mut().zip(bits.to_be_bytes()) {
        *pair = [digit(byte >> 4), digit(byte & 15)];
    }
    f.write_str(prefix)?;
    f.write_str(std::str::from_utf8(&text).map_err(|_utf8| fmt::Error)?)
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u128);

        impl $name {
            /// What the text of this kind begins with.
            pub const PREFIX: &'static str = $prefix;

            /// Makes an id of 128 random bits; randomness is the caller's.
            #[must_use]
            pub const fn from_random(bits: [u8; 16]) -> Self {
                Self(u128::from_be_bytes(bits))
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                parse(text, Self::PREFIX).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write(f, Self::PREFIX, self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    )*};
}

ids! {
    /// A sandbox: one guest from claim to release.
    SandboxId = "sb_";
    /// A claim: the transaction that made a sandbox somebody's.
    ClaimId = "cl_";
    /// One capture of a template, for one lane and size.
    TemplateId = "tp_";
    /// A checkpoint of a running sandbox.
    CheckpointId = "ck_";
    /// One call of the API.
    RequestId = "rq_";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let id = SandboxId::from_random([0xab; 16]);
        let text = id.to_string();
        assert_eq!(text, format!("sb_{}", "ab".repeat(16)));
        assert_eq!(text.parse::<SandboxId>(), Ok(id));
        assert_eq!(
            ClaimId::from_random([0; 16]).to_string(),
            format!("cl_{}", "0".repeat(32))
        );
    }

    #[test]
    fn only_the_one_spelling_is_taken() {
        for bad in [
            "",
            "sb_",
            "sb_ab",
            &format!("cl_{}", "ab".repeat(16)),
            &format!("sb_{}", "AB".repeat(16)),
            &format!("sb_+{}", "a".repeat(31)),
            &format!("sb_{}", "ab".repeat(17)),
            &format!("sb_{}\n", "ab".repeat(16)),
        ] {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad:?}");
        }
    }
}
